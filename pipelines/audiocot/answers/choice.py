"""Who answers a question: measurements, a model of transformers in a local folder, or an endpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, model_validator

from audiollm.endpoints import Budget, check_address
from audiollm.recipe.stages import ModelPath
from pipelines.steps.step import StepConfig

if TYPE_CHECKING:
    from audiollm.models.audio_llms.inputs import Turn


class AnswererConfig(StepConfig):
    """Settings of a step that is answered."""

    by: Literal["measured", "transformers", "endpoint"] = "measured"
    """Who answers: measurements and the truth of composed scenes; a model in a local folder; an endpoint."""
    model: ModelPath | None = None
    """Folder of a model of transformers, for `transformers`."""
    url: str | None = None
    """Address of an endpoint, for example http://localhost:8000/v1."""
    endpoint_model: str | None = None
    """The model's name at the endpoint."""
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable with the key; unset or empty: no key is sent."""
    max_tokens: int = Field(1024, ge=16)
    asks: int = Field(3, ge=1, le=10)
    """Requests of one answer: each after the first quotes what was wrong with the answer before it."""
    timeout_s: float = Field(120.0, gt=0)
    attempts: int = Field(4, ge=1)
    """Tries of each request to an endpoint; after the last one the run stops, and can be continued."""
    pause_s: float = Field(2.0, ge=0)
    frame_rate: float = Field(2.0, gt=0, le=30)
    """Pictures per second that are shown to a video model."""
    frame_side: int = Field(224, ge=28, le=1024)
    gpus: float = Field(0.0, ge=0)
    """Share of a GPU that a worker takes."""

    @model_validator(mode="after")
    def _goes_together(self) -> AnswererConfig:
        if self.by == "endpoint":
            if self.url is None or self.endpoint_model is None:
                raise ValueError("an endpoint needs url and endpoint_model")
            check_address(self.url)
        if self.by == "transformers" and self.model is None:
            raise ValueError("transformers needs model: the folder of a model")
        return self


class AnswerPlace(NamedTuple):
    """The file of the answers of a run, and what the run may spend on new ones."""

    path: Path
    budget: Budget


class AskedModel:
    """A model that is asked, through the answers that are kept; built in every worker process.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, config: AnswererConfig, place: AnswerPlace) -> None:
        from audiollm.evaluate.subjects.stored_answers import CountedChat, StoredAnswers

        self._stored = StoredAnswers(place.path, place.budget)
        self._chat: CountedChat
        if config.by == "endpoint":
            from audiollm.evaluate.subjects.chat import EndpointChat

            assert config.url is not None and config.endpoint_model is not None
            self._chat = EndpointChat(
                config.url, config.endpoint_model, config.key_variable, config.max_tokens, config.timeout_s,
                config.attempts, config.pause_s,
            )  # fmt: skip
            self._identity = f"{config.url} {config.endpoint_model} {config.max_tokens}"
        else:
            from audiollm.evaluate.subjects.chat import FolderChat
            from audiollm.files.atomic import folder_digest

            assert config.model is not None
            self._chat = FolderChat.load(config.model, config.max_tokens)
            self._identity = f"{folder_digest(config.model)} {config.max_tokens}"

    def reply(self, turns: Sequence[Turn]) -> str:
        """The answer to these turns, kept or new.

        Raises:
            BudgetSpent: the budget is spent.
            ChatError: there is no answer.
        """
        return self._stored.reply(self._chat, self._identity, turns)


def missing_model(step: str, config: AnswererConfig) -> str | None:
    """Name what an answerer lacks; None: nothing."""
    if config.by != "transformers" or config.model is None:
        return None
    if importlib.util.find_spec("transformers") is None:
        return f"{step}.model: needs the package transformers"
    if not (config.model / "config.json").is_file():
        return f"{step}.model: no model in {config.model} (config.json): give a model's folder"
    return None
