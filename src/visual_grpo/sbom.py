"""The packages of this environment as a CycloneDX document (SBOM, a software bill of materials)."""

from __future__ import annotations

import uuid
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclonedx.model.license import LicenseExpression

SBOM = "sbom.json"
"""Its name beside an adapter."""


def environment_sbom() -> str:
    """CycloneDX 1.6 as JSON: name, version, licence and package URL of every installed distribution.

    The same environment gives the same text: its serial number is made of its content, and it has no date.
    """
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    # One folder of the path may hide another's; the first is the one that is imported.
    installed: dict[str, metadata.PackageMetadata] = {}
    for distribution in metadata.distributions():
        found = distribution.metadata  # Read from its file each time.
        installed.setdefault(_normal(found["Name"]), found)
    components = [
        Component(
            name=name,
            version=found["Version"],
            purl=PackageURL("pypi", name=name, version=found["Version"]),
            bom_ref=f"{name}@{found['Version']}",
            licenses=_licences(found),
        )
        for name, found in sorted(installed.items())
    ]
    content = "\n".join(str(component.bom_ref.value) for component in components)
    document = Bom(components=components, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, content))
    document.metadata.timestamp = None  # type: ignore[assignment]
    return str(JsonV1Dot6(document).output_as_string(indent=1))


def _licences(found: metadata.PackageMetadata) -> list[LicenseExpression]:
    """Only an SPDX expression: the older field is free text of any length."""
    from cyclonedx.model.license import LicenseExpression

    return [LicenseExpression(text) for text in found.get_all("License-Expression") or []]


def _normal(name: str) -> str:
    """As package indexes write it."""
    return "-".join(part for part in name.lower().replace("_", "-").replace(".", "-").split("-") if part)
