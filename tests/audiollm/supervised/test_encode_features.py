"""`encode_features`: what a frozen encoder hears is computed once, and read by trainings that leave it frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from torch import Tensor
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from audiollm.audio import save
from audiollm.data.hearing.augmentation import Augmentation
from audiollm.data.hearing.features import (
    ClipFeatures,
    FeatureShape,
    PackedFeatures,
    clip_features,
    encoded_name,
    part_audio,
)
from audiollm.data.packing import idle_pack, pack
from audiollm.data.records.opening import open_source
from audiollm.errors import BadSample, StageError
from audiollm.families.audio_encoders import published_encoder
from audiollm.families.dual_ffn.planning import plan_training
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.model_sizes import ENCODED
from audiollm.models.audio_encoder import AudioTower, encoder_config, frozen_features, load_tower
from audiollm.recipe.ranks import ALONE
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe, StagePlan
from audiollm.rl.online.prompts import without_right_answer
from audiollm.supervised.corpus.batches import Batching, BatchMaker
from audiollm.supervised.features.encoding import count_clip_flops, encode_features, encoded_views
from audiollm.supervised.features.settings import EncodeFeaturesConfig
from audiollm.supervised.features.stage import STAGE
from audiollm.train.supervised_settings import AudioEncoderSettings
from tests.audiollm.supervised.heard_samples import asked, sound, understanding, write_manifest
from tests.audiollm.supervised.heard_samples import small_template as hearing_template
from tests.audiollm.supervised.train_samples import run_stage, settings_of

STRIDE = 2
AUGMENT = {"gain_db": 6.0}


def whisper(folder: Path, seed: int = 0, half: bool = True) -> Path:
    """An encoder of transformers' own class, random, as small as can be and with windows of 1.2 s."""
    torch.manual_seed(seed)
    config = WhisperConfig(
        d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=24, num_mel_bins=20,
        max_source_positions=60, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16,
    )  # fmt: skip
    encoder = WhisperEncoder(config)
    for parameter in encoder.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    (encoder.half() if half else encoder).save_pretrained(folder)
    return folder


def encode(folder: Path, samples: Path, encoder: Path, **values: Any) -> dict[str, Any]:
    settings = {
        "samples": str(samples),
        "audio_encoder": {"path": str(encoder), "trained": False, "stride": STRIDE},
        "precision": "fp32",
        "dtype": "float32",
        "samples_per_shard": 4,
        **values,
    }
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    config = EncodeFeaturesConfig.model_validate(settings, context={"artifacts": set(), "inputs": []})
    return encode_features(config, Context(folder, recipe, Console(quiet=True), {}, ALONE))


def training(encoder: Path, **values: Any) -> dict[str, Any]:
    """Settings of a training of the rest, beside the frozen encoder."""
    settings = understanding(steps=10, batch_size=4, **values)
    frozen = {"path": str(encoder), "trained": False, "stride": STRIDE}
    return settings | {"shape": {**settings["shape"], "audio_encoder": frozen}}


def weights_of(folder: Path) -> dict[str, Tensor]:
    from audiollm.models.dual_ffn import DualFFN

    return DualFFN.from_pretrained(folder / "model").state_dict()


def shape_of(encoder: Path) -> FeatureShape:
    return frozen_features(encoder_config(encoder, stride=STRIDE), encoder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    folder = tmp_path_factory.mktemp("encoded")
    encode(folder, write_manifest(folder, 12), encoder)
    return folder


def test_prompts_of_policies_keep_the_rows(shards: Path, encoder: Path) -> None:
    """A sample without its right answer is heard as the sample is."""
    shape, loaded = shape_of(encoder), open_source(shards / "shards")[0]
    prompt = without_right_answer(loaded)
    assert len(prompt.sample.messages) == len(loaded.sample.messages) - 1
    [features], [prompt_features] = (part_audio(item, [], shape) for item in (loaded, prompt))
    assert isinstance(features, ClipFeatures) and isinstance(prompt_features, ClipFeatures)
    [window], [prompt_window] = features.windows, prompt_features.windows
    assert window.encoded_RC is not None and prompt_window.encoded_RC is not None
    assert torch.equal(window.encoded_RC, prompt_window.encoded_RC)


def test_rows_are_what_the_encoder_gives(shards: Path, encoder: Path) -> None:
    shape, config = shape_of(encoder), encoder_config(encoder, stride=STRIDE)
    tower = AudioTower(config).eval()
    load_tower(tower, encoder)
    manifest, source = open_source(shards / "samples.jsonl"), open_source(shards / "shards")
    for number in range(len(source)):
        heard = clip_features(manifest[number].audio[0], config.features)
        packed = PackedFeatures.of(heard.windows)
        assert packed is not None
        [read] = part_audio(source[number], [], shape)
        assert isinstance(read, ClipFeatures) and read.is_encoded and read.rows == heard.rows
        with torch.no_grad():
            torch.testing.assert_close(read.windows[0].encoded_RC, tower(packed), rtol=0, atol=0)


def test_a_training_from_rows_ends_with_the_weights_of_one_that_hears(
    tmp_path: Path, shards: Path, encoder: Path
) -> None:
    heard = run_stage(tmp_path / "heard", str(shards / "samples.jsonl"), **training(encoder))
    (shards / "1.wav").rename(shards / "moved.wav")  # and no recording is opened
    try:
        read = run_stage(tmp_path / "read", str(shards / "shards"), **training(encoder))
    finally:
        (shards / "moved.wav").rename(shards / "1.wav")
    assert read["text_loss"] == pytest.approx(heard["text_loss"], rel=1e-5)
    ours, theirs = weights_of(tmp_path / "read"), weights_of(tmp_path / "heard")
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-5, msg=name)


