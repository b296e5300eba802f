"""What the pages say: their blocks of commands, code and settings, and the names in their lines."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *EXAMPLES, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    heading: str
    language: str
    options: str
    """What follows the language, such as ``title="my_family.py"``."""
    text: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a console block; lines without ``$`` are its output."""
        joined = self.text.replace("\\\n", " ")
        return [shlex.split(line[2:]) for line in joined.splitlines() if line.startswith("$ ")]

    @property
    def file(self) -> str | None:
        """The file that the block is the content of, as its first line says: ``# my_rewards.py``."""
        match = re.match(r"# ([\w./]+\.(?:py|yml|txt))\n", self.text)
        return match[1] if match else None


def blocks(*languages: str, page: Path | None = None) -> list[Block]:
    """Those of all pages, or of one."""
    found = [block for path in PAGES if page in (None, path) and path.exists() for block in _of(path)]
    return [block for block in found if not languages or block.language in languages]


def files_before(block: Block) -> dict[str, str]:
    """Name -> content of the files that the page shows in the block's section."""
    own = [b for b in blocks(page=block.page) if b.heading == block.heading and b.line <= block.line]
    return {b.file: b.text for b in own if b.file}


def inline_code(page: Path) -> list[str]:
    """What stands between backticks in the page's lines."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))


def _of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        before = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text[: match.start()])
        headings = re.findall(r"^#+ (.*)$", before, re.M)
        found.append(
            Block(page, headings[-1] if headings else "", match[1], match[2].strip(), match[3], before.count("\n") + 1)
        )
    return found
