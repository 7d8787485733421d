"""Long texts: chunks that a model can say, and their sound joined with pauses and without clicks.

Shapes: N samples.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LETTERS_PER_SECOND, HAN_PER_SECOND, KANA_PER_SECOND = 14.0, 4.0, 6.5
"""Rates of fluent reading, with spaces and punctuation. They only decide where a text is cut, not the model's pace."""
SENTENCE_PAUSE_S, CLAUSE_PAUSE_S, PARAGRAPH_PAUSE_S = 0.3, 0.15, 0.6
QUIET_DB = -45.0
"""Level, relative to the chunk's loudest 10 ms, below which a chunk's ends count as silence."""
KEPT_SILENCE_S = 0.05
FADE_S = 0.01

_ABBREVIATION = re.compile(
    r"(mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|inc|ltd|co|no|vol|fig|pp?|mt|gen|col|sgt|capt|lt|gov|rev|hon|[a-z]([.][a-z])*)"
)
_SENTENCE_END = re.compile(r"(?:[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]+[”’」』）]*)\s*")
_CLAUSE_END = re.compile(r"(?:[,;:—–]+(?=\s|$)|[，；：、]+)\s*")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_KANA = re.compile(r"[\u3041-\u30ff]")
_UNBROKEN = re.compile(r"</?\w+>|\[[A-Za-z][\w ]*\]")
_WORD = re.compile(r"(?:\[[A-Za-z][\w ]*\]|\S)+")


@dataclass(frozen=True)
class Chunk:
    """A part of a text that is said in one go."""

    text: str
    pause_s: float
    """Silence after the chunk; 0 after the last one and within a phrase."""


def spoken_seconds(text: str) -> float:
    """Estimate the seconds that a text takes to say."""
    letters = _UNBROKEN.sub("", text)
    han, kana = (len(script.findall(letters)) for script in (_HAN, _KANA))
    return han / HAN_PER_SECOND + kana / KANA_PER_SECOND + (len(letters) - han - kana) / LETTERS_PER_SECOND


def split_text(text: str, chunk_s: float) -> list[Chunk]:
    """Whole sentences, as many in a chunk as fit into `chunk_s`; a sentence that is longer is cut at its clauses,
    then between words, then anywhere. A blank line always ends a chunk. Nothing but white space is lost.

    Args:
        chunk_s: the longest that a chunk should take to say, by `spoken_seconds`.
    """
    chunks: list[Chunk] = []
    for paragraph in re.split(r"\n\s*\n", text):
        pieces = [
            piece
            for sentence in split_sentences(" ".join(paragraph.split()))
            for piece in _split_sentence(sentence, chunk_s)
        ]
        packed = _packed(pieces, chunk_s)
        if packed and chunks:
            chunks[-1] = Chunk(chunks[-1].text, PARAGRAPH_PAUSE_S)
        chunks += [Chunk(piece, _pause_s(piece)) for piece in packed]
    if chunks:
        chunks[-1] = Chunk(chunks[-1].text, 0.0)
    return chunks


def split_sentences(text: str) -> list[str]:
    """Sentences of a text, each with its punctuation; a full stop after an abbreviation ends none."""
    sentences: list[str] = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        word = text[start : match.start()].rsplit(" ", 1)[-1].lower().strip("(\"'“‘")
        stop = match[0].strip()
        if stop == "." and _ABBREVIATION.fullmatch(word) and match.end() < len(text):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    return [sentence for sentence in [*sentences, text[start:].strip()] if sentence]


def trim(samples_1N: Tensor, sample_rate: int, kept_s: float = KEPT_SILENCE_S) -> Tensor:
    """Cut the silence at both ends down to `kept_s`, with short fades; a silent recording stays whole."""
    block = max(1, round(0.01 * sample_rate))
    num_samples = samples_1N.shape[1] // block * block
    if num_samples == 0:
        return samples_1N
    power_B = samples_1N[0, :num_samples].double().square().unflatten(0, (-1, block)).mean(dim=1)
    loud = (power_B > power_B.max() * 10 ** (QUIET_DB / 10)).nonzero()[:, 0]
    if len(loud) == 0:
        return samples_1N
    margin = round(kept_s * sample_rate)
    start = max(0, int(loud[0]) * block - margin)
    end = min(samples_1N.shape[1], (int(loud[-1]) + 1) * block + margin)
    return fade(samples_1N[:, start:end], sample_rate)


