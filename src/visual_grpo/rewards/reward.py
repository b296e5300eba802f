"""Turns a plain function or class into a reward."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.images import require_image
from visual_grpo.common.importing import load_attribute
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput, Sample, VideoSample
from visual_grpo.config.credentials import with_variables
from visual_grpo.rewards.outputs import FailureBudget, RewardCodeError, checked_output, some_ids, spread

log = logging.getLogger(__name__)

PlainReward = Callable[..., Any]
"""Takes the records and the samples by the names of `PROMPTS` and `SAMPLES`. Returns one score per sample: a sequence
of real numbers (None or NaN = unscored, True = 1), a tensor or NumPy array [B], or a ``RewardOutput``."""
PROMPTS = ("prompts",)
SAMPLES = ("images", "samples", "videos")


class CalledByName:
    """A user's function, whose arguments are passed by the names of its parameters.

    The order differs between projects: flow_grpo's rewards take (images, prompts, metadata); TRL calls by name, too.
    ``roles``: for each argument, the names that its parameter may have. Raises UserError for a function that has no
    such parameter, or has others without a default.
    """

    def __init__(self, what: str, function: Any, *roles: Sequence[str]) -> None:
        if not callable(function):
            raise UserError(f"{what} must be callable with {_expected(roles)}, got {type(function).__name__}")
        parameters = _parameters(function)
        self.function, self.names = function, _argument_names(what, parameters, roles)
        _check_options(what, parameters, {}, self.names)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(**dict(zip(self.names, arguments, strict=True)))


class FunctionReward:
    """Any callable of prompts and samples (`PlainReward`) as a reward, which knows neither policy nor trainer.

    Raises ``UserError``, naming the reward and the first offending record, when the callable fails or returns anything
    but one finite or unscored number per sample. ``max_failed_share``: see `FailureBudget`; in a
    command it is the parameter of that name, 0.05 by default.
    """

    def __init__(self, name: str, function: PlainReward, *, max_failed_share: float = 0.0) -> None:
        self._call = CalledByName(f"reward {name!r}", function, PROMPTS, SAMPLES)
        self.name = name
        self.function = function
        self.needs: Needs = getattr(function, "needs", Needs())
        if not isinstance(self.needs, Needs):
            raise UserError(f"reward {name!r}: its `needs` must be a visual_grpo.Needs, got {self.needs!r}")
        self.measure: tuple[str, str] | None = getattr(function, "measure", None)
        if self.measure is not None and [*map(type, self.measure)] != [str, str]:
            raise UserError(f"reward {name!r}: its `measure` must be (part, its name in reports), got {self.measure!r}")
        self.guard: str | None = getattr(function, "guard", None)
        """Clause that says what is wrong with pictures whose score falls without being optimised; None = no guard."""
        self.budget = FailureBudget(max_failed_share)
        self.judge_of: str | None = None
        """The score that this gives a second opinion on: ``total`` or a reward; None = no judge."""

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        if len(prompts) != len(samples):
            raise UserError(f"reward {self.name!r} was given {len(prompts)} prompts but {len(samples)} samples")
        if self.judge_of is not None:
            return self._judged(prompts, samples)
        return self._in_budget(prompts, samples)

    def _judged(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        """A judge decides nothing, so that it may say nothing of records that lack what it compares with."""
        rows = [row for row, record in enumerate(prompts) if not self.needs.missing(record)]
        if not rows:
            return RewardOutput(values=torch.full((len(prompts),), torch.nan))
        some = self._in_budget([prompts[row] for row in rows], [samples[row] for row in rows])
        return spread(some, rows, len(prompts))

    def _in_budget(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        units = groups_of(prompts) if self.needs.whole_groups else [[row] for row in range(len(prompts))]
        return self.budget.score(self.name, self._score, prompts, samples, units)

    def _score(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        self.check_samples(videos=any(isinstance(sample, VideoSample) for sample in samples))
        # Copies: what a reward changes in a record or an image must reach neither the next reward nor what is kept.
        copies = [_copied(sample) for sample in samples]
        # Other rewards run while one waits: a change would be blamed on the wrong one.
        kept = torch.no_grad() if self.waits else kept_settings(f"reward {self.name!r}")
        with _blaming(f"reward {self.name!r} failed on the records {some_ids(prompts)}"), kept:
            records = [replace(record, metadata=deepcopy(dict(record.metadata))) for record in prompts]
            # A generator fails, if it does, while it is read.
            returned = self._call(records, copies)
            returned = list(returned) if isinstance(returned, Iterator) else returned
        return checked_output(self.name, returned, prompts)

    def check_samples(self, *, videos: bool) -> None:
        """Raises UserError for a reward of images that is to judge ``videos``, and the other way round."""
        if videos and not self.needs.video:
            raise UserError(
                f"reward {self.name!r} judges images, and the samples are videos. Set rewards.{self.name}.frames to"
                " all, first or N (every Nth frame), and over_frames to mean or minimum. A function of whole videos"
                " has needs = Needs(video=True)"
            )
        if not videos and self.needs.video:
            raise UserError(
                f"reward {self.name!r} judges videos, or has frames, and the samples are none: data.frames is null"
            )

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Calls the callable's ``check_records``, if any; it may refuse records before any rollout."""
        if hasattr(self.function, "check_records"):
            self.function.check_records(records)

    def check_machine(self) -> None:
        """Calls the callable's ``check_machine``, if any; it raises UserError for a missing file, server or device."""
        if hasattr(self.function, "check_machine"):
            with _naming(self.name), _blaming(f"reward {self.name!r} failed in its check of this machine"):
                self.function.check_machine()

    def commits(self) -> dict[str, str]:
        """Option -> commit on the hub, of the callable's ``origins``. Raises UserError if the hub must answer and
        does not."""
        commits = {origin.option: origin.commit() for origin in getattr(self.function, "origins", ())}
        return {option: commit for option, commit in commits.items() if commit is not None}

    @property
    def waits(self) -> bool:
        """True if the callable waits for a different process: other rewards are computed meanwhile."""
        return bool(getattr(self.function, "waits", False))

    @property
    def paints(self) -> bool:
        return hasattr(self.function, "picture")

    def picture(self, record: PromptRecord, sample: Sample) -> Tensor:
        """Returns the callable's picture of a sample, uint8 [3, h, w]; only if ``paints``."""
        with _blaming(f"reward {self.name!r} could not paint its picture of record {record.id!r}"):
            painted: Tensor = self.function.picture(record, sample)  # type: ignore[attr-defined]
            require_image(painted)
        return painted


