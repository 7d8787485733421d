"""Recordings of a source as audio parts: paths stay where they are, stored sound goes to files beside the manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from audiollm.audio import AUDIO_EXTENSIONS
from audiollm.data.convert.request import ConversionRequest
from audiollm.data.records.sample import AudioPart
from audiollm.data.records.storage import write_bytes
from audiollm.files.atomic import safe_name

_MAGIC = {b"fLaC": ".flac", b"RIFF": ".wav", b"OggS": ".ogg", b"ID3": ".mp3"}


def is_recording(value: object) -> bool:
    """Return whether a value of a row is stored sound: the content of a file, or decoded samples."""
    return isinstance(value, Mapping) and (
        {"bytes", "path"} <= set(value) or {"array", "sampling_rate"} <= set(value)
    )


def recording_part(request: ConversionRequest, label: str, value: Any) -> AudioPart:
    """The audio part of a path, of the content of a file, or of decoded samples.

    Args:
        label: text that names the file that stored sound is written to.
        value: a path; `{"bytes": ..., "path": ...}` or `{"array": ..., "sampling_rate": ...}` as Hugging Face
            datasets store audio. Samples are written as FLAC of 16 bits.

    Raises:
        ValueError: no sound, no such file, or a file outside of the audio folder.
    """
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        name = str(value.get("path") or "")
        return _written(request, label, value["bytes"], Path(name).suffix.lower())
    if isinstance(value, Mapping) and value.get("array") is not None:
        return _written(request, label, _encoded(value["array"], value.get("sampling_rate")), ".flac")
    path = value.get("path") if isinstance(value, Mapping) else value
    if not isinstance(path, str) or not path:
        raise ValueError("holds no audio: neither a path nor the content of a file")
    return request.audio_part(path)


# Private


def _written(request: ConversionRequest, label: str, content: bytes, given: str) -> AudioPart:
    guess = next((ending for magic, ending in _MAGIC.items() if content.startswith(magic)), ".audio")
    folder = request.out.parent / f"{request.out.stem}_audio"
    path = folder / f"{safe_name(label)}{given if given in AUDIO_EXTENSIONS else guess}"
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
