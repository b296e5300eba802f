"""The typed parameters as catalog entries."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import Parameters


def parameter_entries(config: Parameters) -> dict[str, Any]:
    """``parameters`` with the whole tree and ``params:<section>`` with each section, typed.

    A node takes the sections that it reads. One that builds the model or a scorer takes the whole tree, since these
    depend on values of several sections.
    """
    sections = {f"params:{name}": getattr(config, name) for name in Parameters.model_fields}
    # Kedro's datasets hold no None: `reward` is read from the whole tree.
    return {"parameters": config} | {name: value for name, value in sections.items() if value is not None}
