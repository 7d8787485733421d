"""Held-out streams are interpreted, logged and scored: greedy, drawn, and with a constant on silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from audiollm.audio import load
from audiollm.data.records.part_codes import save_part_codes
from audiollm.data.records.sample import Message, Sample, TextPart
from audiollm.errors import BadSample, StageError
from audiollm.evaluate.interpret.logged_outputs import read_log
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.dual_ffn.rollouts import DualFFNRollouts
from audiollm.families.rollout import RolloutSettings
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.interpret.held_out_streams import logged_stream, read_streams, right_segments, said_over
from audiollm.models.hub import save_pretrained
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from tests.audiollm.interpret.toy_streams import BOOKS, CHUNK, SIZE, save_toy_model, toy_stream, write_streams
from tokenizer import AudioTokenizer
from tokenizer.native.model import TokenizerConfig


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
    engine = DualFFNRollouts(policy.root.model, policy.template)
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
    logged = logged_stream(0, prompt, said_over(prompt, late))
    assert logged.delays == [logged.source_length] * len(words)
    with pytest.raises(BadSample, match="1 actions for"):
        said_over(prompt, ["a"])


@pytest.fixture(scope="module")
def speaks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that speaks now and then, streams, and codecs: its own, and one with more codes."""
    made = save_toy_model(tmp_path_factory.mktemp("speaks"))
    policy = DualFFNPolicy.load(made)
    begins = policy.template.tokenizer.token_to_id("<|audio_out_bos|>")
    with torch.no_grad():
        policy.root.model.text_lm_head.weight[begins] *= 12
    save_pretrained(policy.root.model, made / "model", policy.template.tokenizer)
    write_streams(made, 6, held_out=3)
    for name, size in (("codec", SIZE), ("other", 2 * SIZE)):
        torch.manual_seed(0)
        AudioTokenizer(
            TokenizerConfig(
                mel_hidden_size=16, hidden_size=16, encoder_layers=(1, 1), decoder_layers=(1, 1), latent_dim=8,
                num_codebooks=BOOKS, codebook_size=size, step_frames=2,
            )
        ).save_pretrained(made / name)  # fmt: skip
    return made


def test_speech_is_written_where_it_is_heard_and_counted(speaks: Path) -> None:
    settings = {"codec": str(speaks / "codec"), "max_speech_s": 0.4, "temperature": 1.0}
    out = evaluate(speaks, "spoken", **settings)
    outputs, bad = read_log(out)
    assert not bad and len(outputs) == 3 and any(output.is_speech for output in outputs)
    for output in outputs:
        sound = load(out / output.prediction)
        samples_N = sound.samples_CN[0]
        for start_ms, duration_ms in output.playback().intervals:
            assert 40 <= duration_ms <= 400
            first, last = (round(ms / 1000 * sound.sample_rate) for ms in (start_ms, start_ms + duration_ms))
            assert samples_N[first:last].abs().max() > 0
            samples_N[first:last] = 0
        assert not samples_N.any(), "nothing is heard between the pieces"
        end_ms = max(output.playback().end, output.source_length)
        assert len(samples_N) == round(end_ms / 1000 * sound.sample_rate)
        assert all(time == output.source_length or time % (40 * CHUNK) == 0 for time in output.delays)
    figures = read_json(out / "figures.json")
    assert figures["streams"] == 3
    written = evaluate(speaks, "written", temperature=1.0)
    assert not any(output.is_speech for output in read_log(written)[0])


def test_a_codec_with_other_codes_is_refused(speaks: Path) -> None:
    with pytest.raises(StageError, match="2 codebooks of 16, and the model speaks 2 of 8"):
        evaluate(speaks, "foreign_codec", codec=str(speaks / "other"))


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
