"""Material of the judges' tests: three "texts" are three melodies, two "speakers" are two timbres."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from audiollm.evaluate.judges.classifier import ClipClassifier

TEXTS = {"one": (1.0, 1.8), "two": (1.8, 1.0), "three": (1.4, 1.4)}
SPEAKERS = ("anna", "bert")
DECAYS = {"anna": 0.85, "bert": 0.4, "carl": 0.8, "dora": 0.3}
"""How loud a partial is in parts of the one below. carl and dora are voices for tests of what was never trained on."""
RATE = 16_000
JUDGE_STEPS = 40


def melody(text: str, speaker: str, take: int) -> Tensor:
    """A glide `[1, samples]` with many partials (anna, carl) or few (bert, dora), different from take to take."""
    random = np.random.default_rng([sorted(TEXTS).index(text), list(DECAYS).index(speaker), take])
    seconds = random.uniform(0.3, 0.5)
    low, high = TEXTS[text]
    pitch_hz = random.uniform(180, 220) * np.linspace(low, high, int(seconds * RATE))
    phase = 2 * np.pi * np.cumsum(pitch_hz) / RATE
    partials = np.arange(1, 15)[:, None]
    sound = (DECAYS[speaker] ** partials * np.sin(partials * phase)).sum(axis=0)
    sound *= random.uniform(0.02, 0.08)
    sound += 1e-4 * random.standard_normal(len(sound))
    return torch.tensor(sound, dtype=torch.float32)[None]


def toy_set(takes: Sequence[int]) -> tuple[list[tuple[Tensor, int]], list[str], list[str]]:
    keys = [(text, speaker, take) for text in TEXTS for speaker in SPEAKERS for take in takes]
    return [(melody(*key), RATE) for key in keys], [key[0] for key in keys], [key[1] for key in keys]


def accuracy(judge: ClipClassifier, clips: Sequence[tuple[Tensor, int]], labels: Sequence[str]) -> float:
    return float(
        np.mean([got == label for (got, _), label in zip(judge.predict_many(clips), labels, strict=True)])
    )
