"""English phonemes by hibari's rules, in pieces that a model can speak at once."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from pipelines.annotate.synthesizers.synthesizer import SpeechFault

_LATIN = ("LATIN", "FEMININE ORDINAL", "MASCULINE ORDINAL", "MODIFIER LETTER")
"""How the names of letters begin that English texts may have."""
_CLAUSE_END = re.compile(r"(?<=[.,;:!?…—])\s+")


def open_hibari() -> Any:
    """The package's American English voice, with its rules of pronunciation; nothing is downloaded."""
    from hibari import Hibari

    return Hibari()


def phoneme_pieces(hibari: Any, text: str, max_phonemes: int) -> list[str]:
    """The phonemes of a text, a piece per sentence; a sentence that is too long is cut at the ends of its clauses.

    Args:
        hibari: of `open_hibari`.

    Raises:
        SpeechFault: a text of other letters, without a word, or with a clause that is too long.
    """
    foreign_letter = next((letter for letter in text if _is_foreign(letter)), None)
    if foreign_letter is not None:
        raise SpeechFault(
            "other letters", f"{foreign_letter!r} is not Latin: this synthesizer speaks English"
        )
    pieces = [piece for sentence in hibari.phonemize(text) for piece in _cut_sentence(sentence, max_phonemes)]
    if not any(letter.isalpha() for piece in pieces for letter in piece):
        raise SpeechFault("no words", "a text without anything to say")
    return pieces


def _is_foreign(letter: str) -> bool:
    return letter.isalpha() and not unicodedata.name(letter, "").startswith(_LATIN)


def _cut_sentence(phonemes: str, max_phonemes: int) -> list[str]:
    """The phonemes as they are, or in pieces of as many clauses as fit."""
    pieces = [""]
    for clause in _CLAUSE_END.split(phonemes) if len(phonemes) > max_phonemes else [phonemes]:
        if len(clause) > max_phonemes:
            raise SpeechFault(
                "a clause too long",
                f"{len(clause)} phonemes without a comma: at most {max_phonemes} are spoken at once",
            )
        joined = f"{pieces[-1]} {clause}".strip()
        if len(joined) <= max_phonemes:
            pieces[-1] = joined
        else:
            pieces.append(clause)
    return [piece for piece in pieces if piece]
