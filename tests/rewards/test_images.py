"""Rewards that compare with a target or measure the image itself."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rewards.learned import tiny
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import to_pil
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.guards import ColourEntropy, EdgeDensity, FineNoise, GroupDiversity, JpegSizeReward
from visual_grpo.rewards.target import (
    DeltaEReward,
    KeptRegion,
    MsSsimReward,
    PixelReward,
    PsnrReward,
    SourceSsim,
    SsimReward,
    TargetLayout,
)

RECORD = PromptRecord(id="x", prompt="")


def noise(seed: int = 0, side: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=generator)


def flat(value: int, side: int = 32) -> Tensor:
    return torch.full((3, side, side), value, dtype=torch.uint8)


def record(folder: Path, name: str, target: Tensor) -> PromptRecord:
    return tiny.record(name, folder=folder, target=target)


def test_pixel_and_psnr_by_hand(tmp_path: Path) -> None:
    records = [record(tmp_path, "black", flat(0)), record(tmp_path, "grey", flat(51))]
    samples = [flat(255), flat(102)]
    assert PixelReward()(records, samples).tolist() == pytest.approx([0.0, 1 - 0.2**2])
    assert PsnrReward()(records, samples).tolist() == pytest.approx([0.0, -20 * math.log10(0.2)], abs=1e-4)


LAB = {(255, 0, 0): (53.24, 80.09, 67.20), (0, 255, 0): (87.73, -86.18, 83.18), (0, 0, 255): (32.30, 79.19, -107.86)}
"""sRGB's primaries in CIELAB (D65), as on Bruce Lindbloom's colour calculator."""


def test_delta_e_of_primaries(tmp_path: Path) -> None:
    reward, pictures = (
        DeltaEReward(),
        {c: torch.tensor(c, dtype=torch.uint8).view(3, 1, 1).expand(3, 32, 32) for c in LAB},
    )
    assert reward([record(tmp_path, "white", flat(255))], [flat(0)]).tolist() == pytest.approx([-100], abs=0.01)
    for first, second in itertools.combinations(LAB, 2):
        found = reward([record(tmp_path, str(first), pictures[first])], [pictures[second]])
        assert found.tolist() == pytest.approx([-math.dist(LAB[first], LAB[second])], abs=0.1)


def test_the_target_itself_is_best(tmp_path: Path) -> None:
    records = [record(tmp_path, "a", noise(0)), record(tmp_path, "b", noise(1))]
    for reward, best in ((PixelReward(), 1), (PsnrReward(), 60), (SsimReward(), 1), (DeltaEReward(), 0)):
        assert reward.needs.target
        assert reward(records, [noise(0), noise(1)]).tolist() == pytest.approx([best, best])
        assert (reward(records, [noise(1), noise(0)]) < best).all()


def halves(left: int, right: int, side: int = 32) -> Tensor:
    image = flat(left, side)
    image[:, :, side // 2 :] = right
    return image


@pytest.mark.parametrize(
    ("sample", "correlation"),
    [
        (halves(0, 255), 1.0),
        (halves(100, 140), 1.0),  # Less contrast.
        (halves(200, 250), 1.0),  # Brighter.
        (halves(255, 0), -1.0),
        (halves(0, 255).roll(8, 2), 0.0),
        (halves(0, 255).transpose(1, 2), 0.0),
        (flat(255), 0.0),
        (flat(255) * torch.tensor([1, 0, 0], dtype=torch.uint8)[:, None, None], 0.0),  # Red alone.
        (halves(0, 255) * torch.tensor([1, 1, 0], dtype=torch.uint8)[:, None, None], (2 / 3) ** 0.5),  # Yellow.
    ],
)
def test_the_layout_of_colours_is_the_correlation_of_cells(tmp_path: Path, sample: Tensor, correlation: float) -> None:
    records = [record(tmp_path, "halves", halves(0, 255)), record(tmp_path, "flat", flat(7))]
    found = TargetLayout()(records, [sample, sample])
    assert found[0].item() == pytest.approx(correlation, abs=1e-5)
    assert found[1].isnan(), "a target of one colour has no layout"


def test_the_layout_of_colours_is_neither_raised_by_grey_nor_lowered_by_contrast(tmp_path: Path) -> None:
    """Of pictures that share only a caption with their target, where psnr, ssim and delta_e are (config/presets.py)."""

    def blocks(seed: int) -> Tensor:
        return (noise(seed, 4).float() / 2 + 64).repeat_interleave(16, 1).repeat_interleave(16, 2).to(torch.uint8)

    count = 40
    records = [record(tmp_path, str(seed), blocks(seed)) for seed in range(count)]
    others = [blocks(count + seed) for seed in range(count)]
    grey = [flat(128, 64)] * count
    contrast = [((image.float() - 128) * 1.3 + 128).clamp(0, 255).to(torch.uint8) for image in others]

    def change(reward: Any, samples: list[Tensor]) -> float:
        """In standard errors."""
        differences = reward(records, samples) - reward(records, others)
        return float(differences.mean() / differences.std() * count**0.5)

    for reward in (PsnrReward(), SsimReward(), DeltaEReward()):
        assert (change(reward, grey) > 3, change(reward, contrast) < -3) == (True, True)
    assert abs(change(TargetLayout(), grey)) < 2
    assert abs(change(TargetLayout(), contrast)) < 2


@pytest.mark.parametrize("sides", [(64, 32), (32, 64)])
def test_sample_and_target_are_compared_at_the_smaller_size(tmp_path: Path, sides: tuple[int, int]) -> None:
    target, sample = (torch.cat([flat(0, s)[..., : s // 2], flat(200, s)[..., : s // 2]], -1) for s in sides)
    assert PixelReward()([record(tmp_path, "x", target)], [sample]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("reward", "sides", "complaint"),
    [
        (SsimReward(), (10, 10), r"at least 11 pixels a side, got \[10, 10\]"),
        (FineNoise(), (2, 2), r"at least 3 x 3 pixels, got \[2, 2\]"),
        (MsSsimReward(), (160, 160), r"at least 161 pixels a side, got .*\[160, 160\]"),
    ],
)
def test_impossible_sizes_are_told(tmp_path: Path, reward: Any, sides: tuple[int, int], complaint: str) -> None:
    target, sample = (flat(0, side) for side in sides)
    with pytest.raises(UserError, match=complaint):
        reward([record(tmp_path, "x", target)], [sample])


def test_a_sample_in_another_shape_than_its_target_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'x'.*x-target.png is \[3, 64, 64\].*sample \[3, 64, 32\].*of the same shape"):
        PixelReward()([record(tmp_path, "x", flat(0, 64))], [flat(0, 64)[..., :32]])


def test_jpeg_size_is_that_of_a_jpeg_file(tmp_path: Path) -> None:
    plain, busy = JpegSizeReward()([RECORD] * 2, [flat(9, 64), noise(0, 64)]).tolist()
    assert plain > busy  # smaller is better
    to_pil(noise(0, 64)).save(tmp_path / "x.jpg", quality=95)
    assert -busy == pytest.approx((tmp_path / "x.jpg").stat().st_size / 1000)


def test_edge_density_counts_the_pixels_along_an_edge() -> None:
    # A step of 50 rises by 50 / 255 over two pixels: 0.098 a pixel, and one of 52 by 0.102.
    images = [flat(80) for _ in range(4)]
    for image, step in zip(images, (0, 50, 52, 175), strict=True):
        image[:, :, 16:] += step
    assert EdgeDensity()([RECORD] * 4, images) == [0, 0, pytest.approx(2 / 32), pytest.approx(2 / 32)]


def test_colour_entropy_in_bits() -> None:
    quarters = flat(0)
    quarters[0, :16] = 255
    quarters[2, :, 16:] = 255
    shades = flat(31)
    shades[:, :16] = 32  # another of 8 levels
    found = ColourEntropy()([RECORD] * 3, [flat(7), quarters, shades])
    assert found == [0, pytest.approx(2), pytest.approx(1)]


def test_source_ssim_is_of_the_nearest_source_and_unscored_without_one(tmp_path: Path) -> None:
    first, second = (tiny.record(str(seed), folder=tmp_path, source=noise(seed)) for seed in (0, 1))
    both = replace(first, id="both", source_images=first.source_images + second.source_images)
    values = SourceSsim()([both, both, first, first, RECORD], [noise(0), noise(1), noise(0), noise(1), noise(0)])
    assert values[:3].tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert values[3] < 0.5
    assert values[4].isnan()
    small = tiny.record("small", folder=tmp_path, source=noise(2)[:, :16])
    reference = replace(first, id="with a reference", source_images=first.source_images + small.source_images)
    assert SourceSsim()([reference], [noise(0)]).item() == pytest.approx(1, abs=1e-5)


def luminance_and_structure(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Per channel, the means of SSIM and of its contrast-structure term (Wang et al. 2004, equations 6 to 13)."""

    def smoothed(image: Tensor) -> Tensor:
        return F.conv2d(image[:, None], window[None, None])[:, 0]

    line = torch.exp(-((torch.arange(11, dtype=torch.float64) - 5) ** 2) / (2 * 1.5**2))
    window = torch.outer(line, line) / line.sum() ** 2
    mean_one, mean_other = smoothed(one), smoothed(other)
    variances = [smoothed(x**2) - mean**2 for x, mean in ((one, mean_one), (other, mean_other))]
    covariance = smoothed(one * other) - mean_one * mean_other
    structure = (2 * covariance + 0.03**2) / (sum(variances) + 0.03**2)
    luminance = (2 * mean_one * mean_other + 0.01**2) / (mean_one**2 + mean_other**2 + 0.01**2)
    return (luminance * structure).mean((1, 2)), structure.mean((1, 2))


