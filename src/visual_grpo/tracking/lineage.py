"""Where adapters come from (command, commit, changes, hashes of DVC, versions), and the card that tells it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.common.errors import UserError, counted
from visual_grpo.config import Parameters
from visual_grpo.config.command import launcher

CARD = "README.md"
_STEP = {"best": "best_step", "last": "steps"}
_LICENCE_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt")

_NO_RESULT = (
    "This card was written by the training. `.venv/bin/kedro run --pipeline=evaluate` judges the adapter: its result is"
    " in the report that it names, and in the card among the artifacts of the MLflow run."
)


def model_card(facts: Mapping[str, Any], modules: Sequence[str], result: Sequence[str] = ()) -> str:
    """Markdown with the front matter that the Hugging Face Hub reads.

    Args:
        facts: those of ``training.json``.
        modules: the trained ones.
        result: the evaluation in words; none before it was evaluated.
    """
    config, base = facts["parameters"], facts["model"]
    typed = Parameters.model_validate(config)
    front = {"base_model": base, "library_name": "peft", "tags": ["lora", "grpo", "visual-grpo"]}
    lines = [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in front.items()),
        "---",
        "",
        f"# LoRA of {' and '.join(modules)}, trained with GRPO",
        "",
        *(
            f"- {name}: {text}"
            for name, text in {
                "Base model": f"`{base}` (its licence applies: {_licence(base)})",
                "Data": f"`{config['data']['path']}` ({config['data']['task']}), digest `{facts['data'][:12]}`",
                "Training": f"{counted(facts['steps'], 'step')}, {counted(facts['samples'], 'sample')},"
                f" loss {config['grpo']['loss']}, seed {facts['seed']}",
                **{f"Of {module}": _of_module(typed, module) for module in modules},
                "Adapter": f"of the {facts['adapter']} step ({facts[_STEP[facts['adapter']]]})",
                "Code": f"commit `{facts.get('git.commit', 'unknown')}` ({facts.get('git.state', 'unknown')})",
                "MLflow run": f"`{facts['mlflow_run_id']}`" if facts["mlflow_run_id"] else "none",
                "Command": f"`{facts.get('command', 'unknown')}`",
                **_resumed(facts),
            }.items()
        ),
        "",
        "## Result",
        "",
        *(result or [_NO_RESULT]),
        "",
        "## Loading",
        "",
        "```python",
        *_loading(config, base, modules),
        "```",
        "",
        "Without this package: each module's folder loads with peft's or diffusers' own functions, as Visual GRPO's"
        " documentation shows.",
        "",
    ]
    return "\n".join(lines)


def _resumed(facts: Mapping[str, Any]) -> dict[str, str]:
    """The later parts of a training that was resumed; the code only where it was another then."""
    commands, commits = (facts.get(f"resumed.{name}", "").splitlines() for name in ("command", "git.commit"))
    shown = {"Resumed by": commands, "Resumed with the code of": commits}
    return {label: ", ".join(f"`{line}`" for line in lines) for label, lines in shown.items() if lines}


def _loading(config: Mapping[str, Any], base: str, modules: Sequence[str]) -> list[str]:
    """Lines that draw one sample with the adapters."""
    size = (config["data"]["height"], config["data"]["width"])
    is_relative = Path(base).is_dir() and not Path(base).is_absolute()
    sampler = {name: value for name, value in config["sampling"]["eval"].items() if value not in (None, False)}
    return [
        "from pathlib import Path",
        "from visual_grpo.training.components import load_model",
        "from visual_grpo.config import SamplerConfig",
        "from visual_grpo.common.types import PromptRecord",
        "",
        *([f"# {base} is relative to the project's folder: run this there."] if is_relative else []),
        "folder = Path('FOLDER')  # of this card",
        f"model = load_model({base!r}, size={size}, train={list(modules)}, adapters=folder)",
        f"sampler = SamplerConfig(**{sampler})",
        "[sample] = model.generate([PromptRecord(id='1', prompt='...')], [0], sampler)  # seed 0",
    ]


def _of_module(config: Parameters, module: str) -> str:
    """Learning rate, LoRA and the weights of the rewards in the training of one module."""
    weights = ", ".join(f"{name} {weight:g}" for name, weight in config.weights([module]).items())
    grpo, lora = config.grpo_of(module), config.lora_of(module)
    return f"learning rate {grpo.learning_rate:g}, rank {lora.rank}, rewards and their weights: {weights}"


def _licence(base: str) -> str:
    """Returns where to read the base model's licence."""
    found = [name for name in _LICENCE_FILES if (Path(base) / name).is_file()]
    if found:
        return f"`{Path(base) / found[0]}`"
    return "pretrained here on drawn pictures, none" if Path(base).is_dir() else f"https://huggingface.co/{base}"


DECISIVE = ("src", "conf", "dvc.yaml", "pyproject.toml", "requirements.lock", "quantised.lock", ":(glob)*.py")
"""What results depend on. Changes elsewhere, such as a report written after the commit, do not count as dirty."""
_LIBRARIES = ("torch", "transformers", "diffusers", "peft", "kedro", "mlflow")
_DVC = "dvc."
_DVC_SECONDS = 60


def command() -> str:
    """The command line of this process, as it can be pasted into a terminal in the project's folder."""
    program = Path(sys.argv[0])
    is_kedro = "kedro" in (program.name, program.parent.name)
    words = launcher() or ([".venv/bin/kedro"] if is_kedro else [])
    return shlex.join([*words, *sys.argv[1:]] if words else ["python", *sys.orig_argv[1:]])


