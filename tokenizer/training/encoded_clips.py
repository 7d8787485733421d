"""The recordings that `tokenize` encodes for a sample, and their codes from an earlier `tokenize`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from audiollm.audio import load, normalize_rms, peak_dbfs
from audiollm.audio.level import running_level
from audiollm.codec import Codec, codec_digest
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.data.records.shards import Shards
from audiollm.errors import StageError
from tokenizer.clips import LEVEL_DBFS, Clip
from tokenizer.corpus.encoding import stored_codes


@dataclass(frozen=True)
class EncodedClip:
    """A span of a file, and the level at which it is encoded."""

    clip: Clip
    is_live: bool
    """Whether it goes through the running level of the live loop, as what a stream hears; else it is levelled whole."""

    def load(self, sample_rate: int) -> tuple[Tensor, float]:
        """Read its mono samples `[N]`, at their level, and the peak in dBFS that they had before.

        Raises:
            AudioError: it cannot be read.
        """
        where = self.clip.path, self.clip.start_s, self.clip.end_s
        samples_1N = load(*where, sample_rate=sample_rate, mono=True).samples_CN
        levelled_1N = (
            running_level(samples_1N, sample_rate) if self.is_live else normalize_rms(samples_1N, LEVEL_DBFS)
        )
        return levelled_1N[0], peak_dbfs(samples_1N)


def encoded_clips(sample: Sample) -> list[EncodedClip]:
    """Return the clip of each audio part, in the order of its codes."""
    is_stream = any(message.chunk_frames is not None for message in sample.messages)
    is_live_part = [
        is_stream and message.role == "user"
        for message in sample.messages
        for audio_part in message.content
        if isinstance(audio_part, AudioPart)
    ]
    parts = sample.audio_parts()
    lives = [*is_live_part, *[False] * (len(parts) - len(is_live_part))]
    return [
        EncodedClip(Clip(Path(audio_part.path), audio_part.start_s, audio_part.end_s), is_live)
        for audio_part, is_live in zip(parts, lives, strict=True)
    ]


class EarlierCodes:
    """The plain codes in a folder of shards, by the span of a file that they are of.

    Args:
        folder: shards of `tokenize`, complete.

    Raises:
        StageError: they were made with another codec.
        ConfigError: there are no shards.
    """

    def __init__(self, folder: Path, codec: Codec) -> None:
        self._shards, self._codec = Shards(folder), codec
        facts = self._shards.facts.get("codec")
        if not isinstance(facts, dict) or facts.get("digest") != codec_digest(codec):
            raise StageError(
                f"{folder}: its codes are those of another codec",
                "leave codes_from out, or name shards that this codec has made",
                2,
            )
        self._made_s = (folder / "index.json").stat().st_mtime
        self._places: dict[EncodedClip, tuple[int, int]] = {}
        for index in range(len(self._shards)):
            for place, clip in enumerate(encoded_clips(self._shards.coded(index).sample)):
                self._places.setdefault(_resolved(clip), (index, place))

    def find(self, clip: EncodedClip) -> np.ndarray | None:
        """Return the codes `[K, T]` of a span; None where there are none, or where the file was written later."""
        place, path = self._places.get(_resolved(clip)), clip.clip.path
        if place is None or not path.is_file() or path.stat().st_mtime > self._made_s:
            return None
        index, part_number = place
        return stored_codes(self._shards[index].encodings[0][part_number], self._codec)


def _resolved(clip: EncodedClip) -> EncodedClip:
    return replace(clip, clip=replace(clip.clip, path=clip.clip.path.resolve()))
