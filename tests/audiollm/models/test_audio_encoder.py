"""The audio encoder: transformers' WhisperEncoder on the same weights, any window alone or among others, its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from audiollm.data.hearing.features import FeatureShape, FeatureWindow, PackedFeatures, mel_features
from audiollm.errors import ConfigError
from audiollm.models.audio_encoder import (
    AudioEncoderConfig,
    AudioTower,
    Projector,
    encoder_config,
    load_tower,
    sinusoids,
)

TINY = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 80,
}  # fmt: skip


def noise(seconds: float, seed: int = 0) -> Tensor:
    samples = round(seconds * 16_000)
    return 0.1 * torch.randn(1, samples, generator=torch.Generator().manual_seed(seed))


def whisper(max_source_positions: int = 1500) -> WhisperEncoder:
    torch.manual_seed(0)
    config = WhisperConfig(**TINY, max_source_positions=max_source_positions, attn_implementation="eager")
    encoder = WhisperEncoder(config).eval()
    for parameter in encoder.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    encoder.embed_positions.weight.data.copy_(sinusoids(max_source_positions, TINY["d_model"]))
    return encoder


def tower_of(encoder: WhisperEncoder, **others: object) -> AudioTower:
    config = AudioEncoderConfig(**TINY, max_source_positions=encoder.max_source_positions, **others)
    tower = AudioTower(config).eval()
    tower.load_state_dict(encoder.state_dict())
    return tower


def packed(*clips: Tensor, shape: FeatureShape) -> PackedFeatures:
    found = PackedFeatures.of([w for clip in clips for w in mel_features(clip, shape).windows])
    assert found is not None
    return found


@torch.no_grad()
@pytest.mark.parametrize("reduction", ["concat", "mean"])
def test_thirty_padded_seconds_are_transformers_whisper(reduction: str) -> None:
    encoder = whisper()
    tower = tower_of(encoder, padded=True, reduction=reduction)
    clips = [noise(1.23), noise(4.0, 1), noise(30.0, 2)]
    ours = tower(packed(*clips, shape=tower.config.features))
    extractor = WhisperFeatureExtractor(feature_size=80)
    mels = extractor([clip[0].numpy() for clip in clips], sampling_rate=16_000, return_tensors="pt")
    if reduction == "concat":
        theirs = encoder(mels["input_features"]).last_hidden_state.reshape(3, 750, -1)
    else:  # as in Qwen2-Audio: its encoder is Whisper's with a mean of two positions before the last norm
        norm, encoder.layer_norm = encoder.layer_norm, torch.nn.Identity()
        hidden = encoder(mels["input_features"]).last_hidden_state
        theirs = norm(torch.nn.functional.avg_pool1d(hidden.transpose(1, 2), 2, 2).transpose(1, 2))
    expected = torch.cat([rows[:count] for rows, count in zip(theirs, (31, 100, 750), strict=True)])
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() < 1e-5


@torch.no_grad()
def test_a_window_of_its_own_length_is_transformers_whisper_of_that_length() -> None:
    """transformers' encoder takes one length alone; one that is built for 1.2 s is the oracle for 1.2 s."""
    long, short = whisper(1500), whisper(60)
    short.load_state_dict({**long.state_dict(), "embed_positions.weight": long.embed_positions.weight[:60]})
    tower = tower_of(long)
    clip = noise(1.2)
    mel = WhisperFeatureExtractor(feature_size=80)(
        clip[0].numpy(), sampling_rate=16_000, padding="do_not_pad", return_tensors="pt"
    )
    theirs = short(mel["input_features"]).last_hidden_state[0].reshape(30, -1)
    ours = tower(packed(noise(0.7, 5), clip, noise(2.0, 6), shape=tower.config.features))[18:48]
    assert (ours - theirs).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_a_clip_alone_is_the_clip_among_others(padded: bool) -> None:
    config = AudioEncoderConfig(**TINY, max_source_positions=100, padded=padded, stride=4)
    tower = AudioTower(config).eval()
    clips = [noise(seconds, seed) for seed, seconds in enumerate((0.31, 2.0, 0.02, 5.17))]
    shape = config.features
    alone = torch.cat([tower(packed(clip, shape=shape)) for clip in clips])
    together = tower(packed(*clips, shape=shape))
    assert len(alone) == 4 + 25 + 1 + 65  # ceil(seconds * 12.5)
    assert (alone - together).abs().max() < 1e-5
    others = [noise(3.0, 7), clips[1], noise(0.4, 8)]
    start = 38
    assert (tower(packed(*others, shape=shape))[start : start + 25] - alone[4:29]).abs().max() < 1e-5


