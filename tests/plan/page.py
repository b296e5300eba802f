"""Plans every released configuration by its parameters and writes docs/plan.md:

python -m tests.plan.page
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from visual_grpo import console
from visual_grpo.config import Parameters, merged
from visual_grpo.config.outputs import with_output_folders
from visual_grpo.plan.cards import CARDS
from visual_grpo.plan.make import make_plan
from visual_grpo.third_party_output import hidden_progress_bars

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/plan.md"
CONFIGURATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "glm_image": ("glm_image", {}),
    "glm_image, decoder": ("glm_image", {"policy": {"train": "dit"}}),
    "sd3": ("sd3", {}),
    "qwen_image": ("qwen_image", {}),
    "glm_image, 24 GB": (
        "glm_image",
        {
            "model": {"offload": "phases"},
            "policy": {"rollout_batch": 8, "denoise_batch": 2},
            "plan": {"gpu": "RTX 4090"},
        },
    ),
    "glm_image, decoder, 24 GB": (
        "glm_image",
        {
            "model": {"offload": "phases"},
            "policy": {"train": "dit", "rollout_batch": 8, "denoise_batch": 2},
            "plan": {"gpu": "RTX 4090"},
        },
    ),
    "qwen_image, 48 GB": ("qwen_image", {"model": {"offload": "phases"}, "plan": {"gpu": "RTX A6000"}}),
    "glm_image, 4 bits, 24 GB": (
        "glm_image",
        {
            "model": {"base_weights": "4bit"},
            "policy": {"rollout_batch": 8, "denoise_batch": 2},
            "plan": {"gpu": "RTX 4090"},
        },
    ),
    "qwen_image, 4 bits, 24 GB": (
        "qwen_image",
        {"model": {"base_weights": "4bit", "offload": "phases"}, "plan": {"gpu": "RTX 4090"}},
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen2_5_vl, 3B": ("qwen2_5_vl", {"model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct"}}),
}
"""Name in the tables -> environment, and what is changed of it."""
BEGIN, END = "<!-- figures: python -m tests.plan.page -->", "<!-- end of the figures -->"


def parameters_of(environment: str, changes: Mapping[str, Any]) -> Parameters:
    """As ``kedro run --env`` reads them."""
    base, own = (yaml.safe_load((ROOT / f"conf/{name}/parameters.yml").read_text()) for name in ("base", environment))
    return Parameters.model_validate(with_output_folders(merged(merged(base, own), changes), environment))


def tables(plans: Mapping[str, Mapping[str, Any]], before: str) -> str:
    """Markdown; a configuration that is not planned now keeps its rows of ``before``."""
    kept = _rows_of(before)
    blocks = []
    for make in (_memory, _cards, _batches):
        header, rule, *rows = make(plans)
        now = kept.get(header, {}) | dict(zip(plans, rows, strict=True))
        blocks.append("\n".join([header, rule, *(now[name] for name in CONFIGURATIONS if name in now)]))
    return "\n\n".join(blocks)


def _rows_of(page: str) -> dict[str, dict[str, str]]:
    """Header -> configuration -> row."""
    found: dict[str, dict[str, str]] = {}
    header = ""
    for line in page.splitlines():
        if line.startswith("| configuration"):
            header = line
        elif line.startswith("| "):
            found.setdefault(header, {})[line.split("|")[1].strip()] = line
    return found


def _memory(plans: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| configuration | weights | peak of a step or an evaluation | where | host waits a step | host memory |"]
    lines.append("|---|---|---|---|---|---|")
    for name, plan in plans.items():
        phases = [*plan["step"], *(phase for own in plan["evaluation"].values() for phase in own)]
        most = max(phases, key=lambda phase: float(phase["peak_gb"]))
        waits = sum(phase["host_waits"] for phase in plan["step"])
        weights, peak = plan["weights_gb"], plan["peak_gb"]
        lines.append(
            f"| {name} | {weights:.1f} GB | {peak:.1f} GB | {most['phase']} | {waits:,} | {plan['host_gb']:.1f} GB |"
        )
    return lines


def _cards(plans: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| configuration | " + " | ".join(CARDS) + " |", "|---|" + "---|" * len(CARDS)]
    for name, plan in plans.items():
        cells = [
            f"{card['step_seconds']:,.0f} s, {card['run_hours']:,.0f} h" if card["fits"] else "does not fit"
            for card in plan["cards"]
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _batches(plans: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| configuration | card | largest batches that fit, one changed at a time |", "|---|---|---|"]
    for name, plan in plans.items():
        found = [f"`{b['parameter']}` {b['largest']} (set: {b['value']})" for b in plan["largest_batches"]]
        lines.append(f"| {name} | {plan['card']['name']} | {', '.join(found)} |")
    return lines


def main(names: Sequence[str]) -> None:
    for name in names or CONFIGURATIONS:
        environment, changes = CONFIGURATIONS[name]
        with hidden_progress_bars():
            plan = make_plan(parameters_of(environment, changes))
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        figures, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{tables({name: plan}, figures)}\n{END}{after}", encoding="utf-8")
        console.note(f"{name}: {plan['peak_gb']:.1f} GB, {sum(plan['host_waits'].values())} waits")


if __name__ == "__main__":
    main(sys.argv[1:])
