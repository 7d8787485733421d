"""A WAV file that can be played while it is written: to a file, or to the standard output.

Shapes: N samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from torch import Tensor

from audiollm.audio.sound_encoder import pcm16, wav_header


class WavWriter:
    """Writer of 16-bit mono WAV. At the end it corrects the lengths in the header where the output can be rewound.

    Args:
        path: None for the standard output.
    """

    def __init__(self, path: Path | None, sample_rate: int) -> None:
        self._sample_rate, self._bytes = sample_rate, 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: BinaryIO = sys.stdout.buffer if path is None else path.open("wb")
        self._file.write(wav_header(sample_rate))

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is None:
            self._file.flush()
            return
        self._file.seek(0)
        self._file.write(wav_header(self._sample_rate, self._bytes))
        self._file.close()

    def write(self, samples_1N: Tensor) -> None:
        """Write samples in [-1, 1] without buffering."""
        data = pcm16(samples_1N)
        self._bytes += len(data)
        self._file.write(data)
        self._file.flush()
