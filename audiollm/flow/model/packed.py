"""Conditions of samples as features, one sample at a time, and packed for a model.

A modality that a sample does not have is None there, and has no rows in a pack.

Shapes: B samples, R rows of one modality, F frames, C features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from audiollm.flow.model.rows import SampleRows, rows_of
from audiollm.models.pretrained import is_finite

Modality = Literal["frames", "sync", "caption", "cot"]
"""The modalities that a sound may be made from: frames of the picture, synchronisation features of the picture, the
caption, and the chain of thought (which sounds, when, in what order, how)."""
MODALITIES: tuple[Modality, ...] = get_args(Modality)
TIMED: tuple[Modality, ...] = ("frames", "sync")
"""Modalities whose rows have a time."""


class Features(NamedTuple):
    """One modality of one sample."""

    values_RC: Tensor
    """Features, a row for each frame or token; at least one."""
    times_R: Tensor | None = None
    """Seconds of each row from the beginning of the sound, rising; for frames and synchronisation."""
    pooled_C: Tensor | None = None
    """The encoder's summary of the whole, for a caption."""


Conditions = Mapping[Modality, Features]
"""The modalities of one sample; an absent one is not a key."""


class PackedModality(NamedTuple):
    """One modality of B samples."""

    values_RC: Tensor
    times_R: Tensor
    """Seconds; for text zeros, or the times that it names where its encoder is trained along."""
    rows: SampleRows


@dataclass(frozen=True)
class PackedConditions:
    """The conditions of B samples; a modality that no sample has is not a key."""

    size: int
    """Number of samples."""
    features: Mapping[Modality, PackedModality]
    pooled_caption: tuple[Tensor, Tensor] | None = None
    """Summaries of captions `[N, C]` and the samples that they belong to (int64 `[N]`)."""

    def lengths(self, modality: Modality) -> tuple[int, ...]:
        """Rows of each sample; zeros where no sample has the modality."""
        packed = self.features.get(modality)
        return packed.rows.lengths if packed else (0,) * self.size

    def without(self, modalities: Sequence[Modality]) -> PackedConditions:
        """The conditions without these modalities, in every sample."""
        remaining = {name: features for name, features in self.features.items() if name not in modalities}
        pooled = None if "caption" in modalities else self.pooled_caption
        return replace(self, features=remaining, pooled_caption=pooled)


def pack_conditions(conditions: Sequence[Conditions], device: torch.device) -> PackedConditions:
    """Put the conditions of samples end to end.

    Raises:
        ValueError: features that differ in width, are not finite, or have times that do not rise.
    """
    packed: dict[Modality, PackedModality] = {}
    for modality in MODALITIES:
        features_by_sample = [sample_conditions.get(modality) for sample_conditions in conditions]
        present = [features for features in features_by_sample if features is not None]
        if not present:
            continue
        for number, features in enumerate(features_by_sample):
            if features is not None:
                _check_condition_features(features, modality, number, present[0].values_RC.shape[1])
        values_RC = torch.cat([features.values_RC for features in present]).to(device)
        times_R = torch.cat([_times(features) for features in present]).to(device)
        lengths = [0 if features is None else len(features.values_RC) for features in features_by_sample]
        packed[modality] = PackedModality(values_RC, times_R, rows_of(lengths, device))
    pooled = [
        (number, sample_conditions["caption"].pooled_C)
        for number, sample_conditions in enumerate(conditions)
        if "caption" in sample_conditions
    ]
    summaries = [(number, summary) for number, summary in pooled if summary is not None]
    if not summaries:
        return PackedConditions(len(conditions), packed)
    numbers = torch.tensor([number for number, _ in summaries], device=device)
    together = torch.stack([summary for _, summary in summaries]).to(device)
    return PackedConditions(len(conditions), packed, (together, numbers))


def _times(features: Features) -> Tensor:
    if features.times_R is None:
        return torch.zeros(len(features.values_RC))
    return features.times_R.float()


def _check_condition_features(features: Features, modality: Modality, number: int, width: int) -> None:
    values_RC, times_R = features.values_RC, features.times_R
    if values_RC.ndim != 2 or not len(values_RC):
        raise ValueError(
            f"{modality} of sample {number}: features are [rows >= 1, width], not {list(values_RC.shape)}"
        )
    if values_RC.shape[1] != width:
        raise ValueError(
            f"{modality} of sample {number}: {values_RC.shape[1]} features per row, others have {width}"
        )
    if not is_finite(values_RC):
        raise ValueError(f"{modality} of sample {number}: features are not finite")
    if (times_R is not None) != (modality in TIMED):
        raise ValueError(
            f"{modality} of sample {number}: " + ("no times" if times_R is None else "text has no times")
        )
    if times_R is not None and (len(times_R) != len(values_RC) or bool((times_R.diff() <= 0).any())):
        raise ValueError(
            f"{modality} of sample {number}: one rising time for each of the {len(values_RC)} rows is needed"
        )
