"""Does a training on people's choices improve what they choose by?

For each seed: the base model draws pairs of training prompts, as the pipeline ``vote`` does; a simulated voter prefers
the picture with the higher *true* reward, and says the opposite in a share of cases (``--noise``); the reward ``votes``
is fitted to these choices alone, and a module is trained with it. Then the true reward, which the training never saw,
is compared with the base model's on held-out prompts and the same seeds.

The true reward is one that features of pixels can capture, ``colourful``. With ``--truth rendering`` (how
cleanly the object is rendered, whatever else is in the picture) the policy can raise what they predict by other means
than what was chosen by.

Needs a folder in which starter and data_preparation have run (`make demo` leaves one); a seed takes about two minutes
of CPU time.

    python benchmarks/votes.py --folder CLONE --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import project
import torch

from visual_grpo.common import quiet_libraries
from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.config import Parameters, RewardConfig
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation.paired import paired_difference
from visual_grpo.evaluation.samples import distinct_prompts, image_seed
from visual_grpo.models.run_spec import RunSpec, resolve
from visual_grpo.operations.vote_pairs import find_pairs
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.votes.choices import FIRST, SECOND, Choice, Pair, append_line
from visual_grpo.rewards.votes.votes_reward import fitted_head
from visual_grpo.starter.worlds import SHAPES
from visual_grpo.training import components
from visual_grpo.training.run import Callbacks, TrainingRun

HEADER = (
    "seed",
    "choices predicted (held out)",
    "predicted without the noise",
    "reward votes",
    "true reward, base",
    "trained",
    "difference",
    "95% interval",
)


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    config, records = project.load(arguments)
    choices = f"{arguments.choices} choices by {arguments.truth}, {arguments.noise:.0%} of them turned round"
    judged = f"{len(_held_out(records))} held-out prompts, {arguments.samples} samples each"
    print(f"{choices}; {arguments.steps} steps of {arguments.module}; {judged}.\n")
    print(f"| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|")
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            print(f"| {' | '.join(_row(config, records, seed, Path(folder), arguments))} |", flush=True)


def _row(config: Parameters, records: RecordTable, seed: int, folder: Path, arguments: argparse.Namespace) -> list[str]:
    file = folder / "votes/choices.jsonl"
    agreed = _vote(_changed(config, seed, folder, arguments), records, seed, file, arguments)
    head = fitted_head(file, "pixels").head
    reward = {"votes": RewardConfig(weight=1.0, options={"choices": str(file)})}
    own = _changed(config, seed, folder, arguments).model_copy(
        update={
            "rewards": reward,
            "modules": {name: m.model_copy(update={"rewards": {}}) for name, m in config.modules.items()},
        }
    )
    spec = resolve(own)
    judge = components.build_scorer(spec)
    before, votes_before = _judged(judge, components.build_model(spec), spec, records, arguments)
    after, votes_after = _judged(judge, _trained(spec, records), spec, records, arguments)
    units = [record.split_group or record.id for record, _ in _asked(own, records, arguments)]
    found = paired_difference(before, after, units)
    return [
        str(seed),
        f"{head.accuracy:.0%} (from {head.low:.0%})",
        f"{agreed(head):.0%}",
        f"{votes_before:.2f} to {votes_after:.2f}",
        f"{found.baseline:.3f}",
        f"{found.trained:.3f}",
        f"{found.difference:+.3f}",
        f"{found.ci_low:+.3f} to {found.ci_high:+.3f}",
    ]


def _changed(config: Parameters, seed: int, folder: Path, arguments: argparse.Namespace) -> Parameters:
    policy = config.policy.model_copy(
        update={
            "train": arguments.module,
            "signal_check": config.policy.signal_check.model_copy(update={"rollouts": 0}),
        }
    )
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"seed": seed}),
            "vote": config.vote.model_copy(update={"seed": seed, "pairs": arguments.choices}),
            "grpo": config.grpo.model_copy(update={"steps": arguments.steps}),
            "evaluation": config.evaluation.model_copy(update={"every": arguments.steps}),
            "tracking": config.tracking.model_copy(
                update={"checkpoints": str(folder / "checkpoints"), "checkpoint_every": 1000}
            ),
            "policy": policy,
        }
    )


def _pairs(config: Parameters, records: RecordTable, file: Path) -> list[Pair]:
    """Generates pairs of the base model's pictures; there is no adapter."""
    return find_pairs(resolve(config), records, file, Path(), (Path(), Path()))


