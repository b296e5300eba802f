"""Users' rewards that fail, or give what nobody can train on."""

from __future__ import annotations

from pathlib import Path

from tests.fault_cases.fault import RESUME, TRAIN, Edit, Fault

ABSURD = f"{TRAIN},grpo.learning_rate=1e30"
NO_ROUTE = "raise ConnectionError('no route to host')"
SECOND = f"{TRAIN},rewards.mine.max_failed_share=0.1"


def trouble(code: str) -> Edit:
    """What the reward does from now on; see `world.REWARD`."""
    return lambda project: (project / "trouble.py").write_text(code, encoding="utf-8")


def edited(project: Path) -> None:
    file = project / "my_rewards.py"
    file.write_text(file.read_text(encoding="utf-8").replace("255", "256"), encoding="utf-8")


def reward_file(text: str) -> Edit:
    return lambda project: (project / "my_rewards.py").write_text(text, encoding="utf-8")


FAULTS = (
    Fault(what="A reward raises at its first call", edit=trouble("raise KeyError('colour')"), run=TRAIN),
    Fault(
        what="A reward raises once, at the second step: its samples are asked for one by one",
        edit=trouble(f"if call == 4: {NO_ROUTE}"),
        run=TRAIN,
        says="Trained 3 steps",
    ),
    Fault(
        what="A reward raises for one sample at the second step",
        edit=trouble(f"if call in (4, 5): {NO_ROUTE}"),
        run=SECOND,
        says="reward 'mine' failed",
    ),
    Fault(
        what="A reward raises from the second step on",
        edit=trouble(f"if call >= 4: {NO_ROUTE}"),
        run=TRAIN,
        repair=lambda project: (project / "trouble.py").unlink(),
        then=RESUME,
    ),
    Fault(
        what="A reward gives NaN for all samples", edit=trouble("scores = [float('nan') for _ in scores]"), run=TRAIN
    ),
    Fault(what="A reward gives infinity", edit=trouble("scores[0] = float('inf')"), run=TRAIN),
    Fault(what="A reward gives one score too few", edit=trouble("del scores[0]"), run=TRAIN),
    Fault(what="A reward gives text", edit=trouble("scores[0] = 'good'"), run=TRAIN),
    Fault(what="A reward gives nothing", edit=trouble("scores = None"), run=TRAIN),
    Fault(
        what="A reward paints its images black",
        edit=trouble("[sample.zero_() for sample in samples]"),
        run=TRAIN,
        says="Trained 3 steps",
    ),
    Fault(what="A reward ends the program", edit=trouble("raise SystemExit(0)"), run=TRAIN),
    Fault(what="The learning rate is absurd, and the loss becomes NaN", run=ABSURD),
    Fault(what="The same, and updates that are not finite are left out", run=f"{ABSURD},grpo.non_finite=skip"),
    Fault(what="A reward's file has a syntax error", edit=reward_file("def score(:"), run=TRAIN),
    Fault(what="A reward's file imports what is not there", edit=reward_file("import no_such_package"), run=TRAIN),
    Fault(what="A reward's file is gone", edit=lambda project: (project / "my_rewards.py").unlink(), run=TRAIN),
    Fault(what="A reward's function has another name", edit=reward_file("def scored(): pass"), run=TRAIN),
    Fault(what="A reward's code is edited after the baseline", edit=edited, run=TRAIN),
    Fault(what="A reward's code is edited before a resume", edit=edited, run=RESUME),
    Fault(what="A built-in reward's name is misspelt", run=f"{TRAIN},rewards.jpeg_sise.weight=1"),
    Fault(
        what="A reward's option is misspelt",
        run=f"{TRAIN},rewards.edge_density.weight=1,rewards.edge_density.options.treshold=0.2",
    ),
    Fault(
        what="A reward's option is out of range",
        run=f"{TRAIN},rewards.edge_density.weight=1,rewards.edge_density.options.threshold=2",
    ),
    Fault(what="A reward needs quoted text, which no prompt has", run="--pipeline=baseline --params=reward=text"),
)
