"""The page of the pipeline vote in a real browser, at the width of a phone and of a desk."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.test_browser import BROWSER, SETTINGS
from tests.evaluation.test_report import HOSTILE
from tests.rewards.votes.voters import ballot
from visual_grpo.rewards.votes import server
from visual_grpo.rewards.votes.choices import read_choices

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")

# The page again, in a frame as wide as a phone; there somebody presses keys, as quickly as a machine can.
PROBE = """<script>if (self === top) addEventListener("load", () => {
  const frame = document.createElement("iframe");
  frame.style = "width: 390px; height: 800px; border: 0; flex: none";
  document.body.append(frame);
  frame.onload = async () => {
    const page = frame.contentWindow, get = (id) => page.document.getElementById(id);
    const press = (key) => page.dispatchEvent(new page.KeyboardEvent("keydown", { key }));
    const rest = () => new Promise((resolve) => setTimeout(resolve, 300));
    await rest();
    const prompts = [get("prompt").textContent];
    const images = [...page.document.querySelectorAll("#sides img")].map((image) => image.naturalWidth);
    const needed = page.document.documentElement.scrollWidth;
    const high = get("answers").getBoundingClientRect().bottom;
    for (const key of ["1", "2", "0", "s"]) {
      press(key);
      press(key);
      await rest();
      prompts.push(get("prompt").textContent);
    }
    press("u");
    await rest();
    prompts.push(get("prompt").textContent);
    const count = get("count").textContent;
    get("finish").click();
    await rest();
    document.documentElement.dataset.probe =
      JSON.stringify({ prompts, images, needed, high, count, said: get("said").textContent });
  };
  frame.src = "?frame";
});</script>"""


def browse(url: str, profile: Path) -> tuple[str, list[str]]:
    """The document some seconds after loading, and what the page wrote to the console."""
    patience = "--virtual-time-budget=8000"
    command = [str(BROWSER), *SETTINGS, patience, f"--user-data-dir={profile}", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_pictures_are_chosen_with_keys_at_the_width_of_a_phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = ballot(tmp_path, 8)
    running.pairs = {
        name: replace(pair, prompt=(HOSTILE * 8)[number]) for number, (name, pair) in enumerate(running.pairs.items())
    }
    page = Path(shutil.copytree(server._PAGE, tmp_path / "page")) / "index.html"
    page.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    # Without the page's own policy the probe may run, and text alone must keep prompts from running.
    monkeypatch.setattr(server, "_PAGE", page.parent)
    monkeypatch.setattr(server, "_POLICY", "")
    with server.served(running, "ann") as url:
        document, console = browse(url, tmp_path / "profile")
    assert console == []
    found = re.search(r'data-probe="([^"]*)"', document)
    assert found is not None
    probe: dict[str, Any] = json.loads(unescape(found.group(1)))
    assert probe["images"] == [24, 24]
    assert probe["needed"] <= 390
    assert probe["high"] <= 800
    standing = read_choices(tmp_path / "choices.jsonl").standing
    # Each key counted once although it was pressed twice; the fourth was taken back.
    assert [choice.choice for choice in standing][2:] == ["tie"]
    assert [choice.choice == choice.shown_left for choice in standing[:2]] == [True, False]
    assert probe["count"] == "3 of 8"
    assert probe["prompts"][:3] == [choice.of.prompt for choice in standing]
    assert probe["prompts"][5] == probe["prompts"][3]
    assert probe["said"].startswith("Finished")
    assert running.finished.is_set()


def test_the_page_as_it_is_obeys_its_policy(tmp_path: Path) -> None:
    with server.served(ballot(tmp_path), "ann") as url:
        document, console = browse(url, tmp_path / "profile")
    assert console == []
    assert '<span id="count" aria-live="polite">0 of 4</span>' in document
    assert re.search(r'<img alt="the first picture" src="picture/\d+\.png">', document)
