"""Scores of one answer by a judge: its words, its voice, and the points in a verdict."""

from __future__ import annotations

import re

from audiollm.audio import Waveform
from audiollm.evaluate.judges.judging import LoopRefused, Recognizer, VoiceJudge, cosine, embed, recognize
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.text_errors import TextForm, count_errors

MAX_POINTS = 10.0
_POINTS = re.compile(r"\bscore\b\W*(\d+(?:\.\d+)?)", re.IGNORECASE)


def words_score(recognizer: Recognizer, form: TextForm, wave: Waveform, text: str) -> tuple[float, str]:
    """1 less the word error rate of a recognizer's transcript, at least 0, and the transcript.

    A loop of the recognizer scores 0: left out, speech that makes a recognizer loop would escape its judgement.

    Raises:
        MetricError: the recognizer fails on this recording, or the text has no words.
    """
    reference = form.apply(text)
    if not reference:
        raise MetricError("no words in the text")
    try:
        transcript = recognize(recognizer, wave)
    except LoopRefused as refusal:
        return 0.0, refusal.reason
    return max(0.0, 1.0 - count_errors(reference, form.apply(transcript)).rate), transcript


def voice_score(judge: VoiceJudge, wave: Waveform, reference: Waveform) -> float:
    """Cosine of the embeddings of two recordings' voices, -1 to 1.

    Raises:
        MetricError: the judge fails on one of them.
    """
    return cosine(embed(judge, reference), embed(judge, wave))


def read_points(verdict: str) -> float | None:
    """Points after the word "score" in a verdict, as a share of 10; None where there are none or several differ."""
    scores = {float(points) for points in _POINTS.findall(verdict)}
    if len(scores) != 1:
        return None
    (points,) = scores
    return points / MAX_POINTS if points <= MAX_POINTS else None
