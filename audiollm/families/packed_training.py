"""Families whose models `train` makes from scratch, or goes on from, on packs of rows of text and codes.

The stage has the settings, the samples and their packs, the loop and the boards. The family makes the model of its
settings, gives its losses, and writes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import FeatureShape
from audiollm.data.packing import PackedBatch
from audiollm.generation.engine.request import Request
from audiollm.generation.speaking.protocol import GenerationEngine
from audiollm.models.model_card import ModelCard
from audiollm.recipe.stages import StagePlan


class PackedModel(nn.Module, ABC):
    """A model and its losses as one module: the root that a distributed strategy wraps."""

    @property
    @abstractmethod
    def num_codebooks(self) -> int:
        """Codebooks of its speech."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Weighted sums of cross entropies, in nats: `text`, `audio`, and without gradient `audio_by_codebook` `[K]`.

        Divided by the batch's `counts` (those of the whole step, where a step has several packs) they are means.
        """

    @abstractmethod
    def flops(self, pack: PackedBatch) -> float:
        """Count the operations of a pack, forward and backward."""

    @abstractmethod
    def engine(self, template: Template, requests: Sequence[Request]) -> GenerationEngine:
        """Return an engine with room for these requests, which reads the present weights."""

    @abstractmethod
    def empty_copy(self, device: torch.device, dtype: torch.dtype) -> PackedModel:
        """Return a copy without adapters, in eval mode, with weights to be overwritten; keeps random state."""


class PackedTraining(Protocol):
    """A model as the settings of `train` have it, opened without its weights."""

    @property
    def codec(self) -> dict[str, Any]:
        """`num_codebooks` and `codebook_size` of the model to begin from, else of the default codec; its `digest`."""

    @property
    def encoder(self) -> FeatureShape | None:
        """The features in which the model hears recordings; None: as codes.

        Raises:
            StageError: what the settings say of hearing does not fit together, or not the model to begin from.
        """

    def start_vocabulary(self) -> Tokenizer:
        """Return the vocabulary of the model to begin from, with the special tokens that it lacks."""

    def check(self) -> None:
        """Check that the training can run on this machine, before any sample is read.

        Raises:
            StageError: it cannot.
        """

    def build(self, template: Template, is_coded: bool) -> PackedModel:
        """Make the model on the CPU, and freeze what is not trained; new weights are drawn by torch.

        Args:
            is_coded: whether a source of the samples has codes.

        Raises:
            ConfigError, StageError: the model to begin from does not load, or does not go with settings or template.
        """

    def save(
        self,
        weights: Mapping[str, Tensor],
        template: Template,
        folder: Path,
        card: ModelCard,
        codec_folders: Sequence[str | None],
    ) -> PackedModel | None:
        """Write the model to `folder/model`, in Hugging Face layout, and an adapter alone to `folder/adapter`.

        Args:
            weights: of what `build` gave, whole, by name; frozen ones that were stored in fewer bytes are not there.
            codec_folders: where the codec may be, the likeliest first.

        Returns:
            The model as it was written, on the CPU; None where it is not at hand.
        """

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        """Estimate parameters, tokens, memory of a device, operations and disk.

        Args:
            plans: of the earlier stages, one of which may make the model to begin from.

        Raises:
            ConfigError, StageError: what it starts from is no model, or what is to be trained is not in it.
        """
