"""Written English, Chinese and Japanese as they are spoken, by WeTextProcessing's grammars (wetext, Apache-2.0).

The grammars are finite-state transducers inside the package; nothing is downloaded. What they choke on or misread
is kept from them here, and what they cannot read stays as it is: no text is lost, and none raises. Of English they
read numbers alone: abbreviations are those of `audiollm.data.text.abbreviations`, and their list of 4,000 others
(`No`, `Sun`, `Eq`, `Brno`) is hidden from them.
"""

from __future__ import annotations

import re
from functools import lru_cache

from audiollm.data.text.abbreviations import read_abbreviations

LANGUAGES = ("en", "zh", "ja")

_LONGEST_PIECE = 240
"""Characters. The grammars' time grows with the square of the length."""
MARKUP = re.compile(r"(</?\w+>|<\|\w+\|>|\[[A-Za-z][\w ]*\])")
"""Higgs's tags and control tokens, speakers and sounds in brackets."""
# with what the grammars escape or choke on, and all white space but single spaces
_PRESERVED = re.compile(
    MARKUP.pattern[:-1]
    + r'|[\x00-\x1f\x7f-\xa0"\\{}\xad\u200b-\u200f\u2028-\u202f\u2060\ufeff\ud800-\udfff]+|  +)'
)
_FOR_THE_GRAMMARS = re.compile(
    r"[0-9$£€¥%°§©~/]|[\w.-]+@[\w-]+\.\w|://|\bwww\.|[a-z0-9-]\.(?:com|org|net|edu|gov|io|ai|info|uk|de|fr|cn)\b"
)
"""English without any of these has nothing for the grammars to read."""
_PIECE = re.compile(rf"(.{{1,{_LONGEST_PIECE}}}(?:[.!?;,。！？；，、](?!\d) ?| |$)|.{{1,{_LONGEST_PIECE}}})")

# English that wetext 0.1.8 misreads, and what is handed to it in its place
_THOUSANDS = re.compile(r"(?<![\w$£€¥.,:/+-])(?:10\d\d|2[1-9]\d\d|[3-9]\d{3})(?![\w%°/:-]|[.,]\d| [A-Z])")
_DECADE = re.compile(r"\b(1[1-9]\d0|20[1-9]0)s\b")
_YEARS = re.compile(r"(?<![\w.,:/-])((?:1[1-9]|20)\d\d) ?[-–] ?((?:1[1-9]|20)\d\d)(?![\w/-]|[.,]\d)")
_METRES = re.compile(r"(?<![\w$£€¥.,])(\d+(?:\.\d+)?) ?m\b(?![.'’²³/])")
_METRES_AT_END = re.compile(r"(?<![\w$£€¥.,])(\d+(?:\.\d+)?) ?m(?=\.(?:\s|$))")
_PAIRS_OF_NUMBERS = re.compile(r"(?<![\w/])(24/7|9/11|7/11|50/50|20/20)(?![\w/])")
_TELEPHONE = re.compile(r"(?<![\w.,-])(?<!\) )(\+\d[\d ()-]{5,}\d|\d{3}-\d{4})(?![\w-]|[.,]\d)")
_VERSION = re.compile(r"(?<![\w.,])\d{1,2}(?:\.\d{1,2}){2,}(?!\w|\.\w)")
_FULL_MARKS = re.compile(r"(?<![\w/.,])(\d+)/\1(?![\w/])")
_PLUS = re.compile(r"(?<![\w+])\+(?=\d)")
_THOUSAND = re.compile(r"(?:\b([a-z]+)([ -]))?\bthousand\b")
_BEFORE_THOUSAND = re.compile(
    r"(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|[a-z]+ty|hundred)"
)
_YEAR_WITH_ZERO = re.compile(
    r"\b(eleven|twelve|[a-z]+teen) zero (one|two|three|four|five|six|seven|eight|nine)\b"
)

_WORD = re.compile(
    r"(?<![\w'’.-])(?:[A-Za-z]{2,}\.[A-Z][a-z]+\b|(?<=, )[A-Z]{2}\b|(?<=,)[A-Z]{2}\b"
    r"|[A-Za-z]+(?:['’&/_][A-Za-z]+)*\.?)(?![\w'’@-]|\.\w)"
)
"""Words that the grammars could take for an abbreviation: with two sentences that lack the space between them, and
states behind a comma."""
_CAPITALS_AND_NO_UNITS = frozenset(("PA", "MA", "MS", "MI", "CD", "DA", "HA", "PS", "PG", "NM"))
_VERBS_AND_ANSWERS = frozenset(("no", "may", "march"))
_MASK = re.compile("qzq[a-z]+qz")


def normalize(text: str, language: str) -> str:
    """Numbers, dates, times, money, units, percent, ordinals, telephone numbers and common abbreviations as words.

    Markup (`<SE>`, `[SPEAKER0]`, `[laugh]`, `<|...|>`), white space and what the grammars cannot read are kept.

    Args:
        language: one of `LANGUAGES`.
    """
    parts = _PRESERVED.split(text)
    return "".join(piece if index % 2 else _say(piece, language) for index, piece in enumerate(parts))


