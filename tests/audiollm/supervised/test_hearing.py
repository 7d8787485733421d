"""Training with `audio_in: features`: sources without codes, the stage, what is frozen, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError

from audiollm.audio import encode_bytes, save
from audiollm.commands.inspect import inspect
from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import (
    FeatureShape,
    clip_features,
    silence,
)
from audiollm.data.packing import pack
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.records.shards import ShardWriter
from audiollm.data.records.source import AudioClip
from audiollm.data.text.tokenizer import load_text_tokenizer, train_text_tokenizer
from audiollm.errors import BadSample, StageError
from audiollm.families.dual_ffn.adapting import adapt
from audiollm.families.dual_ffn.planning import plan_training
from audiollm.families.dual_ffn.shape import encoder_of
from audiollm.families.dual_ffn.training import add_encoder, check_projector
from audiollm.files.set_aside import SetAside
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.supervised.corpus.batches import Batching, BatchMaker, read_usable
from audiollm.supervised.corpus.survey import survey_sources
from tests.audiollm.supervised.heard_samples import (
    BOOKS,
    ENCODER,
    HEARING,
    SHAPE,
    asked,
    heard,
    small_model,
    small_template,
    sound,
    streams,
    understanding,
    write_manifest,
)
from tests.audiollm.supervised.train_samples import run_stage, settings_of


@pytest.fixture(scope="module")
def template() -> Template:
    return small_template()


@pytest.fixture
def model(template: Template) -> DualFFN:
    return small_model(template)


# Sources


def test_the_survey_counts_the_rows_that_are_made(tmp_path: Path, template: Template) -> None:
    source = open_source(write_manifest(tmp_path, 9))
    aside = SetAside(tmp_path / "aside.jsonl", "test", [])
    found = survey_sources([source], template, 200, "cut", aside, lambda: None, SHAPE)
    assert not aside.counts
    batching = Batching(
        batch_size=7, max_tokens=400, max_length=200, text_dropout=0, speaker_dropout=0, corrupt_codes=0, encoder=SHAPE
    )  # fmt: skip
    maker = BatchMaker([source], None, found, template, batching, seed=0)
    step = maker(0)
    assert not step.bad and sum(len(each.layout.lengths) for each in step.packs) >= 7
    for number in range(9):
        clip = clip_features(source[number].audio[0], SHAPE)
        messages = source[number].sample.messages
        assert len(template.compile(messages, [clip])) == found.rows[0][number]


def test_a_recording_that_is_gone_is_set_aside_and_the_rest_is_heard(tmp_path: Path) -> None:
    """As evaluations and their spoken prompts read held-out samples: after the survey a file may be lost."""
    for name in ("kept", "lost"):
        save(tmp_path / f"{name}.wav", sound(0.5), 16_000)
    samples = [
        Sample(id=name, task="asr", messages=[
            Message(role="user", content=[AudioPart(path=f"{name}.wav")]),
            Message(role="assistant", content=[TextPart(text="a dog")]),
        ])
        for name in ("lost", "kept")
    ]  # fmt: skip
    write_samples(tmp_path / "samples.jsonl", samples)
    source = open_source(tmp_path / "samples.jsonl")
    (tmp_path / "lost.wav").unlink()
    aside = SetAside(tmp_path / "set_aside.jsonl", "train")
    usable = list(read_usable(source, np.arange(2), SHAPE, aside))
    assert [loaded.sample.id for loaded, _ in usable] == ["kept"]
    assert usable[0][1][0].rows == clip_features(usable[0][0].audio[0], SHAPE).rows > 0  # type: ignore[union-attr]
    assert [row["id"] for row in aside.rows] == ["lost"]


def test_a_silent_recording_beside_words_is_set_aside(tmp_path: Path) -> None:
    save(tmp_path / "heard.wav", sound(0.5), 16_000)
    save(tmp_path / "silent.wav", 1e-4 * sound(0.5), 16_000)
    samples = [
        Sample(id=f"{name} {words}", task="asr", messages=[
            Message(role="user", content=[AudioPart(path=f"{name}.wav")]),
            Message(role="assistant", content=[TextPart(text=words)]),
        ])
        for name, words in (("heard", "a dog"), ("silent", "a dog"), ("silent", ""))
    ]  # fmt: skip
    write_samples(tmp_path / "samples.jsonl", samples)
    aside = SetAside(tmp_path / "set_aside.jsonl", "train")
    usable = read_usable(open_source(tmp_path / "samples.jsonl"), np.arange(3), SHAPE, aside)
    assert [loaded.sample.id for loaded, _ in usable] == ["heard a dog", "silent "]
    assert [(row["id"], "is silent (its peak is at" in row["reason"]) for row in aside.rows] == [
        ("silent a dog", True)
    ]


def test_a_header_that_is_unsure_is_not_believed(tmp_path: Path) -> None:
    """MP3 is decoded to be measured; a span beyond the end of a file is cut there."""
    content = encode_bytes(sound(0.5), 16_000, "mp3")
    clip = AudioClip("a.mp3", "a", content)
    assert clip_features(clip, SHAPE).rows == SHAPE.rows(clip.load(16_000).num_samples)
    save(tmp_path / "a.wav", sound(0.5), 16_000)
    assert clip_features(AudioClip("a", "a", str(tmp_path / "a.wav"), 0.1, 9.0), SHAPE).rows == 10
    with pytest.raises(BadSample, match="does not exist"):
        clip_features(AudioClip("b", "b", str(tmp_path / "missing.wav")), SHAPE)
    with pytest.raises(BadSample, match="codes of it, and no sound"):
        clip_features(AudioClip("c", "c", None), SHAPE)


def test_what_is_said_needs_codes_and_what_is_heard_sound(tmp_path: Path, template: Template) -> None:
    said = [
        Message(role=role, content=[AudioPart(path=f"{n}.flac")])
        for n, role in enumerate(("user", "assistant"))
    ]
    sounds = {f"{n}.flac": encode_bytes(sound(0.3, n), 16_000, "flac") for n in range(2)}
    codes = [torch.zeros(BOOKS, 4, dtype=torch.long).numpy(), torch.ones(BOOKS, 6, dtype=torch.long).numpy()]
    cases: list[tuple[list[Any], dict[str, bytes]]] = [([codes], sounds), ([], sounds), ([codes], {})]
    writer = ShardWriter(tmp_path / "shards", 10)
    for number, (encodings, audio) in enumerate(cases):
        writer.write(number, Sample(id=f"s{number}", messages=said, task="chat"), encodings, audio)
    writer.close({})
    source, aside = open_source(tmp_path / "shards"), SetAside(tmp_path / "aside.jsonl", "test", [])
    found = survey_sources([source], template, 200, "cut", aside, lambda: None, SHAPE)
    assert aside.counts == {"missing codes": 1, "missing audio": 1}
    batching = Batching(
        batch_size=1, max_tokens=200, max_length=200, text_dropout=0, speaker_dropout=0, corrupt_codes=0, encoder=SHAPE
    )  # fmt: skip
    maker = BatchMaker([source], None, found, template, batching, seed=0)
    batch = maker(0).packs[0]
    assert batch.features is not None and batch.features.rows[0] == 8  # 0.3 s at 25 rows a second
    assert batch.counts == {"text": 1.0, "audio": 1.0}


# The stage


def answers(folder: Path, manifest: Path) -> list[bool]:
    """Whether the model, asked what it is trained on, writes the answer: all prompts at once, through the engine."""
    model, tokenizer = DualFFN.from_pretrained(folder), load_text_tokenizer(folder)
    template = Template(tokenizer, 8, 1024)
    assert model.config.audio_encoder is not None
    shape, source = model.config.audio_encoder.features, open_source(manifest)
    samples = [source[number] for number in range(len(source))]
    asks = [
        Request(
            each.sample.messages[:-1],
            0,
            [clip_features(each.audio[0], shape)],
            SamplingConfig(temperature=0),
            answer="text",
        )
        for each in samples
    ]
    given = Engine.sized_for(model, template, asks).run(asks)
    return [
        answer.text == each.sample.texts("assistant")[0] for answer, each in zip(given, samples, strict=True)
    ]


def test_two_tones_are_told_apart_from_a_plain_manifest(tmp_path: Path) -> None:
    """No codes, no codec: the encoder and the decoder learn from sound in a few steps; held out ones are right too."""
    manifest = write_manifest(tmp_path, 26)
    figures = run_stage(tmp_path / "run", str(manifest), **understanding(steps=60, batch_size=8))
    assert figures["text_loss"] < 0.1
    assert all(answers(tmp_path / "run" / "model", manifest))


def test_inspect_shows_what_a_stage_trains_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_manifest(tmp_path, 4)
    stage = {
        "samples": [{"path": str(manifest)}],
        "audio_in": "features",
        "shape": {"audio_encoder": {"stride": 5}},
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"train": stage}))
    template = Template(train_text_tokenizer(["user assistant which tone? high low"] * 3, 300), 8, 1024)
    template.tokenizer.save(str(tmp_path / "tokenizer.json"))
    inspect(str(tmp_path / "run"), "1", tmp_path, None, True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(row.get("kind") == "features" for row in rows) == 3  # 0.25 s, 10 rows a second
    assert rows[-1]["notes"] == [] and {each["kind"] for each in rows[-1]["summary"]} == {"text", "features"}
    inspect(str(tmp_path / "run"), "1", tmp_path, None, False)
    assert "3 rows" in capsys.readouterr().out


def test_a_frozen_encoder_does_not_change(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, 10)
    run_stage(tmp_path / "first", str(manifest), **understanding(steps=10, batch_size=4))
    first = DualFFN.from_pretrained(tmp_path / "first")
    start = tmp_path / "first" / "model"
    values = {"audio_in": "features", "steps": 10, "batch_size": 4, "ema_decay": 0, "start": str(start)}
    run_stage(tmp_path / "second", str(manifest), **values, shape={"audio_encoder": {"trained": False}})
    run_stage(tmp_path / "third", str(manifest), **values)
    for name, stays in (("second", True), ("third", False)):
        other = DualFFN.from_pretrained(tmp_path / name).state_dict()
        tower = {key for key in other if key.startswith("audio_tower.") and "embed_positions" not in key}
        same = {key for key, value in first.state_dict().items() if torch.equal(value, other[key])}
        assert tower <= same if stays else not tower & same
        assert "audio_encoder_proj.linear.weight" not in same


def test_a_new_projector_is_trained_whatever_else_is(
    tmp_path: Path, template: Template, model: DualFFN
) -> None:
    deaf = DualFFN(replace(model.config, audio_encoder=None))
    deaf.save_pretrained(tmp_path, template.tokenizer)
    values = {
        "samples": "shards",
        "start": str(tmp_path),
        "audio_in": "features",
        "shape": {"audio_encoder": HEARING},
    }
    for trained, beside, tower in (
        ("audio_ffn", (), True),
        ("adapter", ("audio_encoder_proj",), True),  # adapters in the tower too
        (["audio_encoder_proj.*"], (), False),
        (["*layers.0.*"], (), None),
        ("adapter", (), None),
    ):
        lora = {"lora": {"trained_beside": beside}} if trained == "adapter" else {}
        config = settings_of({**values, "trained": trained, **lora})
        hearing = DualFFN.from_pretrained(tmp_path)
        add_encoder(hearing, config)
        adapt(hearing, config.trained, config.lora)
        if tower is None:
            with pytest.raises(StageError, match="nothing trains it"):
                check_projector(hearing, config)
            continue
        check_projector(hearing, config)
        assert hearing.audio_tower.is_trained == tower
        hearing(pack(streams(template), encoder=hearing.config.audio_encoder.features)).sum().backward()
        trained_here = {
            name for name, each in hearing.named_parameters() if each.grad is not None and each.grad.any()
        }
        assert any("audio_encoder_proj" in name for name in trained_here)


def test_settings_that_contradict_one_another_are_refused(
    tmp_path: Path, template: Template, model: DualFFN
) -> None:
    with pytest.raises(ValidationError, match="audio_in is codes"):
        settings_of({"samples": "shards", "shape": {"audio_encoder": {}}})
    with pytest.raises(ValidationError, match="shape of its own"):
        settings_of(
            {
                "samples": "shards",
                "audio_in": "features",
                "shape": {"audio_encoder": {"path": ".", "num_layers": 2}},
            }
        )
    model.float().save_pretrained(tmp_path / "hears", template.tokenizer)
    deaf = DualFFN(replace(model.config, audio_encoder=None))
    deaf.save_pretrained(tmp_path / "deaf", template.tokenizer)
    hears, begun_deaf = str(tmp_path / "hears"), str(tmp_path / "deaf")
    for values, reason in (
        ({"start": hears}, "hears through an audio encoder"),
        ({"start": begun_deaf, "audio_in": "features"}, "has no audio encoder"),
        ({"start": hears, "audio_in": "features", "shape": {"audio_encoder": {"stride": 4}}}, "of its own"),
        ({"audio_in": "features", "shape": {"audio_encoder": {"window_s": 0.5, "stride": 4}}}, "no multiple"),
        (
            {"audio_in": "features", "shape": {"audio_encoder": {"path": begun_deaf}}},
            "no Whisper-class encoder",
        ),
    ):
        with pytest.raises(StageError, match=reason):
            encoder_of(settings_of({"samples": "shards", **values}))
    given = settings_of(
        {"samples": "shards", "start": begun_deaf, "audio_in": "features", "shape": {"audio_encoder": {}}}
    )
    assert encoder_of(given) == AudioEncoderConfig(192, 4, 3, 768)
    assert encoder_of(settings_of({"samples": "shards", "start": hears, "audio_in": "features"})) == ENCODER


def test_planned_parameters_count_the_encoder() -> None:
    config = settings_of({"samples": "shards", "audio_in": "features"})
    without = settings_of({"samples": "shards"})
    encoder = encoder_of(config)
    assert encoder is not None
    with torch.device("meta"):
        shape = config.shape
        assert shape.hidden_size and shape.num_layers and shape.num_heads and shape.intermediate_size
        made = DualFFN(
            DualFFNConfig(
                1024, hidden_size=shape.hidden_size, num_layers=shape.num_layers, num_heads=shape.num_heads,
                num_kv_heads=shape.num_heads, head_dim=64, intermediate_size=shape.intermediate_size,
                audio_encoder=encoder,
            )
        )  # fmt: skip
    assert plan_training(config, {}).parameters == sum(parameter.numel() for parameter in made.parameters())
    assert plan_training(config, {}).parameters > plan_training(without, {}).parameters


@pytest.mark.parametrize("rows", [1, 7, 30, 31])
def test_rows_of_silence(rows: int) -> None:
    """An idle window holds as many rows as asked for, in windows of no more than an encoder takes."""
    windows = silence(rows, FeatureShape(20, 60))
    assert sum(window.rows for window in windows) == rows and max(window.rows for window in windows) <= 30


def test_what_streams_share_is_computed_once(template: Template) -> None:
    """Windows, and the rows that a stream begins with as the one before it: hidden states and gradients stay."""
    model, clip, other = small_model(template), heard(1.5), heard(0.3, 1)
    packed = [
        template.compile(asked(answer="a dog"), [clip]),
        template.compile(asked(answer="a cat"), [clip]),
        template.compile(asked(clips=2), [other, clip]),
        template.compile(asked(clips=0), []),
        template.compile(asked(answer="a cat"), [clip]),
        template.compile(asked(answer="a cat"), [clip]),
    ]
    shared, apart = (pack(packed, 1, encoder=SHAPE, share=share) for share in (True, False))
    assert shared.features is not None and apart.features is not None
    assert len(apart.features.rows) - len(shared.features.rows) == 4 * len(clip.windows)
    assert len(apart.positions_S) - len(shared.positions_S) > len(packed[0]) + len(packed[5])
    positions, results = sum(map(len, packed)), []
    for batch in (shared, apart):
        model.zero_grad()
        hidden_SC = model(batch)[batch.row_of_S][:positions]
        hidden_SC.square().sum().backward()
        text_XC = model(batch)[batch.text_target_index]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([hidden_SC.detach(), text_XC.detach(), batch.text_targets, *gradients])
    assert len(results[0]) > 20
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)
