"""An annotation whose recognizer fails on every segment ends with an error, and keeps what the other steps did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.audio import Waveform
from audiollm.failures import FailedOnEveryItem
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.input.synthetic import CorpusConfig, speak_corpus
from pipelines.annotate.stage import STAGE
from pipelines.steps.step import Listener

HALF = "Input type (float) and bias type (c10::Half) should be the same"


class Answerer:
    """An audio LLM that fails alike on all clips (`fails`), or answers."""

    fingerprint = "1"
    fails = True
    calls = 0

    def answer(self, wave: Waveform, question: str) -> str:
        Answerer.calls += 1
        if Answerer.fails:
            raise RuntimeError(HALF)
        return "one"


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    corpus = CorpusConfig(words=["one"], voices=2, takes=2, test_takes=1)
    speak_corpus(tmp_path / "spoken", corpus, seed=0, on_done=lambda done: None)
    return tmp_path / "spoken"


def _annotate(folder: Path, inputs: list[str]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    recognizer = {"kind": "audio_llm", "model": f"{__name__}:Answerer"}
    settings = {"input": inputs, "recognizers": [recognizer], "workers": 1, "quality_sample": 0}
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    config = AnnotationConfig.model_validate(settings)
    return STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))


def test_a_recognizer_that_fails_on_every_segment_ends_the_run(
    spoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answerer, "fails", True)
    with pytest.raises(
        FailedOnEveryItem, match=r"annotate: the step audio_llm failed on all of the 4 items"
    ) as caught:
        _annotate(tmp_path / "out", [str(spoken)])
    assert HALF in str(caught.value) and caught.value.exit_code == 1
    reasons = [
        row["reason"] for row in map(json.loads, (tmp_path / "out/set_aside.jsonl").read_text().splitlines())
    ]
    assert len(reasons) == 4 and all(HALF in reason for reason in reasons)  # what there is, is written
    monkeypatch.setattr(Answerer, "fails", False)
    monkeypatch.setattr(Listener, "blocks", None)  # voice activity is known and not measured again
    assert _annotate(tmp_path / "out", [str(spoken)])["segments"] == 4


def test_broken_files_are_set_aside_beside_good_ones(
    spoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answerer, "fails", False)
    for number in range(40):
        (spoken / f"0{number}.wav").write_bytes(b"RIFF, and no sound at all" + bytes([number]))
    funnel = _annotate(tmp_path / "out", [str(spoken)])
    assert (funnel["files_kept"], funnel["files_failed"]) == (4, 40)