def fade_samples(sample_rate: int) -> int:
    return round(FADE_S * sample_rate)


def fade(samples_1N: Tensor, sample_rate: int, at_start: bool = True, at_end: bool = True) -> Tensor:
    """Apply raised-cosine fades of `FADE_S` at the ends."""
    length = min(fade_samples(sample_rate), samples_1N.shape[1] // 2)
    if length == 0:
        return samples_1N
    ramp_N = _rise(length).to(samples_1N)
    faded_1N = samples_1N.clone()
    if at_start:
        faded_1N[:, :length] *= ramp_N
    if at_end:
        faded_1N[:, -length:] *= ramp_N.flip(0)
    return faded_1N


def join_pieces(pieces: Sequence[Tensor], pauses_s: Sequence[float], sample_rate: int) -> Tensor:
    """The pieces `[1, N]` one after the other: trimmed, with a pause behind each, cross-faded where it is 0.

    Args:
        pauses_s: one a piece; the last one is silence at the end.
    """
    joined_1N = torch.zeros(1, 0)
    overlap = 0
    for piece_1N, pause_s in zip(pieces, pauses_s, strict=True):
        trimmed_1N = trim(piece_1N.cpu(), sample_rate)
        overlap = min(overlap, joined_1N.shape[1], trimmed_1N.shape[1])
        if overlap:  # both ends are faded already: overlapped, the fades add up to one
            joined_1N[:, -overlap:] += trimmed_1N[:, :overlap]
        silence_1N = torch.zeros(1, round(pause_s * sample_rate))
        joined_1N = torch.cat([joined_1N, trimmed_1N[:, overlap:], silence_1N], dim=1)
        overlap = 0 if pause_s else fade_samples(sample_rate)
    return joined_1N


# Private


def _rise(length: int) -> Tensor:
    return 0.5 - 0.5 * torch.cos(torch.pi * (torch.arange(length) + 0.5) / length)


def _split_sentence(sentence: str, chunk_s: float) -> list[str]:
    if spoken_seconds(sentence) <= chunk_s:
        return [sentence]
    clauses, start = [], 0
    for match in _CLAUSE_END.finditer(sentence):
        clauses.append(sentence[start : match.end()].strip())
        start = match.end()
    clauses = [clause for clause in [*clauses, sentence[start:].strip()] if clause]
    return [
        piece
        for clause in _packed(clauses, chunk_s)
        for piece in (
            [clause] if spoken_seconds(clause) <= chunk_s else _packed(_split_words(clause, chunk_s), chunk_s)
        )
    ]


def _split_words(clause: str, chunk_s: float) -> list[str]:
    """Words; one that is itself too long (or a script without spaces) in pieces of characters."""
    words: list[str] = []
    for word in _WORD.findall(clause):
        while spoken_seconds(word) > chunk_s and not _UNBROKEN.search(word):
            fitting = max(1, _letters_within(word, chunk_s))
            words.append(word[:fitting])
            word = word[fitting:]
        if word:
            words.append(word)
    return words


def _letters_within(word: str, chunk_s: float) -> int:
    """Number of first letters of a text that can be said in a time."""
    max_letters = min(len(word), int(chunk_s * LETTERS_PER_SECOND))
    return bisect_right(
        range(1, max_letters + 1), chunk_s, key=lambda letters: spoken_seconds(word[:letters])
    )


def _packed(pieces: Sequence[str], chunk_s: float) -> list[str]:
    packed: list[str] = []
    for piece in pieces:
        together = _join_texts(packed[-1], piece) if packed else piece
        if packed and spoken_seconds(together) <= chunk_s:
            packed[-1] = together
        else:
            packed.append(piece)
    return packed


def _join_texts(first: str, second: str) -> str:
    """Join two texts with a space, but without one after Chinese and Japanese characters and punctuation."""
    return first + ("" if re.search(r"[\u2026\u3000-\u9fff\uff00-\uffef]$", first) else " ") + second


def _pause_s(text: str) -> float:
    if _SENTENCE_END.search(text[-3:]):
        return SENTENCE_PAUSE_S
    return CLAUSE_PAUSE_S if _CLAUSE_END.search(text[-2:]) else 0.0
