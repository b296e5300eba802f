"""Zips, which are unpacked into a cache, and webdataset's tars, which are read in place; both within limits.

A few bytes of an archive may unpack to any number of them, on the disk or in memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from filelock import FileLock

from visual_grpo.common.digests import file_digest
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import fresh_folder, new_folder
from visual_grpo.config import DataConfig
from visual_grpo.data.record import EmbeddedImage, Limits, Rejected, is_system_file

_MB = 1_000_000
_UTF8 = 1 << 11
"""Flag of a zip's entry: its name is UTF-8."""
_UNICODE_PATH = 0x7075
"""Kind of an entry's extra field, by Info-ZIP: a version, the CRC-32 of the entry's own name, and the name in UTF-8."""
_UNPACKING_VERSION = 2
"""To be raised with the rules by which a zip is unpacked, so that what earlier ones gave is not read."""
_ALWAYS = 100 * _MB
"""Bytes that every zip may unpack to: a short list of prompts may well be a thousand times as long as its zip."""
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
"""Splits a member's name into the record and the field: ``00000/17.edited.png`` is ``edited.png`` of ``00000/17``."""
_TEXT, _NUMBER, _JSON = {"txt", "text", "caption", "transcript"}, {"cls", "cls2", "index", "inx", "id"}, {"json", "jsn"}
"""Suffixes of members that are read as text, numbers and JSON; all others stay bytes."""


def unzipped(path: Path, data: DataConfig) -> Path:
    """Unpacks a zip, once for each content; returns the folder, or the only folder in it.

    Of several commands that share the cache, one unpacks, and the others wait.

    Raises UserError if it is damaged or unpacks to more than ``data`` and the disk allow; nothing of it is left then.
    """
    folder = _cache() / f"{file_digest(path)}.{_UNPACKING_VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _unpack(path, folder, data)
    found = [path for path in folder.iterdir() if not is_system_file(path.name)]
    return found[0] if len(found) == 1 and found[0].is_dir() else folder


def _unpack(path: Path, folder: Path, data: DataConfig) -> None:
    try:
        with ZipFile(path) as archive:
            _check(path, archive.infolist(), data, shutil.disk_usage(folder.parent).free)
            with fresh_folder(folder) as draft:
                for entry in archive.infolist():  # Windows' archives may have its separators.
                    entry.filename = _name(entry).replace("\\", "/")
                    archive.extract(entry, draft)  # Never more of a file than its header says.
                os.sync()  # If the machine fails, the folder is not there before its files.
    except (BadZipFile, RuntimeError, EOFError, OSError, ValueError, zlib.error) as error:
        raise UserError(f"{path} cannot be unpacked ({error}). Unpack it yourself and give the folder.") from error


def _name(entry: ZipInfo) -> str:
    """Returns the name of an entry: UTF-8 also without the flag, as Linux and macOS write it, where its bytes allow."""
    if entry.flag_bits & _UTF8 or entry.orig_filename.isascii():
        return entry.filename
    name, extra = entry.orig_filename.encode("cp437"), entry.extra
    while len(extra) >= 4:  # Python reads this field from 3.12 on.
        kind, size = struct.unpack_from("<HH", extra)
        if kind == _UNICODE_PATH and extra[4:9] == struct.pack("<BL", 1, zlib.crc32(name)):
            name = extra[9 : 4 + size] or name
        extra = extra[4 + size :]
    with suppress(UnicodeDecodeError):
        return name.decode().partition("\0")[0]
    return entry.filename


