"""Which of a sample's encodings `train` learns, for models that learn one answer behind a prompt."""

from __future__ import annotations

from pathlib import Path

import torch

from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.records.shards import ShardWriter
from audiollm.families.policies import load_policy
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE
from audiollm.supervised.answers.batches import AnswerBatches, AnswerBatchMaker
from tests.audiollm.families.talkers.talker_runs import random_codes
from tests.audiollm.families.talkers.tiny_csm import BOOKS, write_tiny_csm

CODES, ENCODINGS = 16, 3


def _frames(made: AnswerBatches) -> list[int]:
    """Frames of each answer, without their ends."""
    (batch,) = made.batches
    firsts = batch.answer_T[batch.codebook_T == 0]
    return [count - 1 for count in torch.bincount(firsts).tolist()]


def test_a_step_draws_encodings_and_held_out_samples_have_the_first(tmp_path: Path) -> None:
    """Encoding n of every sample has 3 + n frames here; the same step draws the same."""
    writer = ShardWriter(tmp_path / "clips", samples_per_shard=8)
    for number in range(6):
        said = [
            Message(role="user", content=[TextPart(text="hello")]),
            Message(role="assistant", content=[AudioPart(path="hello.wav")]),
        ]
        split = {"split": "test" if number >= 4 else "train"}
        sample = Sample(id=f"clip{number}", messages=said, task="tts", metadata=split)
        writer.write(
            number, sample, [[random_codes(BOOKS, CODES, 3 + n, n).numpy()] for n in range(ENCODINGS)]
        )
    writer.close({"codec": {"num_codebooks": BOOKS, "codebook_size": CODES}})
    policy = load_policy(write_tiny_csm(tmp_path / "model"))
    set_aside = SetAside(tmp_path / "aside.jsonl", "train", strict=True)
    draws = StepDraws(batch_size=4, seed=5, max_tokens=10_000)
    maker = AnswerBatchMaker(policy, [open_source(tmp_path / "clips")], draws, set_aside, ALONE, "samples")
    drawn = [count for step in range(30) for count in _frames(maker(step))]
    counts = [drawn.count(3 + n) for n in range(ENCODINGS)]
    assert sum(counts) == 120 and min(counts) > 20, counts
    assert _frames(maker(7)) == _frames(maker(7))
    assert [_frames(made) for made in maker.held_out()] == [[3, 3]]
