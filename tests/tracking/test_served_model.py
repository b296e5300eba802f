"""A version as MLflow loads it: small models of the real classes, from a folder with nothing of the project in it."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.exceptions import MlflowException
from PIL import Image

from tests.conftest import SIZE, stir
from tests.data.making import jsonl, picture, prepare
from tests.evaluation.defaults import parameters
from tests.models.families.sd3 import tiny
from tests.models.test_lora_files import write as write_lora
from tests.tracking.conftest import Project, files_of
from tests.tracking.toy_adapters import with_facts
from tests.training.few_steps import resolved
from visual_grpo.common.digests import file_digest
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_size
from visual_grpo.common.types import PromptRecord, TextSample
from visual_grpo.config import Parameters, SamplerConfig
from visual_grpo.evaluation.samples import image_seed
from visual_grpo.tracking.registry import Registry
from visual_grpo.tracking.served_model import LIMITS, ServedModel, _load_pyfunc, read
from visual_grpo.training.components import load_model

NAME = "served"
MOST = 10**6
LOAD = """
import json, sys
import mlflow
import pandas as pd
uri, request, params, result = sys.argv[1:]
mlflow.set_tracking_uri(uri)
model = mlflow.pyfunc.load_model("models:/served@champion", model_config={"device": "cpu"})
asked = json.loads(request)
model.predict(asked, params=json.loads(params)).to_pickle(result)
from fastapi.testclient import TestClient
from mlflow.pyfunc import scoring_server
data = {"inputs": asked} if isinstance(asked[0], str) else {"dataframe_records": asked}
answer = TestClient(scoring_server.init(model)).post("/invocations", json={**data, "params": json.loads(params)})
assert answer.status_code == 200, answer.text
wrong = TestClient(scoring_server.init(model)).post("/invocations", json={**data, "params": {"samples": 0}})
assert (wrong.status_code, "expected samples of at least 1" in wrong.text) == (400, True), wrong.text
assert "Traceback" not in wrong.text, wrong.text
pd.DataFrame(answer.json()["predictions"]).to_pickle(result + ".served")
"""
"""A user's program, and a scoring server that gets the same request."""


def trained(folder: Path, base: Path, modules: Sequence[str], config: Parameters, **facts: str) -> tuple[Path, Any]:
    """Adapters that have an effect, as a training would leave them, and the model with them on it."""
    model = load_model(
        str(base),
        size=(config.data.height, config.data.width),
        train=modules,
        policy=config.policy,
        options=dict(config.model.options),
        lora=config.model.lora,
        device="cpu",
    )
    for module in modules:
        stir(model.policy(module, rollout=config.sampling.rollout, evaluation=config.sampling.eval))
    for step in ("", "best", "last"):
        (folder / step).mkdir(parents=True, exist_ok=True)
        model.adapters.save(folder / step)
    return with_facts(folder, base, config, **facts), model


def promoted(adapters: Path) -> Path:
    registry = Registry(NAME)
    made = registry.register(adapters)
    registry.promote(made.version)
    return files_of(made) / "data/visual_grpo"


