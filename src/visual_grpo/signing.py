"""Signs a folder of adapters with one's own key, and verifies it: `model-signing`, offline.

``python -m visual_grpo.signing sign FOLDER PRIVATE_KEY`` writes ``model.sig`` into the folder;
``python -m visual_grpo.signing verify FOLDER PUBLIC_KEY`` says whether every file is as it was signed, and exits with 1
if one is not. Keys are PEM files of an elliptic curve.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from visual_grpo.errors import UserError

SIGNATURE = "model.sig"
_TOOL = (
    *("tool", "run", "--quiet", "--from", "model-signing==1.1.1"),
    *("--with", "pyopenssl==26.4.0", "model_signing"),  # Which model-signing imports, and does not require.
)
_USAGE = "usage: python -m visual_grpo.signing sign FOLDER PRIVATE_KEY | verify FOLDER PUBLIC_KEY"
_HOW = "openssl ecparam -name prime256v1 -genkey -noout -out key.pem && openssl ec -in key.pem -pubout -out public.pem"


class SignatureError(UserError):
    """The folder is not what was signed, or it was signed with another key."""


def sign(folder: Path, private_key: Path) -> Path:
    """Signs every file in ``folder``; returns the signature's file, which replaces an earlier one.

    Raises:
        UserError: no such folder or key, the key is no elliptic-curve key in PEM or has a password, or the tool cannot
            be installed.
    """
    _check_folder(folder)
    _check_key(private_key, "private")
    signature = folder / SIGNATURE
    draft = folder.with_name(f".{folder.name}.sig")
    ignored = ["--ignore-paths", str(signature)] if signature.is_file() else []
    words = ["sign", "key", *ignored, "--private_key", str(private_key), "--signature", str(draft), str(folder)]
    done = _run(words)
    if done.returncode:
        draft.unlink(missing_ok=True)
        raise UserError(
            f"{folder} could not be signed with {private_key}: {_said(done)}\nExpected the private key of an elliptic"
            f" curve in PEM, without a password. To make one: {_HOW}"
        )
    draft.replace(signature)
    return signature


def verify(folder: Path, public_key: Path) -> None:
    """Returns if the folder is as it was signed with the private key that belongs to ``public_key``.

    Raises:
        SignatureError: it is not; names the first file that is missing, new or different.
        UserError: no such folder, signature or key, or the tool cannot be installed.
    """
    _check_folder(folder)
    _check_key(public_key, "public")
    signature = folder / SIGNATURE
    if not signature.is_file():
        raise UserError(f"{folder} is not signed: it has no {SIGNATURE}.")
    done = _run(["verify", "key", "--public_key", str(public_key), "--signature", str(signature), str(folder)])
    if done.returncode:
        raise SignatureError(f"{folder} is not what was signed, or not with the key of {public_key}: {_said(done)}")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Expected the folder of adapters to sign or to verify.")


def _check_key(key: Path, kind: str) -> None:
    text = key.read_text(encoding="utf-8", errors="replace") if key.is_file() else ""
    if f"{kind.upper()} KEY-----" not in text:
        state = f"is no {kind} key in PEM" if key.is_file() else "does not exist"
        raise UserError(f"{key} {state}. To make a pair of keys: {_HOW}")


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    own = Path(".venv-tools/bin/uv")
    uv = str(own) if own.is_file() else shutil.which("uv")
    if uv is None:
        raise UserError("uv, which runs model-signing in a separate environment, is not there: make setup")
    try:
        done = subprocess.run([uv, *_TOOL, *words], capture_output=True, text=True, check=False)
        installed = (
            done
            if done.returncode == 0
            else subprocess.run([uv, *_TOOL, "--version"], capture_output=True, text=True, check=False)
        )
    except OSError as error:
        raise UserError(f"{uv} cannot be run: {error}") from error
    if installed.returncode:
        raise UserError(
            f"model-signing cannot be installed: {_said(installed)}\nThe first call needs the package index; later ones"
            " use uv's cache."
        )
    return done


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["sign", folder, key]:
                print(f"Signed: {sign(Path(folder), Path(key))}")  # noqa: T201
            case ["verify", folder, key]:
                verify(Path(folder), Path(key))
                print(f"{folder} is as it was signed.")  # noqa: T201
            case _:
                print(_USAGE, file=sys.stderr)  # noqa: T201
                return 2
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
