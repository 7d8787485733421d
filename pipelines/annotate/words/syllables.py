"""Count of syllables: by the CMU dictionary for English words, by vowels for other words, by characters for Chinese.

The dictionary is the one inside pocketsphinx: 134,000 pronunciations of words.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from pathlib import Path

from audiollm.data.text.forms import spoken_form
from audiollm.onnx_models import package_file

_DICTIONARY = "model/en-us/cmudict-en-us.dict"
_VOWEL_PHONES = frozenset(
    ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
)
# one character is one syllable: Chinese, kana and their mark of length (a mora, to be exact), Hangul
_SIGNS = re.compile(r"[\u3041-\u3096\u30a1-\u30fa\u30fc\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff]")
# small kana belong to the character before them
_SMALL_KANA = re.compile(
    r"[\u3041\u3043\u3045\u3047\u3049\u3083\u3085\u3087\u308e\u30a1\u30a3\u30a5\u30a7\u30a9\u30e3\u30e5\u30e7\u30ee]"
)
_VOWELS = "aeiouyæøœıаеёиоуыэюяєіїαεηιουω"
_VOWEL_GROUP = re.compile(f"[{_VOWELS}]+")
_SINGLE_VOWEL = re.compile("[аеёиоуыэюяєії]")  # Cyrillic: each is a syllable
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_DIGIT = re.compile("[0-9]")


def count_syllables(text: str, language: str | None = None) -> int:
    """Syllables of a text, numbers read out; an estimate by spelling for words that are not in the dictionary.

    Args:
        language: the one in which numbers are read; None: by the script.
    """
    read_out = spoken_form(text, language)
    if _DIGIT.search(read_out):  # a language whose numbers nobody reads
        read_out = spoken_form(read_out, "en")
    read_out = read_out.lower()
    signs = len(_SIGNS.findall(read_out)) - len(_SMALL_KANA.findall(read_out))
    words = _WORD.findall(_SIGNS.sub(" ", read_out))
    return signs + sum(_word_syllables(word.replace("’", "'"), language or "en") for word in words)


def dictionary_path() -> Path:
    """Return the path of the dictionary.

    Raises:
        FileNotFoundError: pocketsphinx is not installed.
    """
    return package_file("pocketsphinx", _DICTIONARY)


# Private


def _word_syllables(word: str, language: str) -> int:
    if language[:2].lower() == "en" and (count := _dictionary().get(word)):
        return count
    plain = unicodedata.normalize("NFKD", word)
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    if num_vowels := len(_SINGLE_VOWEL.findall(plain)):
        return num_vowels
    groups = len(_VOWEL_GROUP.findall(plain))
    silent = (
        language[:2].lower() in ("en", "fr")
        and re.search(f"[^{_VOWELS}]e$", plain)
        and not plain.endswith("le")
    )
    return max(1, groups - bool(silent and groups > 1))


@lru_cache(maxsize=1)
def _dictionary() -> dict[str, int]:
    """Number of vowels in the first pronunciation of each word."""
    counts: dict[str, int] = {}
    for line in dictionary_path().read_text(encoding="utf-8").splitlines():
        word, *phones = line.split()
        if not word.endswith(")"):  # `read(2)`: another pronunciation
            counts[word] = sum(phone in _VOWEL_PHONES for phone in phones)
    return counts