def _say(text: str, language: str) -> str:
    if language == "en":
        text = read_abbreviations(text)
        if not _FOR_THE_GRAMMARS.search(text):
            return text
    return "".join(_say_piece(piece, language) for piece in _PIECE.findall(text))


@lru_cache(maxsize=4096)
def _say_piece(piece: str, language: str) -> str:
    """Normalize a piece of bounded length; the spaces around it stay."""
    core = piece.strip(" ")
    if not core or (language == "en" and not _FOR_THE_GRAMMARS.search(core)):
        return piece
    verbalized = _english(core) if language == "en" else _by_grammar(core, language)
    before, _, after = piece.partition(core)
    return before + verbalized + after


def _english(text: str) -> str:
    masked, words = _mask_words(text)
    prepared = _TELEPHONE.sub(lambda match: _telephone(match[0]), masked)
    prepared = _PLUS.sub("plus ", _VERSION.sub(lambda match: match[0].replace(".", " point "), prepared))
    prepared = _THOUSANDS.sub(lambda match: _cardinal(match[0]), prepared)
    prepared = _YEARS.sub(lambda match: f"{_year(match[1])} to {_year(match[2])}", prepared)
    prepared = _DECADE.sub(lambda match: _plural(_year(match[1])), prepared)
    prepared = _METRES_AT_END.sub(r"\1 meters", _METRES.sub(r"\1 meters", prepared))
    prepared = re.sub(r"(?<![\w.,])1 meters\b", "1 meter", prepared)
    prepared = _PAIRS_OF_NUMBERS.sub(lambda match: match[0].replace("/", " "), prepared)
    prepared = _FULL_MARKS.sub(r"\1 out of \1", prepared)
    reading = _by_grammar(prepared, "en")
    if "thousand" not in prepared:  # the grammars say 1,200 as "thousand two hundred"
        reading = _THOUSAND.sub(_one_thousand, reading)
    if not re.search(r"\bthe the\b", prepared, re.IGNORECASE):  # "the Mar. 5 issue"
        reading = re.sub(r"\b([Tt]he) the\b", r"\1", reading)
    reading = _YEAR_WITH_ZERO.sub(r"\1 oh \2", reading)
    return _MASK.sub(lambda match: words.get(match[0], match[0]), reading)


def _mask_words(text: str) -> tuple[str, dict[str, str]]:
    """Replace the words that the grammars would read as abbreviations by letters that mean nothing to them."""
    words: dict[str, str] = {}

    def mask(match: re.Match[str]) -> str:
        is_state = len(match[0]) == 2 and match.string[: match.start()].rstrip().endswith(",")
        if not is_state and not _is_misread(match[0]):
            return match[0]
        name = f"qzq{''.join(chr(ord('a') + int(digit)) for digit in str(len(words)))}qz"
        words[name] = match[0].removesuffix(".")
        return name + "." * match[0].endswith(".")

    return _WORD.sub(mask, text), words


@lru_cache(maxsize=65536)
def _is_misread(word: str) -> bool:
    bare = word.removesuffix(".")
    if bare.lower() in _VERBS_AND_ANSWERS and not bare.istitle():
        return True
    if bare == "No" or bare in _CAPITALS_AND_NO_UNITS:
        return True
    if "_" in bare or re.fullmatch(r"[A-Z]\.", word) or re.fullmatch(r"[A-Za-z]{2,}\.[A-Z][a-z]+", bare):
        return True
    return _by_grammar(bare, "en") != bare or _by_grammar(word, "en") != word


def _by_grammar(text: str, language: str) -> str:
    """The grammars' reading, but for the words that they have no path for (`5+5+`, some scripts)."""
    reading = _apply_grammar(text, language)
    if reading is not None:
        return reading
    words = text.split(" ")
    unknown = [_apply_grammar(word, language) is None for word in words]
    if all(unknown) or not any(unknown):
        return text
    runs: list[tuple[bool, list[str]]] = []
    for word, stays in zip(words, unknown, strict=True):
        if runs and runs[-1][0] == stays:
            runs[-1][1].append(word)
        else:
            runs.append((stays, [word]))
    readings = (
        " ".join(run) if stays else _apply_grammar(" ".join(run), language) or " ".join(run)
        for stays, run in runs
    )
    return " ".join(readings)


def _apply_grammar(text: str, language: str) -> str | None:
    from wetext import normalize as wetext_normalize  # a second of loading, at first use

    try:
        return str(wetext_normalize(text, lang=language)) or text
    except Exception:  # it asserts on what its grammars have no path for
        return None


def _one_thousand(match: re.Match[str]) -> str:
    word, between = match[1] or "", match[2] or ""
    return match[0] if _BEFORE_THOUSAND.fullmatch(word) else f"{word}{between}one thousand"


def _telephone(number: str) -> str:
    groups = re.findall(r"\d+", number)
    return "plus " * number.startswith("+") + ", ".join(" ".join(map(_cardinal, group)) for group in groups)


def _cardinal(digits: str) -> str:
    from num2words import num2words

    return str(num2words(int(digits))).replace(",", "").replace("-", " ")


def _year(digits: str) -> str:
    from num2words import num2words

    return str(num2words(int(digits), to="year")).replace("-", " ")


def _plural(words: str) -> str:
    return words[:-1] + "ies" if words.endswith("y") else words + "s"
