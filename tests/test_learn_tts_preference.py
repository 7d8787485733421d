"""The benchmark learn-tts-preference: its prompts are distinct, its control is one."""

from __future__ import annotations

import sys
from pathlib import Path

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart, write_samples

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import learn_tts_preference as bench


def test_prompts_are_each_digit_in_each_voice_without_a_recording(tmp_path: Path) -> None:
    samples = [
        Sample(
            id=f"{text}-{speaker}-{take}",
            messages=[
                Message(role="system", content=[TextPart(text=f"Speaker: {speaker}")]),
                Message(role="user", content=[TextPart(text=text)]),
                Message(role="assistant", content=[AudioPart(path="x.wav")]),
            ],
            task="tts",
            metadata={"text": text, "speaker": speaker, "split": "train" if take else "test"},
        )
        for text in ("one", "two")
        for speaker in ("ann", "bo")
        for take in range(3)
    ]
    write_samples(tmp_path / "real.jsonl", samples)
    bench.write_prompts(tmp_path / "real.jsonl", tmp_path / "data" / "prompts.jsonl")
    made, bad = read_samples(tmp_path / "data" / "prompts.jsonl")
    assert len(made) == 4 * bench.COPIES and not bad
    assert all(sample.messages[-1].role == "user" for sample in made)
    assert sum(sample.metadata["split"] == "test" for sample in made) == 4 * bench.HELD_OUT_COPIES


def test_the_control_exchanges_half_of_the_training_pairs(tmp_path: Path) -> None:
    asked = [Message(role="user", content=[TextPart(text="one")])]
    pairs = [
        Sample(
            id=str(n),
            messages=asked,
            task="tts",
            metadata={"split": "test" if n >= 400 else "train"},
            answers=[RatedAnswer(content=[AudioPart(path=f"{k}.flac")], score=1.0 - k) for k in range(2)],
        )
        for n in range(420)
    ]
    write_samples(tmp_path / "pairs.jsonl", pairs)
    bench.write_shuffled(tmp_path / "pairs.jsonl", tmp_path / "shuffled.jsonl", 1)
    made, _ = read_samples(tmp_path / "shuffled.jsonl")
    exchanged = [sample.answers[0].score == 0.0 for sample in made]
    assert 160 < sum(exchanged[:400]) < 240 and not any(exchanged[400:])
    assert all(sorted(answer.score or 0.0 for answer in sample.answers) == [0.0, 1.0] for sample in made)
