"""The names of registered model and alias, as parameters give them."""

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


def test_a_name_that_is_given_counts_for_every_folder() -> None:
    assert PromotionConfig(model="shapes").name("data/text") == "shapes"


@pytest.mark.parametrize("wrong", [{"model": "a/b"}, {"model": "a:b"}, {"model": " "}, {"alias": "a b"}])
def test_what_mlflow_could_not_store_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="expected"):
        PromotionConfig.model_validate(wrong)


@pytest.mark.parametrize("alias", ["latest", "Latest", "v1", "V12"])
def test_what_mlflow_reserves_is_no_alias(alias: str) -> None:
    with pytest.raises(ValidationError, match="neither latest"):
        PromotionConfig(alias=alias)