def _check(path: Path, entries: list[ZipInfo], data: DataConfig, free: int) -> None:
    """Raises UserError for a zip that unpacks to too many files or bytes; ``free`` are the disk's free bytes."""
    packed, size = path.stat().st_size, sum(entry.file_size for entry in entries)
    if len(entries) > data.max_zip_files:
        problem = f"{counted(len(entries), 'file')}, more than data.max_zip_files={data.max_zip_files}"
    elif size > max(_ALWAYS, packed * data.max_zip_ratio):
        times, most = size / packed, data.max_zip_ratio
        problem = f"{size / _MB:,.0f} MB, {times:,.0f} times its own size, more than data.max_zip_ratio={most:g}"
    elif size > free:
        has = f"{_cache()} has {free / _MB:,.0f} MB left"
        raise UserError(f"{path} would unpack to {size / _MB:,.0f} MB, and {has}. HF_HOME names a different disk.")
    elif any(entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED) for entry in entries):
        raise UserError(
            f"{path} has files that are compressed by a method other than deflate, whose memory has no bound. If you"
            " trust it, unpack it yourself and give the folder."
        )
    else:
        return
    raise UserError(f"{path} would unpack to {problem}. If you trust it, unpack it yourself and give the folder.")


def tar_rows(file: Path, limits: Limits) -> Iterator[tuple[int, dict[str, Any] | Rejected]]:
    """Yields (number from 1, row) of webdataset's tar: neighbours with the same name are a row of their endings.

    Members are text, numbers, JSON, or files as `EmbeddedImage`; together those of a row have the size of one file at
    most. Raises tarfile.TarError for a damaged tar, and for a compressed one, and UserError for one in which the files
    of a row are not neighbours.
    """
    names = set[str]()
    with _opened(file) as archive:
        for number, (name, members) in enumerate(groupby(_members(archive), key=lambda member: member[0]), 1):
            if name in names:
                raise UserError(
                    f"{file}: the files {name}.* are not next to each other, as webdataset has them. Write the tar"
                    " sorted by name, or unpack it and give the folder."
                )
            names.add(name)
            row: dict[str, Any] = {"__key__": name}
            size = 0
            try:
                for _, ending, member in members:
                    size += member.size  # Of a sparse one: with its holes.
                    limits.check_size(size, f"{name}.*")
                    if ending in row:
                        raise Rejected("ambiguous_key", f"there are two {name}.{ending}", "Remove one of them")
                    content = archive.extractfile(member)
                    assert content is not None
                    row[ending] = _value(content.read(), ending, f"{file.name}, row {number}, column {ending}")
                if isinstance(keys := row.get("json"), dict):
                    if "txt" not in row:  # Its caption is among the keys.
                        row = row.pop("json") | row
                    elif _is_label(keys.get("group")):
                        row = {"group": keys["group"]} | row
                yield number, row
            except Rejected as rejected:
                yield number, rejected


def _is_label(value: Any) -> bool:
    """Returns whether a value can be a group; anything may have written the JSON."""
    return bool(str(value).strip()) and isinstance(value, str | int) and not isinstance(value, bool)


def _opened(file: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(file, "r:")
    except tarfile.ReadError as error:
        raise tarfile.ReadError(f"not an uncompressed tar: {error}") from error


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # Otherwise tarfile keeps every member in memory.
        if member.size < 0:  # It would move the reader backwards, for ever.
            raise tarfile.ReadError(f"{member.name} has a negative size")
        found = _MEMBER.fullmatch(member.name)
        if member.isreg() and found and not PurePosixPath(member.name).name.startswith("__"):
            yield found[1], found[2], member


def _value(content: bytes, ending: str, name: str) -> Any:
    kind = ending.rpartition(".")[2].lower()
    if kind in _TEXT:
        return content.decode("utf-8", "surrogateescape")
    try:
        if kind in _NUMBER:
            return int(content)
        if kind in _JSON:
            return json.loads(content, parse_constant=lambda _: None)  # NaN is not valid JSON.
    except (ValueError, RecursionError) as error:
        raise Rejected("not_json", f"{name} is not valid ({error})", "Write a number or JSON") from error
    return EmbeddedImage(name, content)


def _cache() -> Path:
    """The folder of what was unpacked, next to what `datasets` unpacks."""
    from datasets import config

    return Path(config.EXTRACTED_DATASETS_PATH) / "visual_grpo"


if __name__ == "__main__":  # For `make clean`.
    if _cache().is_dir():
        # A draft is removed when the process ends. If that is interrupted, no folder has a part of its files.
        _cache().rename(new_folder(_cache()) / "cache")
