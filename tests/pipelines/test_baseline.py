import pandas as pd
import pytest
from kedro.io import DatasetError

from tests.pipelines.painted import SMALL, Project
from visual_grpo import components
from visual_grpo.errors import UserError
from visual_grpo.evaluation.generate import read_scores
from visual_grpo.pipeline_registry import create_pipeline


def test_every_eval_and_held_out_prompt_is_drawn_without_an_adapter(painted: Project) -> None:
    painted.run(create_pipeline("baseline"))
    scores = read_scores(painted.folder / "baseline")
    assert painted.policies == [("the model", None)]
    drawn = scores.groupby(["sampler", "split"])["id"].agg(["nunique", "size"])
    everywhere = {
        (sampler, split): {"nunique": prompts, "size": 2 * prompts}
        for sampler in ("rollout", "sde", "stock")
        for split, prompts in (("eval", 2), ("held_out", 3))
    }
    controls = ["stock guidance_scale=1", "stock guidance_scale=3", "stock temperature=0.5"]
    held_out_only = {(control, "held_out"): {"nunique": 3, "size": 6} for control in controls}
    assert drawn.to_dict("index") == everywhere | held_out_only
    assert list(scores.attrs["facts"]["controls"]) == controls
    assert all((painted.folder / "baseline" / file).is_file() for file in scores["file"])


def test_same_parameters_same_images_and_scores(painted: Project) -> None:
    first = read_scores(painted.run(create_pipeline("baseline")).load("baseline"))
    second = read_scores(painted.run(create_pipeline("baseline")).load("baseline"))
    pd.testing.assert_frame_equal(first, second)
    trained_otherwise = read_scores(painted.run(create_pipeline("baseline"), seed=5).load("baseline"))
    pd.testing.assert_frame_equal(first, trained_otherwise)
    assert trained_otherwise.attrs == first.attrs
    other = read_scores(painted.run(create_pipeline("baseline"), evaluation=SMALL | {"seed": 5}).load("baseline"))
    assert (other["total"] != first["total"]).all()


def test_a_model_that_cannot_be_loaded_is_the_nodes_own_error(
    painted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_scores(painted.run(create_pipeline("baseline")).load("baseline"))

    def refuse(*arguments: object) -> None:
        raise UserError("the weights are damaged")

    monkeypatch.setattr(components, "build_model", refuse)
    failed: list[str] = []
    with pytest.raises(UserError, match=r"^the weights are damaged$") as error:
        painted.run(create_pipeline("baseline"), failed=failed)
    assert failed == ["draw_baseline"]
    assert not isinstance(error.value, DatasetError), "nothing was being saved"
    pd.testing.assert_frame_equal(read_scores(painted.folder / "baseline"), before)


def test_progress_reaches_the_number_of_images(
    painted: Project,
    capsys: pytest.CaptureFixture[str],
) -> None:
    painted.run(create_pipeline("baseline"))
    assert "baseline 48/48  reward=0." in capsys.readouterr().out
