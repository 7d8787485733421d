"""The spoken corpus: six voices that a codec and a judge can tell apart, as people's voices can.

Shapes: T frames, M mel bands.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soxr
import torch
from numpy.typing import NDArray

from audiollm.audio import load
from audiollm.audio.pitch import track_pitch
from audiollm.evaluate.judges.features import judge_mel_filters, log_features, mel_power
from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer
from pipelines.annotate.input.synthetic import PATTERN, SAMPLE_RATE, VOICES, CorpusConfig, speak_corpus

CORPUS = CorpusConfig(takes=6, test_takes=2)
NAMES = [voice.name for voice in VOICES]
Samples = NDArray[np.float32]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], Samples]:
    """The samples of each word, voice and take."""
    folder: Path = tmp_path_factory.mktemp("corpus")
    speak_corpus(folder, CORPUS, seed=0, on_done=lambda done: None)
    return {
        (word, name, take): load(folder / PATTERN.format(text=word, speaker=name, take=take))
        .samples_CN[0]
        .numpy()
        for word, name, take in product(CORPUS.words, NAMES, range(CORPUS.takes))
    }


def test_voices_differ_by_more_than_their_pitch(spoken: dict[tuple[str, str, int], Samples]) -> None:
    """A held-out take, played up to 10 % faster or slower, is nearest to its own voice saying the same word.

    The tokenizer keeps no pitch, and its training varies the speed as much: what is left of a voice after both is what
    the language model and the judge can hold on to. Voices that differ in little but pitch came to 0.78 here.
    """
    random = np.random.default_rng(0)
    right = []
    for word in CORPUS.words:
        own = range(CORPUS.test_takes, CORPUS.takes)
        centres = {
            name: np.mean([_envelope(spoken[word, name, take]) for take in own], axis=0) for name in NAMES
        }
        for name, take in product(NAMES, range(CORPUS.test_takes)):
            speed = 1 + random.uniform(-0.1, 0.1)
            heard_M = _envelope(soxr.resample(spoken[word, name, take], speed, 1.0))
            nearest = min(NAMES, key=lambda each: float(np.square(centres[each] - heard_M).sum()))
            right.append(nearest == name)
    assert np.mean(right) >= 0.95, np.mean(right)


def test_voices_have_the_pitch_of_people(spoken: dict[tuple[str, str, int], Samples]) -> None:
    for name in NAMES:
        pitches = []
        for word in CORPUS.words:
            found_F, voiced_F = track_pitch(soxr.resample(spoken[word, name, 0], SAMPLE_RATE, 16_000))
            pitches.extend(found_F[voiced_F])
        lowest, highest = (160, 250) if name in ("anna", "clara", "edith") else (80, 135)
        assert lowest <= np.median(pitches) <= highest, (name, np.median(pitches))


def test_words_are_understood_in_every_voice(spoken: dict[tuple[str, str, int], Samples]) -> None:
    recognizer = PocketsphinxRecognizer(CORPUS.words)
    for name in NAMES:
        takes = list(product(CORPUS.words, range(3)))
        heard = [
            recognizer.recognize(torch.from_numpy(spoken[w, name, t])[None], SAMPLE_RATE) for w, t in takes
        ]
        right = np.mean([said == word for said, (word, _) in zip(heard, takes, strict=True)])
        assert right >= 0.8, (name, right)


def _envelope(samples_N: Samples) -> NDArray[np.float32]:
    """The mean spectrum `[M]` in dB without level and harmonics: the first 13 terms of its cosine series."""
    power_TM = mel_power(torch.from_numpy(samples_N)[None], SAMPLE_RATE, judge_mel_filters(8_000.0))
    mean_M = 20 * log_features(power_TM[None])[0].mean(dim=0).numpy()
    terms = np.fft.rfft(np.concatenate([mean_M, mean_M[::-1]]))
    terms[0], terms[13:] = 0, 0
    return np.fft.irfft(terms)[: len(mean_M)]
