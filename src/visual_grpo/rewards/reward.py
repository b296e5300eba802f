"""Turns a plain function or class into a reward."""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.images import described, is_image
from visual_grpo.common.importing import load_attribute
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput, Sample
from visual_grpo.config.training import with_variables
from visual_grpo.rewards.outputs import FailureBudget, RewardCodeError, checked_output, some_ids

PlainReward = Callable[[Sequence[PromptRecord], Sequence[Sample]], Any]
"""Returns one score per sample: a sequence of floats (None or NaN = unscored), a tensor or NumPy
array [B], or a ``RewardOutput``."""

_ASKED = ("needs", "needs_target", "waits", "check_records", "check_machine", "picture", "origins")
"""Optional attributes of a callable that `FunctionReward` uses."""


class FunctionReward:
    """Any callable ``(prompts, samples) -> scores`` as a ``RewardFunction``.

    ``needs`` is the callable's own attribute of that name unless it is given; ``needs_target = True`` is short for
    ``needs = Needs(target=True)``. ``max_failed_share``: see `FailureBudget`.
    Raises ``UserError``, naming the reward and the first offending record, when the callable fails or
    returns anything but one finite or unscored number per sample.
    """

    def __init__(
        self, name: str, function: PlainReward, *, needs: Needs | None = None, max_failed_share: float = 0.0
    ) -> None:
        if not callable(function):
            raise UserError(f"reward {name!r} must be callable, got {type(function).__name__}")
        self.name = name
        self.function = function
        self.needs = _needs_of(name, function) if needs is None else needs
        self.budget = FailureBudget(max_failed_share)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        if len(prompts) != len(samples):
            raise UserError(f"reward {self.name!r} was given {len(prompts)} prompts but {len(samples)} samples")
        units = groups_of(prompts) if self.needs.whole_groups else [[row] for row in range(len(prompts))]
        return self.budget.score(self.name, self._score, prompts, samples, units)

    def _score(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        # Copies: what a reward paints into an image must reach neither the next reward nor what is kept.
        copies = [sample.clone() if isinstance(sample, Tensor) else sample for sample in samples]
        with _blaming(f"reward {self.name!r} failed on the records {some_ids(prompts)}"), torch.no_grad():
            # A list of its own as well: a reward may sort it. And a generator fails, if it does, while it is read.
            returned = self.function(list(prompts), copies)
            returned = list(returned) if isinstance(returned, Iterator) else returned
        return checked_output(self.name, returned, prompts)

    @property
    def checks_records(self) -> bool:
        """True if the callable has a ``check_records`` method."""
        return hasattr(self.function, "check_records")

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Calls the callable's ``check_records``, if any; it may refuse records before any rollout."""
        if self.checks_records:
            self.function.check_records(records)  # type: ignore[attr-defined]

    def check_machine(self) -> None:
        """Calls the callable's ``check_machine``, if any; it raises UserError for a missing file, server or device."""
        if hasattr(self.function, "check_machine"):
            with _naming(self.name), _blaming(f"reward {self.name!r} failed in its check of this machine"):
                self.function.check_machine()

    def commits(self) -> dict[str, str]:
        """Returns option -> commit of the hub's repository, from the callable's ``origins``.

        Raises UserError if the files are not on this machine and the hub does not answer.
        """
        commits = {origin.option: origin.commit() for origin in getattr(self.function, "origins", ())}
        return {option: commit for option, commit in commits.items() if commit is not None}

    @property
    def waits(self) -> bool:
        """True if the callable waits for another process, so that other rewards can be computed meanwhile."""
        return bool(getattr(self.function, "waits", False))

    @property
    def paints(self) -> bool:
        """True if the callable has a ``picture`` method."""
        return hasattr(self.function, "picture")

    def picture(self, record: PromptRecord, sample: Sample) -> Tensor:
        """Returns the callable's picture of a sample, uint8 [3, h, w]; only if ``paints``."""
        with _blaming(f"reward {self.name!r} could not paint its picture of record {record.id!r}"):
            painted = self.function.picture(record, sample)  # type: ignore[attr-defined]
        if not is_image(painted):
            raise UserError(
                f"the picture that reward {self.name!r} paints of record {record.id!r} must be a uint8 tensor"
                f" [3, height, width], got {described(painted)}"
            )
        return painted

    def __repr__(self) -> str:
        return f"FunctionReward({self.name!r}, {self.function!r})"


def groups_of(prompts: Sequence[PromptRecord]) -> list[list[int]]:
    """The rows of each group: neighbours of one record."""
    ids = [record.id for record in prompts]
    return [[row for row, _ in rows] for _, rows in itertools.groupby(enumerate(ids), key=lambda pair: pair[1])]


def _needs_of(name: str, function: PlainReward) -> Needs:
    needs = getattr(function, "needs", None)
    if needs is None:
        return Needs(target=bool(getattr(function, "needs_target", False)))
    if not isinstance(needs, Needs):
        raise UserError(f"reward {name!r}: its `needs` must be a visual_grpo.Needs, got {needs!r}")
    return needs


def load_function(path: str) -> Any:
    """Imports ``package.module:function``. Raises ``UserError`` if there is no such callable."""
    with torch.no_grad():  # Puts the mode back: scripts that score pictures often switch gradients off when imported.
        function = load_attribute(path, "a function")
    if not callable(function):
        raise UserError(f"{path!r} must be a function or class, it is of type {type(function).__name__}")
    return function


def make_reward(name: str, path: str, options: Mapping[str, Any]) -> FunctionReward:
    """Builds the reward that ``package.module:function`` names, in one of three forms told apart by its signature:

    - a class: made once with the options; its instance is the reward;
    - a plain function ``(prompts, samples, **options) -> scores``: two required positional parameters are not among
      the options. It gets the options as keyword arguments in every call;
    - a factory ``(**options) -> reward``: any other function; called once with the options.

    Without options, whatever can be called with two arguments is a plain function. A wrapper ``(*args, **kwargs)`` with
    options is taken for a factory unless ``functools.wraps`` shows what it wraps.
    Raises ``UserError`` for an unknown option, naming the nearest, and for one that is missing.
    """
    target = load_function(path)
    prompts_and_samples = [] if isinstance(target, type) else _arguments(target, options)
    _check_options(f"reward {name!r}: {path!r}", target, options, prompts_and_samples)
    values = with_variables(options, name)
    if prompts_and_samples:
        return FunctionReward(name, _with_options(target, values))
    with _naming(name), _blaming(f"reward {name!r}: {path!r} could not be made"), torch.no_grad():
        try:
            made = target(**values)
        except TypeError as error:
            raise UserError(f"reward {name!r}: {path!r} refused the options {dict(options)!r}: {error}") from error
    if not callable(made):
        raise UserError(
            f"reward {name!r}: {path!r} called with options {dict(options)!r} must return a callable"
            f" (prompts, samples) -> scores, got {type(made).__name__}"
        )
    return FunctionReward(name, made)


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters; (*args, **kwargs) if there is no signature, as for some C functions."""
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return list(inspect.signature(lambda *args, **kwargs: None).parameters.values())


def _arguments(function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Returns the names of a plain function's parameters for prompts and samples; empty for a factory."""
    parameters = _parameters(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty and p.name not in options]
    if len(required) >= 2:
        return required[:2]
    names = [p.name for p in positional] + 2 * [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    return names[:2] if not options and len(names) >= 2 else []


def _check_options(what: str, target: Callable[..., Any], options: Mapping[str, Any], others: Sequence[str]) -> None:
    """Raises UserError for unknown and missing options; ``others`` are parameters that are no options."""
    parameters = _parameters(target)
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in others]
    names = [p.name for p in taken]
    unknown = [option for option in options if option not in names]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(
            f"{what} has no option {unknown[0]!r}; it takes: {', '.join(names) or 'none'}."
            f"{nearest_hint(unknown[0], names)}"
        )
    missing = [p.name for p in taken if p.default is p.empty and p.name not in options]
    if missing:
        raise UserError(f"{what} needs the option {missing[0]!r}, got {', '.join(options) or 'none'}")


def _with_options(function: PlainReward, options: Mapping[str, Any]) -> PlainReward:
    if not options:
        return function
    bound = functools.partial(function, **options)
    for attribute in _ASKED:
        if hasattr(function, attribute):
            setattr(bound, attribute, getattr(function, attribute))
    return bound


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefixes errors with the reward's name, as there may be several of one kind, such as two judges."""
    try:
        yield
    except RewardCodeError:
        raise
    except UserError as error:
        named = str(error).startswith((f"reward {name!r}", f"{name}: "))
        raise (error if named else UserError(f"reward {name!r}: {error}")) from error.__cause__


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Converts any error of a reward's code to RewardCodeError with ``what`` failed and the traceback."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardCodeError(f"{what}:\n{_own_traceback(error)}") from error


def _own_traceback(error: BaseException) -> str:
    """The traceback inside the reward's code, without the frames of this project that called it."""
    frames = traceback.format_tb(error.__traceback__)[2:]  # after `_blaming` and its caller
    return "".join([*frames, *traceback.format_exception_only(error)]).rstrip()
