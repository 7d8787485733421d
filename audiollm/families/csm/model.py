"""CSM under its published names (transformers' `CsmForConditionalGeneration`), without its codec.

Shapes: X, Y, Z rows, F frames, K codebooks, J = K - 1, V codes of a codebook, C and D hidden sizes of the backbone and
of the depth decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.families.talkers.stack import DecoderStack, stack_shape
from audiollm.families.talkers.talker import Talker
from audiollm.models.dual_ffn import Head
from audiollm.products import Linear, linear

TIED = {"backbone_model.embed_tokens.embed_audio_tokens.weight": "depth_decoder.model.embed_tokens.weight"}
"""The one table of codes, which both decoders read."""


class _CodeTable(nn.Module):
    """The backbone's name of the table."""

    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self.embed_audio_tokens = nn.Embedding(entries, size)


class _Backbone(DecoderStack):
    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        super().__init__(stack_shape(data, where))
        self.embed_tokens = _CodeTable(data["num_codebooks"] * data["vocab_size"], self.shape.hidden_size)


class _DepthStack(DecoderStack):
    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        super().__init__(stack_shape(data, where))
        self.embed_tokens = nn.Embedding(
            data["num_codebooks"] * data["vocab_size"], data["backbone_hidden_size"]
        )
        self.inputs_embeds_projector = Linear(
            data["backbone_hidden_size"], self.shape.hidden_size, bias=False
        )


class _DepthHeads(nn.Module):
    """A head for each codebook but the first, stored as one tensor `[J, D, V]`."""

    def __init__(self, others: int, size: int, codes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(others, size, codes))

    def forward(
        self, hidden_FD: Tensor, head: int, use: Callable[[Tensor, Tensor], Any] | None = None
    ) -> Any:
        weight_VD = self.weight[head].T.contiguous()
        return linear(hidden_FD, weight_VD) if use is None else use(hidden_FD, weight_VD)


class _DepthDecoder(nn.Module):
    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        super().__init__()
        self.model = _DepthStack(data, where)
        self.codebooks_head = _DepthHeads(
            data["num_codebooks"] - 1, self.model.shape.hidden_size, data["vocab_size"]
        )


class CsmTalker(Talker):
    """The backbone reads words and whole frames; an end is a frame whose codes are all 0."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        """Make the model of a config.json.

        Args:
            data: with all fields of transformers' `CsmConfig`.
            where: the file, for errors.
        """
        super().__init__()
        self.num_codebooks = data["num_codebooks"]
        self.first_entries = self.rest_entries = self.entries = data["vocab_size"]
        self.codebook_size = data["codec_config"]["codebook_size"]
        self.embed_text_tokens = nn.Embedding(data["text_vocab_size"], data["hidden_size"])
        self.backbone_model = _Backbone(data, where)
        self.depth_decoder = _DepthDecoder(data["depth_decoder_config"], where)
        self.lm_head = Head(data["hidden_size"], data["vocab_size"], bias=False)

    def tie_tables(self) -> None:
        """Make one tensor of the two names of the table of codes."""
        self.backbone_model.embed_tokens.embed_audio_tokens.weight = (
            self.depth_decoder.model.embed_tokens.weight
        )

    @property
    def backbone(self) -> DecoderStack:
        """See `Talker.backbone`."""
        return self.backbone_model

    @property
    def depth(self) -> DecoderStack:
        """See `Talker.depth`."""
        return self.depth_decoder.model

    @property
    def first_head(self) -> nn.Module:
        """See `Talker.first_head`."""
        return self.lm_head

    def embed_text(self, text_X: Tensor) -> Tensor:
        """See `Talker.embed_text`."""
        embedded: Tensor = self.embed_text_tokens(text_X)
        return embedded

    def embed_first(self, first_Y: Tensor) -> Tensor:
        """See `Talker.embed_first`."""
        embedded: Tensor = self.backbone_model.embed_tokens.embed_audio_tokens(first_Y)
        return embedded

    def embed_rest(self, rest_ZJ: Tensor) -> Tensor:
        """See `Talker.embed_rest`."""
        offset_J = torch.arange(1, self.num_codebooks, device=rest_ZJ.device) * self.entries
        table = self.backbone_model.embed_tokens.embed_audio_tokens.weight
        return functional.embedding_bag(rest_ZJ + offset_J, table, mode="sum")

    def embed_code(self, code_F: Tensor, codebook: int) -> Tensor:
        """See `Talker.embed_code`."""
        embedded: Tensor = self.depth_decoder.model.embed_tokens(code_F + codebook * self.entries)
        return embedded

    def project_depth(self, x: Tensor) -> Tensor:
        """See `Talker.project_depth`."""
        projected: Tensor = self.depth_decoder.model.inputs_embeds_projector(x)
        return projected

    def through_rest_head(
        self, hidden_FC: Tensor, codebook: int, use: Callable[[Tensor, Any], Any] | None = None
    ) -> Any:
        """See `Talker.through_rest_head`."""
        return self.depth_decoder.codebooks_head(hidden_FC, codebook - 1, use)
