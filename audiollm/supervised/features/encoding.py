"""The work of the stage `encode_features`: recordings to rows of a frozen encoder, as arrays in shards.

A shard is whole or absent; a run that was killed goes on with the first that is missing, and gives the same bytes.

Shapes: R rows of a recording, C values of a row.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.audio.samples import SILENCE_DBFS
from audiollm.data.hearing.augment import augment_features
from audiollm.data.hearing.augmentation import Augmentation
from audiollm.data.hearing.features import (
    ClipFeatures,
    FeatureWindow,
    PackedFeatures,
    chunk_features,
    clip_features,
    encoded_name,
    heard_parts,
    last_rows,
    stream_chunks,
)
from audiollm.data.records.arrays import array_bytes
from audiollm.data.records.opening import open_source
from audiollm.data.records.shards import ShardWriter
from audiollm.data.records.source import LoadedSample, Source, silent_part, teaches_words
from audiollm.devices import default_device
from audiollm.errors import BadSample, StageError
from audiollm.families.audio_encoders import published_encoder
from audiollm.files.set_aside import SetAside, read_set_aside
from audiollm.models.audio_encoder import AudioEncoderConfig, AudioTower, encoder_digest, load_tower
from audiollm.models.encoder_flops import encoder_flops
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.supervised.features.settings import EncodeFeaturesConfig
from audiollm.train.loop.optim import autocast
from audiollm.train.loop.task import step_generator

FACTS = "features"
"""The key of the facts of encoded recordings in the index of their shards."""
CODEBOOKS = "codebooks.safetensors"
"""Code vectors beside the shards of a codec, which go along."""


def encode_features(config: EncodeFeaturesConfig, context: Context) -> dict[str, Any]:
    """Write every sample with the rows of the recordings that are heard in it into `shards`.

    Raises:
        StageError: no sample can be used.
        ConfigError: an encoder that cannot be loaded, or samples that cannot be opened.
    """
    source, encoder = open_source(config.samples), published_encoder(config.audio_encoder)
    set_aside_path = context.folder / "set_aside.jsonl"
    set_aside = SetAside(set_aside_path, "encode_features", read_set_aside(set_aside_path))
    set_aside.add(source.bad)
    encode = _RowEncoder(encoder, config)
    writer = ShardWriter(context.folder / "shards", config.samples_per_shard)
    with context.progress("encoding recordings", len(source)) as bar:
        for index in range(len(source)):
            if not writer.has(index):
                try:
                    loaded = source[index]
                    arrays = dict(encode(loaded, index))
                except BadSample as error:
                    set_aside.add([error.with_traceback(None)])
                else:
                    writer.write(
                        index,
                        loaded.sample,
                        [[codes.numpy() for codes in row] for row in loaded.encodings],
                        None,
                        arrays,
                    )
            bar.advance(bar.task_ids[0])
    facts = {
        "encoder": encode.digest,
        "rows_per_second": encoder.features.rows_per_second,
        "width": encoder.row_width,
        "views": config.views,
        "augment": None if config.augment is None else config.augment.model_dump(),
    }
    counts = writer.close({**getattr(source, "facts", {}), FACTS: facts})
    if not counts.get("samples"):
        raise StageError("encode_features: no sample can be used", f"the reasons: {set_aside_path}", 2)
    _copy_codebooks(config.samples, context.folder / "shards")
    return {"samples": counts["samples"], "set_aside": len(set_aside.rows), "views": config.views}


def encoded_views(source: Source, augment: Augmentation | None) -> int:
    """Views of the recordings of a source from which a training draws; 0: recordings as they are, or no rows.

    Raises:
        StageError: an augmentation is asked for, and the source has rows of none, or of another one.
    """
    facts = getattr(source, "facts", {}).get(FACTS)
    if facts is None or augment is None:
        return 0
    if facts["views"] and Augmentation(**facts["augment"]) == augment:
        return int(facts["views"])
    stored = f"of another augmentation: {facts['augment']}" if facts["views"] else "of none"
    raise StageError(
        f"{source.name}: augment is set, and the rows that were encoded before have views {stored}",
        "set views and the same augment in `encode_features`, or leave augment out",
        2,
    )


def count_clip_flops(config: AudioEncoderConfig, seconds: float) -> float:
    """Operations to encode a recording, without the projector."""
    rows = max(1, round(seconds * config.features.rows_per_second))
    frames = rows * config.features.frames_per_row
    packed = PackedFeatures(torch.empty(0), (frames,), (0,))
    return encoder_flops(config, 0, packed, trained=False)


# Private


class _RowEncoder:
    """Gives the arrays of a sample."""

    def __init__(self, encoder: AudioEncoderConfig, config: EncodeFeaturesConfig) -> None:
        self._config, self._device = config, default_device()
        folder = required(config.audio_encoder.path)
        self._tower = AudioTower(encoder)
        load_tower(self._tower, folder)
        self._tower.freeze()
        self._tower.to(self._device)
        self._shape = encoder.features
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self.digest = encoder_digest(folder, encoder)

    def __call__(self, loaded: LoadedSample, index: int) -> Iterator[tuple[str, bytes]]:
        """Name and file of each array. A stream is encoded chunk by chunk, each from what was heard until its end.

        Raises:
            BadSample: a recording that cannot be read, or a silent one beside words.
        """
        sample = loaded.sample
        streams = stream_chunks(sample)
        for part, (clip, is_heard) in enumerate(zip(loaded.audio, heard_parts(sample), strict=True)):
            if not is_heard:
                continue
            new_rows: tuple[int, ...] | None = None
            if part in streams:
                _refuse_shift(self._config.augment)
                features, new_rows = chunk_features(clip, self._shape, streams[part])
            else:
                features = clip_features(clip, self._shape)
            if features.peak_dbfs < SILENCE_DBFS and teaches_words(sample):
                raise silent_part(sample, clip.place, features.peak_dbfs)
            for view, windows in enumerate(self._views(features, index, part, sample.is_held_out)):
                rows_RC = self._encode(windows)
                if new_rows is not None:
                    rows_RC = last_rows(rows_RC, windows, new_rows)
                if not bool(rows_RC.isfinite().all()):
                    reason = f"the encoder's rows are not finite in {self._config.dtype}"
                    raise BadSample(clip.place, sample.id, reason, "not finite")
                yield encoded_name(part, view), array_bytes(rows_RC, self.digest)

    def _views(
        self, features: ClipFeatures, index: int, part: int, is_held_out: bool
    ) -> Iterator[tuple[FeatureWindow, ...]]:
        """The windows of the recording, and of its augmented views where it is trained on."""
        yield features.windows
        if self._config.augment is None or is_held_out:
            return
        for view in range(1, self._config.views + 1):
            generator = step_generator(self._config.seed, index, f"view {part} {view}")
            yield augment_features(features, self._config.augment, self._shape, generator).windows

    def _encode(self, windows: tuple[FeatureWindow, ...]) -> Tensor:
        packed = PackedFeatures.of(windows)
        assert packed is not None  # a recording has at least one window
        with torch.inference_mode(), autocast(self._config.precision, self._device):
            rows_RC: Tensor = self._tower(packed.to(self._device))
        return rows_RC.to("cpu", self._dtype)


def _refuse_shift(augment: Augmentation | None) -> None:
    if augment is not None and augment.shift:
        raise StageError(
            "augment.shift moves sound in time, and a stream would be heard before it is said",
            "set shift: 0 where samples are streams",
            2,
        )


def _copy_codebooks(samples: Path | str, shards: Path) -> None:
    vectors = Path(samples) / CODEBOOKS
    if vectors.is_file():
        shutil.copyfile(vectors, shards / CODEBOOKS)
