"""The family of transformers' audio LLMs: Qwen2-Audio, Qwen-Omni thinkers, Audio Flamingo 3, Voxtral and their like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from audiollm.errors import ConfigError
from audiollm.families.family import ModelFamily, ModelFolder, PolicySettings
from audiollm.families.listener.limits import MAX_ROWS

if TYPE_CHECKING:
    from audiollm.data.inspection import StreamRow
    from audiollm.data.records.source import LoadedSample
    from audiollm.families.answering import AnsweringModel
    from audiollm.families.listener.policy import ListenerPolicy
    from audiollm.generation.speaking.speech_generator import SpeechGenerator


class ListenerFolder:
    """A `ModelFolder` of a model that hears, or sees, and answers in words."""

    speaks = False
    has_likelihoods = True
    shares_prompt = False
    rollout_slots = MAX_ROWS

    def __init__(self, path: Path) -> None:
        self.path = path

    def policy(self, settings: PolicySettings) -> ListenerPolicy:
        """See `ModelFolder.policy`."""
        from audiollm.families.listener.policy import ListenerPolicy

        if settings.trained == "audio_ffn":
            raise ConfigError(
                "trained: audio_ffn is a part that this model does not have",
                str(self.path),
                "take all, adapter, or patterns of names",
            )
        return ListenerPolicy.load(
            self.path,
            settings.trained,
            settings.lora,
            reference=settings.reference,
            needs_reference=settings.needs_reference,
            pictures=settings.pictures,
        )

    def check_served(self) -> None:
        """See `ServedFolder.check_served`."""
        from audiollm.families.listener.serving import check_served_folder

        check_served_folder(self.path)

    def answering_model(self, codec: Path | None = None) -> AnsweringModel:
        """See `ModelFolder.answering_model`; such a model hears without a codec."""
        from audiollm.families.listener.answering import ListenerAnswers

        return ListenerAnswers(self.path)

    def generator(self, codec: Path | None = None) -> SpeechGenerator:
        """See `ModelFolder.generator`."""
        raise ConfigError(
            "this model answers in words alone", str(self.path), "give a model that was trained to speak"
        )

    def sample_rows(self, loaded: LoadedSample, answers: Sequence[int], place: str) -> list[list[StreamRow]]:
        """See `ModelFolder.sample_rows`."""
        from audiollm.families.listener.inspection import rows_of_answers

        return rows_of_answers(self.path, loaded, answers, place)


class ListenerFamily:
    """A `ModelFamily`."""

    def open(self, folder: Path) -> ModelFolder:
        """See `ModelFamily.open`."""
        return ListenerFolder(folder)


FAMILY: ModelFamily = ListenerFamily()
