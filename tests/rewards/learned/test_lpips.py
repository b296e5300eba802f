"""LPIPS against the formula of its paper, with drawn weights that come from a file as real ones do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import lpips
import pytest
import torch
from torch import Tensor
from torchvision import models

from tests.rewards.learned.tiny import picture, record, saved_alexnet
from visual_grpo.common.errors import UserError
from visual_grpo.rewards.learned.lpips_similarity import LpipsReward

LAYERS = (1, 4, 7, 9, 11)
"""Those of whose outputs the distance is taken."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_alexnet(tmp_path_factory.mktemp("backbone") / "alexnet.pth")


def by_the_formula(file: Path, one: Tensor, other: Tensor) -> float:
    """Equation 1: unit-normalised features, squared differences, weighted by channel, averaged over the positions."""
    with torch.device("meta"):
        features = models.alexnet().features.eval()
    weights = {name.removeprefix("features."): value for name, value in torch.load(file).items()}
    features.load_state_dict({name: weights[name] for name in features.state_dict()}, assign=True)
    heads = torch.load(Path(lpips.__file__).parent / "weights" / "v0.1" / "alex.pth", map_location="cpu")
    shift, scale = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
    first, second = ((image / 255 - shift) / scale for image in (one.float(), other.float()))
    total = 0.0
    with torch.no_grad():
        first, second = first[None], second[None]
        for number, layer in enumerate(features[: LAYERS[-1] + 1]):
            first, second = layer(first), layer(second)
            if number in LAYERS:
                unit = [x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10) for x in (first, second)]
                head = heads[f"lin{LAYERS.index(number)}.model.1.weight"]
                total += float(((unit[0] - unit[1]).square() * head).sum(1).mean())
    return total


def test_one_minus_the_distance_of_the_paper(saved: Path, tmp_path: Path) -> None:
    reward = LpipsReward(backbone=str(saved))
    targets = [picture(0, 64, 48), picture(1, 64, 48)]
    records = [record(name, folder=tmp_path, target=target) for name, target in zip("ab", targets, strict=True)]
    samples = [picture(2, 64, 48), targets[1]]
    expected = [1 - by_the_formula(saved, *pair) for pair in zip(samples, targets, strict=True)]
    assert reward(records, samples).tolist() == pytest.approx(expected, abs=1e-4)
    assert expected[0] < 0.9
    assert expected[1] == 1
    assert reward.needs.target


def test_the_least_size_is_told(saved: Path, tmp_path: Path) -> None:
    reward = LpipsReward(backbone=str(saved))
    small, enough = picture(0, 30, 64), picture(0, 31, 64)
    assert reward([record("a", folder=tmp_path, target=enough)], [enough]).item() == 1
    with pytest.raises(UserError, match=r"lpips: an image needs at least 31 pixels a side, got \[30, 64"):
        reward([record("b", folder=tmp_path, target=small)], [small])


def test_weights_of_another_net_or_of_none_are_refused(tmp_path: Path) -> None:
    torch.save(models.squeezenet1_1().state_dict(), tmp_path / "other.pth")
    torch.save({"net": models.alexnet}, tmp_path / "code.pth")
    (tmp_path / "cut.pth").write_bytes(b"123")
    for file, told in (
        ("other.pth", r"does not hold the weights of torchvision's AlexNet: 'features.3.weight'"),
        ("code.pth", "code.pth cannot be read as weights: Weights only load failed"),
        ("cut.pth", "cut.pth cannot be read as weights"),
    ):
        reward = LpipsReward(backbone=str(tmp_path / file))
        with pytest.raises(UserError, match=told):
            reward([record("a", folder=tmp_path, target=picture(0))], [picture(0)])


def test_missing_weights_are_told_with_their_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    reward = LpipsReward()
    prompts, samples = [record("a", folder=tmp_path, target=picture(0))], [picture(1)]
    place = rf"save it as {tmp_path}/hub/checkpoints/alexnet-owt-7be5be79.pth, or set rewards.lpips.options.backbone"
    for attempt in (reward.check_machine, lambda: reward(prompts, samples)):
        with pytest.raises(UserError, match=rf"download https://download.pytorch.org/models/alexnet.*{place}"):
            attempt()
    with pytest.raises(UserError, match=r"its backbone is 'no.pth', which is not a file"):
        LpipsReward(backbone="no.pth").check_machine()


def test_a_downloaded_backbone_must_have_the_hash_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = saved_alexnet(tmp_path / "drawn.pth")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    published = models.AlexNet_Weights.IMAGENET1K_V1.value
    monkeypatch.setattr(published, "url", f"https://download.pytorch.org/models/alexnet-{digest[:8]}.pth")
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    cached = file.rename(folder / f"alexnet-{digest[:8]}.pth")
    prompts, samples = [record("a", folder=tmp_path, target=picture(0))], [picture(1)]
    LpipsReward().check_machine()
    assert LpipsReward()(prompts, samples).item() < 1
    with cached.open("ab") as stream:
        stream.write(b"x")
    for attempt in (LpipsReward().check_machine, lambda: LpipsReward()(prompts, samples)):
        with pytest.raises(UserError, match=rf"{cached} is not what torchvision published.*Delete it"):
            attempt()