def test_a_trained_encoder_hears_anew(tmp_path: Path, shards: Path, encoder: Path) -> None:
    """Rows would be those of the weights that it began with: recordings are asked for, which shards leave out."""
    values = training(encoder)
    values["shape"]["audio_encoder"].pop("trained")
    with pytest.raises(StageError, match="no sample of the train split"):
        run_stage(tmp_path / "run", str(shards / "shards"), **values)
    assert "here the encoder is trained" in (tmp_path / "run" / "set_aside.jsonl").read_text()


def test_a_tower_that_is_trained_refuses_rows(shards: Path, encoder: Path) -> None:
    read = part_audio(open_source(shards / "shards")[0], [], shape_of(encoder))[0]
    assert isinstance(read, ClipFeatures)
    with pytest.raises(ValueError, match="an encoder that is trained"):
        AudioTower(encoder_config(encoder, stride=STRIDE))(PackedFeatures.of(read.windows))


@pytest.mark.parametrize("change", ["weights", "stride", "padded"])
def test_rows_of_another_encoder_are_refused(
    tmp_path: Path, shards: Path, encoder: Path, change: str
) -> None:
    other = whisper(tmp_path / "other", seed=1) if change == "weights" else encoder
    options: dict[str, Any] = {"stride": 1 if change == "stride" else STRIDE, "padded": change != "padded"}
    shape = frozen_features(encoder_config(other, **options), other)
    with pytest.raises(BadSample, match="today's encoder"):
        part_audio(open_source(shards / "shards")[0], [], shape)


def test_an_encoder_is_known_by_its_values(tmp_path: Path, encoder: Path) -> None:
    """Published in half precision and saved in float32 with a model, it is the same encoder."""
    single = whisper(tmp_path / "single", half=False)
    tower = WhisperEncoder.from_pretrained(encoder, dtype=torch.float32)
    tower.save_pretrained(tmp_path / "copy")
    half, copy, rounded = (
        shape_of(encoder).encoded,
        shape_of(tmp_path / "copy").encoded,
        shape_of(single).encoded,
    )
    assert half and copy and rounded
    assert half.digest() == copy.digest() != rounded.digest()


def test_packs_hold_rows_and_windows_together(shards: Path, encoder: Path) -> None:
    """Whatever the order, and whether windows are shared: every place of a pack has the rows of its recording."""
    template, shape = hearing_template(), shape_of(encoder)
    tower = AudioTower(encoder_config(encoder, stride=STRIDE)).eval()
    load_tower(tower, encoder)
    tower.freeze()
    manifest, source = open_source(shards / "samples.jsonl"), open_source(shards / "shards")
    clips = [
        part_audio((source if is_read else manifest)[number], [], shape)[0]
        for number, is_read in enumerate((True, False, True, True, False))
    ]
    clips.append(clips[0])
    expected = []
    for clip in clips:
        packed = PackedFeatures.of(clip.windows) if isinstance(clip, ClipFeatures) else None
        assert packed is not None
        expected.append(tower(packed))
    for share in (False, True):
        streams = [template.compile(asked(), [clip]) for clip in clips]
        features = pack(streams, 1, encoder=shape, share=share).features
        assert features is not None and features.num_rows == sum(len(rows) for rows in expected)
        torch.testing.assert_close(
            features.spread(tower(features)), torch.cat(expected), rtol=1e-5, atol=1e-5
        )
        assert features.num_encoded == features.num_rows - (len(expected[0]) if share else 0)


def test_an_idle_pack_encodes_nothing(encoder: Path) -> None:
    features = idle_pack(3, 8, shape_of(encoder)).features
    assert features is not None and not features.frames and features.num_rows == 8


