"""Encoded sounds to train on: shards of one autoencoder, which of their samples can be used, and one sample read.

Shapes: T latent frames, D latent dimension, R rows of features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from audiollm.data.records.shards import Shards
from audiollm.data.records.source import LoadedSample
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.flow.conditions.own import MAX_WORDS, WordRow, Words
from audiollm.flow.conditions.reading import sound_request
from audiollm.flow.encoding import FACTS
from audiollm.flow.model.packed import MODALITIES, TIMED, Features, Modality
from audiollm.flow.sound_model import ConditionFacts
from audiollm.models.pretrained import is_finite

_MOST_UNSEEN_S = 1.0
"""Seconds, beside two rows, by which features may end before their sound: an encoder of windows leaves out a last,
incomplete one."""


@dataclass(frozen=True)
class CorpusFacts:
    """The facts that all sources of a training have in common."""

    autoencoder: str
    """Digest."""
    sample_rate: int
    channels: int
    hop_samples: int
    latent_dim: int
    conditions: Mapping[str, ConditionFacts]

    @property
    def latent_rate(self) -> float:
        return self.sample_rate / self.hop_samples


@dataclass(frozen=True)
class EncodedSound:
    """A sample to train on: draws of its latents are made anew at every step."""

    id: str
    mean_TD: Tensor
    deviation_TD: Tensor
    input_mean_TD: Tensor | None
    """The track before an edit; None: the sample is no edit."""
    input_deviation_TD: Tensor | None
    conditions: Mapping[Modality, Features]

    def __len__(self) -> int:
        return len(self.mean_TD)

    def window(self, first: int, count: int, latent_rate: float) -> EncodedSound:
        """A part of the sound with the pictures of its time. A CoT, whose times no longer hold, is dropped."""
        cut = slice(first, first + count)
        start_s, end_s = first / latent_rate, (first + count) / latent_rate
        conditions: dict[Modality, Features] = {}
        for name, features in self.conditions.items():
            if features.times_R is None:
                if name != "cot":
                    conditions[name] = features
                continue
            inside_R = (features.times_R >= start_s) & (features.times_R < end_s)
            if bool(inside_R.any()):
                conditions[name] = Features(
                    features.values_RC[inside_R], features.times_R[inside_R] - start_s
                )
        input_mean_TD = None if self.input_mean_TD is None else self.input_mean_TD[cut]
        given_deviation = None if self.input_deviation_TD is None else self.input_deviation_TD[cut]
        return replace(
            self,
            mean_TD=self.mean_TD[cut],
            deviation_TD=self.deviation_TD[cut],
            input_mean_TD=input_mean_TD,
            input_deviation_TD=given_deviation,
            conditions=conditions,
        )


class UsableSounds(NamedTuple):
    """The samples of each source that can be used, by number, and what is common to all."""

    train: list[list[int]]
    test: list[tuple[int, int]]
    """Source and number of held-out samples."""
    longest: int
    """Latents of the longest sound."""
    bad: list[BadSample]
    texts: list[str]
    """Captions and CoTs of the training samples, for the vocabulary."""
    pooled_width: int
    """Width of captions' own summaries; 0: there are none."""
    present: tuple[Modality, ...]
    """Modalities that at least one training sample has."""
    has_pairs: bool
    """Whether a training sample is an edit."""


def open_corpus(paths: Sequence[Path]) -> tuple[list[Shards], CorpusFacts]:
    """The shards of `encode_latents`, and their common facts.

    Raises:
        StageError: a source without encoded sounds, or sources of different autoencoders or encoders.
    """
    sources, facts = [Shards(path) for path in paths], []
    for source in sources:
        facts_of_source = source.facts.get(FACTS)
        if not isinstance(facts_of_source, dict):
            raise StageError(
                f"{source.name} holds no encoded sounds", "give the shards of `encode_latents`", 2
            )
        facts.append(_corpus_facts(facts_of_source, source.name))
    for source, source_facts in zip(sources, facts, strict=True):
        if source_facts != facts[0]:
            differing = [key for key, value in vars(source_facts).items() if value != vars(facts[0])[key]]
            raise StageError(
                f"{source.name} was encoded otherwise than {sources[0].name}: {', '.join(differing)}",
                "encode all sources with the same autoencoder and encoders",
                2,
            )
    return sources, facts[0]


