"""Input checks that all codecs share, so that all refuse with the same errors.

Shapes: C channels, N samples, K codebooks, T frames.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_mono_samples(samples_CN: Tensor) -> None:
    """Pass a finite mono waveform `[1, N]`, N >= 1.

    Raises:
        ValueError: not mono, empty, or not finite.
    """
    if samples_CN.ndim != 2 or samples_CN.shape[0] != 1 or samples_CN.shape[1] == 0:
        raise ValueError(f"encode takes a mono waveform [1, samples >= 1], not {list(samples_CN.shape)}")
    if not bool(torch.isfinite(samples_CN).all()):
        raise ValueError("encode got samples that are not finite")


def check_codes(codes_KT: Tensor, num_codebooks: int, codebook_size: int) -> None:
    """Pass codes `[K', T]` of the first K' codebooks, 1 <= K' <= `num_codebooks`, T >= 1.

    Raises:
        ValueError: no frame, more codebooks than there are, or codes out of range.
    """
    books = codes_KT.shape[0] if codes_KT.ndim == 2 else 0
    if not 1 <= books <= num_codebooks or codes_KT.shape[1] == 0:
        raise ValueError(f"decode takes codes [1..{num_codebooks}, frames >= 1], not {list(codes_KT.shape)}")
    if int(codes_KT.min()) < 0 or int(codes_KT.max()) >= codebook_size:
        raise ValueError(f"codes must be 0..{codebook_size - 1}")
