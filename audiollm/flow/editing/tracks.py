"""Tracks to edit: samples in the format of their file, so that what is not edited is written back bit for bit.

Shapes: N samples, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.audio import AudioError, resample, set_channels
from audiollm.audio.decoding import DecodeRequest, decoded_blocks
from audiollm.audio.discovery import check_readable
from audiollm.audio.files import sound_writer
from audiollm.audio.tags import NO_TAGS, SoundTags, read_tags
from audiollm.errors import ConfigError
from audiollm.files.atomic import atomic_path
from audiollm.flow.editing.chunks import can_copy, copy_descriptions

_INTEGER_BITS: Mapping[str, int] = {"PCM_U8": 8, "PCM_S8": 8, "PCM_16": 16, "PCM_24": 24, "PCM_32": 32}
_FLOATS = ("FLOAT", "DOUBLE")
_FORMATS: Mapping[str, tuple[str, ...]] = {
    ".wav": ("WAV", "WAVEX", "RF64"),
    ".flac": ("FLAC",),
    ".aiff": ("AIFF",),
    ".aif": ("AIFF",),
    ".w64": ("W64",),
    ".caf": ("CAF",),
}
"""Endings of files, and the formats that are written back as they are; tracks of others become WAV with 32-bit float
samples."""
_TAGS = (
    "title", "copyright", "software", "artist", "comment", "date", "album", "license", "tracknumber", "genre",
)  # fmt: skip
"""Tags that libsndfile writes."""
_LOSSLESS = frozenset(name for formats in _FORMATS.values() for name in formats)


@dataclass(frozen=True)
class Track:
    """A track with its format. Integer samples stand in the high bits of int32, as soundfile reads them."""

    samples_NC: NDArray[Any]
    """int32 of integer formats; float64 of others, which holds float32 exactly."""
    sample_rate: int
    format: str
    """soundfile's name of the container."""
    subtype: str
    """soundfile's name of the sample format."""
    source: str = ""
    """Its file; what that holds beside the samples is written, too."""
    tags: SoundTags = NO_TAGS
    """Tags of a file of another format than the track's."""
    decoded_from: str = ""
    """The sample format of its file where it is none that can be written back bit for bit: "ULAW", "MPEG_LAYER_III"."""

    @property
    def bits(self) -> int | None:
        """Bits of integer samples; None: they are floating-point."""
        return _INTEGER_BITS.get(self.subtype)

    @property
    def num_samples(self) -> int:
        return len(self.samples_NC)

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.sample_rate

    def waveform(self, start: int = 0, end: int | None = None) -> Tensor:
        """float32 `[C, N]` of a part of the track."""
        part_NC = self.samples_NC[start:end]
        scaled_NC = part_NC / 2.0**31 if self.bits is not None else part_NC
        return torch.from_numpy(np.ascontiguousarray(scaled_NC.T, dtype=np.float32))

    def fitted(self, made_CN: Tensor, rate: int) -> Tensor:
        """Mono or stereo `[C, N]` at this track's rate and in its channels; more than two have the mean each."""
        back_CN, channels = resample(made_CN, rate, self.sample_rate), self.samples_NC.shape[1]
        return set_channels(back_CN, channels)

    def stored(self, samples_CN: Tensor) -> NDArray[Any]:
        """A waveform as samples `[N, C]` of this track's format, rounded and limited to its range."""
        wide_NC = samples_CN.double().T.numpy()
        if self.bits is None:
            return wide_NC.astype(np.float32).astype(np.float64) if self.subtype == "FLOAT" else wide_NC
        full_scale = 2 ** (self.bits - 1)
        return (
            np.clip(np.round(wide_NC * full_scale), -full_scale, full_scale - 1).astype(np.int64)
            << (32 - self.bits)
        ).astype(np.int32)

    def replaced(self, start: int, samples_CN: Tensor) -> Track:
        """The track with a waveform in place of the samples from `start` on; longer than before where it ends later."""
        new_NC = self.stored(samples_CN)
        size = max(self.num_samples, start + len(new_NC))
        out_NC = np.zeros((size, self.samples_NC.shape[1]), self.samples_NC.dtype)
        out_NC[: self.num_samples] = self.samples_NC
        out_NC[start : start + len(new_NC)] = new_NC
        return replace(self, samples_NC=out_NC)

    def layer(self, edited: Track) -> Track:
        """The difference edited - this track: the track is edited - layer, exactly for integer samples.

        Float samples more than 2^29 times smaller than the edited ones come back within 2^-53 of those.
        """
        size = edited.num_samples
        before_NC = np.zeros_like(edited.samples_NC)
        before_NC[: self.num_samples] = self.samples_NC
        if self.bits is None:
            return Track(edited.samples_NC - before_NC, self.sample_rate, "WAV", "DOUBLE")
        steps_NC = (edited.samples_NC.astype(np.int64) - before_NC.astype(np.int64)) >> (32 - self.bits)
        # in units of this track's steps, which float64 holds exactly
        return Track(steps_NC[:size] / 2.0 ** (self.bits - 1), self.sample_rate, "WAV", "DOUBLE")

    def without(self, layer: Track) -> Track:
        """The track that a layer was added to, from the edited one."""
        if self.bits is None:
            return replace(self, samples_NC=self.samples_NC - layer.samples_NC)
        steps_NC = np.round(layer.samples_NC * 2.0 ** (self.bits - 1)).astype(np.int64) << (32 - self.bits)
        return replace(self, samples_NC=(self.samples_NC.astype(np.int64) - steps_NC).astype(np.int32))

    def check_name(self, path: Path) -> None:
        """Refuse a file name of another format.

        Raises:
            ConfigError: the path's extension is another format's.
        """
        if self.format not in _FORMATS.get(path.suffix.lower(), ()):
            ending = next((key for key, formats in _FORMATS.items() if self.format in formats), ".wav")
            raise ConfigError(
                f"{path.name}: the track is {self.format} with {self.subtype} samples, and is written as such",
                str(path),
                f"end the name in {ending}",
            )

    def save(self, path: Path) -> None:
        """Write the track; the file is whole or absent.

        Raises:
            ConfigError: see `check_name`.
        """
        self.check_name(path)
        with atomic_path(path) as temporary:
            if not can_copy(Path(self.source), self.format):
                self._write(temporary)
                return
            samples = temporary.with_name(f"{temporary.name}.samples")
            try:
                self._write(samples)
                copy_descriptions(Path(self.source), samples, temporary)
            finally:
                samples.unlink(missing_ok=True)

    def lost_tags(self) -> list[str]:
        """What its file holds beside the samples and `save` does not write, in words."""
        return _list_lost_tags(self.tags)

    def _write(self, path: Path) -> None:
        channels = self.samples_NC.shape[1]
        with sound_writer(path, self.sample_rate, channels, self.subtype, self.format) as file:
            for name in _TAGS:
                if name in self.tags.texts:
                    setattr(file, name, self.tags.texts[name])
            file.write(self.samples_NC)


