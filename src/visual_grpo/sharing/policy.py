"""A policy whose samples and gradients come from several processes; to its trainer it is like any other.

Shapes: B rows of a rollout, b of them, S decision steps, s of a chunk.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, nn

from visual_grpo.hardware import shards
from visual_grpo.policies.seeds import share_of_seeds
from visual_grpo.sharing.messages import Packed
from visual_grpo.sharing.streams import Here, Stream, There, Together
from visual_grpo.sharing.workers import Remote, Workers, blocks
from visual_grpo.types import JointPolicy, JointRollout, Policy, PromptRecord, ReplayChunk, Rollout

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SharedTrajectory:
    """The trajectories of a rollout's parts, each of neighbouring rows."""

    parts: Sequence[Any]
    """The first process's own, and a `Packed` of each other's."""
    names: Sequence[str]
    """By which a process that has a part knows it."""
    sizes: Sequence[int]
    """Rows of each part."""


class SharedPolicy(Generic[T]):
    """Satisfies ``types.Policy[SharedTrajectory]``; ``own`` does the first process's share."""

    def __init__(self, module: str, own: Policy[T], workers: Workers) -> None:
        self.module, self.own, self.workers = module, own, workers
        self._held: dict[str, int] = {}
        """Part -> the process that has it, 0 = the first."""
        self._gone: list[str] = []
        """Parts of trajectories that nothing refers to any more."""
        run = uuid4().hex  # A checkpoint has names, too.
        self._names = (f"{run} {number}" for number in itertools.count())
        workers.follow(module, own)

    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator
    ) -> Rollout[SharedTrajectory]:
        """As the policy's, of the same samples as by one process."""
        names = self.new_names()

        def there(other: Remote, number: int, chosen: Sequence[PromptRecord], share: list[int]) -> int:
            return other.ask(
                "roll_out",
                module=self.module,
                name=names[number],
                prompts=list(chosen),
                group_size=group_size,
                generator=generator.get_state(),
                share=share,
            )

        parts = shared_out(self.workers, prompts, there, lambda chosen: self.own.rollout(chosen, group_size, generator))
        return self.joined(parts, names)

    def replay(self, trajectory: Any, rows: Tensor) -> Iterator[ReplayChunk]:
        """All parts of ``rows`` at the same time; their order is that of ``rows``."""
        self.workers.send_adapters()
        if not isinstance(trajectory, SharedTrajectory):  # From a checkpoint of one process.
            yield from self._chunks([Here(self.own.replay(trajectory, rows))], torch.arange(len(rows)))
            return
        streams, places = [], []
        for number, (start, size) in enumerate(_ranges(trajectory.sizes)):
            mine = ((rows >= start) & (rows < start + size)).nonzero()[:, 0]
            if len(mine):
                streams.append(self._stream(trajectory, number, rows[mine] - start))
                places.append(mine)
        yield from self._chunks(streams, torch.cat(places).argsort())

    def _chunks(self, streams: Sequence[Stream], order: Tensor) -> Iterator[ReplayChunk]:
        while True:
            for stream in streams:
                stream.ask()
            with self.workers.together(stream.other for stream in streams):
                for stream in streams:
                    stream.compute()
            chunks = [stream.chunk() for stream in streams]
            found = [chunk for chunk in chunks if chunk is not None]
            if not found:
                return
            kl = [chunk.kl for chunk in found if chunk.kl is not None]
            log_probs = torch.cat([chunk.log_probs for chunk in found])[order]
            yield ReplayChunk(
                steps=found[0].steps,
                log_probs=Together.apply(log_probs, self.workers, streams) if shards.active() else log_probs,
                kl=torch.cat(kl)[order] if kl else None,
            )

    def micro_batches(self, trajectory: Any, rows: Tensor, size: int | None) -> list[Tensor]:
        """``rows`` in batches of at most ``size`` in each process."""
        if not isinstance(trajectory, SharedTrajectory):
            return list(rows.split(size or len(rows)))
        parts = []
        for start, count in _ranges(trajectory.sizes):
            mine = rows[(rows >= start) & (rows < start + count)]
            parts.append(mine.split(size or max(1, len(mine))) if len(mine) else ())
        together = itertools.zip_longest(*parts)
        return [torch.cat([own for own in batch if own is not None]) for batch in together]

    def begin_gradient(self) -> None:
        """Nothing is left in the other processes of a gradient that was broken off."""
        for other in self.workers.others:
            other.tell("begin", module=self.module)

    def gradients_elsewhere(self) -> Iterator[Sequence[Tensor | None]]:
        """All are asked before the first answers."""
        asked = [(other, other.ask("gradients", module=self.module)) for other in self.workers.others]
        for other, request in asked:
            yield other.answer(request)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self.own.trainable_parameters()

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return self.own.adapter_state_dict()

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.own.load_adapter_state_dict(state)

    def new_names(self) -> list[str]:
        """Of the parts of the next rollout, one for each process; drops those that are not needed any more."""
        gone, self._gone = self._gone, []
        for number, other in enumerate(self.workers.others, 1):
            there = [name for name in gone if self._held.get(name) == number]
            if there:
                other.tell("drop", names=there)
        for name in gone:
            self._held.pop(name, None)
        return [next(self._names) for _ in range(self.workers.count)]

    def joined(self, parts: Sequence[tuple[int, Rollout[Any]]], names: Sequence[str]) -> Rollout[SharedTrajectory]:
        """One rollout of the processes' parts, each with its process's number; 0 is the first."""
        numbers, rollouts = zip(*parts, strict=True)
        self._held |= {names[number]: number for number in numbers}
        sizes = [len(own.samples) for own in rollouts]
        trajectory = SharedTrajectory(
            parts=[own.trajectory for own in rollouts], names=[names[number] for number in numbers], sizes=sizes
        )
        weakref.finalize(trajectory, self._gone.extend, trajectory.names)
        return Rollout(
            prompts=[prompt for own in rollouts for prompt in own.prompts],
            samples=[sample for own in rollouts for sample in own.samples],
            trajectory=trajectory,
            log_probs=torch.cat([own.log_probs for own in rollouts]),
            mask=torch.cat([own.mask for own in rollouts]),
            stats=_stats_of_all([own.stats for own in rollouts], sizes),
            rounding=max(own.rounding for own in rollouts),
        )

    def _stream(self, trajectory: SharedTrajectory, number: int, rows: Tensor) -> Stream:
        name, part = trajectory.names[number], trajectory.parts[number]
        holder = self._held.get(name)
        if holder is None:  # From a checkpoint.
            holder = number % self.workers.count if isinstance(part, Packed) else 0
            self._held[name] = holder
            weakref.finalize(trajectory, self._gone.append, name)
            if holder:
                self.workers.others[holder - 1].tell("hold", name=name, trajectory=part)
        if holder:
            return There(self.workers.others[holder - 1], self.module, name, rows)
        device = self.trainable_parameters()[0].device
        return Here(self.own.replay(part.unpacked(device) if isinstance(part, Packed) else part, rows))


