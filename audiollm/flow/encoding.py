"""The work of the stage `encode_latents`: sounds to latents, words and pictures to features, into shards.

A shard is whole or absent; a run that was killed goes on with the first that is missing, and gives the same bytes.

Shapes: D latent dimension, T latent frames, R rows of features.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from audiollm.audio import AudioError, load, set_channels
from audiollm.autoencoder import Autoencoder, load_autoencoder
from audiollm.data.records.arrays import array_bytes
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart
from audiollm.data.records.shards import ShardWriter
from audiollm.devices import one_thread
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.files.set_aside import UNREADABLE, SetAside, read_set_aside
from audiollm.flow.conditions.edits import draw_edits
from audiollm.flow.conditions.pretrained import (
    FrameEncoder,
    TextEncoder,
    load_frame_encoder,
    load_text_encoder,
)
from audiollm.flow.conditions.reading import flat_pictures, read_pictures, sound_request
from audiollm.flow.model.packed import Features, Modality
from audiollm.flow.settings import EncodeLatentsConfig, EncodersConfig, PicturesConfig
from audiollm.flow.sound_model import condition_facts
from audiollm.recipe.runner import Context

FACTS = "sounds"
"""The key of the facts of encoded sounds in the index of their shards."""


class EncodedTrack(NamedTuple):
    """Normalized latents of a track: the mean and deviation of each number, `[D, T]`."""

    mean_DT: Tensor
    deviation_DT: Tensor


class _Row(NamedTuple):
    """A sample of a shard and its arrays' files."""

    sample: Sample
    arrays: dict[str, bytes]


class ConditionEncoders:
    """The encoders of conditions: pretrained ones, and pictures kept for those that are trained along."""

    def __init__(self, encoders: EncodersConfig, pictures: PicturesConfig) -> None:
        self._config, self._pictures = encoders, pictures
        self._max_clips, self._clips = 0, dict[tuple[str, float, int, int], dict[Modality, Features]]()
        self.caption: TextEncoder | None = None
        self.cot: TextEncoder | None = None
        self.frames: FrameEncoder | None = None
        self.sync: FrameEncoder | None = None
        if encoders.caption:
            self.caption = load_text_encoder(encoders.caption, encoders.pads)
        if encoders.cot:
            self.cot = load_text_encoder(encoders.cot, encoders.pads)
        if encoders.frames:
            self.frames = load_frame_encoder(encoders.frames, pictures.frame_rate)
        if encoders.sync:
            self.sync = load_frame_encoder(encoders.sync, pictures.sync_rate)

    def facts(self) -> dict[str, Any]:
        """`ConditionFacts` of every modality that is made here, by name."""
        facts: dict[str, Any] = {}
        for name in ("caption", "cot"):
            encoder: TextEncoder | None = getattr(self, name)
            facts[name] = (
                condition_facts(kind="words")
                if encoder is None
                else condition_facts(
                    kind="features",
                    made_by=encoder.digest,
                    source=str(getattr(self._config, name)),
                    width=encoder.width,
                )
            )
        for name, rate, side in self._pictured():
            pictured: FrameEncoder | None = getattr(self, name)
            facts[name] = (
                condition_facts(kind="pictures", made_by=_pictures_digest(rate, side), rate=rate, side=side)
                if pictured is None
                else condition_facts(
                    kind="features",
                    made_by=pictured.digest,
                    source=str(getattr(self._config, name)),
                    width=pictured.width,
                    rate=pictured.frame_rate,
                    side=pictured.picture_side,
                )
            )
        return facts

    def encode(self, sample: Sample, duration_s: float, place: str) -> dict[Modality, Features]:
        """The features of a sample's words and pictures; words without a pretrained encoder stay words.

        Raises:
            BadSample: a video that cannot be read or is of another length than the sound.
            ConfigError: an encoder of pictures whose times do not rise.
        """
        request, features = sound_request(sample, place), dict[Modality, Features]()
        for name, text in (("caption", request.caption), ("cot", request.cot)):
            encoder: TextEncoder | None = getattr(self, name)
            if text and encoder is not None:
                encoded = encoder.encode_text(text)
                features[name] = Features(encoded.values_RC, None, encoded.pooled_C)  # type: ignore[index]
        if request.video is not None:
            features.update(self._remembered_pictures(request.video, duration_s, place, sample.id))
        return features

    def remember_clips(self, max_clips: int) -> None:
        """Keep the features of the last `max_clips` clips, so that a repeated clip is not encoded again."""
        self._max_clips = max_clips

    def _remembered_pictures(
        self, video: VideoPart, duration_s: float, place: str, sample_id: str
    ) -> dict[Modality, Features]:
        """The features of pictures, remembered or made."""
        if not self._max_clips:
            return self._encode_pictures(video, duration_s, place, sample_id)
        try:
            facts = Path(video.path).stat()
        except OSError as error:
            raise BadSample(
                place, sample_id, f"{video.path}: {error.strerror}", "unreadable video"
            ) from error
        key = (video.model_dump_json(), duration_s, facts.st_size, facts.st_mtime_ns)
        features = self._clips.pop(key, None) or self._encode_pictures(video, duration_s, place, sample_id)
        self._clips[key] = features
        while len(self._clips) > self._max_clips:
            self._clips.pop(next(iter(self._clips)))
        return features

    def _encode_pictures(
        self, video: VideoPart, duration_s: float, place: str, sample_id: str
    ) -> dict[Modality, Features]:
        features = dict[Modality, Features]()
        for name, rate, side in self._pictured():
            pictured: FrameEncoder | None = getattr(self, name)
            rate, side = (rate, side) if pictured is None else (pictured.frame_rate, pictured.picture_side)
            pictures, times_s = read_pictures(video, duration_s, rate, side, place, sample_id)
            if pictured is None:
                features[name] = Features(flat_pictures(pictures), torch.tensor(times_s))  # type: ignore[index]
            else:
                values_RC, times_R = pictured.encode_pictures(pictures, times_s)
                if len(values_RC) != len(times_R) or bool((times_R.diff() <= 0).any()):
                    raise ConfigError(
                        f"{name}: the encoder gives {len(values_RC)} rows and {len(times_R)} times: as many are "
                        "needed, and rising",
                        str(getattr(self._config, name)),
                        "mend encode_pictures",
                    )
                features[name] = Features(values_RC, times_R)  # type: ignore[index]
        return features

    def _pictured(self) -> Iterator[tuple[str, float, int]]:
        """Name, rate and side of the modalities of pictures."""
        yield "frames", self._pictures.frame_rate, self._pictures.frame_side
        if self._pictures.sync_rate:
            yield "sync", self._pictures.sync_rate, self._pictures.sync_side


