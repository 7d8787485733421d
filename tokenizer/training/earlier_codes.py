"""Codes of recordings that an earlier `tokenize` has made, for other samples of the same recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from audiollm.codec import Codec, codec_digest
from audiollm.data.records.shards import Shards
from audiollm.errors import StageError
from tokenizer.clips import Clip
from tokenizer.corpus.encoding import stored_codes


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
        self._places: dict[Clip, tuple[int, int]] = {}
        for index in range(len(self._shards)):
            for place, part in enumerate(self._shards.coded(index).sample.audio_parts()):
                self._places.setdefault(
                    _resolved(Clip(Path(part.path), part.start_s, part.end_s)), (index, place)
                )

    def find(self, clip: Clip) -> np.ndarray | None:
        """Return the codes `[K, T]` of a span; None where there are none, or where the file was written later."""
        place = self._places.get(_resolved(clip))
        if place is None or not clip.path.is_file() or clip.path.stat().st_mtime > self._made_s:
            return None
        index, part = place
        return stored_codes(self._shards[index].encodings[0][part], self._codec)


def _resolved(clip: Clip) -> Clip:
    return Clip(clip.path.resolve(), clip.start_s, clip.end_s)
