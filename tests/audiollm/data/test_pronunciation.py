"""Texts as phonemes: one word of a vocabulary for each, by the rules that a name says."""

from __future__ import annotations

import threading

import pytest

from audiollm.data.text.pronunciation import pronounce
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import ConfigError

TEXTS = ["his wife,", "the apple fell", "a man speaks as birds sing"]


@pytest.mark.parametrize(
    ("name", "text", "phonemes"),
    [
        ("espeak:en-us", "his wife,", "h ɪ z | w ˈaɪ f ,"),
        ("espeak:en-us", "The apple", "ð ɪ | ˈæ p əl"),
        ("espeak:en-us", "first, then last", "f ˈɜː s t | ð ˈɛ n | l ˈæ s t"),
        ("espeak:de", "über die Straße!", "ˌyː b ɜ | d iː | ʃ t ɾ ˈɑː s ə !"),
        ("espeak:cmn", "你好", "n i2 χ ˈɑu2"),
        ("espeak:en-us", "...", "..."),
        ("hibari", "his wife,", "h ɪ z | w ˈI f ,"),
        ("hibari", "to her 'friend!'", "t ə | h ɜ ɹ | f ɹ ˈɛ n d !'"),
        ("hibari", "The apple", "ð i | ˈæ p ᵊ l"),
    ],
)
def test_phonemes(name: str, text: str, phonemes: str) -> None:
    assert pronounce(text, name) == phonemes


@pytest.mark.parametrize(
    ("name", "problem"), [("espeak:zz", "knows no language 'zz'"), ("ipa", "no such rules of pronunciation")]
)
def test_unknown_rules_are_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        pronounce("one", name)


def test_each_phoneme_becomes_a_token() -> None:
    """The vocabulary that is learned from the texts has each frequent phoneme, and the bar, as one word."""
    written = [f" {pronounce(text, 'espeak:en-us')}" for text in TEXTS]
    tokenizer = train_text_tokenizer(written * 3, 600)
    for text in written:
        assert len(tokenizer.encode(text).ids) == len(text.split())


def test_threads_of_several_languages_do_not_disturb_each_other() -> None:
    """The library keeps its language in static variables."""
    expected = {name: pronounce("die Maus", name) for name in ("espeak:de", "espeak:en-us", "espeak:fr")}
    wrong: list[str] = []

    def repeat(name: str) -> None:
        for _ in range(200):
            if pronounce("die Maus", name) != expected[name]:
                wrong.append(name)

    threads = [threading.Thread(target=repeat, args=(name,)) for name in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(expected.values())) == 3 and not wrong
