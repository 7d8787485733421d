"""Samples of `learn_cloning.py` that no voice is in: every word a run of codes drawn at random, once.

Nothing of them can be learned but to look up in the reference what a word is, and to repeat it. With references of
one word that is found within some hundred steps, with longer ones only after it. Beside real voices they keep a
model from learning these by heart.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from cloning_voices import WORDS
from rich.progress import track

from audiollm.data.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.shards import ShardWriter, read_index

HELD_OUT = 48
SAMPLES_PER_SHARD = 1024


def write_codes(
    folder: Path, like: Path, samples: int, most_words: int, said: int, frames: tuple[int, int]
) -> None:
    """Shards of such samples, as those of `like` in their codec, and a few held out; what is there is kept.

    A reference has n of at most `most_words` words with a chance of 1 / n, and `said` of them are said.
    """
    if (folder / "index.json").exists():
        return
    codec = read_index(like)["codec"]
    books, size = codec["num_codebooks"], codec["codebook_size"]
    random = np.random.default_rng([most_words, *frames])
    counts = np.arange(1, most_words + 1)
    writer = ShardWriter(folder, SAMPLES_PER_SHARD)
    for number in track(range(samples + HELD_OUT), description=f"random codes, {most_words} words at most"):
        known = random.permutation(WORDS)[: random.choice(counts, p=(1 / counts) / (1 / counts).sum())]
        codes = {
            str(word): random.integers(0, size, (books, _length(random, *frames))).astype(np.int16)
            for word in known
        }
        words = random.choice(known, said).tolist()
        messages = [
            Message(role="system", content=_after_words(list(codes))),
            Message(role="user", content=[TextPart(text=f" {' '.join(words)}")]),
            Message(role="assistant", content=_after_words(words)),
        ]
        metadata = {"split": "test" if number < HELD_OUT else "train", "speaker": str(number)}
        sample = Sample(id=str(number), messages=messages, task="clone", metadata=metadata)
        writer.write(number, sample, [[codes[word] for word in [*codes, *words]]])
    writer.close({"codec": codec})


def _length(random: np.random.Generator, shortest: int, longest: int) -> int:
    """Evenly on a logarithmic scale."""
    return round(float(np.exp(random.uniform(np.log(shortest), np.log(longest)))))


def _after_words(words: list[str]) -> list[TextPart | AudioPart]:
    return [part for word in words for part in (TextPart(text=f" {word}"), AudioPart(path=f"{word}.wav"))]
