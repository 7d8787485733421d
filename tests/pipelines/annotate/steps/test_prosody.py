"""The step `prosody`: pitch against tones and voices whose pitch is known, syllables against counts by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.signal import lfilter

from audiollm.audio import save
from audiollm.audio.pitch import CENTRE_S, FRAME_S, track_pitch
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.prosody import Prosody, ProsodyConfig, count_syllables
from pipelines.annotate.synthesizers.espeak import Espeak
from pipelines.steps.step import Listener

RATE = 16000


def voice(
    base_hz: float, seconds: float = 3.0, snr_db: float = 40.0
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Pulses through three resonances, at a pitch that sweeps over some 7 semitones; and that pitch, [N]."""
    dice = np.random.default_rng(round(base_hz))
    times_N = np.arange(round(seconds * RATE)) / RATE
    pitch_N = base_hz * 2 ** ((2 * np.sin(4.4 * times_N) + 1.5 * np.sin(14.5 * times_N + 1)) / 12)
    sound_N = np.diff(np.floor(np.cumsum(pitch_N) / RATE), prepend=0)
    for pole in (0.95, 0.9):
        sound_N = lfilter([1], [1, -pole], sound_N)
    for formant_hz, width_hz in ((500, 80), (1500, 100), (2500, 140)):
        radius = np.exp(-np.pi * width_hz / RATE)
        sound_N = lfilter([1], [1, -2 * radius * np.cos(2 * np.pi * formant_hz / RATE), radius**2], sound_N)
    sound_N /= np.abs(sound_N).max()
    sound_N += dice.normal(0, np.sqrt((sound_N**2).mean() / 10 ** (snr_db / 10)), len(sound_N))
    return (0.5 * sound_N).astype(np.float32), pitch_N


def segment(
    folder: Path,
    samples_N: NDArray[np.float32],
    text: str | None = None,
    heard: str | None = None,
    rate: int = RATE,
) -> Segment:
    path = folder / "clip.wav"
    save(path, torch.from_numpy(samples_N)[None], rate)
    values = {"consensus": {"text": heard}} if heard is not None else {}
    seconds = len(samples_N) / rate
    return Segment(
        str(path), 0.0, seconds, "speech", None, RecordingMetadata(text), values, Listener(str(path))
    )


@pytest.mark.parametrize("snr_db", [40.0, 10.0])
@pytest.mark.parametrize("base_hz", [80, 120, 200, 300, 380])
def test_pitch_of_a_known_voice(base_hz: float, snr_db: float) -> None:
    """No gross error (20 %) in voiced frames, a median error below 1.5 %, and nearly all frames voiced."""
    samples_N, pitch_N = voice(base_hz, snr_db=snr_db)
    found_F, voiced_F = track_pitch(samples_N)
    places = ((np.arange(len(found_F)) * FRAME_S + CENTRE_S) * RATE).astype(int)
    error_F = np.abs(found_F / pitch_N[places] - 1)[voiced_F]
    assert voiced_F.mean() > 0.95
    assert (error_F > 0.2).mean() == 0.0
    assert np.median(error_F) < 0.015


@given(frequency_hz=st.floats(70, 480))
@settings(max_examples=25)
def test_pitch_of_a_tone_is_its_frequency(frequency_hz: float) -> None:
    tone_N = 0.3 * np.sin(2 * np.pi * frequency_hz * np.arange(RATE) / RATE)
    found_F, voiced_F = track_pitch(tone_N.astype(np.float32))
    assert voiced_F.all()
    assert found_F == pytest.approx(frequency_hz, rel=2e-3)


def test_noise_and_silence_have_no_voice() -> None:
    noise_N = np.random.default_rng(0).normal(0, 0.1, 3 * RATE).astype(np.float32)
    assert track_pitch(noise_N).voiced_F.mean() < 0.02
    assert not track_pitch(np.zeros(RATE, np.float32)).voiced_F.any()
    assert len(track_pitch(np.zeros(100, np.float32)).voiced_F) == 0


