"""Where the weights of a model that is not begun from another one come from."""

from __future__ import annotations

import torch
from torch import Tensor

from audiollm.models.dual_ffn import DualFFN


@torch.no_grad()
def start_from_codebooks(model: DualFFN, vectors_KVD: Tensor) -> None:
    """Begin the audio embeddings and heads as random projections of the codec's code vectors.

    Codes that sound alike then begin alike, which shortens training; BOS and EOS keep their own random rows.
    """
    config = model.config
    books, size, dim = vectors_KVD.shape
    scale_K = vectors_KVD.flatten(1).std(dim=1).clamp_min(1e-6)
    embed = model.model.embed_audio_tokens.embed_audio_tokens.weight
    for table in (embed, model.audio_lm_head.weight):
        rows_KVC = table.unflatten(0, (books, config.codebook_size))
        for level in range(books):
            projection = torch.randn(dim, config.hidden_size) * 0.02 / dim**0.5
            rows_KVC[level, :size] += vectors_KVD[level] / scale_K[level] @ projection
