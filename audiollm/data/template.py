"""A sample compiled to a token stream: one row a position, inputs and targets made in one place.

Targets are the assistant's turns only: its text with `<|eot_id|>`, every audio code, and exactly one EOS a
codebook; BOS never. A target stands at its own position; the shift by one happens once, inside the loss.

Shapes: S positions, K codebooks, T code frames, F delayed frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from tokenizers import Tokenizer
from torch import Tensor

from audiollm.data import text_tokenizer as tokens
from audiollm.data.delay import IGNORE, delay, delay_targets
from audiollm.data.sample import AudioPart, Message, TextPart


class Kind(IntEnum):
    """What a position is."""

    TEXT = 0
    AUDIO_IN = 1
    AUDIO_OUT = 2


@dataclass(frozen=True)
class TokenStream:
    """One row a position."""

    text_ids_S: Tensor
    codes_SK: Tensor
    """Model input at audio positions, zero elsewhere."""
    kinds_S: Tensor
    text_targets_S: Tensor
    audio_targets_SK: Tensor

    def __len__(self) -> int:
        return len(self.text_ids_S)


@dataclass(frozen=True)
class Template:
    """Llama-3 headers with Higgs's audio tokens around the delayed codes.

    Args:
        tokenizer: the text vocabulary, special tokens included.
        num_codebooks, codebook_size: of the codec; BOS is `codebook_size`, EOS the one after.
    """

    tokenizer: Tokenizer
    num_codebooks: int
    codebook_size: int

    @property
    def audio_bos(self) -> int:
        return self.codebook_size

    @property
    def audio_eos(self) -> int:
        return self.codebook_size + 1

    def compile(self, messages: Sequence[Message], codes: Sequence[Tensor]) -> TokenStream:
        """All messages, with the codes `[K, T]` of their audio parts in order of appearance.

        Raises:
            ValueError: not as many codes as audio parts, or codes of another shape or range.
        """
        rows = _Rows(self)
        remaining = list(codes)
        rows.add_text(tokens.BEGIN_OF_TEXT, target=False)
        for message in messages:
            speaking = message.role == "assistant"
            rows.add_text(_header(message.role), target=False)
            for part in message.content:
                if isinstance(part, TextPart):
                    rows.add_text(part.text, target=speaking)
                    continue
                assert isinstance(part, AudioPart)
                if not remaining:
                    raise ValueError("more audio parts than codes")
                self._add_audio(rows, remaining.pop(0), speaking)
            rows.add_text(tokens.END_OF_TURN, target=speaking)
        if remaining:
            raise ValueError("more codes than audio parts")
        return rows.stream()

    def prompt(self, messages: Sequence[Message], codes: Sequence[Tensor] = ()) -> TokenStream:
        """The messages, then an opened assistant turn that is about to speak: ends with `<|audio_out_bos|>`."""
        stream = self.compile(messages, codes)
        rows = _Rows(self)
        rows.add_text(_header("assistant") + tokens.AUDIO_OUT_BOS, target=False)
        opened = rows.stream()
        return TokenStream(*(torch.cat(pair) for pair in zip(_fields(stream), _fields(opened), strict=True)))

    def _add_audio(self, rows: _Rows, codes_KT: Tensor, speaking: bool) -> None:
        if codes_KT.ndim != 2 or codes_KT.shape[0] != self.num_codebooks or codes_KT.shape[1] == 0:
            raise ValueError(f"codes must be [{self.num_codebooks}, frames >= 1], not {list(codes_KT.shape)}")
        if int(codes_KT.min()) < 0 or int(codes_KT.max()) >= self.codebook_size:
            raise ValueError(f"codes must be 0..{self.codebook_size - 1}")
        opening, kind = (
            (tokens.AUDIO_OUT_BOS, Kind.AUDIO_OUT) if speaking else (tokens.AUDIO_BOS, Kind.AUDIO_IN)
        )
        rows.add_text(opening, target=speaking)
        rows.add_audio(delay(codes_KT, self.audio_bos, self.audio_eos), kind)
        if speaking:
            rows.audio_targets[-1] = delay_targets(codes_KT, self.audio_eos)
        rows.add_text(tokens.AUDIO_EOS, target=speaking)


class _Rows:
    """Token streams in the making."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.text_ids: list[Tensor] = []
        self.codes: list[Tensor] = []
        self.kinds: list[Tensor] = []
        self.text_targets: list[Tensor] = []
        self.audio_targets: list[Tensor] = []

    def add_text(self, text: str, target: bool) -> None:
        ids = torch.tensor(
            self.template.tokenizer.encode(text, add_special_tokens=False).ids, dtype=torch.long
        )
        books = self.template.num_codebooks
        self.text_ids.append(ids)
        self.codes.append(torch.zeros(len(ids), books, dtype=torch.long))
        self.kinds.append(torch.full((len(ids),), int(Kind.TEXT)))
        self.text_targets.append(ids if target else torch.full_like(ids, IGNORE))
        self.audio_targets.append(torch.full((len(ids), books), IGNORE))

    def add_audio(self, codes_FK: Tensor, kind: Kind) -> None:
        name = tokens.AUDIO_OUT if kind == Kind.AUDIO_OUT else tokens.AUDIO_IN
        token = self.template.tokenizer.encode(name, add_special_tokens=False).ids[0]
        rows = len(codes_FK)
        self.text_ids.append(torch.full((rows,), token))
        self.codes.append(codes_FK)
        self.kinds.append(torch.full((rows,), int(kind)))
        self.text_targets.append(torch.full((rows,), IGNORE))
        self.audio_targets.append(torch.full_like(codes_FK, IGNORE))

    def stream(self) -> TokenStream:
        lists = (self.text_ids, self.codes, self.kinds, self.text_targets, self.audio_targets)
        return TokenStream(*(torch.cat(parts) for parts in lists))


def _fields(stream: TokenStream) -> tuple[Tensor, ...]:
    return (
        stream.text_ids_S,
        stream.codes_SK,
        stream.kinds_S,
        stream.text_targets_S,
        stream.audio_targets_SK,
    )


def _header(role: str) -> str:
    return f"{tokens.START_HEADER}{role}{tokens.END_HEADER}\n\n"
