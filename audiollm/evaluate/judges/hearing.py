"""What judges make of one clip: words and voices, or the reason why there is no value.

Shapes: C channels, N samples, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio import AudioError, Waveform, load
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.files.atomic import file_digest

LONGEST_S = 600.0


@runtime_checkable
class Recognizer(Protocol):
    """`PocketsphinxRecognizer`, `pretrained_judges.PretrainedRecognizer`, or one of a user's own."""

    name: str

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str: ...


@runtime_checkable
class VoiceJudge(Protocol):
    """Whoever puts sound into a space in which like is near like: a judge of voices, or of emotions."""

    name: str

    def embed(self, samples_1N: Tensor, sample_rate: int) -> Tensor: ...


def load_clip(path: Path, start_s: float = 0.0, end_s: float | None = None) -> Waveform:
    """A clip in one channel, at its own rate, its first ten minutes.

    Raises:
        MetricError: it cannot be read.
    """
    longest = start_s + LONGEST_S
    try:
        return load(path, start_s, longest if end_s is None else min(end_s, longest), mono=True)
    except AudioError as error:
        raise MetricError(f"cannot be heard: {error.reason}") from error


def digest(path: Path) -> str:
    """What a clip is, whatever its name.

    Raises:
        MetricError: it cannot be read.
    """
    try:
        return file_digest(path)
    except OSError as error:
        raise MetricError(f"cannot be heard: cannot be read ({error.strerror})") from error


def recognize(judge: Recognizer | None, wave: Waveform) -> str:
    """What a recognizer hears.

    Raises:
        MetricError: there is none, or it fails on this clip.
    """
    if judge is None:
        raise MetricError("no judge given")
    with failures_of(judge.name):
        return judge.recognize(wave.samples_CN, wave.sample_rate)


def embed(judge: VoiceJudge | None, wave: Waveform) -> Tensor:
    """A clip's place in the judge's space, float32 `[D]`.

    Raises:
        MetricError: there is no judge, or it fails on this clip.
    """
    if judge is None:
        raise MetricError("no judge given")
    with failures_of(judge.name):
        embedding_D = judge.embed(wave.samples_CN, wave.sample_rate)
    if not bool(torch.isfinite(embedding_D).all()) or not bool(embedding_D.any()):
        raise MetricError(f"{judge.name} gives no direction for this clip")
    return embedding_D


def cosine(a_D: Tensor, b_D: Tensor) -> float:
    """Similarity of two embeddings, -1 to 1."""
    return float(functional.cosine_similarity(a_D.double(), b_D.double(), dim=0))


class Embedded:
    """Embeddings of whole files, each made once: a prompt serves many clips."""

    def __init__(self, judge: VoiceJudge | None) -> None:
        self._judge = judge
        self._known: dict[Path, Tensor | MetricError] = {}

    def of(self, path: Path) -> Tensor:
        """
        Raises:
            MetricError: no judge, or a file that it cannot hear.
        """
        if path not in self._known:
            try:
                self._known[path] = embed(self._judge, load_clip(path))
            except MetricError as error:
                self._known[path] = error
        found = self._known[path]
        if isinstance(found, MetricError):
            raise MetricError(found.reason)
        return found


@contextmanager
def failures_of(judge: str) -> Iterator[None]:
    """Turns whatever a judge raises on a clip into the reason for n/a."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise MetricError(f"{judge} failed: {type(error).__name__}: {said}") from error