def tags(project: Path) -> dict[str, str]:
    """The lineage tags of a run that starts now in ``project``, and MLflow's own of its user and source."""
    from mlflow.tracking.context.git_context import GitRunContext
    from mlflow.tracking.context.registry import resolve_tags

    return {
        **resolve_tags(ignore=[GitRunContext]),  # type: ignore[list-item]
        "command": command(),
        **git_tags(project),
        **version_tags(),
    }


def version_tags() -> dict[str, str]:
    """``version.<library>`` of the libraries that numerical results depend on, and of Python."""
    versions = {f"version.{name}": metadata.version(name) for name in _LIBRARIES}
    return versions | {"version.python": platform.python_version()}


def resumed(earlier: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The tags of a run that goes on: its first ones stay, and what is another now is a line of ``resumed.NAME``.

    Args:
        earlier: the tags that this returned for the part before, or those of a run that was never resumed.
    """
    tags = {**now, **earlier}
    for name, value in now.items():
        before = earlier.get(f"resumed.{name}", "")
        if tags[name] != value and not before.endswith(value):
            tags[f"resumed.{name}"] = f"{before}\n{value}".lstrip("\n")
    return tags


def git_tags(project: Path) -> dict[str, str]:
    """``git.commit`` and ``git.state`` (clean or dirty); empty without a git repository."""
    commit = _output(project, "git", "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _output(project, "git", "status", "--porcelain", "--", *DECISIVE)
    return {"git.commit": commit.strip(), "git.state": "dirty" if changes else "clean"}


def changes(project: Path) -> str:
    """The difference to the commit, new files included, as a patch for ``git apply``; empty where clean or no git."""
    patch = _output(project, "git", "diff", "--binary", "HEAD", "--", *DECISIVE) or ""
    new = _output(project, "git", "ls-files", "--others", "--exclude-standard", "-z", "--", *DECISIVE) or ""
    for file in filter(None, new.split("\0")):
        # git's exit code is 1 where files differ.
        patch += _output(project, "git", "diff", "--binary", "--no-index", "/dev/null", file, codes=(0, 1)) or ""
    return patch


def dvc_tags(project: Path, inputs: Sequence[str]) -> dict[str, str]:
    """``dvc.<path>`` -> DVC's hash of what it tracks in ``inputs`` and is on disk as DVC recorded it.

    Empty where DVC is not used or not installed.
    """
    folders = set(map(Path, inputs))
    known = {Path(path): digest for path, digest in recorded(project).items()}
    known = {path: digest for path, digest in known.items() if {path, *path.parents} & folders}
    asked = (sys.executable, "-m", "dvc", "data", "status", "--json")
    status = _output(project, *asked, seconds=_DVC_SECONDS) if known else None
    if status is None:
        return {}
    changed = set(map(Path, _texts(json.loads(status).get("uncommitted", {}))))
    changed |= {folder for path in changed for folder in path.parents}
    return {f"{_DVC}{path.as_posix()}": digest for path, digest in known.items() if path not in changed}


def dvc_hashes(facts: Mapping[str, Any]) -> dict[str, str]:
    """Path -> DVC hash of what a training read, by its facts or a version's tags."""
    return {name.removeprefix(_DVC): str(value) for name, value in facts.items() if name.startswith(_DVC)}


def recorded(project: Path) -> dict[str, str]:
    """Path -> hash of all outputs in dvc.lock, also those of environments, and in the ``*.dvc`` files.

    Raises:
        UserError: a dvc.lock is damaged.
    """
    locks = [Path("dvc.lock"), *sorted(lock.relative_to(project) for lock in project.glob("conf/*/dvc.lock"))]
    stages = [stage for lock in locks for stage in stages_of(lock, project).values()]
    found = {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", []) if "md5" in out}
    for file in dvc_files(project):
        for out in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("outs", []):
            if "md5" in out:
                found[(file.parent / out["path"]).relative_to(project).as_posix()] = out["md5"]
    return found


def stages_of(lock: Path, project: Path) -> dict[str, Any]:
    """The stages in a dvc.lock, a path in ``project``; none where there is no such file.

    Raises:
        UserError: it is damaged, for example by a merge.
    """
    file = project / lock
    try:
        stages: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))["stages"]
        if all(out["path"] for stage in stages.values() for out in stage.get("outs", [])):
            return stages
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, TypeError, KeyError, AttributeError):
        pass
    raise UserError(f"{lock} is damaged. Put back the one that git has: git checkout {lock}")


def dvc_files(project: Path) -> list[Path]:
    """The ``*.dvc`` of what DVC tracks beside its stages, in the project's folder and anywhere in ``data``."""
    # In the outputs' folders others may be at work.
    # Skips what another process removes meanwhile, where `Path.rglob` would raise FileNotFoundError.
    files = (Path(folder, name) for folder, _, names in os.walk(project / "data") for name in names)
    inside = (file for file in files if file.suffix == ".dvc")
    return sorted(file for file in (*project.glob("*.dvc"), *inside) if file.is_file())  # DVC's own is a folder.


def _texts(tree: Any) -> list[str]:
    """All paths in DVC's ``{"modified": [...], "renamed": [{"old": ..., "new": ...}], ...}``."""
    if isinstance(tree, str):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [text for part in parts for text in _texts(part)]


def _output(folder: Path, *arguments: str, codes: tuple[int, ...] = (0,), seconds: float | None = None) -> str | None:
    """Returns the output of a command; None if it cannot be run or fails."""
    try:
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode in codes else None