def loaded_elsewhere(
    project: Project, empty: Path, asked: Any, params: Mapping[str, Any]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What another process in an empty folder predicts, and what a scoring server in it answers."""
    empty.mkdir()
    arguments = [project.uri, json.dumps(asked), json.dumps(params), str(empty / "result")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_TRACKING")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *arguments], cwd=empty, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return pd.read_pickle(empty / "result"), pd.read_pickle(empty / "result.served")


@pytest.mark.slow
def test_both_adapters_of_glm_image_are_served(project: Project, pipeline_folder: Path, tmp_path: Path) -> None:
    """The pixels are those of the model itself, also without the base model's own folder."""
    config = parameters(data={"path": "d", "height": SIZE[0], "width": SIZE[1]})
    own = Path(shutil.copytree(pipeline_folder, tmp_path / "own base"))
    adapters, model = trained(tmp_path / "adapters", own, ["ar", "dit"], config)
    files = promoted(adapters)
    own.rename(tmp_path / "away")
    prompts = ["a small red circle", "a blue square"]
    got, served = loaded_elsewhere(project, tmp_path / "empty", prompts, {"seed": 3, "samples": 2, "steps": 2})
    assert got.prompt.tolist() == [prompts[0]] * 2 + [prompts[1]] * 2
    seeds = [image_seed(3, "prompt", index) for index in range(2)] * 2
    assert got.seed.tolist() == seeds
    records = [PromptRecord(id=str(row // 2), prompt=prompts[row // 2]) for row in range(4)]
    sampler = config.sampling.eval.model_copy(update={"steps": 2})
    for content, expected in zip(got.image, model.generate(records, seeds, sampler), strict=True):
        pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1)
        torch.testing.assert_close(pixels, expected, rtol=0, atol=1)
    assert [base64.b64decode(text) for text in served.image] == got.image.tolist()
    assert (files / "base/model_index.json").is_file()


@pytest.mark.slow
def test_answers_to_queries_about_images_are_served(
    project: Project, tmp_path: Path, source_images: list[Path]
) -> None:
    from examples.scenes.small_qwen2_5_vl import build_model, build_processor

    processor = build_processor(*SIZE)
    network = build_model(processor, seed=1)
    network.save_pretrained(tmp_path / "qwen")
    processor.save_pretrained(tmp_path / "qwen")
    no_steps = {"steps": None, "guidance_scale": None}
    config = parameters(
        data={"path": "d", "task": "segmentation", "height": SIZE[0], "width": SIZE[1]},
        starter={"world": "examples.scenes:WORLD"},
        model={"options": {"max_tokens": 12, "instruction": "Find: {query}"}},
        reward="negative_points",
        modules={"dit": None},
        sampling={"rollout": {**no_steps, "temperature": 1.0}, "eval": no_steps},
        evaluation={"controls": []},
    )
    resolved(config, tmp_path / "qwen")
    adapters, model = trained(tmp_path / "adapters", tmp_path / "qwen", ["vl"], config)
    promoted(adapters)
    asked = [
        {"prompt": f"part {row}", "image": base64.b64encode(path.read_bytes()).decode()}
        for row, path in enumerate(source_images[:2])
    ]
    got, served = loaded_elsewhere(project, tmp_path / "empty", asked, {"temperature": 1.0, "top_k": 0})
    records = [
        PromptRecord(id=str(row), prompt=f"part {row}", source_images=(path,))
        for row, path in enumerate(source_images[:2])
    ]
    sampler = SamplerConfig(**{**config.sampling.eval.model_dump(), "temperature": 1.0, "top_k": 0})
    expected = model.generate(records, [image_seed(0, "prompt", 0)] * 2, sampler)
    assert got.answer.tolist() == served.answer.tolist() == [sample.text for sample in expected]
    assert got.answer.nunique() == 2
    assert got["mask"].isna().all(), "random weights answer nothing that can be parsed"


class SaysWhere:
    """A policy that finds the left half of every image."""

    def generate(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> list[TextSample]:
        answer = '<answer>{"bbox":[0,0,15,31],"points":[[8,16]],"negative_points":[[24,16]]}</answer>'
        assert all(read_size(record.source_images[0]) == (32, 32) for record in records), "as in training"
        texts = {"left": answer, "nonsense": "there"}
        return [TextSample(text=texts[record.prompt], finished=True, frame=(32, 32)) for record in records]


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """A picture of 64 x 128 pixels, the left half dark and the right half light."""
    picture = np.full((64, 128, 3), 30, np.uint8)
    picture[:, 64:] = 220
    Image.fromarray(picture).save(tmp_path / "halves.png")
    return tmp_path / "halves.png"


class Refuses:
    """A policy that must not be asked."""

    def generate(self, *arguments: object) -> list[TextSample]:
        raise AssertionError("asked to draw")


def segmenting(model: Any = SaysWhere(), limits: Mapping[str, int] = LIMITS) -> ServedModel:  # noqa: B008
    config = parameters(
        data={"path": "d", "task": "segmentation", "height": 32, "width": 32},
        starter={"world": "examples.scenes:WORLD"},
        reward="negative_points",
    )
    return ServedModel(config, model, limits)


def test_a_mask_has_the_size_of_its_image(halves: Path) -> None:
    larger = io.BytesIO()
    Image.open(halves).resize((96, 160)).save(larger, "PNG")
    images = [halves.read_bytes(), halves.read_bytes(), larger.getvalue()]
    got = segmenting().predict(pd.DataFrame({"prompt": ["left", "nonsense", "left"], "image": images}), {"samples": 2})
    assert got.prompt.tolist() == ["left", "left", "nonsense", "nonsense", "left", "left"]
    assert got["mask"].isna().tolist() == [False, False, True, True, False, False]
    assert [Image.open(io.BytesIO(got["mask"][row])).size for row in (0, 1, 4, 5)] == [(128, 64)] * 2 + [(96, 160)] * 2
    mask = np.array(Image.open(io.BytesIO(got["mask"][0])))
    assert mask.shape == (64, 128)
    assert (mask[:, :56] == 255).all()
    assert (mask[:, 72:] == 0).all()


class Shows:
    """A policy that gives back what it is to edit."""

    def generate(self, records: Sequence[PromptRecord], *_: object) -> list[torch.Tensor]:
        self.sources = [[np.array(Image.open(file)) for file in record.source_images] for record in records]
        return [torch.zeros(3, 64, 64, dtype=torch.uint8)] * len(records)


def test_the_sources_of_an_edit_are_fitted_as_in_the_training(tmp_path: Path) -> None:
    sources = [picture(tmp_path / f"data/{n}.png", size) for n, size in enumerate([(200, 50), (400, 100), (50, 50)])]
    names = [file.name for file in sources]
    jsonl(tmp_path / "data/records.jsonl", [{"prompt": "mix", "source_image": names, "target_image": names[0]}])
    size = {"height": 64, "width": 64}
    [record] = prepare(tmp_path, task="i2i", **size)
    model = Shows()
    as_in_parquet = np.array([file.read_bytes() for file in sources], object)
    table = pd.DataFrame({"prompt": ["mix"], "image": [as_in_parquet]})
    config = parameters(data={"path": "d", "task": "i2i", **size}, rewards={"psnr": {}})
    assert len(ServedModel(config, model).predict(table, {"seed": None, "samples": None})) == 1  # type: ignore[arg-type]
    [given] = model.sources
    assert len({array.shape for array in given}) > 1
    for array, file in zip(given, record.source_images, strict=True):
        assert np.array_equal(array, np.array(Image.open(file)))


@pytest.mark.parametrize(
    ("params", "said"),
    [({"samples": 0}, "samples of at least 1"), ({"seed": -1}, "got 1 and -1"), ({"temperature": -1.0}, "temperature")],
)
def test_a_request_that_cannot_be_drawn_is_explained(halves: Path, params: dict[str, Any], said: str) -> None:
    with pytest.raises(MlflowException, match=said):
        segmenting().predict(pd.DataFrame({"prompt": ["left"], "image": [halves.read_bytes()]}), params)
    with pytest.raises(MlflowException, match="row 0 has no image, and this model was trained for segmentation"):
        segmenting().predict(pd.DataFrame({"prompt": ["left"]}))
    with pytest.raises(MlflowException, match="row 1 has no prompt"):
        segmenting().predict(pd.DataFrame({"prompt": ["left", None]}))


@pytest.mark.parametrize(
    ("rows", "params", "limits", "said"),
    [
        ([("left", 1)] * 2, {"samples": 129}, {}, r"2 rows of 129 samples: more than max_samples=256 of"),
        ([("left", 1)] * 257, {}, {}, "257 rows of 1 sample: more than max_samples"),
        ([("left", 1), ("x" * 20_001, 1)], {}, {}, "row 1: a prompt of 20,001 characters: more than max_characters"),
        ([("left", 1)], {"steps": 201}, {}, "201 steps: more than max_steps"),
        ([("left", 1), ("left", 17)], {}, {}, "row 1: 17 images: more than max_images"),
        (
            [("left", 1)] * 2,
            {},
            {"max_pixels": 2 * 64 * 128 - 1},
            "row 1: 16,384 pixels in all images so far: more than",
        ),
    ],
)
def test_a_request_for_too_much_is_refused_before_anything_is_drawn(
    halves: Path, rows: list[tuple[str, int]], params: dict[str, Any], limits: dict[str, int], said: str
) -> None:
    content = halves.read_bytes()
    table = pd.DataFrame({"prompt": [prompt for prompt, _ in rows], "image": [[content] * n for _, n in rows]})
    with pytest.raises(MlflowException, match=said):
        segmenting(Refuses(), limits).predict(table, params)
    raised = dict.fromkeys(LIMITS, 10**9)
    with pytest.raises(AssertionError, match="asked to draw"):
        segmenting(Refuses(), raised).predict(table, params)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"id": ["k1"]}, "a table with the column prompt first, got 'id' first"),
        ({"prompt": [np.array(["a", "b"])]}, "row 0: expected one text as prompt, got array"),
        ({0: ["a", "None"]}, "row 1 has no prompt"),
    ],
)
def test_what_mlflow_has_made_of_something_else_than_prompts_is_not_drawn(table: dict[Any, Any], said: str) -> None:
    served = ServedModel(parameters(data={"path": "d"}), Refuses())  # type: ignore[arg-type]
    with pytest.raises(MlflowException, match=said):
        served.predict(pd.DataFrame(table))


