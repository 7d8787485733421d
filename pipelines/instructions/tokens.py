"""Words of an instruction as tokens of the grammar."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import yaml
from lark import Token
from lark.lexer import Lexer
from rapidfuzz.distance import OSA

MAX_TOKENS = 60
"""Most tokens of an instruction: the time to parse grows with their cube."""
NUMBER_WORDS: dict[str, float] = {
    "zero": 0, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "fifteen": 15, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60,
}  # fmt: skip
UNIT_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0, "ms": 0.001, "msec": 0.001,
                "millisecond": 0.001, "h": 3600.0, "hour": 3600.0}  # fmt: skip
"""Seconds of a unit, by its singular."""
_CONTRACTIONS = (
    (r"\b(can|wo|do|does|did|must|should|is|are|would|could)n'?t\b", r"\1 not"),
    (r"\bdoes not\b|\bdid not\b", "do not"), (r"\bwo not\b", "will not"), (r"\bcannot\b", "can not"),
    (r"\bi'?d\b", "i would"), (r"\bwe'd\b", "we would"), (r"\blet'?s\b", "let us"),
    (r"\b(it|that|there|what|here)'s\b", r"\1 is"), (r"(?<=\d),(?=\d)", "."),
    (r"^(?:can|could|may) (?=(?:the|a|an|both|all|every|this|that|these|those)\b)", ""),
    (r"\ba couple of\b", "2"), (r"\bteh\b", "the"), (r"\bad\b", "add"), (r"\bu\b", "you"), (r"\bfrm\b", "from"),
)  # fmt: skip
_LEXEME = re.compile(
    r"(?P<clock>\d+:\d\d(?::\d\d)?(?:\.\d+)?)|(?P<ordinal>\d+(?:st|nd|rd|th)\b)|(?P<number>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<word>[^\W\d_]+(?:['-][^\W\d_]+)*)|(?P<sign>[-+,;:.!?&@])|(?P<strange>\S)"
)
_VERBS = frozenset({
    "REMOVE", "TAKE", "CUT", "KEEP", "EXTRACT", "REPLACE", "FILL", "REDO", "REPAIR", "ADD", "APPEND", "EXTEND", "MAKE",
    "SUBSTITUTE", "LEAVE", "SILENCE", "DROP",
})  # fmt: skip
_NOUN_TOKENS = frozenset(["TRACK", "REFUSED", "MARK", "END", "START", "TOUCH", "HERE"])
"""Tokens that give way to the name of a sound of the recording."""
_COUNTS = frozenset(["FIRST", "SECOND", "ORDINAL", "LAST"])
_BEFORE_UNITS = frozenset({
    "a", "an", "one", "half", "first", "last", "final", "more", "another", "the", "s", "sec", "seconds", "second",
})  # fmt: skip
"""Words that a unit may follow, besides numbers."""
_CORRECTED_LENGTH = 4
"""Letters from which on a misspelt verb or name is corrected by one letter."""


class InstructionTokens(Lexer):
    """The lexer of the grammar, to which tokens come ready."""

    def __init__(self, lexer_conf: object) -> None: ...

    def lex(self, tokens: Iterable[Token]) -> Iterator[Token]:  # type: ignore[override]
        """The tokens as they are."""
        return iter(tokens)


def instruction_tokens(text: str, names: Collection[str]) -> list[Token]:
    """The tokens of a plain text (`plain_text`), each with its first and last character.

    Args:
        names: stems of the words that name sounds of the recording.

    A misspelt verb or name has its correction as value; its characters are those of the text.
    """
    lexemes = list(_LEXEME.finditer(text))
    tokens: list[Token] = []
    place = 0
    while place < len(lexemes):
        kind, count = _longest_phrase(lexemes, place, names)
        if kind != "DROPPED":
            tokens.append(_make_token(lexemes, place, count, kind, tokens, names))
        place += count
    return _without_counting(_without_copulas(tokens))


def plain_text(text: str) -> str:
    """An instruction in lower case, with one kind of quotation mark and dash, and without contractions."""
    text = re.sub("[’‘`´]", "'", text.lower())
    text = re.sub("[–—−]", "-", text)
    text = " ".join(re.sub('["“”„]', " ", text).split())
    for pattern, replacement in _CONTRACTIONS:
        text = re.sub(pattern, replacement, text)
    return text


def stem(word: str) -> str:
    """A word without its ending: "bark" for barks, barked and barking."""
    word = re.sub(r"'s?$", "", word)
    for ending in ("ing", "ed", "es", "s", "e"):
        root = word.removesuffix(ending)
        if root != word and len(root) >= 3 and re.search("[aeiouy]", root) and not word.endswith("ss"):
            root = (
                re.sub(r"([bdgklmnprt])\1$", r"\1", root)
                if ending in ("ing", "ed") and root[-2:] != "ll"
                else root
            )
            return re.sub("(?<=..)y$", "i", root)
    return re.sub("(?<=..)y$", "i", word)


# Private


@cache
def _phrases() -> dict[tuple[str, ...], str]:
    """The token of each phrase of the vocabulary."""
    content = yaml.safe_load(Path(__file__).with_name("vocabulary.yaml").read_text(encoding="utf-8"))
    listed = re.compile(r'"(.)"|([^,"]+)')
    pairs = (
        (tuple((match[1] or match[2]).split()), kind) for kind, phrases in content.items()
        for match in listed.finditer(str(phrases)) if match[0].strip()
    )  # fmt: skip
    return dict(pairs)


@cache
def _longest() -> int:
    return max(map(len, _phrases()))


def _longest_phrase(lexemes: Sequence[re.Match[str]], place: int, names: Collection[str]) -> tuple[str, int]:
    """The token of the longest phrase at a place, and its number of lexemes; a single word may be none: `WORD`."""
    for count in range(min(_longest(), len(lexemes) - place), 0, -1):
        words = tuple(lexeme[0] for lexeme in lexemes[place : place + count])
        kind = _phrases().get(words)
        if kind is None or (kind in _NOUN_TOKENS and count == 1 and stem(words[0]) in names):
            continue
        if kind in ("UNIT", "LONG_UNIT") and not (place and _is_amount(lexemes[place - 1])):
            if count == 1 and len(words[0]) > 2 and place + 1 < len(lexemes) and lexemes[place + 1]["number"]:
                return "DROPPED", 1  # "seconds 2 to 4"
            return "STRANGE", 1
        return kind, count
    return "WORD", 1


def _make_token(
    lexemes: Sequence[re.Match[str]],
    place: int,
    count: int,
    kind: str,
    before: Sequence[Token],
    names: Collection[str],
) -> Token:
    first, last = lexemes[place], lexemes[place + count - 1]
    value = " ".join(lexeme[0] for lexeme in lexemes[place : place + count])
    if first["clock"]:
        kind = "CLOCK"
    elif first["ordinal"]:
        kind = "ORDINAL"
    elif first["number"] or value in NUMBER_WORDS:
        kind, value = "NUM", f"{NUMBER_WORDS.get(value) if value in NUMBER_WORDS else float(value):g}"
    elif value == "-":
        is_range = (
            0 < place < len(lexemes) - 1 and _is_amount(lexemes[place - 1]) and _is_amount(lexemes[place + 1])
        )
        kind = "TO" if is_range else "JOIN"
    elif first["strange"]:
        kind = "STRANGE"
    elif kind == "WORD" and value.endswith("'s"):
        kind = "POSSESSIVE"
    elif kind == "WORD":
        kind, value = _correct_word(value, before, names)
    return Token(kind, value, start_pos=first.start(), end_pos=last.end())


def _is_amount(lexeme: re.Match[str]) -> bool:
    """Whether a unit may follow."""
    words = {
        "a",
        "an",
        "one",
        "half",
        "first",
        "last",
        "final",
        "more",
        "another",
        "few",
        "the",
        "s",
        "sec",
        "seconds",
        "second",
    }
    return bool(lexeme["number"] or lexeme["clock"] or lexeme[0] in NUMBER_WORDS or lexeme[0] in words)


def _correct_word(word: str, before: Sequence[Token], names: Collection[str]) -> tuple[str, str]:
    """The token of a word that is in no phrase: a name, a misspelt verb, unit or name, or another word."""
    if stem(word) in names:
        return "NAME", word
    if len(word) < _CORRECTED_LENGTH:
        return "WORD", word
    classes: frozenset[str] = frozenset()
    if not before or before[-1].type in ("JOIN", "BUT"):
        classes = _VERBS
    elif before[-1].type in ("NUM", "HALF", "A"):
        classes = frozenset({"UNIT", "LONG_UNIT"})
    elif before[-1].type in ("THE", "IT") or before[-1].type in _VERBS:
        classes = frozenset({"FIRST", "SECOND", "ORDINAL"})
    for phrase, kind in _phrases().items():
        if kind in classes and len(phrase) == 1 and _is_misspelt(word, phrase[0]):
            return kind, phrase[0]
    near = [name for name in names if _is_misspelt(stem(word), name)
            and (len(word) > _CORRECTED_LENGTH or sorted(word) == sorted(name))]  # fmt: skip
    return ("NAME", near[0]) if len(near) == 1 else ("WORD", word)


def _without_copulas(tokens: list[Token]) -> list[Token]:
    """The tokens without the "is" of "while the dog is barking"."""
    copulas = {
        place
        for place in range(1, len(tokens) - 1)
        if tokens[place] in ("is", "are", "was", "were")
        and tokens[place - 1].type == tokens[place + 1].type == "NAME"
    }
    return [token for place, token in enumerate(tokens) if place not in copulas]


def _without_counting(tokens: list[Token]) -> list[Token]:
    """The tokens without a "first" or "last" before a verb: it counts the clauses."""
    remaining: list[Token] = []
    for place, token in enumerate(tokens):
        following = [later.type for later in tokens[place + 1 : place + 3]]
        verb = following[1:] if following[:1] == ["JOIN"] else following
        is_count = (
            token.type in _COUNTS
            and (not remaining or remaining[-1].type == "JOIN")
            and verb[:1]
            and verb[0] in _VERBS
        )
        if not (is_count or (token.type == "JOIN" and (not remaining or remaining[-1].type == "JOIN"))):
            remaining.append(token)
    return remaining


def _is_misspelt(word: str, target: str) -> bool:
    """Whether two words differ by one letter, or two neighbours that are exchanged, and begin with the same letter."""
    long_enough = len(target) >= _CORRECTED_LENGTH
    return long_enough and word[0] == target[0] and OSA.distance(word, target, score_cutoff=1) <= 1
