"""The benchmark learn-flow: its control exchanges conditions alone, its judge hears order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from audiollm.audio import Waveform, save
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart
from audiollm.evaluate.sound.generated_sounds import GeneratedSound, TargetEvent

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import learn_flow as bench


class Pitches:
    """Two classes by the strongest frequency."""

    def __init__(self) -> None:
        self.labels = ["low", "high"]

    def logits(self, sound: Waveform) -> np.ndarray[Any, Any]:
        power = np.abs(np.fft.rfft(sound.samples_CN[0].numpy())) ** 2
        middle = round(1000 / (sound.sample_rate / 2) * len(power))
        return np.log(np.array([power[:middle].sum(), power[middle:].sum()]) + 1e-9)


def scene(number: int) -> Sample:
    messages = [
        Message(role="user", content=[VideoPart(path=f"{number}.mp4"), TextPart(text=f"caption {number}")]),
        Message(role="assistant", content=[AudioPart(path=f"{number}.flac")]),
    ]
    facts = {
        "caption": f"caption {number}",
        "thought": f"thought {number}",
        "events": [number],
        "split": "test",
    }
    return Sample(id=str(number), messages=messages, task="sound", metadata=facts)


def test_the_control_exchanges_conditions_and_keeps_the_sounds() -> None:
    scenes = [scene(number) for number in range(3)]
    for own, other, found in zip(scenes, [*scenes[1:], scenes[0]], bench.exchanged(scenes), strict=True):
        assert found.messages == [other.messages[0], own.messages[1]]
        assert found.metadata["events"] == own.metadata["events"]
        assert found.metadata["thought"] == other.metadata["thought"]


def test_order_is_heard(tmp_path: Path) -> None:
    time = torch.arange(8_000) / bench.RATE
    low, high = (0.4 * torch.sin(2 * torch.pi * f * time) * torch.exp(-8 * time) for f in (300.0, 3_000.0))
    pause = torch.zeros(12_000)
    save(tmp_path / "a.wav", torch.cat([pause, low, pause, high])[None], bench.RATE)
    save(tmp_path / "b.wav", torch.cat([pause, high, pause, low])[None], bench.RATE)
    save(tmp_path / "c.wav", torch.zeros(1, 40_000), bench.RATE)
    events = (TargetEvent("low", 0.75, 1.2), TargetEvent("high", 2.0, 2.4))
    heard = {
        name: bench.right_order(
            GeneratedSound(name, tmp_path / f"{name}.wav", None, None, None, None, events), Pitches()
        )
        for name in "abc"
    }
    assert heard == {"a": True, "b": False, "c": False}
