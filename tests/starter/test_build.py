"""The complete starter with very few steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import GlmImagePipeline
from PIL import Image

from tests.starter.tasks import Counter, weights_are_equal
from visual_grpo.common.digests import content_digest
from visual_grpo.config import DataConfig, Parameters, StarterConfig, Task
from visual_grpo.pipelines import starter as nodes
from visual_grpo.starter import build
from visual_grpo.starter.build import build_starter
from visual_grpo.starter.glm_image import corpus
from visual_grpo.starter.glm_image.pretrain_ar import pretrain_language_half
from visual_grpo.starter.glm_image.pretrain_decoder import pretrain_decoder_half
from visual_grpo.starter.pretraining import Job

HEIGHT, WIDTH, SEED = 32, 64, 3
STEPS = {"vae": 2, "dit": 2, "ar": 2}
TASKS: tuple[Task, ...] = ("t2i", "i2i", "mixed")
DATA = DataConfig(path="unused", height=HEIGHT, width=WIDTH)


@contextmanager
def no_progress(description: str, total: int) -> Iterator[Counter]:
    assert total == STEPS["vae"] + STEPS["dit"]
    counter = Counter()
    yield counter
    assert counter.done == total
    # After two steps no VAE preserves colours, so all three attempts are made.
    assert counter.notes == [
        f"The VAE dulls a colour: it is pretrained once more (number {number}), from other weights" for number in (1, 2)
    ]


def never(description: str, total: int) -> AbstractContextManager[Counter]:
    raise AssertionError("nothing should be pretrained")


def config_in(folder: Path) -> StarterConfig:
    return StarterConfig(
        dataset=str(folder / "shapes"),
        model=str(folder / "base"),
        records_per_prompt=1,
        **{f"{name}_steps": steps for name, steps in STEPS.items()},
    )


def job_in(folder: Path, seed: int, task: Task = "t2i") -> Job:
    return Job(folder=folder, height=HEIGHT, width=WIDTH, seed=seed, task=task, steps=STEPS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> StarterConfig:
    config = config_in(tmp_path_factory.mktemp("starter"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "progress", no_progress)
        report = build_starter(config, DATA, SEED)
    assert report == {
        "dataset": config.dataset,
        "model": config.model,
        "digest": build.model_digest(config, DATA, SEED),
        "content": content_digest(config.model),
    }
    return config


def test_the_plain_pipeline_loads_it_and_draws(built: StarterConfig) -> None:
    pipeline = GlmImagePipeline.from_pretrained(built.model)
    pipeline.set_progress_bar_config(disable=True)
    tokens = torch.arange(8)[None]
    image = pipeline(
        prompt="a cat", prior_token_ids=tokens, height=HEIGHT, width=WIDTH, num_inference_steps=2, output_type="np"
    ).images
    assert image.shape == (1, HEIGHT, WIDTH, 3)
    assert image.std() > 0
    assert pipeline.vae.config.latents_std != [1.0] * 4
    generation = pipeline.vision_language_encoder.generation_config
    assert (generation.temperature, generation.top_p, generation.top_k) == (0.9, 0.75, 0)
    assert min(generation.suppress_tokens) == pipeline.transformer.config.prior_vq_quantizer_codebook_size


def test_the_same_seed_gives_the_same_weights_bit_for_bit(built: StarterConfig, tmp_path: Path) -> None:
    """Repeated in this process: the weights must not depend on the process or on parallel ones."""
    torch.set_num_threads(1)
    for seed, same in ((SEED, True), (SEED + 1, False)):
        job = job_in(tmp_path / str(seed), seed)
        for half in (pretrain_decoder_half, pretrain_language_half):
            half(job, lambda module, done: None)
        equal = weights_are_equal(job.folder, Path(built.model))
        assert len(equal) == 3
        assert set(equal) == {same}


def test_a_model_of_edits_edits(built: StarterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process and on few pictures, which is faster."""
    torch.set_num_threads(1)
    monkeypatch.setattr(corpus, "_EDITS", 20)
    monkeypatch.setattr(corpus, "_IMAGES_PER_COMBINATION", 1)
    job = job_in(tmp_path / "base" / "parts", SEED, "i2i")
    for half in (pretrain_decoder_half, pretrain_language_half):
        half(job, lambda module, done: None)
    build._assemble(job, tmp_path / "base")
    pipeline = GlmImagePipeline.from_pretrained(tmp_path / "base")
    pipeline.set_progress_bar_config(disable=True)
    assert len(pipeline.processor.tokenizer("remove the circle").input_ids) == 3
    image = pipeline(
        prompt="remove the circle",
        image=[Image.new("RGB", (WIDTH, HEIGHT), "red")],
        prior_token_ids=torch.arange(8)[None],
        prior_token_image_ids=[torch.arange(8)],
        source_image_grid_thw=[torch.tensor([[1, 2, 4]])],
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=2,
        output_type="np",
    ).images
    assert image.shape == (1, HEIGHT, WIDTH, 3)


