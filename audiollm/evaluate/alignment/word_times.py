"""When each word of a text is said, and how well the sound bears it out.

By Pocketsphinx (English, nothing to download) or by a CTC model given by path (Kürzinger et al., CTC-Segmentation,
arXiv 2007.09127; here torchaudio's `forced_align`).

Shapes: N samples, T frames, V tokens of the vocabulary, L tokens of the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from audiollm.evaluate.alignment.written_words import WrittenWord, written_words

if TYPE_CHECKING:
    from torch import Tensor

    from audiollm.models.recognition.ctc import CtcModel

POCKETSPHINX_RATE = 16000


class Aligned(NamedTuple):
    """A word's time in seconds; `score` in (0, 1]: how well it fits."""

    start_s: float
    end_s: float
    score: float


class WordSpan(NamedTuple):
    """A word as it is written, its time in seconds from the start of the sound, and how well it fits; None: its time is
    what its neighbours leave."""

    word: str
    start_s: float
    end_s: float
    score: float | None


class WordAligner(Protocol):
    """What places words in a sound."""

    sample_rate: int

    def spells(self, word: WrittenWord, language: str) -> bool:
        """Whether it knows how the word sounds."""

    def align(
        self, samples_N: NDArray[np.float32], words: Sequence[WrittenWord], spelled: Sequence[bool]
    ) -> list[Aligned | None]:
        """Align each word; None for words that are not spelled. An empty list: the text does not fit the sound."""


def align_text(
    aligner: WordAligner, samples_N: NDArray[np.float32], text: str, language: str
) -> list[WordSpan] | None:
    """Place the words of a text, in order and inside the sound.

    Args:
        samples_N: at the aligner's rate.

    Returns:
        All words as they are written; none where the aligner knows no word of the text. None: the text does not fit
        into the sound (it is too long for it, or there is no path through it).
    """
    words = written_words(text, language)
    spelled = [aligner.spells(word, language) for word in words]
    if not any(spelled):
        return []
    aligned = aligner.align(samples_N.copy(), words, spelled)
    if not aligned:
        return None
    spans = filled_in(words, aligned, len(samples_N) / aligner.sample_rate)
    return [WordSpan(word.surface, *span) for word, span in zip(words, spans, strict=True)]


def filled_in(
    words: Sequence[WrittenWord], aligned_words: Sequence[Aligned | None], duration_s: float
) -> list[tuple[float, float, float | None]]:
    """Start, end and score of every word, in order and inside the clip.

    Args:
        aligned_words: of each word; None for those that could not be aligned: they share what is between their
            neighbours by the number of their letters.
    """
    spans: list[tuple[float, float, float | None]] = []
    at = 0.0
    places = list(zip(words, aligned_words, strict=True))
    for is_known, group in groupby(enumerate(places), key=lambda place: place[1][1] is not None):
        members = list(group)
        if is_known:
            for _, (_, aligned) in members:
                assert aligned is not None
                start_s = min(max(aligned.start_s, at), duration_s)
                at = min(max(aligned.end_s, start_s), duration_s)
                spans.append((start_s, at, aligned.score))
            continue
        following = aligned_words[members[-1][0] + 1] if members[-1][0] + 1 < len(aligned_words) else None
        until = max(following.start_s if following else duration_s, at)
        until = min(until, duration_s)
        letters = [sum(map(len, word.forms)) for _, (word, _) in members]
        first, length = at, until - at
        for place, count in enumerate(letters):
            start_s = at
            at = first + length * sum(letters[: place + 1]) / sum(letters) if count else at
            spans.append((start_s, min(at, duration_s), None))
    return spans


class PocketsphinxAligner:
    """English words that its dictionary has."""

    sample_rate = POCKETSPHINX_RATE

    def __init__(self) -> None:
        from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer

        self._recognizer = PocketsphinxRecognizer()

    def spells(self, word: WrittenWord, language: str) -> bool:
        return language == "en" and all(self._recognizer.knows(form) for form in word.forms)

    def align(
        self, samples_N: NDArray[np.float32], words: Sequence[WrittenWord], spelled: Sequence[bool]
    ) -> list[Aligned | None]:
        import torch

        forms = [
            form for word, is_spelled in zip(words, spelled, strict=True) if is_spelled for form in word.forms
        ]
        form_spans = self._recognizer.align(torch.from_numpy(samples_N)[None], self.sample_rate, forms)
        if not form_spans:
            return []
        remaining_spans = iter(form_spans)
        aligned: list[Aligned | None] = []
        for word, is_spelled in zip(words, spelled, strict=True):
            word_spans = [next(remaining_spans) for _ in word.forms] if is_spelled else []
            lengths = [max(span.end_s - span.start_s, 1e-3) for span in word_spans]
            score = sum(a * span.score for a, span in zip(lengths, word_spans, strict=True)) / (
                sum(lengths) or 1.0
            )
            aligned.append(
                Aligned(word_spans[0].start_s, word_spans[-1].end_s, score) if word_spans else None
            )
        return aligned


