"""A text as two layers: the words as they are written, and under each of them the forms in which texts are compared.

`"He paid $5, then left."` is `He | paid | $5, | then | left.` above `he | paid | five dollars | then | left`. What
votes and what is aligned are the forms; what is kept is what stands above them.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

from audiollm.data.text.forms import recognition_form
from audiollm.evaluate.report.text_errors import CHARACTER_LANGUAGES, choose_form


class WrittenWord(NamedTuple):
    """One written word, or several that are said only together; in languages without spaces, a character."""

    surface: str
    forms: tuple[str, ...]
    spaced: bool
    """Whether there is a space before it."""


def has_spaces(language: str) -> bool:
    """Whether the language is written with spaces between words; otherwise characters are compared."""
    return language not in CHARACTER_LANGUAGES


def written_words(text: str, language: str) -> list[WrittenWord]:
    """The text's words and the forms of each: `comparison_form(text)`, cut where the two texts agree.

    Every form belongs to exactly one written word, and all together, in order, are the form of the text. Punctuation
    that stands alone goes with the word before it.

    Args:
        language: `en`, `zh`, ...; see `text_errors.CHARACTER_LANGUAGES` for those taken by characters.
    """
    forms = choose_form("spoken", language).apply(text).split()
    if not forms:
        return []
    pieces = _split_pieces(text, has_spaces(language))
    below = [_forms_of(piece.surface, language) for piece in pieces]
    return [
        WrittenWord(_join_pieces(pieces[first:last]), tuple(forms[start:end]), pieces[first].spaced)
        for (first, last), (start, end) in matched(below, forms)
    ]


def matched(
    below: Sequence[Sequence[str]], forms: Sequence[str]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of spans, of words and of `forms`, that cover both: the shortest that the equal forms allow.

    Args:
        below: the forms of each word alone, which need not be those of the whole text.
        forms: of the whole text, at least one.

    Returns:
        `((first word, last + 1), (first form, last + 1))`; no span of forms is empty.
    """
    flat = [form for word in below for form in word]
    starts = [0]
    for word in below:
        starts.append(starts[-1] + len(word))
    at_form = {
        start: index for index, start in enumerate(starts)
    }  # the last: a lone mark goes with what is before
    cuts = [(0, 0)]
    for block in SequenceMatcher(None, flat, forms, autojunk=False).get_matching_blocks():
        for offset in range(block.size + 1):
            index, form = at_form.get(block.a + offset), block.b + offset
            if index is not None and index > cuts[-1][0] and cuts[-1][1] < form < len(forms):
                cuts.append((index, form))
    while len(cuts) > 1 and cuts[-1][0] >= len(below):
        cuts.pop()
    edges = [*cuts, (len(below), len(forms))]
    return [((a, c), (b, d)) for (a, b), (c, d) in pairwise(edges)]


# ------------------------------------------------------------------------------------------------ private


class _Piece(NamedTuple):
    surface: str
    spaced: bool


def _split_pieces(text: str, spaces: bool) -> list[_Piece]:
    if spaces:
        return [_Piece(word, True) for word in text.split()]
    return [_Piece(character, place == 0) for word in text.split() for place, character in enumerate(word)]


def _forms_of(surface: str, language: str) -> list[str]:
    form = recognition_form(surface)
    return form.split() if has_spaces(language) else list(form.replace(" ", ""))


def _join_pieces(pieces: Sequence[_Piece]) -> str:
    first, *following = pieces
    return first.surface + "".join(" " * piece.spaced + piece.surface for piece in following)
