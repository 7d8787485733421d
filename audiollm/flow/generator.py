"""A trained model with its autoencoder: sounds from conditions, by a seed.

The noise of a sound depends on its key alone: what is sampled beside it changes no more than the rounding. Sounds
longer than those of the training are made in windows, each of which keeps the end of the one before it.

Shapes: C channels, N samples, D latent dimension, T latents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from audiollm.autoencoder import Autoencoder, latent_rate, load_autoencoder
from audiollm.data.records.sample import ContentPart, Sample, VideoPart
from audiollm.devices import default_device
from audiollm.errors import ConfigError
from audiollm.flow.conditions.own import MAX_WORDS
from audiollm.flow.conditions.reading import COT, sound_request
from audiollm.flow.encoding import ConditionEncoders, encode_track
from audiollm.flow.model.context import AudioContext, LatentState, hidden_context
from audiollm.flow.model.packed import Conditions, Features, Modality, pack_conditions
from audiollm.flow.model.rows import rows_of
from audiollm.flow.model.sampling import SamplerSettings, sample_latents
from audiollm.flow.settings import EncodersConfig, PicturesConfig, SoundSamplingConfig
from audiollm.flow.sound_model import SoundModel, check_autoencoder, check_guidance


class SoundSpec(NamedTuple):
    """A sound that is to be sampled."""

    conditions: Conditions
    key: str
    """Decides the noise: the seed and the sound's name."""


