"""How a clip of speech is judged: a `SpeechClip` is given to `SpeechJudges`, which return a `JudgedClip`.

The last part scores one answer: its words, its voice, and the points in a verdict.

Shapes: C channels, N samples, D embedding dimension.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio import AudioError, Waveform, load
from audiollm.data.text.repeated_words import loop_reason
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.text_errors import TextForm, count_errors
from audiollm.failures import FailedOnEveryItem, note_success, noted_outcome
from audiollm.files.atomic import file_digest

MAX_CLIP_S = 600.0
"""Seconds of a clip that are judged, where the judges set no other limit."""
NO_JUDGE = MetricError("no judge given")
Value = TypeVar("Value")


class LoopRefused(MetricError):
    """A transcript that is a loop of the recognizer, and is not scored as if it were text.

    Attributes:
        text: the loop, as the recognizer wrote it.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason)
        self.text = text


@runtime_checkable
class Recognizer(Protocol):
    """Writes down speech: `PocketsphinxRecognizer`, `PretrainedRecognizer`, or a user's own."""

    name: str

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str: ...


@runtime_checkable
class VoiceJudge(Protocol):
    """Embeds a clip so that similar voices (or similar emotions) have similar directions."""

    name: str

    def embed(self, samples_1N: Tensor, sample_rate: int) -> Tensor: ...