def encode_latents(config: EncodeLatentsConfig, context: Context) -> dict[str, Any]:
    """Encode the samples, and edits of those with solo tracks, into `shards`, with their facts in the index.

    Raises:
        StageError: no sample can be used.
        ConfigError: an autoencoder or encoder that cannot be loaded.
    """
    samples, bad = read_samples(config.samples)
    set_aside_path = context.folder / "set_aside.jsonl"
    set_aside = SetAside(set_aside_path, "encode_latents", read_set_aside(set_aside_path))
    set_aside.add(bad)
    if config.edits_per_sample and not any(sample.metadata.get("events") for sample in samples):
        context.say(
            f"edits_per_sample is {config.edits_per_sample}, and no sample has solo tracks (metadata.events): no edit "
            "is made"
        )
    autoencoder = load_autoencoder(config.autoencoder)
    encoders = ConditionEncoders(config.encoders, config.pictures)
    writer = ShardWriter(context.folder / "shards", config.samples_per_shard)
    slots = 1 + config.edits_per_sample  # a sample's numbers do not depend on which others can be used
    with context.progress("encoding sounds", len(samples)) as bar, one_thread():
        for index, sample in enumerate(samples):
            numbers = range(index * slots, (index + 1) * slots)
            if not all(writer.has(number) for number in numbers):
                place = f"{config.samples}: {sample.id}"
                try:
                    rows = list(_encode_with_edits(sample, config, autoencoder, encoders, set_aside, place))
                    for number, row in zip(numbers, rows, strict=False):
                        if not writer.has(number):
                            writer.write(number, row.sample, [], None, row.arrays)
                except BadSample as error:
                    set_aside.add([error])
            bar.advance(bar.task_ids[0])
    facts = {
        "autoencoder": autoencoder.digest,
        "sample_rate": autoencoder.sample_rate,
        "channels": autoencoder.channels,
        "hop_samples": autoencoder.hop_samples,
        "latent_dim": autoencoder.latent_dim,
        "conditions": encoders.facts(),
    }
    counts = writer.close({FACTS: facts})
    if not counts.get("samples"):
        raise StageError("encode_latents: no sample can be used", f"the reasons: {set_aside_path}", 2)
    return {"samples": counts["samples"], "set_aside": len(set_aside.rows)}


def encode_track(autoencoder: Autoencoder, samples_CN: Tensor) -> EncodedTrack:
    """Mean and deviation of a track's latents, normalized by the autoencoder's own statistics."""
    with torch.no_grad():
        distribution = autoencoder.encode_distribution(samples_CN)
        mean_DT = autoencoder.normalize(distribution.mean)
        deviation_DT = (
            autoencoder.normalize(distribution.mean + torch.exp(0.5 * distribution.log_variance)) - mean_DT
        )
    return EncodedTrack(mean_DT, deviation_DT)


