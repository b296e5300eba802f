"""Which prompts a step sees: a function of the seed and of how many were drawn before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from visual_grpo.types import PromptRecord


class PromptOrder:
    """Endless passes over the prompts, each pass in another order; one draw holds prompts of one kind.

    Prompts whose tensors differ in shape (another number of source images) are of different kinds and cannot share
    a batch. Each draw takes the kind that is furthest behind in its passes, so that all are seen equally often.
    ``positions`` (prompts drawn so far of each kind) is the whole state of an order.
    """

    def __init__(self, kinds: Sequence[int], seed: int, positions: Mapping[str, int] | None = None) -> None:
        """``kinds``: one for each prompt; ``positions``: those of an order to continue, by the kind's name."""
        if not kinds:
            raise ValueError("there are no prompts to draw from")
        self.seed = seed
        self._members = {kind: [i for i, own in enumerate(kinds) if own == kind] for kind in sorted(set(kinds))}
        self.positions = {str(kind): (positions or {}).get(str(kind), 0) for kind in self._members}
        self._passes: dict[int, tuple[int, list[int]]] = {}

    @classmethod
    def over(
        cls, prompts: Iterable[PromptRecord], seed: int, positions: Mapping[str, int] | None = None
    ) -> PromptOrder:
        """Of records by their number of source images. Reads every record once."""
        return cls([len(prompt.source_images) for prompt in prompts], seed, positions)

    def draw(self, count: int) -> list[int]:
        """Indices of the next ``count`` prompts."""
        kind = min(self._members, key=lambda kind: self.positions[str(kind)] / len(self._members[kind]))
        members, start = self._members[kind], self.positions[str(kind)]
        drawn = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, len(members))
            drawn.append(members[self._order(kind, epoch)[offset]])
        self.positions[str(kind)] += count
        return drawn

    def _order(self, kind: int, epoch: int) -> list[int]:
        if self._passes.get(kind, (None, []))[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed << 24) + epoch)
            self._passes[kind] = epoch, torch.randperm(len(self._members[kind]), generator=generator).tolist()
        return self._passes[kind][1]