class LabelJudge(Protocol):
    """Names one label of a closed set, with its probability (None: not known)."""

    def predict(self, samples_CN: Tensor, sample_rate: int) -> tuple[str, float | None]: ...

    @property
    def labels(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class SpeechClip:
    """A clip to be judged: what should be heard in it, and where its sound is."""

    id: str
    text: str
    """The text that should be said."""
    path: Path | None = None
    """The audio file; None: there is no sound, for the reason in `problem`."""
    problem: str = ""
    speaker: str | None = None
    """The speaker who should be heard, where that is one of a closed set."""
    start_s: float = 0.0
    end_s: float | None = None
    stopped: bool = True
    """Whether the model ended the clip by itself."""
    language: str | None = None
    """Language of the text; None: not known."""


@dataclass(frozen=True)
class JudgedClip:
    """The answers of all judges to one clip. An answer that could not be given is a `MetricError` with the reason."""

    duration_s: float = 0.0
    problem: str = ""
    """Why no judge heard the clip; empty where they did."""
    file_problem: str = ""
    """`problem` with the path of the file, where the file is the problem."""
    words: str | MetricError = NO_JUDGE
    """The recognizer's transcript."""
    labels: Mapping[str, str | MetricError] = field(default_factory=dict)
    """The label that each classifier chose, by the classifier's name."""
    confidence: Mapping[str, float] = field(default_factory=dict)
    """The probability of that label."""
    embedding: Tensor | MetricError = NO_JUDGE
    """The voice judge's embedding, float32 `[D]`."""


@dataclass(frozen=True)
class SpeechJudges:
    """The judges of a suite; each of them may be absent."""

    recognizer: Recognizer | None = None
    voices: VoiceJudge | None = None
    """A judge of voices, or of emotions in the suite of that name."""
    classifiers: Mapping[str, LabelJudge] = field(default_factory=dict)
    grammar: Sequence[str] | None = None
    """All texts that the recognizer can write; None: an open vocabulary."""
    max_clip_s: float = MAX_CLIP_S
    sample_rate: int | None = None
    """The rate in Hz at which the judges hear a clip; None: the clip's own."""

    @property
    def names(self) -> list[str]:
        """The classifiers and the recognizer, by name."""
        return [*self.classifiers, *([self.recognizer.name] if self.recognizer else [])]

    def note_earlier_answers(self) -> None:
        """Record that the judges have answered to a clip in an earlier run."""
        judges = [judge for judge in (self.recognizer, self.voices) if judge is not None]
        for name in (*self.classifiers, *map(judge_label, judges)):
            note_success(name)

    def closed_set(self, judge: str) -> Sequence[str] | None:
        """All answers that the judge of this name can give; None: an open vocabulary."""
        return self.classifiers[judge].labels if judge in self.classifiers else self.grammar

    def answer(self, judged: JudgedClip, judge: str) -> str | None:
        """The answer of the judge of this name; None where the clip could not be read.

        Raises:
            MetricError: the judge failed on this clip.
        """
        if judged.problem:
            return None
        return value_of(judged.labels[judge] if judge in self.classifiers else judged.words)

    def judge(self, clip: SpeechClip, embedded: bool = True) -> JudgedClip:
        """Have every judge hear a clip.

        Args:
            embedded: False: the voice judge is not asked.
        """
        if clip.path is None:
            return JudgedClip(problem=clip.problem)
        try:
            wave = load_span(clip.path, clip.start_s, clip.end_s, self.max_clip_s, self.sample_rate)
        except AudioError as error:
            return JudgedClip(problem=f"cannot be heard: {error.reason}", file_problem=str(error))
        words = _value_or_error(partial(recognize, self.recognizer, wave))
        labels: dict[str, str | MetricError] = {}
        confidence: dict[str, float] = {}
        for name, classifier in self.classifiers.items():
            prediction = _value_or_error(partial(_predict_label, name, classifier, wave))
            if isinstance(prediction, MetricError):
                labels[name] = prediction
                continue
            labels[name], probability = prediction
            if probability is not None:
                confidence[name] = probability
        voice = (
            _value_or_error(partial(embed, self.voices, wave)) if embedded else MetricError("not asked for")
        )
        return JudgedClip(wave.duration_s, "", "", words, labels, confidence, voice)


def value_of(answer: Value | MetricError) -> Value:
    """The value of an answer.

    Raises:
        MetricError: there is none.
    """
    if isinstance(answer, LoopRefused):
        raise LoopRefused(answer.reason, answer.text)
    if isinstance(answer, MetricError):
        raise MetricError(answer.reason)
    return answer


def load_span(
    path: Path, start_s: float, end_s: float | None, max_s: float, sample_rate: int | None = None
) -> Waveform:
    """At most `max_s` seconds of a span of a file, in one channel.

    Raises:
        AudioError: it cannot be read.
    """
    longest = start_s + max_s
    return load(path, start_s, longest if end_s is None else min(end_s, longest), sample_rate, mono=True)


def load_clip(path: Path, start_s: float = 0.0, end_s: float | None = None) -> Waveform:
    """The first ten minutes of a clip, in one channel, at its own rate.

    Raises:
        MetricError: it cannot be read.
    """
    try:
        return load_span(path, start_s, end_s, MAX_CLIP_S)
    except AudioError as error:
        raise MetricError(f"cannot be heard: {error.reason}") from error


def digest(path: Path) -> str:
    """SHA-256 of a file's content: it identifies a clip whatever the file's name.

    Raises:
        MetricError: it cannot be read.
    """
    try:
        return file_digest(path)
    except OSError as error:
        raise MetricError(f"cannot be heard: cannot be read ({error.strerror})") from error


def judge_label(judge: Recognizer | VoiceJudge) -> str:
    """The name of a judge in errors, with its folder where it was opened from one."""
    folder: Path | None = getattr(judge, "folder", None)
    return judge.name if folder is None else f"{judge.name} ({folder})"


def recognize(judge: Recognizer | None, wave: Waveform) -> str:
    """A recognizer's transcript of a clip: every score of words is counted on what this returns.

    Raises:
        MetricError: there is no recognizer, or it fails on this clip.
        LoopRefused: it repeats itself, or writes more than the clip can hold.
    """
    if judge is None:
        raise MetricError(NO_JUDGE.reason)
    with failures_of(judge_label(judge)):
        text = judge.recognize(wave.samples_CN, wave.sample_rate)
    reason = loop_reason(text, wave.duration_s)
    if reason is not None:
        raise LoopRefused(f"{judge.name} loops: {reason}", text)
    return text


def embed(judge: VoiceJudge | None, wave: Waveform) -> Tensor:
    """A voice judge's embedding of a clip, float32 `[D]`.

    Raises:
        MetricError: there is no judge, or it fails on this clip.
    """
    if judge is None:
        raise MetricError(NO_JUDGE.reason)
    with failures_of(judge_label(judge)):
        embedding_D = judge.embed(wave.samples_CN, wave.sample_rate)
    if not bool(torch.isfinite(embedding_D).all()) or not bool(embedding_D.any()):
        raise MetricError(f"{judge.name} gives no direction for this clip")
    return embedding_D


def cosine(a_D: Tensor, b_D: Tensor) -> float:
    """Similarity of two embeddings, -1 to 1."""
    return float(functional.cosine_similarity(a_D.double(), b_D.double(), dim=0))


class FileEmbeddings:
    """Embeddings of whole files, each computed once: one prompt serves many clips."""

    def __init__(self, judge: VoiceJudge | None) -> None:
        self._judge = judge
        self._embeddings: dict[Path, Tensor | MetricError] = {}

    def of(self, path: Path) -> Tensor:
        """The embedding of a file, float32 `[D]`.

        Raises:
            MetricError: there is no judge, or it cannot hear this file.
        """
        if path not in self._embeddings:
            self._embeddings[path] = _value_or_error(lambda: embed(self._judge, load_clip(path)))
        return value_of(self._embeddings[path])


@contextmanager
def failures_of(judge: str) -> Iterator[None]:
    """Turn any exception of a judge or a model into a `MetricError` that names it.

    A `MetricError` of its own is a fault of the clip (it is silent).

    Raises:
        FailedOnEveryItem: it has failed on a few dozen clips for this reason, and succeeded on none.
    """
    try:
        with noted_outcome(judge, (MetricError,)):
            yield
    except FailedOnEveryItem:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise MetricError(f"{judge} failed: {type(error).__name__}: {message}") from error


def _predict_label(name: str, classifier: LabelJudge, wave: Waveform) -> tuple[str, float | None]:
    with failures_of(getattr(classifier, "name", name)):
        return classifier.predict(wave.samples_CN, wave.sample_rate)


def _value_or_error(compute: Callable[[], Value]) -> Value | MetricError:
    try:
        return compute()
    except MetricError as error:
        return error


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
