"""The corpus of `learn_cloning.py`: spoken digits in real, in shifted and in synthetic voices.

Of every real speaker there is a group of voices: his own recordings, and many more made of them, each with pitch and
formants shifted by the WORLD vocoder, another colour and another noise, and heard in one utterance only, to be taken
from its reference (long trainings memorize even these: `history/voices.md`). Leaving a speaker out leaves his whole
group out. A last group is made of voices of espeak-ng in the same way. Takes 0 to 4 of a real speaker make his test
utterances, the others those of training.

A reference is words, each with a recording of it, and an utterance is some of these again, word by word: so what is to
be learned is to look words up. Of a real speaker a reference has all ten digits, of a made voice fewer, mostly: among
few it is learned sooner. All words begin on the grid of the tokenizer's frames.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from audiollm.audio import AudioError, find_audio, load, normalize_rms, resample, save, to_mono
from audiollm.codec import FRAME_RATE
from audiollm.files.atomic import write_jsonl
from pipelines.annotate.synthesizers.espeak import Espeak

SAMPLE_RATE = 16_000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = 3
"""Words of an utterance of a real speaker."""
WORDS_SAID = 2
"""Largest ratio of spoken words to reference words for a made voice; a reference has n words with a chance of 1 / n."""
TEST_TAKES = 5
OTHER_SPEECH = ("read_speech_en", "librispeech_speakers", "ljspeech_32", "speech_zh", "speech_other_lang")
GAP_S = 0.06
FRAME = SAMPLE_RATE // FRAME_RATE
"""Samples per code frame at this benchmark's sample rate."""
LEVEL_DBFS = -23.0
PITCH, FORMANTS = (0.65, 1.6), (0.84, 1.2)
"""Ranges of the pitch and formant factors of made voices."""
TILT_DB, NOISE_DBFS = (-9.0, 9.0), (-75.0, -45.0)
"""Ranges for a made voice: tilt from the lowest to the highest frequency, and level of noise of the same colour."""
SYNTHETIC = tuple(
    (f"{accent}+{variant}", pitch)
    for variant, pitch in itertools.product(("m1", "m3", "m5", "m7", "f1", "f2", "f4"), (25, 50, 75))
    for accent in (("en-us", "en-gb-scotland") if pitch == 50 else ("en-us",))
)
"""Voices of espeak-ng, and their pitch of 0 to 100."""
REAL_UTTERANCES, TEST_UTTERANCES = 60, 30
"""Training and test utterances per speaker; a made voice has one."""
MADE_VOICES, SYNTHETIC_VOICES = 700, 28
"""Made voices per real speaker, and per voice of espeak-ng."""
DELIVERIES = 5
"""Recordings of each word by a voice of espeak-ng, at various rates and pitches."""

Sound = NDArray[np.float32]
Matrix = NDArray[np.float64]


class Manner(NamedTuple):
    """Changes by which a made voice differs from its original."""

    pitch: float
    formants: float
    tilt_db: float
    noise_dbfs: float

    @classmethod
    def draw(cls, random: np.random.Generator) -> Manner:
        pitch = float(np.exp(random.uniform(*np.log(PITCH))))
        return cls(pitch, *(float(random.uniform(*bounds)) for bounds in (FORMANTS, TILT_DB, NOISE_DBFS)))


class Take:
    """A spoken word; taken apart by the WORLD vocoder once, and put together in many manners."""

    def __init__(self, word: str, number: int, samples_N: Sound) -> None:
        self.word, self.number, self.samples_N = word, number, samples_N

    def synthesize(self, manner: Manner, random: np.random.Generator) -> Sound:
        """The same word in another voice: pitch and the frequencies of the spectral envelope times a factor each."""
        import pyworld

        pitch_F, envelope_FB, noise_FB = self._parts
        warped_FB = np.exp(_stretched(envelope_FB, manner.formants))
        noise_FB = _stretched(noise_FB, manner.formants)
        made_N = pyworld.synthesize(pitch_F * manner.pitch, warped_FB, noise_FB, SAMPLE_RATE)
        made_N += random.normal(0.0, 10 ** (manner.noise_dbfs / 20), len(made_N))
        spectrum_K = np.fft.rfft(made_N)
        gain_db_K = np.linspace(-0.5, 0.5, len(spectrum_K)) * manner.tilt_db
        return np.fft.irfft(spectrum_K * 10 ** (gain_db_K / 20), len(made_N)).astype(np.float32)

    @cached_property
    def _parts(self) -> tuple[Matrix, Matrix, Matrix]:
        """Pitch in Hz [frames], and [frames, bins] the logarithm of the spectral envelope and the share of noise."""
        import pyworld

        wave_N = self.samples_N.astype(np.float64)
        pitch_F, time_F = pyworld.dio(wave_N, SAMPLE_RATE)
        pitch_F = pyworld.stonemask(wave_N, pitch_F, time_F, SAMPLE_RATE)
        envelope_FB = pyworld.cheaptrick(wave_N, pitch_F, time_F, SAMPLE_RATE)
        # without its vote on what is voiced, which telephone speech fails
        noise_FB = pyworld.d4c(wave_N, pitch_F, time_F, SAMPLE_RATE, threshold=0.0)
        return pitch_F, np.log(envelope_FB + 1e-12), noise_FB


