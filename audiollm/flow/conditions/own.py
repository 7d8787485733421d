"""Small encoders that are trained along with the model: words, and pictures at any rate.

Words become numbers by a vocabulary of the training texts; unknown words are spelled.

Shapes: R rows of all samples, C width, F pictures, S side of a picture in pixels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.data.packing import SegmentLayout
from audiollm.flow.model.packed import PackedModality
from audiollm.flow.model.rows import SampleRows
from audiollm.models.attention import attention_backend, sequence_attention
from audiollm.models.audio_encoder import sinusoids
from audiollm.products import Linear

_TOKEN = re.compile(r"[^\W\d_]+|\d|[^\w\s]")
_SECONDS = r"\s*(?:s|secs?|seconds?)\b"
_NUMBER = re.compile(
    rf"(?P<digits>\d+(?:\.\d+)?)(?P<unit>{_SECONDS}|(?=\s*(?:[-–]|to|and|until)\s*\d+(?:\.\d+)?{_SECONDS}))?",
    re.IGNORECASE,
)
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?;])\s+|\n+")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'-\"()/%"
UNKNOWN = "\ufffd"
NO_VALUE = -1.0
"""The value of a word that is no part of a number."""


class WordRow(NamedTuple):
    """A word as an encoder takes it."""

    word: int
    """The number of the word in the vocabulary."""
    value: float = NO_VALUE
    """The value of the number that the word is part of."""
    at_s: float = 0.0
    """The place in time: the number of seconds that stands nearest in the word's sentence, 0 where there is none."""


class Words:
    """A vocabulary: words of at least two occurrences, digits, punctuation, and letters for all else."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self._numbers = {word: number for number, word in enumerate(self.vocabulary)}
        if UNKNOWN not in self._numbers:
            raise ValueError(f"a vocabulary holds {UNKNOWN!r} for characters that it does not know")

    @classmethod
    def of(cls, texts: Iterable[str], max_words: int = 20_000) -> Words:
        """The vocabulary of these texts, the most frequent words first."""
        counts = Counter(token for text in texts for token in split_words(text))
        frequent = sorted((-count, word) for word, count in counts.items() if count > 1)
        letters = [UNKNOWN, *_LETTERS]
        return cls([*letters, *(word for _, word in frequent[:max_words] if word not in letters)])

    def rows(self, text: str) -> list[WordRow]:
        """The words of a text, at least one.

        "Rain. A dog barks at 2.5 s." has a row of rain and one of a full stop at 0 s, and all of the dog's at 2.5 s.
        """
        rows = [row for sentence in _BETWEEN_SENTENCES.split(text.lower()) for row in self._rows_of(sentence)]
        return rows or [WordRow(self._numbers[UNKNOWN])]

    def _rows_of(self, sentence: str) -> Iterator[WordRow]:
        numbers = list(_NUMBER.finditer(sentence))
        seconds = [number for number in numbers if number.group("unit") is not None]
        for match in _TOKEN.finditer(sentence):
            number = next(
                (candidate for candidate in numbers if _characters_between(match, candidate) < 0), None
            )
            value = NO_VALUE if number is None else float(number.group("digits"))
            nearest = min(seconds, key=partial(_characters_between, match), default=None)
            at_s = 0.0 if nearest is None else float(nearest.group("digits"))
            token = match.group()
            for piece in [token] if token in self._numbers else token:
                yield WordRow(self._numbers.get(piece, self._numbers[UNKNOWN]), value, at_s)


def split_words(text: str) -> list[str]:
    """Words in small letters, single digits, and punctuation marks."""
    return _TOKEN.findall(text.lower())


def _characters_between(word: re.Match[str], number: re.Match[str]) -> int:
    """Characters between a word and the digits of a number; below 0 for a word that is part of it."""
    return max(number.start("digits") - word.end(), word.start() - number.end("digits"))


MAX_WORDS = 512
"""Words of a text that are encoded; the rest is cut."""
_HEAD = 32
_VALUE_FREQUENCIES = tuple(24.0 * 0.5**octave for octave in range(9))
"""Radians per unit of a number in a text, which is mostly a time in seconds: periods of 0.26 to 67."""


class WordEncoder(nn.Module):
    """A transformer over the words of a text, each of which sees all."""

    def __init__(self, num_words: int, width: int, layers: int = 2) -> None:
        super().__init__()
        if width % _HEAD:
            raise ValueError(f"the width of a word encoder is a multiple of {_HEAD}, not {width}")
        self.embedding = nn.Embedding(num_words, width)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.value = Linear(2 * len(_VALUE_FREQUENCIES), width, bias=False)
        self.layers = nn.ModuleList(_WordLayer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("positions", sinusoids(MAX_WORDS, width), persistent=False)
        self.positions: Tensor

    def forward(self, packed: PackedModality) -> Tensor:
        """`[R, C]` from rows of words (`WordRow`), `[R, 3]`."""
        rows, (word_R, value_R, _) = packed.rows, packed.values_RC.unbind(1)
        x_RC = self.embedding(word_R.long()) + self.positions[rows.place_R % MAX_WORDS]
        x_RC = x_RC + self.value(_waves_of(value_R).to(x_RC.dtype))
        layout = SegmentLayout.in_order([length for length in rows.lengths if length], x_RC.device)
        for layer in self.layers:
            x_RC = layer(x_RC, layout)
        out_RC: Tensor = self.norm(x_RC)
        return out_RC

    def times_of(self, packed: PackedModality) -> Tensor:
        """Seconds of each row (`WordRow.at_s`)."""
        return packed.values_RC[:, 2].float()


class _WordLayer(nn.Module):
    """Norm and attention, norm and feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_RC: Tensor, layout: SegmentLayout) -> Tensor:
        query, key, value = self.qkv(self.attention_norm(x_RC)).unflatten(-1, (3, -1, _HEAD)).unbind(1)
        backend = attention_backend(query.device, query.dtype, _HEAD).name
        attended = sequence_attention(query, key, value, layout, backend=backend, causal=False)
        x_RC = x_RC + self.out(attended.flatten(1).to(x_RC.dtype))
        fed_RC: Tensor = x_RC + self.down(functional.gelu(self.up(self.ffn_norm(x_RC))))
        return fed_RC


