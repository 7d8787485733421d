"""Are generated voices voiced, and at the pitch of the speaker who was asked for? Tracked by pYIN.

Shapes: N samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from audiollm.audio import AudioError, load
from audiollm.evaluate.judges.judging import SpeechClip
from audiollm.evaluate.judges.voicing import Voicing, track_voicing
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.recipe.runner import Context

MAX_CLIPS_PER_SPEAKER = 20
"""Clips of each speaker and set whose pitch is tracked: it takes some 0.2 s per second of sound."""
SEMITONES = 2.0
"""A generated clip's mean pitch is right within this distance of the speaker's own."""


def voicing_scores(sets: Mapping[str, Sequence[SpeechClip]], context: Context) -> dict[str, dict[str, Any]]:
    """Voiced share and mean pitch of each set of clips.

    Args:
        sets: by name; the clips of `real` give each speaker's own pitch (the median of their mean pitches).

    Returns:
        Of each set: `voiced_share`, the mean over its clips; `pitch_right`, the share of clips whose mean pitch is
        within `SEMITONES` of their speaker's own; `by_speaker`, the median of the mean pitch in Hz; `n`, the clips
        tracked. A clip without voice has the wrong pitch; a share over no clip is None.
    """
    tracked_clips = {name: _first_clips_by_speaker(clips) for name, clips in sets.items()}
    tracked: dict[str, list[tuple[str, Voicing]]] = {}
    with context.progress("tracking pitch", sum(map(len, tracked_clips.values()))) as progress:
        for name, clips in tracked_clips.items():
            tracked[name] = []
            for clip in clips:
                voicing = _track_pitch(clip)
                if voicing is not None:
                    tracked[name].append((clip.speaker or "", voicing))
                progress.advance(progress.task_ids[0])
    pitch_of_speaker = _pitch_by_speaker(tracked["real"])
    return {name: _summarize_voicing(rows, pitch_of_speaker) for name, rows in tracked.items()}


def _first_clips_by_speaker(clips: Sequence[SpeechClip]) -> list[SpeechClip]:
    """The first clips of each speaker."""
    groups: dict[str | None, list[SpeechClip]] = defaultdict(list)
    for clip in clips:
        if clip.path is not None:
            groups[clip.speaker].append(clip)
    return [clip for group in groups.values() for clip in group[:MAX_CLIPS_PER_SPEAKER]]


def _track_pitch(clip: SpeechClip) -> Voicing | None:
    """None where the clip cannot be read or is too short; the other judges tell."""
    assert clip.path is not None
    try:
        wave = load(clip.path, clip.start_s, clip.end_s, mono=True)
        return track_voicing(wave.samples_CN, wave.sample_rate)
    except (AudioError, MetricError):
        return None


def _pitch_by_speaker(rows: Sequence[tuple[str, Voicing]]) -> dict[str, float]:
    """The median over a speaker's voiced clips of their mean pitch."""
    pitches: dict[str, list[float]] = defaultdict(list)
    for speaker, voicing in rows:
        if voicing.voiced_F.any():
            pitches[speaker].append(voicing.mean_pitch_hz)
    return {speaker: sorted(values)[len(values) // 2] for speaker, values in pitches.items()}


def _summarize_voicing(
    rows: Sequence[tuple[str, Voicing]], pitch_of_speaker: Mapping[str, float]
) -> dict[str, Any]:
    with_pitch = [
        (pitch_of_speaker[speaker], voicing) for speaker, voicing in rows if speaker in pitch_of_speaker
    ]
    right = [
        voicing.voiced_F.any() and abs(12 * math.log2(voicing.mean_pitch_hz / pitch)) <= SEMITONES
        for pitch, voicing in with_pitch
    ]
    return {
        "n": len(rows),
        "voiced_share": sum(voicing.voiced_share for _, voicing in rows) / len(rows) if rows else None,
        "pitch_right": sum(right) / len(right) if right else None,
        "by_speaker": {speaker: round(hz, 1) for speaker, hz in _pitch_by_speaker(rows).items()},
    }
