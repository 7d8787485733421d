"""Does a tokenizer keep voices voiced, and at their pitch? Figures and an alarm for the end of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audiollm.audio.mixing import mix, mono_channel
from audiollm.evaluate.judges.voicing import (
    Voicing,
    close_pitch_share,
    harmonicity,
    periodicity_error,
    track_voicing,
    voicing_f1,
)
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.files.atomic import read_jsonl, write_jsonl
from audiollm.recipe.runner import Context
from tokenizer.clips import RandomClips

MEASURED_S = 30.0
"""Audio whose pitch is tracked, in all; pYIN takes 0.2 to 0.5 CPU-s per second and side."""
MAX_CLIP_S = 6.0
WHISPER = 0.5
"""An alarm rises where the decoded sound's voiced share is below this share of the original's."""
SPEECH_VOICED_SHARE = 0.2
"""Audio with fewer voiced frames is not taken for speech, and raises no alarm."""


@torch.no_grad()
def voicing_figures(reconstruct: Callable[[Tensor], Tensor], clips: RandomClips) -> dict[str, float]:
    """Means over held-out clips: F1 of voicing, share of voiced frames within 50 cents, periodicity, voiced shares.

    A clip without voiced frames counts in the voiced shares and the periodicity error alone; a figure that no clip has
    is left out. The tracker (pYIN) is not the one of the training labels.

    Args:
        reconstruct: a waveform `[C, N]` to what is decoded from its codes or latents, `[C, >= N]`.
    """
    values_by_figure: dict[str, list[float]] = {}
    measured_s = 0.0
    for _, samples in clips.picked(len(clips)):
        real_CN = torch.atleast_2d(samples)[:, : round(MAX_CLIP_S * clips.sample_rate)]
        made_CN = reconstruct(real_CN)[:, : real_CN.shape[1]]
        channel = mono_channel(real_CN)
        try:
            real, decoded = (
                track_voicing(mix(x_CN, channel), clips.sample_rate) for x_CN in (real_CN, made_CN)
            )
        except MetricError:
            continue  # too short to have a pitch
        for name, value in _measures(real, decoded).items():
            values_by_figure.setdefault(name, []).append(value)
        measured_s += real_CN.shape[1] / clips.sample_rate
        if measured_s >= MEASURED_S:
            break
    return {name: float(np.mean(values)) for name, values in values_by_figure.items()}


def voicing_alarm(figures: Mapping[str, float]) -> str | None:
    """Why the voices whisper; None where they do not, or where the audio holds little voice."""
    real, decoded = figures.get("voiced_share_original", 0.0), figures.get("voiced_share", 0.0)
    if real < SPEECH_VOICED_SHARE or decoded >= WHISPER * real:
        return None
    return (
        f"voices whisper: {decoded:.0%} of the decoded frames are voiced, {real:.0%} of the originals'; train longer, "
        "raise pitch_weight, or check that the training audio holds single voices"
    )


def warn_of_whispers(figures: Mapping[str, Any], context: Context) -> None:
    """Say and record the alarm, if voiced speech comes out unvoiced."""
    text = voicing_alarm(figures)
    if text is None:
        return
    context.say(f"alarm, whisper: {text}")
    path = context.folder / "alarms.jsonl"
    before = read_jsonl(path) if path.exists() else []
    write_jsonl(path, [*before, {"step": figures["steps"], "kind": "whisper", "text": text}])


def _measures(real: Voicing, decoded: Voicing) -> dict[str, float]:
    values = {
        "voiced_share_original": real.voiced_share,
        "voiced_share": decoded.voiced_share,
        "periodicity_error": periodicity_error(real, decoded),
    }
    if real.voiced_F.any():
        values["voicing_f1"] = voicing_f1(real, decoded)
        values["close_pitch"] = close_pitch_share(real, decoded)
        values["harmonicity_original"] = harmonicity(real)
        values["harmonicity"] = harmonicity(decoded) if decoded.voiced_F.any() else 0.0
    return values
