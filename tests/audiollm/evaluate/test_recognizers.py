"""Pocketsphinx on a synthesized voice and, where the data is there, on people: what is right is known."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from audiollm.audio import load
from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)


@pytest.fixture(scope="module")
def digits() -> PocketsphinxRecognizer:
    return PocketsphinxRecognizer(
        [str(number) for number in range(10)]
    )  # spelled out by the recognizer itself


def _noise(seconds: float, level: float = 0.05, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, level, (1, int(seconds * 8000)))).float()


def test_people_saying_digits(digits: PocketsphinxRecognizer) -> None:
    folder = SHARED / "fsdd" / "recordings"
    if not folder.is_dir():
        pytest.skip(f"no digit recordings at {folder}")
    right = total = 0
    for path in sorted(folder.glob("*_1.wav")):
        waveform = load(path)
        right += digits.recognize(waveform.samples_CN, waveform.sample_rate) == DIGITS[int(path.name[0])]
        total += 1
    assert total == 60
    assert right >= 0.75 * total  # 0.83 on all 300 test takes; chance is 0.1


def test_same_input_same_text_whatever_came_before(digits: PocketsphinxRecognizer) -> None:
    clip = _noise(0.6, 0.1)
    first = digits.recognize(clip, 8000)
    for seed in range(3):
        digits.recognize(_noise(1.0, seed=seed), 8000)
    assert digits.recognize(clip, 8000) == first


def test_a_closed_grammar_hears_nothing_else(digits: PocketsphinxRecognizer) -> None:
    for seed in range(4):
        assert digits.recognize(_noise(0.7, 0.2, seed), 8000) in {*DIGITS, ""}


@pytest.mark.parametrize("num_samples", [0, 1, 40])
def test_tiny_and_silent_clips_do_not_fail(digits: PocketsphinxRecognizer, num_samples: int) -> None:
    assert digits.recognize(torch.zeros(2, num_samples), 44100) in {*DIGITS, ""}


def test_words_that_cannot_be_pronounced_are_named() -> None:
    with pytest.raises(ValueError, match="qwxyz, zzyzxa"):
        PocketsphinxRecognizer(["seven zzyzxa", "qwxyz", "eight"])
    with pytest.raises(ValueError, match="no words"):
        PocketsphinxRecognizer(["?!"])


def test_a_search_without_an_end_is_no_word() -> None:
    """Pocketsphinx raises where no path of its search reaches the end of the sound."""

    class LostSearch:
        def __init__(self, decoder: object) -> None:
            self._decoder = decoder

        def __getattr__(self, name: str) -> object:
            return getattr(self._decoder, name)

        def end_utt(self) -> None:
            self._decoder.end_utt()  # type: ignore[attr-defined]
            raise RuntimeError("Failed to stop utterance processing")

    recognizer = PocketsphinxRecognizer(DIGITS)
    recognizer._decoder = LostSearch(recognizer._decoder)
    assert recognizer.recognize(_noise(0.5), 8000) == ""