def test_nothing_is_drawn_for_a_request_that_the_server_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Shows):
        batches = 0

        def generate(self, *arguments: Any) -> list[torch.Tensor]:
            self.batches += 1
            time.sleep(1.1)
            return super().generate(*arguments)

    config, slow = parameters(data={"path": "d"}, evaluation={"batch_size": 1}), Slow()
    monkeypatch.setenv("_MLFLOW_IS_IN_SERVING_ENVIRONMENT", "true")
    for timeout, policy in (("1", slow), ("0", Refuses())):
        monkeypatch.setenv("MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT", timeout)
        with pytest.raises(MlflowException, match=f"longer than the server's timeout, {timeout} s"):
            ServedModel(config, policy).predict(pd.DataFrame(["a", "b"]))  # type: ignore[arg-type]
    assert slow.batches == 1


def test_an_image_is_a_files_content_as_bytes_or_base64(halves: Path) -> None:
    content = halves.read_bytes()
    for source in (content, base64.encodebytes(content).decode()):
        assert np.array_equal(np.array(read(source, 0, MOST)), np.array(Image.open(halves)))


@pytest.mark.parametrize("source", [5, b"no image", "no base64", "/etc/passwd", Path("a.png")])
def test_what_is_no_image_is_explained_and_text_is_never_a_path(source: Any) -> None:
    with pytest.raises(UserError, match="row 7: image is not the content of a file, as bytes or base64 text: "):
        read(source, 7, MOST)


