"""A process that joins the first one of a test: ``python -m tests.sharing.joined PORT SECRET RANK FACTS``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.sharing.build import SeededTokens, toys
from visual_grpo.sharing.joining import join
from visual_grpo.sharing.serving import serve
from visual_grpo.sharing.worker import Trained
from visual_grpo.types import PromptRecord, Rollout


class Slow(SeededTokens):
    """Takes a minute for a rollout."""

    def rollout(self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator) -> Rollout[Tensor]:
        for _ in range(600):
            time.sleep(0.1)
        raise AssertionError("nobody waits so long")


def slow(kind: str) -> Trained:
    return Trained(policies={"toy": Slow()})


def main(port: str, secret: str, rank: str, facts: str) -> int:
    address = ("127.0.0.1", int(port))
    connection = join(lambda: address, secret.encode, json.loads(facts), rank=int(rank), seconds=20)
    return serve(connection, {"toys": toys, "slow": slow}, here=2, name=f"rank {rank}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
