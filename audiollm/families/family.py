"""A family of models: the only place that knows a model's kind.

A family opens a folder, and what it opens loads the model for whoever needs it: a policy to train, a model that answers
in words, one that speaks. Families are found by the `model_type` in `config.json` (`registry.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from audiollm.data.records.video_clips import PictureSettings
from audiollm.train.settings import LoRASettings, PromptMix, Trained

if TYPE_CHECKING:
    from audiollm.data.inspection import StreamRow
    from audiollm.data.records.source import LoadedSample
    from audiollm.families.answering import AnsweringModel
    from audiollm.families.interpreting import InterpretingModel
    from audiollm.families.packed_training import PackedTraining
    from audiollm.families.policy import Policy
    from audiollm.families.training_memory import UnloadedModel
    from audiollm.generation.speaking.speech_generator import SpeechGenerator
    from audiollm.models.frozen.formats import SmallFormat
    from audiollm.train.supervised_settings import TrainConfig

MAX_TOKENS = 8_192
"""Most positions of the answers to one prompt together, where nothing else is given."""


@dataclass(frozen=True)
class PolicySettings:
    """How a model is loaded as a policy."""

    trained: Trained = "all"
    """All weights, `audio_ffn`, an `adapter` (LoRA), or patterns of parameter names."""
    lora: LoRASettings | None = None
    """Read with `trained: adapter` alone."""
    reference: Path | None = None
    """Folder of another model as the reference; None: the model itself."""
    needs_reference: bool = False
    """Whether a reference is loaded."""
    max_tokens: int = MAX_TOKENS
    """Most positions of the answers to one prompt together, for families that pack."""
    prompt_mix: PromptMix | None = None
    """How often a talker's prompts are shown in another form; None: never."""
    pictures: PictureSettings | None = None
    """How the pictures of videos are shown; None: samples with videos are refused."""


class ModelFolder(Protocol):
    """The folder of a model, opened without its weights."""

    @property
    def path(self) -> Path:
        """The folder itself, with `config.json`."""

    @property
    def speaks(self) -> bool:
        """Whether the model can answer in speech."""

    @property
    def has_likelihoods(self) -> bool:
        """Whether the likelihood of a text under the model can be read beside a recording (the gate of captions)."""

    @property
    def shares_prompt(self) -> bool:
        """Whether the rollouts of a prompt read its rows once, for all of them."""

    @property
    def rollout_slots(self) -> int:
        """Most rollouts that are sampled side by side."""

    def policy(self, settings: PolicySettings) -> Policy[Any, Any, Any]:
        """Load the model as a policy, on the CPU.

        Raises:
            ConfigError: the model does not load, or the settings do not fit it.
        """

    def answering_model(self, codec: Path | None = None) -> AnsweringModel:
        """Load the model to answer in words, on the default device.

        Args:
            codec: folder of the codec that it hears with; None: that of its run, where it needs one.

        Raises:
            ConfigError: the model or its codec does not load.
        """

    def generator(self, codec: Path | None = None) -> SpeechGenerator:
        """Load the model to speak, on the default device.

        Raises:
            ConfigError: the model answers in words alone, or it or its codec does not load.
        """

    def sample_rows(self, loaded: LoadedSample, answers: Sequence[int], place: str) -> list[list[StreamRow]]:
        """Lay out a prompt with each of some answers, row by row, as `inspect` shows it; without the weights.

        Args:
            loaded: a sample with answers to choose among.
            answers: their numbers.
            place: where the sample was read, for errors.

        Raises:
            BadSample: the model cannot take the sample.
        """


@runtime_checkable
class InterpreterFolder(ModelFolder, Protocol):
    """The folder of a model that interprets speech while it listens."""

    def interpreter(self, codec: Path | None = None) -> InterpretingModel:
        """Load the model to interpret, on the default device.

        Args:
            codec: folder of the codec that it hears with; None: that of its run, where it needs one.

        Raises:
            ConfigError: it or its codec does not load.
        """


@runtime_checkable
class SmallGeneratorFolder(ModelFolder, Protocol):
    """The folder of a model that can speak with its weights in fewer bytes than float32 has."""

    def small_generator(self, codec: Path | None, dtype: SmallFormat) -> SpeechGenerator:
        """Load the model to speak; see `ModelFolder.generator`.

        Args:
            dtype: how its linear layers are held in memory.
        """


@runtime_checkable
class PlannedFolder(ModelFolder, Protocol):
    """The folder of a model whose training is planned from config.json alone."""

    def planned_model(self, trained: Trained, lora: LoRASettings | None) -> UnloadedModel:
        """Make the model without memory, with what is trained chosen as `policy` does.

        Raises:
            ConfigError: as `policy` has it.
        """


class ModelFamily(Protocol):
    """Models of one kind."""

    def open(self, folder: Path) -> ModelFolder:
        """Open a folder that holds a model of this family.

        Args:
            folder: with `config.json`.
        """


@runtime_checkable
class PackedFamily(ModelFamily, Protocol):
    """Models that `train` makes from scratch too, on packs of rows; those of other families learn as policies."""

    def packed_training(self, config: TrainConfig) -> PackedTraining:
        """Open what the settings of `train` begin from: a folder, or a shape."""
