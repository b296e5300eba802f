"""Samples for a baseline or an evaluation, drawn by several processes."""

from __future__ import annotations

from collections.abc import Sequence

from visual_grpo.config import SamplerConfig
from visual_grpo.policies.adapters import AdapterSet
from visual_grpo.policies.family import Model
from visual_grpo.sharing.workers import Workers, blocks
from visual_grpo.types import PromptRecord, Sample


class SharedModel:
    """Satisfies ``types.AdaptedModel``; ``own`` draws the first process's share."""

    def __init__(self, own: Model, workers: Workers) -> None:
        self.own, self.workers = own, workers

    @property
    def adapters(self) -> AdapterSet:
        return self.own.adapters

    def generate(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> Sequence[Sample]:
        """As the model's: a sample depends on its record and seed, wherever it is drawn."""
        self.workers.send_adapters()
        (_, mine), *shares = blocks(len(records), self.workers.count)
        asked = [
            (other, other.ask("generate", records=list(records[part]), seeds=list(seeds[part]), sampler=_tree(sampler)))
            for other, (start, count) in zip(self.workers.others, shares, strict=True)
            if count
            for part in [slice(start, start + count)]
        ]
        with self.workers.together(other for other, _ in asked):
            samples = list(self.own.generate(records[:mine], seeds[:mine], sampler)) if mine else []
        for other, request in asked:
            samples += other.answer(request)
        return samples


def _tree(sampler: SamplerConfig) -> dict[str, float | None]:
    return sampler.model_dump()
