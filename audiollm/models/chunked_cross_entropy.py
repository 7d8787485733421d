"""Cross entropy of text and of audio codes from hidden states, in chunks: the logits never exist whole.

Shapes: S packed rows, C hidden size, X rows with a target, K codebooks (1 for text), V codes or words,
R rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from audiollm.models.kernels import matmul_dtype
from audiollm.products import input_gradient, multiply, weight_gradient

CHUNK_LOGITS = 2**22
"""Logits of a chunk, where no size is given: 16 MB in float32 ..."""
CHUNK_ROWS = 256
"""... and yet at least as many rows, so that the weight is not read over and over for few of them."""


HeadWeight = Tensor | Sequence[Tensor]
"""The weight of a head, `[V, C]`: whole, or blocks of its columns side by side, some of which may be frozen."""


class CrossEntropy(NamedTuple):
    """Weighted sums of cross entropies, in nats."""

    total: Tensor
    """Scalar, with a gradient."""
    by_codebook_K: Tensor
    """Each codebook's part of the total, without a gradient."""


def linear_cross_entropy(
    hidden_XC: Tensor,
    weight_VC: HeadWeight,
    targets_XK: Tensor,
    weights_XK: Tensor,
    chunk: int | None = None,
) -> CrossEntropy:
    """Weighted sum of `-log softmax(weight @ hidden)[target]`, computed chunk by chunk with its gradient.

    A chunk's logits become their own gradient in place and are gone before the next chunk's, so memory grows
    with `chunk x K x V` and not with `X x K x V` (the idea of Cut Cross-Entropy, arXiv 2411.09009, and of Liger's
    fused linear cross entropy). Products are taken in autocast's dtype where it is on; softmax, and the sum of
    the weight's gradient over chunks, in float32 (float64 stays float64).

    Args:
        weight_VC: `[K x V, C]`, codebook after codebook; of blocks, those that are frozen have no gradient computed.
        targets_XK: int64 `[X, K]`, or `[X]` for one; a negative target counts for nothing.
        weights_XK: as `targets_XK`; constants, no gradient reaches them.
        chunk: rows at a time; by default as many as make `CHUNK_LOGITS` logits, and at least `CHUNK_ROWS`.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if targets_XK.ndim == 1:
        targets_XK, weights_XK = targets_XK[:, None], weights_XK[:, None]
    rows, books = targets_XK.shape
    blocks = column_blocks(weight_VC)
    if targets_XK.shape != weights_XK.shape or len(hidden_XC) != rows or len(blocks[0]) % books:
        shapes = [list(tensor.shape) for tensor in (hidden_XC, *blocks, targets_XK, weights_XK)]
        raise ValueError(f"linear_cross_entropy: hidden, weight, targets, weights of shapes {shapes}")
    chunk = chunk or max(CHUNK_ROWS, CHUNK_LOGITS // len(blocks[0]))
    needs_grad = torch.is_grad_enabled()
    needs = tuple(needs_grad and tensor.requires_grad for tensor in (hidden_XC, *blocks))
    return CrossEntropy(*_ChunkedCrossEntropy.apply(hidden_XC, targets_XK, weights_XK, chunk, needs, *blocks))


def column_blocks(weight_VC: HeadWeight) -> tuple[Tensor, ...]:
    """Return the blocks of a head's weight."""
    return (weight_VC,) if isinstance(weight_VC, Tensor) else tuple(weight_VC)