def test_too_many_pixels_are_not_decoded(halves: Path) -> None:
    with pytest.raises(UserError, match=r"row 0: .* 128 x 64 pixels are more than data\.max_pixels \(8000\)"):
        read(halves.read_bytes(), 0, 8000)


def test_a_lora_in_the_base_model_is_served_with_it(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = tiny.pipeline()
    pipeline.save_pretrained(tmp_path / "sd3")
    file = write_lora("diffusers sd3", pipeline, tmp_path / "theirs.safetensors")
    few = {"steps": 2, "guidance_scale": 1.0}
    config = parameters(
        data={"path": "d", "height": 64, "width": 96},
        model={"family": "sd3", "path": "sd3", "lora": file.name},
        modules={"dit": None},
        sampling={"rollout": few, "eval": few},
        evaluation={"controls": []},
    )
    merged = {"model_lora": file_digest(file)}
    adapters, model = trained(tmp_path / "adapters", tmp_path / "sd3", ["dit"], config, **merged)
    promoted(adapters)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    def served() -> Any:
        return mlflow.pyfunc.load_model(f"models:/{NAME}@champion", model_config={"device": "cpu"})

    got = served().predict(["a red circle"])
    record = PromptRecord(id="prompt", prompt="a red circle")
    [expected] = model.generate([record], got.seed.tolist(), config.sampling.eval)
    assert np.array_equal(np.array(Image.open(io.BytesIO(got.image[0]))), expected.permute(1, 2, 0).numpy())
    file.write_bytes(file.read_bytes()[:-1] + b"1")
    with pytest.raises(UserError, match=f"LoRA with the sha256 {merged['model_lora'][:12]} merged"):
        served()


def test_a_base_model_that_is_gone_or_changed_is_told(project: Project, tmp_path: Path) -> None:
    tiny.pipeline().save_pretrained(tmp_path / "sd3")
    config = parameters(data={"path": "d", "height": 64, "width": 96}, modules={"dit": None})
    adapters, _ = trained(tmp_path / "adapters", tmp_path / "sd3", ["dit"], config)
    files = files_of(Registry(NAME, base_copy_mb=0).register(adapters)) / "data/visual_grpo"
    config_of_version = {"device": "cpu", "base": str(tmp_path / "sd3")}
    record = files / "adapters/training.json"
    kept = record.read_bytes()
    record.write_bytes(kept + b" ")
    with pytest.raises(UserError, match=r"The adapters in .* differ from what was registered"):
        _load_pyfunc(str(files), config_of_version)
    record.write_bytes(kept)
    (tmp_path / "sd3/vae/config.json").write_text("{}")
    with pytest.raises(UserError, match=r"was trained on a base model whose files differ from those in .*sd3 now"):
        _load_pyfunc(str(files), config_of_version)
    (tmp_path / "sd3").rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"The base model .*sd3 of the adapters in .* is gone\. .*model_config"):
        _load_pyfunc(str(files), config_of_version)
