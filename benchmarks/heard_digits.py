"""Rewards of `learn_tts_grpo.py`: which digit is heard in an answer, by one recognizer or another.

`words` is Pocketsphinx with a grammar of ten digits. `classifier` is a classifier of digits that was trained on real
takes, whose folder the environment variable AUDIOLLM_DIGIT_JUDGE names: with weight 0 it is watched and has no part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from make_reasoning import DIGITS
from shuffled_rewards import shuffled

from audiollm.audio.samples import Waveform
from audiollm.evaluate.judges.classifier import ClipClassifier
from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer

JUDGE_VARIABLE = "AUDIOLLM_DIGIT_JUDGE"


def words(batch: RewardBatch) -> list[float | None]:
    """1 where Pocketsphinx hears the digit that was asked for, else 0."""
    recognizer = _recognizer()
    return [
        _score_heard_digit(answer, lambda w: recognizer.recognize(w.samples_CN, w.sample_rate))
        for answer in batch
    ]


def shuffled_words(batch: RewardBatch) -> list[float | None]:
    """`words`, said of another answer of the step."""
    return shuffled(words(batch), batch)


def classifier(batch: RewardBatch) -> list[float | None]:
    """1 where the classifier hears the digit that was asked for, else 0."""
    judge = _classifier(os.environ[JUDGE_VARIABLE])
    return [
        _score_heard_digit(answer, lambda w: judge.predict(w.samples_CN, w.sample_rate)[0])
        for answer in batch
    ]


def _score_heard_digit(answer: SampledAnswer, hear: Callable[[Waveform], str]) -> float:
    wave = answer.recording
    if wave is None or not wave.num_samples:
        return 0.0
    return float(hear(wave.mono()).strip() == answer.sample.metadata["text"])


@cache
def _recognizer() -> PocketsphinxRecognizer:
    return PocketsphinxRecognizer(DIGITS)


@cache
def _classifier(folder: str) -> ClipClassifier:
    return ClipClassifier.load(Path(folder))
