"""Qwen3-TTS under its published names, without its codec and its speaker encoder.

Shapes: X, Y, Z rows, F frames, K codebooks, J = K - 1, C and D hidden sizes of the talker and of the code predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.families.talkers.stack import DecoderStack, stack_shape
from audiollm.families.talkers.talker import DepthTalker
from audiollm.models.dual_ffn import Head, through_head
from audiollm.products import Linear


class _TextProjection(nn.Module):
    """Words of the text table as rows of the talker."""

    def __init__(self, text_size: int, size: int) -> None:
        super().__init__()
        self.linear_fc1 = Linear(text_size, text_size)
        self.linear_fc2 = Linear(text_size, size)

    def forward(self, x_XC: Tensor) -> Tensor:
        projected: Tensor = self.linear_fc2(functional.silu(self.linear_fc1(x_XC)))
        return projected


class _TalkerStack(DecoderStack):
    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        super().__init__(stack_shape(data, where, qk_norm=True))
        self.codec_embedding = nn.Embedding(data["vocab_size"], self.shape.hidden_size)
        self.text_embedding = nn.Embedding(data["text_vocab_size"], data["text_hidden_size"])


class _PredictorStack(DecoderStack):
    def __init__(self, data: Mapping[str, Any], others: int, size: int, where: str) -> None:
        super().__init__(stack_shape(data, where, qk_norm=True))
        self.codec_embedding = nn.ModuleList(nn.Embedding(data["vocab_size"], size) for _ in range(others))


class _CodePredictor(nn.Module):
    def __init__(self, data: Mapping[str, Any], others: int, size: int, where: str) -> None:
        super().__init__()
        self.model = _PredictorStack(data, others, size, where)
        inner = self.model.shape.hidden_size
        self.lm_head = nn.ModuleList(Head(inner, data["vocab_size"], bias=False) for _ in range(others))
        self.small_to_mtp_projection = Linear(size, inner) if inner != size else nn.Identity()


class _TalkerParts(nn.Module):
    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        super().__init__()
        self.model = _TalkerStack(data, where)
        size = self.model.shape.hidden_size
        self.text_projection = _TextProjection(data["text_hidden_size"], size)
        self.codec_head = Head(size, data["vocab_size"], bias=False)
        self.code_predictor = _CodePredictor(
            data["code_predictor_config"], data["num_code_groups"] - 1, size, where
        )


class Qwen3TTSTalker(DepthTalker):
    """The talker reads words through a projection, codes and marks from one table, and the other codes of a frame from
    the code predictor's tables."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        """Make the model of `talker_config`.

        Args:
            where: the file, for errors.
        """
        super().__init__()
        self.num_codebooks, self.first_entries = data["num_code_groups"], data["vocab_size"]
        self.codebook_size = self.rest_entries = data["code_predictor_config"]["vocab_size"]
        self.talker = _TalkerParts(data, where)

    @property
    def backbone(self) -> DecoderStack:
        """See `Talker.backbone`."""
        return self.talker.model

    @property
    def depth(self) -> DecoderStack:
        """See `DepthTalker.depth`."""
        return self.talker.code_predictor.model

    @property
    def first_head(self) -> nn.Module:
        """See `DepthTalker.first_head`."""
        return self.talker.codec_head

    def embed_text(self, text_X: Tensor) -> Tensor:
        """See `Talker.embed_text`."""
        embedded: Tensor = self.talker.text_projection(self.talker.model.text_embedding(text_X))
        return embedded

    def embed_first(self, first_Y: Tensor) -> Tensor:
        """See `Talker.embed_first`."""
        embedded: Tensor = self.talker.model.codec_embedding(first_Y)
        return embedded

    def embed_rest(self, rest_ZJ: Tensor) -> Tensor:
        """See `Talker.embed_rest`."""
        tables = self.talker.code_predictor.model.codec_embedding
        embedded = [table(rest_ZJ[:, place]) for place, table in enumerate(tables)]
        return torch.stack(embedded).sum(dim=0)

    def embed_code(self, code_F: Tensor, codebook: int) -> Tensor:
        """See `DepthTalker.embed_code`."""
        tables = self.talker.code_predictor.model.codec_embedding
        table = self.talker.model.codec_embedding if codebook == 0 else tables[codebook - 1]
        embedded: Tensor = table(code_F)
        return embedded

    def project_depth(self, x: Tensor) -> Tensor:
        """See `DepthTalker.project_depth`."""
        projected: Tensor = self.talker.code_predictor.small_to_mtp_projection(x)
        return projected

    def through_rest_head(self, hidden_FC: Tensor, codebook: int) -> Tensor:
        """See `DepthTalker.through_rest_head`."""
        logits: Tensor = self.talker.code_predictor.lm_head[codebook - 1](hidden_FC)
        return logits

    def through_rest_heads(
        self, hidden_JFC: Sequence[Tensor], uses: Sequence[Callable[[Tensor, Any], Any]]
    ) -> list[Any]:
        """See `DepthTalker.through_rest_heads`."""
        heads = self.talker.code_predictor.lm_head
        return [
            through_head(head, hidden_FC, use)
            for head, hidden_FC, use in zip(heads, hidden_JFC, uses, strict=True)
        ]
