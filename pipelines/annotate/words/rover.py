"""ROVER: several recognizers' texts of the same speech, aligned word by word and put to the vote.

Fiscus, "A post-processing system to yield reduced word error rates: Recognizer Output Voting Error Reduction", ASRU
1997. Three things are done otherwise. A text is aligned with all that are already in the network, by the sum of the
edits to each (not by the best of them), fewest edits first, and among equals so that words spelled alike meet. The
first text is the one with the fewest edits to the others, and the nearest follow: the order in which they are given
changes nothing of the network. It decides only between candidates that are equal in votes, confidence, and the
agreement of those that propose them.

Shapes: S slots of the network, T tokens of a text, V distinct tokens, N texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from audiollm.data.text.languages import language_of
from audiollm.evaluate.alignment.written_words import WrittenWord, has_spaces, matched, written_words

MAX_TOKENS = 4000
"""Most tokens of a text: the alignment's memory grows with the square."""
_EDIT_COST, _UNLIKENESS_COST, _UNLIKENESS_STEPS = 1_000_000, 1, 100
"""Cost of an edit; extra cost of a substitution per unit of unlikeness; resolution of the unlikeness."""


class Hypothesis(NamedTuple):
    """Text and confidences of one recognizer.

    `confidences`: (word, confidence) in order; the words may be cut differently from the text's; may be empty.
    """

    text: str
    confidences: Sequence[tuple[str, float | None]] = ()


@dataclass(frozen=True)
class Confidences:
    """Weighting of confidences beside votes: `alpha * share + (1 - alpha) * confidence` (Fiscus, equation 1).

    Args:
        of: the mean over those that say a word, or the largest.
        alpha: the part of the votes; 1: votes alone, and confidences only where they tie.
        null: the confidence of saying nothing.
    """

    of: Literal["average", "maximum"] = "average"
    alpha: float = 0.8
    null: float = 0.5


class VotedWord(NamedTuple):
    """A word of the vote. `share`: of the texts that have it here; `confidence`: their mean, or None."""

    word: str
    share: float
    confidence: float | None


@dataclass(frozen=True)
class VotedText:
    """
    Args:
        pairwise_wer: see `pairwise_error_rate`; None of a single text.
        vote_share: the mean over all slots, with those where nothing won; None of a single text, 1 where all are empty.
        unit: in which texts were compared.
    """

    text: str
    words: list[VotedWord]
    pairwise_wer: float | None
    vote_share: float | None
    unit: Literal["word", "character"]


def vote(
    hypotheses: Sequence[Hypothesis], language: str | None = None, confidences: Confidences | None = None
) -> VotedText:
    """Vote for the text on which most recognizers agree.

    Words are compared in their spoken form without case and punctuation (`written_words`), and each is written as by
    the best of those that propose it: who writes upper and lower case before who does not, then who agrees most with
    the others.

    Args:
        hypotheses: at least one.
        language: `en`, `zh`, ...; None: by the script. Those without spaces are voted by characters.
        confidences: None: they are not looked at. A missing one counts as the mean of those that are there.

    Raises:
        ValueError: no text, or one of more than `MAX_TOKENS` words.
    """
    if not hypotheses:
        raise ValueError("no texts to vote on")
    language = language or language_of(" ".join(hypothesis.text for hypothesis in hypotheses))
    unit: Literal["word", "character"] = "word" if has_spaces(language) else "character"
    texts = [_tokens(hypothesis, language) for hypothesis in hypotheses]
    longest = max(len(text.tokens) for text in texts)
    if longest > MAX_TOKENS:
        raise ValueError(f"{longest} {unit}s in one segment, at most {MAX_TOKENS}: cut it into shorter ones")
    forms = [[token.form for token in text.tokens] for text in texts]
    network = align(forms)
    ranks = _ranks(network, texts, confidences is not None)
    winners = [_winner(slot, texts, ranks, confidences) for slot in network]
    words = _written_out(winners, network, texts, ranks, has_spaces(language))
    several = len(hypotheses) > 1
    shares = [winner.share for winner in winners]
    return VotedText(
        text="".join(" " * word.spaced + word.word for word in words).strip(),
        words=[VotedWord(word.word, word.share, word.confidence) for word in words],
        pairwise_wer=pairwise_error_rate(forms) if several else None,
        vote_share=(sum(shares) / len(shares) if shares else 1.0) if several else None,
        unit=unit,
    )