def test_pitch_agrees_with_pyin_on_a_synthetic_speaker() -> None:
    """espeak's voice, against librosa's pyin: the same pitch where both hear a voice."""
    librosa = pytest.importorskip("librosa")
    with Espeak() as synthesizer:
        spoken_N = synthesizer.speak(
            "The sun was shining on the warm morning, and we were all alone.", "en-us+f3"
        )
    samples_N = librosa.resample(spoken_N, orig_sr=22050, target_sr=RATE)
    found_F, voiced_F = track_pitch(samples_N)
    theirs_F, their_voiced_F, _ = librosa.pyin(
        samples_N, fmin=60, fmax=500, sr=RATE, frame_length=1024, hop_length=160
    )
    places = np.minimum(np.arange(len(found_F)) + round(CENTRE_S / FRAME_S), len(theirs_F) - 1)
    both_F = voiced_F & their_voiced_F[places]
    assert both_F.sum() > 100
    assert (np.abs(found_F / theirs_F[places] - 1)[both_F] > 0.2).mean() < 0.02


@pytest.mark.parametrize(
    ("text", "language", "syllables"),
    [
        ("The quick brown fox jumps over the lazy dog.", None, 11),
        ("23 apples", None, 5),  # twen-ty three ap-ples
        ("I don't know, it's 7", "en", 6),
        ("你好世界", "zh", 4),
        ("東京タワー", "ja", 5),  # signs: its reading has eight morae
        ("きょう", "ja", 2),
        ("안녕하세요", "ko", 5),
        ("Привет, как дела?", "ru", 5),
        ("guten Morgen", "de", 4),
        ("la maison", "fr", 3),
        ("zzyzzyk blorple", "en", 4),  # in no dictionary
        ("  ...  ", None, 0),
    ],
)
def test_syllables_as_counted_by_hand(text: str, language: str | None, syllables: int) -> None:
    assert count_syllables(text, language) == syllables


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_any_text_can_be_counted(text: str) -> None:
    assert count_syllables(text) >= 0


def test_rate_and_pauses(tmp_path: Path) -> None:
    """Two seconds of voice, one of silence, one of voice: 12 syllables over 3 s, one pause of 1 s."""
    sound_N, _ = voice(150, 3.0)
    samples_N = np.concatenate([sound_N[: 2 * RATE], np.zeros(RATE, np.float32), sound_N[2 * RATE :]])
    value = Prosody(ProsodyConfig()).process(segment(tmp_path, samples_N, heard="one two three four " * 3))
    assert value["syllables"] == 12
    assert value["rate_syllables_s"] == pytest.approx(4.0, rel=0.05)
    assert (value["pauses"], value["pause_s"]) == (1, pytest.approx(1.0, abs=0.05))


def test_what_is_given_is_counted_before_what_is_heard(tmp_path: Path) -> None:
    clip = segment(tmp_path, voice(150)[0], text="one two", heard="one two three")
    assert Prosody(ProsodyConfig()).process(clip)["syllables"] == 2


def test_energy_is_the_level_while_there_is_sound(tmp_path: Path) -> None:
    """A tone of amplitude 0.1 (-23.01 dB of full scale) during half of the time; half of it louder by 6.02 dB."""
    tone_N = 0.1 * np.sin(2 * np.pi * 200 * np.arange(2 * RATE) / RATE)
    half_N = np.concatenate([tone_N, np.zeros(2 * RATE)]).astype(np.float32)
    step = Prosody(ProsodyConfig())
    assert step.process(segment(tmp_path, half_N))["energy_db"] == pytest.approx(-23.0, abs=0.1)
    steps_N = (tone_N * np.repeat([1.0, 2.0], RATE)).astype(np.float32)
    assert step.process(segment(tmp_path, steps_N))["energy_deviation_db"] == pytest.approx(3.0, abs=0.1)


def test_deviation_is_in_semitones(tmp_path: Path) -> None:
    """Half of the time at 150 Hz, half of it an octave higher: 16 and 84 % are 12 semitones apart."""
    phase_N = np.cumsum(np.repeat([150.0, 300.0], 2 * RATE)) / RATE
    value = Prosody(ProsodyConfig()).process(
        segment(tmp_path, (0.3 * np.sin(2 * np.pi * phase_N)).astype(np.float32))
    )
    assert value["pitch_deviation_semitones"] == pytest.approx(6.0, abs=0.1)
    assert value["pitch_range_semitones"] == pytest.approx(12.0, abs=0.1)


def test_the_value_is_json_whatever_the_sound(tmp_path: Path) -> None:
    step = Prosody(ProsodyConfig())
    assert step.missing() is None
    for samples_N in (np.zeros(RATE, np.float32), np.zeros(10, np.float32), voice(200)[0]):
        value = step.process(segment(tmp_path, samples_N))
        assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert value["pitch_hz"] == pytest.approx(200, rel=0.1)
