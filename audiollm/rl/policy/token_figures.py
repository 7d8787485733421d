"""Log-probabilities and further figures per token from rows of logits, a few rows at a time.

Shapes: T target tokens, V entries of the vocabulary, R rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**24
"""Logits per chunk: 64 MB in float32, whatever the vocabulary."""


@dataclass(frozen=True)
class TokenRequest:
    """Figures per token that a step needs beside the policy's log-probability."""

    reference: bool = True
    """Whether the reference's log-probabilities are computed."""
    temperature: float = 1.0
    """Logits of policy and reference are divided by it."""
    kl: bool = False
    """KL(reference || policy) at each token (token-level DPO); computes the reference, too."""
    collision: bool = False
    """log of the summed squared probabilities (WPO)."""
    contrast_k: int = 0
    """Draw a contrast token among the policy's `contrast_k` likeliest other than the answer's (CRINGE); 0: none."""
    entropy: bool = False
    """Entropy of the policy's distribution at each token, in nats."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")
        if self.contrast_k < 0:
            raise ValueError(f"contrast_k must be 0 or more, not {self.contrast_k}")


class TokenFigures(NamedTuple):
    """Figures of each target token, in the logits' precision and at least float32; None where not asked for."""

    logprob_T: Tensor
    kl_T: Tensor | None = None
    log_collision_T: Tensor | None = None
    contrast_T: Tensor | None = None
    entropy_T: Tensor | None = None


def token_figures(
    logits_TV: Tensor,
    target_T: Tensor,
    request: TokenRequest,
    reference_TV: Tensor | None = None,
    draw_T: Tensor | None = None,
) -> TokenFigures:
    """Compute the figures that `request` asks for, with gradient to `logits_TV`.

    Intermediate rows of `[R, V]` are computed again in the backward pass and never held for all tokens.

    Args:
        target_T: int64 token ids.
        reference_TV: logits of the reference, for `kl`.
        draw_T: uniform numbers in [0, 1), for `contrast_k`.

    Raises:
        ValueError: `kl` without `reference_TV`, or `contrast_k` without `draw_T`.
    """
    if request.kl and reference_TV is None:
        raise ValueError("kl needs the reference's logits")
    if request.contrast_k and draw_T is None:
        raise ValueError("contrast_k needs draw_T")
    rows = max(1, CHUNK_ELEMENTS // logits_TV.shape[1])
    chunks = []
    for start in range(0, max(1, len(logits_TV)), rows):
        part = slice(start, start + rows)
        arguments = (
            logits_TV[part],
            target_T[part],
            request,
            None if reference_TV is None else reference_TV[part],
            None if draw_T is None else draw_T[part],
        )
        if torch.is_grad_enabled() and logits_TV.requires_grad:
            chunks.append(checkpoint(_chunk_figures, *arguments, use_reentrant=False))
        else:
            chunks.append(_chunk_figures(*arguments))
    logprob, *others = ([part for part in parts if part is not None] for parts in zip(*chunks, strict=True))
    return TokenFigures(torch.cat(logprob), *(torch.cat(parts) if parts else None for parts in others))


def _chunk_figures(
    logits_RV: Tensor,
    target_R: Tensor,
    request: TokenRequest,
    reference_RV: Tensor | None,
    draw_R: Tensor | None,
) -> TokenFigures:
    log_probs_RV = _log_softmax(logits_RV, request.temperature)
    kl_R = collision_R = contrast_R = entropy_R = None
    if request.kl and reference_RV is not None:
        other_RV = _log_softmax(reference_RV, request.temperature)
        kl_R = _expected(other_RV, other_RV - log_probs_RV)
    if request.collision:
        collision_R = torch.logsumexp(2 * log_probs_RV, dim=1)
    if request.contrast_k and draw_R is not None:
        contrast_R = _contrast(log_probs_RV, target_R, request.contrast_k, draw_R)
    if request.entropy:
        entropy_R = -_expected(log_probs_RV, log_probs_RV)
    return TokenFigures(
        log_probs_RV.gather(1, target_R[:, None])[:, 0], kl_R, collision_R, contrast_R, entropy_R
    )


def _log_softmax(logits_RV: Tensor, temperature: float) -> Tensor:
    precise_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    return torch.log_softmax(precise_RV / temperature, dim=1)


def _expected(log_probs_RV: Tensor, values_RV: Tensor) -> Tensor:
    """Return the mean of the values under the distribution; impossible tokens (-inf) count as 0."""
    possible_RV = log_probs_RV > -torch.inf
    return (log_probs_RV.exp() * values_RV.where(possible_RV, torch.zeros_like(values_RV))).sum(1)


def _contrast(log_probs_RV: Tensor, target_R: Tensor, k: int, draw_R: Tensor) -> Tensor:
    """Draw a token among the k likeliest other than the target, by their probabilities; returns its log-probability."""
    others_RV = log_probs_RV.detach().scatter(1, target_R[:, None], -torch.inf)
    top_Rk, token_Rk = others_RV.topk(min(k, others_RV.shape[1] - 1), dim=1)
    cumulative_Rk = top_Rk.softmax(1).cumsum(1)
    place_R1 = (draw_R[:, None].to(cumulative_Rk) >= cumulative_Rk).sum(1, keepdim=True)
    token_R1 = token_Rk.gather(1, place_R1.clamp(max=token_Rk.shape[1] - 1))
    return log_probs_RV.gather(1, token_R1)[:, 0]
