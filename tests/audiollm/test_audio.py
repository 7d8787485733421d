"""audiollm.audio on tensors: resampling, channels, loudness, saving, finding files.

Oracles: closed forms (sines, full-scale grids), scipy, torchaudio,
soundfile. Reading files is in test_audio_formats.
"""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.signal
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from audiollm import audio
from audiollm.audio import AudioError, Waveform

EXAMPLES = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PCM_ENCODINGS = [
    (".wav", "PCM_U8", 8),
    (".wav", "PCM_16", 16),
    (".wav", "PCM_24", 24),
    (".wav", "PCM_32", 32),
    (".flac", "PCM_16", 16),
    (".flac", "PCM_24", 24),
]


def sines(sample_rate: int, num_samples: int, frequencies_hz: tuple[float, ...]) -> Tensor:
    """Equal sines that add up to at most 0.8, [1, N]: band-limited, and known at every instant."""
    time_s = np.arange(num_samples) / sample_rate
    total = sum(np.sin(2 * np.pi * hz * time_s + index) for index, hz in enumerate(frequencies_hz))
    return torch.from_numpy((0.8 / len(frequencies_hz) * total).astype(np.float32))[None]


def noise(seed: int, num_channels: int, num_samples: int) -> Tensor:
    """Uniform in [-1, 1], [C, N]."""
    return torch.rand(num_channels, num_samples, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def error_db(actual_CN: Tensor, expected_CN: Tensor, edge: int) -> float:
    """Largest error, away from both edges, in dB re the largest expected sample."""
    inner = slice(edge, -edge)
    error = (actual_CN[:, inner].double() - expected_CN[:, inner].double()).abs().max()
    return 20 * math.log10(max(float(error / expected_CN.abs().max()), 1e-12))


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


@settings(max_examples=60, deadline=None)
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


def test_channels_go_to_mono_and_from_mono_only() -> None:
    source = noise(4, 6, 50)
    assert torch.allclose(audio.set_channels(source, 1), source.sum(0, keepdim=True) / 6, atol=1e-6)
    stereo = audio.set_channels(source[:1], 2)
    assert torch.equal(stereo[0], source[0])
    assert torch.equal(stereo[1], source[0])
    assert audio.set_channels(source, 6) is source
    for num_channels in (2, 0):
        with pytest.raises(ValueError, match="channels"):
            audio.set_channels(source, num_channels)


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
    """On noise of changing level, faint enough that torchaudio does not clip it."""
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


# Saving


@pytest.mark.parametrize(("extension", "subtype", "bits"), PCM_ENCODINGS)
@EXAMPLES
@given(seed=st.integers(0, 999), num_channels=st.integers(1, 8), num_samples=st.integers(1, 3000))
def test_round_trip_within_quantization(
    tmp_path: Path, extension: str, subtype: str, bits: int, seed: int, num_channels: int, num_samples: int
) -> None:
    path, again = tmp_path / f"a{extension}", tmp_path / f"b{extension}"
    samples = noise(seed, num_channels, num_samples)
    audio.save(path, samples, 24000, subtype)
    loaded = audio.load(path)
    step = 2.0 ** (1 - bits)
    assert loaded.sample_rate == 24000
    assert loaded.samples_CN.shape == samples.shape
    near_the_top = samples > 1 - step  # +1.0 itself is not on a two's complement grid
    bound = torch.where(near_the_top, step, step / 2).double() + 2**-25  # float32's own rounding
    assert ((loaded.samples_CN.double() - samples.double()).abs() <= bound).all()
    audio.save(again, loaded.samples_CN, 24000, subtype)
    assert torch.equal(audio.load(again).samples_CN, loaded.samples_CN)


def test_every_16_bit_level_survives(tmp_path: Path) -> None:
    levels = np.arange(-(2**15), 2**15, dtype=np.int16)
    soundfile.write(tmp_path / "in.wav", levels, 16000, subtype="PCM_16")
    audio.save(tmp_path / "out.wav", audio.load(tmp_path / "in.wav").samples_CN, 16000)
    saved, _ = soundfile.read(tmp_path / "out.wav", dtype="int16")
    assert np.array_equal(saved, levels)


def test_float_wav_is_exact(tmp_path: Path) -> None:
    samples = noise(5, 2, 1000)
    audio.save(tmp_path / "a.wav", samples, 44100, subtype="FLOAT")
    assert torch.equal(audio.load(tmp_path / "a.wav").samples_CN, samples)


def test_saving_clips_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "x" / "y" / "a.wav"
    audio.save(path, torch.tensor([[2.0, -3.0, 0.5]], dtype=torch.float64), 16000)
    assert audio.load(path).samples_CN.tolist() == [[1 - 2**-15, -1.0, 0.5]]


@pytest.mark.parametrize("extension", [".ogg", ".mp3"])
def test_lossy_round_trip_keeps_length_and_place(tmp_path: Path, extension: str) -> None:
    samples = sines(44100, 44100, (440.0, 1330.0)).repeat(2, 1)
    audio.save(tmp_path / f"a{extension}", samples, 44100)
    loaded = audio.load(tmp_path / f"a{extension}")
    assert loaded.samples_CN.shape == samples.shape
    assert error_db(loaded.samples_CN, samples, edge=4410) < -20


def test_a_long_ogg_can_be_written(tmp_path: Path) -> None:
    """libsndfile's Vorbis encoder crashes the process when it gets this in one piece."""
    samples = noise(6, 2, 60 * 44100)
    audio.save(tmp_path / "a.ogg", samples, 44100)
    assert audio.load(tmp_path / "a.ogg").num_samples == samples.shape[1]


@pytest.mark.parametrize(
    ("name", "samples", "sample_rate", "subtype", "reason"),
    [
        ("a.wav", torch.tensor([[0.0, math.nan]]), 16000, None, "NaN"),
        ("a.wav", torch.tensor([[0.0, -math.inf]]), 16000, None, "infinity"),
        ("a.wav", torch.zeros(1, 0), 16000, None, "expected"),
        ("a.wav", torch.zeros(100), 16000, None, "expected"),
        ("a.xyz", torch.zeros(1, 10), 16000, None, "xyz"),
        ("a", torch.zeros(1, 10), 16000, None, "format"),
        ("", torch.zeros(1, 10), 16000, None, "format"),
        ("a.wav", torch.zeros(1, 10), 16000, "VORBIS", "VORBIS"),
        ("a.wav", torch.zeros(1, 10), 0, None, "0 Hz"),
        ("a.flac", torch.zeros(9, 10), 16000, None, "9 channels"),
        ("a.mp3", torch.zeros(1, 10), 192000, None, "192000 Hz"),
        ("file/a.wav", torch.zeros(1, 10), 16000, None, "folder"),
        ("folder.wav", torch.zeros(1, 10), 16000, None, "written"),
        ("nul\0.wav", torch.zeros(1, 10), 16000, None, "written"),
    ],
)
def test_what_cannot_be_saved_is_an_audio_error(
    tmp_path: Path, name: str, samples: Tensor, sample_rate: int, subtype: str | None, reason: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.wav").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(AudioError, match=reason) as caught:
        audio.save(tmp_path / name, samples, sample_rate, subtype)
    assert caught.value.path == tmp_path / name
    assert sorted(tmp_path.rglob("*")) == before  # nothing half written is left


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException | type[BaseException]
) -> None:
    path = tmp_path / "a.wav"
    audio.save(path, noise(7, 1, 100), 16000)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(soundfile.SoundFile, "write", fail)
    with pytest.raises((KeyboardInterrupt, AudioError)):
        audio.save(path, noise(8, 1, 100), 16000)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
def test_bytes_are_the_content_of_the_file(kind: str) -> None:
    samples = sines(16000, 16000, (440.0,))
    data = audio.encode_bytes(samples, 16000, kind)
    loaded = audio.load_bytes(data)
    assert loaded.sample_rate == 16000
    assert loaded.samples_CN.shape == samples.shape
    assert error_db(loaded.samples_CN, samples, edge=1600) < (-80 if kind in ("wav", "flac") else -20)
    part = audio.load_bytes(data, start_s=0.25, end_s=0.5, sample_rate=8000)
    assert part.samples_CN.shape == (1, 2000)


def test_bad_bytes_are_named() -> None:
    for data in (b"", b"RIFF", b"not audio at all" * 100):
        with pytest.raises(AudioError, match=r"shard-3\.tar/7\.wav"):
            audio.load_bytes(data, name="shard-3.tar/7.wav")
    with pytest.raises(AudioError, match="xyz"):
        audio.encode_bytes(torch.zeros(1, 10), 16000, "xyz")


# Finding


def test_audio_is_known_by_header_or_extension(tmp_path: Path) -> None:
    samples = sines(16000, 4000, (440.0,))
    for extension in (".wav", ".flac", ".ogg", ".mp3"):
        disguised = tmp_path / f"from{extension[1:]}.txt"
        disguised.write_bytes(audio.encode_bytes(samples, 16000, extension[1:]))
        assert audio.looks_like_audio(disguised), extension
    for kind in ("AIFF", "AU", "W64", "CAF", "RF64", "NIST"):
        disguised = tmp_path / f"from-{kind}"
        soundfile.write(disguised, samples[0].numpy(), 16000, format=kind, subtype="PCM_16")
        assert audio.looks_like_audio(disguised), kind
    for name in ("a.WAV", "b.m4a", "c.Opus", "d.sph", "e.raw", "f.pcm", "not-there.wav"):
        assert audio.looks_like_audio(tmp_path / name), name


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"plain text",
        "text in UTF-16".encode("utf-16"),
        b"\xff\xd8\xff\xe0\x00\x10JFIF",
        b"\x89PNG\r\n\x1a\n" + bytes(60),
        b"RIFF\x24\x00\x00\x00AVI LIST",
        b"RIFF\x24\x00\x00\x00WEBPVP8 ",
        b"\x00\x00\x00\x18ftypmif1",
        b"\xff" * 64,
        bytes(64),
    ],
)
def test_other_files_are_not_audio(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    assert not audio.looks_like_audio(tmp_path / "a.bin")


def test_looking_never_raises(tmp_path: Path) -> None:
    (tmp_path / "folder.wav").mkdir()
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    for name in ("folder.wav", "pipe", "missing", "nul\0", "x" * 5000):
        assert not audio.looks_like_audio(tmp_path / name)


def test_find_audio_sorts_and_sets_apart(tmp_path: Path) -> None:
    folder, outside = tmp_path / "in", tmp_path / "out"
    for name in ("b.wav", "a/2.mp3", "a/10.mp3", "a.txt", "a/notes.md", "c.raw", ".hidden.wav", ".git/x.wav"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    outside.mkdir()
    (outside / "secret.wav").write_bytes(b"x")
    (folder / "link-out.wav").symlink_to(outside / "secret.wav")
    (folder / "link-in.wav").symlink_to(folder / "b.wav")
    (folder / "link-broken.wav").symlink_to(folder / "gone.wav")
    (folder / "link-folder").symlink_to(outside)
    (folder / "link-loop").symlink_to(folder)
    found, others = audio.find_audio(folder)
    assert [str(path.relative_to(folder)) for path in found] == [
        "a/10.mp3",
        "a/2.mp3",
        "b.wav",
        "c.raw",
        "link-in.wav",
    ]
    assert [str(path.relative_to(folder)) for path in others] == [
        "a/notes.md",
        "a.txt",
        "link-broken.wav",
        "link-folder",
        "link-loop",
        "link-out.wav",
    ]
    assert audio.find_audio(str(folder)) == (found, others)


def test_find_audio_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("missing", "file"):
        with pytest.raises(AudioError, match="cannot be listed") as caught:
            audio.find_audio(tmp_path / name)
        assert str(caught.value.path) == str(tmp_path / name)
