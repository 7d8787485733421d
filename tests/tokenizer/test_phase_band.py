"""The phase band: its transform equals scipy's, and a latent that repeats the band decodes to the waveform itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.fft
import torch

from audiollm.files.atomic import read_json
from tokenizer.continuous.model import AudioVAE, VAEConfig
from tokenizer.continuous.task import waveform_snr_db
from tokenizer.native.phase_band import LappedTransform

HOP, RATE = 2048, 44_100
SMALL = VAEConfig(mel_hidden_size=24, hidden_size=32, encoder_layers=(1, 1), decoder_layers=(1, 1))


def folded_dct(samples_N: np.ndarray, hop: int) -> np.ndarray:
    """The modified discrete cosine transform as it is usually computed: fold two hops to one, then a DCT of type 4."""
    window_W = np.sin(np.pi / (2 * hop) * (np.arange(2 * hop) + 0.5))
    rows = []
    for start in range(0, len(samples_N) - hop, hop):
        a, b, c, d = np.split(samples_N[start : start + 2 * hop] * window_W, 4)
        rows.append(scipy.fft.dct(np.concatenate([-c[::-1] - d, a - b[::-1]]), type=4, norm="ortho"))
    return np.stack(rows)


def test_coefficients_are_the_modified_discrete_cosine_transform() -> None:
    transform = LappedTransform(16_000, 64, 8_000.0)
    samples_BCN = torch.randn(2, 3, 64 * 7, generator=torch.Generator().manual_seed(0))
    found_BTCP = transform(samples_BCN)
    assert found_BTCP.shape == (2, 6, 3, 64)
    expected = folded_dct(samples_BCN[1, 2].numpy().astype(np.float64), 64)
    np.testing.assert_allclose(found_BTCP[1, :, 2].numpy(), expected, atol=1e-5)
    back_BCN = transform.inverse(found_BTCP)
    torch.testing.assert_close(back_BCN[..., 64:-64], samples_BCN[..., 64:-64], atol=1e-5, rtol=0)


def test_the_band_ends_at_its_cutoff() -> None:
    transform = LappedTransform(RATE, HOP, 700.0)
    assert transform.num_coefficients == 66  # of 10.8 Hz
    time_N = torch.arange(12 * HOP) / RATE
    inside, outside = (torch.sin(2 * torch.pi * hz * time_N)[None, None] for hz in (600.0, 800.0))
    assert float(transform.inverse(transform(outside))[..., HOP:-HOP].std()) < 0.02
    kept_N = transform.inverse(transform(inside))[0, 0, HOP:-HOP]
    assert float(waveform_snr_db(inside[0, :, HOP:-HOP], kept_N[None])) > 30


def test_an_untrained_model_repeats_the_lowest_part_of_the_band() -> None:
    """What both channels have in common below 340 Hz (half of the latent's 64 numbers), sample for sample."""
    torch.manual_seed(0)
    model = AudioVAE(replace(SMALL, phase_band_hz=700.0)).eval()
    with torch.no_grad():  # no free path: log magnitudes of -30
        model.decoder.head.project.weight.zero_()
        model.decoder.head.project.bias.unflatten(0, (2, 2, -1))[:, 0] = -30
    time_N = torch.arange(20 * HOP) / RATE
    tone_N = 0.2 * torch.sin(2 * torch.pi * 110 * time_N) + 0.1 * torch.sin(2 * torch.pi * 220 * time_N + 1)
    real_CN = tone_N.repeat(2, 1)
    made_CN = model.decode(model.encode(real_CN), num_samples=real_CN.shape[1])
    inner = slice(2 * HOP, -2 * HOP)
    assert float(waveform_snr_db(real_CN[:, inner], made_CN[:, inner])) > 45
    pieces = model.encode(real_CN).split([1, 3, 9, 7], dim=1)
    streamed_CN = torch.cat(list(model.decode_stream(pieces)), dim=1)
    torch.testing.assert_close(streamed_CN, made_CN, atol=1e-5, rtol=0)


def test_snr_is_the_ratio_of_energies() -> None:
    real_CN = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    noise_CN = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(1))
    assert float(waveform_snr_db(real_CN, real_CN + 0.1 * noise_CN)) == pytest.approx(20.0, abs=0.1)
    assert float(waveform_snr_db(real_CN, torch.zeros(2, 50_000))) == pytest.approx(0.0, abs=1e-5)
    assert float(waveform_snr_db(real_CN, real_CN)) == 80.0


def test_a_stride_beyond_the_encoders_context_is_refused() -> None:
    with pytest.raises(ValueError, match="stride"):
        AudioVAE(replace(SMALL, mel_hop_samples=128, n_fft=128, num_mels=20, stride=8, phase_band_hz=700.0))


def test_a_folder_made_before_the_phase_band_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AudioVAE(SMALL).eval()
    model.save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    assert config.pop("phase_band_hz") == 0.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = AudioVAE.from_pretrained(tmp_path)
    assert again.encoder.band is None and again.decoder.band is None
    sound_CN = torch.randn(2, 9_000, generator=torch.Generator().manual_seed(1)) * 0.1
    assert torch.equal(again.encode(sound_CN), model.encode(sound_CN))
