from __future__ import annotations

import copy
import errno
import os
import pickle
from pathlib import Path

import pandas as pd
import pytest
import torch
from kedro.config import OmegaConfigLoader
from kedro_datasets.json import JSONDataset

from visual_grpo.common.errors import CombinedError, Problems, Remedy, UserError, counted, nearest_hint
from visual_grpo.common.machine_errors import machine_fault
from visual_grpo.data.datasets import DataError, RecordsDataset
from visual_grpo.grpo.metrics import Clock
from visual_grpo.models.loading import loading
from visual_grpo.operations.session import expected_error
from visual_grpo.settings import CONFIG_LOADER_ARGS


def raised(function) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return caught.value


def refuse(error: Exception) -> None:
    raise error


def write_to(path: str) -> None:
    with Path(path).open("w") as file:
        file.write("x" * 100_000)


def wrapped(error: BaseException) -> BaseException:
    """As a library does."""
    other = RuntimeError("Error while serializing")
    other.__cause__ = error
    return other


@pytest.mark.parametrize("wrap", [lambda error: error, wrapped])
@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (lambda: bytearray(1 << 62), "Out of memory: "),
        (lambda: torch.empty(1 << 60), "Out of memory: "),
        (lambda: refuse(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), "Out of memory: CUDA"),
        (lambda: write_to("/dev/full"), "The disk is full: [Errno 28] No space left on device"),
        (lambda: write_to("/proc/sys/kernel/version"), "No permission: [Errno"),
        (lambda: refuse(OSError(errno.EIO, os.strerror(errno.EIO))), "A disk or a network folder has failed: "),
        (lambda: refuse(OSError(errno.EFBIG, os.strerror(errno.EFBIG), "data/x")), "A limit of this process is"),
        (lambda: refuse(RuntimeError("could not create a primitive")), "Out of memory: "),
        (lambda: refuse(RuntimeError("IoError: No space left on device")), "The disk is full: "),
    ],
)
def test_a_fault_of_the_machine_is_told_before_the_librarys_words(fail, said: str, wrap) -> None:
    error = wrap(raised(fail))
    fault = machine_fault(error)
    assert fault is not None
    assert str(fault).startswith(said)
    assert fault.remedy == (Remedy("plan") if said.startswith("Out of memory") else None)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not fit"),
        RuntimeError("could not create a primitive descriptor for a convolution"),
        UserError("the prompt is empty"),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert machine_fault(error) is None


def test_a_damaged_table_and_a_damaged_file_that_kedro_loads_are_named(tmp_path: Path) -> None:
    file = tmp_path / "scores.parquet"
    pd.DataFrame({"a": range(100)}).to_parquet(file)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", whole[:-8] + b"\xff" * 4 + whole[-4:]):
        file.write_bytes(content)
        assert str(machine_fault(raised(lambda: pd.read_parquet(file)))).startswith("A table is damaged: ")
        fault = str(machine_fault(raised(RecordsDataset(filepath=str(file)).load)))
        assert fault.startswith(f"{file} cannot be read: ")
        assert "data_preparation" in fault
    (tmp_path / "starter.json").write_text('{"model": ')
    fault = str(machine_fault(raised(JSONDataset(filepath=str(tmp_path / "starter.json")).load)))
    assert fault.startswith(f"{tmp_path / 'starter.json'} cannot be read: Expecting value")


def test_an_error_knows_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU tells what went wrong in a kernel when it is waited for."""

    def wait(device: str) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)

    def a_phase(device: str, error: Exception | None = None) -> None:
        with Clock(device).timed("update"):
            if error is not None:
                raise error

    for device, error, said in (
        ("cpu", ValueError("no answer"), "no answer"),
        ("cuda", None, "a kernel failed"),
        ("cuda", ValueError("first"), "first"),
    ):
        found = raised(lambda device=device, error=error: a_phase(device, error))
        assert (str(found), found.__notes__) == (said, ["In the phase update of the training step."])


def without_memory() -> None:
    """As diffusers wraps what safetensors raises."""
    try:
        raise MemoryError("Cannot allocate memory (os error 12)")
    except MemoryError:
        damaged()


def damaged() -> None:
    raise OSError("Unable to load weights from checkpoint file")


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (without_memory, "Out of memory: Cannot allocate memory"),
        (damaged, "The model 'the/model' cannot be loaded: Unable to load weights"),
    ],
)
def test_a_model_that_could_not_be_loaded_for_want_of_memory_is_not_called_damaged(load, said: str) -> None:
    with pytest.raises(UserError) as caught, loading("the/model"):
        load()
    assert str(expected_error(caught.value)).startswith(said)


def test_a_list_where_a_section_is_is_told_in_the_projects_words() -> None:
    conf = Path(__file__).parents[2] / "conf"
    loader = OmegaConfigLoader(str(conf), env="base", runtime_params={"evaluation": []}, **CONFIG_LOADER_ARGS)
    assert "a list where a section is expected" in str(expected_error(raised(lambda: loader["parameters"])))


def test_one_is_singular() -> None:
    found = [counted(number, what) for number in (0, 1, 2) for what in ("picture", "entry")]
    assert found == ["0 pictures", "0 entries", "1 picture", "1 entry", "2 pictures", "2 entries"]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("grpo.step", " Did you mean 'grpo.steps'?"), ("grpo.seeds", " Did you mean 'grpo.seed'?"), ("weight", "")],
)
def test_the_closest_name_is_suggested(wrong: str, hint: str) -> None:
    assert nearest_hint(wrong, ["grpo.seed", "grpo.steps"]) == hint


def test_problems_are_told_together_and_not_nested_also_on_another_rank():
    problems = Problems()
    two, three = UserError("two", remedy="train"), DataError("three", remedy=Remedy(make="ui"))
    for error in (UserError("one"), CombinedError([two, three]), UserError("one")):
        with problems.collect():
            raise error
    with pytest.raises(CombinedError) as refused:
        problems.raise_if_any()
    refused.value.add_note("of rank 1")
    for error in (refused.value, pickle.loads(pickle.dumps(refused.value)), copy.deepcopy(refused.value)):
        assert str(error) == "3 things are wrong:\n1. one\n2. two\n3. three"
        assert [each.remedy for each in error.errors] == [None, Remedy("train"), Remedy(make="ui")]
        assert error.__notes__ == ["of rank 1"]
    assert str(CombinedError([UserError("alone")])) == "alone"
    Problems().raise_if_any()
