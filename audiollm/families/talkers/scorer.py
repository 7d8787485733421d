"""The root module of a talker's policy: packed answers in, figures per target out.

Shapes: S rows of a pack, F targets of the first codebook, D frames with other codes, K codebooks, T targets, C hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from audiollm.families.adapters import adapter_off
from audiollm.families.logprobs.token_figures import (
    ForbiddenTargets,
    HeadRows,
    TokenFigures,
    TokenRequest,
    keep_head_rows,
    linear_token_figures,
)
from audiollm.families.talkers.rows import NONE, SpeechBatch
from audiollm.families.talkers.talker import DelayedTalker, DepthTalker, Talker
from audiollm.models.chunked_cross_entropy import HeadWeight
from audiollm.models.dual_ffn import through_head

DEPTH_FRAMES = 1024
"""Frames that go through the depth decoder at once; of more, each part is computed again in the backward pass."""

HeadUse = Callable[[Tensor, HeadWeight], Any]


class SpeechScorer(nn.Module):
    """A talker behind one `forward`, which strategies wrap: every pass goes through it.

    Args:
        model: with adapters inside, where they are trained.
        adapted: the `PeftModel` around it, which switches them off; None: it has none.
        suppressed: entries of the first codebook that sampling leaves out, and of the others.
    """

    def __init__(
        self,
        model: Talker,
        adapted: Any = None,
        suppressed: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        super().__init__()
        self.model = model
        self._adapted = (adapted,)  # in a tuple: the model is no module of this one twice
        self._suppressed = suppressed

    @property
    def adapted(self) -> Any:
        """The `PeftModel` around the model; None: it has no adapter."""
        return self._adapted[0]

    def forward(
        self,
        batch: SpeechBatch,
        request: TokenRequest | None,
        adapter: bool = True,
        reference: Sequence[HeadRows] | None = None,
        draw_T: Tensor | None = None,
    ) -> TokenFigures | list[HeadRows]:
        """Compute the figures of the batch's targets in reading order; the input of each head where `request` is None.

        Args:
            adapter: False computes with the adapter off.
            reference: of the reference, for `kl`, as this gives it without a request.
            draw_T: a random number per target, for `contrast_k`.
        """
        with nullcontext() if adapter else adapter_off(self.adapted):
            hidden_SC = self._hidden_rows(batch)
            first, *others = self._through_heads(
                batch, hidden_SC, self._codebook_uses(batch, request, reference, draw_T)
            )
        if request is None:
            return [first, *others]
        return _join_figures(batch, first, others)

    @torch.no_grad()
    def figures_of_rows(
        self, batch: SpeechBatch, rows: Sequence[HeadRows], request: TokenRequest
    ) -> TokenFigures:
        """Compute figures `[T]` from the inputs of the heads of a pass that was made before."""
        uses = self._codebook_uses(batch, request, None, None)
        first, *others = [use(*head_rows) for use, head_rows in zip(uses, rows, strict=True)]
        return _join_figures(batch, first, others)

    def _hidden_rows(self, batch: SpeechBatch) -> Tensor:
        """The hidden states `[S, C]` of all rows."""
        x_SC = self.model.embed_rows(batch.inputs)
        attend = self.model.backbone.attend_packed(x_SC, batch.layout)
        hidden_SC: Tensor = self.model.backbone(x_SC, batch.position_S, attend)
        return hidden_SC

    def _through_heads(self, batch: SpeechBatch, hidden_SC: Tensor, uses: Sequence[HeadUse]) -> list[Any]:
        """Apply each function to the hidden states of its codebook and to the weight of its head."""
        hidden_FC = hidden_SC.index_select(0, batch.source_F)
        if isinstance(self.model, DelayedTalker):
            return self.model.through_heads([hidden_FC, *_delayed_hidden(batch, hidden_SC)], uses)
        assert isinstance(self.model, DepthTalker)
        first = through_head(self.model.first_head, hidden_FC, uses[0])
        return [first, *self._through_depth(batch, hidden_FC[batch.depth_D], uses[1:])]

    def _through_depth(self, batch: SpeechBatch, hidden_DC: Tensor, uses: Sequence[HeadUse]) -> list[Any]:
        """Apply each function to the hidden states of the depth decoder, codebook by codebook."""
        model = self.model
        assert isinstance(model, DepthTalker)
        codes_DK, parts = batch.codes_DK, []
        for first in range(0, max(1, len(codes_DK)), DEPTH_FRAMES):
            some = slice(first, first + DEPTH_FRAMES)
            rows = hidden_DC[some], codes_DK[some]
            if len(codes_DK) > DEPTH_FRAMES and torch.is_grad_enabled():
                parts.append(checkpoint(self._depth_hidden, *rows, use_reentrant=False))
            else:
                parts.append(self._depth_hidden(*rows))
        # the gradient of `unbind` is one copy, that of a slice for each codebook writes all of them each time
        _, *hidden_JDC = torch.cat(parts).unbind(1)
        return model.through_rest_heads(hidden_JDC, uses)

    def _depth_hidden(self, hidden_DC: Tensor, codes_DK: Tensor) -> Tensor:
        assert isinstance(self.model, DepthTalker)
        return self.model.depth.over_frames(self.model.depth_rows(hidden_DC, codes_DK))

    def _codebook_uses(
        self,
        batch: SpeechBatch,
        request: TokenRequest | None,
        reference: Sequence[HeadRows] | None,
        draw_T: Tensor | None,
    ) -> list[HeadUse]:
        """What is made of each codebook's hidden states and head."""
        if request is None:
            return [keep_head_rows] * self.model.num_codebooks
        targets = [batch.target_F, *batch.target_DJ.unbind(1)]
        forbidden = self._forbidden(batch)
        draws: Sequence[Tensor | None] = [None] * len(targets)
        if draw_T is not None:
            # places without a target get some number: their figures are left out
            places = len(batch.target_F) + batch.target_DJ.numel()
            flat_T = draw_T.new_zeros(places).index_copy(0, batch.order_T, draw_T)
            first_F, rest = flat_T[: len(batch.target_F)], flat_T[len(batch.target_F) :]
            draws = [first_F, *rest.view(-1, len(targets) - 1).unbind(1)]
        return [
            partial(
                _head_figures,
                target_X=target_X,
                request=request,
                reference=None if reference is None else reference[book],
                draw_X=draw_X,
                forbidden=forbidden[min(book, 1)],
            )
            for book, (target_X, draw_X) in enumerate(zip(targets, draws, strict=True))
        ]

    def _forbidden(self, batch: SpeechBatch) -> list[ForbiddenTargets | None]:
        """The masks under which sampled answers were drawn, of the first codebook and of the others."""
        if not bool(batch.sampled_F.any()):
            return [None, None]
        rows = batch.sampled_F, batch.sampled_F[batch.depth_D]
        entries = self.model.first_entries, self.model.rest_entries
        return [
            _drawn_mask(suppressed, size, is_sampled_X)
            for suppressed, size, is_sampled_X in zip(self._suppressed, entries, rows, strict=True)
        ]


