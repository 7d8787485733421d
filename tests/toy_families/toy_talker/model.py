"""The model: a talker over rows of text and frames, and a predictor over the codebooks of a frame.

A row is a text token, or a frame: the sum of the embeddings of its codes and of `<frame>`. The talker chooses the first
code of the next frame, or the end; the predictor chooses the others, each from the codes before it.

Shapes: A answers, L rows, T frames, K codebooks, V codes of each, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from audiollm.models.pretrained import load_model

MODEL_TYPE = "toy_talker"
BEGIN, FRAME, TEXT_TOKENS = 256, 257, 258
"""Text is read as its bytes; then the token behind the text, that of every frame, and the number of all."""


@dataclass(frozen=True)
class TalkerConfig:
    """Sizes, as `config.json` has them."""

    num_codebooks: int = 2
    codebook_size: int = 16
    hidden_size: int = 32
    num_layers: int = 1


class Talker(nn.Module):
    """Rows to logits of codes."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.config = config
        size, codes = config.hidden_size, config.codebook_size
        self.text_embedding = nn.Embedding(TEXT_TOKENS, size)
        self.code_embeddings = nn.ModuleList(nn.Embedding(codes, size) for _ in range(config.num_codebooks))
        """Read by talker and predictor alike."""
        self.talker, self.predictor = _decoder(config), _decoder(config)
        self.first_head = nn.Linear(size, codes + 1, bias=False)
        """The first codebook's; its last entry ends the speech."""
        self.heads = nn.ModuleList(
            nn.Linear(size, codes, bias=False) for _ in range(config.num_codebooks - 1)
        )

    @property
    def end(self) -> int:
        """The entry of the first codebook that ends the speech."""
        return self.config.codebook_size

    def hidden(self, text_AL: Tensor, codes_ALK: Tensor, is_frame_AL: Tensor) -> Tensor:
        """Hidden states `[A, L, H]` of rows; codes are read where `is_frame_AL`. Padding changes nothing."""
        frames_ALH = sum(table(codes_ALK[..., k]) for k, table in enumerate(self.code_embeddings))
        rows_ALH = self.text_embedding(text_AL) + frames_ALH * is_frame_AL[..., None]
        hidden_ALH: Tensor = self.talker(inputs_embeds=rows_ALH, use_cache=False).last_hidden_state
        return hidden_ALH

    def code_logits(self, hidden_TH: Tensor, codes_TK: Tensor) -> Tensor:
        """Logits `[T, K, V + 1]` of the codes of frames, each given those before it.

        Args:
            hidden_TH: of the row before each frame, which knows none of its codes.
            codes_TK: of the frames; the last codebook's are not read.
        """
        before = [table(codes_TK[:, k]) for k, table in enumerate(self.code_embeddings[:-1])]
        rows_TKH = torch.stack([hidden_TH, *before], dim=1)
        found_TKH = self.predictor(inputs_embeds=rows_TKH, use_cache=False).last_hidden_state
        later = [head(found_TKH[:, k + 1]) for k, head in enumerate(self.heads)]
        no_end = (0, 1)  # the others cannot end the speech
        padded = [nn.functional.pad(logits_TV, no_end, value=-torch.inf) for logits_TV in later]
        return torch.stack([self.first_head(hidden_TH), *padded], dim=1)


def load_talker(folder: Path) -> Talker:
    """Load a saved talker. Raises: ConfigError: the folder holds none, or another one's weights."""
    config, weights = load_model(folder, MODEL_TYPE, TalkerConfig)
    model = Talker(config)
    model.load_state_dict(weights)
    return model


def _decoder(config: TalkerConfig) -> LlamaModel:
    decoder = LlamaModel(
        LlamaConfig(
            vocab_size=1, hidden_size=config.hidden_size, intermediate_size=2 * config.hidden_size,
            num_hidden_layers=config.num_layers, num_attention_heads=2, pad_token_id=None, bos_token_id=None,
            eos_token_id=None,
        )
    )  # fmt: skip
    decoder.embed_tokens = nn.Identity()  # rows come embedded
    return decoder
