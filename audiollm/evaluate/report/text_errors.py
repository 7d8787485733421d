"""Word and character errors: the forms in which texts are compared, and their substitutions, insertions, deletions.

A form turns a text into tokens with spaces between: words, or characters for languages written without spaces.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from audiollm.data.text.forms import comparison_form
from audiollm.data.text.languages import language_code
from audiollm.data.text.words import settle_characters
from audiollm.errors import ConfigError, suggestion
from audiollm.evaluate.report.statistics import bootstrap_ratio
from audiollm.files.atomic import read_json

FORMS = ("seed-tts", "whisper", "spoken")
CHARACTER_LANGUAGES = ("zh", "yue", "ja", "th", "lo", "my")
"""Languages written without spaces between words: errors are counted by characters."""
# fmt: off
_HANZI_PUNCTUATION = frozenset(
    chr(code)
    for first, last in (
        (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64), (0x3000, 0x3003),
        (0x3008, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0x2013, 0x2014), (0x2018, 0x2019),
        (0x201B, 0x201F), (0x2026, 0x2027), (0xFE4F, 0xFE4F), (0xFE51, 0xFE51), (0xFE54, 0xFE54), (0x00B7, 0x00B7),
    )
    for code in range(first, last + 1)
)
# fmt: on
_NO_SPELLING: dict[str, str] = {}


@dataclass(frozen=True)
class TextForm:
    """How the texts of a language are compared."""

    name: str
    language: str
    apply: Callable[[str], str]
    """Turns a text into tokens with single spaces between."""

    @property
    def unit(self) -> str:
        """`word` or `character`."""
        return "character" if self.language in CHARACTER_LANGUAGES else "word"


@dataclass(frozen=True)
class Errors:
    """The errors of one text: edits by kind, and the number of words or characters of the reference.

    Words over an empty reference are insertions: they count in the totals, and their rate is their number (as jiwer's).
    """

    substitutions: int
    insertions: int
    deletions: int
    units: int

    @property
    def total(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float:
        return self.total / max(1, self.units)

    def plain(self) -> dict[str, int]:
        return asdict(self)


def choose_form(name: str, language: str, spelling: Path | None = None) -> TextForm:
    """The form `name` of a language.

    Args:
        name: `seed-tts`: as seed-tts-eval's `run_wer.py` (English, other languages with spaces, and Chinese; it
            also turns traditional characters into simplified ones, which is not done here). `whisper`: OpenAI's
            normalizer, transformers' `EnglishTextNormalizer` for English and `BasicTextNormalizer` for others.
            `spoken`: numbers as words, lower case, no punctuation, as elsewhere in this project.
        language: `en`, `zh`, ... or a name of a language that `language_code` knows.
        spelling: British to American spellings for `whisper`, the `normalizer.json` of a Whisper checkpoint;
            without it both spellings count as different words.

    Raises:
        ConfigError: no such form, or a file that is no table of spellings.
    """
    language = language_code(language) or language
    if name not in FORMS:
        raise ConfigError(f"{name}: no such form of text", "--form", suggestion(name, FORMS))
    if spelling is not None and (name, language) != ("whisper", "en"):
        raise ConfigError(
            "--spelling requires --form whisper and --language en", "--spelling", "leave it out"
        )
    if name == "seed-tts":
        return TextForm(name, language, lambda text: seed_tts_form(settle_characters(text), language))
    if name == "whisper":
        whisper = _whisper_form(language, _read_spelling(spelling))
        return TextForm(name, language, lambda text: whisper(settle_characters(text)))
    return TextForm(name, language, lambda text: _spoken_form(text, language))


def seed_tts_form(text: str, language: str) -> str:
    """The form that `run_wer.py` of BytedanceSpeech/seed-tts-eval compares: Chinese by characters, others lower case.

    All ASCII and Chinese punctuation goes but the apostrophe, and nothing takes its place; two spaces become one,
    once. The typographic apostrophe goes with the rest: "don't" and "don’t" differ, there as here.
    """
    stripped = "".join(
        c for c in text if c == "'" or (c not in string.punctuation and c not in _HANZI_PUNCTUATION)
    )
    stripped = stripped.replace("  ", " ")
    if language in CHARACTER_LANGUAGES:
        return " ".join(" ".join(stripped).split())
    return " ".join(stripped.lower().split())


def count_errors(reference: str, hypothesis: str) -> Errors:
    """The fewest edits between the tokens of two texts, both in the form they are compared in (jiwer)."""
    from jiwer import process_words

    units = len(reference.split())
    if not units:
        return Errors(0, len(hypothesis.split()), 0, 0)
    if not hypothesis.split():
        return Errors(0, 0, units, units)
    alignment = process_words(reference, hypothesis)
    return Errors(alignment.substitutions, alignment.insertions, alignment.deletions, units)


def word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float | None:
    """All word errors over all words of the references, with the words that were heard where there are none; None if no
    reference has a word."""
    errors = [count_errors(*pair) for pair in zip(references, hypotheses, strict=True)]
    units = sum(text.units for text in errors)
    return sum(text.total for text in errors) / units if units else None


def error_table(errors: Sequence[Errors]) -> dict[str, Any]:
    """The figures of many texts.

    Returns:
        `rate` (all errors over all units) with its 95 % bootstrap interval `low` to `high`, `utterance_mean` (the
        mean of the texts' own rates, which seed-tts-eval publishes) and its three parts, `above_half` (the share of
        texts of which more than half is wrong), the counts, and `n`; None where `n` is 0.
    """
    totals = {
        key: sum(text_errors.plain()[key] for text_errors in errors) for key in asdict(Errors(0, 0, 0, 0))
    }
    n, units = len(errors), totals["units"]
    interval = bootstrap_ratio([e.total for e in errors], [e.units for e in errors]) or (None, None)
    means = {
        f"utterance_{kind}": sum(
            text_errors.plain()[kind] / max(1, text_errors.units) for text_errors in errors
        )
        / n
        if n
        else None
        for kind in ("substitutions", "insertions", "deletions")
    }
    return {
        "rate": sum(text_errors.total for text_errors in errors) / units if units else None,
        "low": interval[0],
        "high": interval[1],
        "utterance_mean": sum(text_errors.rate for text_errors in errors) / n if n else None,
        **means,
        "above_half": sum(text_errors.rate > 0.5 for text_errors in errors) / n if n else None,
        **totals,
        "n": n,
    }


def _spoken_form(text: str, language: str) -> str:
    form = comparison_form(text, language)
    return " ".join(form.replace(" ", "")) if language in CHARACTER_LANGUAGES else form


def _whisper_form(language: str, spelling: dict[str, str]) -> Callable[[str], str]:
    normalize = _whisper_normalizer(language, tuple(sorted(spelling.items())))
    return lambda text: " ".join(normalize(text).split())


@cache
def _whisper_normalizer(language: str, spelling: tuple[tuple[str, str], ...]) -> Callable[[str], str]:
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    if language == "en":
        english: Callable[[str], str] = EnglishTextNormalizer(dict(spelling))
        return english
    basic: Callable[[str], str] = BasicTextNormalizer(split_letters=language in CHARACTER_LANGUAGES)
    return basic


def _read_spelling(path: Path | None) -> dict[str, str]:
    if path is None:
        return _NO_SPELLING
    try:
        table = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot be read: {error}", str(path), "give a Whisper checkpoint's normalizer.json"
        ) from None
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ConfigError(
            "not a table of spellings", str(path), "give a Whisper checkpoint's normalizer.json"
        )
    return table
