"""The loss of the semantic half: how far the latents carry the teacher's features."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tokenizer.quantizers.codebooks import at_least_float32


def semantic_loss(predicted_BTH: Tensor, features_BTH: Tensor) -> Tensor:
    """Mean squared error on standardised features (as in X-Codec and Higgs), plus one minus their cosine."""
    predicted = at_least_float32(predicted_BTH)
    cosine = functional.cosine_similarity(predicted, features_BTH, dim=2, eps=1e-4).mean()
    return functional.mse_loss(predicted, features_BTH) + (1 - cosine)