def align(texts: Sequence[Sequence[str]]) -> list[tuple[int | None, ...]]:
    """Build the word transition network of N token sequences.

    Returns:
        its slots in order; each has, for every text, the index of its token there, or None (the null arc). Tokens of a
        text keep their order, each is in one slot, and no slot is without any. For two texts the number of slots in
        which they differ is the fewest edits (Levenshtein).
    """
    network: list[tuple[int | None, ...]] = []
    placed: list[int] = []
    for text in _order_texts(texts):
        network = _add_text(network, [texts[index] for index in placed], texts[text])
        placed.append(text)
    back = [placed.index(text) for text in range(len(texts))]
    return [tuple(slot[place] for place in back) for slot in network]


def pairwise_error_rate(texts: Sequence[Sequence[str]]) -> float:
    """The mean over all ordered pairs of texts of the edits between the two over the tokens of the first.

    As jiwer counts it: that of two empty texts is 0, and of an empty first and another text 1.
    """
    from rapidfuzz.distance import Levenshtein

    rates = []
    for first, reference in enumerate(texts):
        for second, hypothesis in enumerate(texts):
            if first != second and reference:
                rates.append(Levenshtein.distance(reference, hypothesis) / len(reference))
            elif first != second:
                rates.append(1.0 if hypothesis else 0.0)
    return sum(rates) / len(rates)


# ------------------------------------------------------------------------------------------------ tokens


class _Token(NamedTuple):
    form: str
    confidence: float | None
    word: int
    """Index of the written word that it belongs to."""


@dataclass(frozen=True)
class _Text:
    words: list[WrittenWord]
    tokens: list[_Token]
    first: list[int] = field(default_factory=list)
    """Index of the first token of each written word."""

    @property
    def manner(self) -> int:
        """0: upper and lower case; 1: without upper case; 2: without lower case."""
        text = "".join(word.surface for word in self.words)
        return 0 if text != text.lower() and text != text.upper() else int(text != text.lower()) + 1


def _tokens(hypothesis: Hypothesis, language: str) -> _Text:
    words = written_words(hypothesis.text, language)
    forms = [form for word in words for form in word.forms]
    sure = _confidences(hypothesis, forms, language)
    text = _Text(words, [])
    for index, word in enumerate(words):
        text.first.append(len(text.tokens))
        for form in word.forms:
            text.tokens.append(_Token(form, sure[len(text.tokens)], index))
    return text


def _confidences(hypothesis: Hypothesis, forms: Sequence[str], language: str) -> list[float | None]:
    """Return each token's confidence: the mean of the words that it was cut from."""
    confidences: list[float | None] = [None] * len(forms)
    if not hypothesis.confidences or not forms:
        return confidences
    below = [
        [form for word in written_words(surface, language) for form in word.forms]
        for surface, _ in hypothesis.confidences
    ]
    for (first, last), (start, end) in matched(below, forms):
        values = [
            value
            for _, value in hypothesis.confidences[first:last]
            if value is not None and math.isfinite(value)
        ]
        mean = sum(min(max(value, 0.0), 1.0) for value in values) / len(values) if values else None
        confidences[start:end] = [mean] * (end - start)
    return confidences


# --------------------------------------------------------------------------------------------- alignment


