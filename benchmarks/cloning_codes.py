"""Samples of `learn_cloning.py` that no voice is in: every word a run of codes drawn at random, once.

Nothing of them can be learned but to look up in the reference what a word is, and to repeat it. Which word it is must
be seen from its name, which comes before its first codes; but only where both the name in the answer and that in the
reference are kept with the codes after them is there anything to be gained, so that neither is learned by itself. Some
samples are therefore by heart: they have no reference, and half of their frames are the same for a word wherever it
is said. From these a model learns within some hundred steps that the codes after a name are the name's, and from the
others at once where to find them. Beside real voices random codes keep it from learning these by heart.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from cloning_voices import WORDS
from rich.progress import track

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.records.shards import ShardWriter, read_index

HELD_OUT = 48
SAMPLES_PER_SHARD = 1024
OWN_FRAMES = 0.5
"""Share of a word's frames that are always the same, in samples by heart."""


class RandomCodes(NamedTuple):
    """Shape of a data set of random codes."""

    samples: int
    words: tuple[int, int]
    """Least and largest number of words of a reference; n has a chance of 1 / n."""
    num_spoken: int
    """Number of the reference's words that are spoken."""
    frames: tuple[int, int]
    """Least and largest number of frames of a word."""
    by_heart: float = 0.0
    """Share of samples without a reference."""


def write_codes(folder: Path, like: Path, kind: RandomCodes) -> None:
    """Shards of such samples, as those of `like` in their codec, and a few held out; what is there is kept."""
    if (folder / "index.json").exists():
        return
    codec = read_index(like)["codec"]
    books, size = codec["num_codebooks"], codec["codebook_size"]
    random = np.random.default_rng([*kind.words, *kind.frames])
    typical_codes = {word: random.integers(0, size, (books, kind.frames[1])) for word in WORDS}
    counts = np.arange(kind.words[0], kind.words[1] + 1)
    writer = ShardWriter(folder, SAMPLES_PER_SHARD)
    for number in track(range(kind.samples + HELD_OUT), description=f"random codes: {folder.name}"):
        vocabulary = random.permutation(WORDS)[: random.choice(counts, p=(1 / counts) / (1 / counts).sum())]
        codes = {
            str(word): random.integers(0, size, (books, _length(random, *kind.frames))).astype(np.int16)
            for word in vocabulary
        }
        by_heart = number >= HELD_OUT and random.random() < kind.by_heart
        if by_heart:
            for word, codes_KT in codes.items():
                kept_T = random.random(codes_KT.shape[1]) < OWN_FRAMES
                codes_KT[:, kept_T] = typical_codes[word][:, : codes_KT.shape[1]][:, kept_T]
        words = random.choice(vocabulary, kind.num_spoken).tolist()
        reference_words = [] if by_heart else list(codes)
        messages = [
            *(
                [Message(role="system", content=_interleave_words(reference_words))]
                if reference_words
                else []
            ),
            Message(role="user", content=[TextPart(text=f" {' '.join(words)}")]),
            Message(role="assistant", content=_interleave_words(words)),
        ]
        metadata = {"split": "test" if number < HELD_OUT else "train", "speaker": str(number)}
        sample = Sample(id=str(number), messages=messages, task="clone", metadata=metadata)
        writer.write(number, sample, [[codes[word] for word in [*reference_words, *words]]])
    writer.close({"codec": codec})


def _length(random: np.random.Generator, shortest: int, longest: int) -> int:
    """Evenly on a logarithmic scale."""
    return round(float(np.exp(random.uniform(np.log(shortest), np.log(longest)))))


def _interleave_words(words: list[str]) -> list[TextPart | AudioPart]:
    return [
        content_part
        for word in words
        for content_part in (TextPart(text=f" {word}"), AudioPart(path=f"{word}.wav"))
    ]
