"""A talker: a backbone over rows of text and codes, and what chooses the codes of a frame.

A row is the sum of what it holds: a word, an entry of the first table of codes (a code, or a mark of the model's own),
the codes of a frame's other codebooks, a vector. The backbone's hidden state of the row before a frame chooses the
frame's first code, or the end. Of a `DepthTalker` the depth decoder reads that hidden state and the codes so far, and
chooses the others; of a `DelayedTalker` the backbone does, the code of codebook k another k rows later.

Shapes: S rows, X, Y, Z and V those that have words, first codes, other codes and vectors, F frames, R rows, K
codebooks, J = K - 1, C hidden size, E entries of a codebook.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.families.talkers.stack import DecoderStack


@dataclass(frozen=True)
class RowInputs:
    """What rows hold, and in which of them."""

    num_rows: int
    text_X: Tensor
    text_row_X: Tensor
    first_Y: Tensor
    """Entries of the first codebook's table."""
    first_row_Y: Tensor
    rest_ZJ: Tensor
    """Codes of the other codebooks."""
    rest_row_Z: Tensor
    vector_VC: Tensor
    vector_row_V: Tensor

    def to(self, device: torch.device) -> RowInputs:
        """Return the rows on a device."""
        tensors = [value.to(device) for value in vars(self).values() if isinstance(value, Tensor)]
        return RowInputs(self.num_rows, *tensors)


class Talker(nn.Module, ABC):
    """The model; a family gives its tables, stacks and heads under their published names."""

    _no_split_modules = ("DualFFNLayer",)

    num_codebooks: int
    codebook_size: int
    """Codes of a codebook of the codec; entries of the tables beyond them are marks."""
    first_entries: int
    """Logits of the first codebook."""
    rest_entries: int
    """Logits of each other codebook."""

    @property
    @abstractmethod
    def backbone(self) -> DecoderStack:
        """The stack over rows."""

    @abstractmethod
    def embed_text(self, text_X: Tensor) -> Tensor:
        """`[X, C]`."""

    @abstractmethod
    def embed_first(self, first_Y: Tensor) -> Tensor:
        """`[Y, C]`."""

    @abstractmethod
    def embed_rest(self, rest_ZJ: Tensor) -> Tensor:
        """The sum `[Z, C]` over the other codebooks."""

    def embed_rows(self, inputs: RowInputs) -> Tensor:
        """Rows for the first layer, `[S, C]`."""
        parts = [
            (inputs.text_row_X, self.embed_text(inputs.text_X)),
            (inputs.first_row_Y, self.embed_first(inputs.first_Y)),
            (inputs.rest_row_Z, self.embed_rest(inputs.rest_ZJ)),
        ]
        rows_SC = parts[0][1].new_zeros(inputs.num_rows, parts[0][1].shape[1])
        if len(inputs.vector_row_V):
            parts.append((inputs.vector_row_V, inputs.vector_VC.to(rows_SC.dtype)))
        for place, embedded in parts:
            rows_SC = rows_SC.index_add(0, place, embedded.to(rows_SC.dtype))
        return rows_SC

    def gradient_checkpointing_enable(self) -> None:
        """Compute the layers' activations again in the backward pass (Hugging Face's name for it)."""
        for stack in self.stacks():
            stack.activation_checkpointing = True

    def stacks(self) -> Sequence[DecoderStack]:
        """All stacks."""
        return [self.backbone]

    def weights_changed(self) -> None:
        """Nothing: no weight is held in another form."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of words (Hugging Face's name for it)."""
        return next(module for name, module in self._word_tables() if "text" in name)

    def _word_tables(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module in self.named_modules() if isinstance(module, nn.Embedding))


class DepthTalker(Talker):
    """A talker whose depth decoder chooses the codes of a frame behind the first."""

    @property
    @abstractmethod
    def depth(self) -> DecoderStack:
        """The stack over the codebooks of a frame."""

    @property
    @abstractmethod
    def first_head(self) -> nn.Module:
        """The `models.dual_ffn.Head` of the first codebook, plain or adapted."""

    @abstractmethod
    def embed_code(self, code_F: Tensor, codebook: int) -> Tensor:
        """The embeddings `[F, C]` of codes of a codebook, counted from 0, as the depth decoder reads them."""

    def embed_codes(self, codes_FJ: Tensor) -> Tensor:
        """The embeddings `[F, J, C]` of a frame's codes but the last, as the depth decoder reads them."""
        return torch.stack(
            [self.embed_code(code_F, book) for book, code_F in enumerate(codes_FJ.unbind(1))], dim=1
        )

    @abstractmethod
    def project_depth(self, x: Tensor) -> Tensor:
        """Rows of the backbone's size `[..., C]` as rows of the depth decoder."""

    @abstractmethod
    def through_rest_head(self, hidden_FC: Tensor, codebook: int) -> Tensor:
        """The logits `[F, V]` of a codebook from 1 on."""

    @abstractmethod
    def through_rest_heads(
        self, hidden_JFC: Sequence[Tensor], uses: Sequence[Callable[[Tensor, Any], Any]]
    ) -> list[Any]:
        """Apply each function to the hidden states of a codebook from 1 on and to the weight of its head."""

    def depth_rows(self, hidden_FC: Tensor, codes_FK: Tensor) -> Tensor:
        """Rows `[F, K, C']` of the depth decoder: the hidden state before a frame, then its codes but the last.

        Args:
            hidden_FC: of the row before each frame, which knows none of its codes.
        """
        codes_FJC = self.embed_codes(codes_FK[:, :-1])
        return self.project_depth(torch.cat([hidden_FC.to(codes_FJC.dtype)[:, None], codes_FJC], dim=1))

    def stacks(self) -> Sequence[DecoderStack]:
        """See `Talker.stacks`."""
        return [self.backbone, self.depth]


class DelayedTalker(Talker):
    """A talker whose backbone chooses all codes: one row those of codebook k of the frame k rows before."""

    begin: int
    """Entry of each codebook that stands before its first code."""

    @abstractmethod
    def through_heads(
        self, hidden_KXC: Sequence[Tensor], uses: Sequence[Callable[[Tensor, Any], Any]]
    ) -> list[Any]:
        """Apply each function to the hidden states of a codebook and to the weight `[E, C]` of its head."""

    @abstractmethod
    def logits(self, hidden_RC: Tensor) -> Tensor:
        """The logits `[R, K, E]` of all codebooks."""


def draw_talker_weights(model: nn.Module, spread: float = 0.02) -> None:
    """Draw all weights of a talker anew, as transformers does: normal, biases 0, norms 1."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=spread)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)