class CtcAligner:
    """Words in letters, with the vocabulary's delimiter between them. A word that cannot be spelled is a wildcard that
    any sound fits, so that its neighbours do not have to stretch over it (as torchaudio's `<star>`)."""

    def __init__(self, model: CtcModel) -> None:
        self._model = model
        self.sample_rate = model.sample_rate
        special = set(model.tokenizer.all_special_tokens) - {model.delimiter}
        self._letters = {
            token: index for token, index in model.tokenizer.get_vocab().items() if token not in special
        }

    def spells(self, word: WrittenWord, language: str) -> bool:
        return self._spelling(word) is not None

    def align(
        self, samples_N: NDArray[np.float32], words: Sequence[WrittenWord], spelled: Sequence[bool]
    ) -> list[Aligned | None]:
        (emissions,) = self._model.emissions([samples_N])
        star = emissions.log_probs_TV.shape[1]
        delimiter = self._letters.get(self._model.delimiter or "")
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        for is_spelled, group in groupby(zip(words, spelled, strict=True), key=lambda pair: pair[1]):
            for spelling in [self._spelling(word) or [] for word, _ in group] if is_spelled else [[star]]:
                if tokens and delimiter is not None:
                    tokens.append(delimiter)
                spans.append((len(tokens), len(tokens) + len(spelling)))
                tokens += spelling
        aligned = ctc_spans(emissions.log_probs_TV, tokens, self._model.blank)
        if not aligned:
            return []
        known_words = iter(
            [_join_token_spans(aligned[a:b], emissions.times_T) for a, b in spans if tokens[a] != star]
        )
        return [next(known_words) if is_spelled else None for is_spelled in spelled]

    def _spelling(self, word: WrittenWord) -> list[int] | None:
        """The letters of all its forms, as they are or in upper or lower case; an apostrophe may be lacking."""
        spelling = []
        for letter in "".join(word.forms):
            cases = [case for case in (letter, letter.upper(), letter.lower()) if case in self._letters]
            if not cases and letter != "'":
                return None
            spelling += [self._letters[case] for case in cases[:1]]
        return spelling or None


class TokenSpan(NamedTuple):
    """Frames `start` to `end` (exclusive) of a token, and the mean probability over them."""

    start: int
    end: int
    probability: float


def ctc_spans(log_probs_TV: Tensor, tokens_L: Sequence[int], blank: int) -> list[TokenSpan]:
    """The frames of each token on the likeliest path; empty where the text is too long for the frames.

    Args:
        tokens_L: a token `V` is a wildcard, which fits every frame with probability 1.
    """
    import torch
    from torch.nn.functional import pad
    from torchaudio.functional import forced_align

    repeats = sum(a == b for a, b in pairwise(tokens_L))
    if not tokens_L or len(tokens_L) + repeats > len(log_probs_TV):
        return []
    scores_1TV = pad(log_probs_TV, (0, 1))[None]
    path_1T, scores_1T = forced_align(
        scores_1TV, torch.tensor([list(tokens_L)], dtype=torch.int32), blank=blank
    )
    path, scores = path_1T[0].tolist(), scores_1T[0].exp().tolist()
    spans: list[TokenSpan] = []
    start = 0
    for frame in range(1, len(path) + 1):
        if frame < len(path) and path[frame] == path[start]:
            continue
        if path[start] != blank:
            spans.append(TokenSpan(start, frame, sum(scores[start:frame]) / (frame - start)))
        start = frame
    return spans


def _join_token_spans(spans: Sequence[TokenSpan], times_T: NDArray[np.float64]) -> Aligned:
    frames = [span.end - span.start for span in spans]
    score = sum(count * span.probability for count, span in zip(frames, spans, strict=True)) / sum(frames)
    return Aligned(
        float(times_T[spans[0].start]), float(times_T[spans[-1].end]), score if math.isfinite(score) else 0.0
    )