def joined_weight(blocks: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weight `[V, C]` of blocks in this type; of one block in this type the block itself."""
    if len(blocks) == 1:
        return blocks[0].to(dtype)
    return torch.cat([block.detach().to(dtype) for block in blocks], dim=1)


def zero_gradients(
    blocks: Sequence[Tensor], needs: Sequence[bool], dtype: torch.dtype
) -> list[Tensor | None]:
    """Return where the gradient of each block that needs one is summed."""
    return [
        torch.zeros_like(block, dtype=dtype) if needed else None
        for block, needed in zip(blocks, needs, strict=True)
    ]


def add_block_gradients(
    totals: Sequence[Tensor | None], blocks: Sequence[Tensor], grad_RV: Tensor, rows_RC: Tensor
) -> None:
    """Add the gradient of each block that needs one: of its own columns alone."""
    widths = [block.shape[1] for block in blocks]
    for total, rows in zip(totals, rows_RC.split(widths, dim=1), strict=True):
        if total is not None:
            add_weight_gradient(total, grad_RV, rows)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradient is made in the forward pass and scaled in the backward pass.

    It is made with weights of at most 1 and for an upstream gradient of 1: those of thousands of targets, which
    add up to 1, would be lost in float16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_XC: Tensor,
        targets_XK: Tensor,
        weights_XK: Tensor,
        chunk: int,
        needs: tuple[bool, ...],
        *blocks: Tensor,
    ) -> tuple[Tensor, Tensor]:
        dtype = matmul_dtype(hidden_XC)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        grad_hidden_XC = torch.empty_like(hidden_XC) if needs[0] else None
        totals = zero_gradients(blocks, needs[1:], exact)
        weights_XK, largest = _normalize_weights(torch.where(targets_XK >= 0, weights_XK, 0.0).to(exact))
        sums_K = torch.zeros(targets_XK.shape[1], dtype=torch.float64, device=hidden_XC.device)
        with torch.autocast(hidden_XC.device.type, enabled=False):
            cast_VC = joined_weight(blocks, dtype)
            for start in range(0, len(hidden_XC), chunk):
                rows = slice(start, start + chunk)
                hidden_RC = hidden_XC[rows].to(dtype)
                logits_RV = multiply(hidden_RC, cast_VC).to(exact)
                sums_K += _chunk_sums(logits_RV, targets_XK[rows], weights_XK[rows], any(needs))
                grad_logits_RV = logits_RV.to(dtype)
                if grad_hidden_XC is not None:
                    grad_hidden_XC[rows] = input_gradient(grad_logits_RV, cast_VC)
                add_block_gradients(totals, blocks, grad_logits_RV, hidden_RC)
        ctx.save_for_backward(grad_hidden_XC, *totals, largest)
        ctx.dtypes = [hidden_XC.dtype, *(block.dtype for block in blocks)]
        sums_K *= largest
        by_codebook_K = sums_K.to(exact)
        ctx.mark_non_differentiable(by_codebook_K)
        return sums_K.sum().to(exact), by_codebook_K

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, largest = ctx.saved_tensors
        scale = upstream[0] * largest
        grad_hidden, *grad_blocks = (
            None if gradient is None else (gradient.to(scale.dtype) * scale).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return grad_hidden, None, None, None, None, *grad_blocks


def _normalize_weights(weights_XK: Tensor) -> tuple[Tensor, Tensor]:
    """The weights over the largest of them, and that one (1 where there is none)."""
    if not weights_XK.numel():
        return weights_XK, weights_XK.new_ones(())
    largest = weights_XK.abs().max()
    largest = torch.where(largest > 0, largest, 1.0)
    return weights_XK / largest, largest


def _chunk_sums(logits_RV: Tensor, targets_RK: Tensor, weights_RK: Tensor, gradient: bool) -> Tensor:
    """Weighted sums of the chunk `[K]`. Overwrites the logits: with `gradient`, by the gradient of their total."""
    logits_RKV = logits_RV.unflatten(1, (targets_RK.shape[1], -1))
    index_RK1 = targets_RK.clamp_min(0)[:, :, None]
    weights_RK1 = weights_RK[:, :, None]
    target_RK1, largest_RK1 = logits_RKV.gather(2, index_RK1), logits_RKV.amax(dim=2, keepdim=True)
    sum_RK1 = logits_RKV.sub_(largest_RK1).exp_().sum(dim=2, keepdim=True)
    loss_RK1 = sum_RK1.log() + largest_RK1 - target_RK1
    if gradient:
        logits_RKV.mul_(weights_RK1 / sum_RK1).scatter_add_(2, index_RK1, -weights_RK1)
    return (loss_RK1.double() * weights_RK1).sum(dim=(0, 2))


def add_weight_gradient(total_VC: Tensor, grad_RV: Tensor, rows_RC: Tensor) -> None:
    """`total += grad.T @ rows`, summed in the dtype of the total."""
    if grad_RV.dtype == torch.float16:  # a sum over rows may leave its range, whatever the loss scale
        grad_RV, rows_RC = grad_RV.to(total_VC.dtype), rows_RC.to(total_VC.dtype)
    weight_gradient(grad_RV, rows_RC, total_OI=total_VC)
