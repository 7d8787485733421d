"""Steps that every run has and that need no model: `probe` (the form of a file), `clips` (where it is cut), `levels`
(loudness over time and onsets), and `motion` (when something moves in the pictures, and where).

Shapes: N samples, T steps of time, F pictures, H rows, W columns of pixels.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from pipelines.audiocot.answers.evidence import LEVEL_STEP_S
from pipelines.audiocot.clip import ClipStep, FileStep, SoundClip, SoundFile
from pipelines.steps.step import StepConfig, Value

_WHOLE_SHARE = 0.995
"""A clip that is shorter by less than this share is taken for whole: encoders pad, and headers round."""


class SourceProbeConfig(StepConfig):
    """Settings of `probe`: none."""


class SourceProbe(FileStep[SourceProbeConfig]):
    """Length and form of a file's sound and pictures."""

    name = "probe"
    settings = SourceProbeConfig
    version: ClassVar[int] = 3
    shared: ClassVar[bool] = True

    def setup(self) -> None:
        """Import what reads files: 1.7 CPU-seconds that processes share."""
        for name in ("audiollm.audio.files", "audiollm.audio.streams", "audiollm.video.frames"):
            import_module(name)

    def process(self, item: SoundFile) -> Value:
        """`duration_s` is that of the sound that is there; `length`, a sentence where its header promises another.
        No path is told: values are kept by content.

        Raises:
            AudioError: no sound, or of no form that is known.
        """
        from audiollm.audio import probe
        from audiollm.audio.streams import stream_mono
        from audiollm.video import frames

        info = probe(item.path)
        heard_s = sum(piece_1N.shape[1] for piece_1N in stream_mono(item.path, info.sample_rate))
        duration_s = heard_s / info.sample_rate
        probed: Value = {
            "duration_s": round(duration_s, 6),
            "length": info.difference(duration_s),
            "sample_rate": info.sample_rate,
            "num_channels": info.num_channels,
            "codec": info.codec,
            "has_pictures": False,
        }
        video = item.facts.video
        try:
            video_info = frames.probe_video(video or item.path)
        except frames.VideoError as error:
            if video is not None:
                raise frames.VideoError(
                    video, f"its pictures in {Path(video).name}: {error.reason}"
                ) from None
            return probed
        return {**probed, "has_pictures": True, "width": video_info.width, "height": video_info.height}


class ClipsConfig(StepConfig):
    """Settings of `clips`."""

    clip_s: float | None = Field(9.1, gt=0)
    """Length of every clip; None: a file is one clip."""


class CutClips(FileStep[ClipsConfig]):
    """Cuts a file into clips of one length; what is left over at its end is a shorter clip."""

    name = "clips"
    settings = ClipsConfig
    needs: tuple[str, ...] = ("probe",)

    def process(self, item: SoundFile) -> Value:
        """`{clips: [[start_s, end_s], ...]}`."""
        duration_s = item.values["probe"]["duration_s"]
        length_s = self.config.clip_s or duration_s
        starts = [n * length_s for n in range(int(duration_s / length_s) + 1)]
        cuts = [(round(start_s, 6), round(min(start_s + length_s, duration_s), 6)) for start_s in starts]
        if len(cuts) > 1 and cuts[-1][1] - cuts[-1][0] < (1 - _WHOLE_SHARE) * length_s:
            cuts.pop()
        return {"clips": [list(cut) for cut in cuts if cut[1] > cut[0]]}


FLOOR_DBFS = -120.0
_RATE = 16_000


class LevelsConfig(StepConfig):
    """Settings of `levels`: none."""


class Levels(ClipStep[LevelsConfig]):
    """Level and peak of a clip, its level every tenth of a second, and the onsets of its sounds."""

    name = "levels"
    settings = LevelsConfig
    version: ClassVar[int] = 2
    shared: ClassVar[bool] = True

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


class Motion(ClipStep[MotionConfig]):
    """Moments of movement: the peaks of the change from picture to picture."""

    name = "motion"
    settings = MotionConfig
    needs: tuple[str, ...] = ("probe",)

    def process(self, item: SoundClip) -> Value:
        """`{moments: [{at_s, place, strength}], cuts: n}`; empty for a clip without pictures.

        Raises:
            VideoError: the pictures cannot be read.
        """
        if item.video is None:
            return {"moments": [], "cuts": 0}
        timed_pictures = list(item.pictures(self.config.frame_rate, _SIDE))
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