def load_track(audio_part: AudioPart, autoencoder: Autoencoder, sample_id: str, place: str) -> Tensor:
    """The sound of a part `[C, N]` as the autoencoder takes it.

    Raises:
        BadSample: it cannot be read.
    """
    try:
        waveform = load(
            audio_part.path, audio_part.start_s, audio_part.end_s, sample_rate=autoencoder.sample_rate
        )
    except AudioError as error:
        raise BadSample(place, sample_id, str(error), UNREADABLE) from error
    return set_channels(waveform.samples_CN, autoencoder.channels)


# Private


def _encode_with_edits(
    sample: Sample,
    config: EncodeLatentsConfig,
    autoencoder: Autoencoder,
    encoders: ConditionEncoders,
    set_aside: SetAside,
    place: str,
) -> Iterator[_Row]:
    """The sample with its arrays, and then its edits; edits that cannot be made are set aside alone.

    Raises:
        BadSample: it has no wanted sound, or one that is silent, not finite or shorter than a latent; or its video or
            a track cannot be read.
    """
    request = sound_request(sample, place)
    if request.target is None:
        raise BadSample(place, sample.id, "has no sound in the assistant's message", "no wanted sound")
    wanted_CN = load_track(request.target, autoencoder, sample.id, place)
    _check_encodable(wanted_CN, autoencoder, sample.id, place)
    track_CN = None
    if request.track is not None:
        track_CN = load_track(request.track, autoencoder, sample.id, place)
        if track_CN.shape != wanted_CN.shape:
            lengths = f"{track_CN.shape[1]} and {wanted_CN.shape[1]} samples"
            raise BadSample(
                place, sample.id, f"track and wanted sound have {lengths}", "tracks of two lengths"
            )
    yield _encode_row(sample, wanted_CN, track_CN, autoencoder, encoders, place)
    folder, rate, channels = config.samples.parent, autoencoder.sample_rate, autoencoder.channels
    try:
        edits = draw_edits(sample, folder, rate, channels, config.edits_per_sample, place)
    except BadSample as error:
        set_aside.add([error])
        return
    for edit in edits:
        try:
            _check_encodable(edit.wanted_CN, autoencoder, edit.sample.id, place)
            row = _encode_row(edit.sample, edit.wanted_CN, edit.input_CN, autoencoder, encoders, place)
        except BadSample as error:
            set_aside.add([error])
            continue
        yield row


def _encode_row(
    sample: Sample,
    wanted_CN: Tensor,
    track_CN: Tensor | None,
    autoencoder: Autoencoder,
    encoders: ConditionEncoders,
    place: str,
) -> _Row:
    arrays: dict[str, bytes] = {}

    def put(name: str, array: Tensor, made_by: str) -> None:
        arrays[name] = array_bytes(array, made_by)

    for name, samples_CN in (("", wanted_CN), ("input_", track_CN)):
        if samples_CN is not None:
            encoded = encode_track(autoencoder, samples_CN)
            put(f"{name}mean", encoded.mean_DT, autoencoder.digest)
            put(f"{name}deviation", encoded.deviation_DT, autoencoder.digest)
    facts = encoders.facts()
    for modality, features in encoders.encode(
        sample, wanted_CN.shape[1] / autoencoder.sample_rate, place
    ).items():
        made_by = facts[modality]["made_by"]
        put(modality, features.values_RC, made_by)
        if features.times_R is not None:
            put(f"{modality}_times", features.times_R, made_by)
        if features.pooled_C is not None:
            put(f"{modality}_pooled", features.pooled_C, made_by)
    return _Row(_without_files(sample), arrays)


def _without_files(sample: Sample) -> Sample:
    """The sample with its words alone: its sounds and pictures are arrays."""
    messages = []
    for message in sample.messages:
        content = [content_part for content_part in message.content if isinstance(content_part, TextPart)]
        if content:
            messages.append(message.model_copy(update={"content": content}))
    if not messages:
        messages = [Message(role="user", content=[TextPart(text="")])]
    return sample.model_copy(update={"messages": messages})


def _check_encodable(samples_CN: Tensor, autoencoder: Autoencoder, sample_id: str, place: str) -> None:
    if samples_CN.shape[1] < autoencoder.hop_samples:
        reason = f"{samples_CN.shape[1]} samples, and a latent is {autoencoder.hop_samples}"
        raise BadSample(place, sample_id, reason, "shorter than one latent")
    if not bool(samples_CN.isfinite().all()):
        raise BadSample(place, sample_id, "the sound holds values that are not finite", "not finite")
    if not bool(samples_CN.any()):
        raise BadSample(place, sample_id, "the wanted sound is silent: every sample is 0", "silent")


def _pictures_digest(rate: float, side: int) -> str:
    return f"pictures of {side} x {side} at {rate:g} per second"
