"""What else decides a gate than the adapters: asked again with other settings, it is another gate."""

from __future__ import annotations

import hashlib
import json

from visual_grpo.config import Parameters


def gate_settings(parameters: Parameters) -> str:
    """64 hex digits: the same for parameters with which a gate comes to the same decision."""
    promotion = parameters.promotion.model_dump(mode="json", exclude={"candidate", "model", "alias", "base_copy_mb"})
    drawn = parameters.evaluation.model_dump(mode="json", include={"seed", "images_per_prompt"})
    return hashlib.sha256(json.dumps([promotion, drawn], sort_keys=True).encode()).hexdigest()