def read_track(path: Path) -> Track:
    """Read a track in its own format; one of a lossy format or a video becomes WAV with 32-bit float samples.

    Raises:
        AudioError: it cannot be read, or holds NaN or infinite samples.
    """
    decoded_from = path.suffix.lstrip(".").upper()
    try:
        with soundfile.SoundFile(path) as file:
            decoded_from = file.subtype
            keeps = file.format in _LOSSLESS and (file.subtype in _INTEGER_BITS or file.subtype in _FLOATS)
            if keeps:
                dtype = "int32" if file.subtype in _INTEGER_BITS else "float64"
                samples_NC = file.read(dtype=dtype, always_2d=True)
                if not np.isfinite(samples_NC).all():
                    raise AudioError(
                        path, "holds NaN or infinite samples: write the file anew from its origin"
                    )
                tags = NO_TAGS if can_copy(path, file.format) else _tags(path)
                return Track(samples_NC, file.samplerate, file.format, file.subtype, str(path), tags)
    except (soundfile.LibsndfileError, OSError):
        pass  # the decoders below say what is wrong, or can read it
    check_readable(path)
    blocks_CN, rates = zip(
        *decoded_blocks(DecodeRequest(str(path), path, 0.0, None, None, False)), strict=True
    )
    samples_CN = torch.cat(blocks_CN, dim=1)
    if not bool(torch.isfinite(samples_CN).all()):
        raise AudioError(path, "holds NaN or infinite samples: write the file anew from its origin")
    # not clipped: peaks of an MP3 may be above 1
    samples_NC = np.ascontiguousarray(samples_CN.T.double().numpy())
    tags = NO_TAGS if can_copy(path, "WAV") else _tags(path)
    return Track(samples_NC, rates[0], "WAV", "FLOAT", str(path), tags, decoded_from)


def copy_described(source: Path, samples: Path, out: Path) -> None:
    """Write `out`: the samples of a WAV file with what another sound file or a film holds beside its own; see
    `lost_in_wav`. The file is whole or absent.

    Raises:
        AudioError: `source` cannot be read.
    """
    with atomic_path(out) as temporary:
        if can_copy(source, "WAV"):
            copy_descriptions(source, samples, temporary)
            return
        described = temporary.with_name(f"{temporary.name}.tags")
        try:
            Track(np.zeros((0, 1), np.int32), 8000, "WAV", "PCM_16", "", _tags(source))._write(described)
            copy_descriptions(described, samples, temporary)
        finally:
            described.unlink(missing_ok=True)


def lost_in_wav(source: Path) -> list[str]:
    """What a file holds beside its samples and `copy_described` does not write, in words.

    Raises:
        AudioError: it cannot be read.
    """
    return [] if can_copy(source, "WAV") else _list_lost_tags(_tags(source))


# Private


def _list_lost_tags(tags: SoundTags) -> list[str]:
    return [f"the tag {name}" for name in sorted(tags.texts) if name not in _TAGS] + list(tags.non_text)


def _tags(path: Path) -> SoundTags:
    """The tags of a file, with libsndfile's name of the number of a track."""
    tags = read_tags(path)
    texts = {{"track": "tracknumber"}.get(name, name): text for name, text in tags.texts.items()}
    return SoundTags(texts, tags.non_text)