def test_a_current_model_is_kept(built: StarterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "progress", never)
    build_starter(built, DATA, SEED)
    with pytest.raises(AssertionError, match="nothing should be pretrained"):
        build_starter(built, DATA, SEED + 1)
    GlmImagePipeline.from_pretrained(built.model)


@pytest.mark.parametrize(("processes", "counted"), [(1, ["vae", "dit", "ar"]), (2, ["vae", "dit"])])
def test_an_interruption_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, counted: list[str]
) -> None:
    config = config_in(tmp_path).model_copy(update={"processes": processes})

    @contextmanager
    def total_checked(description: str, total: int) -> Iterator[Counter]:
        assert total == sum(STEPS[module] for module in counted)
        yield Counter()

    def interrupted(tasks: object, at_once: int, advance: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "run_side_by_side", interrupted)
    monkeypatch.setattr(build, "progress", total_checked)
    with pytest.raises(KeyboardInterrupt):
        build_starter(config, DATA, SEED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shapes"]


PARAMETERS = Path(__file__).parents[2] / "conf" / "base" / "parameters.yml"


@pytest.fixture
def parameters(tmp_path: Path) -> dict[str, Any]:
    """The default parameters with a custom model and all folders in a temporary directory."""
    tree: dict[str, Any] = yaml.safe_load(PARAMETERS.read_text(encoding="utf-8"))
    tree["seed"] = 0
    tree["model"]["path"] = "zai-org/GLM-Image"
    tree["data"] |= {"path": str(tmp_path / "shapes"), "height": 32, "width": 32}
    tree["starter"] |= {"dataset": str(tmp_path / "shapes"), "model": str(tmp_path / "base"), "records_per_prompt": 1}
    return tree


def build_from(parameters: dict[str, Any]) -> dict[str, Any]:
    config = Parameters.model_validate(parameters)
    return nodes.build(config.starter, config.data, config.model, config.seed)


def test_a_given_model_is_passed_on_and_the_shapes_are_drawn(parameters: dict[str, Any], tmp_path: Path) -> None:
    report = build_from(parameters)
    assert (report["model"], report["dataset"]) == ("zai-org/GLM-Image", str(tmp_path / "shapes"))
    assert (tmp_path / "shapes" / "records.jsonl").is_file()
    assert not (tmp_path / "base").exists()
    for change in ({"path": "another/model"}, {"revision": "abc"}):
        other = {**parameters, "model": {**parameters["model"], **change}}
        assert build_from(other)["digest"] != report["digest"]
    parameters["data"]["path"] = str(tmp_path / "mine")
    assert build_from(parameters)["dataset"] == str(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_the_task_decides_what_is_drawn(parameters: dict[str, Any], tmp_path: Path) -> None:
    parameters["data"]["task"] = "i2i"
    build_from(parameters)
    assert len(list((tmp_path / "shapes" / "source_images").iterdir())) == 150


def test_the_digest_of_a_folder_is_that_of_its_files(parameters: dict[str, Any], tmp_path: Path) -> None:
    digests = []
    for name, weights in (("one", "weights"), ("copy", "weights"), ("tuned", "other weights")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(weights)
        parameters["model"]["path"] = str(tmp_path / name)
        digests.append(build_from(parameters)["digest"])
    assert digests[0] == digests[1] != digests[2]
