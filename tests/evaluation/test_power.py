import math

import numpy as np
import pytest

from visual_grpo.evaluation.paired import t_interval
from visual_grpo.evaluation.power import detectable_gain, units_needed


@pytest.mark.parametrize(("units", "alpha"), [(5, 0.025), (34, 0.05 / 52), (100, 0.05 / 52)])
def test_a_detectable_gain_is_found_in_nine_of_ten_simulated_cases(units: int, alpha: float) -> None:
    gain = detectable_gain(0.2, units, alpha)
    differences = np.random.default_rng(0).normal(gain, 0.2, size=(40_000, units))
    low, _ = t_interval(differences, 1 - 2 * alpha)
    # The standard error of a share of 0.9 in 40,000 cases is 0.0015.
    assert (low > 0).mean() == pytest.approx(0.9, abs=0.006)


def test_many_units_give_the_normal_formula() -> None:
    # Quantiles of the normal distribution: 1.959964 for 2.5%, 1.281552 for 90%, 0.841621 for 80%.
    assert detectable_gain(2.0, 40_000, 0.025) == pytest.approx(2 * (1.959964 + 1.281552) / 200, rel=1e-4)
    assert detectable_gain(2.0, 40_000, 0.025, power=0.8) == pytest.approx(2 * (1.959964 + 0.841621) / 200, rel=1e-4)


@pytest.mark.parametrize("gain", [0.5, 0.05, 0.02])
def test_units_needed_are_the_fewest_that_detect_the_gain(gain: float) -> None:
    units = units_needed(gain, 0.1, 0.05 / 52)
    assert detectable_gain(0.1, units, 0.05 / 52) <= gain < detectable_gain(0.1, units - 1, 0.05 / 52)


def test_what_is_undefined_or_impossible_is_said() -> None:
    assert units_needed(0.01, 0.0, 0.01) == 2
    assert math.isnan(detectable_gain(0.1, 1, 0.01))
    assert math.isnan(detectable_gain(math.nan, 34, 0.01))
    for gain, sd in ((0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (0.1, math.nan), (0.1, math.inf)):
        with pytest.raises(ValueError, match="gain above 0 and a finite standard deviation"):
            units_needed(gain, sd, 0.01)
    for alpha, power in ((0.0, 0.9), (0.95, 0.9), (0.01, 1.0)):
        with pytest.raises(ValueError, match="0 < alpha < power < 1"):
            detectable_gain(0.1, 34, alpha, power)
