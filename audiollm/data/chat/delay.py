"""The delay pattern: codebook k is k frames late, so one position holds codes that depend on one another.

Layout of Higgs Audio V2: `[BOS, codes, EOS]`, then codebook k moved k frames to the right, filled with BOS on
its left and EOS on its right; T code frames become T + 2 + (K - 1) rows.

Shapes: K codebooks, T code frames, F = T + K + 1 delayed frames.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100


def delayed_length(frames: int, num_codebooks: int) -> int:
    """Return the number of rows of `frames` code frames: `[BOS, codes, EOS]` and K - 1 rows of delay."""
    return frames + 2 + num_codebooks - 1


def delay(codes_KT: Tensor, bos: int, eos: int) -> Tensor:
    """Codes to model input, int64 `[F, K]`: the first row is all BOS, the last all EOS."""
    num_codebooks, frames = codes_KT.shape
    framed_KT = torch.nn.functional.pad(
        torch.nn.functional.pad(codes_KT, (1, 0), value=bos), (0, 1), value=eos
    )
    index_FK = _source_index(frames, num_codebooks).clamp(0, frames + 1)
    return framed_KT.T.gather(0, index_FK)


def delay_targets(codes_KT: Tensor, eos: int) -> Tensor:
    """Return the target of each row of `delay`, `[F, K]`: every code, one EOS per codebook, else IGNORE."""
    num_codebooks, frames = codes_KT.shape
    index_FK = _source_index(frames, num_codebooks)
    delayed_FK = delay(codes_KT, IGNORE, eos)
    return delayed_FK.masked_fill((index_FK < 1) | (index_FK > frames + 1), IGNORE)


def _source_index(frames: int, num_codebooks: int) -> Tensor:
    """Row j of codebook k shows position j - k of `[BOS, codes, EOS]`; may lie outside of it."""
    rows = torch.arange(delayed_length(frames, num_codebooks))
    return rows[:, None] - torch.arange(num_codebooks)[None, :]