class PictureEncoder(nn.Module):
    """Strided convolutions over each picture and its difference from the one before it, then a linear layer."""

    def __init__(self, side: int, width: int, channels: int = 16) -> None:
        super().__init__()
        if side % 16:
            raise ValueError(f"pictures have sides that are multiples of 16 pixels, not {side}")
        self.side = side
        self.convolutions = nn.Sequential(
            nn.Conv2d(6, channels, 4, 4),
            nn.SiLU(),
            nn.Conv2d(channels, 2 * channels, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(2 * channels, 4 * channels, 3, 2, 1),
            nn.SiLU(),
        )
        self.linear = Linear(4 * channels * (side // 16) ** 2, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, packed: PackedModality) -> Tensor:
        """`[R, C]` from pictures `[R, 3 * S * S]` of values from 0 to 1."""
        dtype = self.linear.weight.dtype
        now_F = packed.values_RC.to(dtype).unflatten(1, (3, self.side, self.side)) * 2 - 1
        change_F = torch.where(_is_first(packed.rows), 0, now_F - now_F.roll(1, 0))
        features = self.convolutions(torch.cat([now_F, change_F], dim=1)).flatten(1)
        out_RC: Tensor = self.norm(self.linear(features))
        return out_RC


def _waves_of(value_R: Tensor) -> Tensor:
    """Sines and cosines of the values, `[R, 2 * frequencies]`; 0 for words without one."""
    angles = value_R.float()[:, None] * torch.tensor(_VALUE_FREQUENCIES, device=value_R.device)
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.where(value_R[:, None] == NO_VALUE, 0, waves)


def _is_first(rows: SampleRows) -> Tensor:
    """bool `[R, 1, 1, 1]`: whether a row is the first of its sample."""
    return (rows.place_R == 0)[:, None, None, None]
