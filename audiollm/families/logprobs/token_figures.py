"""Log-probabilities and further figures per token, a few rows at a time.

`linear_token_figures` takes the hidden states and the weight of a head, whose logits never exist whole; `token_figures`
takes rows of logits, for models whose head is not a plain product. Both compute every chunk again in the backward pass.

Shapes: X rows (positions with a target), K targets of a row (codebooks; 1 for text), V entries of the vocabulary of
each, C hidden size, T targets of text, R rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from audiollm.models.chunked_cross_entropy import (
    HeadWeight,
    add_block_gradients,
    column_blocks,
    joined_weight,
    zero_gradients,
)
from audiollm.models.kernels import matmul_dtype
from audiollm.products import input_gradient, multiply

CHUNK_ELEMENTS = 2**22
"""Logits per chunk on a CPU: 16 MB in float32 ..."""
CHUNK_ELEMENTS_GPU = 2**26
"""... and on a GPU, which needs large products ..."""
MIN_CHUNK_ROWS = 64
"""... and at least as many rows, so that the head's weight is not read over and over for few of them."""
LEAST_LOGPROB = -1e4
"""Stands for -inf where a log-probability is multiplied with its probability, which is 0 there."""


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
    value: bool = False
    """The value of a critic before each token is chosen, where the root has one (`ActorCritic`)."""
    prompts: bool = False
    """Log-probabilities of the text of the prompts, summed (ORPO over prompts)."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")
        if self.contrast_k < 0:
            raise ValueError(f"contrast_k must be 0 or more, not {self.contrast_k}")


class TokenFigures(NamedTuple):
    """Figures of each target token, in the logits' precision and at least float32; None where not asked for.

    `[T]` from `token_figures`, `[X, K]` from `linear_token_figures`.
    """

    logprob_T: Tensor
    kl_T: Tensor | None = None
    log_collision_T: Tensor | None = None
    contrast_T: Tensor | None = None
    entropy_T: Tensor | None = None
    value_T: Tensor | None = None
    """Of a critic beside the policy; `token_figures` and `linear_token_figures` compute none."""


class HeadRows(NamedTuple):
    """Input and weight of an output head: logits that are not computed yet."""

    hidden_XC: Tensor
    weight_VC: Tensor
    """`[K x V, C]`, codebook after codebook."""


class ForbiddenTargets(NamedTuple):
    """Entries that sampling left out: they have no probability, under policy and reference alike."""

    mask_MKV: Tensor
    """bool: several masks of what is forbidden."""
    mask_X: Tensor
    """int64: the mask of each row."""

    def to(self, device: torch.device) -> ForbiddenTargets:
        """Return the masks on a device."""
        return ForbiddenTargets(self.mask_MKV.to(device), self.mask_X.to(device))

    def leave_out(self, logits_RKV: Tensor, rows: slice) -> None:
        """Set the logits of forbidden entries of some rows to -inf, in place."""
        logits_RKV.masked_fill_(self.mask_MKV.index_select(0, self.mask_X[rows]), -torch.inf)


def keep_head_rows(hidden_XC: Tensor, weight_VC: HeadWeight) -> HeadRows:
    """Keep a head's input and weight beyond the pass; on several ranks a copy, for strategies free what they gather."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    blocks = column_blocks(weight_VC)
    weight = joined_weight(blocks, blocks[-1].dtype).detach()
    return HeadRows(hidden_XC.detach(), weight.clone() if several else weight)


