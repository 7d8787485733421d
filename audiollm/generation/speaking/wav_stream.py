"""A WAV file that can be played while it is written: to a file, or to the standard output.

Shapes: N samples.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from torch import Tensor

_UNKNOWN = 0xFFFFFFFF - 36
"""Size of the data chunk that players read as "until the stream ends"."""


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
        self._file.write(self._header(_UNKNOWN))

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is None:
            self._file.flush()
            return
        self._file.seek(0)
        self._file.write(self._header(self._bytes))
        self._file.close()

    def write(self, samples_1N: Tensor) -> None:
        """Write samples in [-1, 1] without buffering."""
        levels_N = (samples_1N[0].cpu().double() * 2**15).round().clamp(-(2**15), 2**15 - 1)
        data = levels_N.numpy().astype("<i2").tobytes()
        self._bytes += len(data)
        self._file.write(data)
        self._file.flush()

    def _header(self, data_bytes: int) -> bytes:
        rate = self._sample_rate
        form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
        return (
            struct.pack("<4sI4s", b"RIFF", 36 + data_bytes, b"WAVE")
            + form
            + struct.pack("<4sI", b"data", data_bytes)
        )
