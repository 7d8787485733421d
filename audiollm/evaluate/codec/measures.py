"""Measurements of one decoded clip: signal metrics, and the answers of judges; n/a with a reason where undefined.

Shapes: C channels, N samples, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio import Waveform
from audiollm.data.text.forms import comparison_form
from audiollm.evaluate.codec import signal_metrics
from audiollm.evaluate.codec.scores import METRICS
from audiollm.evaluate.judges import voicing
from audiollm.evaluate.judges.judging import Recognizer, VoiceJudge, failures_of, judge_label, recognize
from audiollm.evaluate.judges.voicing import Voicing, track_voicing
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.text_errors import choose_form


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
    language: str | None = None
    """Language of the transcript; None: by its script."""

    @cached_property
    def embedding(self) -> Tensor:
        assert self.judges.speaker is not None
        return self.judges.speaker.embed(self.wave.samples_CN, self.wave.sample_rate)

    @cached_property
    def voicing(self) -> Voicing:
        return track_voicing(self.wave.samples_CN, self.wave.sample_rate)

    @cached_property
    def form(self) -> Callable[[str], str]:
        """The form in which words are compared: Whisper's own where a Whisper judges, else `spoken`; characters in
        languages without spaces."""
        if self.language is None:
            return comparison_form
        return choose_form(form_of_judge(self.judges.recognizer), self.language).apply

    @cached_property
    def text(self) -> str:
        return self.form(self.transcript or "")

    @property
    def num_words(self) -> int:
        return len(self.text.split())


@dataclass(frozen=True)
class DecodedClip:
    """A clip as a codec decodes it, `[1, N]` at the comparison rate, with its pitch, tracked once for all metrics."""

    samples_1N: Tensor
    sample_rate: int

    @cached_property
    def voicing(self) -> Voicing:
        _refuse_not_finite(self.samples_1N)
        return track_voicing(self.samples_1N, self.sample_rate)


def form_of_judge(recognizer: Recognizer | None) -> str:
    """The form in which a judge's words are compared, where the language is known."""
    return "whisper" if getattr(recognizer, "is_whisper", False) else "spoken"


def score_clip(
    reference: ReferenceClip, decoded_1N: Tensor, metrics: Sequence[str], original: bool = False
) -> dict[str, float | str]:
    """A number, or the reason why there is none, for each metric; the original has those without a reference."""
    scores: dict[str, float | str] = {}
    decoded = DecodedClip(decoded_1N, reference.wave.sample_rate)
    for name in metrics:
        metric = METRICS[name]
        if original and metric.needs_reference:
            continue
        try:
            if metric.speech_only and reference.kind != "speech":
                raise MetricError("not speech" if reference.kind != "unknown" else "not known to be speech")
            scores[name] = _MEASURES[name](reference, decoded)
        except MetricError as error:
            scores[name] = error.reason
    return scores


def _dnsmos(reference: ReferenceClip, decoded: DecodedClip) -> float:
    return signal_metrics.dnsmos(decoded.samples_1N, decoded.sample_rate).overall


def _speaker_similarity(reference: ReferenceClip, decoded: DecodedClip) -> float:
    """Cosine of the judge's embeddings of reference and decoded clip."""
    judge = reference.judges.speaker
    if judge is None:
        raise MetricError("no judge given")
    _refuse_not_finite(decoded.samples_1N)
    with failures_of(judge_label(judge)):
        embedding_D = judge.embed(decoded.samples_1N, decoded.sample_rate)
        return float(functional.cosine_similarity(reference.embedding, embedding_D, dim=0))


def _word_error_rate(reference: ReferenceClip, decoded: DecodedClip) -> float:
    """Word errors over the words of the transcript (jiwer), both sides in the clip's form."""
    from jiwer import wer

    if reference.judges.recognizer is None:
        raise MetricError("no judge given")
    if not reference.num_words:
        raise MetricError("no transcript")
    _refuse_not_finite(decoded.samples_1N)
    transcript = recognize(reference.judges.recognizer, Waveform(decoded.samples_1N, decoded.sample_rate))
    return float(wer(reference.text, reference.form(transcript)))


Measure: TypeAlias = Callable[[ReferenceClip, DecodedClip], float]


def _refuse_not_finite(samples_1N: Tensor) -> None:
    if not bool(torch.isfinite(samples_1N).all()):
        raise MetricError("the decoded sound holds NaN or infinity")


def _signal_measure(measure: Callable[[Tensor, Tensor, int], float]) -> Measure:
    return lambda reference, decoded: measure(
        reference.wave.samples_CN, decoded.samples_1N, decoded.sample_rate
    )


def _voicing_measure(measure: Callable[[Voicing, Voicing], float]) -> Measure:
    return lambda reference, decoded: measure(reference.voicing, decoded.voicing)


_MEASURES: dict[str, Measure] = {
    "mel_distance": _signal_measure(signal_metrics.mel_distance),
    "stft_distance": _signal_measure(signal_metrics.stft_distance),
    "si_sdr": _signal_measure(signal_metrics.si_sdr),
    "pesq": _signal_measure(signal_metrics.pesq),
    "stoi": _signal_measure(signal_metrics.stoi),
    "voicing_f1": _voicing_measure(voicing.voicing_f1),
    "close_pitch": _voicing_measure(voicing.close_pitch_share),
    "pitch_error": _voicing_measure(voicing.pitch_error_cents),
    "periodicity_error": _voicing_measure(voicing.periodicity_error),
    "voiced_share": lambda reference, decoded: decoded.voicing.voiced_share,
    "harmonicity": lambda reference, decoded: voicing.harmonicity(decoded.voicing),
    "dnsmos": _dnsmos,
    "speaker_similarity": _speaker_similarity,
    "word_error_rate": _word_error_rate,
}
