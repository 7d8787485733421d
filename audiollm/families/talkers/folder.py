"""The folder of a talker, opened without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiollm.errors import ConfigError
from audiollm.families.family import PolicySettings

if TYPE_CHECKING:
    from audiollm.data.inspection import StreamRow
    from audiollm.data.records.source import LoadedSample
    from audiollm.families.adapting import TrainedPart
    from audiollm.families.answering import AnsweringModel
    from audiollm.families.talkers.generator import TalkerGenerator
    from audiollm.families.talkers.policy import TalkerPolicy
    from audiollm.families.training_memory import UnloadedModel
    from audiollm.train.settings import LoRASettings, Trained


class TalkerFolder:
    """A `ModelFolder`. A family gives `kind_class`; what loads torch is imported where it is needed."""

    speaks = True
    has_likelihoods = shares_prompt = False
    rollout_slots = 64

    def __init__(self, path: Path, kind_of: Any) -> None:
        """Open a folder.

        Args:
            kind_of: makes the `TalkerKind` of a folder.
        """
        self.path, self._kind_of = path, kind_of

    def policy(self, settings: PolicySettings) -> TalkerPolicy:
        """See `ModelFolder.policy`."""
        from audiollm.families.talkers.policy import TalkerPolicy

        _check_trained(settings.trained, self.path)
        if settings.pictures is not None:
            raise ConfigError("pictures: this model sees none", str(self.path), "leave it out")
        return TalkerPolicy(self._kind_of(self.path), settings)

    def planned_model(self, trained: Trained, lora: LoRASettings | None) -> UnloadedModel:
        """See `PlannedFolder.planned_model`."""
        from audiollm.families.talkers.planning import planned_talker

        return planned_talker(self._kind_of(self.path), _check_trained(trained, self.path), lora)

    def answering_model(self, codec: Path | None = None) -> AnsweringModel:
        """See `ModelFolder.answering_model`."""
        raise ConfigError(
            "this model speaks and writes nothing", str(self.path), "take one that answers in words"
        )

    def generator(self, codec: Path | None = None) -> TalkerGenerator:
        """See `ModelFolder.generator`."""
        from audiollm.codec import default_codec_folder, load_codec
        from audiollm.devices import default_device
        from audiollm.families.talkers.generator import TalkerGenerator
        from audiollm.families.talkers.policy import load_talker

        kind = self._kind_of(self.path)
        model = load_talker(kind).to(default_device())
        own = kind.codec_folder if kind.has_codec else default_codec_folder(self.path)
        return TalkerGenerator(model, kind, load_codec(codec or own))

    def sample_rows(self, loaded: LoadedSample, answers: Sequence[int], place: str) -> list[list[StreamRow]]:
        """See `ModelFolder.sample_rows`."""
        import torch

        from audiollm.families.prompts import prompted_contents
        from audiollm.families.talkers.inspection import speech_rows
        from audiollm.families.talkers.policy import spoken_answers

        kind = self._kind_of(self.path)
        with torch.device("meta"):
            model = kind.new_talker()
        prompted = prompted_contents(loaded, loaded, answers, place)
        return [speech_rows(kind, encoded) for encoded in spoken_answers(prompted, kind, model)]


def _check_trained(trained: Trained, path: Path) -> TrainedPart:
    """Raises: ConfigError: a part that talkers do not have."""
    if trained == "audio_ffn":
        raise ConfigError(
            "trained: audio_ffn is a part that this model does not have",
            str(path),
            "take all, adapter, or patterns of names",
        )
    return trained
