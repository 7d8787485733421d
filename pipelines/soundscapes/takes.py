"""Takes of sounds, music and speech, of which clips are composed; splits share no recording and no speaker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from audiollm.errors import BadSample, ConfigError
from pipelines.compose.rows import SegmentRow, read_segments
from pipelines.scenes.settings import SoundFolder, SoundSource
from pipelines.scenes.sounds import find_sounds
from pipelines.soundscapes.settings import ComposeSoundscapesConfig

SPEECH, MUSIC = "speech", "music"
"""Names of these sounds in questions."""
BACKGROUND = "background"
_SHORTEST_SPEECH_S, _MIN_WORDS = 0.6, 2


@dataclass(frozen=True)
class Take:
    """A recording, or a span of one, that is an event of clips or lies behind them."""

    name: str
    path: Path
    is_held_out: bool
    start_s: float = 0.0
    end_s: float | None = None
    speaker: str = ""
    text: str = ""


@dataclass(frozen=True)
class Inventory:
    """The takes of a split."""

    takes: Mapping[str, Sequence[Take]]
    """Takes by the name of their sound, names in order."""
    backgrounds: Sequence[Take]

    @cached_property
    def names(self) -> list[str]:
        return list(self.takes)

    @cached_property
    def speech(self) -> Sequence[Take]:
        return self.takes.get(SPEECH, ())

    @cached_property
    def speakers(self) -> dict[str, list[Take]]:
        """Takes of speech by speaker."""
        groups: dict[str, list[Take]] = defaultdict(list)
        for take in self.speech:
            groups[take.speaker].append(take)
        return dict(sorted(groups.items()))


@dataclass(frozen=True)
class TakePool:
    """All takes of a stage's inputs."""

    takes: Sequence[Take]

    def inventory(self, is_held_out: bool, unusable: Collection[Take] = ()) -> Inventory:
        """Return the takes of a split, without those that turned out to be unusable."""
        groups: dict[str, list[Take]] = defaultdict(list)
        for take in self.takes:
            if take.is_held_out is is_held_out and take not in unusable:
                groups[take.name].append(take)
        backgrounds = groups.pop(BACKGROUND, [])
        return Inventory(dict(sorted(groups.items())), backgrounds)


def find_takes(config: ComposeSoundscapesConfig) -> tuple[TakePool, list[BadSample]]:
    """Find the takes of all inputs, and segments that cannot be used.

    Raises:
        ConfigError: a folder without recordings, without held-out ones that are needed, or whose sounds have one label.
    """
    needs_held_out = config.test_clips > 0
    sounds = find_sounds(config.events, "events", needs_held_out)
    labels = {sound.name for sound in sounds}
    if len(labels) == 1:
        raise ConfigError(
            f"events: all recordings have the label {labels.pop()!r}",
            "",
            "put the recordings of each sound into a folder with its name, or set `label` to a pattern of file names",
        )
    takes = [Take(sound.name, sound.path, sound.held_out) for sound in sounds]
    takes += _unlabelled_takes(config.music, "music", MUSIC, needs_held_out)
    takes += _unlabelled_takes(config.backgrounds, "backgrounds", BACKGROUND, needs_held_out)
    speech, bad = _read_speech(config)
    return TakePool([*takes, *speech]), bad


# Private


def _unlabelled_takes(
    folders: Sequence[SoundFolder], key: str, name: str, needs_held_out: bool
) -> list[Take]:
    sources = [SoundSource(folder=source.folder, held_out=source.held_out) for source in folders]
    return [Take(name, sound.path, sound.held_out) for sound in find_sounds(sources, key, needs_held_out)]


def _read_speech(config: ComposeSoundscapesConfig) -> tuple[list[Take], list[BadSample]]:
    """Takes of the segments whose texts are trusted, and segments that cannot be used.

    A speaker is held out where all segments are of the test split.
    """
    rows: list[tuple[str, SegmentRow]] = []
    bad: list[BadSample] = []
    for path in config.segments:
        segments, malformed = read_segments(path)
        rows += [(str(path), row) for row in segments if row.kind == "speech"]
        bad += malformed
    trained = {row.speaker for _, row in rows if row.split != "test"}
    takes = []
    for place, row in rows:
        is_held_out = row.split == "test"
        is_usable = row.text_refused is None and len(row.text.split()) >= _MIN_WORDS
        if not is_usable or not _SHORTEST_SPEECH_S <= row.duration_s <= config.speech_s:
            continue
        if is_held_out and row.speaker in trained:
            reason = f"its speaker {row.speaker!r} is trained on, and held-out clips have other speakers"
            bad.append(BadSample(place, row.id, reason, "speaker of two splits"))
            continue
        text = " ".join(row.text.split())
        takes.append(
            Take(SPEECH, Path(row.path), is_held_out, row.start_s, row.end_s, speaker=row.speaker, text=text)
        )
    return takes, bad