def token_figures(
    logits_TV: Tensor,
    target_T: Tensor,
    request: TokenRequest,
    reference_TV: Tensor | None = None,
    draw_T: Tensor | None = None,
    forbidden: ForbiddenTargets | None = None,
) -> TokenFigures:
    """Compute the figures that `request` asks for, with gradient to `logits_TV`.

    Args:
        target_T: int64 token ids.
        reference_TV: logits of the reference, for `kl`; no gradient reaches them.
        draw_T: uniform numbers in [0, 1), for `contrast_k`.
        forbidden: entries of the logits without probability; none of them may be a target.

    Raises:
        ValueError: `kl` without `reference_TV`, or `contrast_k` without `draw_T`.
    """
    _check_request(request, reference_TV is not None, draw_T is not None)
    rows = max(1, CHUNK_ELEMENTS // logits_TV.shape[1])
    draw_T1 = None if draw_T is None else draw_T[:, None]
    figures = _ChunkedFigures.apply(
        logits_TV, reference_TV, None, target_T[:, None], draw_T1, request, rows, forbidden
    )
    return TokenFigures(*(None if value is None else value[:, 0] for value in figures))  # type: ignore[arg-type]


def linear_token_figures(
    hidden_XC: Tensor,
    weight_VC: HeadWeight,
    targets_XK: Tensor,
    request: TokenRequest,
    reference: HeadRows | None = None,
    draw_XK: Tensor | None = None,
    chunk: int | None = None,
    forbidden: ForbiddenTargets | None = None,
) -> TokenFigures:
    """Compute figures `[X, K]` of the logits `hidden @ weight`, with gradients to hidden states and weight.

    Every target has a gradient of its own, so sums per answer may go into any objective. Memory grows with
    `chunk x K x V` and not with `X x K x V`. Products are taken in autocast's dtype where it is on; softmax, and the
    sum of the weight's gradient over chunks, in float32 (float64 stays float64). The backward pass reads the weight
    again: call it through the head's module (`through_head`), so that strategies that shard weights gather it.

    Args:
        weight_VC: `[K x V, C]`, codebook after codebook; of blocks, those that are frozen have no gradient computed.
        targets_XK: int64; the figures of a negative target are 0, without gradient.
        reference: of a second model, for `kl`; no gradient reaches it.
        draw_XK: uniform numbers in [0, 1), for `contrast_k`.
        chunk: rows at a time; None: by `CHUNK_ELEMENTS` and `MIN_CHUNK_ROWS`.
        forbidden: entries of the logits without probability; none of them may be a target.

    Raises:
        ValueError: shapes that do not belong together, `kl` without `reference`, or `contrast_k` without `draw_XK`.
    """
    _check_request(request, reference is not None, draw_XK is not None)
    rows, books = targets_XK.shape
    blocks = column_blocks(weight_VC)
    columns, entries = sum(block.shape[1] for block in blocks), len(blocks[0])
    if len(hidden_XC) != rows or entries % books or hidden_XC.shape[1] != columns:
        shapes = [list(tensor.shape) for tensor in (hidden_XC, *blocks, targets_XK)]
        raise ValueError(f"linear_token_figures: hidden, weight, targets of shapes {shapes}")
    if reference is not None and (len(reference.hidden_XC), len(reference.weight_VC)) != (
        rows,
        entries,
    ):
        raise ValueError(
            f"linear_token_figures: {len(reference.hidden_XC)} rows and {len(reference.weight_VC)} logits of the "
            f"reference, {rows} and {entries} of the policy"
        )
    elements = CHUNK_ELEMENTS_GPU if hidden_XC.is_cuda else CHUNK_ELEMENTS
    chunk = chunk or max(MIN_CHUNK_ROWS, elements // entries)
    reference_rows = (None, None) if reference is None or not request.kl else reference
    figures = _ChunkedFigures.apply(
        hidden_XC, *reference_rows, targets_XK.clamp_min(0), draw_XK, request, chunk, forbidden, *blocks
    )
    return TokenFigures(
        *(None if value is None else torch.where(targets_XK >= 0, value, 0.0) for value in figures)  # type: ignore[arg-type]
    )


class _ChunkedFigures(torch.autograd.Function):
    """Values in the forward pass; the backward pass makes a chunk's logits again, and of them their own gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        other_rows: Tensor | None,
        other_weight_VC: Tensor | None,
        targets_XK: Tensor,
        draw_XK: Tensor | None,
        request: TokenRequest,
        chunk: int,
        forbidden: ForbiddenTargets | None,
        *blocks: Tensor,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.request, ctx.chunk = matmul_dtype(rows), request, chunk
        ctx.forbidden = forbidden
        books = targets_XK.shape[1]
        logits = _Logits(rows, blocks, books, request, ctx.dtype, chunk, forbidden)
        reference_logits = None
        if other_rows is not None:
            other_blocks = () if other_weight_VC is None else (other_weight_VC,)
            reference_logits = _Logits(other_rows, other_blocks, books, request, ctx.dtype, chunk, forbidden)
        scratch = None  # figures of whole distributions need logits and exponentials side by side
        if reference_logits is not None or request.collision or request.contrast_k or request.entropy:
            scratch = logits.scratch()
        chunks = []
        with torch.autocast(rows.device.type, enabled=False):
            for chunk_rows in _slice_rows(len(rows), chunk):
                draw_RK = None if draw_XK is None else draw_XK[chunk_rows]
                other_RKV = None if reference_logits is None else reference_logits.chunk(chunk_rows)
                chunks.append(
                    _chunk_values(
                        logits.chunk(chunk_rows), targets_XK[chunk_rows], request, scratch, other_RKV, draw_RK
                    )
                )
        values = _ChunkValues(
            *(None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True))  # type: ignore[arg-type]
        )
        ctx.num_blocks = len(blocks)
        ctx.save_for_backward(*blocks, rows, other_rows, other_weight_VC, targets_XK, *values)
        return (values.logprob, values.kl, values.collision, values.contrast, values.entropy)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        blocks = ctx.saved_tensors[: ctx.num_blocks]
        rows, other_rows, other_weight_VC, targets_XK, *saved = ctx.saved_tensors[ctx.num_blocks :]
        values, books = _ChunkValues(*saved), targets_XK.shape[1]
        logits = _Logits(rows, blocks, books, ctx.request, ctx.dtype, ctx.chunk, ctx.forbidden)
        reference_logits = None
        if other_rows is not None and upstream[1] is not None:
            other_blocks = () if other_weight_VC is None else (other_weight_VC,)
            reference_logits = _Logits(
                other_rows, other_blocks, books, ctx.request, ctx.dtype, ctx.chunk, ctx.forbidden
            )
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        totals = zero_gradients(blocks, ctx.needs_input_grad[8:], logits.exact)
        with torch.autocast(rows.device.type, enabled=False):
            for chunk_rows in _slice_rows(len(rows), ctx.chunk):
                gradient_RV = _chunk_gradient(
                    logits.chunk(chunk_rows),
                    targets_XK[chunk_rows],
                    values.rows(chunk_rows),
                    [
                        None if gradient is None else gradient[chunk_rows].to(logits.exact)
                        for gradient in upstream
                    ],
                    None if reference_logits is None else reference_logits.chunk(chunk_rows),
                ).flatten(1)
                if ctx.request.temperature != 1:
                    gradient_RV.div_(ctx.request.temperature)
                if logits.weight_VC is None:
                    if grad_rows is not None:
                        grad_rows[chunk_rows] = gradient_RV
                    continue
                gradient_RV = gradient_RV.to(ctx.dtype)
                if grad_rows is not None:
                    grad_rows[chunk_rows] = input_gradient(gradient_RV, logits.weight_VC)
                add_block_gradients(totals, blocks, gradient_RV, rows[chunk_rows].to(ctx.dtype))
        grad_blocks = [
            None if total is None else total.to(block.dtype)
            for total, block in zip(totals, blocks, strict=True)
        ]
        return grad_rows, *(None,) * 7, *grad_blocks


class _ChunkValues(NamedTuple):
    """Figures `[X, K]`, and what the backward pass needs beside them."""

    contrast_token: Tensor | None
    logprob: Tensor
    kl: Tensor | None
    collision: Tensor | None
    contrast: Tensor | None
    entropy: Tensor | None

    def rows(self, rows: slice) -> _ChunkValues:
        return _ChunkValues(*(None if value is None else value[rows] for value in self))  # type: ignore[arg-type]


class _Logits:
    """The logits of a model over the temperature, a chunk at a time, in one buffer.

    Fresh memory for every chunk would stay with the allocator: 400 MB in place of 90 MB at 32,768 words.
    """

    def __init__(
        self,
        rows: Tensor,
        blocks: Sequence[Tensor],
        books: int,
        request: TokenRequest,
        dtype: torch.dtype,
        chunk: int,
        forbidden: ForbiddenTargets | None = None,
    ) -> None:
        """Without blocks of a weight, `rows` are logits; else the head's input. `dtype`: of products."""
        self.exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.weight_VC = joined_weight(blocks, dtype) if blocks else None
        self._rows, self._books, self._temperature, self._dtype = rows, books, request.temperature, dtype
        self._forbidden = forbidden
        width = len(blocks[0]) if blocks else rows.shape[1]
        self._buffer = rows.new_empty(min(chunk, len(rows)), width, dtype=self.exact)

    def scratch(self) -> Tensor:
        """Return memory of the size of a chunk."""
        return torch.empty_like(self._buffer).unflatten(1, (self._books, -1))

    def chunk(self, chunk_rows: slice) -> Tensor:
        """Return `[R, K, V]`, which the caller may overwrite; gone with the next chunk."""
        rows = self._rows[chunk_rows]
        logits_RV = self._buffer[: len(rows)]
        if self.weight_VC is None:
            logits_RV.copy_(rows)
        elif self._dtype == self.exact:
            multiply(rows.to(self._dtype), self.weight_VC, out_RO=logits_RV)
        else:
            logits_RV.copy_(rows.to(self._dtype) @ self.weight_VC.T)
        if self._temperature != 1:
            logits_RV.div_(self._temperature)
        logits_RKV = logits_RV.unflatten(1, (self._books, -1))
        if self._forbidden is not None:
            self._forbidden.leave_out(logits_RKV, chunk_rows)
        return logits_RKV


def _chunk_values(
    logits_RKV: Tensor,
    targets_RK: Tensor,
    request: TokenRequest,
    scratch_RKV: Tensor | None,
    other_RKV: Tensor | None,
    draw_RK: Tensor | None,
) -> _ChunkValues:
    """Compute the figures of a chunk; overwrites both logits, and the scratch memory."""
    token = kl = collision = contrast = entropy = None
    # softmax, not `exp`: MKL's takes ten times as long for what becomes 0 (forbidden and very unlikely entries)
    logprob_RKV = torch.log_softmax(logits_RKV, 2, out=logits_RKV)
    logprob = _at(logprob_RKV, targets_RK)
    if scratch_RKV is None:
        return _ChunkValues(None, logprob, None, None, None, None)
    scratch_RKV = scratch_RKV[: len(logits_RKV)]
    if other_RKV is not None:
        torch.log_softmax(other_RKV, 2, out=other_RKV)
        probability_RKV = torch.softmax(other_RKV, 2, out=scratch_RKV)
        # an entry that is impossible under both (-inf) counts for nothing
        kl = other_RKV.sub_(logprob_RKV).masked_fill_(probability_RKV == 0, 0.0).mul_(probability_RKV).sum(2)
    if request.collision:
        collision = _log_sum_exp(torch.mul(logprob_RKV, 2, out=scratch_RKV))
    if request.contrast_k and draw_RK is not None:
        token = _contrast_token(logprob_RKV, targets_RK, request.contrast_k, draw_RK)
        contrast = _at(logprob_RKV, token)
    if request.entropy:
        # not `entr`, whose logarithms take four times as long as all else here
        probability_RKV = torch.softmax(logprob_RKV, 2, out=scratch_RKV)
        entropy = probability_RKV.mul_(logprob_RKV.clamp_(min=LEAST_LOGPROB)).sum(2).neg_()
    return _ChunkValues(token, logprob, kl, collision, contrast, entropy)


def _log_sum_exp(logits_RKV: Tensor) -> Tensor:
    """Compute log of the summed exponentials `[R, K]`; overwrites the logits."""
    largest_RK = logits_RKV.amax(dim=2)
    return largest_RK - torch.log_softmax(logits_RKV, 2, out=logits_RKV).amax(dim=2)


def _chunk_gradient(
    logits_RKV: Tensor,
    targets_RK: Tensor,
    values: _ChunkValues,
    upstream: list[Tensor | None],
    other_RKV: Tensor | None,
) -> Tensor:
    """Compute the gradient of a chunk's logits, over the temperature; overwrites both logits.

    With p = softmax(logits) and r that of the reference: a log-probability has `onehot - p`, the KL `p - r`, the
    entropy H `entr(p) - p H`, and the collision log sum p^2 = c `2 (p^2 exp(-c) - p)`.
    """
    to_logprob, to_kl, to_collision, to_contrast, to_entropy = upstream
    probability_RKV = torch.softmax(logits_RKV, 2, out=logits_RKV)
    share_RK = torch.zeros_like(values.logprob)  # what p is multiplied with
    addends = []
    if to_entropy is not None and values.entropy is not None:
        addends.append(torch.special.entr(probability_RKV).mul_(to_entropy[..., None]))
        share_RK -= to_entropy * values.entropy
    if to_collision is not None and values.collision is not None:
        factor_RK = 2 * to_collision * (-values.collision).exp()
        addends.append(probability_RKV.square().mul_(factor_RK[..., None]))
        share_RK -= 2 * to_collision
    if to_kl is not None and other_RKV is not None:
        torch.softmax(other_RKV, 2, out=other_RKV)
        addends.append(other_RKV.mul_(-to_kl[..., None]))
        share_RK += to_kl
    at_tokens = [(to_logprob, targets_RK), (to_contrast, values.contrast_token)]
    for gradient_RK, _ in at_tokens:
        if gradient_RK is not None:
            share_RK -= gradient_RK
    gradient_RKV = probability_RKV.mul_(share_RK[..., None])
    for addend in addends:
        gradient_RKV.add_(addend)
    for gradient_RK, token_RK in at_tokens:
        if gradient_RK is not None and token_RK is not None:
            gradient_RKV.scatter_add_(2, token_RK[..., None], gradient_RK[..., None])
    return gradient_RKV


def _contrast_token(log_probs_RKV: Tensor, targets_RK: Tensor, k: int, draw_RK: Tensor) -> Tensor:
    """Draw a token `[R, K]` among the k likeliest other than the target, by their probabilities."""
    others_RKV = log_probs_RKV.scatter(2, targets_RK[..., None], -torch.inf)
    top, tokens = others_RKV.topk(min(k, others_RKV.shape[2] - 1), dim=2)
    cumulative = top.softmax(2).cumsum(2)
    place = (draw_RK[..., None].to(cumulative) >= cumulative).sum(2, keepdim=True)
    return tokens.gather(2, place.clamp(max=tokens.shape[2] - 1))[..., 0]


def _at(values_RKV: Tensor, tokens_RK: Tensor) -> Tensor:
    return values_RKV.gather(2, tokens_RK[..., None])[..., 0]


def _slice_rows(rows: int, chunk: int) -> list[slice]:
    """Slices of the rows; one, that is empty, where there are no rows."""
    return [slice(start, start + chunk) for start in range(0, max(rows, 1), chunk)]


def _check_request(request: TokenRequest, has_reference: bool, has_draws: bool) -> None:
    if request.kl and not has_reference:
        raise ValueError("kl needs the reference's logits")
    if request.contrast_k and not has_draws:
        raise ValueError("contrast_k needs draw_T")
