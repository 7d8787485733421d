"""The sound of a planned clip, and its sample.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audiollm.audio.discovery import AudioError
from audiollm.audio.files import save
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from pipelines.scenes.sounds import load_backdrop, load_event, load_leveled_span
from pipelines.soundscapes.planning import PlannedClip
from pipelines.soundscapes.questions import KINDS
from pipelines.soundscapes.settings import LEAD_S, TAIL_S, ComposeSoundscapesConfig
from pipelines.soundscapes.takes import BACKGROUND, SPEECH, Take

TASK = "audio_qa"
_PEAK = 0.98
_CACHED_TAKES = 512


class SoundLoader:
    """Loads the sound of takes and backgrounds, the last few from memory."""

    def __init__(self, config: ComposeSoundscapesConfig) -> None:
        self._config = config
        self._load = lru_cache(maxsize=_CACHED_TAKES)(self._load_take)

    def event(self, take: Take) -> NDArray[np.float32]:
        """The sound `[N]` of a take; its level is 1 (RMS).

        Raises:
            AudioError: it cannot be read, or is silent.
        """
        return self._load(take)

    def unusable(self, takes: Iterable[Take]) -> dict[Take, str]:
        """Takes that cannot be read or are silent, with the reason."""
        reasons = {}
        for take in dict.fromkeys(takes):
            try:
                if take.name == BACKGROUND:
                    load_backdrop(take.path, self._config.sample_rate, 1, np.random.default_rng(0))
                else:
                    self.event(take)
            except AudioError as error:
                reasons[take] = error.reason
        return reasons

    def _load_take(self, take: Take) -> NDArray[np.float32]:
        rate = self._config.sample_rate
        if take.name == SPEECH:
            return load_leveled_span(take.path, rate, take.start_s, take.end_s)
        return load_event(take.path, rate, self._config.event_s)


def mix_clip(
    clip: PlannedClip, config: ComposeSoundscapesConfig, loader: SoundLoader
) -> tuple[NDArray[np.float32], list[tuple[float, float]]]:
    """The sound `[N]` of a clip, and start and end of its events in seconds."""
    rate, start = config.sample_rate, round(LEAD_S * config.sample_rate)
    placed = []
    for event, gap_s in zip(clip.question.events, [*clip.gaps_s, 0.0], strict=True):
        sound_N = loader.event(event.take) * _gain(config.event_dbfs + event.gain_db)
        placed.append((start, sound_N))
        start += len(sound_N) + round(gap_s * rate)
    samples_N = np.zeros(start + round(TAIL_S * rate), np.float32)
    for first, sound_N in placed:
        samples_N[first : first + len(sound_N)] = sound_N
    if clip.background is not None:
        draw = np.random.default_rng(clip.seed)
        behind_N = load_backdrop(clip.background.path, rate, len(samples_N), draw)
        samples_N += behind_N * _gain(config.background_dbfs)
    peak = float(np.abs(samples_N).max())
    spans_s = [(first / rate, (first + len(sound_N)) / rate) for first, sound_N in placed]
    return samples_N * np.float32(min(1.0, _PEAK / peak)), spans_s


def write_clip(
    clip: PlannedClip, config: ComposeSoundscapesConfig, loader: SoundLoader, folder: Path
) -> Sample:
    """Write the sound of a clip below `folder`, and return its question."""
    samples_N, spans_s = mix_clip(clip, config, loader)
    path = folder / "clips" / f"{clip.id}.wav"
    save(path, torch.from_numpy(samples_N)[None], config.sample_rate)
    question = clip.question
    events = [
        {
            "name": event.take.name,
            "start_s": round(start_s, 3),
            "end_s": round(end_s, 3),
            "dbfs": round(config.event_dbfs + event.gain_db, 2),
            "recording": event.take.path.name,
            **({"speaker": event.take.speaker, "text": event.take.text} if event.take.name == SPEECH else {}),
        }
        for event, (start_s, end_s) in zip(question.events, spans_s, strict=True)
    ]
    metadata: dict[str, Any] = {
        "split": "test" if clip.is_held_out else "train",
        "domain": KINDS[question.kind].domain,
        "category": question.kind,
        "choices": list(question.choices),
        "thought": question.thought,
        "heard": list(dict.fromkeys(event["name"] for event in events)),
        "events": events,
    }
    if clip.background is not None:
        metadata["background"] = clip.background.path.name
    messages = [
        Message(role="user", content=[AudioPart(path=str(path)), TextPart(text=question.question)]),
        Message(role="assistant", content=[TextPart(text=question.answer)]),
    ]
    return Sample(id=clip.id, messages=messages, task=TASK, metadata=metadata)


# Private


def _gain(dbfs: float) -> np.float32:
    return np.float32(10 ** (dbfs / 20))
