from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.grpo.packing import CannotPackError, pack, unpack
from visual_grpo.types import PromptRecord, TextSample

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Thing:
    tensors: tuple[torch.Tensor, ...]
    named: Mapping[str, Any]
    steps: list[int]
    none: None = None


def there_and_back(value: Any) -> Any:
    tensors, structure = pack(value)
    return unpack(tensors, json.loads(json.dumps(structure, sort_keys=True)), CPU)


def test_what_is_packed_comes_back_equal() -> None:
    record = PromptRecord(
        id="a", prompt="ü\n", source_images=(Path("x/y.png"),), metadata={"deep": {"list": [1, None]}}
    )
    value = Thing(
        tensors=(torch.randn(3).bfloat16(), torch.tensor([True]), torch.arange(4, dtype=torch.uint8)),
        named={
            "b": 0.1 + 0.2,
            "a": float("inf"),
            "record": record,
            "text": TextSample(text="", finished=True, frame=(1, 2)),
        },
        steps=[3, 1],
    )
    back = there_and_back(value)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(value.tensors, back.tensors, strict=True))
    assert list(back.named.items()) == list(value.named.items()), "in their order"
    assert (back.steps, back.none) == (value.steps, None)


def test_a_tensor_that_occurs_twice_is_written_once_and_keeps_its_strides() -> None:
    transposed = torch.randn(3, 5).t()
    tensors, structure = pack({"one": transposed, "two": [transposed]})
    assert len(tensors) == 1
    stored = {name: value.contiguous() for name, value in tensors.items()}  # As safetensors keeps it.
    back = unpack(stored, structure, CPU)
    assert torch.equal(back["one"], transposed)
    assert back["one"].stride() == transposed.stride() == back["two"][0].stride()
    expanded = torch.ones(1).expand(4)
    assert torch.equal(there_and_back(expanded), expanded)


def test_what_cannot_be_written_is_named() -> None:
    @dataclass
    class Local:
        x: int = 0

    for value, said in ((object(), "builtins.object"), ({1: 2}, "builtins.dict"), (Local(), "Local")):
        with pytest.raises(CannotPackError, match=said):
            pack([value])


@pytest.mark.parametrize(
    "name", ["os:system", "no.such.module:Thing", "pathlib:Path", "tests.grpo.test_packing:nothing"]
)
def test_a_checkpoint_cannot_name_code(name: str) -> None:
    with pytest.raises(UserError, match="which this run does not use"):
        unpack({}, {"dataclass": name, "fields": {}}, CPU)