class SharedJointPolicy:
    """Satisfies ``types.JointPolicy``."""

    def __init__(self, own: JointPolicy, outer: SharedPolicy[Any], inner: SharedPolicy[Any], workers: Workers) -> None:
        self.own, self.stages, self.workers = own, (outer, inner), workers

    def joint_rollout(
        self, prompts: Sequence[PromptRecord], outer_size: int, inner_size: int, generator: torch.Generator
    ) -> JointRollout:
        """As the policy's, of the same samples as by one process."""
        names = [stage.new_names() for stage in self.stages]

        def there(other: Remote, number: int, chosen: Sequence[PromptRecord], share: list[int]) -> int:
            return other.ask(
                "roll_out_jointly",
                names=[own[number] for own in names],
                prompts=list(chosen),
                sizes=[outer_size, inner_size],
                generator=generator.get_state(),
                share=share,
            )

        def here(chosen: Sequence[PromptRecord]) -> list[Rollout[Any] | None]:
            joint = self.own.joint_rollout(chosen, outer_size, inner_size, generator)
            return [joint.outer, joint.inner]

        parts = shared_out(self.workers, prompts, there, here)
        outer, inner = (
            stage.joined([(number, own[which]) for number, own in parts], names[which])
            if parts[0][1][which] is not None
            else None
            for which, stage in enumerate(self.stages)
        )
        return JointRollout(outer=outer, inner=inner)


def shared_out(
    workers: Workers,
    prompts: Sequence[PromptRecord],
    there: Callable[[Remote, int, Sequence[PromptRecord], list[int]], int],
    here: Callable[[Sequence[PromptRecord]], Any],
) -> list[tuple[int, Any]]:
    """Whole prompts for every process, as evenly as they go; (number of the process, what came of it) of each that got
    any."""
    workers.send_adapters()
    shares = [(number, *block) for number, block in enumerate(blocks(len(prompts), workers.count)) if block[1]]
    asked = [
        (
            number,
            there(workers.others[number - 1], number, prompts[start : start + count], [start, count, len(prompts)]),
        )
        for number, start, count in shares[1:]
    ]
    _, _, count = shares[0]
    busy = [workers.others[number - 1] for number, _ in asked]
    with workers.together(busy), share_of_seeds(0, count, len(prompts)):
        mine = here(prompts[:count])
    return [(0, mine), *((number, workers.others[number - 1].answer(request)) for number, request in asked)]


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(sum(sizes[:number]), size) for number, size in enumerate(sizes)]


def _stats_of_all(stats: Sequence[Mapping[str, float]], rows: Sequence[int]) -> dict[str, float]:
    """Seconds of the slowest, speeds together, and means over the rows."""
    if len(stats) == 1:
        return dict(stats[0])
    found = {}
    for name in stats[0]:
        values = [own[name] for own in stats]
        if name.startswith("seconds/"):
            found[name] = max(values)
        elif name.startswith("speed/"):
            found[name] = sum(values)
        else:
            found[name] = sum(value * count for value, count in zip(values, rows, strict=True)) / sum(rows)
    return found
