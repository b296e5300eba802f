"""The data report."""

from __future__ import annotations

from visual_grpo.records.raw import Place, Rejection
from visual_grpo.records.report import LISTED, Report


def rejection(number, reason="empty_prompt"):
    return Rejection(place=Place("records.jsonl", number), id=None, reason=reason, message="m", remedy="Do something")


def test_the_list_of_rejected_records_is_bounded_but_all_are_counted():
    report = Report(strict=False)
    for number in range(LISTED + 5):
        report.reject(rejection(number))
    report.reject(rejection(9, "corrupt_image"))
    rejected = report.as_dict()["rejected"]
    assert rejected["total"] == LISTED + 6
    assert rejected["by_reason"] == {"empty_prompt": LISTED + 5, "corrupt_image": 1}
    assert [entry["line"] for entry in rejected["listed"]] == list(range(LISTED))


def test_records_and_distinct_prompts_are_counted_by_split():
    report = Report(strict=False)
    for split, prompt in [("train", "a cat"), ("train", " A CAT "), ("train", "a dog"), ("eval", "a cat")]:
        report.accept(split=split, prompt=prompt, has_target=split == "eval", enlarged=0)
    shown = report.as_dict()
    assert shown["splits"] == {
        "train": {"records": 3, "prompts": 2},
        "eval": {"records": 1, "prompts": 1},
        "held_out": {"records": 0, "prompts": 0},
        "sealed": {"records": 0, "prompts": 0},
    }
    assert shown["with_target"] == 1