def speakers(recordings: Path) -> dict[str, list[Path]]:
    """Everybody's takes, by name, in a fixed order."""
    takes: dict[str, list[Path]] = {}
    for path in sorted(recordings.glob("*_*_*.wav")):
        takes.setdefault(path.stem.split("_")[1], []).append(path)
    return takes


def write_group(folder: Path, name: str, recordings: Sequence[Path]) -> None:
    """The group of a real speaker: `segments.jsonl` and the recordings that it names; what is there is kept."""
    if (folder / "segments.jsonl").exists():
        return
    takes = [_read_take(path) for path in recordings]
    train = [take for take in takes if take.number >= TEST_TAKES]
    test = [take for take in takes if take.number < TEST_TAKES]
    random = np.random.default_rng([0, *name.encode()])
    rows = []
    for split, pool, count in (("train", train, REAL_UTTERANCES), ("test", test, TEST_UTTERANCES)):
        by_word = _by_word(pool)
        for number in range(count):
            take_by_word = {
                word: _draw_take(by_word[word], random) for word in random.permutation(WORDS).tolist()
            }
            sounds = {word: _fitted(take.samples_N) for word, take in take_by_word.items()}
            words = random.choice(WORDS, DIGITS).tolist()
            rows.append(_write(folder, f"{name}_{split}{number}", name, sounds, words) | {"split": split})
    rows += _write_made(folder, name, train, MADE_VOICES, random)
    write_jsonl(folder / "segments.jsonl", rows)


def write_synthetic(folder: Path) -> None:
    """The group of the synthetic voices, in the same form."""
    if (folder / "segments.jsonl").exists():
        return
    rows = []
    for place, (espeak, pitch) in enumerate(SYNTHETIC):
        random = np.random.default_rng([1, place])
        with Espeak() as synthesizer:
            takes = [
                Take(word, number, _speak_word(synthesizer, word, espeak, pitch, random))
                for word in WORDS
                for number in range(DELIVERIES)
            ]
        rows += _write_made(folder, f"{espeak}-{pitch}", takes, SYNTHETIC_VOICES, random)
    write_jsonl(folder / "segments.jsonl", rows)


def write_speech(data: Path, folder: Path, bar: Progress) -> None:
    """Speech of other people for the tokenizer, each recording also as over a telephone (8 kHz)."""
    files = [path for name in OTHER_SPEECH if (data / name).is_dir() for path in find_audio(data / name)[0]]
    task = bar.add_task("other speech", total=len(files))
    for path in files:
        name = "-".join(path.relative_to(data).with_suffix("").parts)
        try:
            if not (folder / f"{name}-8k.wav").exists():
                wave = load(path)
                wide_1N = resample(to_mono(wave.samples_CN), wave.sample_rate, SAMPLE_RATE)
                narrow_1N = resample(resample(wide_1N, SAMPLE_RATE, 8_000), 8_000, SAMPLE_RATE)
                save(folder / f"{name}.wav", wide_1N, SAMPLE_RATE)
                save(folder / f"{name}-8k.wav", narrow_1N, SAMPLE_RATE)
        except AudioError as error:
            bar.console.print(f"left out: {error}")
        bar.advance(task)


# Private


def _read_take(path: Path) -> Take:
    """A take of the spoken digit dataset: `digit_speaker_number.wav`."""
    digit, _, number = path.stem.split("_")
    return Take(WORDS[int(digit)], int(number), load(path, sample_rate=SAMPLE_RATE).samples_CN[0].numpy())


