"""Default sampling of a model, from the files in its folder: its training, and the settings of its authors.

The one place that decides, field by field and in this order: the user; `trained.json`; `generation_config.json`; plain
sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from audiollm.data.text.phrases import PhraseLayout
from audiollm.data.text.tokenizer import TRAINED_FILE
from audiollm.errors import ConfigError
from audiollm.files.json_files import read_json_file
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.generation_config import FILE_NAME as GENERATION_FILE
from audiollm.models.generation_config import read_generation

PLAIN = SamplingConfig()
TEXT_GUIDANCE, SPEAKER_GUIDANCE = 3.0, 2.0
"""Guidance weights of models whose training hid the text or the speaker at times."""
PHRASE_TEMPERATURE = 0.4
"""Temperature of models that say a text phrase by phrase: at 0.7 a third of the words were wrong, at 0.4 a quarter."""
GIVEN_BY_USER = "given"
DAMAGED_REMEDY = "mend it, or remove the file: then nothing is known of the training"

_FIELD_OF_KEY = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "ras_win_len": "ras_window",
    "ras_win_max_num_repeat": "ras_repeats",
}
"""Key of `generation_config.json` -> field of `SamplingConfig`."""


Teaching = dict[str, Literal["transcripts", "rewards"]]
"""By the first characters of a recognizer's SHA-256: it wrote transcripts of the training, or gave rewards in it."""


class Trained(NamedTuple):
    """The content of `trained.json`; None: not known."""

    longest_positions: int | None = None
    text_dropout: float | None = None
    speaker_dropout: float | None = None
    codec_digest: str | None = None
    chunk_frames: int | None = None
    """Code frames of a chunk of the streams that the model was trained on."""
    stream_prompt: str | None = None
    """System message of these streams; empty for none."""
    stream_speaks: bool | None = None
    """Whether the actions of these streams are spoken."""
    words: list[str] | None = None
    """The words that it was trained to say, where they are few."""
    recognizers: Teaching | None = None
    """Recognizers that taught it."""
    tasks: list[str] | None = None
    """All tasks that it was trained for, of `tasks.yaml` or of its user's own."""
    phrase_words: int | None = None
    """Most words of the phrases that it was trained to say its texts in; None: without phrases."""
    pronunciation: str | None = None
    """Whose phonemes stand in the place of the words of a phrase; None: the words do."""

    @property
    def phrase_layout(self) -> PhraseLayout | None:
        """How the model's texts are said phrase by phrase; None: without phrases."""
        return None if self.phrase_words is None else PhraseLayout(self.phrase_words, self.pronunciation)


@dataclass(frozen=True)
class Defaults:
    """Sampling settings, and where each comes from."""

    sampling: SamplingConfig = PLAIN
    sources: Mapping[str, str] = field(default_factory=dict)
    """The file that a field of `sampling` comes from, or `GIVEN_BY_USER`; the others are those of `PLAIN`."""

    def over(self, **overrides: float | int | None) -> Defaults:
        """Replace the fields that the user gives; None keeps a field."""
        changes: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
        return Defaults(
            replace(self.sampling, **changes), {**self.sources, **dict.fromkeys(changes, GIVEN_BY_USER)}
        )

    def __str__(self) -> str:
        """`temperature 0.5 (given), top_p 0.9, text_guidance 3 (trained.json)`; what is switched off is left out."""
        off = {"top_k": 0, "top_p": 1.0, "ras_window": 0, "text_guidance": 1.0, "speaker_guidance": 1.0}
        sampling = self.sampling
        if not sampling.temperature:
            off |= {name: getattr(sampling, name) for name in ("top_k", "top_p", "ras_window", "ras_repeats")}
        if not sampling.ras_window:
            off["ras_repeats"] = sampling.ras_repeats
        active = {name: value for name, value in vars(sampling).items() if value != off.get(name)}
        return ", ".join(f"{name} {value:g}{self._source(name)}" for name, value in active.items())

    def _source(self, name: str) -> str:
        return f" ({self.sources[name]})" if name in self.sources else ""


def read_defaults(folder: Path) -> Defaults:
    """Read the default sampling of a model's folder.

    Guidance is `TEXT_GUIDANCE` and `SPEAKER_GUIDANCE` where the training hid the text or the speaker at times, else
    none; the rest is what `generation_config.json` says. Where that has no temperature and the training was on
    phrases, it is `PHRASE_TEMPERATURE`.

    Raises:
        ConfigError: one of the two files is damaged, or says what cannot be.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in read_generation(folder).items():
        values[_FIELD_OF_KEY[name]], sources[_FIELD_OF_KEY[name]] = value, GENERATION_FILE
    trained = read_trained(folder)
    by_training = guidance_of(trained.text_dropout, trained.speaker_dropout)
    if trained.phrase_words is not None and "temperature" not in values:
        by_training["temperature"] = PHRASE_TEMPERATURE
    values, sources = values | by_training, sources | dict.fromkeys(by_training, TRAINED_FILE)
    return Defaults(replace(PLAIN, **values), sources)


def guidance_of(text_dropout: float | None, speaker_dropout: float | None) -> dict[str, Any]:
    """Guidance weights by field, from how often a training hid each condition; unknown (None) ones are left out."""
    conditions = (
        ("text_guidance", text_dropout, TEXT_GUIDANCE),
        ("speaker_guidance", speaker_dropout, SPEAKER_GUIDANCE),
    )
    return {name: weight if dropout else 1.0 for name, dropout, weight in conditions if dropout is not None}


def read_trained(folder: Path) -> Trained:
    """Read `trained.json`, which the train stage writes beside its model; without the file, every field is None.

    Raises:
        ConfigError: it is damaged.
    """
    path = folder / TRAINED_FILE
    if not path.exists():
        return Trained()
    data = read_json_file(path, dict)
    numbers = (
        ("chunk_frames", math.inf),
        ("longest_positions", math.inf),
        ("phrase_words", math.inf),
        ("text_dropout", 1.0),
        ("speaker_dropout", 1.0),
    )
    for name, limit in numbers:
        value = data.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value <= limit):
            problem = f"{name}: {value!r} is not a number from 0{f' to {limit:g}' if limit < math.inf else ' or more'}"
            raise ConfigError(problem, str(path), DAMAGED_REMEDY)
    for name in ("codec_digest", "stream_prompt", "pronunciation"):
        text = data.get(name)
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"{name}: {text!r} is not a string", str(path), DAMAGED_REMEDY)
    for name in ("words", "tasks"):
        words = data.get(name)
        if words is not None and not (
            isinstance(words, list) and all(isinstance(word, str) for word in words)
        ):
            raise ConfigError(f"{name}: not a list of words", str(path), DAMAGED_REMEDY)
    recognizers = data.get("recognizers")
    kinds = set(recognizers.values()) if isinstance(recognizers, dict) else {None}
    if recognizers is not None and not kinds <= {"transcripts", "rewards"}:
        problem = f"recognizers: {recognizers!r} is not a table of digests and what they gave"
        raise ConfigError(problem, str(path), DAMAGED_REMEDY)
    speaks = data.get("stream_speaks")
    if speaks is not None and not isinstance(speaks, bool):
        raise ConfigError(f"stream_speaks: {speaks!r} is not true or false", str(path), DAMAGED_REMEDY)
    return Trained(**{name: data.get(name) for name in Trained._fields})
