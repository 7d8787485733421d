"""The step `motion`: moments at which something moves in the pictures, and where.

Shapes: F pictures, H rows, W columns of pixels.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from pipelines.audiocot.clip import SoundClip
from pipelines.steps.step import Resources, StepConfig, Value

_SIDE = 48
_CUT = 40.0
"""Mean change of a pixel, of 255, from which a new picture is a cut and no movement."""
_STRONG = 3.0
"""A movement is this many times as strong as the median change."""
_MIN_STRENGTH = 0.5
_PLACES = ("on the left", "in the middle", "on the right")


class MotionConfig(StepConfig):
    """Settings of `motion`."""

    frame_rate: float = Field(12.0, gt=0, le=60)
    """Pictures per second that are compared."""


class Motion:
    """Moments of movement: the peaks of the change from picture to picture."""

    name = "motion"
    level: ClassVar[Literal["clip"]] = "clip"
    needs: tuple[str, ...] = ("probe",)
    version: ClassVar[int] = 1
    resources = Resources()

    def __init__(self, config: MotionConfig) -> None:
        self._frame_rate = config.frame_rate

    def missing(self) -> str | None:
        return None

    def setup(self) -> None:
        """Nothing to load."""

    def process(self, item: SoundClip) -> Value:
        """`{moments: [{at_s, place, strength}], cuts: n}`; empty for a clip without pictures.

        Raises:
            VideoError: the pictures cannot be read.
        """
        if item.video is None:
            return {"moments": [], "cuts": 0}
        timed_pictures = list(item.pictures(self._frame_rate, _SIDE))
        grey_FHW = np.stack([picture_HWC.mean(axis=2) for _, picture_HWC in timed_pictures])
        times = [time_s for time_s, _ in timed_pictures]
        change_FHW = np.abs(np.diff(grey_FHW, axis=0))
        strength_F = change_FHW.mean(axis=(1, 2))
        is_cut_F = strength_F >= _CUT
        floor = (
            max(_MIN_STRENGTH, _STRONG * float(np.median(strength_F))) if len(strength_F) else _MIN_STRENGTH
        )
        moments = []
        for number, strength in enumerate(strength_F):
            around_F = strength_F[max(0, number - 2) : number + 3]
            if is_cut_F[number] or strength < floor or strength < around_F.max():
                continue
            columns_W = change_FHW[number].sum(axis=0)
            middle = float((columns_W * np.arange(_SIDE)).sum() / max(columns_W.sum(), 1e-9)) / _SIDE
            place = _PLACES[min(2, int(3 * middle))]
            # what is heard at a time is seen in the picture after it
            at_s = (times[number] + times[number + 1]) / 2
            moments.append({"at_s": round(at_s, 3), "place": place, "strength": round(float(strength), 2)})
        return {"moments": moments, "cuts": int(is_cut_F.sum())}
