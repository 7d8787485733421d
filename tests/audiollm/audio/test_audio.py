"""audiollm.audio on tensors: resampling, channels, loudness.

Oracles: closed forms (sines), scipy, torchaudio. Reading files is in test_audio_formats and test_audio_damage,
writing and finding them in test_audio_saving.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import av
import numpy as np
import pytest
import scipy.signal
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from audiollm.audio import AudioError, Waveform
from audiollm.audio import files as audio
from tests.audiollm.audio.audio_signals import error_db, noise, sines

EXAMPLES = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


# The types


def test_waveform_knows_its_length_and_refuses_other_shapes() -> None:
    waveform = Waveform(torch.zeros(2, 800), 16000)
    assert (waveform.num_channels, waveform.num_samples, waveform.duration_s) == (2, 800, 0.05)
    for bad in (torch.zeros(800), torch.zeros(1, 1, 8), torch.zeros(1, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match="float32"):
            Waveform(bad, 16000)
    with pytest.raises(ValueError, match="sample rate"):
        Waveform(torch.zeros(1, 8), 0)


def test_waveform_methods_are_the_functions() -> None:
    waveform = Waveform(noise(0, 2, 1000), 16000)
    assert torch.equal(waveform.mono().samples_CN, waveform.samples_CN.mean(0, keepdim=True))
    resampled = waveform.resample(8000)
    expected = audio.resample(waveform.samples_CN, 16000, 8000).clamp(-1, 1)
    assert resampled.sample_rate == 8000
    assert torch.equal(resampled.samples_CN, expected)


def test_resampled_waveform_stays_in_range() -> None:
    square = torch.where(torch.arange(4000) % 40 < 20, 1.0, -1.0)[None]
    assert audio.resample(square, 16000, 24000).abs().max() > 1.0  # the filter does overshoot
    assert Waveform(square, 16000).resample(24000).samples_CN.abs().max() <= 1.0


def test_audio_error_names_the_path_and_crosses_processes() -> None:
    error = copy.copy(AudioError(Path("a/b.wav"), "is empty"))  # rebuilt from its arguments, as by pickle
    assert (error.path, error.reason, str(error)) == (
        Path("a/b.wav"),
        "is empty",
        f"{Path('a/b.wav')}: is empty",
    )


# Resampling


@pytest.mark.parametrize("needs_gradient", [False, True], ids=["soxr", "torchaudio"])
@pytest.mark.parametrize(
    ("orig_rate", "new_rate"), [(44100, 16000), (16000, 24000), (48000, 44100), (8000, 48000)]
)
def test_resampling_sines_gives_the_same_sines(orig_rate: int, new_rate: int, needs_gradient: bool) -> None:
    frequencies_hz = (310.0, 1234.5, 0.35 * min(orig_rate, new_rate))
    source = sines(orig_rate, orig_rate, frequencies_hz).requires_grad_(needs_gradient)
    resampled = audio.resample(source, orig_rate, new_rate).detach()
    expected = sines(new_rate, new_rate, frequencies_hz)
    assert resampled.shape == expected.shape
    assert resampled.dtype == torch.float32
    assert error_db(resampled, expected, edge=new_rate // 20) < -80
    # the bound is tight enough to see a shift of a hundredth of a sample
    late = sines(new_rate * 100, new_rate * 100, frequencies_hz)[:, 1::100]
    assert error_db(late, expected, edge=new_rate // 20) > -80


@pytest.mark.parametrize(("orig_rate", "new_rate"), [(48000, 16000), (16000, 48000), (44100, 24000)])
def test_resampling_agrees_with_scipy_and_torchaudio(orig_rate: int, new_rate: int) -> None:
    import torchaudio.functional

    source = sines(orig_rate, orig_rate // 2, (200.0, 900.0, 2700.0))
    resampled = audio.resample(source, orig_rate, new_rate)
    common = math.gcd(orig_rate, new_rate)
    window = scipy.signal.firwin(
        2 * 64 * 480 + 1, 1 / max(orig_rate, new_rate) * common, window=("kaiser", 9.0)
    )
    by_scipy = torch.from_numpy(
        scipy.signal.resample_poly(
            source.double().numpy(), new_rate // common, orig_rate // common, axis=1, window=window
        )
    )
    by_torchaudio = torchaudio.functional.resample(source, orig_rate, new_rate, lowpass_filter_width=64)
    edge = new_rate // 20
    assert error_db(resampled, by_scipy[:, : resampled.shape[1]], edge) < -60
    assert error_db(resampled, by_torchaudio[:, : resampled.shape[1]], edge) < -60


@pytest.mark.parametrize("needs_gradient", [False, True], ids=["soxr", "torchaudio"])
def test_resampling_removes_what_would_alias(needs_gradient: bool) -> None:
    too_high = sines(48000, 48000, (9000.0,)).requires_grad_(needs_gradient)
    left = audio.resample(too_high, 48000, 16000).detach()
    assert audio.rms_dbfs(left[:, 800:-800]) < -80


@settings(max_examples=60)
@given(
    num_channels=st.integers(1, 3),
    num_samples=st.integers(0, 4000),
    rates=st.tuples(*[st.sampled_from([8000, 11025, 16000, 22050, 24000, 44100, 48000, 96000])] * 2),
    needs_gradient=st.booleans(),
)
def test_resampled_length_is_the_ceiling(
    num_channels: int, num_samples: int, rates: tuple[int, int], needs_gradient: bool
) -> None:
    orig_rate, new_rate = rates
    source = torch.zeros(num_channels, num_samples, requires_grad=needs_gradient)
    resampled = audio.resample(source, orig_rate, new_rate)
    assert resampled.shape == (num_channels, math.ceil(num_samples * new_rate / orig_rate))


def test_resampling_to_the_same_rate_is_the_identity() -> None:
    source = noise(1, 2, 100)
    assert audio.resample(source, 16000, 16000) is source


def test_channels_are_resampled_apart() -> None:
    source = noise(2, 3, 2000)
    together = audio.resample(source, 16000, 24000)
    apart = torch.cat([audio.resample(channel[None], 16000, 24000) for channel in source])
    assert torch.allclose(together, apart, atol=1e-6)


def test_gradients_flow_through_resampling() -> None:
    source = noise(3, 1, 500).requires_grad_()
    audio.resample(source, 16000, 8000).square().sum().backward()
    assert source.grad is not None
    assert source.grad.abs().sum() > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_resampling_on_the_gpu_agrees_with_the_cpu() -> None:
    source = sines(48000, 48000, (200.0, 900.0, 2700.0))
    on_gpu = audio.resample(source.cuda(), 48000, 16000)
    assert on_gpu.is_cuda
    assert error_db(on_gpu.cpu(), audio.resample(source, 48000, 16000), edge=800) < -80


@pytest.mark.parametrize("rate", [0, -16000, 16000.5, math.nan, "16000", None])
def test_bad_rates_are_refused(rate: object) -> None:
    for rates in ((16000, rate), (rate, 16000)):
        with pytest.raises(ValueError, match="sample rate"):
            audio.resample(torch.zeros(1, 10), *rates)  # type: ignore[arg-type]


# Channels


def test_channels_go_to_mono_and_from_mono_to_any_number() -> None:
    source = noise(4, 6, 50)
    assert torch.allclose(audio.set_channels(source, 1), source.sum(0, keepdim=True) / 6, atol=1e-6)
    stereo = audio.set_channels(source[:1], 2)
    assert torch.equal(stereo[0], source[0])
    assert torch.equal(stereo[1], source[0])
    assert audio.set_channels(source, 6) is source
    assert torch.equal(audio.set_channels(source, 4), audio.set_channels(source, 1).repeat(4, 1))


@pytest.mark.parametrize(
    ("layout", "order"), [("5.1", 6), ("7.1", 8), ("3.0", 3), ("quad", 4), ("5.0", 5), ("6.1", 7)]
)
def test_surround_goes_to_stereo_as_ffmpeg_mixes_it(layout: str, order: int) -> None:
    """FFmpeg's rule is ITU-R BS.775 with gains that sum to 1 at most; a centre behind goes to both sides."""
    source = noise(4, order, 2000)
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(source.T.numpy()).reshape(1, -1), format="flt", layout=layout
    )
    frame.sample_rate = 48_000
    mixed = av.AudioResampler(format="fltp", layout="stereo", rate=48_000).resample(frame)[0].to_ndarray()
    ours = audio.set_channels(source, 2)
    gain = float((ours * torch.from_numpy(mixed)).sum() / torch.from_numpy(mixed).square().sum())
    torch.testing.assert_close(ours, gain * torch.from_numpy(mixed), atol=1e-4, rtol=0)
    assert float(ours.abs().max()) <= 1.0


