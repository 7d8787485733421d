"""The harmonic source: closed forms, pitch read and labelled, the harmonic share, and what a small training keeps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from audiollm.audio import save
from tokenizer.clips import Clip, ClipStore, pitch_of_crops, random_crops
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.native.operations import frame, magnitudes
from tokenizer.native.pitch import (
    CENTS_PER_CLASS,
    FIRST_CLASS_HZ,
    LOWEST_HZ,
    VOICE_HZ,
    PitchLogits,
    PitchPredictor,
    PitchSalience,
    PitchTarget,
    PitchTrack,
    decode_pitch,
    num_pitch_classes,
    pitch_loss,
)
from tokenizer.native.source import HarmonicShare, HarmonicSource

RATE, N_FFT, HOP = 24_000, 960, 240
NUM_CLASSES = num_pitch_classes(VOICE_HZ)


def cosines(hz_N: Tensor, tilt: float = 0.0) -> Tensor:
    """All harmonics below the band's edge of a pitch that is given for each sample; harmonic k has k ** -tilt.

    The highest one fades out as it comes to the edge.
    """
    turns_N = (hz_N.double() / RATE).cumsum(0)
    count = int(RATE / 2 / float(hz_N.min()))
    room_N = RATE / 2 / hz_N.double()
    waves = [
        k**-tilt * torch.cos(2 * math.pi * k * turns_N) * (room_N - k).clamp(0, 1)
        for k in range(1, count + 1)
    ]
    return torch.stack(waves).sum(dim=0).float()


def track(hz_F: Tensor) -> PitchTrack:
    return PitchTrack(hz_F[None].double(), torch.ones(1, len(hz_F)))


@pytest.mark.parametrize("hz", [61.3, 100.0, 233.1, 499.0])
def test_a_constant_pitch_is_the_sum_of_its_harmonics(hz: float) -> None:
    source = HarmonicSource(RATE, N_FFT, HOP)
    excitation, state = source.step(track(torch.full((42,), hz)), None, 40)
    assert excitation.spectrum_BFK.shape == (1, 40, 481) and state.ready.spectrum_BFK.shape[1] == 0
    # frame t begins 360 samples before its hop; the source begins with the middle of the first hop's neighbour
    train_N = functional.pad(cosines(torch.full((43 * HOP,), hz)), (240, 0)) * (
        2 / float(source.window_W.sum())
    )
    expected = (
        torch.fft.rfft(frame(train_N[None], N_FFT, HOP) * source.window_W)[:, :40] * source.dispersion_K
    )
    torch.testing.assert_close(excitation.spectrum_BFK, expected, atol=2e-4, rtol=0)
    harmonics = torch.arange(1, int(10_000 / hz)) * hz * N_FFT / RATE
    peaks = excitation.spectrum_BFK.abs()[0, 20, harmonics.round().long()]
    assert float(peaks.min()) > 0.7 and float(peaks.max()) < 1.3


def test_a_gliding_pitch_has_no_sudden_harmonic() -> None:
    """Where a harmonic reaches the band's edge, a step in the pitch of a millionth changes the source as little."""
    source = HarmonicSource(RATE, N_FFT, HOP)
    hz_F = torch.linspace(119.99, 120.01, 42, dtype=torch.float64)  # the hundredth harmonic meets 12 kHz
    near, _ = source.step(track(hz_F), None, 40)
    moved, _ = source.step(track(hz_F * (1 + 1e-9)), None, 40)
    assert float((near.spectrum_BFK - moved.spectrum_BFK).abs().max()) < 1e-4


