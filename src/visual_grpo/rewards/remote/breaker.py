"""A circuit breaker: stops asking a server that only fails."""

from __future__ import annotations

from dataclasses import dataclass

from visual_grpo.rewards.remote.faults import RefusedError


@dataclass
class CircuitBreaker:
    """Counts requests that failed for good one after another, over all calls."""

    stop_after: int
    """0 = never."""
    failed: int = 0

    def success(self) -> None:
        """A request was answered."""
        self.failed = 0

    def failure(self, reason: str) -> None:
        """A request failed for good.

        Raises:
            RefusedError: this was the last one that is borne.
        """
        self.failed += 1
        if self.stop_after and self.failed >= self.stop_after:
            raise RefusedError(
                f"{self.failed} requests in a row failed for good (stop_after: {self.stop_after}), so that no more are"
                f" sent. The last error: {reason}"
            )
