"""Tokens and codes that are never drawn: constant masks, for sampling and for training on what was sampled.

Shapes: V words of the vocabulary or codes of a codebook, K codebooks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from audiollm.data.chat.template import Template
from audiollm.data.text import tokenizer as tokens
from audiollm.generation.engine.state import Marks


def forbidden_words(template: Template, vocab_size: int) -> dict[str, Tensor]:
    """Masks `[V]`, by the kind of the answer, of the tokens that are never drawn: control tokens and unused ids."""
    marks = Marks.of(template)
    vocabulary = template.tokenizer.get_vocab_size(with_added_tokens=True)
    style = tokens.HEADER_STYLES[template.header_style]
    ids = map(template.tokenizer.token_to_id, (*style.special_tokens, tokens.AUDIO_DELAY))
    control = [token for token in ids if token is not None]
    text_V = torch.arange(vocab_size) >= vocabulary
    text_V[[token for token in control if token not in marks.ends]] = True
    any_V = text_V.clone()
    any_V[marks.opens_speech] = False
    return {"text": text_V, "any": any_V}


def forbidden_codes(marks: Marks, num_codes: int) -> tuple[Tensor, Tensor]:
    """Masks `[K, V]` of the codes that are never drawn: BOS, and EOS outside of the first codebook.

    Args:
        num_codes: entries of a codebook, BOS and EOS included.

    Returns:
        The mask of every row, and that of the first row of a stretch of speech, where EOS is forbidden, too: it has at
        least one frame.
    """
    later_KV = torch.zeros(marks.num_codebooks, num_codes, dtype=torch.bool)
    later_KV[:, marks.audio_bos] = True
    later_KV[1:, marks.audio_eos] = True
    first_KV = later_KV.clone()
    first_KV[0, marks.audio_eos] = True
    return later_KV, first_KV