def test_the_phase_runs_on_whatever_the_pieces() -> None:
    dice = torch.Generator().manual_seed(0)
    hz_F = 80 * 2 ** (2 * torch.rand(60, generator=dice))
    source = HarmonicSource(RATE, N_FFT, HOP)
    whole, _ = source.step(track(hz_F), None, 56)
    state, parts, given = None, [], 0
    for count, ahead in ((8, 4), (4, 4), (12, 4), (32, 4)):
        start = 0 if state is None else given + 4
        excitation, state = source.step(track(hz_F[start : given + count + ahead]), state, count)
        parts.append(excitation.spectrum_BFK)
        given += count
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.spectrum_BFK, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="more pitch ahead"):
        source.step(track(hz_F[:8]), None, 8)


@pytest.mark.parametrize("hz", [70.0, 123.0, 210.0, 400.0])
def test_salience_is_highest_at_the_pitch_at_any_level(hz: float) -> None:
    window_W = torch.hann_window(N_FFT)
    salience = PitchSalience(RATE, window_W, VOICE_HZ)
    sound_1N = cosines(torch.full((RATE,), hz))[None]
    values_FL = salience(magnitudes(sound_1N, window_W, HOP))[0]
    lags_hz = torch.logspace(0, 1, values_FL.shape[1], base=VOICE_HZ / LOWEST_HZ) * LOWEST_HZ
    found_F = lags_hz[values_FL.argmax(dim=1)]
    assert float((1200 * torch.log2(found_F / hz)).abs().max()) < 60  # the lags are 58 cents apart
    quiet_FL = salience(magnitudes(0.01 * sound_1N, window_W, HOP))[0]
    torch.testing.assert_close(quiet_FL, values_FL, atol=0.02, rtol=0)


def test_pitch_is_decoded_between_classes() -> None:
    hz_F = 60 * 2 ** torch.linspace(0, 3, 200)
    place_F = 1200 / CENTS_PER_CLASS * torch.log2(hz_F / FIRST_CLASS_HZ)
    logits_FS = -0.5 * ((torch.arange(NUM_CLASSES) - place_F[:, None]) / 0.8).square()
    found = decode_pitch(PitchLogits(logits_FS[None], torch.zeros(1, 200)))
    assert float((1200 * torch.log2(found.hz_BF[0] / hz_F)).abs().max()) < 1.0
    assert float(found.voicing_BF.min()) > 0.9  # as likely as not: voiced


def test_pitch_loss_is_a_cross_entropy_over_voiced_frames() -> None:
    dice = torch.Generator().manual_seed(0)
    logits = PitchLogits(torch.randn(1, 3, NUM_CLASSES, generator=dice), torch.randn(1, 3, generator=dice))
    hz_BF = torch.tensor([[FIRST_CLASS_HZ * 2 ** (40 * CENTS_PER_CLASS / 1200), 0.0, 0.0]])
    target_S = np.exp(-0.5 * ((np.arange(NUM_CLASSES) - 40) / 0.8) ** 2)
    logs_S = logits.pitch_BFS[0, 0].log_softmax(0).numpy()
    voicing_F = logits.voicing_BF[0].numpy()
    pitch = -(target_S / target_S.sum() * logs_S).sum()
    signed_F = np.array([-voicing_F[0], voicing_F[1], voicing_F[2]])
    voicing = np.mean(np.log1p(np.exp(signed_F)))
    assert float(pitch_loss(logits, PitchTarget(hz_BF, 1 / 3))) == pytest.approx(pitch + voicing, rel=1e-4)
    unvoiced = float(pitch_loss(logits, PitchTarget(torch.zeros(1, 3), 0.0)))
    assert unvoiced == pytest.approx(np.mean(np.log1p(np.exp(voicing_F))), rel=1e-5)


