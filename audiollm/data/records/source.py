"""The source interface that manifests and shards share, and the samples that a source gives.

Audio stays a path or the bytes of a file until `AudioClip.load` decodes it.

Shapes: K codebooks, T frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from audiollm.data.records.arrays import StoredArray
from audiollm.data.records.sample import AudioPart, Sample, VideoPart
from audiollm.data.records.storage import is_url, read_all
from audiollm.errors import BadSample

if TYPE_CHECKING:
    from audiollm.audio import Waveform
from audiollm.audio.samples import SILENCE_DBFS
from audiollm.data.records.sample import TextPart


@dataclass(frozen=True)
class AudioClip:
    """The sound of one audio part, not decoded yet."""

    place: str
    """Location named in errors: the file, or the shard and the member."""
    sample_id: str
    content: bytes | str | None
    """The content of a sound file, the path or URL of one, or None: there are codes of it alone."""
    start_s: float = 0.0
    end_s: float | None = None

    def load(self, sample_rate: int | None = None, mono: bool = False) -> Waveform:
        """Decode the part's span: float32 [channels, samples] in [-1, 1] and its rate.

        Args:
            sample_rate: resample to this rate in Hz; None keeps the file's.
            mono: one channel, as `audiollm.audio.load` mixes it.

        Raises:
            BadSample: there is no sound, or none that can be decoded.
        """
        from audiollm.audio import AudioError, load, load_bytes

        try:
            if self.content is None:
                raise self._bad(
                    "there are codes of it, and no sound (`tokenize` keeps it with sound: true, of speech with all)",
                    "missing audio",
                )
            if isinstance(self.content, str) and not is_url(self.content):
                return load(self.content, self.start_s, self.end_s, sample_rate, mono)
            content = read_all(self.content) if isinstance(self.content, str) else self.content
            return load_bytes(content, self.place, self.start_s, self.end_s, sample_rate, mono)
        except AudioError as error:
            raise self._bad(error.reason, "undecodable audio") from error
        except (OSError, ValueError) as error:  # an address that cannot be reached, a name no system takes
            raise self._bad(f"cannot be read ({error})", "missing audio") from error

    def _bad(self, reason: str, kind: str) -> BadSample:
        return BadSample(self.place, self.sample_id, f"audio: {reason}", kind)


@dataclass(frozen=True)
class LoadedSample:
    """A sample with the codes of its audio parts, in one or more encodings, and with their sound."""

    sample: Sample
    encodings: list[list[Tensor]]
    """int64 `[K, T]` each, one an audio part; no encoding where there are no codes."""
    audio: tuple[AudioClip, ...] = ()
    """A clip for each audio part."""
    arrays: Mapping[str, StoredArray] = field(default_factory=dict)
    """The named arrays of the sample, not read yet."""
    videos: tuple[VideoPart, ...] = ()
    """The video parts of the messages with the addresses of their files; none where the source cannot tell."""

    @property
    def frames(self) -> int:
        return sum(codes_KT.shape[1] for encoding in self.encodings[:1] for codes_KT in encoding)

    @property
    def num_asked(self) -> int:
        """Audio parts of the messages; those of the answers follow them."""
        return len(self.sample.audio_parts()) - sum(
            len(answer.audio_parts()) for answer in self.sample.answers
        )

    def answered(self, index: int) -> LoadedSample:
        """The conversation with answer `index` as its last message, with the codes and clips of these parts alone.

        Raises:
            IndexError: there is no such answer.
        """
        sizes, num_asked = [len(answer.audio_parts()) for answer in self.sample.answers], self.num_asked
        first = num_asked + sum(sizes[:index])
        part_numbers = [*range(num_asked), *range(first, first + sizes[index])]
        encodings = [[encoding[number] for number in part_numbers] for encoding in self.encodings]
        audio = tuple(self.audio[number] for number in part_numbers) if self.audio else ()
        return replace(self, sample=self.sample.answered(index), encodings=encodings, audio=audio)

    def without_answers(self) -> LoadedSample:
        """The messages alone, with the codes and clips of their parts."""
        num_asked = self.num_asked
        sample = self.sample.model_copy(update={"answers": []})
        encodings = [encoding[:num_asked] for encoding in self.encodings]
        return replace(self, sample=sample, encodings=encodings, audio=self.audio[:num_asked])

    def without_recordings(self) -> LoadedSample:
        """The sample without the sound of its messages, for models that see and do not hear.

        A message of sound alone is left out.
        """
        messages = [
            message.model_copy(update={"content": parts})
            for message in self.sample.messages
            if (
                parts := [
                    content_part
                    for content_part in message.content
                    if not isinstance(content_part, AudioPart)
                ]
            )
        ]
        num_asked = self.num_asked
        sample = self.sample.model_copy(update={"messages": messages})
        encodings = [encoding[num_asked:] for encoding in self.encodings]
        return replace(self, sample=sample, encodings=encodings, audio=self.audio[num_asked:])

    def array(self, name: str, made_by: str | None = None) -> Tensor:
        """Read a named array.

        Raises:
            BadSample: the sample has none of this name, or `StoredArray.load` refuses it.
        """
        if name not in self.arrays:
            there = f"has {', '.join(self.arrays)}" if self.arrays else "has no arrays"
            raise BadSample(
                self.sample.id, self.sample.id, f"{there}, and {name!r} is needed", "missing array"
            )
        return self.arrays[name].load(made_by)

    def __reduce__(self) -> tuple[object, ...]:
        """Between processes as plain arrays: as tensors, each would hold a file descriptor open."""
        encodings = [[codes_KT.numpy() for codes_KT in encoding] for encoding in self.encodings]
        return _restore_sample, (self.sample, encodings, self.audio, self.arrays, self.videos)


class Source(Protocol):
    """Samples by number. What is found bad when it is opened is in `bad`, and is not numbered.

    An opened source survives pickling, and goes to other processes without being opened or looked through again.
    """

    @property
    def name(self) -> str: ...

    @property
    def bad(self) -> Sequence[BadSample]: ...

    @property
    def digest(self) -> str:
        """Changes when a number no longer stands for the same sample: what was noted by number holds no more."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> LoadedSample:
        """Sample `index`.

        Raises:
            BadSample: it cannot be used.
            IndexError: there is none of this number.
        """


def _restore_sample(
    sample: Sample,
    encodings: list[list[np.ndarray]],
    audio: tuple[AudioClip, ...],
    arrays: Mapping[str, StoredArray],
    videos: tuple[VideoPart, ...],
) -> LoadedSample:
    tensors = [[torch.from_numpy(codes) for codes in row] for row in encodings]
    return LoadedSample(sample, tensors, audio, arrays, videos)


SILENT = "silent"
"""Kind of the samples with words and a silent recording."""


def teaches_words(sample: Sample) -> bool:
    """Return whether the sample has words of a user or an assistant: silence would be taught as them."""
    roles = ("user", "assistant")
    return any(text.strip() for role in roles for text in sample.texts(role)) or any(
        isinstance(content_part, TextPart) and content_part.text.strip()
        for answer in sample.answers
        for content_part in answer.content
    )


def silent_part(sample: Sample, path: str, level_dbfs: float) -> BadSample:
    """A sample whose words go with a recording in which nothing is heard."""
    reason = (
        f"is silent (its peak is at {level_dbfs:.0f} dBFS, the limit is {SILENCE_DBFS:.0f}) and the sample has words: "
        "get the recording anew, or leave it out"
    )
    return BadSample(path, sample.id, reason, SILENT)
