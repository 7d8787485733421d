"""Prompts about tones with their right answers, and rewards of one's own, for tests of `train_policy`."""

from __future__ import annotations

from pathlib import Path

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.rl.rewards.batch import RewardBatch
from tests.audiollm.rl.preference.records import tone

OWN = "tests.audiollm.rl.online.prompt_records:"


def write_prompts(folder: Path, count: int = 10, held_out: int = 2) -> Path:
    """Which of two tones is heard, with one recording or two; the last ones are held out."""
    samples = []
    for n in range(count):
        parts: list[AudioPart | TextPart] = [TextPart(text="high?"[: 2 + n % 4])]
        for number in range(1 + n % 2):
            tone(folder / f"{n}-{number}.wav", 150.0 + 60 * n + 17 * number, 0.3 + 0.05 * n)
            parts.append(AudioPart(path=f"{n}-{number}.wav"))
        messages = [
            Message(role="user", content=parts),
            Message(role="assistant", content=[TextPart(text="high" if n % 2 else "low")]),
        ]
        split = {"split": "test"} if n >= count - held_out else {}
        samples.append(Sample(id=f"tone{n}", messages=messages, task="question", metadata=split))
    write_samples(folder / "prompts.jsonl", samples)
    return folder / "prompts.jsonl"


def brevity(batch: RewardBatch) -> list[float | None]:
    """The shorter the better."""
    return [-float(answer.num_tokens) for answer in batch]


def brevity_where_trained(batch: RewardBatch) -> list[float | None]:
    """The shorter the better for training prompts, the longer the better for held-out ones."""
    return [float(answer.num_tokens) * (1 if answer.sample.is_held_out else -1) for answer in batch]


def evenness(batch: RewardBatch) -> list[float | None]:
    """Of the characters' numbers; says nothing that could be learned."""
    return [float(sum(map(ord, answer.text)) % 7) for answer in batch]


def broken_for_one(batch: RewardBatch) -> list[float | None]:
    """Raises for the first answer to one prompt."""
    if any(answer.sample.id == "tone1" and answer.number == 0 for answer in batch):
        raise RuntimeError("cannot judge this")
    return [-float(answer.num_tokens) for answer in batch]


def duration(batch: RewardBatch) -> list[float | None]:
    """Seconds of the speech of each answer; none where it is not decoded."""
    return [None if answer.recording is None else answer.recording.duration_s for answer in batch]