def _vote(config: Parameters, records: RecordTable, seed: int, file: Path, arguments: argparse.Namespace) -> Any:
    """Simulates the choices; what it returns says how often a head agrees with the truth on other pairs."""
    known = {record.id: record for record in records.split("train")}
    generator = torch.Generator().manual_seed(seed)
    other = config.model_copy(update={"vote": config.vote.model_copy(update={"seed": seed + 1000, "pairs": 100})})
    for pair in _pairs(config, records, file):
        images = [to_tensor(read_image(file.parent / name)) for name in (pair.first, pair.second)]
        first, second = _truth([known[pair.record]] * 2, images, arguments.truth)
        turned = float(torch.rand(1, generator=generator)) < arguments.noise
        said = FIRST if (first > second) != turned else SECOND
        choice = Choice(of=pair, voter="simulated", choice=said, shown_left=FIRST, at="2026-01-01T00:00:00+00:00")
        append_line(file, choice.line())
    unseen = _pairs(other, records, file)

    def agreed(head: Any) -> float:
        from visual_grpo.rewards.votes.head import pixel_features

        right = []
        for pair in unseen:
            images = [to_tensor(read_image(file.parent / name)) for name in (pair.first, pair.second)]
            truth = _truth([known[pair.record]] * 2, images, arguments.truth)
            guess = head.utility(pixel_features([known[pair.record]] * 2, images).numpy())
            right.append(float((truth[0] > truth[1]) == (guess[0] > guess[1])))
        return sum(right) / len(right)

    return agreed


def _trained(spec: RunSpec, records: RecordTable) -> Any:
    model, scorer = components.build_model(spec), components.build_scorer(spec)
    scorer.check_machine()
    trainer = components.build_trainer(spec, model, scorer)
    run = TrainingRun(
        spec, model, scorer, trainer,
        data={split: records.split(split) for split in ("train", "eval")}, provenance={}, run_id=None,
    )  # fmt: skip
    run.run(Callbacks(on_step=lambda metrics, row: None, note=lambda text: None))
    return model


def _judged(
    judge: Any, model: Any, spec: RunSpec, records: RecordTable, arguments: argparse.Namespace
) -> tuple[list[float], float]:
    """The true reward of held-out samples at the eval sampler, and the mean of the fitted one."""
    asked, size = _asked(spec.config, records, arguments), spec.config.evaluation.batch_size
    values: list[float] = []
    votes = 0.0
    for start in range(0, len(asked), size):
        batch = asked[start : start + size]
        chosen = [record for record, _ in batch]
        samples = model.generate(chosen, [seed for _, seed in batch], spec.samplers["eval"])
        values += _truth(chosen, samples, arguments.truth)
        votes += float(judge(chosen, samples).total.sum())
    return values, votes / len(asked)


def _asked(config: Parameters, records: RecordTable, arguments: argparse.Namespace) -> list[tuple[PromptRecord, int]]:
    return [
        (record, image_seed(config.evaluation.seed, record.id, number))
        for record in _held_out(records)
        for number in range(arguments.samples)
    ]


def _held_out(records: RecordTable) -> list[PromptRecord]:
    return distinct_prompts(records.split("held_out"), None)


def colourful(prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> list[float]:
    """Colourfulness of pictures (Hasler & Suesstrunk, 2003), of values from 0 to 1."""
    found = []
    for sample in samples:
        red, green, blue = sample.double() / 255
        opponents = red - green, (red + green) / 2 - blue
        spread = torch.stack([axis.std() for axis in opponents]).norm()
        found.append(float(spread + 0.3 * torch.stack([axis.mean() for axis in opponents]).norm()))
    return found


def _truth(records: Sequence[PromptRecord], samples: Sequence[Sample], name: str) -> list[float]:
    if name == colourful.__name__:
        return colourful(records, samples)
    config = RewardConfig.model_validate(SHAPES.preset.rewards.get(name, {}))
    return build_reward(name, config)(records, samples).values.tolist()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    project.add_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--choices", type=int, default=200)
    parser.add_argument("--noise", type=float, default=0.2, help="share of choices that say the opposite")
    parser.add_argument(
        "--truth",
        default="colourful",
        help="what the simulated voter goes by: colourful, rendering, or a built-in reward",
    )
    parser.add_argument("--module", default="ar", help="what is trained")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--samples", type=int, default=2, help="of each held-out prompt")
    return parser.parse_args()


if __name__ == "__main__":
    main()
