"""Types that data, policies, rewards and the trainer exchange.

Shape letters used throughout the package: N prompts, G samples of each prompt (its *group*),
B = N * G rows in group-major order (row = n * G + g), S decision steps of a row (tokens of an
autoregressive policy, denoising steps of a flow policy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

from visual_grpo.common.errors import UserError

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from visual_grpo.common.decisions import Likelihoods

Sample = Any
"""A uint8 tensor [3, height, width] in RGB order from an image policy, a `VideoSample` from a video policy, a
`TextSample` from a language policy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoSample:
    """A video."""

    frames: Tensor
    """[F, 3, height, width] uint8 in RGB order."""
    fps: float
    """Frames per second."""


@dataclass(frozen=True, kw_only=True)
class TextSample:
    """A language policy's answer."""

    text: str
    """The generated text without its end tokens."""
    finished: bool
    """False where it was cut off at the greatest number of tokens."""
    frame: tuple[int, int]
    """(height, width) in pixels of the image as the model saw it: coordinates in ``text`` are of this frame."""


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One prompt with its images, split and metadata."""

    id: str
    """Unique in a dataset; groups are keyed by it, never by the prompt's text."""
    prompt: str
    split: str = "train"
    """``train``, ``eval`` (prompts may also occur in train), ``held_out`` or ``sealed`` (they never do)."""
    target_image: Path | None = None
    """The image that this prompt should give, if any."""
    target_file: str | None = None
    """Path of that image within the dataset."""
    source_images: tuple[Path, ...] = ()
    """Images to edit (image-to-image); empty for text-to-image."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the record; rewards may read them."""
    split_group: str | None = None
    """Records that share this key (one image, one prompt) go to the same split; None = split by the id."""

    def __post_init__(self) -> None:
        sources: Any = self.source_images
        if isinstance(sources, list):  # Records are compared, and grouped, by their sources.
            object.__setattr__(self, "source_images", tuple(sources))


def checked_record(record: object) -> PromptRecord:
    """Raises UserError for what is not a `PromptRecord`, such as a plain string, or whose sources are not a tuple."""
    if isinstance(record, PromptRecord):
        if not isinstance(record.source_images, tuple):
            raise UserError(
                f"record {record.id!r}: source_images must be a tuple of paths, got {record.source_images!r:.80}"
            )
        return record
    raise UserError(
        f"each prompt must be a PromptRecord, got the {type(record).__name__} {record!r:.80}; make one of a text:"
        " PromptRecord(id='1', prompt='a red circle')"
    )


Fraction = tuple["Tensor", "Tensor"]
"""(numerator, denominator) of B samples, each [B] float32, the denominator >= 0; both NaN = unscored."""


@dataclass(frozen=True, kw_only=True)
class RewardOutput:
    """Scores of B samples. NaN means *unscored*: left out of every mean, never counted as 0."""

    values: Tensor
    """[B] float32, higher is better."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Named components of the score, each [B] float32: reported, never optimised by themselves."""
    ratios: Mapping[str, Fraction] = field(default_factory=dict)
    """Named scores whose mean is a ratio of sums, such as the cumulative IoU of masks: reported, never optimised."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Rows that are NaN because asking for them failed (a server does not answer), each with the reason: the run stops
    where they are too many (``max_failed_share``)."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Requirements of a reward on every record; checked before the first rollout. A judge leaves the rest unscored."""

    target: bool = False
    """A ``target_image``."""
    source: bool = False
    """At least one of ``source_images``."""
    whole_groups: bool = False
    """All samples of a prompt in one call, as neighbours: it compares them with each other."""
    video: bool = False
    """Whole videos as samples; without it, a reward of videos is given their frames (`rewards.frames`)."""

    def missing(self, record: PromptRecord) -> list[str]:
        """Returns ``target`` and ``source`` where they are needed and the record has none."""
        there = {"target": record.target_image is not None, "source": bool(record.source_images)}
        return [kind for kind, given in there.items() if getattr(self, kind) and not given]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of B samples by a weighted set of rewards."""

    total: Tensor
    """[B] float32: the weighted sum over the rewards; NaN where a weighted reward is unscored."""
    rewards: Mapping[str, Tensor]
    """Each reward's own values, [B] float32, unweighted."""
    parts: Mapping[str, Tensor]
    """``reward/part`` -> [B] float32."""
    ratios: Mapping[str, Fraction] = field(default_factory=dict)
    """``reward/ratio`` -> numerators and denominators."""
    weights: Mapping[str, float]
    """Weight of each reward; 0 = reported only."""