def test_ssim_and_ms_ssim_follow_their_papers(tmp_path: Path) -> None:
    target = noise(0, 12).repeat_interleave(16, 1).repeat_interleave(16, 2)
    sample = (0.8 * target + 0.2 * noise(1, 192)).to(torch.uint8)
    one, other = sample.double() / 255, target.double() / 255
    expected, whole = torch.ones(3, dtype=torch.float64), luminance_and_structure(one, other)[0]
    for level, weight in enumerate((0.0448, 0.2856, 0.3001, 0.2363, 0.1333)):  # Wang et al. 2003, section 3.2
        similarity, structure = luminance_and_structure(one, other)
        expected *= (similarity if level == 4 else structure) ** weight
        one, other = F.avg_pool2d(one, 2), F.avg_pool2d(other, 2)
    prompts = [record(tmp_path, "x", target)]
    assert SsimReward()(prompts, [sample]).item() == pytest.approx(whole.mean().item(), abs=1e-4)
    assert MsSsimReward()(prompts, [sample]).item() == pytest.approx(expected.mean().item(), abs=1e-4)
    assert abs(whole.mean() - expected.mean()) > 0.1
    least = noise(0, 161)
    assert MsSsimReward()([record(tmp_path, "least", least)], [least]).item() == pytest.approx(1)


