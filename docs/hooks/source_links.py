"""Links from a page to a file of the repository open in the site too: the file is copied there as text.

So the same Markdown works on GitHub and offline.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(\))")


def on_files(files: Any, config: Any) -> Any:
    """Adds every file outside of docs/ that a page links to."""
    docs = Path(config["docs_dir"])
    linked = {target for file in list(files.documentation_pages()) for target in _targets(file, docs)}
    for target in sorted(linked):
        text = target.read_text(encoding="utf-8")
        files.append(File.generated(config, _place(target, docs), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **ignored: Any) -> str:
    """Points the links at the copies."""
    docs = Path(config["docs_dir"])

    def replaced(match: re.Match[str]) -> str:
        target = _outside(page.file, match[2], docs)
        if target is None:
            return match[0]
        return f"{match[1]}{os.path.relpath(_place(target, docs), Path(page.file.src_uri).parent)}{match[3]}"

    return LINK.sub(replaced, markdown)


def _targets(page: Any, docs: Path) -> set[Path]:
    found = (_outside(page, match[2], docs) for match in LINK.finditer(page.content_string))
    return {target for target in found if target is not None}


def _outside(page: Any, link: str, docs: Path) -> Path | None:
    """The file that a link of a page names, if it is in the repository but not in docs/."""
    target = (docs / page.src_uri).parent.joinpath(link).resolve()
    return target if target.is_file() and not target.is_relative_to(docs) else None


def _place(target: Path, docs: Path) -> str:
    """Where the copy is in the site; .txt, because browsers save a .py instead of showing it."""
    return f"source/{target.relative_to(docs.parent).as_posix()}.txt"