def _order_texts(texts: Sequence[Sequence[str]]) -> list[int]:
    """Order the texts: the one with the fewest edits to all others, then always the one nearest to those before it."""
    from rapidfuzz.distance import Levenshtein

    edits = [[Levenshtein.distance(reference, hypothesis) for hypothesis in texts] for reference in texts]
    remaining = set(range(len(texts)))
    order: list[int] = []
    while remaining:
        near = order or range(len(texts))
        best = min(
            remaining,
            key=lambda text: (sum(edits[text][placed] for placed in near), tuple(texts[text]), text),
        )
        order.append(best)
        remaining.remove(best)
    return order


def _add_text(
    network: Sequence[tuple[int | None, ...]], inside: Sequence[Sequence[str]], text: Sequence[str]
) -> list[tuple[int | None, ...]]:
    """Add a text to the network, as a new last entry in each slot."""
    if not inside:
        return [(index,) for index in range(len(text))]
    placed_ST, skipped_S = _costs(network, inside, text)
    inserted = _EDIT_COST * len(inside)
    total = _totals(placed_ST, skipped_S, inserted)
    slots: list[tuple[int | None, ...]] = []
    slot, token = len(network), len(text)
    while slot or token:
        here = total[slot, token]
        if slot and token and here == total[slot - 1, token - 1] + placed_ST[slot - 1, token - 1]:
            slot, token = slot - 1, token - 1
            slots.append((*network[slot], token))
        elif slot and here == total[slot - 1, token] + skipped_S[slot - 1]:
            slot -= 1
            slots.append((*network[slot], None))
        else:
            token -= 1
            slots.append((*(None for _ in inside), token))
    return slots[::-1]