V = TypeVar("V")


def weighted_total(values: Mapping[str, V], weights: Mapping[str, float]) -> V:
    """Sum of ``weight * values[name]`` in the order of ``weights``, of tensors or pandas Series of one shape.

    A weight of 0 is skipped: 0 * NaN is NaN, and a reward that is only reported must not unscore the total.
    Raises ValueError where no weight is left.
    """
    terms: list[Any] = [weight * cast(Any, values[name]) for name, weight in weights.items() if weight]
    if not terms:
        raise ValueError(f"a total needs a weight other than 0, got {dict(weights)}")
    return cast(V, sum(terms))


class Scorer(Protocol):
    """The weighted rewards as one callable (``rewards.combine.RewardSet``)."""

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Scores: ...


def begin_scoring(scorer: Scorer, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Callable[[], Scores]:
    """Starts scoring in the background where the scorer can; the returned function waits for the scores.

    That function raises UserError where the scorer gives no `Scores`: it is a reward, not a scorer.
    """
    begin: Callable[..., Callable[[], Scores]] | None = getattr(scorer, "begin", None)
    finish = partial(scorer, prompts, samples) if begin is None else begin(prompts, samples)

    def checked() -> Scores:
        scores: object = finish()
        if isinstance(scores, Scores):
            return scores
        raise UserError(
            f"the scorer must return Scores, got {type(scores).__name__}. Make a scorer of a reward function:"
            ' RewardSet({"redness": (redness, 1.0)})'
        )

    return checked


T = TypeVar("T")
D = TypeVar("D", bound="Likelihoods")


@dataclass(frozen=True, kw_only=True)
class Rollout(Generic[T]):
    """N prompts, G samples each, with the trajectory that every sample was decoded from."""

    prompts: Sequence[PromptRecord]
    """[B], each prompt repeated G times, group-major."""
    samples: Sequence[Sample]
    """[B], decoded from ``trajectory``: what the reward sees is what the loss replays."""
    trajectory: T
    log_probs: Tensor
    """[B, S] float32: log-probability of each decision under the policy that took it."""
    mask: Tensor
    """[B, S] bool, True = the decision counts in the loss."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Measurements of the policy while sampling, for example ``entropy`` or seconds by phase."""
    rounding: float = 0.0
    """Mean |log ratio|, in nats, that half precision is expected to make between sampler and replay; 0 = the
    dtype's floor (`grpo.ratio_check`)."""
    block: range | None = None
    """Rows that this process drew, the only ones in ``trajectory``; None = all."""
    turns: Sequence[list[int]] = ()
    """The columns of S that each update takes, in turn; empty = all of them, in every update."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch(Generic[T]):
    """The rows of a rollout that are trained on, with their advantages."""

    rollout: Rollout[T]
    scores: Scores
    rows: Tensor
    """[b] int64, rows of the rollout: the scored ones of its informative groups."""
    advantages: Tensor
    """[B] float32, of all rows of the rollout."""
    old_log_probs: Tensor
    """[B, S] float32, the denominator of the ratio: the sampler's log-probs, or, of the decisions that the first
    update takes, its replay's. All updates share this tensor."""
    columns: Sequence[int] | None = None
    """The columns of ``old_log_probs`` that the rollout's decisions have; None = all."""
    average_velocities: Tensor | None = None
    """[rows drawn here, S, *D] under the average of the trained weights, if the loss pulls to it."""

    def of_update(self, number: int) -> TrainBatch[T]:
        """The decisions that update ``number`` of a step takes."""
        rollout = self.rollout
        if not rollout.turns:
            return self
        own = rollout.turns[number % len(rollout.turns)]
        taken = replace(
            rollout,
            trajectory=rollout.trajectory and cast(Any, rollout.trajectory).taking(own),
            log_probs=rollout.log_probs[:, own],
            mask=rollout.mask[:, own],
            turns=(),
        )
        return replace(self, rollout=taken, columns=own)

    def place(self, decisions: Likelihoods, rows: Tensor) -> tuple[Tensor, list[int]]:
        """Returns the index of the ``decisions`` of ``rows`` ([b]) in ``old_log_probs``."""
        columns = self.columns or range(self.old_log_probs.shape[1])
        return rows[:, None], list(columns[decisions.steps])

    def compared(self, decisions: D, rows: Tensor) -> D:
        """Fills in the log-probs of the policy that took the ``decisions`` of ``rows`` ([b]), and the average's."""
        old, sampled = self.old_log_probs[self.place(decisions, rows)], self.rollout.log_probs[rows][:, decisions.steps]
        average: dict[str, Any] = {}
        if self.average_velocities is not None:
            average["average_velocity"] = self.average_velocities[self.drawn_place(decisions, rows)]
        return replace(decisions, old_log_probs=old, sampled_log_probs=sampled, **average)

    @property
    def drawn(self) -> int:
        """Number of rows that this process generated."""
        return len(self.rollout.mask if self.rollout.block is None else self.rollout.block)

    def drawn_place(self, decisions: Likelihoods, rows: Tensor) -> tuple[Tensor, list[int]]:
        """Returns the index of the ``decisions`` of ``rows`` ([b]) in ``average_velocities``."""
        own, columns = self.place(decisions, rows)
        return own - (self.rollout.block.start if self.rollout.block else 0), columns

    def micro_batches(self, size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rows that this process generated, ``size`` at a time, and their places in the trajectory."""
        rows, block = self.rows, self.rollout.block
        if block is not None:
            rows = rows[(rows >= block.start) & (rows < block.stop)]
        for part in rows.split(size or len(rows)) if len(rows) else ():
            yield part, part - (block.start if block else 0)

    def prompt_ids(self, rows: Tensor) -> list[str]:
        return [self.rollout.prompts[int(row)].id for row in rows]


@dataclass(frozen=True, kw_only=True)
class JointRollout:
    """One rollout of a model of two stages: N prompts, A outer samples of each, D inner samples of each of those."""

    outer: Rollout[Any]
    """N * A rows; ``samples`` are the first inner samples of each."""
    inner: Rollout[Any]
    """N * A * D rows; rows that share an outer sample are neighbours."""


class Share(NamedTuple):
    """The neighbouring prompts of a rollout that one of several processes generates."""

    start: int
    size: int
    total: int
    """The number of all prompts of the rollout."""


class Policy(Protocol[T]):
    """The policy as the trainer sees it: neither pixels nor tokens."""

    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: Generator, share: Share | None = None
    ) -> Rollout[T]:
        """Generates ``group_size`` samples of each prompt; ``share``: which of the rollout these are, None = all.

        The samples of a share are those that a rollout of all prompts gives them.
        """
        ...

    def replay(self, trajectory: T, rows: Tensor) -> Iterator[Likelihoods]:
        """Scores ``rows`` ([b] int64) again, one chunk (one graph) at a time."""
        ...

    def trainable_parameters(self) -> list[nn.Parameter]: ...

    def adapter_state_dict(self) -> dict[str, Tensor]: ...

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Report of one training step."""

    step: int
    """1 for the first step."""
    values: Mapping[str, float]
    prompts: Sequence[PromptRecord] = ()
    samples: Sequence[Sample] = ()
    rewards: Sequence[float] = ()
    """The rollout's samples with their total reward, for picture grids."""
