"""Named float arrays of a sample: latents, features of frames or texts, computed once and kept beside it.

An array is a safetensors file of one tensor, whose header tells what made it and the SHA-256 of its values: a damaged
array is found when it is read, and one of another encoder by its digest. In a shard the file is a member beside the
sample's JSON, so that one seek and one read give the sample with all its arrays; a manifest names files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from audiollm.data.records.sample import Sample
from audiollm.data.records.storage import audio_address, read_all
from audiollm.errors import BadSample

ARRAY_ENDING = "safetensors"
"""Ending of files and members that hold an array."""
_KEY, _FACTS, _MADE_BY, _SHA256 = "array", "facts", "made_by", "sha256"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class StoredArray:
    """An array of a sample, not read yet."""

    name: str
    place: str
    """Location named in errors: the file, or the shard and the member."""
    sample_id: str
    content: bytes | str
    """The content of an array's file, or the path or URL of one."""

    def load(self, made_by: str | None = None) -> Tensor:
        """Read the array, float, in the shape and type that it was written in.

        Args:
            made_by: digest of the only maker whose arrays can be used; None: any.

        Raises:
            BadSample: it cannot be read, its values are not those that were written, or another maker made it.
        """
        try:
            content = read_all(self.content) if isinstance(self.content, str) else self.content
        except (OSError, ValueError) as error:
            raise self._bad(f"cannot be read ({error})", "missing array") from error
        try:
            facts, array = _read_array_facts(content), load(content)[_KEY]
        except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            reason = f"no array in it ({' '.join(str(error).split())})"
            raise self._bad(reason, "damaged array") from error
        if _digest_array(array) != facts.get(_SHA256):
            raise self._bad("its values are not those that were written: make it anew", "damaged array")
        if made_by is not None and facts.get(_MADE_BY) != made_by:
            origin = f"made by {str(facts.get(_MADE_BY))[:12]}, and {made_by[:12]} is needed"
            raise self._bad(f"{origin}: make it anew with today's encoder", "array of another encoder")
        return array

    def _bad(self, reason: str, kind: str) -> BadSample:
        return BadSample(self.place, self.sample_id, f"array {self.name!r}: {reason}", kind)


def array_bytes(array: Tensor, made_by: str) -> bytes:
    """The file of an array.

    Args:
        array: float, of any shape with values in it.
        made_by: digest of what made it: an encoder's weights and settings.

    Raises:
        ValueError: it is not float, or empty.
    """
    if array.dtype not in _FLOATS or array.numel() == 0:
        raise ValueError(f"an array is float and has values, and this is {array.dtype} {list(array.shape)}")
    plain = array.detach().to("cpu").contiguous()
    # one entry: safetensors writes several in an order that differs from call to call
    facts = json.dumps({_MADE_BY: made_by, _SHA256: _digest_array(plain)})
    return save({_KEY: plain}, {_FACTS: facts})


def array_member(name: str) -> str:
    """The name of an array's member in a shard, after the sample's key.

    Raises:
        ValueError: the name is not made of small letters, digits and `_`.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"array {name!r}: a name has small letters, digits and _, and begins with a letter")
    return f"{name}.{ARRAY_ENDING}"


def member_arrays(sample: Sample, place: str, members: Mapping[str, bytes]) -> dict[str, StoredArray]:
    """The arrays that a sample of a shard names, by name.

    Raises:
        BadSample: a member that the sample names is not there.
    """
    arrays = {}
    for name, member in sample.arrays.items():
        if member not in members:
            reason = f"array {name!r}: there is no member {member!r}"
            raise BadSample(place, sample.id, reason, "missing array")
        arrays[name] = StoredArray(name, f"{place}.{member}", sample.id, members[member])
    return arrays


def named_arrays(sample: Sample, place: str, folder: str) -> dict[str, StoredArray]:
    """The arrays that a sample of a manifest in `folder` names, by name."""
    return {
        name: StoredArray(name, f"{place} {path}", sample.id, audio_address(folder, path))
        for name, path in sample.arrays.items()
    }


# Private


def _read_array_facts(content: bytes) -> dict[str, str]:
    """The metadata in a file's header."""
    size = int.from_bytes(content[:8], "little")
    return dict(json.loads(json.loads(content[8 : 8 + size])["__metadata__"][_FACTS]))


def _digest_array(array: Tensor) -> str:
    """SHA-256 of type, shape and values."""
    digest = hashlib.sha256(f"{array.dtype} {list(array.shape)} ".encode())
    digest.update(array.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
