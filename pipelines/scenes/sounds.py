"""Labelled recordings for scenes: found, split, cut to their loudest part.

Shapes: N samples.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from audiollm.audio.discovery import AudioError, find_audio, links_note
from audiollm.audio.files import load
from audiollm.errors import ConfigError, suggestion
from pipelines.scenes.settings import SoundSource

_NUMBER_BEFORE = re.compile(r"^\d+\s*[-_. ]\s*")
_STEP_S = 0.01
_LOUD, _QUIET = 0.1, 0.03
"""Shares of the loudest 10 ms at which a sound begins and ends."""
_FADE_S = 0.02
_SILENCE = 1e-4
_TEST_SHARE = 0.1


@dataclass(frozen=True)
class LabelledSound:
    """A recording of a sound."""

    label: str
    name: str
    """Words of captions."""
    path: Path
    held_out: bool


def find_sounds(sources: Sequence[SoundSource], key: str, needs_held_out: bool = True) -> list[LabelledSound]:
    """Find the recordings of all sources.

    Args:
        key: of the setting, for errors.
        needs_held_out: test scenes are made.

    Raises:
        ConfigError: a folder without recordings, a label that no recording has, or no held-out ones that are needed.
    """
    all_sounds: list[LabelledSound] = []
    for number, source in enumerate(sources):
        where = f"{key}[{number}]"
        paths = find_audio(source.folder)[0]
        if not paths:
            problem = f"{where}.folder: no recordings in {source.folder}{links_note(source.folder)}"
            raise ConfigError(problem, "", "give a folder of labelled recordings")
        sounds = [sound for path in paths for sound in _labelled(source, path)]
        labels = {sound.label for sound in sounds}
        for label in source.labels or ():
            if label not in labels:
                raise ConfigError(f"{where}.labels: no recording of {label!r}", "", suggestion(label, labels))
        matching = [sound for sound in sounds if source.labels is None or sound.label in source.labels]
        for held_out, which in ((True, "held-out recordings"), (False, "recordings to train on")):
            is_needed = needs_held_out or not held_out
            if is_needed and not any(sound.held_out is held_out for sound in matching):
                remedy = "see `label` and `held_out`"
                raise ConfigError(f"{where}.folder: {source.folder} has no {which}", "", remedy)
        all_sounds += matching
    return all_sounds


def by_label(sounds: Iterable[LabelledSound]) -> dict[str, list[LabelledSound]]:
    """Group recordings by label, labels in order."""
    groups: dict[str, list[LabelledSound]] = defaultdict(list)
    for sound in sounds:
        groups[sound.label].append(sound)
    return dict(sorted(groups.items()))


def load_event(path: Path, sample_rate: int, longest_s: float) -> NDArray[np.float32]:
    """The loudest part `[N]` of a recording, from the moment at which it becomes loud; its level is 1 (RMS).

    Raises:
        AudioError: it cannot be read, or is silent.
    """
    samples_N = load(path, sample_rate=sample_rate, mono=True).samples_CN[0].numpy()
    step, longest = round(_STEP_S * sample_rate), round(longest_s * sample_rate)
    energies = np.add.reduceat(samples_N.astype(np.float64) ** 2, np.arange(0, len(samples_N), step))
    window = max(1, longest // step)
    sums = np.convolve(energies, np.ones(min(window, len(energies))), "valid")
    first = int(np.argmax(sums))
    levels = np.sqrt(energies[first : first + window] / step)
    if not levels.max() > _SILENCE:
        raise AudioError(path, "is silent: leave it out")
    loud = np.flatnonzero(levels > _LOUD * levels.max())
    audible = np.flatnonzero(levels > _QUIET * levels.max())
    start, end = (first + int(loud[0])) * step, (first + int(audible[-1]) + 1) * step
    part_N = samples_N[start : min(end, start + longest)].astype(np.float32)
    fade = min(len(part_N) // 2, round(_FADE_S * sample_rate))
    part_N[len(part_N) - fade :] *= np.linspace(1, 0, fade, dtype=np.float32)
    return _leveled(part_N)


def load_backdrop(
    path: Path, sample_rate: int, samples: int, draw: np.random.Generator
) -> NDArray[np.float32]:
    """A part `[samples]` of a recording, drawn at random and repeated where it is too short; its level is 1 (RMS).

    Raises:
        AudioError: it cannot be read, or is silent.
    """
    whole_N = load(path, sample_rate=sample_rate, mono=True).samples_CN[0].numpy()
    sounding = np.flatnonzero(np.abs(whole_N) > _SILENCE)
    if not len(sounding):
        raise AudioError(path, "is silent: leave it out")
    whole_N = whole_N[sounding[0] : sounding[-1] + 1]  # files are often filled up with silence
    start = int(draw.integers(len(whole_N)))
    repeats = -(-samples // len(whole_N)) + 1
    return _leveled(np.tile(whole_N, repeats)[start : start + samples].astype(np.float32))


# Private


def _labelled(source: SoundSource, path: Path) -> list[LabelledSound]:
    """The recording with its label; none where the expression does not fit."""
    below = path.relative_to(source.folder).as_posix()
    if source.label is None:
        label = _NUMBER_BEFORE.sub("", path.parent.name).lower()
    else:
        match = re.search(source.label, below)
        if match is None or not match[1]:
            return []
        label = match[1]
    if source.held_out is None:
        digest = hashlib.sha256(below.encode()).digest()
        is_held_out = int.from_bytes(digest[:4], "little") < _TEST_SHARE * 2**32
    else:
        is_held_out = fnmatch.fnmatchcase(path.name, source.held_out)
    return [LabelledSound(label, source.names.get(label, label), path, is_held_out)]


def _leveled(samples_N: NDArray[np.float32]) -> NDArray[np.float32]:
    level = float(np.sqrt(np.mean(samples_N.astype(np.float64) ** 2)))
    return (samples_N / max(level, _SILENCE)).astype(np.float32)
