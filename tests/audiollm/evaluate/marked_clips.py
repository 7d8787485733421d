"""Clips of which is known what is "said" in which "voice", and judges that read it off: for the suites' tests.

A clip's length in milliseconds stands for a text, and its first two samples point in the direction of its voice.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from audiollm.audio import Waveform, save

RATE = 16_000


class Book:
    """Which text a clip of which length holds."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}

    def sound(self, text: str, degrees: float) -> Waveform:
        """A clip that says `text` in the voice that lies in this direction."""
        length = next((n for n, known in self.texts.items() if known == text), 400 + len(self.texts))
        self.texts[length] = text
        samples_1N = torch.full((1, length * 16), 0.1)
        samples_1N[0, 0] = 0.9 * math.cos(math.radians(degrees))
        samples_1N[0, 1] = 0.9 * math.sin(math.radians(degrees))
        return Waveform(samples_1N, RATE)

    def write(self, path: Path, text: str, degrees: float) -> Path:
        wave = self.sound(text, degrees)
        save(path, wave.samples_CN, RATE)
        return path


class Reader:
    """A recognizer that knows the book, and counts what it is asked."""

    name = "reader"

    def __init__(self, book: Book) -> None:
        self.book, self.asked = book, 0

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        self.asked += 1
        text = self.book.texts[round(samples_CN.shape[1] * 1000 / sample_rate)]
        if text == "(fails)":
            raise RuntimeError("out of breath")
        return text


class Compass:
    """A judge of voices that reads the direction."""

    name = "compass"

    def embed(self, samples_1N: Tensor, sample_rate: int) -> Tensor:
        return samples_1N[0, :2].clone()