@settings(max_examples=30)
@given(
    samples=st.integers(1, 40_000),
    stride=st.sampled_from([1, 2, 4, 5]),
    positions=st.sampled_from([20, 40, 100]),
    padded=st.booleans(),
)
def test_rows_are_those_of_the_duration(samples: int, stride: int, positions: int, padded: bool) -> None:
    shape = FeatureShape(20, positions, stride, padded)
    found = mel_features(torch.zeros(1, samples), shape)
    assert found.rows == shape.rows(samples) == max(1, -(-samples // (320 * stride)))
    assert all(window.rows == shape.window_rows for window in found.windows[:-1])
    config = AudioEncoderConfig(8, 0, 1, 8, 20, positions, padded, stride)
    features = PackedFeatures.of(found.windows)
    assert features is not None
    with torch.no_grad():
        assert AudioTower(config)(features).shape == (found.rows, 8 * stride)


@torch.no_grad()
def test_long_clips_are_their_windows() -> None:
    config = AudioEncoderConfig(**TINY, max_source_positions=50)
    tower, clip = AudioTower(config).eval(), noise(2.5)
    pieces = [clip[:, :16_000], clip[:, 16_000:32_000], clip[:, 32_000:]]
    separate = torch.cat([tower(packed(piece, shape=config.features)) for piece in pieces])
    assert (tower(packed(clip, shape=config.features)) - separate).abs().max() < 1e-5


def test_a_frozen_tower_stays_in_evaluation_without_a_graph() -> None:
    config = AudioEncoderConfig(**TINY, dropout=0.5)
    tower, projector = AudioTower(config), Projector(config, 16)
    features = packed(noise(0.5), shape=config.features)
    tower.train()
    assert tower.training and not torch.equal(tower(features), tower(features))
    tower.freeze()
    tower.train()
    assert not any(module.training for module in tower.modules())
    out = projector(tower(features))
    assert torch.equal(out, projector(tower(features)))
    out.sum().backward()
    assert projector.linear.weight.grad is not None
    assert all(parameter.grad is None for parameter in tower.parameters())


def test_activations_computed_again_give_the_same_gradients() -> None:
    tower = AudioTower(AudioEncoderConfig(**TINY)).train()
    features = packed(noise(0.5), noise(0.2, 1), shape=tower.config.features)
    gradients = []
    for _ in range(2):
        tower.zero_grad()
        tower(features).square().sum().backward()
        gradients.append(
            [parameter.grad.clone() for parameter in tower.parameters() if parameter.grad is not None]
        )
        tower.gradient_checkpointing_enable()
    assert len(gradients[0]) == len(list(tower.parameters()))
    assert all(torch.allclose(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("prefix", "layout"),
    [("model.encoder.", {}), ("", {}), ("audio_tower.", {"model_type": "qwen2_audio", "audio_config": None})],
)
def test_weights_by_path(tmp_path: Path, prefix: str, layout: dict[str, object]) -> None:
    encoder = whisper()
    shape = {**TINY, "max_source_positions": 1500, "activation_function": "gelu"}
    config = {**layout, "audio_config": shape} if layout else shape
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {f"{prefix}{name}": value.contiguous() for name, value in encoder.state_dict().items()}
    halves = [dict(list(weights.items())[part::2]) for part in range(2)]
    for number, half in enumerate(halves):
        save_file(
            {**half, f"proj_out.{number}": torch.zeros(1)}, tmp_path / f"model-0000{number}.safetensors"
        )
    found = encoder_config(tmp_path)
    assert found.padded and found.d_model == 32 and found.window_s == 30.0
    short = encoder_config(tmp_path, max_source_positions=100, padded=False, stride=4)
    tower = AudioTower(short).eval()
    load_tower(tower, tmp_path)
    for name, value in tower.state_dict().items():
        expected = encoder.state_dict()[name]
        assert torch.equal(value, expected[:100] if name == "embed_positions.weight" else expected)


def test_folders_that_hold_no_encoder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        encoder_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 3}))
    with pytest.raises(ConfigError, match="d_model, encoder_layers"):
        encoder_config(tmp_path)
    tower = AudioTower(AudioEncoderConfig(**TINY))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="pickled weights are never loaded"):
        load_tower(tower, tmp_path)
    save_file({"model.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="no weights of a Whisper-class encoder"):
        load_tower(tower, tmp_path)
    weights = {**whisper().state_dict(), "conv1.weight": torch.zeros(3, 3, 3)}
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 weights .* conv1\.weight"):
        load_tower(tower, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [{"reduction": "max"}, {"stride": 7}, {"d_model": 30, "encoder_attention_heads": 4}, {"stride": 0}],
)
def test_shapes_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        AudioEncoderConfig(**wrong)


def test_windows_for_another_encoder_are_refused() -> None:
    tower = AudioTower(AudioEncoderConfig(**TINY, max_source_positions=100))
    for other in (FeatureShape(40, 100), FeatureShape(80, 100, padded=True), FeatureShape(80, 200)):
        with pytest.raises(ValueError, match="80 bins and multiples of 4 frames up to 200"):
            tower(packed(noise(3.3), shape=other))


def test_a_shared_recording_is_encoded_once_and_stands_where_it_is_heard() -> None:
    first, second = (torch.full((3, 2 * rows), float(rows)) for rows in (2, 3))
    windows = [FeatureWindow(first, 2), FeatureWindow(second, 3), FeatureWindow(first, 2)]
    packed = PackedFeatures.of(windows, share=True)
    assert packed is not None
    assert (packed.num_encoded, packed.num_rows, packed.frames) == (5, 7, (4, 6))
    encoded = torch.tensor([[20.0], [21.0], [30.0], [31.0], [32.0]])
    assert packed.spread(encoded)[:, 0].tolist() == [20, 21, 30, 31, 32, 20, 21]