def _copied(sample: Sample) -> Sample:
    if isinstance(sample, VideoSample):
        return replace(sample, frames=sample.frames.clone())
    return sample.clone() if isinstance(sample, Tensor) else sample


def groups_of(prompts: Sequence[PromptRecord]) -> list[list[int]]:
    """The rows of each group: neighbours of one record."""
    ids = [record.id for record in prompts]
    return [[row for row, _ in rows] for _, rows in itertools.groupby(enumerate(ids), key=lambda pair: pair[1])]


def load_function(path: str) -> Any:
    """Imports ``package.module:function``. Raises ``UserError`` if it does not exist."""
    with kept_settings(path):  # Scripts that score pictures often switch gradients off when imported.
        function = load_attribute(path, "a function")
    if not callable(function):
        raise UserError(f"{path!r} must be a function or class, it is of type {type(function).__name__}")
    return function


def make_reward(name: str, path: str, options: Mapping[str, Any]) -> FunctionReward:
    """Builds the reward that ``package.module:function`` names.

    A class is made once with the options, and its instance is the reward; a function gets them as keyword arguments in
    every call. Raises ``UserError`` for an unknown or a missing option.
    """
    values = with_variables(options, name)
    with _naming(name), _blaming(f"reward {name!r}: {path!r} could not be made"), kept_settings(f"reward {name!r}"):
        try:
            return FunctionReward(name, with_options(f"reward {name!r}: {path!r}", path, values, PROMPTS, SAMPLES))
        except TypeError as error:
            raise UserError(f"reward {name!r}: {path!r} refused the options {dict(options)!r}: {error}") from error


