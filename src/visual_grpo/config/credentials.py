"""Detects secrets in parameters.

Parameters are stored with every run, so an option holds the name of an environment variable instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from visual_grpo.common.errors import UserError

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""Splits a name into words: HF_TOKEN, my-secret, apiKey."""
_PASSWORDS = {"password", "passwd", "passphrase", "passcode", "pwd", "secret"}
_SECRETS = _PASSWORDS | {"pass", "credential", "auth", "authorization", "bearer", "cookie", "jwt"}
_JOINED = re.compile(
    r"(access|account|admin|anthropic|api|auth|aws|azure|client|encryption|gcp|gemini|github|google|hf|huggingface|judge"
    r"|license|llm|master|mlflow|openai|openrouter|private|provider|refresh|secret|server|service|session|signing"
    r"|subscription|vendor|vlm|wandb)(keys?|tokens?)"
)
"""Say whose key or token it is: an ``openai_key`` is a secret; a ``sort_key`` and ``stop_tokens`` are not."""
_OF_TEXT = {"begin", "bos", "class", "cls", "end", "eos", "image", "mask", "max", "min", "new", "pad", "placeholder"}
_OF_TEXT |= {"sep", "special", "start", "stop", "trigger", "unk", "video", "vision", "word"}
"""Words before ``token`` that mean a token of text."""
_ABOUT = {"budget", "count", "env", "file", "id", "ids", "index", "length", "limit", "method", "mode", "model", "name"}
_ABOUT |= {"path", "position", "scheme", "size", "type", "url", "variable"}
"""Last words of names that describe a secret or a text token instead of holding it."""
_KNOWN = re.compile(
    r"\b(sk-(?=[\w-]*\d)[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(nvapi|xai|npm|pypi)[-_](?=[\w-]*\d)[\w-]{16,}|(gsk|r8)_[A-Za-z0-9]{16,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,})"
    r"|\bBearer (?!\$)[\w.~+/-]{12,}|--(password|passwd|secret|token|api[-_]?key)[= ](?!\$)\S"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|hooks\.slack\.com/services/"
)
"""Secrets that tell what they are, in any text."""
_RANDOM = re.compile(r"(?<![^\W_])(?=[a-zA-Z]*\d)(?=\d*[a-zA-Z])[a-zA-Z0-9]{16,}")
"""A long run of letters and digits, such as a random key."""
_ADDRESS = re.compile(r"\w[\w+.-]*://[^\s\"'<>]+")
_IN_ADDRESS = re.compile(r"[?&;#]([^=&;#]+)=([^&;#]*)")
_KEYS_OF_ADDRESSES = {"key", "sig", "signature"}
_PUBLIC_IN_ADDRESSES = {"commit", "digest", "hash", "id", "ref", "revision", "sha", "uuid", "version"}
_HEADERS, _PUBLIC_HEADERS = ("headers", "extra_headers"), ("accept", "content-type", "user-agent")
_VARIABLE = re.compile(r"((?:Bearer |Basic )?)\$([A-Za-z_]\w*)")


def find_secrets(value: object, name: str = "", *, key: str = "", is_header: bool = False) -> Iterator[str]:
    """Yields the dotted name of each value that looks like a secret, at any depth: text, or a number under the name of
    a password. Names of environment variables do not count.

    Args:
        name: of ``value`` itself.
        key: the innermost key above ``value``.
        is_header: every text is taken to be a secret.
    """
    if isinstance(value, Mapping):
        for part, item in value.items():
            if _looks_secret("", str(part)):
                yield f"{name}, in the name of an entry,"
                continue
            header = key.lower() in _HEADERS and str(part).lower() not in _PUBLIC_HEADERS
            yield from find_secrets(item, f"{name}.{part}" if name else str(part), key=str(part), is_header=header)
    elif isinstance(value, list | tuple):
        is_header = is_header or key.lower() in _HEADERS
        for number, item in enumerate(value):
            yield from find_secrets(item, f"{name}.{number}", key=key, is_header=is_header)
    elif isinstance(value, str):
        if (is_header and value and not _VARIABLE.fullmatch(value)) or _looks_secret(key, value):
            yield name
    elif type(value) in (int, float) and not _PASSWORDS.isdisjoint(_words(key)) and _names_secret(key, ""):
        yield name


def with_variables(value: Any, reward: str) -> Any:
    """Replaces each ``$NAME`` in the options by that environment variable. Raises UserError if it is not set."""
    if isinstance(value, Mapping):
        return {name: with_variables(item, reward) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_variables(item, reward) for item in value]
    match = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    if not os.environ.get(match[2]):
        raise UserError(
            f"reward {reward!r}: an option names the environment variable {match[2]}, which is not set or is empty:"
            f" export {match[2]}=..."
        )
    return match[1] + os.environ[match[2]]


@lru_cache(maxsize=4096)  # Every validation asks about the same names and most of the same texts.
def _looks_secret(key: str, text: str) -> bool:
    """Returns whether ``text``, under ``key``, is a secret and not the name of its variable."""
    if not text or _VARIABLE.fullmatch(text):
        return False
    return _names_secret(key, text) or _KNOWN.search(text) is not None or _in_address(text)


@lru_cache(maxsize=4096)
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(name))


def _names_secret(name: str, value: str) -> bool:
    words = _words(name)
    if not words or words[-1] in _ABOUT:
        return False
    pairs = list(zip(["", *words], words, strict=False))
    if any(_JOINED.fullmatch(before + word) or _JOINED.fullmatch(word) for before, word in pairs):
        return True
    if not {form for word in words for form in (word, word.removesuffix("s"))}.isdisjoint(_SECRETS):
        return True
    if words[-1].endswith(("password", "passwd", "passphrase")):
        return True
    if any(word == "token" and before not in _OF_TEXT for before, word in pairs):
        return True
    return len(words) > 1 and words[-1] == "key" and _RANDOM.search(value) is not None


def _in_address(text: str) -> bool:
    """``https://user:password@host``, ``https://token@host``, and ``https://host/path?token=...#token``."""
    return "://" in text and any(map(_holds_secret, _ADDRESS.findall(text)))


def _holds_secret(address: str) -> bool:
    try:
        parts = urlsplit(address)
    except ValueError:  # Brackets without a valid IPv6 address.
        return False
    user, at, _ = parts.netloc.rpartition("@")
    if at and (":" in user or not parts.scheme.endswith(("ssh", "sftp"))):
        return True
    for name, value in _IN_ADDRESS.findall(address):
        if value and (name.lower() in _KEYS_OF_ADDRESSES or _names_secret(name, value)):
            return True
        if _RANDOM.search(value) and _PUBLIC_IN_ADDRESSES.isdisjoint(_words(name)):
            return True
    return _RANDOM.search(parts.fragment) is not None
