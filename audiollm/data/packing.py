"""Token streams end to end with no padding, and the weight of every target.

The weights make the objective the same whatever the packing:
`L = w_text * mean over sequences with text targets of (mean over those targets)
   + w_audio * mean over sequences with audio targets of (mean over frames of (mean over codebooks))`.

Shapes: B sequences, S positions of the pack, X and Y rows of some kind, K codebooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiollm.data.delay import IGNORE
from audiollm.data.template import Kind, TokenStream
from audiollm.models.attention import SegmentLayout


@dataclass(frozen=True)
class PackedBatch:
    """Sequences end to end, their rows sorted into text first and audio after.

    The model's feed-forwards then take two slices and nothing is gathered for them; attention, which gathers
    anyway, finds the order of each sequence in `layout`. Targets are already those of the position before (the
    shift is made in `pack`, once): row p holds what the logits at p must predict.
    """

    text_ids_X: Tensor
    """Of the text rows, which come first."""
    codes_YK: Tensor
    """Of the audio rows, in or out."""
    positions_S: Tensor
    row_of_S: Tensor
    """The row of each position, sequence after sequence: `hidden[row_of_S]` is in reading order."""
    layout: SegmentLayout
    text_target_index: Tensor
    """Rows whose logits have a text target."""
    text_targets: Tensor
    text_weights: Tensor
    """Float, one a text target; they sum to 1 over the batch (or are empty)."""
    audio_target_index: Tensor
    """Rows whose logits have at least one audio target."""
    audio_targets_XK: Tensor
    audio_weights_XK: Tensor

    def to(self, device: torch.device) -> PackedBatch:
        moved: dict[str, Any] = {key: value.to(device) for key, value in self.__dict__.items()}
        return PackedBatch(**moved)


def pack(streams: Sequence[TokenStream], multiple: int = 1) -> PackedBatch:
    """Concatenate streams, shift their targets by one inside each, and weigh them.

    Args:
        multiple: fill up with idle rows of no weight, so that the numbers of text rows, audio rows and targets
            are multiples of this. Kernels that are built for a shape (oneDNN's bf16 products on CPU, compiled
            graphs) then meet few shapes in place of a new one at every step.
    """
    streams = [*streams, *_idle_streams(streams, multiple)]
    is_text_S = torch.cat([stream.kinds_S for stream in streams]) == Kind.TEXT
    order_S = torch.cat([is_text_S.nonzero()[:, 0], (~is_text_S).nonzero()[:, 0]])
    row_of_S = order_S.argsort()
    lengths = [len(stream) for stream in streams]
    sequence_S = torch.repeat_interleave(torch.arange(len(streams)), torch.tensor(lengths))
    text_S = torch.cat([_shift(stream.text_targets_S) for stream in streams])
    audio_SK = torch.cat([_shift(stream.audio_targets_SK) for stream in streams])
    text_index = (text_S != IGNORE).nonzero()[:, 0]
    has_audio_SK = audio_SK != IGNORE
    audio_index = has_audio_SK.any(dim=1).nonzero()[:, 0]
    return PackedBatch(
        text_ids_X=torch.cat([stream.text_ids_S for stream in streams])[is_text_S],
        codes_YK=torch.cat([stream.codes_SK for stream in streams])[~is_text_S],
        positions_S=torch.cat([torch.arange(length) for length in lengths])[order_S],
        row_of_S=row_of_S,
        layout=SegmentLayout.of(lengths, order_S),
        text_target_index=_fill(row_of_S[text_index], multiple),
        text_targets=_fill(text_S[text_index], multiple),
        text_weights=_fill(_sequence_weights(sequence_S[text_index]), multiple),
        audio_target_index=_fill(row_of_S[audio_index], multiple),
        audio_targets_XK=_fill(audio_SK[audio_index], multiple),
        audio_weights_XK=_fill(
            _codebook_weights(sequence_S[audio_index], has_audio_SK[audio_index]), multiple
        ),
    )


def _idle_streams(streams: Sequence[TokenStream], multiple: int) -> list[TokenStream]:
    """Rows without targets, in sequences no longer than the longest real one."""
    longest, books = max(len(stream) for stream in streams), streams[0].codes_SK.shape[1]
    kinds_S = torch.cat([stream.kinds_S for stream in streams])
    idle = []
    for kind in (Kind.TEXT, Kind.AUDIO_OUT):
        missing = -int(((kinds_S == Kind.TEXT) == (kind == Kind.TEXT)).sum()) % multiple
        for rows in [longest] * (missing // longest) + [missing % longest] * (missing % longest > 0):
            zeros = torch.zeros(rows, dtype=torch.long)
            none = torch.full((rows, books), IGNORE)
            idle.append(TokenStream(zeros, torch.zeros_like(none), zeros + int(kind), none[:, 0], none))
    return idle


def _fill(rows: Tensor, multiple: int) -> Tensor:
    """Zero rows at the end up to the next multiple: target 0 of row 0, at no weight."""
    missing = -len(rows) % multiple
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _shift(targets: Tensor) -> Tensor:
    """Row p gets the target of row p + 1; the last row has none."""
    return torch.cat([targets[1:], torch.full_like(targets[:1], IGNORE)])


def _sequence_weights(sequence_X: Tensor) -> Tensor:
    """1 / (targets of the sequence * sequences with targets)."""
    if len(sequence_X) == 0:
        return torch.zeros(0)
    counts = torch.bincount(sequence_X)
    return 1.0 / (counts[sequence_X].float() * (counts > 0).sum())


def _codebook_weights(sequence_X: Tensor, present_XK: Tensor) -> Tensor:
    """Each codebook's targets (as many as frames + EOS) weigh the same: mean over them, then over codebooks."""
    weights_XK = torch.zeros(present_XK.shape)
    for k in range(present_XK.shape[1]):
        rows = present_XK[:, k]
        weights_XK[rows, k] = _sequence_weights(sequence_X[rows]) / present_XK.shape[1]
    return weights_XK
