"""Signs a folder and verifies it: ``signature.py sign|verify FOLDER KEY``.

``SHA256SUMS`` lists all other files of the folder in sha256sum's format, and ``SHA256SUMS.sig`` is openssl's signature
of that list. Only Python's own library and openssl are needed, so that a folder can be verified before anything is
installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
_LINE = re.compile(rb"([0-9a-f]{64})  \./([^\n]+)\n")


class SignatureError(Exception):
    """The folder cannot be signed, or is not what was signed."""


def sign(folder: Path, key: Path) -> None:
    """Writes `SUMS` and `SIGNATURE` into ``folder``; ``key`` is a private key. Raises SignatureError."""
    found = _digests(folder)
    if unlisted := [name for name in found if "\n" in name]:
        raise SignatureError(f"A name with a line break cannot be listed: {_shown(unlisted)}.")
    sums = b"".join(b"%s  ./%s\n" % (found[name].encode(), os.fsencode(name)) for name in sorted(found))
    signature = _openssl("-sign", key, sums=sums)
    (folder / SUMS).write_bytes(sums)
    (folder / SIGNATURE).write_bytes(signature)


def verify(folder: Path, key: Path) -> None:
    """Raises SignatureError unless ``folder`` has exactly the files that the owner of the public ``key`` signed."""
    found = _digests(folder)
    try:
        sums = (folder / SUMS).read_bytes()
    except OSError as error:
        raise SignatureError(f"There is no {SUMS}: {error.strerror}. Expected a folder that was signed.") from error
    _openssl("-verify", key, "-signature", folder / SIGNATURE, sums=sums)
    lines = _LINE.findall(sums)
    signed = {os.fsdecode(name): digest.decode() for digest, name in lines}
    if len(signed) != len(lines) or _LINE.sub(b"", sums):
        raise SignatureError(f"{SUMS} is not a list of sha256sum, or lists a file twice.")
    differences = {
        "changed": [name for name in signed.keys() & found.keys() if signed[name] != found[name]],
        "added": list(found.keys() - signed.keys()),
        "removed": list(signed.keys() - found.keys()),
    }
    if told := [f"{what}: {_shown(names)}" for what, names in differences.items() if names]:
        raise SignatureError("The files differ from the signed ones. " + "; ".join(told) + ".")


def _digests(folder: Path) -> dict[str, str]:
    """Returns the sha256 of each file below ``folder``, without `SUMS` and `SIGNATURE` at its top.

    Raises SignatureError for a link, which leads to bytes that nobody signed, and for a pipe, socket or device.
    """
    if not folder.is_dir():
        raise SignatureError(f"{_shown([str(folder)])} is not a folder.")
    entries = [entry for entry in folder.rglob("*") if not stat.S_ISDIR(entry.lstat().st_mode)]
    special = [str(entry.relative_to(folder)) for entry in entries if not stat.S_ISREG(entry.lstat().st_mode)]
    if special:
        raise SignatureError(f"Expected files and folders alone, no links, pipes or devices: {_shown(special)}.")
    files = {str(entry.relative_to(folder)): entry for entry in entries}
    return {name: _sha256(file) for name, file in files.items() if name not in (SUMS, SIGNATURE)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _openssl(*words: str | Path, sums: bytes) -> bytes:
    try:
        done = subprocess.run(["openssl", "dgst", "-sha256", *words], input=sums, capture_output=True, check=False)
    except OSError as error:
        raise SignatureError(f"openssl cannot be run: {error}") from error
    if done.returncode:
        raise SignatureError(f"openssl: {(done.stderr or done.stdout).decode(errors='backslashreplace').strip()}")
    return done.stdout


def _shown(names: list[str]) -> str:
    """Shows names as Python writes them: a name can have characters that control a terminal."""
    return ", ".join(map(repr, sorted(names)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=("sign", "verify"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("key", type=Path)
    given = parser.parse_args()
    try:
        sign(given.folder, given.key) if given.work == "sign" else verify(given.folder, given.key)
    except (SignatureError, OSError) as error:
        sys.exit(f"Error: {error}")
    sys.stdout.write({"sign": f"Signed: {given.folder / SIGNATURE}\n", "verify": "Verified\n"}[given.work])
