"""Every encoder and sample format of the installed FFmpeg, with 1 to 16 channels: what is read is what was written."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from audiollm.audio import decoders as audio_decoders
from audiollm.audio import files as audio
from tests.audiollm.audio.every_encoder import (
    TYPES,
    as_format,
    encoders,
    frame_of,
    layouts,
    pitch_hz,
    tones,
    write,
    written,
)

CHANNELS = range(1, 17)
FORMATS_OF = {
    name: [form for other, form in encoders() if other == name]
    for name, _ in encoders()
    if name != "anull"  # takes every format, and writes nothing that a container holds
}
LOSSLESS = ("pcm_", "flac", "alac", "tta", "wavpack")
NOT_LOSSLESS = ("pcm_alaw", "pcm_mulaw", "pcm_vidc")
NOT_THE_SIGNAL = {
    "comfortnoise": "is noise by design",
    "aptx_hd": "has no header in a raw stream",
    "sbc": "is found in a raw stream by its extension alone",
    "dfpwm": "holds one bit for each sample, and no header",
    "pcm_dvd": "is read from MPEG program streams alone, in which its header is lost",
}
SPEECH = ("libopencore_amrnb", "g723_1", "real_144", "g726", "g726le", "nellymoser", "aptx")
"""Some of them are for speech in one band; all are in containers that may name another rate."""
SWAPPED = ("libopus",)
"""The encoder itself moves channels of 5 and 7."""


def error_of_depth(name: str, form: str) -> float:
    """Half a step of what the codec keeps of the format, and that of the float32 that is read."""
    bits = next((bits for bits in (8, 16, 24, 32, 64) if f"{bits}" in name), None)
    kept = min(bits or 64, 8 * np.dtype(TYPES[form.removesuffix("p")]).itemsize)
    return 2.0 ** (1 - min(kept, 24))


@pytest.mark.parametrize("name", FORMATS_OF)
def test_what_an_encoder_writes_is_read(tmp_path: Path, name: str) -> None:
    files = 0
    for form in FORMATS_OF[name]:
        for channels in CHANNELS:
            for path, rate, count, layout in written(tmp_path, name, form, channels):
                files += 1
                check(path, name, form, rate, count, layout)
                path.unlink()
    if not files:
        pytest.skip("no container takes what it encodes")


def check(path: Path, name: str, form: str, rate: int, count: int, layout: str) -> None:
    channels = av.AudioLayout(layout).nb_channels
    if name in NOT_THE_SIGNAL:
        try:
            audio.load(path)
        except audio.AudioError as error:
            assert "crashes" not in error.reason
        return
    loaded = audio.load(path)
    samples_CN, expected_CN = loaded.samples_CN.numpy(), tones(layout, rate)[:, :count]
    if name in SPEECH:
        assert samples_CN.any()
        return
    where = f"{path.name} {layout} {rate}"
    assert (loaded.num_channels, loaded.sample_rate) == (channels, rate), where
    if name.startswith(LOSSLESS) and name not in NOT_LOSSLESS:
        assert loaded.num_samples == count, where
        assert np.abs(samples_CN - expected_CN).max() <= error_of_depth(name, form), where
        return
    assert abs(loaded.num_samples - count) <= 4096, where
    if not (name in SWAPPED and channels in (5, 7)):
        strongest = [
            int(np.argmax([strength(row_N, hz, rate) for hz in pitch_hz(layout)])) for row_N in samples_CN
        ]
        assert strongest == list(range(channels)), where


def strength(row_N: np.ndarray, hz: float, rate: int) -> float:
    middle_N = row_N[len(row_N) // 4 :]
    return float(abs((middle_N * np.exp(-2j * np.pi * hz * np.arange(len(middle_N)) / rate)).mean()))


@pytest.mark.parametrize("form", [form + planar for form in TYPES for planar in ("", "p")])
@pytest.mark.parametrize("channels", CHANNELS)
def test_a_frame_of_every_sample_format(form: str, channels: int) -> None:
    for layout in layouts(channels):
        levels_CN = as_format(tones(layout, 48000)[:, :1000], form)
        samples_CN = audio_decoders.frame_samples(frame_of(levels_CN, form, layout, 48000, 0))
        assert samples_CN.dtype == np.float32
        assert np.abs(samples_CN - tones(layout, 48000)[:, :1000]).max() <= error_of_depth("", form)


def test_eight_channels_of_an_m4a(tmp_path: Path) -> None:
    """PyAV says that such a frame has nine planes."""
    write(tmp_path / "a.m4a", "ipod", "aac", "fltp", "7.1", 48000)
    assert audio.load(tmp_path / "a.m4a").num_channels == 8
    assert audio.probe(tmp_path / "a.m4a").num_channels == 8
    assert audio.load(tmp_path / "a.m4a", mono=True, sample_rate=16000).num_channels == 1
