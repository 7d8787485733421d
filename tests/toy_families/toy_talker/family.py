"""The family, which the entry point names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from audiollm.errors import ConfigError
from audiollm.families.family import PolicySettings

if TYPE_CHECKING:
    from audiollm.data.inspection import StreamRow
    from audiollm.data.records.source import LoadedSample
    from audiollm.families.answering import AnsweringModel
    from toy_talker.generator import TalkerGenerator
    from toy_talker.policy import TalkerPolicy


class TalkerFolder:
    """A `ModelFolder`. Modules that load torch are imported where they are needed: `--help` is quick."""

    speaks = True
    has_likelihoods = shares_prompt = False
    rollout_slots = 64

    def __init__(self, path: Path) -> None:
        self.path = path

    def policy(self, settings: PolicySettings) -> TalkerPolicy:
        from toy_talker.policy import TalkerPolicy

        return TalkerPolicy(self.path, settings)

    def answering_model(self, codec: Path | None = None) -> AnsweringModel:
        raise ConfigError(
            "this model speaks and writes nothing", str(self.path), "take one that answers in words"
        )

    def generator(self, codec: Path | None = None) -> TalkerGenerator:
        from toy_talker.generator import TalkerGenerator
        from toy_talker.model import load_talker

        if codec is not None:
            raise ConfigError("this model has a codec of its own", "codec", "leave it out")
        return TalkerGenerator(load_talker(self.path))

    def sample_rows(self, loaded: LoadedSample, answers: Sequence[int], place: str) -> list[list[StreamRow]]:
        from audiollm.families.prompts import prompted_contents
        from audiollm.models.pretrained import load_model
        from toy_talker.answers import speech_rows, spoken_answers
        from toy_talker.model import MODEL_TYPE, TalkerConfig

        config = load_model(self.path, MODEL_TYPE, TalkerConfig)[0]
        prompted = prompted_contents(loaded, loaded, answers, place)
        return [speech_rows(answer) for answer in spoken_answers(prompted, config)]


class TalkerFamily:
    """A `ModelFamily`."""

    def open(self, folder: Path) -> TalkerFolder:
        return TalkerFolder(folder)


FAMILY = TalkerFamily()
