"""The step `levels`: how loud a clip is over time, and when its energy rises.

Shapes: N samples, T steps of time.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from pipelines.audiocot.answers.evidence import LEVEL_STEP_S
from pipelines.audiocot.clip import SoundClip
from pipelines.steps.step import Resources, StepConfig, Value

FLOOR_DBFS = -120.0
_RATE = 16_000


class LevelsConfig(StepConfig):
    """Settings of `levels`: none."""


class Levels:
    """Level and peak of a clip, its level every tenth of a second, and the onsets of its sounds."""

    name = "levels"
    level: ClassVar[Literal["clip"]] = "clip"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 2
    shared: ClassVar[bool] = True
    resources = Resources()

    def __init__(self, config: LevelsConfig) -> None:
        del config

    def missing(self) -> str | None:
        return None

    def setup(self) -> None:
        """Import the detector of onsets with the functions that it compiles: 1.5 CPU-seconds that processes share."""
        import torch

        from audiollm.audio import Waveform
        from audiollm.evaluate.sound.sound_measures import energy_onsets

        energy_onsets(Waveform(torch.linspace(0, 1, _RATE // 4)[None], _RATE))

    def process(self, item: SoundClip) -> Value:
        """Measure the sound in mono: `{level_dbfs, peak_dbfs, curve_dbfs: [one per LEVEL_STEP_S], onsets_s: [...]}`."""
        import torch

        from audiollm.audio import Waveform
        from audiollm.audio.samples import peak_dbfs, rms_dbfs
        from audiollm.evaluate.sound.sound_measures import energy_onsets

        mono_1N = item.waveform().mono().samples_CN
        samples_N = np.array(item.samples(_RATE))
        step = round(LEVEL_STEP_S * _RATE)
        padded_N = np.pad(samples_N.astype(np.float64), (0, -len(samples_N) % step))
        power_T = (padded_N.reshape(-1, step) ** 2).mean(axis=1)
        curve_T = 10 * np.log10(np.maximum(power_T, 10 ** (FLOOR_DBFS / 10)))
        onsets_s = energy_onsets(Waveform(torch.from_numpy(samples_N)[None], _RATE))
        return {
            "level_dbfs": round(max(rms_dbfs(mono_1N), FLOOR_DBFS), 2),
            "peak_dbfs": round(max(peak_dbfs(mono_1N), FLOOR_DBFS), 2),
            "curve_dbfs": [round(float(value), 1) for value in curve_T],
            "onsets_s": [round(float(value), 3) for value in onsets_s],
        }
