"""Labelled sounds that need no recordings: bells, drums and whistles over rain and wind, each take another draw.

They are for a first run; a model that has heard nothing else knows nothing of the world.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import scipy.signal
import torch
from numpy.typing import NDArray

from audiollm.audio.files import save
from pipelines.scenes.settings import SoundSource

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
