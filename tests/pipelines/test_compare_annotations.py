"""Two annotations of the same recordings: figures that were worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.errors import StageError
from audiollm.files.atomic import write_json, write_jsonl
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.compare_annotations import STAGE, ComparisonConfig


def row(number: int, text: str, **changes: Any) -> dict[str, Any]:
    made = {
        "id": f"r{number}", "path": f"/d/{number}.wav", "file": f"{number}.wav", "start_s": 0.0, "end_s": 36.0,
        "text": text, "text_source": "recognizers", "heard": {}, "measured": {},
    }  # fmt: skip
    return {**made, **changes}


def heard(text: str, consensus: str, wer: float, **by: str) -> dict[str, Any]:
    measured = {"consensus": {"text": consensus, "pairwise_wer": wer, "vote_share": 1 - wer}}
    return {"text": text, "text_source": "given", "heard": by, "measured": measured}


def compared(folder: Path, first: Any, second: Any, **settings: Any) -> dict[str, Any]:
    for name, (kept, filtered) in {"a": first, "b": second}.items():
        write_jsonl(folder / name / "segments.jsonl", kept)
        write_jsonl(folder / name / "filtered.jsonl", filtered)
    paths = {"first": str(folder / "a" / "segments.jsonl"), "second": str(folder / "b" / "segments.jsonl")}
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    config = ComparisonConfig.model_validate({**paths, **settings})
    figures = STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))
    written = json.loads((folder / "compare.json").read_text())
    assert {name: value for name, value in written.items() if name != "differing"} == figures
    return written


def test_what_is_kept_and_what_differs(tmp_path: Path) -> None:
    gate = {"description": {"text": "x", "gate": {"accepted": True}}}
    refused = {"description": {"text": None, "gate": {"accepted": False}}}
    dropped = {"dropped": {"kind": "too loud", "rule": "level"}}
    first = (
        [row(1, "One two three four."), row(2, "Same"), row(3, "only | here"), row(5, "", kind="sound")],
        [row(4, "x", **dropped)],
    )
    second = [row(1, "one 2 five four", measured=gate), row(2, "same!", measured=refused), row(4, "x"),
              row(6, "a b <b>")], []  # fmt: skip
    found = compared(tmp_path, first, second)
    assert found["first"]["hours"] == found["second"]["hours"] == 0.04
    assert found["first"]["dropped"] == {"too loud": 1} and found["second"]["dropped"] == {}
    assert found["both"] == {
        "spans": 2, "only_first": 1, "only_second": 2, "same_text": 0.5, "word_differences": 0.2,
    }  # fmt: skip
    assert (found["second"]["described"], found["second"]["refused"], found["first"]["described"]) == (
        1,
        1,
        0,
    )
    assert [(each["first"], each["second"], each["rate"]) for each in found["differing"]] == [
        ("one two three four", "one two five four", 0.25)
    ]
    assert "| too loud | 1 | 0 |" in (tmp_path / "compare.md").read_text()


def test_recognizers_against_what_was_known_on_what_both_heard(tmp_path: Path) -> None:
    first = [
        row(1, **heard("a b c d", "a b c x", 0.5, sphinx="a b c x")),
        row(2, **heard("e f", "e f", 0.1, sphinx="e f")),
    ]
    second = [row(1, **heard("a b c d", "a b c d", 0.2, sphinx="a b c x", ours="a b c d"))]
    # kept by one and dropped by the other: still heard by both
    filtered = [row(2, **heard("e f", "e", 0.4, sphinx="e f", ours="g"), dropped={"rule": "wer"})]
    found = compared(tmp_path, (first, []), (second, filtered))
    assert found["first"]["word_errors"] == {"sphinx": round(1 / 6, 4)}, "of one there is no consensus"
    assert found["second"]["word_errors"] == {
        "consensus": round(1 / 6, 4), "ours": round(2 / 6, 4), "sphinx": round(1 / 6, 4),
    }  # fmt: skip
    assert (found["first"]["pairwise_wer"], found["second"]["pairwise_wer"]) == (0.3, 0.2)
    assert found["second"]["dropped"] == {"wer": 1}


def test_scores_that_both_have_are_set_side_by_side(tmp_path: Path) -> None:
    write_json(
        tmp_path / "1.json", {"accuracy": 0.5, "error_rate": {"en": 0.4}, "low": None, "questions": 10}
    )
    write_json(tmp_path / "2.json", {"accuracy": 0.75, "error_rate": {"en": 0.2, "de": 0.3}, "questions": 10})
    scores = {"first_scores": str(tmp_path / "1.json"), "second_scores": str(tmp_path / "2.json")}
    found = compared(tmp_path, ([row(1, "a")], []), ([row(1, "a")], []), **scores)
    assert found["scores"] == {
        "accuracy": {"first": 0.5, "second": 0.75}, "error_rate.en": {"first": 0.4, "second": 0.2},
        "questions": {"first": 10.0, "second": 10.0},
    }  # fmt: skip
    assert "accuracy: 0.5, then 0.75" in (tmp_path / "compare.md").read_text()


def test_other_recordings_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no segment in common") as caught:
        compared(tmp_path, ([row(1, "a")], []), ([row(2, "a")], []))
    assert caught.value.exit_code == 2


def test_a_name_cannot_break_the_summary(tmp_path: Path) -> None:
    rows = [row(1, "one two"), row(1, "one three")]
    for each in rows:
        each["file"] = "x|<script>\n# big.wav"
    compared(tmp_path, ([rows[0]], []), ([rows[1]], []))
    text = (tmp_path / "compare.md").read_text()
    assert "<script>" not in text and "\n# big" not in text and "x\\|&lt;script> # big.wav" in text
