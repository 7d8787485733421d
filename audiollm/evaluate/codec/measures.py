"""Measurements of one decoded clip: signal metrics, and the answers of judges; n/a with a reason where undefined.

Shapes: C channels, N samples, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio import Waveform
from audiollm.data.text.forms import recognition_form, spoken_form
from audiollm.evaluate.codec import signal_metrics
from audiollm.evaluate.codec.scores import METRICS
from audiollm.evaluate.judges.judging import Recognizer, VoiceJudge, failures_of
from audiollm.evaluate.report.metric_error import MetricError


@dataclass(frozen=True)
class CodecJudges:
    """The judges of words and voices; the metric of an absent judge is n/a."""

    recognizer: Recognizer | None = None
    speaker: VoiceJudge | None = None


@dataclass(frozen=True)
class ReferenceClip:
    """The reference at the comparison rate, with the judges' answers to it, computed once for all codecs."""

    wave: Waveform
    kind: str
    transcript: str | None
    judges: CodecJudges

    @cached_property
    def embedding(self) -> Tensor:
        assert self.judges.speaker is not None
        return self.judges.speaker.embed(self.wave.samples_CN, self.wave.sample_rate)

    @cached_property
    def text(self) -> str:
        return recognition_form(spoken_form(self.transcript or ""))

    @property
    def num_words(self) -> int:
        return len(self.text.split())


def score_clip(
    reference: ReferenceClip, decoded_1N: Tensor, metrics: Sequence[str], original: bool = False
) -> dict[str, float | str]:
    """A number, or the reason why there is none, for each metric; the original has those without a reference."""
    scores: dict[str, float | str] = {}
    for name in metrics:
        metric = METRICS[name]
        if original and metric.needs_reference:
            continue
        try:
            if metric.speech_only and reference.kind != "speech":
                raise MetricError("not speech" if reference.kind != "unknown" else "not known to be speech")
            scores[name] = _MEASURES[name](reference, decoded_1N)
        except MetricError as error:
            scores[name] = error.reason
    return scores


def _dnsmos(reference: ReferenceClip, decoded_1N: Tensor) -> float:
    return signal_metrics.dnsmos(decoded_1N, reference.wave.sample_rate).overall


def _speaker_similarity(reference: ReferenceClip, decoded_1N: Tensor) -> float:
    """Cosine of the judge's embeddings of reference and decoded clip."""
    judge = reference.judges.speaker
    if judge is None:
        raise MetricError("no judge given")
    _need_finite(decoded_1N)
    with failures_of(judge.name):
        embedding_D = judge.embed(decoded_1N, reference.wave.sample_rate)
        return float(functional.cosine_similarity(reference.embedding, embedding_D, dim=0))


def _word_error_rate(reference: ReferenceClip, decoded_1N: Tensor) -> float:
    """Word errors over the words of the transcript (jiwer), both sides in `recognition_form`."""
    from jiwer import wer

    judge = reference.judges.recognizer
    if judge is None:
        raise MetricError("no judge given")
    if not reference.num_words:
        raise MetricError("no transcript")
    _need_finite(decoded_1N)
    with failures_of(judge.name):
        heard = judge.recognize(decoded_1N, reference.wave.sample_rate)
    return float(wer(reference.text, recognition_form(spoken_form(heard))))


def _need_finite(samples_1N: Tensor) -> None:
    if not bool(torch.isfinite(samples_1N).all()):
        raise MetricError("the decoded sound holds NaN or infinity")


def _signal(measure: Callable[[Tensor, Tensor, int], float]) -> Callable[[ReferenceClip, Tensor], float]:
    return lambda reference, decoded_1N: measure(
        reference.wave.samples_CN, decoded_1N, reference.wave.sample_rate
    )


_MEASURES: dict[str, Callable[[ReferenceClip, Tensor], float]] = {
    "mel_distance": _signal(signal_metrics.mel_distance),
    "stft_distance": _signal(signal_metrics.stft_distance),
    "si_sdr": _signal(signal_metrics.si_sdr),
    "pesq": _signal(signal_metrics.pesq),
    "stoi": _signal(signal_metrics.stoi),
    "dnsmos": _dnsmos,
    "speaker_similarity": _speaker_similarity,
    "word_error_rate": _word_error_rate,
}
