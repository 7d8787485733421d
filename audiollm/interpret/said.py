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


def logged_output(
    pieces: Sequence[SaidPiece], source: HeardSource, speech: str | None = None
) -> LoggedOutput:
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
        units = [(word, piece) for piece in pieces for word in piece.text.split()]
        values |= {"prediction": " ".join(word for word, _ in units), "prediction_length": len(units)}
    else:
        units = [("", piece) for piece in pieces if piece.duration_s]
        values |= {
            "prediction": speech,
            "prediction_offset": 0.0,  # the file begins with the stream, with silence before the first piece
            "prediction_length": sum(piece.duration_s for _, piece in units),
            "transcript": " ".join(piece.text for piece in pieces if piece.text),
            "durations": [1000 * piece.duration_s for _, piece in units],
        }
    values["delays"] = [1000 * piece.heard_s for _, piece in units]
    elapsed = [1000 * piece.elapsed_s for _, piece in units if piece.elapsed_s is not None]
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
        self._sample_rate, self._num_written = sample_rate, 0
        self._file = WavWriter(path, sample_rate)

    def write(self, samples_1N: Tensor, heard_s: float) -> None:
        """Write a piece that is heard from this time on."""
        silence = max(0, round(heard_s * self._sample_rate) - self._num_written)
        both_1N = torch.cat([torch.zeros(1, silence), samples_1N], dim=1)
        self._file.write(both_1N)
        self._num_written += both_1N.shape[1]

    def close(self) -> None:
        self._file.__exit__(None, None, None)
