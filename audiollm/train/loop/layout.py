"""The layout of a checkpoint's tensors over its files: written into each file's header, read to join the pieces.

A file that has pieces says so in the metadata of its safetensors header, under the key `pieces`: a JSON object
`{name: {"shape": [...], "start": n}}`. The values of such a tensor are one-dimensional: the elements from `start` on
of the flattened tensor of that shape. A file without this key holds whole tensors alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.train.parallel.pieces import Piece

PIECES = "pieces"
"""Key of the layout in the metadata of a safetensors header."""


class IncompleteTensor(Exception):
    """The pieces in the files of a checkpoint do not make up a tensor."""


@dataclass(frozen=True)
class _StoredPiece:
    """Elements `start` to `stop` of a flattened tensor of that shape, in an open safetensors file."""

    path: Path
    file: Any
    shape: tuple[int, ...]
    start: int
    stop: int


def layout_metadata(pieces: Mapping[str, Piece]) -> dict[str, str] | None:
    """The header metadata that describes the pieces of a file; None where it has none."""
    if not pieces:
        return None
    layout = {name: {"shape": list(piece.shape), "start": piece.start} for name, piece in pieces.items()}
    return {PIECES: json.dumps(layout)}


def tensor_readers(files: Mapping[Path, Any]) -> dict[str, Callable[[], Tensor]]:
    """Name -> reads the whole tensor, joined from its pieces where it is stored in pieces.

    Args:
        files: the open safetensors files of one part of a checkpoint, by their paths.

    Raises:
        IncompleteTensor: a tensor's pieces leave a gap, overlap, or belong to tensors of different shapes. Only
            headers are read to see this.
    """
    readers: dict[str, Callable[[], Tensor]] = {}
    stored: dict[str, list[_StoredPiece]] = {}
    for path, file in files.items():
        layout = json.loads((file.metadata() or {}).get(PIECES, "{}"))
        for name in file.keys():  # noqa: SIM118  a method, not a mapping
            if name not in layout:
                readers[name] = partial(file.get_tensor, name)
                continue
            shape, start = tuple(layout[name]["shape"]), layout[name]["start"]
            stop = start + file.get_slice(name).get_shape()[0]
            stored.setdefault(name, []).append(_StoredPiece(path, file, shape, start, stop))
    for name, pieces in stored.items():
        pieces.sort(key=lambda piece: (piece.start, piece.stop))
        _check_complete(name, pieces)
        readers[name] = partial(_join_stored_pieces, name, pieces)
    return readers


def _check_complete(name: str, pieces: Sequence[_StoredPiece]) -> None:
    """Raises: IncompleteTensor: the pieces, in the order of their starts, are not one tensor end to end."""
    first, position = pieces[0], 0
    total = math.prod(first.shape)
    for piece in pieces:
        if piece.shape != first.shape:
            shapes = f"shape {list(piece.shape)}, and {first.path.name} has a piece of {list(first.shape)}"
            raise IncompleteTensor(f"{piece.path} is damaged: {name} has {shapes}")
        if piece.start == piece.stop:
            continue
        if piece.start > position:
            break
        if piece.start < position:
            twice = (
                f"elements {piece.start} to {min(piece.stop, position) - 1} of {name} are in another file too"
            )
            raise IncompleteTensor(f"{piece.path} is damaged: {twice}")
        position = piece.stop
    if position == total:
        return
    if position > total:
        raise IncompleteTensor(f"{pieces[-1].path} is damaged: {name} has more than its {total} elements")
    stop = next((piece.start for piece in pieces if piece.start > position), total)
    lacking = f"elements {position} to {stop - 1} of the {total} of {name}"
    raise IncompleteTensor(f"{first.path} and the files beside it are incomplete: they lack {lacking}")


def _join_stored_pieces(name: str, pieces: Sequence[_StoredPiece]) -> Tensor:
    """The whole tensor; besides it, one piece at a time is in memory."""
    shape = pieces[0].shape
    joined = torch.empty(0)
    for piece in pieces:
        values = piece.file.get_tensor(name)
        if not len(joined):
            joined = torch.empty(math.prod(shape), dtype=values.dtype)
        joined[piece.start : piece.stop] = values
    return joined.reshape(shape)
