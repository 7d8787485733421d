"""Codes of audio parts in files of their own: what a model said, as it said it.

A recording that a model made is decoded from codes; encoding the sound again would give others. A part that names a
file of codes is trained on with exactly these.

Shapes: K codebooks, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from audiollm.data.records.sample import AudioPart
from audiollm.data.records.storage import audio_address, read_all
from audiollm.errors import BadSample
from audiollm.files.atomic import atomic_path

CODES_KEY = "codes"
"""Name of the one tensor in a file of codes, int32 `[K, T]`."""


def at_addresses(audio_part: AudioPart, folder: str) -> AudioPart:
    """The part with the addresses of its files; its paths are those of a manifest in `folder`."""
    codes = None if audio_part.codes is None else audio_address(folder, audio_part.codes)
    return audio_part.model_copy(update={"path": audio_address(folder, audio_part.path), "codes": codes})


def save_part_codes(path: Path, codes_KT: Tensor) -> None:
    """Write the codes of a part; the file is whole or absent."""
    with atomic_path(path) as temporary:
        save_file({CODES_KEY: codes_KT.to("cpu", torch.int32).contiguous()}, temporary)


def load_encodings(parts: Sequence[AudioPart], sample_id: str, place: str) -> list[list[Tensor]]:
    """The one encoding that the parts' files of codes hold; none where no part names one.

    Args:
        parts: all audio parts of a sample, with addresses.
        place: where the sample was read, for errors.

    Raises:
        BadSample: some parts have codes and others have none, or a file that holds none.
    """
    if all(audio_part.codes is None for audio_part in parts):
        return []
    without = [audio_part.path for audio_part in parts if audio_part.codes is None]
    if without:
        reason = f"has codes of some recordings, and none of {without[0]}: give them for all, or for none"
        raise BadSample(place, sample_id, reason, "missing codes")
    return [[_load_part_codes(str(audio_part.codes), sample_id, place) for audio_part in parts]]


def _load_part_codes(address: str, sample_id: str, place: str) -> Tensor:
    try:
        codes_KT = load(read_all(address))[CODES_KEY]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = f"no codes in {address} ({' '.join(str(error).split())})"
        raise BadSample(place, sample_id, reason, "undecodable codes") from error
    if codes_KT.ndim != 2 or codes_KT.numel() == 0 or codes_KT.is_floating_point():
        reason = f"codes in {address} are {codes_KT.dtype} {list(codes_KT.shape)}, not integers [codebooks, frames]"
        raise BadSample(place, sample_id, reason, "undecodable codes")
    return codes_KT.to(torch.int64)
