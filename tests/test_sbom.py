"""The list of installed packages."""

from __future__ import annotations

import json
from importlib import metadata

from visual_grpo.sbom import environment_sbom


def test_it_has_every_installed_package_with_its_version() -> None:
    document = json.loads(environment_sbom())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    found = {component["name"]: component for component in document["components"]}
    for name in ("torch", "pillow", "kedro-mlflow"):
        assert found[name]["version"] == metadata.version(name)
        assert found[name]["purl"].startswith(f"pkg:pypi/{name}@")
    assert len(found) == len(document["components"]) > 100


def test_the_same_environment_gives_the_same_text() -> None:
    assert environment_sbom() == environment_sbom()
