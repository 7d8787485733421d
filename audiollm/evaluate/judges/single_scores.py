"""Scores of one answer by a judge: its words, its voice, and the points in a verdict."""

from __future__ import annotations

import re

from audiollm.audio import Waveform
from audiollm.evaluate.judges.judging import Recognizer, VoiceJudge, cosine, embed, recognize
from audiollm.evaluate.report.text_errors import TextForm, count_errors

MAX_POINTS = 10.0
_POINTS = re.compile(r"\bscore\b\W*(\d+(?:\.\d+)?)", re.IGNORECASE)


def words_score(recognizer: Recognizer, form: TextForm, wave: Waveform, text: str) -> float:
    """1 less the word error rate of what a recognizer hears, at least 0.

    Raises:
        MetricError: the recognizer fails on this recording, or the text has no words.
    """
    heard = recognize(recognizer, wave)
    return max(0.0, 1.0 - count_errors(form.apply(text), form.apply(heard)).rate)


def voice_score(judge: VoiceJudge, wave: Waveform, reference: Waveform) -> float:
    """Cosine of the embeddings of two recordings' voices, -1 to 1.

    Raises:
        MetricError: the judge fails on one of them.
    """
    return cosine(embed(judge, reference), embed(judge, wave))


def read_points(verdict: str) -> float | None:
    """Points after the word "score" in a verdict, as a share of 10; None where there are none or several differ."""
    found = {float(points) for points in _POINTS.findall(verdict)}
    if len(found) != 1:
        return None
    (points,) = found
    return points / MAX_POINTS if points <= MAX_POINTS else None
