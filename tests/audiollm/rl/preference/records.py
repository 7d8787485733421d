"""Records with recordings for the tests of preferences."""

from __future__ import annotations

from pathlib import Path

import soundfile
import torch

from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart, write_samples


def tone(path: Path, hz: float, seconds: float = 0.5) -> None:
    """Write a tone."""
    times = torch.arange(int(16_000 * seconds)) / 16_000
    soundfile.write(path, (0.3 * torch.sin(2 * torch.pi * hz * times)).numpy(), 16_000)


def write_records(folder: Path, count: int = 24) -> Path:
    """Which of two tones is heard: the right answer and the wrong one; the last 8 are held out."""
    samples = []
    for n in range(count):
        high = n % 2 == 1
        tone(folder / f"{n}.wav", (700.0 if high else 200.0) + 5 * n)
        question = [AudioPart(path=f"{n}.wav"), TextPart(text="High or low?")]
        answers = [
            RatedAnswer(content=[TextPart(text=word)], score=float((word == "high") == high))
            for word in ("high", "low")
        ]
        split = {"split": "test"} if n >= count - 8 else {}
        message = Message(role="user", content=question)
        samples.append(
            Sample(id=f"tone{n}", messages=[message], task="question", metadata=split, answers=answers)
        )
    write_samples(folder / "records.jsonl", samples)
    return folder / "records.jsonl"


def write_lists(folder: Path, held_out: int = 0) -> Path:
    """Eight records of two to four answers of different length, with one or two recordings, scored and judged.

    The last `held_out` are held out.
    """
    samples = []
    for n in range(8):
        parts: list[AudioPart | TextPart] = [TextPart(text="What?"[: 2 + n % 4])]
        for number in range(1 + n % 2):
            tone(folder / f"{n}-{number}.wav", 150.0 + 60 * n + 17 * number, 0.3 + 0.1 * n)
            parts.append(AudioPart(path=f"{n}-{number}.wav"))
        answers = [
            RatedAnswer(
                content=[TextPart(text="abcdefgh"[k : k + 2 + (n + k) % 5])],
                score=float((3 * n + k * k) % 7) + 0.1 * k,
                verdict="desirable" if (n + k) % 3 else "undesirable",
            )
            for k in range(2 + n % 3)
        ]
        message = Message(role="user", content=parts)
        split = {"split": "test"} if n >= 8 - held_out else {}
        samples.append(
            Sample(id=f"list{n}", messages=[message], task="question", metadata=split, answers=answers)
        )
    write_samples(folder / "records.jsonl", samples)
    return folder / "records.jsonl"
