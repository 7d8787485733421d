"""How a text is pronounced: phonemes in the place of letters, for models whose phrases are read so.

A name says whose rules: `espeak:LANGUAGE` (espeak-ng's, some hundred languages, by the package espeakng-loader), or
`hibari` (American English, package hibari-tts).
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from functools import cache

from audiollm.data.text.languages import language_code
from audiollm.errors import ConfigError

ESPEAK_PREFIX, HIBARI = "espeak:", "hibari"
WORD_BORDER = "|"
_SYNCHRONOUS_OUTPUT, _CHARS_UTF8, _IPA, _SEPARATOR = 1, 1, 0x02, "_"
_STRESSED_PHONEME = re.compile(r"[ˈˌ]*[^\sˈˌ][ːʰʲ\u0300-\u036f]*")
"""A phoneme of hibari's, which writes each as one letter: its stress before it, its length after it."""
_ENDING = re.compile(r"[^\w\s]*$")
"""Punctuation at the end of a text: it changes how the words before it are said."""


def pronounce(text: str, name: str) -> str:
    """Write a text as it is pronounced: phonemes with spaces between, and a bar between words.

    `"his wife,"` by `espeak:en-us` is `h ɪ z | w ˈaɪ f ,`: each phoneme is a word for whatever learns a vocabulary. A
    text without anything to pronounce stays as it is.

    Args:
        name: whose rules, as `check_pronunciation` knows them.

    Raises:
        ConfigError: no such rules, or their package is missing.
    """
    words = _rules(name)(text)
    ending = _ENDING.search(text)
    written = f" {WORD_BORDER} ".join(" ".join(phonemes) for phonemes in words if phonemes)
    return " ".join(filter(None, (written, ending[0] if ending else ""))) or text


def pronounced_language(name: str) -> str | None:
    """The code of the language whose rules a name stands for."""
    return "en" if name == HIBARI else language_code(name.removeprefix(ESPEAK_PREFIX))


def check_pronunciation(name: str) -> None:
    """
    Raises:
        ConfigError: no such rules, or their package is missing.
    """
    _rules(name)


@cache
def _rules(name: str) -> Callable[[str], list[list[str]]]:
    """Return what gives the phonemes of each word of a text."""
    if name == HIBARI:
        return _hibari_rules()
    if name.startswith(ESPEAK_PREFIX):
        return _espeak_rules(name.removeprefix(ESPEAK_PREFIX))
    raise ConfigError(
        f"no such rules of pronunciation: {name!r}",
        "pronunciation",
        f"'{HIBARI}', or '{ESPEAK_PREFIX}' and a language, as in '{ESPEAK_PREFIX}de'",
    )


def _hibari_rules() -> Callable[[str], list[list[str]]]:
    try:
        from hibari import Hibari
    except ImportError:
        raise ConfigError(
            "hibari-tts is not installed", "pronunciation", "pip install 'audiollm[voices]'"
        ) from None
    voice = Hibari()

    def phonemes(text: str) -> list[list[str]]:
        words = [word for sentence in voice.phonemize(text) for word in sentence.split()]
        return [
            [match for match in _STRESSED_PHONEME.findall(word) if match.strip("ˈˌ").isalpha()]
            for word in words
        ]

    return phonemes


def _espeak_rules(language: str) -> Callable[[str], list[list[str]]]:
    import espeakng_loader

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    library.espeak_TextToPhonemes.restype = ctypes.c_char_p
    library.espeak_TextToPhonemes.argtypes = [ctypes.POINTER(ctypes.c_char_p), ctypes.c_int, ctypes.c_int]
    with _ESPEAK_LOCK:
        library.espeak_Initialize(_SYNCHRONOUS_OUTPUT, 0, espeakng_loader.get_data_path().encode(), 0)
        if library.espeak_SetVoiceByName(language.encode()) != 0:
            raise ConfigError(
                f"espeak-ng knows no language {language!r}",
                "pronunciation",
                "one of its codes, as en-us, de, fr, pt-br or cmn",
            )

    def phonemes(text: str) -> list[list[str]]:
        with _ESPEAK_LOCK:
            library.espeak_SetVoiceByName(language.encode())
            remaining, clauses = ctypes.c_char_p(text.encode()), []
            while remaining.value:
                clause = library.espeak_TextToPhonemes(
                    ctypes.byref(remaining), _CHARS_UTF8, _IPA | ord(_SEPARATOR) << 8
                )
                clauses.append(clause.decode())
        return [word.split(_SEPARATOR) for clause in clauses for word in clause.split()]

    return lambda text: [[phoneme for phoneme in word if phoneme] for word in phonemes(text)]


_ESPEAK_LOCK = threading.Lock()
"""The library keeps its language in static variables."""
