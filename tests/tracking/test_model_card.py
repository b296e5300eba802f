"""The code on an adapter's card, pasted into an empty script, gives the sample that `generate` gives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import stir
from tests.evaluation.defaults import parameters
from tests.hub import hub
from tests.models.families.glm_image import tiny as glm_image
from tests.models.families.qwen2_5_vl.tiny import save_qwen2_5_vl, save_qwen3_vl
from tests.models.families.sd3 import tiny as sd3
from tests.models.families.test_flow_families import CASES, FRAMES
from tests.models.test_lora_files import write
from tests.tracking.toy_adapters import with_facts
from visual_grpo.common.digests import file_digest
from visual_grpo.common.files import new_folder
from visual_grpo.config import Parameters
from visual_grpo.models.family import find_family
from visual_grpo.models.run_spec import resolve
from visual_grpo.pipelines.generate import generate_for_prompts
from visual_grpo.tracking.model_card import Published, model_card
from visual_grpo.training.components import load_model

pytestmark = pytest.mark.usefixtures("small_sources")
SIZE = {"height": 64, "width": 96}
FAMILIES = [name for name in CASES if "," not in name]
FAMILIES += ["flux2_klein of an edit", "glm_image", "glm_image of an edit"]
QUICK = ("sd3", "qwen_image_edit_plus", "wan_i2v", "glm_image")
"""A prompt, sources, a video, and two modules."""
HALF = {"sd3", "wan", "flux_kontext"}
"""Families that are tried in bfloat16."""
PROMPT, NAME, MOVED = "a red circle", "someone/sd3", "f" * 40


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def adapted(base: str, task: str = "t2i", frames: int | None = None, **changes: Any) -> Parameters:
    """Parameters of a training on ``base``, whose adapters, with an effect, are in the folder ``adapters``."""
    kinds = find_family("auto", base, changes.get("revision")).kinds()
    flow = {"steps": 2, "guidance_scale": 4.0} if "flow" in kinds else {"steps": None, "guidance_scale": None}
    tokens = {"temperature": 0.8, "top_p": 0.9} if "tokens" in kinds else {}
    config = parameters(
        data={**SIZE, "path": "d", "task": task, "frames": frames, **({} if frames is None else {"fps": 12})},
        model={"path": base, "device": "cpu", **changes},
        sampling={"rollout": flow, "eval": flow | tokens},
        evaluation={"controls": []},
        modules={"dit": None},
        adapter="adapters",
    )
    spec = resolve(config)
    given: Any = {name: changes.get(name) for name in ("revision", "lora")}
    model: Any = load_model(base, size=(64, 96), frames=frames, fps=12, train=spec.modules, device="cpu", **given)
    for module in spec.modules:
        stir(model.policy(module, rollout=spec.rollout, evaluation=config.sampling.eval))
    model.adapters.save(Path("adapters"))
    merged = {} if given["lora"] is None else {"model_lora": file_digest(Path(given["lora"]))}
    with_facts(Path("adapters"), base, config, **merged)
    return config


def generated(config: Parameters, **settings: Any) -> Path:
    """The folder of what `generate` writes with the adapters."""
    tree = config.model_dump() | {"generate": {**settings}}
    spec, none = resolve(Parameters.model_validate(tree)), Path("none")
    return generate_for_prompts(spec, none, none, new_folder(Path("out/drawn")))


def pasted(config: Parameters, *sources: Path) -> None:
    """Runs the card's code with a user's folder, prompt and sources in the places that it names."""
    facts = json.loads(Path("adapters/training.json").read_text())
    [code] = re.findall(r"```python\n(.*?)```", model_card(facts, list(resolve(config).modules)), re.DOTALL)
    code = code.replace("FOLDER", "adapters").replace("prompt='...'", f"prompt={PROMPT!r}")
    code = code.replace("Path('SOURCE.png')", ", ".join(f"Path({str(source)!r})" for source in sources))
    exec(compile(code, "card", "exec"), {})


def pictures(count: int) -> list[Path]:
    """Files of several shapes, none of them the size that the model generates; the first is turned by EXIF data."""
    generator, files = np.random.default_rng(3), []
    for number in range(count):
        blocks = generator.integers(0, 256, (9, 14 + number, 3), dtype=np.uint8).repeat(12, 0).repeat(12, 1)
        exif = Image.Exif()
        exif[274] = 6 if number == 0 else 1
        files.append(Path(f"given{number}.jpg").absolute())
        Image.fromarray(blocks).save(files[-1], exif=exif)
    return files


def same(one: Path, other: Path) -> bool:
    """Whether two files have the same pixels, in all frames."""
    with Image.open(one) as first, Image.open(other) as second:
        assert first.size == second.size
        counts = [getattr(image, "n_frames", 1) for image in (first, second)]
        assert counts[0] == counts[1]
        frames = []
        for number in range(counts[0]):
            first.seek(number)
            second.seek(number)
            frames.append(np.array_equal(np.asarray(first.convert("RGB")), np.asarray(second.convert("RGB"))))
    return all(frames)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES]
)
def test_the_cards_code_gives_the_picture_of_generate(family: str, tmp_path: Path) -> None:
    name, of_edit = family.partition(" ")[0], family.endswith("edit")
    build, options = CASES.get(name, (glm_image.pipeline, {}))
    build().save_pretrained(tmp_path / "base")
    (tmp_path / "base/visual_grpo.json").write_text(json.dumps({"preview_side": 2}))
    known = find_family(name)
    task = "i2i" if of_edit or "t2i" not in known.tasks else "t2i"
    half = {"dtype": "bfloat16"} if name in HALF else {}
    config = adapted("base", task, FRAMES.get(name), options=options, **half)
    if task == "t2i":
        folder, sources = generated(config, prompt=PROMPT), []
    else:
        sources = pictures(min(2, known.sources[-1]) if known.sources else 1)
        row = {"id": "prompt", "prompt": PROMPT, "source_images": [file.name for file in sources]}
        Path("edits.jsonl").write_text(json.dumps(row))
        folder = generated(config, prompts="edits.jsonl")
    pasted(config, *sources)
    [drawn] = folder.glob("1.*")
    assert same(drawn, Path("sample").with_suffix(drawn.suffix))


@pytest.mark.parametrize("save", [pytest.param(save_qwen2_5_vl, marks=pytest.mark.slow), save_qwen3_vl])
def test_the_cards_code_gives_the_answer_of_generate(
    save: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    save(tmp_path / "base")
    config = adapted("base", "segmentation", options={"max_tokens": 6})
    [source] = pictures(1)
    mask = np.zeros((168, 108), dtype=np.uint8)
    mask[40:90, 30:70] = 255
    Image.fromarray(mask).save("mask.png")
    row = {"id": "prompt", "prompt": PROMPT, "image": source.name, "mask": "mask.png"}
    Path("queries.jsonl").write_text(json.dumps(row))
    folder = generated(config, prompts="queries.jsonl")
    [listed] = map(json.loads, (folder / "metadata.jsonl").read_text().splitlines())
    capsys.readouterr()
    pasted(config, source)
    assert capsys.readouterr().out == listed["answer"] + "\n"


def test_the_cards_code_merges_the_lora_of_the_base_model(tmp_path: Path) -> None:
    pipeline = sd3.pipeline()
    pipeline.save_pretrained(tmp_path / "base")
    file = write("diffusers sd3", pipeline, tmp_path / "theirs.safetensors")
    config = adapted("base", lora=str(file))
    folder = generated(config, prompt=PROMPT)
    pasted(config)
    assert same(folder / "1.png", Path("sample.png"))
    facts = json.loads(Path("adapters/training.json").read_text())
    published = model_card(facts, ["dit"], published=Published(repository="me/mine", base=NAME, licence={}))
    assert f"the LoRA `theirs.safetensors`, sha256 `{file_digest(file)}`" in published
    assert str(tmp_path) not in published


@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument")
def test_the_cards_code_loads_the_commit_that_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, commit in enumerate((MOVED[:-1] + "0", MOVED)):
        pipeline = sd3.pipeline()
        pipeline.transformer.proj_out.weight.mul_(number + 1)
        pipeline.save_pretrained(tmp_path / commit)
        with hub(NAME, tmp_path / commit, commit=commit):  # main moves to the second.
            if not number:
                config = adapted(NAME, revision=commit)
                folder = generated(config, prompt=PROMPT)
            else:
                load_model(NAME, size=(64, 96), device="cpu")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pasted(config)
    assert same(folder / "1.png", Path("sample.png"))