def _by_word(takes: Sequence[Take]) -> dict[str, list[Take]]:
    return {word: [take for take in takes if take.word == word] for word in WORDS}


def _draw_take(takes: Sequence[Take], random: np.random.Generator) -> Take:
    return takes[int(random.integers(len(takes)))]


def _write_made(
    folder: Path, name: str, takes: Sequence[Take], voices: int, random: np.random.Generator
) -> list[dict[str, Any]]:
    rows, by_word = [], _by_word(takes)
    counts = np.arange(1, len(WORDS) + 1)
    for voice in range(voices):
        manner = Manner.draw(random)
        count = int(random.choice(counts, p=(1 / counts) / (1 / counts).sum()))
        vocabulary = random.permutation(WORDS)[:count].tolist()
        sounds = {
            word: _fitted(_draw_take(by_word[word], random).synthesize(manner, random)) for word in vocabulary
        }
        words = random.choice(vocabulary, random.integers(1, WORDS_SAID * count, endpoint=True)).tolist()
        voice_name = f"{name}-{voice}"
        rows.append(_write(folder, voice_name, voice_name, sounds, words) | {"split": "train"})
    return rows


def _speak_word(synthesizer: Espeak, word: str, voice: str, pitch: int, random: np.random.Generator) -> Sound:
    rate, bend = 150 + int(random.integers(-25, 26)), 50 + int(random.integers(-20, 21))
    samples_N = synthesizer.speak(
        word, voice, rate=rate, pitch=pitch + int(random.integers(-5, 6)), intonation=bend
    )
    return resample(torch.from_numpy(samples_N)[None], 22_050, SAMPLE_RATE)[0].numpy()


def _write(
    folder: Path, name: str, voice: str, sounds: Mapping[str, Sound], words: Sequence[str]
) -> dict[str, Any]:
    """A reference, which has these sounds in their order, and an utterance of some of its words."""
    reference_path, utterance_path = (folder / "audio" / f"{name}{which}.wav" for which in ("_reference", ""))
    _save_sounds(reference_path, sounds.values())
    _save_sounds(utterance_path, [sounds[word] for word in words])
    ends = [end / SAMPLE_RATE for end in itertools.accumulate(map(len, sounds.values()))]
    audio_part = {"type": "audio", "path": str(reference_path.resolve())}
    parts = {
        word: {**audio_part, "start_s": start_s, "end_s": end_s}
        for word, start_s, end_s in zip(sounds, [0.0, *ends], ends, strict=False)
    }
    return {
        "id": name,
        "path": str(utterance_path.resolve()),
        "start_s": 0.0,
        "end_s": sum(len(sounds[word]) for word in words) / SAMPLE_RATE,
        "speaker": voice,
        "text": " ".join(words),
        "reference": _place_recordings(sounds, parts),
        "spoken": _place_recordings(words, parts),
    }


def _save_sounds(path: Path, sounds: Iterable[Sound]) -> None:
    save(path, torch.from_numpy(np.concatenate(list(sounds)))[None], SAMPLE_RATE)


def _place_recordings(words: Iterable[str], recordings: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The recording of each word after it, as a message holds them."""
    return [
        content_part
        for word in words
        for content_part in ({"type": "text", "text": f" {word}"}, recordings[word])
    ]


def _fitted(sound_N: Sound) -> Sound:
    """Bring a clip to the common level, and append a gap that ends on a frame."""
    level_N = normalize_rms(torch.from_numpy(sound_N)[None], LEVEL_DBFS)[0].numpy()
    gap = round(GAP_S * SAMPLE_RATE)
    gap += -(len(level_N) + gap) % FRAME
    return np.pad(level_N, (0, gap))


def _stretched(bins_FB: Matrix, factor: float) -> Matrix:
    """Along the frequencies: what was at bin b is at bin b * factor."""
    count = bins_FB.shape[1]
    place_B = np.clip(np.arange(count) / factor, 0, count - 1)
    below_B = place_B.astype(int)
    above_B = np.minimum(below_B + 1, count - 1)
    share_B = place_B - below_B
    return np.ascontiguousarray(bins_FB[:, below_B] * (1 - share_B) + bins_FB[:, above_B] * share_B)
