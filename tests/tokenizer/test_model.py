"""The tokenizer: its transforms against torch's, its shapes, and that every parameter is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import librosa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.codec import Codec, codec_digest, load_codec
from audiollm.errors import ConfigError
from tokenizer.native.autoencoder import Decoder, Encoder
from tokenizer.native.layers import Carry, CausalConv, InverseSTFTHead, LogMel
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.native.operations import frame, magnitudes, overlap_add
from tokenizer.training.losses import ReconstructionLoss
from tokenizer.training.settings import SIZES
from tokenizer.training.stages import tokenizer_parameters

SMALL = TokenizerConfig(
    mel_hidden_size=24,
    hidden_size=32,
    encoder_layers=(1, 1),
    decoder_layers=(1, 1),
    codebook_size=32,
    latent_dim=8,
    semantic_dim=5,
)


@pytest.fixture(scope="module")
def model() -> AudioTokenizer:
    torch.manual_seed(0)
    return AudioTokenizer(SMALL).eval()


def test_frame_equals_unfold_and_overlap_add_is_its_transpose() -> None:
    x, y = torch.randn(2, 960), torch.randn(2, 13, 240)
    assert torch.equal(frame(x, 240, 60), x.unfold(1, 240, 60))
    forward = (frame(x, 240, 60) * y).sum()
    torch.testing.assert_close(forward, (x * overlap_add(y, 60)).sum(), rtol=1e-4, atol=1e-3)


def test_magnitudes_equal_torch_stft() -> None:
    x, window = torch.randn(1, 4096), torch.hann_window(1024)
    theirs = torch.stft(x, 1024, 256, window=window, center=False, return_complex=True).abs().transpose(1, 2)
    torch.testing.assert_close(magnitudes(x, window, 256), theirs, atol=1e-3, rtol=1e-3)


def test_log_mel_equals_librosa() -> None:
    x = torch.randn(1, 2400) * 0.1
    ours = LogMel(24_000, 960, 240, 80)(x)[0].T
    padded = torch.nn.functional.pad(x, (360, 360))[0].numpy()
    theirs = librosa.feature.melspectrogram(
        y=padded, sr=24_000, n_fft=960, hop_length=240, n_mels=80, center=False, power=1.0
    )
    torch.testing.assert_close(ours, torch.from_numpy(theirs).clamp_min(1e-4).log(), atol=1e-3, rtol=1e-3)


def test_inverse_stft_head_inverts_a_spectrum() -> None:
    """Given the log-magnitude and phase of a signal, the head returns the signal."""
    head = InverseSTFTHead(4, 960, 240, 1, 24_000)
    signal = torch.randn(1, 2400) * 0.1
    spectrum = torch.fft.rfft(frame(torch.nn.functional.pad(signal, (360, 360)), 960, 240) * head.window_W)
    features = torch.cat([spectrum.abs().clamp_min(1e-9).log(), spectrum.angle()], dim=2)
    head.project = torch.nn.Identity()  # type: ignore[assignment]
    inner = slice(600, -600)  # the ends lack overlapping frames
    torch.testing.assert_close(head(features)[:, 0, inner], signal[:, inner], atol=1e-4, rtol=1e-3)


def test_causal_conv_equals_conv1d_with_zeros_before() -> None:
    ours = CausalConv(6, 6, 7, groups=6)
    theirs = torch.nn.Conv1d(6, 6, 7, groups=6)
    theirs.weight.data, theirs.bias.data = ours.conv.weight.data.squeeze(2), ours.conv.bias.data
    x = torch.randn(2, 11, 6)
    expected = theirs(torch.nn.functional.pad(x.transpose(1, 2), (6, 0))).transpose(1, 2)
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
    carry: Carry = {}
    parts = [ours(piece, carry) for piece in x.split((1, 4, 6), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=1e-5)


@given(st.integers(1, 5000))
@settings(max_examples=15)
def test_frames_are_the_ceiling(samples: int) -> None:
    model = AudioTokenizer(SMALL).eval()
    codes = model.encode(torch.randn(1, samples) * 0.1)
    assert codes.shape == (8, -(-samples // 960))
    decoded = model.decode(codes)
    assert decoded.shape == (1, codes.shape[1] * 960)
    assert bool(torch.isfinite(decoded).all()) and float(decoded.abs().max()) <= 1


@pytest.mark.parametrize("bad", [torch.zeros(2, 100), torch.zeros(1, 0), torch.zeros(100)])
def test_encode_refuses_other_shapes(model: AudioTokenizer, bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="mono"):
        model.encode(bad)


def test_encode_and_decode_refuse_bad_values(model: AudioTokenizer) -> None:
    with pytest.raises(ValueError, match="finite"):
        model.encode(torch.full((1, 100), torch.nan))
    with pytest.raises(ValueError, match="codes must be"):
        model.decode(torch.full((8, 3), 32))
    with pytest.raises(ValueError, match="decode takes"):
        model.decode(torch.zeros(9, 3, dtype=torch.long))


def test_every_parameter_gets_a_gradient() -> None:
    model = AudioTokenizer(SMALL)
    target = torch.randn(2, 9600) * 0.1
    out = model(target, features_BTH=torch.randn(2, 10, 5))
    losses = ReconstructionLoss(24_000)(out.samples_BN, target)
    assert out.semantic is not None
    (losses["mel"] + losses["stft"] + out.commitment + out.semantic).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, name


def test_loss_is_zero_at_the_target_and_grows() -> None:
    loss, x = ReconstructionLoss(24_000), torch.randn(1, 9600) * 0.1
    same, louder, other = loss(x, x), loss(2 * x, x), loss(torch.randn(1, 9600) * 0.1, x)
    assert float(same["mel"]) == 0 and float(same["stft"]) == 0
    assert float(louder["stft"]) == pytest.approx(0.693, abs=0.01)  # log 2 in every bin
    assert float(other["mel"]) > 0.1


def test_it_is_a_codec_and_survives_saving(model: AudioTokenizer, tmp_path: Path) -> None:
    assert isinstance(model, Codec)
    assert (model.frame_rate, model.num_codebooks) == (25.0, 8)
    model.save_pretrained(tmp_path)
    again = load_codec(tmp_path)
    audio = torch.randn(1, 5000) * 0.1
    assert torch.equal(model.encode(audio), again.encode(audio))
    with pytest.raises(ConfigError, match="no codec"):
        load_codec(tmp_path / "elsewhere")


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff"])
def test_a_damaged_config_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json  (not JSON|no mapping)"):
        load_codec(tmp_path)


@pytest.mark.parametrize("quantizer", ["rvq", "split_rvq", "fsq"])
def test_its_digest_survives_saving(quantizer: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"mel_hidden_size": 16, "hidden_size": 16, "encoder_layers": (1, 1)}
    config = TokenizerConfig(quantizer=quantizer, decoder_layers=(1, 1), num_codebooks=2, **shape)
    model, other = AudioTokenizer(config), AudioTokenizer(config)
    model.save_pretrained(tmp_path)
    assert codec_digest(load_codec(tmp_path)) == codec_digest(model) != codec_digest(other)


@pytest.mark.parametrize("quantizer", ["rvq", "split_rvq", "fsq"])
def test_its_first_codebooks_are_a_codec_of_their_own(quantizer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = AudioTokenizer(replace(SMALL, quantizer=quantizer, codebook_size=64)).eval()
    whole.save_pretrained(tmp_path / "whole")
    AudioTokenizer.from_pretrained(tmp_path / "whole", num_codebooks=3).save_pretrained(tmp_path / "first")
    first = AudioTokenizer.from_pretrained(tmp_path / "first")
    samples_CN = torch.randn(1, 24_000) * 0.1
    codes_KT = whole.encode(samples_CN)
    assert first.num_codebooks == 3
    assert torch.equal(first.encode(samples_CN), codes_KT[:3])
    assert torch.equal(first.decode(codes_KT[:3]), whole.decode(codes_KT[:3]))
    for wrong in (0, 9):
        with pytest.raises(ValueError, match="must be 1..8"):
            AudioTokenizer.from_pretrained(tmp_path / "whole", num_codebooks=wrong)


@pytest.mark.parametrize("size", ["tiny", "small", "1b"])
@pytest.mark.parametrize(("harmonic", "linear"), [(True, True), (False, True), (True, False), (False, False)])
def test_planned_parameters_are_the_real_ones(size: str, harmonic: bool, linear: bool) -> None:
    mel_hidden, hidden, blocks = SIZES[size].mel_hidden_size, SIZES[size].hidden_size, SIZES[size].blocks
    shape = TokenizerConfig(
        mel_hidden_size=mel_hidden,
        hidden_size=hidden,
        encoder_layers=blocks[:2],
        decoder_layers=blocks[2:],
        harmonic_source=harmonic,
        linear_path=linear,
    )
    with torch.device("meta"):
        encoder = Encoder(shape.shape, shape.latent_dim)
        decoder = Decoder(shape.shape, shape.latent_dim)
    real = sum(p.numel() for half in (encoder, decoder) for p in half.parameters())
    assert tokenizer_parameters(mel_hidden, hidden, blocks, harmonic, linear) == real
