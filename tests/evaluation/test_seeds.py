from visual_grpo.evaluation.generate import image_seed


def test_seeds_never_change() -> None:
    # Fixed values: a change would make all existing baselines unusable for pairing.
    assert image_seed(0, "a", 0) == 9196027511977055662
    assert image_seed(7, "红", 3) == 5488351668699260486


def test_seeds_differ_by_seed_record_and_index_and_fit_a_torch_generator() -> None:
    seeds = {image_seed(s, r, i) for s in range(5) for r in ("a", "b", "a0", "1") for i in range(12)}
    assert len(seeds) == 5 * 4 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # the top bit is in use
