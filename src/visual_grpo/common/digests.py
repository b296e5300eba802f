"""Digests of content: of files and folders, of a saved model, and of what the options of a reward name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from visual_grpo.common.files import settled, walk

_READERS = 4
"""Files that are read at once: a disk gives more than one core can digest."""


def file_digest(file: Path) -> str:
    """sha256 of the content, 64 hex digits. Raises OSError where the file cannot be read."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_once(file: Path) -> str:
    """`file_digest`, read once in a process while the file's size and time of change stay."""
    stat = file.stat()
    return _digest(file.resolve(), stat.st_size, stat.st_mtime_ns)


@cache
def _digest(file: Path, size: int, changed: int) -> str:
    return file_digest(file)


def tree_digest(folder: Path, files: Iterable[Path] | None = None) -> str:
    """sha256 over the paths and contents of ``files`` in ``folder``, or of all; each is read once in a process."""
    chosen = sorted(folder.rglob("*") if files is None else files)
    chosen = [file for file in chosen if file.is_file()]
    with ThreadPoolExecutor(_READERS) as readers:
        sums = list(readers.map(digest_once, chosen))
    listed = [[file.relative_to(folder).as_posix(), found] for file, found in zip(chosen, sums, strict=True)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


_LOADED = {".jinja", ".json", ".model", ".safetensors", ".txt"}
"""Endings of the files that a model is loaded from."""
STARTER = "starter.json"
"""File that says what the starter made the folder from (`starter.pretraining.write_once`)."""


SINGLE_FILES = (".safetensors", ".gguf", ".ckpt", ".bin", ".pt", ".pth", ".sft")
"""Endings of files of weights, whatever made them."""
_ADDRESSES = ("https://huggingface.co/", "https://hf.co/", "hf://")


def may_be_hub_id(path: str) -> bool:
    """Returns whether ``path`` looks like a hub id and does not exist on this machine."""
    return path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def on_hub(address: str) -> str | None:
    """Returns what an address of the hub names, such as OWNER/NAME or datasets/OWNER/NAME; None for any other text."""
    start = next((start for start in _ADDRESSES if address.startswith(start)), None)
    return None if start is None else address.removeprefix(start).strip("/")


def plain_dataset(path: str) -> str:
    """Returns hf://datasets/OWNER/NAME for the address of its page, and the folder for one that starts with ~. Raises
    ValueError for a different address of the hub."""
    named = on_hub(path)
    if named is None:
        return os.path.expanduser(path)  # noqa: PTH111 (a Path has no two slashes, as addresses have)
    kind, *names = named.split("/")
    if kind != "datasets" or (len(names) != 2 and not path.startswith("hf://")):
        raise ValueError(f"got {path!r}, which is not the address of a dataset: expected hf://datasets/OWNER/NAME")
    return f"hf://{named}"


def plain_path(path: str) -> str:
    """Returns a hub id for its address, and the folder for one that starts with ~. Raises ValueError for a file, and
    for the address of something inside a repository."""
    if not path.startswith(_ADDRESSES) and path.endswith(SINGLE_FILES):
        raise ValueError(
            f"got {path!r}, a single file of weights, which is not read: expected a folder or a hub id in the format of"
            " diffusers or transformers. A LoRA is named by train.start"
        )
    if path.startswith("~"):
        return str(Path(path).expanduser())
    if (named := on_hub(path)) is None:
        return path
    owner, _, rest = named.partition("/")
    name, _, inside = rest.partition("/")
    if not name or inside:
        branch = inside.removeprefix("tree/")
        revision = f" and model.revision={branch}" if inside != branch and "/" not in branch else ""
        raise ValueError(
            f"got {path!r}, which is not the address of a model's page: expected OWNER/NAME"
            + (f", here {owner}/{name}{revision}" if name and owner != "datasets" else "")
        )
    return f"{owner}/{name}"


def content_digest(folder: str | Path) -> str | None:
    """A hex digest of everything that a model is loaded from; None for a hub id, whose files are not here.

    Every byte is read once in a process.
    """
    root = settled(Path(folder))
    if not root.is_dir():
        return None
    found = (Path(base, name) for base, _, names in walk(root) for name in names)
    inside = (file.relative_to(root) for file in found if file.suffix in _LOADED and file.name != STARTER)
    return tree_digest(root, (root / file for file in inside if not any(part.startswith(".") for part in file.parts)))


CACHE = "cache"
"""The option, at any depth, that names a place which the reward writes into."""


def option_files(options: Mapping[str, Any], output: str, base: Path = Path()) -> dict[str, str]:
    """12 hex digits of the content of each file, and of each folder with all that is in it, by the option's dotted
    name. Everything is read once in a process.

    Left out are `CACHE`, and folders that hold the project or ``output``, in which a run itself writes.

    Args:
        base: the project's folder, which relative paths start from.
    """
    return {
        name: (digest_once(path) if path.is_file() else tree_digest(path))[:12]
        for name, path in named_paths(options, output, base)
    }


def named_paths(options: Mapping[str, Any], output: str, base: Path = Path()) -> Iterator[tuple[str, Path]]:
    """The option's dotted name, and the file or folder, which exists."""
    for name, text in option_texts(options):
        path = _existing(text, base)
        if path is not None and not _holds(path, base) and not _holds(path, base / output):
            yield name, path


def option_texts(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Each text in the options of a reward, at any depth, after its dotted name, except `CACHE`."""
    if isinstance(value, str):
        yield name, value
        return
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items() if key != CACHE]
    elif isinstance(value, list | tuple):
        parts = [(str(number), part) for number, part in enumerate(value)]
    else:
        return
    for key, part in parts:
        yield from option_texts(part, f"{name}.{key}" if name else key)


def _existing(text: str, base: Path) -> Path | None:
    try:
        path = base / Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # No path: a long text, one with a zero, or ~ of nobody.
        return None


def _holds(path: Path, inner: Path) -> bool:
    return path.is_dir() and inner.resolve().is_relative_to(path.resolve())
