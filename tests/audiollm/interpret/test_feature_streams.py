"""Streams that are heard through a published audio encoder: each chunk from what came before its end, and no more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor

from audiollm.audio import save
from audiollm.data.hearing.features import ClipFeatures, part_audio, stream_chunks
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.text.tokenizer import TRAINED_FILE
from audiollm.errors import BadSample, StageError
from audiollm.evaluate.interpret.logged_outputs import read_log
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.registry import load_interpreter
from audiollm.families.rollout import RolloutSettings
from audiollm.families.streams import recording_chunks
from audiollm.files.atomic import write_json
from audiollm.files.set_aside import read_set_aside
from audiollm.interpret.live.chunk_hearing import FeatureHearing, open_hearing
from audiollm.interpret.live.live_model import LiveModel
from audiollm.models.audio_encoder import encoder_config, load_tower
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from tests.audiollm.interpret.toy_streams import toy_template
from tests.audiollm.supervised.heard_samples import sound
from tests.audiollm.supervised.test_encode_features import STRIDE, encode, shape_of, whisper

CHUNK = 3
LORA = {"rank": 2, "target_modules": ["q_proj", "up_proj"], "excluded": ["audio_tower"]}
ROW_SAMPLES = 640
LENGTHS = (0.5, 0.41, 0.66, 1.7, 0.3, 0.55)
"""Seconds of the recordings; the fourth is longer than the encoder's window of 1.2 s."""


