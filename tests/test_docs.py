"""The pages say what is true: blocks parse and validate, links resolve, and what they list is what the code has."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import jsonl, mask, picture
from tests.doc_commands import check_command, check_parameters, is_parameter, parameters_of
from tests.evaluation.test_browser import BROWSER, SETTINGS
from tests.markdown import EXAMPLES, PAGES, ROOT, Block, blocks, files_before, inline_code
from tests.toys import CountingScorer, ToyGaussianPolicy, ToyTokenPolicy, records
from visual_grpo.config import DataConfig, GRPOConfig, Parameters
from visual_grpo.data.columns import PICTURES
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.preparation import Preparation
from visual_grpo.data.sources import LAYOUTS
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.grpo.two_stage import AlternatingTrainer
from visual_grpo.tracking.sync import result_metrics
from visual_grpo.training.components import load_model

DOCS = ROOT / "docs"
TABLES = ("| layout | files |", "| key | meaning |")
LANGUAGES = {"console", "python", "yaml", "json", "math", "text"}


def each(*languages: str) -> pytest.MarkDecorator:
    found = blocks(*languages)
    return pytest.mark.parametrize("block", found, ids=[block.where for block in found])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the configuration."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf", ignore=shutil.ignore_patterns("parameters.yml.*"))
    shutil.rmtree(tmp_path / "conf" / "local")
    (tmp_path / "conf" / "local").mkdir()
    return tmp_path


def test_every_block_says_what_it_is() -> None:
    assert [block.where for block in blocks() if block.language not in LANGUAGES] == []
    fences = {page: page.read_text(encoding="utf-8").count("\n```") for page in PAGES}
    assert {page.name: count for page, count in fences.items() if count != 2 * len(blocks(page=page))} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_is_in_a_table(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.M)
    assert [table.splitlines()[0] for table in tables if not re.search(r"\A.*\n\|[-|: ]+\|$", table, re.M)] == []


@each("console")
def test_commands_start(block: Block, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block.commands, f"{block.where} has no line with a $"
    monkeypatch.chdir(project)
    write(files_before(block), project, monkeypatch)
    for words in block.commands:
        check_command(words, project)


@each("yaml")
def test_settings_are_valid(block: Block, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A section may speak of a module that one before it shows.
    modules = {b.file: b.text for b in blocks("python", page=block.page) if b.file and b.line <= block.line}
    write({**modules, **files_before(block), "conf/local/parameters.yml": block.text}, project, monkeypatch)
    config = parameters_of(project)
    if "my_family" not in block.text:  # Its family is tested in test_add_a_flow_model.
        family = "glm_image" if config.model.family == "auto" else config.model.family  # The model is not there.
        check_parameters(config.model_copy(update={"model": config.model.model_copy(update={"family": family})}))


@each("python")
def test_code_compiles_and_what_it_imports_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@each("json")
def test_records_are_accepted(block: Block, tmp_path: Path) -> None:
    row = json.loads(block.text)
    for name in re.findall(r'"([\w/]+\.png)"', block.text):
        picture(tmp_path / "data" / name, colour="white")
    if "mask" in row:
        mask(tmp_path / "data" / row["mask"], (40, 40), row["box"])
    jsonl(tmp_path / "data/records.jsonl", [row])
    task = "segmentation" if "query" in row else "i2i" if "source_image" in row else "t2i"
    config = {"path": str(tmp_path / "data"), "height": 32, "width": 64, "task": task}
    Preparation(DataConfig.model_validate(config | {"strict": True, "eval_share": 0, "held_out_share": 0})).write(
        tmp_path / "out/records.parquet"
    )
    assert len(RecordTable(tmp_path / "out/records.parquet")) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_parameters_and_commands_in_the_lines_exist(page: Path, project: Path) -> None:
    sections = "|".join(Parameters.model_fields)
    for code in inline_code(page):
        for setting in re.findall(rf"^((?:{sections})\.[\w.]+)(?<!\.py|txt)(?<!jsonl)(?:=\S*)?$", code):
            assert is_parameter(setting), f"{page.name}: {setting}"
        if re.match(r"(\.venv/bin/)?kedro run", code) and "=aura_flow" not in code:
            check_command(code.split(), project)


def test_links_of_the_readme_resolve() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *EXAMPLES):
        text = page.read_text(encoding="utf-8")
        for path, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", text):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {path}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {path}#{anchor}"


@pytest.mark.slow  # As make docs.
def test_the_site_builds_strictly_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    site, path = tmp_path / "site", os.pathsep.join([str(ROOT / "src"), *sys.path])
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = os.environ | {"PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # --quiet would not count warnings.
    pages = {page.relative_to(site).as_posix(): page.read_text("utf-8") for page in site.rglob("*.html")}
    for name, html in pages.items():
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(?:https?:)?//[^>]*', html), name
    assert "grpo.advantage_scale" not in pages["reference/parameters.html"], "in its section's table, by its own name"
    for field in ("advantage_scale", "held_out_share", "window_steps", "rollouts"):
        assert f"<code>{field}</code>" in pages["reference/parameters.html"]
    for name in ("training.components.load_policy", "grpo.advantages.group_advantages", "grpo.losses.k3_kl"):
        assert f'id="visual_grpo.{name}"' in pages["reference/python.html"]
    formulas = pages["algorithms.html"]
    assert formulas.count("<math") > 60
    assert not re.search(r"\\(frac|text|sum|log|left)", formulas)
    assert "source/src/visual_grpo/grpo/advantages.py.txt" in formulas
    assert (site / "source/src/visual_grpo/grpo/advantages.py.txt").is_file()
    if BROWSER is not None:
        profile = ("--virtual-time-budget=15000", f"--user-data-dir={tmp_path / 'profile'}")
        words = [BROWSER, *SETTINGS, *profile, "--dump-dom", f"{(site / 'index.html').as_uri()}?q=alarm"]
        shown = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
        assert re.search(r"[1-9]\d* matching documents", shown), "the search needs no server"
        assert too_wide(site, 390, tmp_path / "profile") == too_wide(site, 1400, tmp_path / "profile") == []


def too_wide(site: Path, width: int, profile: Path) -> list[str]:
    """The pages that are wider than their window, or have a table that is cut, in windows of ``width`` pixels."""
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html"))
    frames = "".join(f'<iframe style="width: {width}px; border: 0" src="{page}"></iframe>' for page in pages)
    (site / "framed.html").write_text(f"<!doctype html>{frames}<script>{MEASURE}</script>", encoding="utf-8")
    options = ("--allow-file-access-from-files", f"--window-size={width + 200},900", f"--user-data-dir={profile}")
    words = [str(BROWSER), *SETTINGS, *options, "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run(
        [*words, (site / "framed.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    (site / "framed.html").unlink()
    found = re.search(r'data-wide="([^"]*)"', shown.stdout)
    assert found is not None
    return found[1].split()


MEASURE = """addEventListener("load", () => {
  const cut = (element) => element.scrollWidth > element.clientWidth;
  const wide = [...document.querySelectorAll("iframe")].filter((frame) => {
    const page = frame.contentDocument;
    return cut(page.documentElement) || [...page.querySelectorAll(".md-typeset__scrollwrap")].some(cut);
  });
  document.documentElement.dataset.wide = wide.map((frame) => frame.getAttribute("src")).join(" ");
});"""


def test_the_page_of_metrics_names_every_metric_and_no_other() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    explained = explained_in(text.split("## Reward", 1)[1].split("## Result", 1)[0])
    of_the_run = {"eval/total", "part/NAME/PART", "seconds/checkpoint", "updates_skipped", "advantage_share/NAME"}
    of_the_run |= {"sampler_gap/mean", "sampler_gap/max"}  # Where the ratio compares with the replay.
    of_the_run |= {"watch/NAME", "watch_low/NAME", "watch_high/NAME"}
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/visual_grpo/models").rglob("*.py"))
    of_policies = set(re.findall(r'"((?:seconds|speed)/\w+|entropy|tokens_per_sample|velocity_norm)"', source))
    assert {general(name) for name in logged()} | of_policies | of_the_run == explained


def test_the_page_of_metrics_names_the_results_of_a_run() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    numbers = dict.fromkeys(("baseline", "trained", "difference", "ci_low", "ci_high"), 1.0)
    verdict = {"unscored_trained": 0, "unscored_baseline": 0, "prompts": 1, "control": numbers, "task": numbers}
    verdict |= {"judges": [numbers | {"name": "NAME"}]}
    assert set(result_metrics({**numbers, **verdict})) == explained_in(
        text.split("## Result", 1)[1].split("## The verdict", 1)[0]
    )


def explained_in(text: str) -> set[str]:
    """The names in the first column of the tables."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def general(name: str) -> str:
    """A metric's name with NAME for a reward and K for a number, without the module."""
    name = re.sub(r"^(ar|dit)/", "", name)
    name = re.sub(r"^reward/count(_std)?$", r"reward/NAME\1", name)
    return re.sub(r"^update_\d", "update_K", name)