def test_the_noise_of_a_single_pixel_by_hand() -> None:
    dot = torch.zeros(3, 5, 5, dtype=torch.uint8)
    dot[:, 2, 2] = 90
    output = FineNoise()([RECORD], [dot])
    assert output.values.item() == pytest.approx(-math.sqrt(math.pi / 2) / 6 * 16 * 90 / 9)
    # The Laplacian is -360 at the dot, 90 at its four neighbours and 0 at the corners: their mean is 0.
    assert output.parts["sharpness"].item() == pytest.approx((360**2 + 4 * 90**2) / 9)


A, B, ALONE = (PromptRecord(id=name, prompt="") for name in ("a", "b", "alone"))


def test_each_samples_mean_distance_to_the_others_of_its_prompt() -> None:
    found = GroupDiversity()([A, A, A, B, B, ALONE], [flat(0), flat(51), flat(255), flat(9), flat(9), flat(0)])
    assert found[:5].tolist() == pytest.approx([(0.2 + 1) / 2, (0.2 + 0.8) / 2, (1 + 0.8) / 2, 0, 0])
    assert found[5].isnan()
    assert GroupDiversity.needs.whole_groups


def test_samples_of_other_sizes_compare_and_fine_noise_is_no_variety() -> None:
    assert GroupDiversity()([A, A], [flat(0, 32), flat(255, 48)]).tolist() == [1, 1]
    assert GroupDiversity()([A, A], [noise(0, 64), noise(1, 64)]).max() < 0.15


