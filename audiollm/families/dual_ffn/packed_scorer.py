"""The root module of a DualFFN policy: packed answers in, figures per answer token out.

Shapes: S packed rows, C hidden size, X text targets and Y rows of audio targets, K codebooks, T answer tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from audiollm.families.adapters import adapter_off
from audiollm.families.dual_ffn.streams import PackedAnswers
from audiollm.families.logprobs.token_figures import (
    ForbiddenTargets,
    HeadRows,
    TokenFigures,
    TokenRequest,
    keep_head_rows,
    linear_token_figures,
)
from audiollm.models.audio_encoder import AudioTower
from audiollm.models.dual_ffn import DualFFN, through_head


class TargetRows(NamedTuple):
    """What both heads of a model make the logits of a pack's targets from, without gradient."""

    text: HeadRows
    audio: HeadRows


class PackedScorer(nn.Module):
    """A DualFFN behind one `forward`, which strategies wrap: every pass goes through it.

    Dropout is off always, in training mode too; the config, and so what is saved, keeps its rates. Names of
    parameters are those of `losses.TokenLosses`.

    Args:
        model: with adapters inside, where they are trained.
        adapted: the `PeftModel` around it, which switches them off; None: it has none.
    """

    def __init__(self, model: DualFFN, adapted: Any = None) -> None:
        super().__init__()
        self.model = model
        self._adapted = (adapted,)  # in a tuple: the model is no module of this one twice
        self.answers_in_text = False
        """Packs without codes to score do not go through the audio head; it must be frozen, on all ranks."""
        _switch_dropout_off(model)

    @property
    def adapted(self) -> Any:
        """The `PeftModel` around the model; None: it has no adapter."""
        return self._adapted[0]

    def forward(
        self,
        batch: PackedAnswers,
        request: TokenRequest | None,
        adapter: bool = True,
        reference: TargetRows | None = None,
        draw_T: Tensor | None = None,
    ) -> TokenFigures | TargetRows:
        """Compute the figures of the batch's answer tokens `[T]`; `TargetRows` where `request` is None.

        Args:
            adapter: False computes with the adapter off: the model that the training began from.
            reference: of the reference, for `kl`.
            draw_T: a random number per token, for `contrast_k`.
        """
        with nullcontext() if adapter else adapter_off(self.adapted):
            hidden_SC, packed = self.model(batch.pack), batch.pack
            text_XC = hidden_SC.index_select(0, packed.text_target_index)
            audio_YC = hidden_SC.index_select(0, packed.audio_target_index)
            heads = (self.model.text_lm_head, text_XC), (self.model.audio_lm_head, audio_YC)
            if request is not None and self.answers_in_text and not packed.counts["audio"]:
                text, _ = _uses(batch, request, reference, draw_T)
                return _text_figures(batch, through_head(*heads[0], text))
            if request is None:
                return TargetRows(*(through_head(head, rows, keep_head_rows) for head, rows in heads))
            head_outputs = [
                through_head(head, rows, use)
                for (head, rows), use in zip(heads, _uses(batch, request, reference, draw_T), strict=True)
            ]
            return _join_head_figures(batch, *head_outputs)

    @property
    def hidden_size(self) -> int:
        """See `HiddenScorer.hidden_size`."""
        return self.model.config.hidden_size

    def hidden_before_end(self, batch: PackedAnswers) -> Tensor:
        """Compute the hidden state `[A, C]` that the last token of each answer, which ends its turn, is chosen from."""
        ends_A = batch.pack.layout.cumulative_lengths[1 : batch.num_answers + 1].long() - 1
        return self._hidden(batch, ends_A - 1)

    def hidden_at(self, batch: PackedAnswers, answer_S: Tensor, position_S: Tensor) -> Tensor:
        """Compute the hidden state `[S, C]` at positions of answers, counted from the beginning of their prompts."""
        return self._hidden(batch, batch.pack.layout.cumulative_lengths[answer_S].long() + position_S)

    def hidden_before(self, batch: PackedAnswers) -> Tensor:
        """Compute the hidden state `[T, C]` that each answer token is chosen from: one for all codes of a frame."""
        packed = batch.pack
        hidden_SC: Tensor = self.model(packed)
        books = packed.audio_targets_XK.shape[1]
        rows = torch.cat([packed.text_target_index, packed.audio_target_index.repeat_interleave(books)])
        return hidden_SC.index_select(0, rows[batch.entry_T])

    def freeze_head(self) -> None:
        """Take both output heads out of what is trained."""
        for head in (self.model.text_lm_head, self.model.audio_lm_head):
            head.requires_grad_(False)

    def _hidden(self, batch: PackedAnswers, place_S: Tensor) -> Tensor:
        hidden_SC: Tensor = self.model(batch.pack)
        return hidden_SC.index_select(0, batch.pack.layout.row_of_S[place_S])


@torch.no_grad()
def figures_of_rows(batch: PackedAnswers, rows: TargetRows, request: TokenRequest) -> TokenFigures:
    """Compute figures `[T]` from the rows of a pass that was made before."""
    text, audio = _uses(batch, request, None, None)
    return _join_head_figures(batch, text(*rows.text), audio(*rows.audio))


def _uses(
    batch: PackedAnswers, request: TokenRequest, reference: TargetRows | None, draw_T: Tensor | None
) -> tuple[Any, Any]:
    """Return the functions of hidden states and weight that compute the figures of text and of audio targets."""
    targets = batch.pack.text_targets[:, None], batch.pack.audio_targets_XK
    draws: tuple[Tensor | None, ...] = (None, None)
    if draw_T is not None:
        sizes = [head_targets.numel() for head_targets in targets]
        flat = draw_T.new_zeros(sum(sizes)).index_copy(0, batch.entry_T, draw_T)
        draws = tuple(
            head_draws.view_as(like) for head_draws, like in zip(flat.split(sizes), targets, strict=True)
        )
    references = reference or (None, None)

    masks = batch.forbidden_words, batch.forbidden_codes

    def use_for(
        target: Tensor,
        reference_rows: HeadRows | None,
        draw: Tensor | None,
        forbidden: ForbiddenTargets | None,
    ) -> Any:
        return lambda hidden_XC, weight_VC: linear_token_figures(
            hidden_XC, weight_VC, target, request, reference_rows, draw, forbidden=forbidden
        )

    text, audio = (
        use_for(*head_inputs) for head_inputs in zip(targets, references, draws, masks, strict=True)
    )
    return text, audio


def _join_head_figures(batch: PackedAnswers, text: TokenFigures, audio: TokenFigures) -> TokenFigures:
    """Return the figures of both heads in the order of the answers' tokens."""
    joined = [
        None
        if of_text is None or of_audio is None
        else torch.cat([of_text.flatten(), of_audio.flatten()]).index_select(0, batch.entry_T)
        for of_text, of_audio in zip(text, audio, strict=True)
    ]
    return TokenFigures(*joined)  # type: ignore[arg-type]


def _text_figures(batch: PackedAnswers, text: TokenFigures) -> TokenFigures:
    """Return the figures of text in the order of the answers' tokens, which have no codes."""
    ordered = [None if figure is None else figure.flatten()[batch.entry_T] for figure in text]
    return TokenFigures(*ordered)  # type: ignore[arg-type]


def _switch_dropout_off(model: DualFFN) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(vars(module).get("dropout"), float):
            module.dropout = 0.0  # type: ignore[assignment]
        if isinstance(module, AudioTower):
            module.config = replace(module.config, dropout=0.0)