# Loudness


@pytest.mark.parametrize(("amplitude", "expected_dbfs"), [(1.0, -3.0103), (0.1, -23.0103)])
def test_rms_and_peak_of_a_sine(amplitude: float, expected_dbfs: float) -> None:
    sine = amplitude / 0.8 * sines(48000, 48000, (1000.0,))
    assert audio.rms_dbfs(sine) == pytest.approx(expected_dbfs, abs=1e-3)
    assert audio.rms_dbfs(sine.repeat(2, 1)) == pytest.approx(expected_dbfs, abs=1e-3)
    assert audio.peak_dbfs(sine) == pytest.approx(expected_dbfs + 3.0103, abs=0.01)


def test_silence_has_no_level() -> None:
    for silence in (torch.zeros(1, 16000), torch.zeros(2, 10), torch.zeros(1, 0)):
        assert audio.rms_dbfs(silence) == audio.peak_dbfs(silence) == -math.inf
        assert audio.integrated_loudness_lufs(Waveform(silence, 16000)) == -math.inf


@pytest.mark.parametrize(("sample_rate", "tolerance"), [(16000, 0.05), (44100, 0.01), (48000, 0.001)])
def test_loudness_of_the_reference_tone(sample_rate: int, tolerance: float) -> None:
    """BS.1770-4: 997 Hz at 0 dBFS in one front channel reads -3.01 LKFS; in both, twice the power."""
    tone = sines(sample_rate, 5 * sample_rate, (997.0,)) / 0.8
    one = audio.integrated_loudness_lufs(Waveform(tone, sample_rate))
    both = audio.integrated_loudness_lufs(Waveform(tone.repeat(2, 1), sample_rate))
    quiet = audio.integrated_loudness_lufs(Waveform(0.1 * tone, sample_rate))
    assert one == pytest.approx(-3.01, abs=tolerance)
    assert both - one == pytest.approx(3.0103, abs=1e-3)
    assert quiet - one == pytest.approx(-20.0, abs=1e-3)


