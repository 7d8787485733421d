"""`inspect` on samples for a published listener: the tokens that it is trained on, and those that it predicts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.families.policies import load_policy
from audiollm.families.prompts import with_last_message_as_answer
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import tone


def test_rows_are_those_of_training(tmp_path: Path) -> None:
    save_tiny("qwen2_audio", tmp_path / "model")
    tone(tmp_path / "a.wav", 200.0)
    messages = [
        Message(role="user", content=[AudioPart(path="a.wav"), TextPart(text="High or low?")]),
        Message(role="assistant", content=[TextPart(text="low")]),
    ]
    write_samples(tmp_path / "samples.jsonl", [Sample(id="a", messages=messages, task="question")])
    done = CliRunner().invoke(
        build_app("inspect"),
        ["inspect", str(tmp_path / "samples.jsonl"), "--tokenizer", str(tmp_path / "model"), "--json"],
    )
    assert done.exit_code == 0, done.output
    *rows, summary = map(json.loads, done.stdout.splitlines())
    policy = load_policy(tmp_path / "model")
    loaded = with_last_message_as_answer(ManifestSource(tmp_path / "samples.jsonl")[0])
    (encoded,) = policy.encode(policy.take(loaded, [0]))
    batch = policy.batch([encoded])
    assert [row["text_id"] for row in rows] == encoded.tokens["input_ids"].tolist()
    targets = torch.tensor([row["text_id"] for row in rows if row["is_target"][0]])
    assert torch.equal(targets, batch.target_T)
    assert any(row["kind"] == "features" for row in rows)
    assert sum(item["weight"] for item in summary["summary"]) == 1
