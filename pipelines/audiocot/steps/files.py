"""The steps of files: `probe`, what a file holds, and `clips`, where it is cut."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from pipelines.audiocot.clip import SoundFile
from pipelines.steps.step import Resources, StepConfig, Value

_WHOLE_SHARE = 0.995
"""A clip that is shorter by less than this share is taken for whole: encoders pad, and headers round."""


class SourceProbeConfig(StepConfig):
    """Settings of `probe`: none."""


class SourceProbe:
    """Length and form of a file's sound and pictures."""

    name = "probe"
    level: ClassVar[Literal["file"]] = "file"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 3
    shared: ClassVar[bool] = True
    resources = Resources()

    def __init__(self, config: SourceProbeConfig) -> None:
        del config

    def missing(self) -> str | None:
        return None

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


class CutClips:
    """Cuts a file into clips of one length; what is left over at its end is a shorter clip."""

    name = "clips"
    level: ClassVar[Literal["file"]] = "file"
    needs: tuple[str, ...] = ("probe",)
    version: ClassVar[int] = 1
    resources = Resources()

    def __init__(self, config: ClipsConfig) -> None:
        self._length_s = config.clip_s

    def missing(self) -> str | None:
        return None

    def setup(self) -> None:
        """Nothing to load."""

    def process(self, item: SoundFile) -> Value:
        """`{clips: [[start_s, end_s], ...]}`."""
        duration_s = item.values["probe"]["duration_s"]
        length_s = self._length_s or duration_s
        starts = [n * length_s for n in range(int(duration_s / length_s) + 1)]
        cuts = [(round(start_s, 6), round(min(start_s + length_s, duration_s), 6)) for start_s in starts]
        if len(cuts) > 1 and cuts[-1][1] - cuts[-1][0] < (1 - _WHOLE_SHARE) * length_s:
            cuts.pop()
        return {"clips": [list(cut) for cut in cuts if cut[1] > cut[0]]}
