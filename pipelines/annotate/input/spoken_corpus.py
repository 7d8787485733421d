"""A corpus of the texts of a file: which voice speaks which text, on workers, and the list of clips.

The sets never mix: a text that is held out is in no clip of the training set, and neither is a voice. Draws are hashes
of the seed and the names, so that more texts or voices change few clips. A clip's file is named after all that it
depends on, and is written whole or not at all: a corpus that is cut short goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import write_jsonl
from audiollm.files.set_aside import Row, set_aside_row
from pipelines.annotate.input.spoken_texts import TextList, read_texts
from pipelines.annotate.input.synthetic import CorpusConfig
from pipelines.annotate.synthesizers.synthesizer import (
    SpeechFault,
    Synthesizer,
    check_speech,
    check_voice_name,
)
from pipelines.execution.ledger import Ledger

LIST_NAME = "clips.jsonl"
_FAULT = f"{SpeechFault.__name__}: "
_PAUSE_S = 0.4
"""Silence that a clip has beside its speech; for plans."""


class SpokenClip(NamedTuple):
    """A clip to speak; pickled to a worker."""

    place: str
    text: str
    voice: str
    rate: float
    split: str | None


@dataclass(frozen=True)
class CorpusPlan:
    """All clips of a corpus, and the texts that are not spoken."""

    clips: list[SpokenClip]
    voices: list[str]
    texts: TextList
    num_texts: int
    """Texts that are spoken."""

    @property
    def seconds(self) -> float:
        """About how long the clips are together."""
        from audiollm.generation.speaking.long_text import spoken_seconds

        return sum(spoken_seconds(clip.text) / clip.rate + _PAUSE_S for clip in self.clips)

    def summary(self) -> str:
        """One line for the console."""
        tested = sum(clip.split == "test" for clip in self.clips)
        return (
            f"{len(self.clips):,} clips, about {self.seconds / 60:.1f} minutes, of {self.num_texts:,} texts in "
            f"{len(self.voices)} voices" + (f"; {tested:,} clips are held out" if tested else "")
        )

    def set_aside_note(self) -> str:
        """One line on the texts that are not spoken; empty where all are."""
        from collections import Counter

        kinds = Counter(row["kind"] for row in self.texts.set_aside)
        listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        return f"{kinds.total():,} texts are set aside: {listed}" if kinds else ""


class SpokenCorpus(NamedTuple):
    """A corpus on the disk."""

    listing: Path
    """JSON lines of `path`, `text`, `speaker`, and `split` and `language` where they are known."""
    set_aside: list[Row]
    """Texts and clips that are not in it."""
    notes: list[str]


def plan_corpus(config: CorpusConfig, seed: int, max_s: float | None) -> CorpusPlan:
    """Read the texts and decide which voice speaks which of them.

    Args:
        max_s: the longest speech that is of use, in seconds.

    Raises:
        ConfigError: texts or voices that cannot be used.
    """
    if config.texts is None:
        raise ValueError("a corpus of words has no file of texts")
    listed = read_texts(config.texts, config.text_column, max_s)
    try:
        voices = [check_voice_name(name) for name in config.pick_voices(seed)]
    except ValueError as error:
        raise ConfigError(f"corpus.voices: {error}") from None
    if config.test_voices >= len(voices):
        raise ConfigError(
            f"corpus.test_voices: {config.test_voices} of {len(voices)} voices: one has to be trained on"
        )
    texts = _drawn_order(listed.texts, lambda item: item.text, seed)[: config.num_texts]
    if config.test_texts >= len(texts):
        raise ConfigError(
            f"corpus.test_texts: {config.test_texts} of {len(texts)} texts: one has to be trained on"
        )
    test_texts, train_texts = texts[: config.test_texts], texts[config.test_texts :]
    held_out = set(_drawn_order(voices, str, seed)[: config.test_voices])
    trained_voices = [name for name in voices if name not in held_out]
    test_voices = [name for name in voices if name in held_out]
    groups = [(train_texts, trained_voices, "train"), (test_texts, trained_voices, "test")]
    groups.append((test_texts or train_texts, test_voices, "test"))
    has_split = bool(test_texts or test_voices)
    clips = [
        SpokenClip(
            item.place,
            item.text,
            voice,
            _draw_rate(config, seed, item.text, voice),
            split if has_split else None,
        )
        for group_texts, group_voices, split in groups
        for item in group_texts
        for voice in _drawn_order(group_voices, str, seed, item.text)[: config.voices_per_text]
    ]
    return CorpusPlan(clips, voices, listed, len(texts))


def speak_texts(
    folder: Path,
    config: CorpusConfig,
    plan: CorpusPlan,
    *,
    seed: int,
    workers: int,
    ledger: Ledger,
    on_done: Callable[[], None],
) -> SpokenCorpus:
    """Speak the clips of a plan into `folder`, a folder per voice; those that are there are not spoken again.

    Raises:
        StageError: not one clip could be spoken.
        FailedOnEveryItem: the first clips all failed for one reason.
    """
    from pipelines.steps.driving import call_each

    synthesizer = config.make_synthesizer()
    fingerprint = synthesizer.fingerprint()
    paths = [folder / _clip_name(clip, fingerprint, seed) for clip in plan.clips]
    speak = _ClipSpeaker(synthesizer, seed)
    items = list(zip(plan.clips, paths, strict=True))
    outcomes = call_each("speak", speak, items, workers, ledger, on_done)
    rows: list[Row] = []
    set_aside = list(plan.texts.set_aside)
    for clip, path, outcome in zip(plan.clips, paths, outcomes, strict=True):
        if outcome.value is None:
            kind, reason = _kind_and_reason(outcome.error or "")
            set_aside.append(
                set_aside_row("annotate", clip.place, kind, f"{clip.voice}: {reason}", id=path.stem)
            )
            continue
        about = {"split": clip.split, "language": synthesizer.language}
        row = {"path": path.relative_to(folder).as_posix(), "text": clip.text, "speaker": clip.voice}
        rows.append(row | {name: value for name, value in about.items() if value})
    if not rows:
        reason = set_aside[-1]["reason"]
        raise StageError(
            f"annotate: none of the {len(plan.clips)} clips could be spoken; the last: {reason}",
            "try the synthesizer with a text by hand",
        )
    listing = folder / LIST_NAME
    write_jsonl(listing, rows)
    return SpokenCorpus(listing, set_aside, [*plan.texts.notes, *filter(None, [plan.set_aside_note()])])


@dataclass(frozen=True)
class _ClipSpeaker:
    """Speaks a clip into its file; the function of a worker."""

    synthesizer: Synthesizer
    seed: int

    def __call__(self, item: tuple[SpokenClip, Path]) -> dict[str, Any]:
        import torch

        from audiollm.audio import save

        clip, path = item
        if not path.exists():
            clip_seed = int(_digest(self.seed, clip.text, clip.voice)[:8], 16)
            speech = self.synthesizer.speak(clip.text, clip.voice, rate=clip.rate, seed=clip_seed)
            check_speech(speech, clip.text, clip.rate)
            save(path, torch.from_numpy(speech.samples_N)[None], speech.sample_rate)
        return {}


# Private


def _digest(*content: object) -> str:
    return sha256("\0".join(map(str, content)).encode()).hexdigest()


def _drawn_order(items: Sequence[Any], name: Callable[[Any], str], seed: int, *about: str) -> list[Any]:
    """The items in an order that follows from the seed and their names alone."""
    return sorted(items, key=lambda item: _digest(seed, *about, name(item)))


def _draw_rate(config: CorpusConfig, seed: int, text: str, voice: str) -> float:
    slowest, fastest = config.rates
    share = int(_digest(seed, "rate", text, voice)[:8], 16) / 0xFFFFFFFF
    return round(slowest + share * (fastest - slowest), 3)


def _clip_name(clip: SpokenClip, fingerprint: str, seed: int) -> str:
    return f"{clip.voice}/{_digest(fingerprint, seed, clip.text, clip.voice, clip.rate)[:16]}.wav"


def _kind_and_reason(error: str) -> tuple[str, str]:
    """The kind and the reason of a call's error."""
    if not error.startswith(_FAULT):
        return "cannot be spoken", error
    kind, _, reason = error.removeprefix(_FAULT).partition(": ")
    return kind, reason
