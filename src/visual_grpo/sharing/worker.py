"""What another process does for the first one: it has the model too, and answers requests until it is told to end."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from visual_grpo.config import SamplerConfig
from visual_grpo.errors import user_error
from visual_grpo.faults import is_out_of_memory, machine_fault
from visual_grpo.grpo.gradient_sums import GradientSums
from visual_grpo.hardware import shards
from visual_grpo.hardware.parallel import share_cores
from visual_grpo.hardware.shards import Meeting
from visual_grpo.policies.seeds import share_of_seeds
from visual_grpo.sharing.frames import Channel
from visual_grpo.sharing.messages import Messages, Packed
from visual_grpo.types import JointPolicy, Policy, PromptRecord, ReplayChunk, Rollout, Sample, SampleGenerator

MEETING = "meeting"
"""The argument that says where processes meet that have parts of one model."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The first process decides what becomes of a run."""
FAILED, BEREFT = 1, 2
"""Exit codes: of itself, and as another process has ended."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a process trains with."""

    policies: Mapping[str, Policy[Any]]
    """By module."""
    joint: JointPolicy | None = None
    model: SampleGenerator | None = None
    device: str = "cpu"


P = ParamSpec("P")
R = TypeVar("R")
Build = Callable[..., Trained]
"""A function of a module, called with keyword arguments that are JSON, once in each process."""


def work(connection: Channel, count: int, build: Build, arguments: Mapping[str, Any]) -> None:
    """The main function of one of ``count`` processes. It ends with the first one, whatever that dies of.

    Args:
        arguments: of ``build``; beside them the `MEETING`, if there is one.
    """
    share_cores(count)
    for stop in IGNORED:
        signal.signal(stop, signal.SIG_IGN)
    own = dict(arguments)
    meeting = own.pop(MEETING, None)
    try:
        if meeting is not None:
            shards.join(Meeting(**meeting), torch.device(own["device"]))
        _answer_all(connection, build, own)
    except shards.LostPeerError as error:  # Whoever waits for this process learns of it by its end.
        os._exit(FAILED if is_out_of_memory(error) else BEREFT)
    except (EOFError, OSError):  # The first process is gone.
        os._exit(FAILED)
    finally:
        shards.leave()


def _answer_all(connection: Channel, build: Build, arguments: Mapping[str, Any]) -> None:
    messages = Messages(connection)
    worker: Worker | None = None
    while True:
        request = messages.receive() if worker is not None else {"do": "start"}
        try:
            if worker is None:
                worker, answer = Worker(build(**arguments)), None
            else:
                answer = getattr(worker, request.pop("do"))(**request)
            messages.send({"answer": answer})
        except shards.LostPeerError as error:
            if is_out_of_memory(error):  # Of this process: else another one has the reason.
                messages.send(_told(error))
            raise
        except Exception as error:  # Of any kind: the first process raises it.
            messages.send(_told(error))
            if worker is None:
                return


def _told(error: Exception) -> dict[str, Any]:
    """What the first process raises; called while ``error`` is handled."""
    fault, known = machine_fault(error), user_error(error)
    # A model that could not be loaded for want of memory is not damaged, as the UserError then says.
    expected = fault if known is None or is_out_of_memory(error) else str(known)
    return {"error": expected or traceback.format_exc(), "expected": expected is not None}


def _together(method: Callable[P, R]) -> Callable[P, R]:
    """Of what all processes do at the same time: whoever is done lends until all are.

    The answer is sent after it: the first process reads none before it is done, and a large one would wait for that.
    """

    @wraps(method)
    def until_all_are_done(*args: P.args, **kwargs: P.kwargs) -> R:
        with shards.lending():
            return method(*args, **kwargs)

    return until_all_are_done


