"""CSM under its published names (transformers' `CsmForConditionalGeneration`), without its codec.

Shapes: X, Y, Z rows, F frames, K codebooks, J = K - 1, V codes of a codebook, C and D hidden sizes of the backbone and
of the depth decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.families.talkers.stack import DecoderStack, stack_shape
from audiollm.families.talkers.talker import DepthTalker
from audiollm.models.dual_ffn import Head
from audiollm.products import Linear

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

    def forward(self, use: Callable[[Tensor], Any]) -> Any:
        """What `use` makes of the heads `[J, D, V]`; a call of the module, so that strategies gather its shards."""
        return use(self.weight)


class _DepthDecoder(nn.Module):
    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        super().__init__()
        self.model = _DepthStack(data, where)
        self.codebooks_head = _DepthHeads(
            data["num_codebooks"] - 1, self.model.shape.hidden_size, data["vocab_size"]
        )


class CsmTalker(DepthTalker):
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
        """See `DepthTalker.depth`."""
        return self.depth_decoder.model

    @property
    def first_head(self) -> nn.Module:
        """See `DepthTalker.first_head`."""
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
        """See `DepthTalker.embed_code`."""
        embedded: Tensor = self.depth_decoder.model.embed_tokens(code_F + codebook * self.entries)
        return embedded

    def embed_codes(self, codes_FJ: Tensor) -> Tensor:
        """See `DepthTalker.embed_codes`: one look-up, whose gradient is one table."""
        offset_J = torch.arange(codes_FJ.shape[1], device=codes_FJ.device) * self.entries
        embedded: Tensor = self.depth_decoder.model.embed_tokens(codes_FJ + offset_J)
        return embedded

    def project_depth(self, x: Tensor) -> Tensor:
        """See `DepthTalker.project_depth`."""
        projected: Tensor = self.depth_decoder.model.inputs_embeds_projector(x)
        return projected

    def through_rest_head(self, hidden_FC: Tensor, codebook: int) -> Tensor:
        """See `DepthTalker.through_rest_head`."""
        logits: Tensor = self.depth_decoder.codebooks_head(
            lambda weight_JDV: hidden_FC @ weight_JDV[codebook - 1]
        )
        return logits

    def through_rest_heads(
        self, hidden_JFC: Sequence[Tensor], uses: Sequence[Callable[[Tensor, Any], Any]]
    ) -> list[Any]:
        """See `DepthTalker.through_rest_heads`."""

        def use_all(weight_JDV: Tensor) -> list[Any]:
            # one copy and one gradient: a slice for each head would write the gradient of all heads each time
            heads = weight_JDV.transpose(1, 2).contiguous().unbind()
            return [
                use(hidden_FC, head) for hidden_FC, head, use in zip(hidden_JFC, heads, uses, strict=True)
            ]

        results: list[Any] = self.depth_decoder.codebooks_head(use_all)
        return results