def write_recordings(folder: Path) -> Path:
    """Streams of noise with a word now and then, the last two held out."""
    samples = []
    for number, seconds in enumerate(LENGTHS):
        save(folder / f"{number}.wav", sound(seconds, number), 16_000)
        rows = -(-round(seconds * 16_000) // ROW_SAMPLES)
        texts = ["ab"[place % 2] if place % 3 == 1 else "" for place in range(-(-rows // CHUNK))]
        messages = [
            Message(role="system", content=[TextPart(text="a b")]),
            Message(role="user", content=[AudioPart(path=f"{number}.wav")]),
            Message(role="assistant", content=[TextPart(text=text) for text in texts], chunk_frames=CHUNK),
        ]
        ends = [place for place, text in enumerate(texts) if text]
        metadata: dict[str, Any] = {"source_ends": ends}
        if number >= len(LENGTHS) - 2:
            metadata["split"] = "test"
        samples.append(Sample(id=f"s{number}", messages=messages, task="interpret", metadata=metadata))
    write_samples(folder / "streams.jsonl", samples)
    return folder / "streams.jsonl"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    """Streams with encoded rows, and a random model before which that encoder stands."""
    folder = tmp_path_factory.mktemp("streams")
    encode(folder, write_recordings(folder), encoder)
    template, config = toy_template(), encoder_config(encoder, stride=STRIDE)
    torch.manual_seed(0)
    model = DualFFN(
        DualFFNConfig(
            vocab_size=template.tokenizer.get_vocab_size(),
            num_codebooks=template.num_codebooks,
            codebook_size=template.codebook_size + 2,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=64,
            audio_ffn_layers=(),
            audio_encoder=config,
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.3)
    load_tower(model.audio_tower, encoder)
    save_pretrained(model, folder / "model", template.tokenizer)
    write_json(folder / "model" / TRAINED_FILE, {"chunk_frames": CHUNK, "stream_prompt": "a b"})
    return folder


def rows_of(shards: Path, number: int, encoder: Path) -> ClipFeatures:
    [recording] = part_audio(open_source(shards)[number], [], shape_of(encoder))
    assert isinstance(recording, ClipFeatures) and recording.is_encoded
    return recording


def run_stage(folder: Path, name: str, **stages: dict[str, Any]) -> Path:
    """Run the stages of a recipe; its folder."""
    recipe = {
        "name": "any",
        "size": "tiny",
        "seed": 1,
        "stages": [{kind: values} for kind, values in stages.items()],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(folder / "recipe.yaml", name=name, runs=folder), Console(quiet=True))
    return folder / name


def test_a_chunk_is_encoded_from_what_came_before_its_end(
    folder: Path, encoder: Path, tmp_path: Path
) -> None:
    samples_1N = sound(LENGTHS[2], 2)
    later_1N = samples_1N.clone()
    later_1N[:, 9 * ROW_SAMPLES :] = sound(1.0, 77)[:, : later_1N.shape[1] - 9 * ROW_SAMPLES]
    write_recordings(tmp_path)
    save(tmp_path / "2.wav", later_1N, 16_000)
    encode(tmp_path, tmp_path / "streams.jsonl", encoder)
    ours, theirs = (
        rows_of(place / "shards", 2, encoder).windows[0].encoded_RC for place in (folder, tmp_path)
    )
    assert ours is not None and theirs is not None and len(ours) == 17
    torch.testing.assert_close(ours[:9], theirs[:9], rtol=0, atol=0)
    assert not torch.allclose(ours[9:], theirs[9:], atol=1e-2)


def test_live_hearing_gives_the_rows_of_training_however_the_sound_is_cut(
    folder: Path, encoder: Path
) -> None:
    """A recording longer than the encoder's window among them."""
    model = load_interpreter(folder)
    for number in (2, 3):
        trained_on = rows_of(folder / "shards", number, encoder).chunks(CHUNK)
        for size in (160, 5000):
            hearing = open_hearing(model, CHUNK)
            assert isinstance(hearing, FeatureHearing)
            pieces = sound(LENGTHS[number], number).split(size, dim=1)
            heard = [chunk for piece_1N in pieces for chunk in hearing.push(piece_1N)] + list(hearing.flush())
            assert [chunk.rows for chunk in heard if isinstance(chunk, ClipFeatures)] == [
                c.rows for c in trained_on
            ]
            for chunk, expected in zip(heard, trained_on, strict=True):
                assert isinstance(chunk, ClipFeatures)
                torch.testing.assert_close(encoded(chunk), encoded(expected), rtol=1e-3, atol=2e-3)


def encoded(chunk: ClipFeatures) -> Tensor:
    rows_RC = chunk.windows[0].encoded_RC
    assert rows_RC is not None
    return rows_RC


def test_sampled_actions_have_the_probabilities_of_a_pass_over_the_stream(folder: Path) -> None:
    policy = DualFFNPolicy.load(folder, needs_reference=False, encoder_trained=False, rows_multiple=1)
    source = open_source(folder / "shards")
    prompts = [
        replace(policy.take(source[number].without_answers(), []), chunk_frames=CHUNK) for number in range(4)
    ]
    prompts = [replace(p, prompt=p.prompt[:2], audio=p.audio[:1], id=f"p{n}") for n, p in enumerate(prompts)]
    settings = RolloutSettings(
        seed=0, step=0, temperature=1.0, answer="text", max_text_tokens=3, max_frames=1
    )
    groups = policy.rollout_engine().sample(prompts, [[0, 1]] * 4, settings)
    for prompt, group in zip(prompts, groups, strict=True):
        streams = policy.encode_sampled(prompt, [rollout.tokens for rollout in group])
        answers = policy.answer_logprobs(policy.root, policy.batch(streams), TokenRequest(reference=False))
        sampled = torch.cat([required(rollout.tokens.logprob_A) for rollout in group])
        assert len(recording_chunks(prompt)) == len(group[0].tokens.input_frames)
        torch.testing.assert_close(answers.policy_T.detach(), sampled, atol=2e-4, rtol=2e-4)


def required(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def test_streams_are_trained_on_rewarded_and_interpreted_live(folder: Path) -> None:
    """All stages from rows; a live session says what the evaluation says, at the same times."""
    common = {
        "samples": str(folder / "shards"),
        "precision": "fp32",
        "report_to": [],
        "checkpoint_seconds": 0,
        "batch_size": 2,
    }
    run = run_stage(
        folder, "run",
        train={
            **common, "start": str(folder), "audio_in": "features", "shape": {"audio_encoder": {"trained": False}},
            "steps": 10, "text_weight": 1.0, "audio_weight": 0.0, "eval_audio_samples": 0, "learning_rate": 1e-3,
        },
        train_interpreter={
            **common, "start": "${train.checkpoint}", "steps": 10, "max_answer_tokens": 2,
            "evaluations": 1, "trained": "adapter", "lora": LORA,
            "rewards": {"detection": 1.0, "lagging": 1.0, "sequence_quality": 1.0},
        },
        evaluate_interpreter={
            "model": "${train_interpreter.checkpoint}", "samples": str(folder / "shards"), "split": "train",
            "max_answer_tokens": 2,
        },
    )  # fmt: skip
    trained = json.loads((run / "train" / "model" / TRAINED_FILE).read_text())
    assert trained["chunk_frames"] == CHUNK and trained["stream_prompt"] == "a b"
    outputs, _ = read_log(run / "evaluate_interpreter")
    live = LiveModel.load(run / "train_interpreter")
    assert live.sample_rate == 16_000 and live.frame_rate == 25
    for number, output in enumerate(outputs):
        session = live.session(
            replace(live.options(), limits=replace(live.options().limits, max_text_tokens=2))
        )
        actions = [*session.hear(sound(LENGTHS[number], number)), *session.finish()]
        said = [word for action in actions for word in action.text.split()]
        assert output.prediction.split() == said
        assert output.delays == pytest.approx(
            [1000 * action.heard_s for action in actions for _ in action.text.split()], abs=1
        )


def test_a_policy_that_trains_its_encoder_is_refused_with_the_remedy(folder: Path) -> None:
    with pytest.raises(StageError, match=r"(?s)no rows that the model reads.*excluded: .audio_tower"):
        run_stage(
            folder, "all",
            train_interpreter={
                "samples": str(folder / "shards"), "start": str(folder), "steps": 10, "batch_size": 4, "report_to": [],
            },
        )  # fmt: skip


def test_a_stream_that_was_not_encoded_in_chunks_is_set_aside_with_the_remedy(
    folder: Path, encoder: Path
) -> None:
    loaded = open_source(folder / "streams.jsonl")[0]
    assert stream_chunks(loaded.sample) == {0: CHUNK}
    policy = DualFFNPolicy.load(folder, needs_reference=False)
    whole = replace(policy.take(loaded, []), chunk_frames=CHUNK)
    whole = replace(whole, prompt=whole.prompt[:2], audio=whole.audio[:1])
    with pytest.raises(BadSample, match="run encode_features on the streams"):
        recording_chunks(whole)
    with pytest.raises(StageError):
        run_stage(
            folder, "whole",
            train={
                "samples": str(folder / "streams.jsonl"), "start": str(folder), "audio_in": "features", "steps": 10,
                "report_to": [], "shape": {"audio_encoder": {"trained": False}}, "eval_audio_samples": 0,
            },
        )  # fmt: skip
    reasons = {row["reason"] for row in read_set_aside(folder / "whole" / "train" / "set_aside.jsonl")}
    assert any("run encode_features" in reason for reason in reasons)