@dataclass
class SoundGenerator:
    """A model, its autoencoder, and the encoders of conditions."""

    model: SoundModel
    autoencoder: Autoencoder
    encoders: ConditionEncoders
    device: torch.device
    tracks_remembered: int = 0
    """Encoded sounds that are kept, so that a part of a track that is edited again is not encoded again."""
    _tracks: dict[bytes, Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def load(cls, model: Path, autoencoder: str | Path) -> SoundGenerator:
        """Load a `train_flow` stage's folder and its autoencoder; encoders of conditions as the training had them.

        Raises:
            ConfigError: something that cannot be loaded, or that is not what the model was trained with.
        """
        device = default_device()
        loaded, codec = SoundModel.from_pretrained(model).to(device), load_autoencoder(autoencoder)
        check_autoencoder(loaded.config, codec.digest, str(autoencoder))
        generator = cls(loaded, codec, _encoders_of(loaded), device)
        encoder_facts = generator.encoders.facts()
        for name, facts in loaded.config.conditions.items():
            if facts["made_by"] != encoder_facts[name]["made_by"]:
                raise ConfigError(
                    f"{name}: the encoder is not the one that the model was trained with",
                    facts["source"] or str(model),
                    "restore the encoder's folder",
                )
        return generator

    @property
    def sample_rate(self) -> int:
        return self.autoencoder.sample_rate

    def encode(self, samples_CN: Tensor) -> Tensor:
        """Normalized latents `[T, D]` of a sound; the last `tracks_remembered` are kept by content."""
        key = hashlib.sha256(
            repr(samples_CN.shape).encode() + samples_CN.contiguous().numpy().tobytes()
        ).digest()
        latents_TD = self._tracks.pop(key, None)
        if latents_TD is None:
            latents_TD = encode_track(self.autoencoder, samples_CN).mean_DT.T.contiguous()
        self._tracks[key] = latents_TD
        while len(self._tracks) > self.tracks_remembered:
            self._tracks.pop(next(iter(self._tracks)))
        return latents_TD

    def conditions(
        self,
        sample: Sample,
        duration_s: float,
        place: str,
        only: Collection[Modality] | None = None,
        start_s: float = 0.0,
        cot: str | None = None,
    ) -> Conditions:
        """The conditions of a sample that the model takes.

        Args:
            only: the modalities that are used; None: all.
            start_s: the second at which a part of the sound begins.
            cot: of this part; None: the sample's own, which tells times from 0, so that a later part has none.

        Raises:
            BadSample: see `ConditionEncoders.encode`.
        """
        sample = _shift_sample(sample, start_s, cot)
        request = sound_request(sample, place)
        if only is not None and not {"frames", "sync"} & set(only):
            sample = _without_video(sample)
        features_by_name = dict(self.encoders.encode(sample, duration_s, place))
        for name, text in (("caption", request.caption), ("cot", request.cot)):
            facts = self.model.config.conditions.get(name)
            if text and facts is not None and facts["kind"] == "words":
                assert self.model.words is not None
                rows = self.model.words.rows(text)[:MAX_WORDS]
                features_by_name[name] = Features(torch.tensor(rows, dtype=torch.float32))  # type: ignore[index]
        model_conditions = (
            set(self.model.config.conditions)
            if only is None
            else set(self.model.config.conditions) & set(only)
        )
        return {name: features for name, features in features_by_name.items() if name in model_conditions}

    def sample_latents(
        self,
        conditions: Conditions,
        count: int,
        settings: SamplerSettings,
        key: str,
        context: AudioContext | None = None,
    ) -> Tensor:
        """Normalized latents `[T, D]`.

        Args:
            count: number of latents.
            key: decides the noise: the seed and the sound's name.

        Raises:
            ConfigError: guidance, or a context, with a model that was not trained for it.
        """
        return self._sample([SoundSpec(conditions, key)], count, settings, context)[0]

    def sample_together(
        self, requests: Sequence[SoundSpec], count: int, settings: SamplerSettings
    ) -> list[Tensor]:
        """Normalized latents `[T, D]` of several sounds of `count` latents each, in one pass.

        Raises:
            ConfigError: guidance with a model that was not trained for it.
        """
        return self._sample(requests, count, settings, None)

    def _sample(
        self,
        requests: Sequence[SoundSpec],
        count: int,
        settings: SamplerSettings,
        context: AudioContext | None,
    ) -> list[Tensor]:
        if any(request.conditions for request in requests):
            check_guidance(self.model.config, settings, "sampling")
        if context is not None and not self.model.config.context_trained:
            raise ConfigError(
                "this model was trained without audio context, and cannot edit",
                "model",
                "train it with audio_context",
            )
        dim = self.model.latent_dim
        noise_LD = torch.cat(
            [torch.randn(count, dim, generator=noise_generator(request.key)) for request in requests]
        )
        latents = rows_of([count] * len(requests), self.device)
        if context is not None:
            context = AudioContext(context.latents_LD.to(self.device), context.state_L.to(self.device))
        packed = pack_conditions([request.conditions for request in requests], self.device)
        made_LD = sample_latents(
            self.model, noise_LD.to(self.device), packed, latents, settings, context
        ).cpu()
        return list(made_LD.split(count))

    def decode(self, latent_TD: Tensor, num_samples: int) -> Tensor:
        """Normalized latents to sound `[C, N]`."""
        with torch.no_grad():
            return self.autoencoder.decode(
                self.autoencoder.denormalize(latent_TD.T.contiguous()), num_samples
            )

    def make(self, conditions: Conditions, duration_s: float, settings: SamplerSettings, key: str) -> Tensor:
        """Sound `[C, N]` of `duration_s` from conditions.

        Raises:
            ConfigError: see `sample_latents`; or a sound shorter than one latent.
        """
        num_samples = self.samples_of(duration_s)
        count = self.latents_of(num_samples)
        return self.decode(self.sample_latents(conditions, count, settings, key), num_samples)

    def samples_of(self, duration_s: float) -> int:
        """Samples of a sound of `duration_s`.

        Raises:
            ConfigError: there would be none.
        """
        num_samples = round(duration_s * self.sample_rate)
        if num_samples < 1:
            raise ConfigError(
                f"duration: {duration_s:g} s is shorter than a sample", "command line", "give a longer one"
            )
        return num_samples

    def latents_of(self, num_samples: int) -> int:
        """Latents of so many samples."""
        return -(-num_samples // self.autoencoder.hop_samples)

    @property
    def latent_rate(self) -> float:
        return latent_rate(self.autoencoder)


def sampler_settings(config: SoundSamplingConfig) -> SamplerSettings:
    """The sampler's settings of a stage's or a command's."""
    return SamplerSettings(**config.model_dump())


def noise_generator(key: str) -> torch.Generator:
    """A generator that depends on `key` alone."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little"))


# Private


def _encoders_of(model: SoundModel) -> ConditionEncoders:
    """The encoders that made the conditions of the training."""
    conditions = model.config.conditions
    sources = {name: facts["source"] for name, facts in conditions.items() if facts["kind"] == "features"}
    pads = model.config.preset == "thinksound"
    pictures: dict[str, float] = {"sync_rate": 0.0}
    for name, rate, side in (("frames", "frame_rate", "frame_side"), ("sync", "sync_rate", "sync_side")):
        facts = conditions.get(name)
        if facts is not None:
            pictures[rate] = facts["rate"]
            if facts["kind"] == "pictures":
                pictures[side] = facts["side"]
    encoders = EncodersConfig.model_construct(
        caption=sources.get("caption"), cot=sources.get("cot"), frames=sources.get("frames"),
        sync=sources.get("sync"), pads=pads,
    )  # fmt: skip
    return ConditionEncoders(encoders, PicturesConfig(**pictures))


def _shift_sample(sample: Sample, start_s: float, cot: str | None) -> Sample:
    """The sample from a second on, with the CoT of this part."""
    if not start_s and cot is None:
        return sample

    def later(content_part: ContentPart) -> ContentPart:
        return (
            content_part.model_copy(update={"start_s": content_part.start_s + start_s})
            if isinstance(content_part, VideoPart)
            else content_part
        )

    return sample.with_parts(later).model_copy(update={"metadata": {**sample.metadata, COT: cot or ""}})


def _without_video(sample: Sample) -> Sample:
    messages = []
    for message in sample.messages:
        content = [content_part for content_part in message.content if content_part.type != "video"]
        if content:
            messages.append(message.model_copy(update={"content": content}))
    return sample.model_copy(update={"messages": messages})


CONTEXT_SHARE = 1 / 3
"""Share of a window that is kept from what is before it."""
_LONGER_S = 0.5
"""Seconds by which a sound may be longer than those of the training, and still be made at once."""

ConditionsAt = Callable[[float, float], Conditions]
"""The conditions of a part of a sound: its first second and its length in seconds."""


def make_in_windows(
    generator: SoundGenerator,
    conditions_at: ConditionsAt,
    duration_s: float,
    settings: SamplerSettings,
    key: str,
) -> Tensor:
    """Sound `[C, N]` of any length from conditions; at once where the training had sounds as long.

    Raises:
        ConfigError: a longer one, and the model was trained without audio context; or see `SoundGenerator.make`.
    """
    check_length(generator, duration_s)
    if fits_at_once(generator, duration_s):
        return generator.make(conditions_at(0.0, duration_s), duration_s, settings, key)
    num_samples = generator.samples_of(duration_s)
    context = hidden_context(generator.latents_of(num_samples), generator.model.latent_dim)
    latents_TD = fill_latents(generator, context, 0.0, conditions_at, settings, key)
    return generator.decode(latents_TD, num_samples)


def fits_at_once(generator: SoundGenerator, duration_s: float) -> bool:
    """Whether a sound is no longer than those of the training, or by little."""
    return duration_s <= generator.model.config.longest_s + _LONGER_S


def check_length(generator: SoundGenerator, duration_s: float) -> None:
    """Refuse a length that cannot be made.

    Raises:
        ConfigError: it is longer than the sounds of the training, and the model was trained without audio context.
    """
    config = generator.model.config
    if not fits_at_once(generator, duration_s) and not config.context_trained:
        raise ConfigError(
            f"{duration_s:g} s: the model was trained on {config.longest_s:.1f} s, and cannot continue a sound",
            "sampling",
            "make a shorter one, or train with audio_context",
        )


def fill_latents(
    generator: SoundGenerator,
    context: AudioContext,
    start_s: float,
    conditions_at: ConditionsAt,
    settings: SamplerSettings,
    key: str,
) -> Tensor:
    """Make all latents of a context that are not kept, window by window, `[T, D]`.

    Args:
        start_s: the second of the track at which the context begins.
    """
    rate = generator.latent_rate
    total = len(context.state_L)
    window = max(2, round(generator.model.config.longest_s * rate))
    latents_TD, state_T = context.latents_LD.clone(), context.state_L.clone()
    missing_latents = (~context.fixed_L).nonzero()[:, 0]
    if not len(missing_latents):
        return latents_TD
    first, last = int(missing_latents[0]), int(missing_latents[-1]) + 1
    number = 0
    while first < last:
        begin = 0 if total <= window else max(0, min(first - round(window * CONTEXT_SHARE), total - window))
        end = min(total, begin + window)
        window_context = AudioContext(latents_TD[begin:end], state_T[begin:end])
        conditions = conditions_at(start_s + begin / rate, (end - begin) / rate)
        made_TD = generator.sample_latents(
            conditions, end - begin, settings, f"{key}/{number}", window_context
        )
        latents_TD[begin:end] = made_TD
        state_T[begin:end] = LatentState.FIXED
        first, number = end, number + 1
    return latents_TD
