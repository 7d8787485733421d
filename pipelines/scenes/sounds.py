"""Labelled sounds for scenes: recordings that are found, split, cut to their loudest part; or sounds made here.

Made sounds are bells, drums and whistles over rain and wind, each take another draw. They are for a first run; a model
that has heard nothing else knows nothing of the world.

Shapes: N samples.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.signal
import torch
from numpy.typing import NDArray

from audiollm.audio.discovery import AudioError, find_audio, links_note
from audiollm.audio.files import load, save
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


def load_leveled_span(
    path: Path, sample_rate: int, start_s: float, end_s: float | None
) -> NDArray[np.float32]:
    """A span `[N]` of a recording; its level is 1 (RMS).

    Raises:
        AudioError: it cannot be read, or is silent.
    """
    span_N = load(path, start_s, end_s, sample_rate=sample_rate, mono=True).samples_CN[0].numpy()
    if not np.abs(span_N).max() > _SILENCE:
        raise AudioError(path, f"is silent from {start_s:.2f} s on: leave it out")
    return _leveled(span_N.astype(np.float32))


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


TAKES = 40
HELD_OUT_TAKES = 8
_PEAK = 0.5
_EVENT_S, _BACKDROP_S = 0.8, 6.0

Draw = np.random.Generator
Sound = NDArray[np.float64]


def make_sounds(folder: Path, sample_rate: int, seed: int) -> tuple[list[SoundSource], list[SoundSource]]:
    """Write takes of all made sounds below `folder`; files that are there stay.

    Returns:
        Sources of events and of backdrops; their last takes are held out.
    """
    sources = []
    for kind, (makers, seconds) in {
        "events": (_EVENTS, _EVENT_S),
        "backdrops": (_BACKDROPS, _BACKDROP_S),
    }.items():
        for number, (label, make) in enumerate(makers.items()):
            for take in range(TAKES):
                which = "test" if take >= TAKES - HELD_OUT_TAKES else "train"
                path = folder / kind / label / f"{which}-{take:02d}.wav"
                if not path.exists():
                    draw = np.random.default_rng((seed, number, take, len(kind)))
                    sound_N = make(round(seconds * sample_rate), sample_rate, draw)
                    sound_N *= _PEAK / np.abs(sound_N).max()
                    path.parent.mkdir(parents=True, exist_ok=True)
                    save(path, torch.from_numpy(sound_N.astype(np.float32))[None], sample_rate)
        sources.append([SoundSource(folder=folder / kind, held_out="test-*")])
    return sources[0], sources[1]


# Private


def _time(samples: int, rate: int) -> Sound:
    return np.arange(samples) / rate


def _bell(samples: int, rate: int, draw: Draw) -> Sound:
    time, base = _time(samples, rate), draw.uniform(500, 900)
    partials = [(1.0, 1.0), (2.76, 0.5), (5.4, 0.25)]
    rings = [a * np.sin(2 * np.pi * base * r * time) * np.exp(-time * (3 + 2 * r)) for r, a in partials]
    return np.asarray(np.sum(rings, axis=0))


def _drum(samples: int, rate: int, draw: Draw) -> Sound:
    time, base = _time(samples, rate), draw.uniform(70, 130)
    swept = 2 * np.pi * base * (time + 0.03 * (1 - np.exp(-time / 0.03)))
    return np.asarray(np.sin(swept) * np.exp(-time * draw.uniform(7, 12)))


def _whistle(samples: int, rate: int, draw: Draw) -> Sound:
    time = _time(samples, rate)
    sweep = draw.uniform(1200, 1800) * time + 0.5 * draw.uniform(600, 1200) * time**2
    return np.asarray(np.sin(2 * np.pi * sweep) * np.minimum(1, time / 0.01) * (time < 0.45))


def _horn(samples: int, rate: int, draw: Draw) -> Sound:
    time, base = _time(samples, rate), draw.uniform(180, 260)
    tones = [np.sin(2 * np.pi * base * n * time) / n for n in range(1, 9)]
    return np.asarray(np.sum(tones, axis=0) * np.minimum(1, time / 0.03) * (time < 0.5))


def _shaker(samples: int, rate: int, draw: Draw) -> Sound:
    time = _time(samples, rate)
    shakes = np.maximum(0, np.sin(2 * np.pi * draw.uniform(7, 10) * time)) * np.exp(-4 * time)
    return _band(draw.standard_normal(samples), rate, 3000, 7000) * shakes


def _click(samples: int, rate: int, draw: Draw) -> Sound:
    time = _time(samples, rate)
    noise = _band(draw.standard_normal(samples), rate, 1500, 3500)
    return noise * np.exp(-time * draw.uniform(60, 100))


def _rain(samples: int, rate: int, draw: Draw) -> Sound:
    drops = (draw.random(samples) < 0.02) * draw.exponential(size=samples)
    return _band(draw.standard_normal(samples) * 0.3 + drops, rate, 1000, 7000)


def _wind(samples: int, rate: int, draw: Draw) -> Sound:
    time = _time(samples, rate)
    gusts = 1 + 0.7 * np.sin(2 * np.pi * (0.3 * time + draw.random()))
    return _band(draw.standard_normal(samples), rate, 80, 500) * gusts


def _band(noise_N: Sound, rate: int, low: float, high: float) -> Sound:
    band = scipy.signal.butter(2, [low, min(high, 0.45 * rate)], "bandpass", fs=rate, output="sos")
    return np.asarray(scipy.signal.sosfilt(band, noise_N))


_EVENTS: Mapping[str, Callable[[int, int, Draw], Sound]] = {
    "bell": _bell,
    "click": _click,
    "drum": _drum,
    "horn": _horn,
    "shaker": _shaker,
    "whistle": _whistle,
}
_BACKDROPS: Mapping[str, Callable[[int, int, Draw], Sound]] = {"rain": _rain, "wind": _wind}
