"""Token streams end to end with no padding, and the weight of every target.

The weights make the objective the same whatever the packing:
`L = w_text * mean over sequences with text targets of (mean over those targets)
   + w_audio * mean over sequences with audio targets of (mean over frames of (mean over codebooks))`.

Shapes: B sequences, S positions of the pack, K codebooks.
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
    """Sequences end to end; `layout` knows where each begins.

    Targets here are already those of the position before (the shift is made in `pack`, once): row p holds
    what the logits at p must predict.
    """

    text_ids_S: Tensor
    codes_SK: Tensor
    positions_S: Tensor
    text_index: Tensor
    """Rows that are text."""
    audio_index: Tensor
    """Rows that are audio, in or out."""
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


def pack(streams: Sequence[TokenStream]) -> PackedBatch:
    """Concatenate streams, shift their targets by one inside each, and weigh them."""
    kinds_S = torch.cat([stream.kinds_S for stream in streams])
    lengths = [len(stream) for stream in streams]
    sequence_S = torch.repeat_interleave(torch.arange(len(streams)), torch.tensor(lengths))
    text_S = torch.cat([_shift(stream.text_targets_S) for stream in streams])
    audio_SK = torch.cat([_shift(stream.audio_targets_SK) for stream in streams])
    text_index = (text_S != IGNORE).nonzero()[:, 0]
    has_audio_SK = audio_SK != IGNORE
    audio_index = has_audio_SK.any(dim=1).nonzero()[:, 0]
    return PackedBatch(
        text_ids_S=torch.cat([stream.text_ids_S for stream in streams]),
        codes_SK=torch.cat([stream.codes_SK for stream in streams]),
        positions_S=torch.cat([torch.arange(length) for length in lengths]),
        text_index=(kinds_S == Kind.TEXT).nonzero()[:, 0],
        audio_index=(kinds_S != Kind.TEXT).nonzero()[:, 0],
        layout=SegmentLayout.of(lengths),
        text_target_index=text_index,
        text_targets=text_S[text_index],
        text_weights=_sequence_weights(sequence_S[text_index]),
        audio_target_index=audio_index,
        audio_targets_XK=audio_SK[audio_index],
        audio_weights_XK=_codebook_weights(sequence_S[audio_index], has_audio_SK[audio_index]),
    )


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
