from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

from visual_grpo.common.types import weighted_total

NAN = float("nan")
WEIGHTS = {"a": 0.3, "guard": 0.0, "b": -1.7, "c": 0.1}


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(1000, generator=generator) for name in WEIGHTS}
    drawn["guard"][:500] = NAN
    drawn["b"][7] = NAN
    drawn["a"][8] = drawn["b"][8] = drawn["c"][8] = -0.0
    return drawn


def one_by_one(rewards: dict[str, Any], zeros: Any) -> Any:
    """The sum in the order of the weights, from 0 on."""
    return ((zeros + 0.3 * rewards["a"]) + -1.7 * rewards["b"]) + 0.1 * rewards["c"]


def test_tensors_and_series_are_summed_in_the_order_of_the_weights() -> None:
    rewards = values()
    want = one_by_one(rewards, torch.zeros(1000))
    got = weighted_total(rewards, WEIGHTS)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert got.isnan().nonzero().tolist() == [[7]]
    columns = {name: pd.Series(own.double().numpy()) for name, own in rewards.items()}
    pd.testing.assert_series_equal(weighted_total(columns, WEIGHTS), one_by_one(columns, 0), check_exact=True)


def test_a_total_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a weight other than 0"):
        weighted_total(values(), {"a": 0.0})