def test_views_are_drawn_in_training_alone(tmp_path: Path, encoder: Path) -> None:
    manifest = write_manifest(tmp_path, 8)
    encode(tmp_path, manifest, encoder, views=3, augment=AUGMENT)
    source, shape = open_source(tmp_path / "shards"), shape_of(encoder)
    assert set(source[0].arrays) == {encoded_name(0, view) for view in range(4)}
    assert set(source[7].arrays) == {encoded_name(0, 0)}, "a held-out recording is heard as it is"
    views = [part_audio(source[0], [], shape, view=view)[0] for view in range(4)]
    rows = [view.windows[0].encoded_RC for view in views if isinstance(view, ClipFeatures)]
    assert all(
        not torch.equal(rows[0], other) for other in rows[1:] if rows[0] is not None and other is not None
    )
    augment = Augmentation(**AUGMENT)
    assert encoded_views(source, augment) == 3 and encoded_views(source, None) == 0
    assert encoded_views(open_source(manifest), augment) == 0, "recordings are varied as they are heard"
    with pytest.raises(StageError, match="of another augmentation"):
        encoded_views(source, Augmentation())
    run_stage(tmp_path / "run", str(tmp_path / "shards"), **training(encoder, augment=AUGMENT))
    with pytest.raises(StageError, match="set views and the same augment"):
        run_stage(tmp_path / "other", str(tmp_path / "shards"), **training(encoder, augment={}))


def test_every_view_is_drawn(tmp_path: Path, encoder: Path) -> None:
    """A batch holds the rows of views, never of the recording as it is, and all of them in time."""
    from audiollm.files.set_aside import SetAside
    from audiollm.supervised.corpus.survey import survey_sources

    encode(tmp_path, write_manifest(tmp_path, 6), encoder, views=2, augment=AUGMENT)
    source, shape, template = open_source(tmp_path / "shards"), shape_of(encoder), hearing_template()
    aside = SetAside(tmp_path / "aside.jsonl", "test", [])
    survey = survey_sources([source], template, 200, "cut", aside, lambda: None, shape)
    batching = Batching(
        batch_size=1, max_tokens=200, max_length=200, text_dropout=0, speaker_dropout=0, corrupt_codes=0, encoder=shape,
        augment=(Augmentation(**AUGMENT),), views=(2,),
    )  # fmt: skip
    maker = BatchMaker([source], None, survey, template, batching, seed=0)
    stored = {
        view: [source[number].arrays[encoded_name(0, view)].load() for number in range(4)]
        for view in (0, 1, 2)
    }
    drawn = set()
    for step in range(24):
        features = maker(step).packs[0].features
        assert features is not None and features.encoded_RC is not None
        drawn |= {
            view
            for view, rows in stored.items()
            for rows_RC in rows
            if torch.equal(features.encoded_RC[: len(rows_RC)], rows_RC)
        }
    assert drawn == {1, 2}


def test_a_killed_run_goes_on_with_the_same_bytes(tmp_path: Path, encoder: Path) -> None:
    manifest = write_manifest(tmp_path, 10)
    for name in ("whole", "killed"):
        encode(tmp_path / name, manifest, encoder, views=1, augment=AUGMENT)
    written = sorted((tmp_path / "killed" / "shards").glob("*.tar"))
    assert len(written) == 3
    written[1].unlink()
    encode(tmp_path / "killed", manifest, encoder, views=1, augment=AUGMENT)
    for path in written:
        assert path.read_bytes() == (tmp_path / "whole" / "shards" / path.name).read_bytes()


def test_what_cannot_be_heard_is_set_aside(tmp_path: Path, encoder: Path) -> None:
    manifest = write_manifest(tmp_path, 6)
    (tmp_path / "1.wav").write_bytes(b"no sound")
    save(tmp_path / "2.wav", 0 * sound(0.3), 16_000)
    figures = encode(tmp_path, manifest, encoder)
    assert figures["samples"] == 4 and figures["set_aside"] == 2
    for path in tmp_path.glob("*.wav"):
        path.unlink()
    for path in tmp_path.glob("*.flac"):
        path.unlink()
    with pytest.raises(StageError, match="no sample can be used"):
        encode(tmp_path / "none", manifest, encoder)


def test_a_policy_reads_rows_where_its_encoder_stays(tmp_path: Path, shards: Path, encoder: Path) -> None:
    run_stage(tmp_path / "run", str(shards / "shards"), **training(encoder))
    for trained, is_read in ((["model.layers.*"], True), ("all", False)):
        policy = DualFFNPolicy.load(tmp_path / "run", trained=trained)
        assert policy.encoder is not None and (policy.encoder.encoded is not None) == is_read
    policy = DualFFNPolicy.load(tmp_path / "run", trained=["model.layers.*"])
    assert policy.encoder is not None
    [read] = part_audio(open_source(shards / "shards")[0], [], policy.encoder)
    assert isinstance(read, ClipFeatures) and read.is_encoded


