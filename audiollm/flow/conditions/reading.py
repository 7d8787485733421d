"""The conditions in a sample: its words, its pictures, its sounds; and their reading for an encoder.

A sound sample has the wanted sound in the assistant's message. The user's message holds what it is made from: text (the
caption), a video part, and for an edit the track before it. The chain of thought is `metadata["thought"]`.

Shapes: F pictures, S side of a picture in pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from audiollm.data.records.sample import AudioPart, Sample, VideoPart
from audiollm.errors import BadSample
from audiollm.flow.conditions.pretrained import Pictures
from audiollm.video.decoders import VideoError
from audiollm.video.frames import frame_times, read_frames

COT = "thought"
"""The key of the chain of thought in a sample's metadata."""
TASK = "sound"
"""The task of sound samples."""


class SoundRequest(NamedTuple):
    """The content of a sample: what is asked for, and what is shown."""

    caption: str
    """Empty: there is none."""
    cot: str
    video: VideoPart | None
    track: AudioPart | None
    """The sound before an edit."""
    target: AudioPart | None
    """The sound to learn; None: it is to be made."""


def sound_request(sample: Sample, place: str) -> SoundRequest:
    """Read the request in a sample.

    Raises:
        BadSample: several videos, tracks or wanted sounds, or a CoT that is no text.
    """
    videos, tracks, targets = sample.video_parts(), sample.audio("user"), sample.audio("assistant")
    for name, parts in (("videos", videos), ("tracks", tracks), ("wanted sounds", targets)):
        if len(parts) > 1:
            raise BadSample(
                place, sample.id, f"has {len(parts)} {name}, and one can be used", f"several {name}"
            )
    cot = sample.metadata.get(COT, "")
    if not isinstance(cot, str):
        raise BadSample(place, sample.id, f"metadata {COT!r} must be text", "wrong chain of thought")
    caption = " ".join(text.strip() for text in sample.texts("user")).strip()
    first = [parts[0] if parts else None for parts in (videos, tracks, targets)]
    return SoundRequest(caption, cot.strip(), first[0], first[1], first[2])  # type: ignore[arg-type]


def read_pictures(
    video: VideoPart, duration_s: float, frame_rate: float, side: int, place: str, sample_id: str
) -> tuple[Pictures, list[float]]:
    """The pictures of a video beside a sound of `duration_s`, and their times from its beginning.

    Raises:
        BadSample: the video cannot be read, or is shorter than the sound by more than a picture.
    """
    end_s = video.start_s + duration_s
    if video.end_s is not None and video.end_s < end_s - 1.5 / frame_rate:
        shown_s = video.end_s - video.start_s
        reason = f"the video's span of {shown_s:.2f} s is shorter than the sound's {duration_s:.2f} s"
        raise BadSample(place, sample_id, reason, "video of another length")
    times = frame_times(video.start_s, end_s, frame_rate)
    boxes = [(box.at_s, box.x, box.y, box.width, box.height) for box in video.region]
    try:
        pictures = list(read_frames(video.path, times, side, boxes))
    except VideoError as error:
        raise BadSample(place, sample_id, str(error), "unreadable video") from error
    return pictures, [time - video.start_s for time in times]


def flat_pictures(pictures: Pictures) -> Tensor:
    """Pictures as rows `[F, 3 * S * S]`, float16 from 0 to 1, for encoders that are trained along."""
    stacked = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    return (stacked.float() / 255).to(torch.float16).flatten(1)
