"""Languages: the code of one as data sets write it, and the script and language of a text."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection
from functools import cache, lru_cache

from audiollm.data.text.words import is_unspaced

_LANGUAGES_OF_SCRIPT = {
    "HANGUL": "ko",
    "KANA": "ja",
    "CJK": "zh ja yue wuu",
    "CYRILLIC": "ru uk be bg sr mk kk ky mn tg tt ba az uz",
    "ARABIC": "ar fa ur ps ug ku ary arz sdh uzs",
    "DEVANAGARI": "hi mr ne sa gom",
    "BENGALI": "bn as",
    "GREEK": "el grc",
    "HEBREW": "he hbo",
    "THAI": "th",
    "LAO": "lo",
    "KHMER": "km",
    "MYANMAR": "my",
    "GEORGIAN": "ka",
    "ARMENIAN": "hy",
    "ETHIOPIC": "am",
    "SINHALA": "si",
    "TAMIL": "ta",
    "TELUGU": "te",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "ORIYA": "or",
    "TIBETAN": "dz",
}
"""Script, by its name in Unicode -> languages, the commonest first. Latin: all other languages, and `_LATIN_TOO`."""
_LATIN_TOO = frozenset(["sr", "az", "uz", "ku", "tg", "tt"])
_LETTERS_OF_LANGUAGE = {"uk": "іїєґ", "be": "ў", "sr": "ђћџљњј", "kk": "әғқңұһ", "fa": "پچژگ", "ur": "ٹڈڑے"}
"""Letters that no other common language of the script has."""
_WIDER = {
    "cmn": "zh", "wuu": "zh", "mandarin": "zh", "cn": "zh", "arz": "ar", "ary": "ar", "nb": "no", "nn": "no",
    "kz": "kk", "jp": "ja",
}  # fmt: skip
"""Code or name in use -> code of the language that it is read as."""
_NO_LANGUAGE = frozenset(["", "und", "unknown", "none", "null", "mul", "zxx", "auto", "other", "n/a", "nan"])
_GREEK_WORD = re.compile("[\u0370-\u03ff\u1f00-\u1fff]{2}")
"""A Greek letter alone is a sign."""
_KANA_SHARE = 0.15
"""Least share of kana among kana and Chinese characters in Japanese; a single の is a fashion in Chinese, too."""


@lru_cache(maxsize=4096)
def language_code(language: str | None) -> str | None:
    """The two-letter ISO 639 code (three letters where there are no two) of a language as data sets write it.

    `de`, `de-AT`, `de_DE`, `deu`, `ger` and `German` are `de`; None for nothing and for what names no language (`und`,
    `unknown`).
    """
    name = (language or "").strip().replace("_", "-").casefold()
    base = name.partition("-")[0]
    if name in _NO_LANGUAGE or base in _NO_LANGUAGE:
        return None
    base = _languages_by_name().get(name, base)
    base = _aliases().get(base, base)
    return _WIDER.get(base, base)


def language_of(text: str) -> str:
    """The language that a text's script tells: `ja`, `zh`, `ko`, `ru`, ...; `en` for Latin letters and for none."""
    script, _ = main_script(text)
    if script is None or script == "LATIN" or (script == "GREEK" and not _GREEK_WORD.search(text)):
        return "en"
    languages = _LANGUAGES_OF_SCRIPT.get(script, "und").split()
    lower = text.casefold()
    by_letters = [
        code for code in languages if any(letter in lower for letter in _LETTERS_OF_LANGUAGE.get(code, ""))
    ]
    return (by_letters or languages)[0]


def is_written_in(text: str, language: str) -> bool:
    """Whether most words of a text are in a script of the language; False without a word.

    Chinese characters without kana are not taken for Japanese.
    """
    script, _ = main_script(text)
    if (script, language) == ("CJK", "ja"):
        return False
    return script is not None and language in languages_of(script, {language})


def main_script(text: str) -> tuple[str | None, float]:
    """The script of most words, by its name in Unicode, and its share of the letters in UTF-8 bytes; (None, 0) without.

    In scripts that do not separate words a character counts as a word. Kana among Chinese characters make both `KANA`.
    """
    sizes: Counter[str] = Counter()
    letters: Counter[str] = Counter()
    previous = ""
    for letter in unicodedata.normalize("NFKC", text):
        script = _script_of(letter) if letter.isalpha() else ""
        letters[script] += len(letter.encode("utf-8", "surrogatepass")) if script else 0
        is_mark = unicodedata.category(letter)[0] == "M" or letter in "'’"
        if script and (script != previous or is_unspaced(letter)):
            sizes[script] += 1
        previous = previous if is_mark else script
    if not sizes:
        return None, 0.0
    is_japanese = sizes["KANA"] >= _KANA_SHARE * (sizes["KANA"] + sizes["CJK"])
    joined, absorbed = ("KANA", "CJK") if is_japanese else ("CJK", "KANA")
    for counts in (sizes, letters):
        counts[joined] += counts.pop(absorbed, 0)
    script = max(sorted(sizes), key=lambda name: sizes[name])
    return script, letters[script] / letters.total()


def languages_of(script: str, languages: Collection[str]) -> set[str]:
    """Return those of the languages that are written in a script."""
    if script != "LATIN":
        return set(languages) & set(_LANGUAGES_OF_SCRIPT.get(script, "").split())
    elsewhere = {code for codes in _LANGUAGES_OF_SCRIPT.values() for code in codes.split()} - _LATIN_TOO
    return set(languages) - elsewhere


# ------------------------------------------------------------------------------------------------ private


@lru_cache(maxsize=65536)
def _script_of(letter: str) -> str:
    name = re.split("[ -]", unicodedata.name(letter, ""), maxsplit=1)[0]
    return "KANA" if name in ("HIRAGANA", "KATAKANA") else name


@cache
def _languages_by_name() -> dict[str, str]:
    """English name of a language -> its code (CLDR, by Babel)."""
    from babel import Locale

    return {name.casefold(): code for code, name in Locale("en").languages.items() if "_" not in code}


@cache
def _aliases() -> dict[str, str]:
    """Three-letter and former codes -> the code that is used."""
    from babel.core import get_global

    aliases = get_global("language_aliases")
    return {code: str(name).partition("_")[0] for code, name in aliases.items() if len(code) <= 3}
