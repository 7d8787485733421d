"""Held-out streams are interpreted, logged and scored: greedy, drawn, and with a constant on silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from audiollm.data.records.part_codes import save_part_codes
from audiollm.data.records.sample import Message, Sample, TextPart
from audiollm.errors import BadSample, StageError
from audiollm.evaluate.interpret.logged_outputs import read_log
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.interpret.held_out_streams import logged_stream, read_streams, right_segments
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.rl.policy.dual_ffn_policy import DualFFNPolicy
from audiollm.rl.rollouts.own import OwnRollouts
from audiollm.rl.rollouts.protocol import RolloutSettings
from tests.audiollm.interpret.toy_streams import CHUNK, save_toy_model, toy_stream, write_streams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_toy_model(tmp_path_factory.mktemp("held_out"))
    write_streams(made, 8, held_out=3)
    return made


def evaluate(folder: Path, name: str, **settings: Any) -> Path:
    stage = {
        "model": str(folder),
        "samples": str(folder / "streams.jsonl"),
        "max_answer_tokens": 2,
        "examples": 0,
        **settings,
    }
    recipe = {"name": name, "size": "tiny", "seed": 1, "stages": [{"evaluate_interpreter": stage}]}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(path, runs=folder), Console(quiet=True))
    return folder / name / "evaluate_interpreter"


def test_the_log_is_that_of_greedy_rollouts(folder: Path) -> None:
    out = evaluate(folder, "greedy")
    outputs, bad = read_log(out)
    assert not bad and len(outputs) == 3
    policy = DualFFNPolicy.load(folder)
    prompts, _ = read_streams(policy, folder / "streams.jsonl", "test", 10)
    engine = OwnRollouts(policy.root.model, policy.template)
    settings = RolloutSettings(1, 0, temperature=0.0, answer="text", max_text_tokens=2)
    rollouts = engine.sample([prompt.prompted for prompt in prompts], [[0]] * 3, settings)
    for output, prompt, (rollout,) in zip(outputs, prompts, rollouts, strict=True):
        assert output.prediction.split() == rollout.text.split()
        codes_KT, texts, _ = toy_stream(int(prompt.sample.id[1:]))
        assert output.reference.split() == [text for text in texts if text]
        assert output.source_length == pytest.approx(40 * codes_KT.shape[1])
        assert all(time == output.source_length or time % (40 * CHUNK) == 0 for time in output.delays)
    figures = read_json(out / "figures.json")
    assert figures["streams"] == 3 and figures["right_segments"]["n"] >= 3


def test_a_constant_on_silence_silences(folder: Path) -> None:
    """A silent stream is scored as its reference, said at its end."""
    out = evaluate(folder, "silent", silence_bias=100.0, temperature=1.0)
    figures = read_json(out / "figures.json")
    assert figures["empty"] == 3 and figures["right_segments"]["accuracy"] == 0 and figures["chrF"] == 0
    lengths = [0.04 * toy_stream(number)[0].shape[1] for number in (5, 6, 7)]
    assert figures["AL"] == pytest.approx(1000 * sum(lengths) / 3)


def test_right_segments_are_told_whatever_their_times(folder: Path) -> None:
    policy = DualFFNPolicy.load(folder)
    (prompt, *_), _ = read_streams(policy, folder / "streams.jsonl", "test", 10)
    chunks = len(prompt.reference)
    words = [text for text in prompt.reference if text]
    late = [*[""] * (chunks - 1), " ".join(words)]
    assert right_segments(prompt, prompt.reference) == right_segments(prompt, late) == [True] * len(words)
    assert right_segments(prompt, [""] * chunks) == [False] * len(words)
    wrong = ["x" if text == words[0] else text for text in prompt.reference]
    assert right_segments(prompt, wrong) == [word != words[0] for word in words]
    # in a language without spaces, two actions may say a segment between them
    spaceless = Message(
        role="assistant", chunk_frames=CHUNK, content=[TextPart(text=text) for text in ("", "你好", "再见")]
    )
    chinese = replace(
        prompt, sample=Sample(id="zh", task="interpret", messages=[prompt.sample.messages[1], spaceless])
    )
    assert right_segments(chinese, ["你", "好", "再见"]) == [False, True]
    assert right_segments(chinese, ["你", "好", "再见"], "character") == [True, True]
    logged = logged_stream(0, prompt, late)
    assert logged.delays == [logged.source_length] * len(words)
    with pytest.raises(BadSample, match="1 actions for"):
        logged_stream(0, prompt, ["a"])


def test_a_stream_of_codes_of_another_codec_is_set_aside(tmp_path: Path) -> None:
    save_toy_model(tmp_path)
    write_streams(tmp_path, 4, held_out=3)
    save_part_codes(tmp_path / "2.safetensors", toy_stream(2)[0] + 8)
    out = evaluate(tmp_path, "foreign")
    (row,) = read_jsonl(out / "set_aside.jsonl")
    assert (row["id"], row["kind"]) == ("s2", "codes of another codec")
    assert len(read_log(out)[0]) == 2


def test_what_has_no_streams_is_refused(folder: Path) -> None:
    write_streams(folder, 3, held_out=0, name="plain.jsonl")
    with pytest.raises(StageError, match="no stream of the split test"):
        evaluate(folder, "none", samples=str(folder / "plain.jsonl"))
