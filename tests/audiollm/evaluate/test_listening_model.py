"""A model that hears as the recognizer of a reward and of the judges."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiollm.audio import Waveform
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.choosing import choose_recognizer, recognizer_digest
from audiollm.evaluate.judges.listening_model import REQUEST
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.subjects.loading import load_answerer
from audiollm.families.answering import AnswerError
from audiollm.rl.rewards.catalog import with_checked_folders
from tests.audiollm.supervised.heard_samples import small_model, small_template, sound


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    template = small_template()
    small_model(template).float().save_pretrained(tmp_path / "stage" / "model", template.tokenizer)
    return tmp_path / "stage"


def test_a_model_is_asked_to_transcribe(folder: Path) -> None:
    """The transcript is its answer to a phrasing of the task `asr`, and the weights are known by their digest."""
    choice = choose_recognizer(f"model={folder}")
    assert choice is not None
    wave = Waveform(sound(0.4), 16_000)
    answer = load_answerer(str(folder), None, 256).model.answer(wave, REQUEST)
    assert choice.judge.recognize(wave.samples_CN, wave.sample_rate) == answer
    assert recognizer_digest(f"model={folder}") == choice.judge.digest  # type: ignore[attr-defined]


def test_a_clip_too_short_to_be_heard_has_no_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_recognizer(f"model={folder}")
    assert choice is not None
    assert choice.judge.recognize(sound(0.02), 16_000) == ""

    def refuse(requests: object, check_stop: object = None) -> None:
        raise AnswerError("longer than the context")

    monkeypatch.setattr(choice.judge._model, "answer", refuse)  # type: ignore[attr-defined]
    with pytest.raises(MetricError, match="longer than the context"):
        choice.judge.recognize(sound(0.4), 16_000)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        choose_recognizer(f"model={tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match="words.recognizer: .*nowhere"):
        with_checked_folders({"words": {"recognizer": f"model={tmp_path / 'nowhere'}"}}, {})
