"""The 2-D stem: its values by plain convolutions, any window alone or among others, what it costs, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from audiollm.data.hearing.features import FeatureShape, FeatureWindow, PackedFeatures, mel_features
from audiollm.families.dual_ffn.planning import plan_training
from audiollm.families.dual_ffn.shape import encoder_of
from audiollm.models.audio_encoder import AudioEncoderConfig, AudioTower, Projector
from audiollm.models.audio_stem import StemName, convolutions, stem_values
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.encoder_flops import encoder_flops
from tests.audiollm.supervised.heard_samples import small_model, small_template, sound
from tests.audiollm.supervised.train_samples import settings_of

CONFIG = AudioEncoderConfig(
    16, 1, 2, 24, num_mel_bins=20, max_source_positions=12, stride=1, stem="conv2d", stem_channels=4
)


def tower_of(config: AudioEncoderConfig = CONFIG) -> AudioTower:
    """Build a tower in float64, with every weight moved from its initial value."""
    torch.manual_seed(0)
    tower = AudioTower(config).double().eval()
    for parameter in tower.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return tower


def windows_of(positions: list[int], bins: int = 20) -> list[FeatureWindow]:
    generator = torch.Generator().manual_seed(1)
    return [FeatureWindow(torch.randn(bins, 8 * n, generator=generator).double(), n) for n in positions]


def heard(tower: AudioTower, windows: list[FeatureWindow]) -> list[Tensor]:
    """The rows of each window."""
    features = PackedFeatures.of(windows)
    assert features is not None
    return list(tower(features).split([window.rows for window in windows]))


def by_plain_convolutions(tower: AudioTower, mel_MF: Tensor) -> Tensor:
    """Reference stem for one window, an image of mel bins by time: `[P, C]`. Only the weights are ours."""
    weights = {name.removeprefix("stem."): value for name, value in tower.state_dict().items()}
    x_NMF = mel_MF[None]

    def convolved(x_NMF: Tensor, name: str, stride: tuple[int, int]) -> Tensor:
        kernel = weights[f"{name}.weight"].transpose(2, 3)  # ours have time before mel bins
        made = functional.conv2d(
            x_NMF[None], kernel, weights[f"{name}.bias"], stride, padding=kernel.shape[-1] // 2
        )[0]
        mean, variance = made.mean((0, 1)), made.var((0, 1), unbiased=False)
        norm = name.replace("conv", "norm")
        normed = (made - mean) / (variance + 1e-5).sqrt()
        scaled = normed * weights[f"{norm}.weight"][:, None, None] + weights[f"{norm}.bias"][:, None, None]
        return scaled.clamp_min(0)

    for block, stride in enumerate(((4, 4), (2, 2), (2, 1))):  # mel bins, frames
        x_NMF = convolved(x_NMF, f"blocks.{block}.conv1", stride)
        x_NMF = x_NMF + convolved(x_NMF, f"blocks.{block}.conv2", (1, 1))
    x_PV = x_NMF.permute(2, 1, 0).flatten(1)
    return x_PV @ weights["linear.weight"].T + weights["linear.bias"]


@torch.no_grad()
@pytest.mark.parametrize("bins", [20, 80, 17])
def test_the_stem_is_plain_convolutions_over_an_image(bins: int) -> None:
    tower = tower_of(replace(CONFIG, num_mel_bins=bins))
    windows = windows_of([3, 12, 1], bins)
    features = PackedFeatures.of(windows)
    assert features is not None
    expected = torch.cat([by_plain_convolutions(tower, window.mel_MF) for window in windows])
    torch.testing.assert_close(tower.stem(features), expected, atol=1e-9, rtol=0)


@settings(max_examples=12)
@given(
    positions=st.lists(st.integers(1, 12), min_size=1, max_size=5), order=st.randoms(use_true_random=False)
)
def test_a_window_alone_is_the_window_among_others(positions: list[int], order: object) -> None:
    tower, windows = tower_of(), windows_of(positions)
    places = list(range(len(windows)))
    order.shuffle(places)  # type: ignore[attr-defined]
    together = heard(tower, [windows[place] for place in places])
    alone = [heard(tower, [windows[place]])[0] for place in places]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_gradients_are_those_of_the_windows_alone() -> None:
    tower, windows = tower_of(), windows_of([5, 12, 1, 7])
    weights = [torch.randn(window.rows, 16).double() for window in windows]

    def gradients(groups: list[list[int]]) -> dict[str, Tensor]:
        tower.zero_grad()
        for group in groups:
            found = heard(tower, [windows[place] for place in group])
            sum((weights[p] * x).sum() for p, x in zip(group, found, strict=True)).backward()  # type: ignore[union-attr]
        return {name: each.grad.clone() for name, each in tower.named_parameters() if each.grad is not None}

    alone = gradients([[0], [1], [2], [3]])
    assert set(alone) == {name for name, _ in tower.named_parameters()} and all(
        g.any() for g in alone.values()
    )
    for groups in ([[0, 1, 2, 3]], [[3, 1], [2, 0]]):
        for name, gradient in gradients(groups).items():
            torch.testing.assert_close(gradient, alone[name], atol=1e-9, rtol=1e-9)


@settings(max_examples=20)
@given(samples=st.integers(1, 60_000), stride=st.sampled_from([1, 2, 3]), mean=st.booleans())
def test_rows_are_those_of_the_duration(samples: int, stride: int, mean: bool) -> None:
    """12.5 a second with a stride of 1."""
    config = replace(CONFIG, stride=stride, reduction="mean" if mean else "concat", encoder_layers=0)
    found = mel_features(torch.zeros(1, samples), config.features)
    assert found.rows == -(-samples // (1280 * stride)) and config.features.rows_per_second == 12.5 / stride
    features = PackedFeatures.of(found.windows)
    assert features is not None and config.window_s == 0.96
    with torch.no_grad():
        assert AudioTower(config)(features).shape == (found.rows, 16 * (1 if mean else stride))


@torch.no_grad()
def test_in_half_precision_it_is_nearly_the_same() -> None:
    tower = tower_of(replace(CONFIG, num_mel_bins=80, stem_channels=32)).float()
    features = PackedFeatures.of(
        mel_features(sound(0.9, 0, 500.0), FeatureShape(80, 12, 1, False, 8)).windows
    )
    assert features is not None
    exact = tower(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = tower(features)
    assert (half.float() - exact).norm() < 0.05 * exact.norm()


def test_a_saved_model_hears_the_same(tmp_path: Path) -> None:
    model = small_model(small_template()).float().eval()
    model.add_audio_encoder(CONFIG)
    model.save_pretrained(tmp_path)
    loaded = DualFFN.from_pretrained(tmp_path)
    assert loaded.config.audio_encoder == CONFIG
    assert any(
        "audio_tower.stem.blocks.2.norm2" in name for name in load_file(tmp_path / "model.safetensors")
    )
    features = PackedFeatures.of(windows_of([4, 7]))
    assert features is not None
    features = replace(features, mel_MX=features.mel_MX.float())
    with torch.no_grad():
        assert torch.equal(loaded.audio_tower(features), model.audio_tower(features))


@pytest.mark.parametrize("stem", ["conv1d", "conv2d"])
def test_operations_are_those_that_torch_counts(stem: StemName) -> None:
    config = replace(CONFIG, stem=stem, num_mel_bins=80, max_source_positions=600, stem_channels=16)
    tower, projector = AudioTower(config), Projector(config, 32)
    features = PackedFeatures.of(mel_features(sound(4.0), config.features).windows)
    assert features is not None
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        projector(tower(features)).sum().backward()
    ours = encoder_flops(config, 32, features, trained=True)
    first = convolutions(stem, 80, 16, config.d_model)[0]
    area = first.kernel ** (1 if stem == "conv1d" else 2)
    positions = sum(features.frames) // config.frames_per_position
    # torch knows that the sound takes no gradient, and counts the gap behind the window
    of_sound = 2 * positions * first.places * area * first.inputs * first.outputs
    gap = (positions + 1) / positions
    counted = counter.get_total_flops() + of_sound
    assert counted / gap <= ours <= counted


def test_sizes_of_the_convolutions() -> None:
    """Sizes computed by hand: 80 mel bins become 20, 10 and 5; 8 frames become 2, 1 and 1."""
    sizes = convolutions("conv2d", 80, 32, 256)
    assert [each.places for each in sizes] == [40, 40, 10, 10, 5, 5, 1]
    assert [(each.inputs, each.outputs) for each in sizes[::2]] == [(1, 32), (32, 64), (64, 128), (640, 256)]
    assert stem_values("conv2d", 80, 32, 256) == 2 * (40 * 32 + 10 * 64 + 5 * 128) + 256
    assert all(later.inputs in (each.outputs, 5 * each.outputs) for each, later in pairwise(sizes))


def hearing(**encoder: object) -> dict[str, object]:
    return {
        "samples": "shards",
        "audio_in": "features",
        "shape": {"audio_encoder": {"stem": "conv2d", **encoder}},
    }


def test_settings_become_the_shape() -> None:
    found = encoder_of(settings_of(hearing()))
    assert found == AudioEncoderConfig(192, 4, 3, 768, 80, 375, stride=1, stem="conv2d")
    found = encoder_of(settings_of(hearing(window_s=8, stride=2, stem_channels=16, num_mel_bins=64)))
    assert found is not None and (found.window_s, found.stride, found.stem_channels) == (8.0, 2, 16)
    uneven = encoder_of(settings_of(hearing(stride=7)))  # of 30 s, as many as are whole rows
    assert uneven is not None and uneven.max_source_positions == 371


def test_the_plan_counts_the_stem() -> None:
    config = settings_of(hearing())
    encoder = encoder_of(config)
    assert encoder is not None
    with torch.device("meta"):
        tower = AudioTower(encoder)
        other = AudioTower(replace(encoder, stem="conv1d", stride=1))
    difference = sum(p.numel() for p in tower.parameters()) - sum(p.numel() for p in other.parameters())
    whisper = plan_training(settings_of(hearing(stem="conv1d", stride=1)), {})
    ours = plan_training(config, {})
    assert ours.parameters - whisper.parameters == difference
    assert ours.tokens == 0 and ours.memory_mb > 0


def test_what_the_stem_does_not_go_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="padded windows are for published weights"):
        replace(CONFIG, padded=True)
    with pytest.raises(ValueError, match="no stem 'conv3d'; there are conv1d, conv2d"):
        AudioEncoderConfig(stem="conv3d")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="stem_channels is set, but stem is conv1d"):
        settings_of(hearing(stem="conv1d", stem_channels=16))
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ValidationError, match="stem is set, but path gives an encoder"):
        settings_of(hearing(path=str(tmp_path)))
    tower = tower_of()
    with pytest.raises(ValueError, match="multiples of 8 frames up to 96"):
        tower(PackedFeatures(torch.zeros(20, 12).double(), (12,), (1,)))
