"""Higgs Audio v3 TTS under its published names, without its codec.

Shapes: X, Y, Z rows, R rows, K codebooks, J = K - 1, E entries of a codebook, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.families.talkers.stack import DecoderStack, stack_shape
from audiollm.families.talkers.talker import DelayedTalker
from audiollm.products import linear

MARKED_CODES = 2
"""Entries of a codebook behind its codes: the mark before the first code, and the end."""
TEXT_TABLE = "tied.embedding.text_embedding.weight"
CODE_TABLE = "tied.embedding.modality_embeddings.0.embedding.weight"
TEXT_HEAD, CODE_HEAD = "tied.head.text_head.weight", "tied.head.modality_heads.0.weight"
"""Names of copies of the tables, which files may hold."""


class CodeTable(nn.Module):
    """The embeddings of all codebooks, which also are their heads.

    No `nn.Embedding`: an adapter of one end alone would make two of the table.
    """

    def __init__(self, codebooks: int, entries: int, size: int) -> None:
        super().__init__()
        self.codebooks, self.entries = codebooks, entries
        self.weight = nn.Parameter(torch.empty(codebooks * entries, size))

    def forward(self, codes_ZJ: Tensor, first: int) -> Tensor:
        """The sum `[Z, C]` of the embeddings of codes.

        Args:
            first: codebook of the first of them.
        """
        offset_J = (first + torch.arange(codes_ZJ.shape[1], device=codes_ZJ.device)) * self.entries
        return functional.embedding_bag(codes_ZJ + offset_J, self.weight, mode="sum")

    def heads(self) -> Sequence[Tensor]:
        """The weight `[E, C]` of each codebook's head; their gradient is one tensor."""
        return self.weight.unflatten(0, (self.codebooks, self.entries)).unbind()


class _CodeModality(nn.Module):
    def __init__(self, codebooks: int, entries: int, size: int) -> None:
        super().__init__()
        self.embedding = CodeTable(codebooks, entries, size)


class _Embedding(nn.Module):
    def __init__(self, words: int, codes: _CodeModality, size: int) -> None:
        super().__init__()
        self.text_embedding = nn.Embedding(words, size)
        self.modality_embeddings = nn.ModuleList([codes])


class _Tied(nn.Module):
    def __init__(self, embedding: _Embedding) -> None:
        super().__init__()
        self.embedding = embedding


class HiggsV3Talker(DelayedTalker):
    """A row holds a word, or the codes of K frames, one behind the other."""

    def __init__(self, text: Mapping[str, Any], codebooks: int, entries: int, where: str) -> None:
        """Make the model.

        Args:
            text: `text_config`, with `rope_theta`.
            entries: of a codebook, its two marks included.
            where: config.json, for errors.
        """
        super().__init__()
        shape = stack_shape(text, where, qk_norm=True)
        self.num_codebooks, self.codebook_size = codebooks, entries - MARKED_CODES
        self.first_entries = self.rest_entries = entries
        self.begin = entries - MARKED_CODES
        codes = _CodeModality(codebooks, entries, shape.hidden_size)
        self.tied = _Tied(_Embedding(int(text["vocab_size"]), codes, shape.hidden_size))
        self.body = DecoderStack(shape)

    @property
    def backbone(self) -> DecoderStack:
        """See `Talker.backbone`."""
        return self.body

    @property
    def code_table(self) -> CodeTable:
        """The table of codes."""
        table: CodeTable = self.tied.embedding.modality_embeddings[0].embedding  # type: ignore[assignment]
        return table

    def embed_text(self, text_X: Tensor) -> Tensor:
        """See `Talker.embed_text`."""
        embedded: Tensor = self.tied.embedding.text_embedding(text_X)
        return embedded

    def embed_first(self, first_Y: Tensor) -> Tensor:
        """See `Talker.embed_first`."""
        embedded: Tensor = self.code_table(first_Y[:, None], 0)
        return embedded

    def embed_rest(self, rest_ZJ: Tensor) -> Tensor:
        """See `Talker.embed_rest`."""
        embedded: Tensor = self.code_table(rest_ZJ, 1)
        return embedded

    def through_heads(
        self, hidden_KXC: Sequence[Tensor], uses: Sequence[Callable[[Tensor, Any], Any]]
    ) -> list[Any]:
        """See `DelayedTalker.through_heads`."""
        heads = self.code_table.heads()
        return [use(hidden_XC, head) for hidden_XC, head, use in zip(hidden_KXC, heads, uses, strict=True)]

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """See `DelayedTalker.logits`."""
        entries = (self.num_codebooks, self.first_entries)
        return linear(hidden_RC, self.code_table.weight).unflatten(1, entries)
