"""Written English, Chinese and Japanese as they are spoken, by WeTextProcessing's grammars (wetext, Apache-2.0).

The grammars are finite-state transducers inside the package; nothing is downloaded. What they choke on or misread
is kept from them here, and what they cannot read stays as it is: no text is lost, and none raises.
"""

from __future__ import annotations

import re
from functools import lru_cache

LANGUAGES = ("en", "zh", "ja")

_LONGEST_PIECE = 240
"""Characters. The grammars' time grows with the square of the length."""
MARKUP = re.compile(r"(</?\w+>|<\|\w+\|>|\[[A-Za-z][\w ]*\])")
"""Higgs's tags and control tokens, speakers and sounds in brackets."""
# with what the grammars escape or choke on, and all white space but single spaces
_KEPT = re.compile(
    MARKUP.pattern[:-1]
    + r'|[\x00-\x1f\x7f-\xa0"\\{}\xad\u200b-\u200f\u2028-\u202f\u2060\ufeff\ud800-\udfff]+|  +)'
)
_PLAIN = re.compile(r"[A-Za-zÀ-ɏ',;:!?—()‘’“” -]*[.…]*")
"""English without a digit, a symbol or a point inside: nothing to be normalized, unless `_SPECIAL`."""
_SPECIAL = re.compile(r"\b[IVX]{2,}\b|\b[A-Z][a-z]{0,4}\.$|, [A-Z]{2}\b")
"""Plain, and yet perhaps a roman number, an abbreviation at the end or a state."""
_PIECE = re.compile(rf"(.{{1,{_LONGEST_PIECE}}}(?:[.!?;,。！？；，、](?!\d) ?| |$)|.{{1,{_LONGEST_PIECE}}})")

# English that wetext 0.1.8 misreads, and what is handed to it in its place
_THOUSANDS = re.compile(r"(?<![\w$£€¥.,:/+-])(?:10\d\d|2[1-9]\d\d|[3-9]\d{3})(?![\w%°/:-]|[.,]\d| [A-Z])")
_DECADE = re.compile(r"\b(1[1-9]\d0|20[1-9]0)s\b")
_YEARS = re.compile(r"(?<![\w.,:/-])((?:1[1-9]|20)\d\d) ?[-–] ?((?:1[1-9]|20)\d\d)(?![\w/-]|[.,]\d)")
_METRES = re.compile(r"(?<![\w$£€¥.,])(\d+(?:\.\d+)?) ?m\b(?![.'’²³/])")
_DATES_OF_SPEECH = re.compile(r"(?<![\w/])(24/7|9/11)(?![\w/])")
_THOUSAND = re.compile(r"(?:\b([a-z]+)([ -]))?\bthousand\b")
_BEFORE_THOUSAND = re.compile(
    r"(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|[a-z]+ty|hundred)"
)


def normalize(text: str, language: str) -> str:
    """Numbers, dates, times, money, units, percent, ordinals, telephone numbers and common abbreviations as words.

    Markup (`<SE>`, `[SPEAKER0]`, `[laugh]`, `<|...|>`), white space and what the grammars cannot read are kept.

    Args:
        language: one of `LANGUAGES`.
    """
    parts = _KEPT.split(text)
    return "".join(part if kept % 2 else _say(part, language) for kept, part in enumerate(parts))


def _say(text: str, language: str) -> str:
    return "".join(_say_piece(piece, language) for piece in _PIECE.findall(text))


@lru_cache(maxsize=4096)
def _say_piece(piece: str, language: str) -> str:
    """Normalize a piece of bounded length; the spaces around it stay."""
    core = piece.strip(" ")
    if not core or (language == "en" and _PLAIN.fullmatch(core) and not _SPECIAL.search(core)):
        return piece
    said = _english(core) if language == "en" else _by_grammar(core, language)
    before, _, after = piece.partition(core)
    return before + said + after


def _english(text: str) -> str:
    prepared = _THOUSANDS.sub(lambda found: _cardinal(found[0]), text)
    prepared = _YEARS.sub(lambda found: f"{_year(found[1])} to {_year(found[2])}", prepared)
    prepared = _DECADE.sub(lambda found: _plural(_year(found[1])), prepared)
    prepared = _METRES.sub(r"\1 meters", prepared)
    prepared = _DATES_OF_SPEECH.sub(lambda found: found[0].replace("/", " "), prepared)
    said = _by_grammar(prepared, "en")
    if "thousand" not in prepared:  # the grammars say 1,200 as "thousand two hundred"
        said = _THOUSAND.sub(_one_thousand, said)
    return re.sub(r"\b([Nn]umber)\. ", r"\1 ", said)


def _by_grammar(text: str, language: str) -> str:
    from wetext import normalize as wetext_normalize  # a second of loading, at first use

    try:
        said = str(wetext_normalize(text, lang=language))
    except Exception:  # it asserts on what its grammars have no path for ("@", "#5", some scripts)
        return text
    return said or text


def _one_thousand(found: re.Match[str]) -> str:
    word, between = found[1] or "", found[2] or ""
    return found[0] if _BEFORE_THOUSAND.fullmatch(word) else f"{word}{between}one thousand"


def _cardinal(digits: str) -> str:
    from num2words import num2words

    return str(num2words(int(digits))).replace(",", "").replace("-", " ")


def _year(digits: str) -> str:
    from num2words import num2words

    return str(num2words(int(digits), to="year")).replace("-", " ")


def _plural(words: str) -> str:
    return words[:-1] + "ies" if words.endswith("y") else words + "s"
