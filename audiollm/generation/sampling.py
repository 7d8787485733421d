"""From logits to codes: classifier-free guidance, temperature, top-k, top-p, and draws that are each prompt's own.

Shapes: B prompts, K codebooks, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingConfig:
    """How codes are drawn. Guidance of 1 is none."""

    temperature: float = 0.7
    """0 takes the most likely code."""
    top_k: int = 0
    """Keep the k most likely codes; 0 keeps all."""
    top_p: float = 0.9
    """Keep the smallest set of codes whose probability reaches this."""
    text_guidance: float = 3.0
    speaker_guidance: float = 2.0


def guide(full: Tensor, no_text: Tensor | None, no_speaker: Tensor | None, config: SamplingConfig) -> Tensor:
    """Classifier-free guidance in log-probabilities, one term a condition (arXiv 2207.12598; 2211.09800 eq. 3).

    `full + (w_text - 1) (full - no_text) + (w_speaker - 1) (full - no_speaker)`.
    """
    full = full.log_softmax(dim=-1)
    guided = full
    if no_text is not None:
        guided = guided + (config.text_guidance - 1) * (full - no_text.log_softmax(dim=-1))
    if no_speaker is not None:
        guided = guided + (config.speaker_guidance - 1) * (full - no_speaker.log_softmax(dim=-1))
    return guided


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set what top-k and top-p leave out to -inf; the most likely code always stays."""
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        shares = ordered.softmax(dim=-1)
        beyond = shares.cumsum(dim=-1) - shares >= top_p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits


def draw(logits_BKV: Tensor, config: SamplingConfig, generators: list[torch.Generator]) -> Tensor:
    """One code a codebook, `[B, K]`. Row b depends on its own generator alone, whatever the batch."""
    if config.temperature == 0:
        return logits_BKV.argmax(dim=-1)
    logits_BKV = truncate(logits_BKV.float() / config.temperature, config.top_k, config.top_p)
    uniform = torch.stack([torch.rand(logits_BKV.shape[1:], generator=g) for g in generators])
    gumbel_BKV = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))  # the Gumbel-max trick
    return (logits_BKV + gumbel_BKV.to(logits_BKV.device)).argmax(dim=-1)