def logged() -> set[str]:
    """The metrics of a step with one module and with two."""
    config = GRPOConfig(
        steps=1, prompts_per_step=2, group_size=4, learning_rate=0.1, updates_per_rollout=2, target_kl=0.1
    )

    def trainer(policy: Any) -> Any:
        return GRPOTrainer(policy, CountingScorer(), config)

    both = AlternatingTrainer({"ar": trainer(ToyTokenPolicy()), "dit": trainer(ToyGaussianPolicy())}, 1, 0)
    return {name for t in (trainer(ToyTokenPolicy()), both) for step in t.fit(records(4)) for name in step.values}


def test_the_page_of_own_data_lists_the_layouts_and_keys() -> None:
    text = (DOCS / "own_data.md").read_text(encoding="utf-8")
    layouts, keys = (re.findall(r"^\| `(\w+)` \|", text.split(head, 1)[1].split("\n\n", 1)[0], re.M) for head in TABLES)
    assert layouts == list(LAYOUTS)
    assert set(keys) == {columns[0] for columns in PICTURES.values()} | {"id", "group", "metadata"}


def write(files: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a page's files; its Python files can be imported."""
    monkeypatch.syspath_prepend(folder)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        if name.endswith(".py"):
            monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_after(heading: str, model: Path) -> str:
    """The first Python block of a section, with the trained model's folder replaced and less work."""
    match = re.search(r"```python\n(.*?)```", README.split(f"## {heading}\n", 1)[1], re.DOTALL)
    assert match is not None
    return match[1].replace("data/06_models/base", str(model)).replace("steps=20", "steps=2")


def test_the_core_without_kedro(
    pipeline_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code_after("The core without Kedro", pipeline_folder), "README.md", "exec"), {})
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2"]
    assert (tmp_path / "redness-adapter" / "adapter_model.safetensors").is_file()


def test_the_adapters_load_as_shown(pipeline_folder: Path, tmp_path: Path) -> None:
    load_model(str(pipeline_folder), train=["ar", "dit"]).adapters.save(tmp_path)
    shown = code_after("Use the adapters", pipeline_folder).replace("data/06_models/adapters", str(tmp_path))
    names: dict[str, Any] = {}
    exec(compile(shown, "README.md", "exec"), names)
    assert names["image"].size == (128, 128)


def test_it_is_for_the_first_ten_minutes() -> None:
    assert len(README.split()) <= 1300
    assert README.count(".venv/bin/") <= 5
    headings = re.findall(r"^## (.*)$", README, re.M)
    assert headings[:7] == [
        *("Demo", "Compared with other projects", "What it does", "Your data", "Your reward", "Your model", "Your GPU")
    ]


def test_every_promise_of_security_md_is_held_by_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    promises = re.findall(r"^\|.*\| (`tests/.*) \|$", text, re.M)
    assert len(promises) >= 10
    for promise in promises:
        file = ""
        for name in re.findall(r"`([^`]+)`", promise):  # A test without a file is in the one before it.
            before, _, test = name.rpartition("::")
            file = before or file
            assert re.search(rf"\bdef {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), f"{file}::{test}"