def survey_sounds(sources: Sequence[Shards], facts: CorpusFacts) -> UsableSounds:
    """Read every sample once, so that each one that cannot be used is named before training starts."""
    train: list[list[int]] = []
    test: list[tuple[int, int]] = []
    bad = [error for source in sources for error in source.bad]
    texts: list[str] = []
    longest, pooled, present, has_pairs = 0, 0, set[Modality](), False
    for number, source in enumerate(sources):
        train.append([])
        for index in range(len(source)):
            try:
                loaded = source[index]
                sound = read_sound(loaded, facts, None)
            except BadSample as error:
                bad.append(error)
                continue
            if loaded.sample.is_held_out:
                test.append((number, index))
                continue
            train[-1].append(index)
            request = sound_request(loaded.sample, loaded.sample.id)
            texts += [text for text in (request.caption, request.cot) if text]
            longest, has_pairs = max(longest, len(sound)), has_pairs or sound.input_mean_TD is not None
            present |= set(sound.conditions)
            summary = sound.conditions["caption"].pooled_C if "caption" in sound.conditions else None
            pooled = pooled if summary is None else len(summary)
    modalities = tuple(name for name in MODALITIES if name in present)
    return UsableSounds(train, test, longest, bad, texts, pooled, modalities, has_pairs)


def read_sound(loaded: LoadedSample, facts: CorpusFacts, words: Words | None) -> EncodedSound:
    """One sample with its arrays, each by the digest of what made it.

    Args:
        words: the vocabulary of encoders that are trained along; None: texts are given one word, for a survey.

    Raises:
        BadSample: an array that is missing, damaged, not finite, of another maker, or of another length than the sound.
    """
    sample = loaded.sample

    def bad(reason: str, kind: str) -> BadSample:
        return BadSample(sample.id, sample.id, reason, kind)

    def latents(name: str) -> Tensor:
        array_DT = loaded.array(name, facts.autoencoder)
        if array_DT.ndim != 2 or array_DT.shape[0] != facts.latent_dim:
            raise bad(
                f"array {name!r} is {list(array_DT.shape)}, not [{facts.latent_dim}, T]",
                "latents of another shape",
            )
        if not is_finite(array_DT):
            raise bad(f"array {name!r} holds values that are not finite", "not finite")
        return array_DT.float().T.contiguous()

    mean_TD, deviation_TD = latents("mean"), latents("deviation")
    pair = (
        (latents("input_mean"), latents("input_deviation")) if "input_mean" in loaded.arrays else (None, None)
    )
    for name, array_TD in (
        ("deviation", deviation_TD),
        ("input_mean", pair[0]),
        ("input_deviation", pair[1]),
    ):
        if array_TD is not None and array_TD.shape != mean_TD.shape:
            raise bad(
                f"array {name!r} has {len(array_TD)} latents, the mean {len(mean_TD)}",
                "latents of another length",
            )
    conditions = _read_conditions(loaded, facts, words, len(mean_TD) / facts.latent_rate)
    return EncodedSound(sample.id, mean_TD, deviation_TD, pair[0], pair[1], conditions)


# Private


def _read_conditions(
    loaded: LoadedSample, facts: CorpusFacts, words: Words | None, duration_s: float
) -> dict[Modality, Features]:
    sample, features = loaded.sample, dict[Modality, Features]()
    request = sound_request(sample, sample.id)
    for name in MODALITIES:
        modality_facts = facts.conditions.get(name)
        if modality_facts is None:
            continue
        if modality_facts.kind == "words":
            text = request.caption if name == "caption" else request.cot
            if text:
                rows = (words.rows(text) if words else [WordRow(0)])[:MAX_WORDS]
                features[name] = Features(torch.tensor(rows, dtype=torch.float32))
            continue
        if name not in loaded.arrays:
            continue
        values_RC = loaded.array(name, modality_facts.made_by)
        times_R = loaded.array(f"{name}_times", modality_facts.made_by) if name in TIMED else None
        pooled_C = (
            loaded.array(f"{name}_pooled", modality_facts.made_by)
            if f"{name}_pooled" in loaded.arrays
            else None
        )
        if not is_finite(values_RC):
            raise BadSample(
                sample.id, sample.id, f"array {name!r} holds values that are not finite", "not finite"
            )
        if times_R is not None and (
            len(times_R) != len(values_RC) or not _covers_duration(times_R.tolist(), duration_s)
        ):
            reason = f"{name}: {len(values_RC)} rows to {float(times_R[-1]):.2f} s, the sound has {duration_s:.2f} s"
            raise BadSample(sample.id, sample.id, reason, "features of another length")
        features[name] = Features(values_RC, times_R, pooled_C)
    return features


def _covers_duration(times_s: Sequence[float], duration_s: float) -> bool:
    """Whether rows of features at these times are those of a sound of this length."""
    spacing_s = times_s[-1] - times_s[-2] if len(times_s) > 1 else duration_s
    first_end_s = duration_s - 2 * spacing_s - _MOST_UNSEEN_S
    return times_s[0] >= -0.05 and first_end_s <= times_s[-1] <= duration_s + 0.05


def _corpus_facts(values: Mapping[str, Any], where: str) -> CorpusFacts:
    try:
        conditions = {name: ConditionFacts(**condition) for name, condition in values["conditions"].items()}
        plain = {
            name: values[name]
            for name in ("autoencoder", "sample_rate", "channels", "hop_samples", "latent_dim")
        }
        return CorpusFacts(**plain, conditions=conditions)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"facts of encoded sounds: {error}", where, "encode the sounds again") from error