def _costs(
    network: Sequence[tuple[int | None, ...]], inside: Sequence[Sequence[str]], text: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Costs of putting each token into each slot, `[S, T]`, and of skipping it, `[S]`: sums over the texts inside."""
    from rapidfuzz.distance import Levenshtein

    form_indices = {
        form: index for index, form in enumerate(dict.fromkeys(form for tokens in inside for form in tokens))
    }
    new = {form: index for index, form in enumerate(dict.fromkeys(text))}
    count_SV = np.zeros((len(network), len(form_indices)), np.int64)
    for place, slot in enumerate(network):
        for tokens, index in zip(inside, slot, strict=True):
            if index is not None:
                count_SV[place, form_indices[tokens[index]]] += 1
    unlike_VV = np.array(
        [
            [
                0
                if a == b
                else _EDIT_COST
                + _UNLIKENESS_COST
                + round(_UNLIKENESS_STEPS * Levenshtein.normalized_distance(a, b))
                for b in new
            ]
            for a in form_indices
        ],
        np.int64,
    ).reshape(len(form_indices), len(new))
    words_S = count_SV.sum(axis=1)
    null_S = (len(inside) - words_S) * _EDIT_COST
    placed_SV = count_SV @ unlike_VV + null_S[:, None]
    return placed_SV[:, [new[form] for form in text]], words_S * _EDIT_COST


def _totals(placed_ST: NDArray[np.int64], skipped_S: NDArray[np.int64], inserted: int) -> NDArray[np.int64]:
    """The least cost of the first s slots and t tokens, `[S + 1, T + 1]`."""
    num_slots, num_tokens = placed_ST.shape
    ramp_T = inserted * np.arange(num_tokens + 1)
    total = np.empty((num_slots + 1, num_tokens + 1), np.int64)
    total[0] = ramp_T
    for slot in range(num_slots):
        row_T = total[slot] + skipped_S[slot]
        row_T[1:] = np.minimum(row_T[1:], total[slot, :-1] + placed_ST[slot])
        total[slot + 1] = np.minimum.accumulate(row_T - ramp_T) + ramp_T  # insertions, of one price each
    return total


# -------------------------------------------------------------------------------------------------- vote


class _Winner(NamedTuple):
    form: str | None
    share: float
    confidence: float | None


class _Out(NamedTuple):
    word: str
    share: float
    confidence: float | None
    spaced: bool


def _ranks(
    network: Sequence[tuple[int | None, ...]], texts: Sequence[_Text], use_confidences: bool
) -> list[int]:
    """Rank the texts for tie-breaking: by agreement, confidence, order."""
    agreed = [0] * len(texts)
    for slot in network:
        proposals = [_form(text, index) for text, index in zip(texts, slot, strict=True)]
        for place, form in enumerate(proposals):
            agreed[place] += proposals.count(form)
    sure = [
        _mean([token.confidence for token in text.tokens]) or 0.0 if use_confidences else 0.0
        for text in texts
    ]
    best = sorted(range(len(texts)), key=lambda text: (-agreed[text], -sure[text], text))
    return [best.index(text) for text in range(len(texts))]


def _winner(
    slot: tuple[int | None, ...],
    texts: Sequence[_Text],
    ranks: Sequence[int],
    confidences: Confidences | None,
) -> _Winner:
    candidates: dict[str | None, list[int]] = {}
    for text, index in enumerate(slot):
        candidates.setdefault(_form(texts[text], index), []).append(text)
    sure = {form: [_confidence(texts[text], slot[text]) for text in by] for form, by in candidates.items()}
    mean = _mean([value for values in sure.values() for value in values])

    def merit(form: str | None) -> tuple[float, int, float, int]:
        by = candidates[form]
        share, trust = len(by) / len(slot), 0.0
        if confidences is not None and mean is not None:
            trust = confidences.null if form is None else _pooled(sure[form], mean, confidences.of)
            share = confidences.alpha * share + (1 - confidences.alpha) * trust
        return round(share, 9), len(by), round(trust, 9), -min(ranks[text] for text in by)

    best = max(candidates, key=merit)
    return _Winner(best, len(candidates[best]) / len(slot), _mean(sure[best]))


def _pooled(values: Sequence[float | None], missing: float, of: str) -> float:
    filled = [missing if value is None else value for value in values]
    return max(filled) if of == "maximum" else sum(filled) / len(filled)


def _written_out(
    winners: Sequence[_Winner],
    network: Sequence[tuple[int | None, ...]],
    texts: Sequence[_Text],
    ranks: Sequence[int],
    spaces: bool,
) -> list[_Out]:
    """Write the winners out; a word of several forms ("$5") only where all of them won in a row."""
    best_first = sorted(range(len(texts)), key=lambda text: (texts[text].manner, ranks[text]))
    won = [place for place, winner in enumerate(winners) if winner.form is not None]
    out: list[_Out] = []
    at = 0
    while at < len(won):
        surface, spaced, length = winners[won[at]].form or "", spaces, 1
        for text in best_first:
            word = _won_whole(
                texts[text], [(network[place][text], winners[place].form) for place in won[at:]]
            )
            if word is not None:
                surface, spaced, length = word.surface, word.spaced, len(word.forms)
                break
        of_it = [winners[place] for place in won[at : at + length]]
        sure = _mean([winner.confidence for winner in of_it])
        out.append(_Out(surface, min(winner.share for winner in of_it), sure, spaced))
        at += length
    return out


def _won_whole(text: _Text, ahead: Sequence[tuple[int | None, str | None]]) -> WrittenWord | None:
    """The written word of a text that begins at the first winner, if all its forms are the winners from there on.

    Args:
        ahead: of each winner to come, the text's token in its slot, and the winning form.
    """
    index = ahead[0][0]
    if index is None or text.first[text.tokens[index].word] != index:
        return None
    word = text.words[text.tokens[index].word]
    expected = [(index + place, form) for place, form in enumerate(word.forms)]
    return word if list(ahead[: len(expected)]) == expected else None


def _form(text: _Text, index: int | None) -> str | None:
    return None if index is None else text.tokens[index].form


def _confidence(text: _Text, index: int | None) -> float | None:
    return None if index is None else text.tokens[index].confidence


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