@dataclass
class Worker:
    """Answers the requests of `SharedPolicy` and `SharedModel`; a method for each."""

    trained: Trained
    _parts: dict[str, Any] = field(default_factory=dict)
    """Trajectories by their names: drawn here, or given to be replayed."""
    _streams: dict[str, Iterator[ReplayChunk]] = field(default_factory=dict)
    _last: dict[str, ReplayChunk] = field(default_factory=dict)
    _sums: GradientSums | None = None

    def load(self, adapters: Mapping[str, Mapping[str, Tensor]]) -> None:
        for module, state in adapters.items():
            self.trained.policies[module].load_adapter_state_dict(state)

    @_together
    def roll_out(
        self,
        module: str,
        name: str,
        prompts: Sequence[PromptRecord],
        group_size: int,
        generator: Tensor,
        share: Sequence[int],
    ) -> Any:
        """The rollout; its trajectory stays here, too, by its ``name``."""
        with share_of_seeds(*share), torch.no_grad():
            rollout = self.trained.policies[module].rollout(prompts, group_size, _generator(generator))
        self._parts[name] = rollout.trajectory
        return _packed(rollout)

    @_together
    def roll_out_jointly(
        self,
        names: Sequence[str],
        prompts: Sequence[PromptRecord],
        sizes: Sequence[int],
        generator: Tensor,
        share: Sequence[int],
    ) -> Any:
        """The outer and the inner rollout, each None where that stage has one sample."""
        assert self.trained.joint is not None
        with share_of_seeds(*share), torch.no_grad():
            joint = self.trained.joint.joint_rollout(prompts, sizes[0], sizes[1], _generator(generator))
        stages = (joint.outer, joint.inner)
        for name, own in zip(names, stages, strict=True):
            if own is not None:
                self._parts[name] = own.trajectory
        return [None if own is None else _packed(own) for own in stages]

    @_together
    def generate(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: Mapping[str, Any]
    ) -> Sequence[Sample]:
        assert self.trained.model is not None
        with torch.no_grad():
            return list(self.trained.model.generate(records, seeds, SamplerConfig.model_validate(sampler)))

    def hold(self, name: str, trajectory: Packed) -> None:
        """A part that was drawn elsewhere, such as before a checkpoint."""
        self._parts[name] = trajectory.unpacked(torch.device(self.trained.device))

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._parts.pop(name, None)

    def begin(self, module: str) -> None:
        """Nothing is left of another gradient."""
        self._streams.clear()
        self._last.clear()
        self._end_sums()
        parameters = self.trained.policies[module].trainable_parameters()
        for parameter in parameters:
            parameter.grad = None
        self._sums = GradientSums(parameters)

    def replay(self, module: str, name: str, rows: Tensor) -> None:
        self._streams[name] = self.trained.policies[module].replay(self._parts[name], rows)

    @_together
    def next_chunk(self, name: str) -> Any:
        """First column, last column and log-probs of the next chunk, with its KL; None after the last one."""
        self._last.pop(name, None)
        chunk = next(self._streams[name], None)
        if chunk is None:
            del self._streams[name]
            return None
        self._last[name] = chunk
        return [chunk.steps.start, chunk.steps.stop, chunk.log_probs, chunk.kl]

    @_together
    def backward(self, name: str, log_probs: Tensor, kl: Tensor | None) -> None:
        """Adds up the gradient of a loss of which these are the derivatives to the last chunk's values."""
        chunk = self._last.pop(name)
        if chunk.kl is None or kl is None:
            chunk.log_probs.backward(log_probs)
        else:
            torch.autograd.backward([chunk.log_probs, chunk.kl], [log_probs, kl])

    @_together
    def lend(self) -> None:
        """Has nothing to do itself."""

    def gradients(self, module: str) -> list[Tensor | None]:
        """Of ``module``, since `begin`."""
        assert self._sums is not None
        totals = self._sums.totals()
        self._end_sums()
        return totals

    def _end_sums(self) -> None:
        if self._sums is not None:
            self._sums.close()
        self._sums = None


def _packed(rollout: Rollout[Any]) -> Rollout[Packed]:
    return replace(rollout, trajectory=Packed.of(rollout.trajectory))


def _generator(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator
