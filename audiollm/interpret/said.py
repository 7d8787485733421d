"""Writes what an interpreter said over a stream: a line of SimulEval's log, and a WAV in which it stands in time.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.evaluate.interpret.logged_outputs import LoggedOutput
from audiollm.generation.speaking.wav_stream import WavWriter


@dataclass(frozen=True)
class SaidPiece:
    """The part of an action that a log tells: an endless session keeps no silence and no sound."""

    text: str
    heard_s: float
    """Sound of the source that had been heard."""
    elapsed_s: float | None
    """Time on the clock when it was said; None where the time of computation is not measured."""
    duration_s: float = 0.0
    """Duration of its speech."""


@dataclass(frozen=True)
class HeardSource:
    """The source of a line of the log."""

    index: int
    length_s: float
    path: str = ""
    reference: str = ""
    id: str | None = None
    """The sample's id, by which the report finds the recording."""


def logged_output(said: Sequence[SaidPiece], source: HeardSource, speech: str | None = None) -> LoggedOutput:
    """Return what was said over a source as a line of SimulEval's log.

    Args:
        speech: path of the sound of an output in speech, whose pieces are then counted; None for a text, whose words
            are.
    """
    values: dict[str, Any] = {
        "index": source.index, "source": source.path, "reference": source.reference,
        "source_length": max(1e-3, 1000 * source.length_s),
    }  # fmt: skip
    if source.id is not None:
        values["id"] = source.id
    if speech is None:
        units = [(word, each) for each in said for word in each.text.split()]
        values |= {"prediction": " ".join(word for word, _ in units), "prediction_length": len(units)}
    else:
        units = [("", each) for each in said if each.duration_s]
        values |= {
            "prediction": speech,
            "prediction_offset": 0.0,  # the file begins with the stream, with silence before the first piece
            "prediction_length": sum(each.duration_s for _, each in units),
            "transcript": " ".join(each.text for each in said if each.text),
            "durations": [1000 * each.duration_s for _, each in units],
        }
    values["delays"] = [1000 * each.heard_s for _, each in units]
    elapsed = [1000 * each.elapsed_s for _, each in units if each.elapsed_s is not None]
    if len(elapsed) == len(units):
        values["elapsed"] = elapsed
    return LoggedOutput.model_validate(values)


class SpeechFile:
    """A WAV of speech over a stream: each piece stands where it is heard, or behind the one before it.

    Args:
        path: the file, which `close` completes.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, sample_rate: int) -> None:
        self._sample_rate, self._written = sample_rate, 0
        self._file = WavWriter(path, sample_rate)

    def write(self, samples_1N: Tensor, heard_s: float) -> None:
        """Write a piece that is heard from this time on."""
        silence = max(0, round(heard_s * self._sample_rate) - self._written)
        both_1N = torch.cat([torch.zeros(1, silence), samples_1N], dim=1)
        self._file.write(both_1N)
        self._written += both_1N.shape[1]

    def close(self) -> None:
        self._file.__exit__(None, None, None)