def offset_losses(
    batch: SpeechBatch, rows: Sequence[HeadRows], places: Sequence[tuple[int, int]], codebook_size: int
) -> Tensor:
    """Numbers, sums and sums of squares of the cross entropies of heads against codes of other places, `[3, K, P]`.

    Args:
        rows: the input of each head, as `SpeechScorer` gives it without a request.
        places: frames, and codebooks, behind the trained one. Ends are no labels of any.
        codebook_size: codes of a codebook; what is beyond them is no label either.
    """
    books, frames = len(rows), len(batch.target_F)
    codes_FK = torch.full((frames, books), NONE, device=batch.target_F.device)
    codes_FK[batch.depth_D] = batch.codes_DK
    codes_FK[codes_FK >= codebook_size] = NONE
    moments = torch.zeros(3, books, len(places), dtype=torch.float64)
    frame_F = torch.arange(frames, device=codes_FK.device)
    answer_F = batch.answer_T[batch.codebook_T == 0]
    for number, (frame, book) in enumerate(places):
        other_F = frame_F + frame
        inside_F = (other_F >= 0) & (other_F < frames)
        inside_F &= answer_F[other_F.clamp(0, frames - 1)] == answer_F
        shifted_FK = torch.full_like(codes_FK, NONE)
        for head in range(books):
            if 0 <= head + book < books:
                shifted_FK[inside_F, head] = codes_FK[other_F[inside_F], head + book]
        for head, head_rows in enumerate(rows):
            labels_X = shifted_FK[:, 0] if head == 0 else shifted_FK[batch.depth_D, head]
            request = TokenRequest(reference=False)
            loss_X = -linear_token_figures(*head_rows, labels_X[:, None], request).logprob_T.double()
            moments[0, head, number] = (labels_X != NONE).sum()
            moments[1, head, number], moments[2, head, number] = loss_X.sum(), loss_X.square().sum()
    return moments


def _delayed_hidden(batch: SpeechBatch, hidden_SC: Tensor) -> list[Tensor]:
    """The hidden states `[D, C]` that choose the codes of each codebook from 1 on: its row is as many rows later."""
    row_D, last = batch.source_F[batch.depth_D], len(hidden_SC) - 1
    # behind the last row there are no targets
    return [
        hidden_SC.index_select(0, (row_D + book).clamp_max(last))
        for book in range(1, 1 + batch.target_DJ.shape[1])
    ]


def _drawn_mask(suppressed: Sequence[int], entries: int, is_sampled_X: Tensor) -> ForbiddenTargets | None:
    if not len(suppressed):
        return None
    mask_MKV = torch.zeros(2, 1, entries, dtype=torch.bool, device=is_sampled_X.device)
    mask_MKV[1, :, list(suppressed)] = True
    return ForbiddenTargets(mask_MKV, is_sampled_X.long())


def _head_figures(
    hidden_XC: Tensor,
    weight_VC: HeadWeight,
    target_X: Tensor,
    request: TokenRequest,
    reference: HeadRows | None,
    draw_X: Tensor | None,
    forbidden: ForbiddenTargets | None,
) -> TokenFigures:
    draw_X1 = None if draw_X is None else draw_X[:, None]
    return linear_token_figures(
        hidden_XC, weight_VC, target_X[:, None], request, reference, draw_X1, forbidden=forbidden
    )


def _join_figures(batch: SpeechBatch, first: TokenFigures, others: Sequence[TokenFigures]) -> TokenFigures:
    """The figures of all codebooks in reading order."""
    joined: list[Tensor | None] = []
    for of_first, *of_others in zip(first, *others, strict=True):
        if of_first is None:
            joined.append(None)
            continue
        rest_DJ = torch.cat(of_others, dim=1) if of_others else of_first.new_zeros(0)
        joined.append(torch.cat([of_first.flatten(), rest_DJ.flatten()]).index_select(0, batch.order_T))
    return TokenFigures(*joined)  # type: ignore[arg-type]
