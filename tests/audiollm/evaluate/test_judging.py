"""The one way to judge a clip: every answer is a value or its reason, whichever judge fails."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiollm.audio import save
from audiollm.evaluate.judges.judging import SpeechClip, SpeechJudges, value_of
from audiollm.evaluate.report.metric_error import MetricError
from tests.audiollm.evaluate.marked_clips import RATE, Book, Compass, Reader


class Length:
    """A classifier that names the seconds of a clip."""

    labels = ("1", "2")

    def predict(self, samples_CN: Tensor, sample_rate: int) -> tuple[str, float | None]:
        if samples_CN.shape[1] > 2 * sample_rate:
            raise ValueError("too long")
        return f"{samples_CN.shape[1] / sample_rate:g}", 0.5


def test_all_judges_answer(tmp_path: Path) -> None:
    book = Book()
    judges = SpeechJudges(Reader(book), Compass(), {"length": Length()})
    judged = judges.judge(SpeechClip("a", "one", book.write(tmp_path / "a.wav", "one", 90)))
    assert judges.names == ["length", "reader"] and judges.closed_set("length") == ("1", "2")
    assert (judges.answer(judged, "reader"), judges.answer(judged, "length")) == ("one", "0.4")
    assert judged.confidence == {"length": 0.5} and judged.duration_s == pytest.approx(0.4)
    angle = math.atan2(*value_of(judged.embedding).flip(0).tolist())
    assert math.degrees(angle) == pytest.approx(90, abs=0.1)


def test_a_judge_that_fails_leaves_the_others_their_answers(tmp_path: Path) -> None:
    book = Book()
    save(tmp_path / "long.wav", torch.full((1, 3 * RATE), 0.1), RATE)
    book.texts[3000] = "(fails)"
    clip = SpeechClip("a", "one", tmp_path / "long.wav")
    judges = SpeechJudges(Reader(book), Compass(), {"length": Length()})
    judged = judges.judge(clip)
    assert not judged.problem and value_of(judged.embedding).shape == (2,)
    for judge, reason in (("reader", "reader failed: RuntimeError: out of breath"), ("length", "too long")):
        with pytest.raises(MetricError, match=reason):
            judges.answer(judged, judge)
    alone = SpeechJudges(classifiers={"length": Length()}, max_clip_s=1.0)
    assert alone.answer(alone.judge(clip), "length") == "1", "only the first second is judged"
    span = SpeechClip("a", "one", tmp_path / "long.wav", start_s=0.5, end_s=2.5)
    assert judges.answer(judges.judge(span), "length") == "2"


def test_a_clip_without_sound_has_the_problem_and_no_answers(tmp_path: Path) -> None:
    judges = SpeechJudges(Reader(Book()), Compass())
    missing = judges.judge(SpeechClip("a", "one", problem="no clip"))
    assert (missing.problem, missing.file_problem, judges.answer(missing, "reader")) == ("no clip", "", None)
    (tmp_path / "b.wav").write_bytes(b"RIFF not at all")
    broken = judges.judge(SpeechClip("b", "one", tmp_path / "b.wav"))
    assert broken.problem.startswith("cannot be heard: ") and str(tmp_path) not in broken.problem
    assert broken.file_problem.startswith(f"{tmp_path / 'b.wav'}: ")


def test_absent_judges_and_unasked_ones_have_reasons(tmp_path: Path) -> None:
    clip = SpeechClip("a", "one", Book().write(tmp_path / "a.wav", "one", 0))
    judged = SpeechJudges().judge(clip)
    for answer in (judged.words, judged.embedding):
        with pytest.raises(MetricError, match="no judge given"):
            value_of(answer)
    with pytest.raises(MetricError, match="not asked for"):
        value_of(SpeechJudges(None, Compass()).judge(clip, embedded=False).embedding)