def with_options(what: str, path: str, options: Mapping[str, Any], *roles: Sequence[str]) -> Any:
    """Returns what ``package.module:name`` names: an instance of a class that is made with the options, or a function
    that gets them in every call, besides the arguments of `CalledByName`. Errors call it ``what``.

    Raises ``UserError`` for an unknown or a missing option, or a function without parameters for the arguments.
    """
    target = load_function(path)
    parameters = _parameters(target)
    # What a configuration has from the one that it copies can only be replaced, by null.
    options = {name: value for name, value in options.items() if value is not None or _takes(parameters, name)}
    if isinstance(target, type):
        _check_options(what, parameters, options)
        return target(**options)
    _check_options(what, parameters, options, _argument_names(what, parameters, roles))
    if not options:
        return target
    # What a function says of itself (`needs`, `waits`) is copied to the partial one, whose signature is its own.
    bound = functools.update_wrapper(functools.partial(target, **options), target)
    del bound.__wrapped__
    return bound


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # A function in C may have no names.
        return []


def _by_name(parameters: Sequence[inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """The parameters that can be given by name."""
    return {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _takes(parameters: Sequence[inspect.Parameter], name: str) -> bool:
    return name in _by_name(parameters) or any(p.kind is p.VAR_KEYWORD for p in parameters)


def _expected(roles: Sequence[Sequence[str]]) -> str:
    """``prompts and images (or samples, videos)``."""
    return " and ".join(f"{first} (or {', '.join(others)})" if others else first for first, *others in roles)


def _argument_names(what: str, parameters: Sequence[inspect.Parameter], roles: Sequence[Sequence[str]]) -> list[str]:
    """Returns the parameter of each role; raises UserError where there is none, or more than one."""
    taken = _by_name(parameters)
    found = [[name for name in names if name in taken] for names in roles]
    if any(len(names) != 1 for names in found):
        raise UserError(
            f"{what} is called with {_expected(roles)}, by these names and in any order. It takes"
            f" {', '.join(map(str, parameters)) or 'no parameters with names'}: rename them"
        )
    return [name for names in found for name in names]


def _check_options(
    what: str, parameters: Sequence[inspect.Parameter], options: Mapping[str, Any], arguments: Sequence[str] = ()
) -> None:
    """Raises UserError for an option that is unknown or missing; ``arguments`` are parameters of every call."""
    taken = {name: p for name, p in _by_name(parameters).items() if name not in arguments}
    if unknown := [name for name in options if name in arguments or not _takes(parameters, name)]:
        known, hint = ", ".join(taken) or "none", nearest_hint(unknown[0], taken)
        left = f"Leave out {', '.join(unknown)}, or set it to null if a configuration has it"
        raise UserError(f"{what} has no option {unknown[0]!r}; it takes: {known}.{hint or f' {left}'}")
    if missing := [name for name, p in taken.items() if p.default is p.empty and name not in options]:
        others = f". Every parameter but {' and '.join(arguments)} is an option" if arguments else ""
        record = "; what metadata a record has is in prompts[i].metadata" if "prompts" in arguments else ""
        raise UserError(f"{what} needs the option {missing[0]!r}, got {', '.join(options) or 'none'}{others}{record}")


@contextmanager
def kept_settings(whose: str) -> Iterator[None]:
    """Runs the code of a reward without gradients, and puts back what it changes for the whole process."""
    folder, dtype = Path.cwd(), torch.get_default_dtype()
    try:
        with torch.no_grad():
            yield
    finally:
        if (other := Path.cwd()) != folder:
            os.chdir(folder)
            _tell(f"{whose} changed the working directory to {other}; it is {folder} again: name files by whole paths")
        if (wrong := torch.get_default_dtype()) != dtype:
            torch.set_default_dtype(dtype)
            _tell(f"{whose} changed torch's default dtype to {wrong}; it is {dtype} again: give dtype where you load")


@functools.cache
def _tell(line: str) -> None:
    """Once, though every call may do it."""
    log.warning(line)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefixes errors with the reward's name, as there may be several of one kind, such as two judges."""
    try:
        yield
    except RewardCodeError:
        raise
    except UserError as error:
        named = str(error).startswith((f"reward {name!r}", f"{name}: "))
        raise (error if named else UserError(f"reward {name!r}: {error}", error.remedy)) from error.__cause__


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Converts any error of a reward's code to RewardCodeError with ``what`` failed and the traceback in its code."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        own = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).rstrip()
        raise RewardCodeError(f"{what}:\n{own}") from error