UPPER_LEFT = [[0, 0, 0.5, 0.5]]


def even(value: int) -> Tensor:
    return torch.full((3, 8, 10), value, dtype=torch.uint8)


@pytest.fixture
def edit(tmp_path: Path) -> PromptRecord:
    return replace(tiny.record("e", folder=tmp_path, source=even(51)), metadata={"region": UPPER_LEFT})


def scored(record: PromptRecord, sample: Tensor, **metadata: Any) -> float:
    return KeptRegion()([replace(record, metadata=metadata or record.metadata)], [sample]).item()


def test_what_changes_inside_the_boxes_does_not_count(edit: PromptRecord) -> None:
    inside = even(51)
    inside[:, :4, :5] = 255
    assert scored(edit, inside) == 1
    inside[:, 4, 0] = 255  # one pixel of the 60 outside
    assert scored(edit, inside) == pytest.approx(1 - 0.8**2 / 60)
    assert scored(edit, even(0)) == pytest.approx(1 - 0.2**2)


def test_boxes_add_up_and_a_pixel_is_where_its_centre_is(edit: PromptRecord) -> None:
    lower = even(51)
    lower[:, 4:] = 0
    assert scored(edit, lower, region=[[0.5, 0, 1, 1]]) == 1
    assert scored(edit, lower, region=[[0.56, 0, 1, 0.5], [0.5, 0.5, 1, 1]]) == 1, "row 4 has its centre at 0.5625"
    assert scored(edit, lower, region=[[0.57, 0, 1, 1]]) == pytest.approx(1 - 0.2**2 / 5)


def test_without_a_region_or_without_an_outside_a_record_is_unscored(edit: PromptRecord) -> None:
    values = KeptRegion()([edit, replace(edit, id="n", metadata={}), edit], [even(51)] * 3)
    assert values.isnan().tolist() == [False, True, False]
    assert math.isnan(scored(edit, even(0), region=[[0, 0, 1, 0.5], [0, 0.5, 1, 1]])), "all is edited"


def test_malformed_boxes_are_refused_by_record(edit: PromptRecord) -> None:
    boxes = [[0, 0, 0.5], [0.5, 0, 0.5, 1], [0, 0, 0.5, "1"], [0, 0, 0.5, True], [0, 0, math.nan, 1]]
    for region in ([0, 0, 0.5, 0.5], [], "upper left", *([box] for box in boxes)):
        with pytest.raises(UserError, match=r"record 'e' has metadata region .*; expected a list of boxes \[top, left"):
            KeptRegion().check_records([edit, replace(edit, metadata={"region": region})])


def test_records_that_cannot_be_judged_are_refused(edit: PromptRecord) -> None:
    KeptRegion().check_records([edit, replace(edit, metadata={})])
    with pytest.raises(UserError, match="record 'e' has a region but no source_image"):
        KeptRegion().check_records([replace(edit, source_images=())])
    with pytest.raises(UserError, match="'x' has no target_image"):
        SsimReward()([RECORD], [flat(0)])
    with pytest.raises(UserError, match=r"is \[3, 8, 10\] and the sample \[3, 8, 8\]"):
        KeptRegion()([edit], [even(0)[:, :, :8]])
