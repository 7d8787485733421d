"""Recordings of a source as audio parts: paths stay where they are, stored sound goes to files beside the manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.audio import AUDIO_EXTENSIONS, AudioError
from audiollm.audio.decoding_process import visible_difference
from audiollm.data.convert.request import ConversionRequest
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.data.records.storage import write_bytes
from audiollm.files.atomic import safe_name

_MAGIC = {b"fLaC": ".flac", b"RIFF": ".wav", b"OggS": ".ogg", b"ID3": ".mp3"}


def is_recording(value: object) -> bool:
    """Return whether a value of a row is stored sound: the content of a file, or decoded samples."""
    return isinstance(value, Mapping) and ("bytes" in value or {"array", "sampling_rate"} <= set(value))


@dataclass
class LengthSurvey:
    """Compares recordings with their headers, as far as this needs no decoding: a cut one lacks words of its text."""

    folder: Path
    """Folder that relative paths of samples are of."""
    max_files: int = 2000
    """Recordings that are looked at: some milliseconds each."""
    differences: list[str] = field(default_factory=list)
    _paths: set[Path] = field(default_factory=set)

    def add(self, sample: Sample) -> None:
        """Look at the recordings of a sample that were not looked at yet; what cannot be read is met again later."""
        for audio_part in sample.audio_parts():
            path = self.folder / audio_part.path
            if path in self._paths or len(self._paths) >= self.max_files:
                continue
            self._paths.add(path)
            try:
                difference = visible_difference(path)
            except (AudioError, OSError):
                continue
            if difference is not None:
                self.differences.append(f"{path}: {difference}")

    def sentence(self) -> str | None:
        """Say how many recordings are not whole; None: all that were looked at are."""
        if not self.differences:
            return None
        return f"of {len(self._paths)} recordings looked at, {len(self.differences)} are not what their headers promise"


def recording_part(request: ConversionRequest, label: str, value: Any) -> AudioPart:
    """The audio part of a path, of the content of a file, or of decoded samples.

    Args:
        label: text that names the file that stored sound is written to.
        value: a path; the content of a file, alone or as `{"bytes": ..., "path": ...}`; or
            `{"array": ..., "sampling_rate": ...}` as Hugging Face datasets store audio. Samples are written as FLAC
            of 16 bits.

    Raises:
        ValueError: no sound, no such file, or a file outside of the audio folder.
    """
    if isinstance(value, bytes | bytearray):
        value = {"bytes": bytes(value)}
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        name = str(value.get("path") or "")
        return _write_recording(request, label, value["bytes"], Path(name).suffix.lower())
    if isinstance(value, Mapping) and value.get("array") is not None:
        return _write_recording(request, label, _encoded(value["array"], value.get("sampling_rate")), ".flac")
    path = value.get("path") if isinstance(value, Mapping) else value
    if not isinstance(path, str) or not path:
        raise ValueError("holds no audio: neither a path nor the content of a file")
    return request.audio_part(path)


# Private


def _write_recording(request: ConversionRequest, label: str, content: bytes, extension: str) -> AudioPart:
    guess = next((ending for magic, ending in _MAGIC.items() if content.startswith(magic)), ".audio")
    folder = request.out.parent / f"{request.out.stem}_audio"
    path = folder / f"{safe_name(label)}{extension if extension in AUDIO_EXTENSIONS else guess}"
    write_bytes(str(path), content)
    return AudioPart(path=f"{folder.name}/{path.name}")


def _encoded(array: Any, sample_rate: Any) -> bytes:
    import numpy as np
    import torch

    from audiollm.audio import encode_bytes

    try:
        samples = np.asarray(array, np.float32)
        rate = float(sample_rate)
    except (TypeError, ValueError):
        raise ValueError("decoded audio must be numbers with a sampling_rate in Hz") from None
    if samples.ndim not in (1, 2) or not samples.size or not np.isfinite(samples).all():
        raise ValueError("decoded audio must be finite samples [samples] or [channels, samples]")
    if not (math.isfinite(rate) and rate == int(rate) and rate > 0):
        raise ValueError(f"decoded audio has the sampling_rate {sample_rate!r}: a number of Hz is expected")
    return encode_bytes(torch.from_numpy(np.atleast_2d(samples)), int(rate), "flac")
