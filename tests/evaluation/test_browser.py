"""The report in a real browser: nothing overflows, fails or runs that should not, at three widths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import records
from tests.evaluation.reports import reported
from tests.evaluation.test_report import HOSTILE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")

PROMPTS = (
    *HOSTILE,
    "一个小小的红色圆形在左边，" * 40,
    "دائرة حمراء صغيرة على اليسار " * 20,
    "W" * 3000,
)
WIDTHS = (1400, 800, 390)
HEADINGS = [
    *("The trained model against the base model", "Samples", "Training", "Scores", "Greatest gains"),
    *("All pairs", "Configuration", "Where this result comes from", "Terms"),
]
TITLE = "The trained model against the base model: better (ar+dit grpo 80 steps, 2026-11-25 18:50+00:00)"
SETTINGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
)
# What a reader would do and see, written into the document, where --dump-dom shows it.
PROBE = """<script>addEventListener("load", () => {
  const broken = [...document.images].filter((image) => !image.naturalWidth).length;
  const shown = (element) => element.checkVisibility();
  document.querySelector("label[for=view1]").click();
  const panels = [...document.querySelectorAll(".panel")].map(shown);
  const first = document.querySelector("#page-of-pairs figcaption").textContent;
  document.querySelector("#samples .sides img").click();
  const large = document.querySelector("dialog[open] img");
  const flips = [large.alt];
  large.click();
  flips.push(document.querySelector("dialog[open] img").alt);
  document.getElementById("viewer").close();
  document.getElementById("next").click();
  const second = document.querySelector("#page-of-pairs figcaption").textContent;
  document.querySelectorAll("details").forEach((element) => { element.open = true; });
  document.documentElement.dataset.probe = JSON.stringify({
    width: innerWidth,
    needed: document.documentElement.scrollWidth,
    title: document.title,
    headings: [...document.querySelectorAll("h1, h2")].filter(shown).map((heading) => heading.textContent),
    panels,
    pages: [first, second, document.getElementById("page").textContent],
    broken,
    flips,
    picture: document.querySelector("#samples img").getBoundingClientRect().top + scrollY,
  });
});</script>"""

COLLECT = """addEventListener("load", () => {
  const roots = [...document.querySelectorAll("iframe")].map((frame) => frame.contentDocument.documentElement);
  document.documentElement.dataset.probes = `[${roots.map((root) => root.dataset.probe)}]`;
});"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    held_out = [replace(record, prompt=text) for record, text in zip(records("held_out", 7), PROMPTS, strict=True)]
    held_out += records("more", 8)
    filmed = [record.id for record in held_out]
    training = {"mlflow_run_id": "0" * 32, "command": "kedro run --params=" + "x" * 90, "film": filmed}
    training |= {"run.name": "ar+dit grpo 80 steps", "finished": "2026-11-25 18:50+00:00"}
    for step in range(1, 12):
        Image.new("RGB", (100, 800), (20 * step, 0, 0)).save(folder / f"film-{step:06d}.png")
    splits = {"held_out": [replace(record, split="held_out") for record in held_out], "eval": records("eval", 2)}
    tree = parameters(grpo={"loss": "dapo"}).model_dump(mode="json")
    return reported(folder, 0.2, splits, training=training, parameters=tree, adapters=folder) / "evaluation.html"


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The document after loading, and what the page wrote to the console."""
    command = [str(BROWSER), *SETTINGS, f"--user-data-dir={profile}", "--window-size=1600,900", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def framed(page: str) -> str:
    """The page in a frame of each width: a browser's window cannot be as narrow as a phone."""
    frames = "".join(
        f'<iframe style="width: {width}px; border: 0" srcdoc="{escape(page)}"></iframe>' for width in WIDTHS
    )
    return f"<!doctype html>{frames}<script>{COLLECT}</script>"


def test_the_page_fits_and_works_at_three_widths(report: Path, tmp_path: Path) -> None:
    page = report.read_text(encoding="utf-8")
    # Without the page's own policy the probe may run, and escaping alone must keep prompts from running.
    page, policies = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert policies == 1
    (tmp_path / "framed.html").write_text(framed(page.replace("</body>", f"{PROBE}</body>")), encoding="utf-8")
    document, console = browse(tmp_path / "framed.html", tmp_path / "profile")
    assert console == []
    found = re.search(r'data-probes="([^"]*)"', document)
    assert found is not None
    probes: list[dict[str, Any]] = json.loads(unescape(found.group(1)))
    assert [probe["width"] for probe in probes] == list(WIDTHS)
    for probe in probes:
        assert probe["needed"] <= probe["width"], f"the page scrolls sideways at {probe['width']} px"
        assert probe["title"] == TITLE
        assert probe["headings"] == HEADINGS
        assert probe["panels"] == [False, True], "the second sampler was chosen"
        first, second, pages = probe["pages"]
        assert (first in PROMPTS, second.startswith("more prompt"), pages) == (True, True, "2 of 2")
        assert probe["broken"] == 0
        assert probe["flips"] == ["base model's sample", "trained model's sample"]
        assert probe["picture"] < (900 if probe["width"] == 1400 else 1000), "the samples follow the verdict"


def test_the_page_as_it_is_writes_nothing_to_the_console(report: Path, tmp_path: Path) -> None:
    document, console = browse(report, tmp_path / "profile")
    assert console == []
    assert '<output id="page">1 of 2</output>' in document
    assert f"<title>{TITLE}</title>" in document


def test_it_prints_verdict_samples_curves_and_scores_on_at_most_four_pages(report: Path, tmp_path: Path) -> None:
    paper = tmp_path / "report.pdf"
    command = [str(BROWSER), *SETTINGS, f"--user-data-dir={tmp_path / 'profile'}", f"--print-to-pdf={paper}"]
    subprocess.run([*command, report.as_uri()], capture_output=True, timeout=120, check=True)
    assert 2 <= len(re.findall(rb"/Type /Page\b", paper.read_bytes())) <= 4
