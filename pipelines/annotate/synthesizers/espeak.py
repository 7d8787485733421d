"""espeak-ng: six English voices that come with the package, for runs without recordings and without a download.

The library and its data come with the package espeakng-loader and are driven through ctypes.

Shapes: N samples.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.annotate.synthesizers.synthesizer import SynthesizedSpeech, Synthesizer, pick_named_voices

SAMPLE_RATE = 22050
_AUDIO_OUTPUT_SYNCHRONOUS, _POS_CHARACTER, _CHARS_UTF8 = 2, 1, 1
_RATE, _PITCH, _RANGE = 1, 3, 4


class SyntheticVoice(NamedTuple):
    """A speaker: espeak-ng's name of it (accent+variant), its ways of speaking, and the size of its vocal tract."""

    name: str
    espeak: str
    pitch: int
    """Pitch setting of espeak-ng, before `formants` shifts it."""
    rate: int
    """Words per minute, as heard."""
    formants: float = 1.0
    """Factor of all frequencies: at 1.15 the vocal tract is 13 % shorter, as a woman's beside a man's."""
    mellowness: float = 0.0
    """Pole of a low pass, for a softer voice: 0.5 takes 5 dB at 4 kHz and 9 dB at 8 kHz."""


VOICES = (
    SyntheticVoice("anna", "en-us+f3", 58, 150),
    SyntheticVoice("bruno", "en-us+m3", 60, 145),
    SyntheticVoice("clara", "en-us+adam", 95, 155, formants=1.15),
    SyntheticVoice("duncan", "en-gb-scotland+m7", 45, 140),
    SyntheticVoice("edith", "en-us+f2", 52, 150, mellowness=0.5),
    SyntheticVoice("frank", "en-us+Denis", 70, 150),
)


class Espeak:
    """espeak-ng in this process, in a state of its own: what it says depends only on what it said before.

    The library keeps its state in static variables, so each instance loads a copy of it. Use it in a `with`.

    Raises:
        OSError: the library or its data cannot be loaded.
    """

    def __init__(self) -> None:
        import espeakng_loader

        self._folder = tempfile.TemporaryDirectory(prefix="audiollm-espeak-")
        source = Path(espeakng_loader.get_library_path())
        copy = Path(self._folder.name) / source.name
        shutil.copyfile(source, copy)
        self._library = ctypes.CDLL(str(copy))
        self._blocks: list[NDArray[np.int16]] = []
        callback_type = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = callback_type(self._take_block)
        data = espeakng_loader.get_data_path().encode()
        if self._library.espeak_Initialize(_AUDIO_OUTPUT_SYNCHRONOUS, 0, data, 0) != SAMPLE_RATE:
            raise OSError(f"espeak-ng does not start with its data at {data.decode()}")
        self._library.espeak_SetSynthCallback(self._callback)

    def __enter__(self) -> Espeak:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.espeak_Terminate()
        self._folder.cleanup()

    def speak(
        self, text: str, voice: str, rate: int = 160, pitch: int = 50, intonation: int = 50
    ) -> NDArray[np.float32]:
        """Say `text`.

        Args:
            voice: espeak-ng's name, as in `en-us+f3`.
            rate: words a minute, from 80.
            pitch, intonation: 0 to 100.

        Returns:
            [N] in [-1, 1] at 22,050 Hz.

        Raises:
            ValueError: no such voice.
        """
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice!r}")
        for parameter, value in ((_RATE, rate), (_PITCH, pitch), (_RANGE, intonation)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))  # breathy voices: else seeded by the clock
        self._blocks.clear()
        content = text.encode()
        self._library.espeak_Synth(content, len(content) + 1, 0, _POS_CHARACTER, 0, _CHARS_UTF8, None, None)
        self._library.espeak_Synchronize()
        samples_N = np.concatenate([np.zeros(0, np.int16), *self._blocks])
        return (samples_N / np.float32(32768.0)).astype(np.float32)

    def _take_block(self, samples: Any, length: int, events: Any) -> int:
        if samples and length > 0:
            self._blocks.append(np.ctypeslib.as_array(samples, (length,)).copy())
        return 0


def perform(
    espeak: Espeak, voice: SyntheticVoice, text: str, random: np.random.Generator, rate_factor: float = 1.0
) -> NDArray[np.float32]:
    """Speak a text with a rate, pitch, intonation, level and faint noise that are drawn; returns `[N]`."""
    import soxr
    from scipy.signal import lfilter

    rate = voice.rate + int(random.integers(-15, 16))
    samples_N = espeak.speak(
        text,
        voice.espeak,
        rate=round(
            rate * rate_factor / voice.formants
        ),  # the resampling below makes it faster by the same factor
        pitch=voice.pitch + int(random.integers(-5, 6)),
        intonation=50 + int(random.integers(-20, 21)),
    )
    if voice.formants != 1.0:
        samples_N = soxr.resample(samples_N, voice.formants, 1.0)
    samples_N = lfilter([1 - voice.mellowness], [1, -voice.mellowness], samples_N)
    peak = 10 ** (random.uniform(-8.0, -3.0) / 20)
    samples_N = samples_N * (peak / max(float(np.abs(samples_N).max(initial=0.0)), 1e-3))
    noise_N = random.normal(0.0, 10 ** (random.uniform(-70.0, -62.0) / 20), len(samples_N))
    result: NDArray[np.float32] = (samples_N + noise_N).clip(-1.0, 1.0).astype(np.float32)
    return result


class EspeakSynthesizer(Synthesizer):
    """The voices of `VOICES`. Every clip has an instance of the library of its own: it depends on no clip before it."""

    language = "en"
    characters_per_cpu_s = 5000.0

    def missing(self) -> str | None:
        return None

    def pick_voices(self, voices: int | Sequence[str] | None, seed: int) -> list[str]:
        return pick_named_voices(voices, [voice.name for voice in VOICES], "espeak")

    def fingerprint(self) -> str:
        import espeakng_loader

        return f"espeak {Path(espeakng_loader.get_library_path()).stat().st_size}"

    def speak(self, text: str, voice: str, *, rate: float, seed: int) -> SynthesizedSpeech:
        settings = next(candidate for candidate in VOICES if candidate.name == voice)
        with Espeak() as espeak:
            samples_N = perform(espeak, settings, text, np.random.default_rng(seed), rate)
        return SynthesizedSpeech(samples_N, SAMPLE_RATE)