def test_a_pitch_does_not_depend_on_how_many_frames_are_read_at_once() -> None:
    torch.manual_seed(0)
    predictor = PitchPredictor(16, 4, VOICE_HZ).eval()
    latent_BTD = torch.randn(1, 54, 16)
    with torch.no_grad():
        whole = predictor.track(latent_BTD)
        alone = [predictor.track(latent_BTD[:, t : t + 5]).hz_BF for t in range(50)]
        logits = decode_pitch(predictor(latent_BTD))
    torch.testing.assert_close(torch.cat(alone, dim=1), whole.hz_BF, atol=1e-11, rtol=0)
    torch.testing.assert_close(logits.hz_BF, whole.hz_BF, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("amplitude", "expected"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_harmonic_share_of_pulses_in_noise(amplitude: float, expected: float) -> None:
    dice = torch.Generator().manual_seed(0)
    window_W = torch.hann_window(N_FFT)
    share = HarmonicShare(RATE, window_W)
    hz_N = 130 * 2 ** (0.3 * torch.sin(torch.arange(10 * RATE) / RATE * 3))
    pulses_1N = cosines(hz_N)[None]
    noise_1N = torch.randn(1, 10 * RATE, generator=dice) * pulses_1N.std()
    sound_1N = amplitude * pulses_1N + (1 - amplitude) * noise_1N
    middle_F = hz_N[480::HOP][: (10 * RATE - N_FFT) // HOP + 1]
    real_MK, source_MK = (magnitudes(x, window_W, HOP)[0].square() for x in (sound_1N, pulses_1N))
    found_P = share(real_MK, source_MK, middle_F).mean(dim=0)
    assert float((found_P - expected).abs().max()) < 0.25, found_P


def test_labels_of_crops_move_with_speed_and_place(tmp_path: Path) -> None:
    """The pitch that the crop's own samples have, in crops of a gliding voice between silences."""
    hz_N = 110 * 2 ** torch.linspace(0, 1, 2 * RATE)
    voice_N = functional.pad(0.1 * cosines(hz_N, tilt=1.0), (RATE // 2, RATE // 2))
    save(tmp_path / "glide.wav", voice_N[None], RATE)
    store = ClipStore([Clip(tmp_path / "glide.wav", 0.0, 3.0)], RATE)
    crops = random_crops(store, 24, 24 * 960, torch.Generator().manual_seed(0))
    hz_BF = pitch_of_crops(store, crops, HOP)
    assert hz_BF.shape == (24, 96)
    window_W = torch.hann_window(N_FFT)
    magnitude_BFK = magnitudes(functional.pad(crops.samples, (360, 360)), window_W, HOP)
    power_BF = magnitude_BFK.square().sum(dim=2)
    loud_BF = power_BF > 0.02 * power_BF.max()
    assert float((loud_BF == (hz_BF > 0)).float().mean()) > 0.93
    salience_BFL = PitchSalience(RATE, window_W, VOICE_HZ)(magnitude_BFK)
    lags_hz = torch.logspace(0, 1, 64, base=VOICE_HZ / LOWEST_HZ) * LOWEST_HZ
    both_BF = loud_BF & (hz_BF > 0)
    cents = 1200 * torch.log2(lags_hz[salience_BFL.argmax(dim=2)] / hz_BF)[both_BF]
    assert float((cents.abs() < 80).float().mean()) > 0.95 and float(cents.median().abs()) < 20


def test_a_tokenizer_without_a_source_loads_as_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"mel_hidden_size": 24, "hidden_size": 32, "encoder_layers": (1, 1), "decoder_layers": (1, 1)}
    for harmonic in (False, True):
        model = AudioTokenizer(TokenizerConfig(**shape, harmonic_source=harmonic)).eval()  # type: ignore[arg-type]
        model.quantizer.initialize(torch.randn(2_000, 64), torch.Generator().manual_seed(0))
        model.save_pretrained(tmp_path / str(harmonic))
        again = AudioTokenizer.from_pretrained(tmp_path / str(harmonic))
        codes = torch.randint(0, 1024, (8, 30))
        assert torch.equal(again.decode(codes), model.decode(codes))
    config = tmp_path / "False" / "config.json"
    config.write_text(
        config.read_text().replace(', "harmonic_source": false', "").replace('"harmonic_source": false,', "")
    )
    assert AudioTokenizer.from_pretrained(tmp_path / "False").decoder.pitch is None