@pytest.mark.parametrize("num_channels", [1, 2, 5])
def test_loudness_agrees_with_torchaudio(num_channels: int) -> None:
    """The test signal is noise of changing level, faint enough that torchaudio does not clip it."""
    import torchaudio.functional

    envelope = torch.linspace(-60, -10, 6 * 48000)
    samples = noise(9, num_channels, 6 * 48000) * 10 ** (envelope / 20)
    loudness = audio.integrated_loudness_lufs(Waveform(samples, 48000))
    assert loudness == pytest.approx(float(torchaudio.functional.loudness(samples, 48000)), abs=0.15)


def test_loudness_gates_the_silence_away() -> None:
    """EBU Tech 3341: pauses do not lower the loudness of a programme, as they do its RMS."""
    tone = sines(48000, 10 * 48000, (997.0,))
    with_pause = torch.cat([tone, torch.zeros_like(tone)], dim=1)
    loud, paused = (audio.integrated_loudness_lufs(Waveform(x, 48000)) for x in (tone, with_pause))
    assert paused == pytest.approx(loud, abs=0.1)
    assert audio.rms_dbfs(with_pause) == pytest.approx(audio.rms_dbfs(tone) - 3.01, abs=0.01)


def test_loudness_ignores_what_is_below_the_absolute_gate() -> None:
    """A faint programme over a fainter floor: the floor, below -70 LUFS, does not count."""
    tone = sines(48000, 2 * 48000, (997.0,)) / 0.8
    faint, floor = 10 ** (-57 / 20) * tone, 10 ** (-73 / 20) * tone.repeat(1, 20)
    alone = audio.integrated_loudness_lufs(Waveform(faint, 48000))
    together = audio.integrated_loudness_lufs(Waveform(torch.cat([faint, floor], dim=1), 48000))
    assert alone == pytest.approx(-60.01, abs=0.01)
    assert together == pytest.approx(alone, abs=1.0)  # the blocks at the edge hold some floor


@pytest.mark.parametrize("duration_s", [0.05, 0.1, 0.399, 0.4, 0.401])
def test_loudness_of_a_short_clip_is_that_of_its_own_length(duration_s: float) -> None:
    tone = sines(48000, round(duration_s * 48000), (997.0,)) / 0.8
    assert audio.integrated_loudness_lufs(Waveform(tone, 48000)) == pytest.approx(-3.01, abs=0.1)


def test_loudness_of_many_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="5 channels"):
        audio.integrated_loudness_lufs(Waveform(torch.zeros(6, 48000), 48000))


@EXAMPLES
@given(
    seed=st.integers(0, 999),
    level=st.floats(-300, 0),
    target_dbfs=st.floats(-60, 0),
    peak_limit=st.floats(0.1, 1.0),
)
def test_normalizing_reaches_the_target_or_the_peak(
    seed: int, level: float, target_dbfs: float, peak_limit: float
) -> None:
    samples = noise(seed, 2, 300) * 10 ** (level / 20)
    normalized = audio.normalize_rms(samples, target_dbfs, peak_limit)
    assert normalized.dtype == samples.dtype
    assert float(normalized.abs().max()) <= np.float32(peak_limit)
    reached = audio.rms_dbfs(normalized) == pytest.approx(target_dbfs, abs=1e-3)
    limited = float(normalized.abs().max()) == pytest.approx(peak_limit, rel=1e-5)
    assert reached or (limited and audio.rms_dbfs(normalized) < target_dbfs)
    # one gain for all: the shape of the sound is the same
    shapes = [x.double() / x.double().norm() for x in (normalized, samples)]
    assert torch.allclose(*shapes, atol=1e-6)


def test_normalizing_leaves_silence_alone() -> None:
    assert torch.equal(audio.normalize_rms(torch.zeros(1, 100), -20.0), torch.zeros(1, 100))


def test_normalizing_the_faintest_sound_is_finite() -> None:
    faintest = torch.zeros(1, 100)
    faintest[0, 3] = 1.4e-45  # the smallest float32
    assert torch.isfinite(audio.normalize_rms(faintest, -20.0)).all()
