"""The corpus that is spoken where no recordings are given: its settings, and single words in takes by espeak-ng.

Texts of a file are spoken by `spoken_corpus.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from audiollm.recipe.stages import StageConfig
from pipelines.annotate.synthesizers.choice import make_synthesizer
from pipelines.annotate.synthesizers.espeak import SAMPLE_RATE, VOICES, Espeak, SyntheticVoice, perform
from pipelines.annotate.synthesizers.synthesizer import Synthesizer

PATTERN = "{text}_{speaker}_{take}.wav"
_OF_WORDS = ("words", "takes", "test_takes")
_OF_TEXTS = ("text_column", "num_texts", "voices_per_text", "test_voices", "test_texts", "rates")


class CorpusConfig(StageConfig):
    """The corpus that is spoken where no recordings are given: `words` in takes, or the `texts` of a file."""

    synthesizer: str = "espeak"
    """espeak, hibari, kokoro=FOLDER (these two need the extra voices), or command:PROGRAM with {text}, {out} and, where
    wanted, {voice} and {rate}; it is run without a shell. All but espeak speak `texts`."""
    texts: Path | None = None
    """A file of texts to speak: a .txt with one per line, or a table or JSON lines with a column of texts. null: speak
    `words`."""
    text_column: str | None = None
    """Column of the texts; null: text, sentence, transcript or another usual name."""
    num_texts: int | None = Field(default=None, ge=1)
    """Texts to speak, drawn by the seed; null: all."""
    voices: int | list[str] | None = None
    """Number of voices, or their names. Kokoro: mixtures of its styles, drawn by the seed, or named, as in
    70af_heart+30am_adam. null: all of espeak (6) and hibari (1), the styles of Kokoro."""
    voices_per_text: int = Field(default=1, ge=1)
    """Voices that speak a text, at most; which ones is drawn by the seed."""
    test_voices: int = Field(default=0, ge=0)
    """Voices that are held out: they speak the texts that are held out, or all where none is."""
    test_texts: int = Field(default=0, ge=0)
    """Texts that are held out: no voice speaks them in the training set."""
    rates: tuple[float, float] = (1.0, 1.0)
    """Slowest and fastest speaking rate, relative to the synthesizer's own; each clip draws its own."""
    words: list[str] = Field(
        default=["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], min_length=1
    )
    """Texts to speak where there is no file, of letters, digits, spaces, hyphens and apostrophes."""
    takes: int = Field(default=24, ge=1)
    """Takes of each word by each voice."""
    test_takes: int = Field(default=4, ge=0)
    """Number of first takes of words that form the test set."""

    @field_validator("texts")
    @classmethod
    def _home_is_spelled_out(cls, texts: Path | None) -> Path | None:
        return None if texts is None else texts.expanduser()

    @field_validator("words")
    @classmethod
    def _speakable(cls, words: list[str]) -> list[str]:
        for word in words:
            if not re.fullmatch(r"[A-Za-z0-9'-]+( [A-Za-z0-9'-]+)*", word):
                raise ValueError(
                    f"{word!r} is not made of letters, digits, single spaces, hyphens and apostrophes"
                )
        if len({word.lower() for word in words}) < len(words):
            raise ValueError("a text occurs twice")
        return words

    @model_validator(mode="after")
    def _is_of_words_or_of_texts(self) -> CorpusConfig:
        subject, state, foreign = ("words", "set", _OF_WORDS) if self.texts else ("texts", "null", _OF_TEXTS)
        for name in foreign:
            if getattr(self, name) != type(self).model_fields[name].get_default():
                raise ValueError(f"{name} is for {subject}, and texts is {state}")
        if self.texts is None and self.synthesizer != "espeak":
            raise ValueError("this synthesizer speaks texts: give `texts`, a file with one text per line")
        if self.test_takes >= self.takes:
            raise ValueError(f"test_takes ({self.test_takes}) must be below takes ({self.takes})")
        return self

    @model_validator(mode="after")
    def _voices_and_rates_are_usable(self) -> CorpusConfig:
        slowest, fastest = self.rates
        if not 0.5 <= slowest <= fastest <= 2.0:
            raise ValueError("rates are the slowest and the fastest one, between 0.5 and 2")
        if not self.make_synthesizer().has_rates and self.rates != (1.0, 1.0):
            raise ValueError("rates: the command has no {rate}")
        if (isinstance(self.voices, int) and self.voices < 1) or self.voices == []:
            raise ValueError("voices: give at least one")
        if isinstance(self.voices, list) and len(set(self.voices)) < len(self.voices):
            raise ValueError("voices: a name occurs twice")
        if self.synthesizer == "espeak":
            self.pick_voices(0)
        return self

    def make_synthesizer(self) -> Synthesizer:
        """The synthesizer, without loading it."""
        return make_synthesizer(self.synthesizer)

    def pick_voices(self, seed: int) -> list[str]:
        """The names of the voices.

        Raises:
            ValueError: the synthesizer has not so many, or not these.
        """
        return self.make_synthesizer().pick_voices(self.voices, seed)

    @property
    def num_word_takes(self) -> int:
        """Clips of a corpus of words."""
        return len(self.words) * len(self.pick_voices(0)) * self.takes


def speak_corpus(folder: Path, config: CorpusConfig, seed: int, on_done: Callable[[int], None]) -> int:
    """Speak the corpus into `folder` as `{text}_{voice}_{take}.wav`; what is there is kept.

    Takes differ by rate, pitch, intonation, level and a faint noise, all drawn from the seed. The same
    arguments give the same files, whatever was cut short before.

    Args:
        on_done: called with the number of files done.

    Returns:
        The number of files.
    """
    from audiollm.audio import save

    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    for voice_index, name in enumerate(config.pick_voices(seed)):
        voice = next(voice for voice in VOICES if voice.name == name)
        takes = [
            (word, take, folder / _take_file_name(word, voice, take))
            for word in config.words
            for take in range(config.takes)
        ]
        if not all(path.exists() for *_, path in takes):
            with Espeak() as espeak:  # afresh: the library's own random numbers run on from text to text
                for index, (word, take, path) in enumerate(takes):
                    random = np.random.default_rng([seed, voice_index, config.words.index(word), take])
                    samples_N = perform(espeak, voice, word, random)
                    if not path.exists():
                        save(path, _as_tensor(samples_N), SAMPLE_RATE)
                    on_done(done + index + 1)
        done += len(takes)
        on_done(done)
    return done


def _take_file_name(word: str, voice: SyntheticVoice, take: int) -> str:
    return PATTERN.format(text=word.replace(" ", "_"), speaker=voice.name, take=take)


def _as_tensor(samples_N: NDArray[np.float32]) -> Any:
    import torch

    return torch.from_numpy(samples_N)[None]
