"""Weights in buckets of bytes: whole tensors of any size travel in bounded memory, and arrive as they were."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class TensorBytes(NamedTuple):
    """Consecutive bytes of a tensor."""

    name: str
    first: int
    """Number of its first byte in the tensor."""
    length: int


class Bucket(NamedTuple):
    """Pieces of tensors, end to end."""

    pieces: list[TensorBytes]
    data_B: Any
    """uint8 `[B]`, a numpy array, which Ray shares between processes without a copy."""


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Yield all bytes of tensors in buckets of at most `limit` bytes; larger tensors are cut.

    Each bucket has memory of its own. One tensor is read at a time, and copied to the CPU piece by piece.
    """
    data_B, pieces, filled = np.empty(limit, np.uint8), list[TensorBytes](), 0
    for name, tensor in tensors:
        flat_B = bytes_of(tensor)
        first = 0
        while first < len(flat_B):
            length = min(len(flat_B) - first, limit - filled)
            data_B[filled : filled + length] = flat_B[first : first + length].cpu().numpy()
            pieces.append(TensorBytes(name, first, length))
            first, filled = first + length, filled + length
            if filled == limit:
                yield Bucket(pieces, data_B)
                data_B, pieces, filled = np.empty(limit, np.uint8), [], 0
    if filled:
        yield Bucket(pieces, data_B[:filled])


@torch.no_grad()
def write_bucket(bucket: Bucket, targets: Mapping[str, Tensor]) -> None:
    """Write the pieces of a bucket into tensors of the same names, types and sizes, in place.

    Raises:
        ValueError: there is no such tensor, or it has fewer bytes.
    """
    begin = 0
    for piece in bucket.pieces:
        target = targets.get(piece.name)
        if target is None:
            raise ValueError(f"no tensor {piece.name!r} to write to")
        target_B = bytes_of(target)
        end = piece.first + piece.length
        if end > len(target_B):
            raise ValueError(f"{piece.name}: {end} bytes come, and the tensor has {len(target_B)}")
        data_B = np.array(bucket.data_B[begin : begin + piece.length])  # writable, as torch wants it
        target_B[piece.first : end].copy_(torch.from_numpy(data_B))
        begin += piece.length


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 `[B]`, without a copy.

    Raises:
        RuntimeError: the tensor is not contiguous.
    """
    return tensor.detach().view(-1).view(torch.uint8)


def tensor_hashes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return SHA-256 of the bytes of each tensor, by name."""
    return {name: hashlib.sha256(bytes_of(tensor).cpu().numpy().data).hexdigest() for name, tensor in tensors}
