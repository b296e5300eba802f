"""The names of registered model and alias, and the limits of the gate, as parameters give them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from visual_grpo.config import PromotionConfig


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("data", "visual_grpo"),
        ("data/text", "visual_grpo-text"),
        ("data/sd3_small/photos-0a1b2c", "visual_grpo-sd3_small-photos-0a1b2c"),
        ("/big disk/out", "visual_grpo-big_disk-out"),
    ],
)
def test_each_output_folder_has_a_registered_model(output: str, name: str) -> None:
    assert PromotionConfig().name(output) == name
    assert PromotionConfig(model="shapes").name(output) == "shapes"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *(({"model": name}, "expected") for name in ("a/b", "a:b", " ")),
        ({"alias": "a b"}, "expected"),
        *(({"alias": name}, "neither latest") for name in ("latest", "Latest", "v1", "V12")),
        *(({name: value}, name) for name, value in {"error": 0.5, "gates_per_year": 0, "margin": float("nan")}.items()),
    ],
)
def test_what_mlflow_could_not_store_or_reserves_and_an_impossible_rule_are_refused(
    wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        PromotionConfig.model_validate(wrong)