def test_a_policy_hears_anew_where_a_critic_trains_its_encoder(
    tmp_path: Path, shards: Path, encoder: Path
) -> None:
    run_stage(tmp_path / "run", str(shards / "shards"), **training(encoder))
    for trained, is_read in ((["model.layers.*"], True), ("adapter", False)):
        policy = DualFFNPolicy.load(tmp_path / "run", trained=["model.layers.*"])
        critic = DualFFNPolicy.load(tmp_path / "run", trained=trained, needs_reference=False)
        policy.check_reader(critic, "critic")
        assert policy.encoder is not None and (policy.encoder.encoded is not None) == is_read


def test_settings_that_contradict_one_another_are_refused(encoder: Path) -> None:
    frozen = {"path": str(encoder), "trained": False}
    for values, reason in (
        ({"audio_encoder": {"trained": False}}, "needs a path"),
        ({"audio_encoder": {"path": str(encoder)}}, "trained: false"),
        ({"audio_encoder": frozen, "views": 2}, "go together"),
        ({"audio_encoder": frozen, "augment": {}}, "go together"),
    ):
        with pytest.raises(ValidationError, match=reason):
            EncodeFeaturesConfig.model_validate(
                {"samples": str(encoder), **values}, context={"artifacts": set(), "inputs": []}
            )


def test_operations_are_those_of_windows_as_they_are_filled(encoder: Path) -> None:
    """A short clip costs a whole window where windows are filled up, and as much as its length where they are not."""
    filled, plain = (encoder_config(encoder, stride=STRIDE, padded=padded) for padded in (True, False))
    assert count_clip_flops(filled, 0.3) == count_clip_flops(filled, 1.1)
    assert count_clip_flops(plain, 1.2) == pytest.approx(count_clip_flops(filled, 1.2))
    assert count_clip_flops(plain, 0.3) < 0.3 * count_clip_flops(filled, 0.3)


@pytest.mark.parametrize(
    ("width", "layers", "is_filled"), [(512, 6, False), (384, 4, False), (768, 12, True)]
)
def test_windows_are_filled_by_encoder(tmp_path: Path, width: int, layers: int, is_filled: bool) -> None:
    """`padded: auto` fills the windows of encoders that nobody measured."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"d_model": width, "encoder_layers": layers, "encoder_attention_heads": 8, "encoder_ffn_dim": 8,
             "num_mel_bins": 80, "max_source_positions": 1500}
        )
    )  # fmt: skip
    for padded, expected in (("auto", is_filled), (None, True), (False, False), (True, True)):
        settings = AudioEncoderSettings(path=tmp_path, trained=False, padded=padded)
        assert published_encoder(settings).padded == expected


def test_a_plan_leaves_out_the_work_of_an_encoder_that_heard_before(encoder: Path) -> None:
    values = {**training(encoder), "samples": "shards", "steps": 10, "batch_size": 4}
    flops = []
    for facts in ({}, {ENCODED: 10.0}):
        made = StagePlan(facts={"clips": 10.0, "audio_s": 8.0, **facts}, artifacts={"shards": Path("shards")})
        flops.append(plan_training(settings_of(values), {"encode_features": made}).flops)
    heard = 10 * 4 * count_clip_flops(published_encoder(settings_of(values).shape.audio_encoder), 0.8)  # type: ignore[arg-type]
    assert 0.6 * heard < flops[0] - flops[1] < heard, "attention inside of windows is not planned"


def test_the_stage_plans_by_the_samples_before_it(tmp_path: Path, encoder: Path) -> None:
    settings = {"samples": str(tmp_path), "audio_encoder": {"path": str(encoder), "trained": False}}
    for views, shares in ((0, 1), (3, 4)):
        augment = {"views": views, "augment": {}} if views else {}
        config = EncodeFeaturesConfig.model_validate(
            {**settings, **augment}, context={"artifacts": set(), "inputs": []}
        )
        before = StagePlan(facts={"clips": 100.0, "audio_s": 80.0}, artifacts={"samples": tmp_path})
        plan = STAGE.plan(config, {"compose": before}) if STAGE.plan else StagePlan()
        width, rows_per_second = 32, 25
        assert plan.disk_mb == pytest.approx(shares * 80 * rows_per_second * width * 2 / 2**20)
        assert plan.facts == {"samples": 100, "clips": 100, "audio_s": 80, ENCODED: 100}
    absent = config.model_copy(
        update={"audio_encoder": config.audio_encoder.model_copy(update={"path": tmp_path / "absent"})}
    )
    assert STAGE.plan is not None and "until" in STAGE.plan(absent, {}).note
