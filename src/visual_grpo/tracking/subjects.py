"""What a name on the command line means: a registered version, a run, or a folder of adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visual_grpo.tracking.adapters import find_adapters
from visual_grpo.tracking.origins import run_of
from visual_grpo.tracking.registry_client import tracking_uri
from visual_grpo.tracking.versions import SCHEME, named_version
from visual_grpo.trained_adapters import read_facts

_VERSION = re.compile(r"[^/@]+(@[^/@]+|/\d+)")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Adapters, and who says what of them."""

    title: str
    adapters: Path
    facts: Mapping[str, Any]
    """Their ``training.json``."""
    version_tags: Mapping[str, str] = field(default_factory=dict)
    """Of the registered version; empty where none was named."""
    run_id: str | None = None
    """The MLflow run of the training, where MLflow has it."""
    run_tags: Mapping[str, str] = field(default_factory=dict)


def find_subject(named: str, latest: Path) -> Subject:
    """The adapters that ``named`` means: ``NAME@ALIAS``, ``NAME/VERSION``, a run's id or name, a folder, ``latest``.

    Raises:
        UserError: there is no such thing, or it has no facts.
    """
    title, tags = named, {}
    if named.startswith(SCHEME) or (_VERSION.fullmatch(named) and not Path(named).is_dir()):
        version = named_version(SCHEME + named.removeprefix(SCHEME), tracking_uri())
        folder = version.adapters(whatever_they_are=True)  # Which is what is to be found out.
        adapters, tags, title = folder, dict(version.tags), f"{version.name}/{version.version}"
    else:
        adapters = find_adapters(named, latest)
    facts = read_facts(adapters)
    run = run_of(facts)
    return Subject(
        title=title,
        adapters=adapters,
        facts=facts,
        version_tags=tags,
        run_id=None if run is None else run.info.run_id,
        run_tags={} if run is None else run.data.tags,
    )
