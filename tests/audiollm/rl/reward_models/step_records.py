"""Records whose answers have labelled steps, for the tests of process reward models."""

from __future__ import annotations

from pathlib import Path

from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart, write_samples
from tests.audiollm.rl.preference.records import tone

HELD_OUT = 8


def write_steps(folder: Path, count: int = 40) -> Path:
    """Two answers of two or three parts about a tone; a step that names its height is right or wrong."""
    samples = []
    for n in range(count):
        high = n % 2 == 1
        tone(folder / f"steps{n}.wav", (700.0 if high else 200.0) + 5 * n)
        message = Message(
            role="user", content=[AudioPart(path=f"steps{n}.wav"), TextPart(text="High or low?")]
        )
        right, wrong = ("high", "low") if high else ("low", "high")
        answers = [
            RatedAnswer(
                content=[TextPart(text=f"Möglich: {right}. "), TextPart(text=f"So {wrong}.")],
                steps=[1.0, 0.0],
            ),
            RatedAnswer(
                content=[
                    TextPart(text="It "),
                    TextPart(text=f"is {wrong}. "),
                    TextPart(text=f"No, {right}."),
                ],
                steps=[None, 0.0, 1.0],
            ),
        ]
        split = {"split": "test"} if n >= count - HELD_OUT else {}
        samples.append(
            Sample(id=f"steps{n}", messages=[message], task="question", metadata=split, answers=answers)
        )
    write_samples(folder / "steps.jsonl", samples)
    return folder / "steps.jsonl"
