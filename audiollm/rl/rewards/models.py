"""Rewards by models: a trained reward model, a process reward model, and a judge behind an endpoint."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from audiollm.data.records.sample import ContentPart, RatedAnswer, Sample, TextPart
from audiollm.data.records.source import AudioClip, LoadedSample
from audiollm.devices import default_device
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.judging import read_points
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.subjects.chat import EndpointChat
from audiollm.rl.reward_models.model import RewardModel, load_reward_model
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer, ScoredStep, thought_steps
from audiollm.rl.rewards.settings import JudgeSettings, ModelSettings, StepModelSettings, StepSplit


@dataclass(frozen=True)
class ModelReward:
    """The reward `reward_model`: the score of whole answers."""

    model: RewardModel

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        return [
            self.model.score(_rated_record(answer, [answer.text]))[0] if answer.text.strip() else None
            for answer in batch
        ]


@dataclass(frozen=True)
class StepModelReward:
    """The reward `step_model`: the probabilities that steps of an answer are right, by a process reward model."""

    model: RewardModel
    split: StepSplit = "sentences"

    def __call__(self, batch: RewardBatch) -> list[list[ScoredStep] | None]:
        steps = [self._parts(answer) for answer in batch]
        records = [
            _rated_record(answer, [text for text, _ in answer_steps])
            for answer, answer_steps in zip(batch, steps, strict=True)
            if answer_steps
        ]
        scores = iter(self.model.step_scores_many(records) if records else [])
        return [
            self._scored(answer_steps, next(scores)[0]) if answer_steps else None for answer_steps in steps
        ]

    def _parts(self, answer: SampledAnswer) -> list[tuple[str, int | None]]:
        """The steps of the thought and, last, the answer, with their ends; none for an empty reply."""
        steps: list[tuple[str, int | None]] = [
            (step.text, step.end) for step in thought_steps(answer, self.split)
        ]
        return [*steps, (answer.parts.answer, None)] if answer.parts.answer else steps

    def _scored(self, steps: Sequence[tuple[str, int | None]], logits: Sequence[float]) -> list[ScoredStep]:
        values = torch.tensor(logits, dtype=torch.float64).sigmoid().tolist()
        return [ScoredStep(text, value, end) for (text, end), value in zip(steps, values, strict=True)]


def load_model_reward(settings: ModelSettings) -> ModelReward | StepModelReward:
    """Load a reward model from a local folder.

    Raises:
        ConfigError: there is none, or it scores whole answers where steps are to be scored, or the reverse.
    """
    device = default_device() if settings.device == "auto" else torch.device(settings.device)
    model = load_reward_model(settings.folder, device)
    if (model.scored == "steps") != isinstance(settings, StepModelSettings):
        reward_name = "reward_model" if model.scored == "answers" else "step_model"
        raise ConfigError(
            f"this reward model scores {model.scored}", str(settings.folder), f"name it {reward_name}"
        )
    if isinstance(settings, StepModelSettings):
        return StepModelReward(model, settings.split)
    return ModelReward(model)


@dataclass(frozen=True)
class JudgeReward:
    """The reward `judge`: points of a language model, 0 to 10, divided by 10. What was judged once is stored.

    Equal requests of a batch are one."""

    settings: JudgeSettings
    store: RowStore
    chat: EndpointChat = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        chat = EndpointChat(
            settings.endpoint,
            settings.model,
            settings.key_variable,
            timeout_s=settings.request_timeout_s,
            attempts=settings.attempts,
            pause_s=0.5,
        )
        object.__setattr__(self, "chat", chat)

    async def __call__(self, batch: RewardBatch) -> list[float | None]:
        gate = asyncio.Semaphore(self.settings.together)
        requests = [self._request(answer) for answer in batch]
        samples = {request: answer.sample.id for request, answer in zip(requests, batch, strict=True)}
        scoring = (self._score(request, sample, gate) for request, sample in samples.items())
        outcomes = dict(zip(samples, await asyncio.gather(*scoring, return_exceptions=True), strict=True))
        for outcome in outcomes.values():  # raised when all have been asked: what was answered is stored
            if isinstance(outcome, BaseException):
                raise outcome
        return [_points_of(outcomes[request]) for request in requests]

    async def _score(self, prompt: str, sample: str, gate: asyncio.Semaphore) -> float | None:
        content = ["judge", self.settings.endpoint, self.settings.model, prompt]
        row = self.store.get(*content)
        if row is None:
            async with gate:
                verdict = await asyncio.to_thread(self.chat.ask, [prompt])
            row = {"sample": sample, "verdict": verdict}
            self.store.add(row, *content)
        return read_points(str(row["verdict"]))

    def _request(self, answer: SampledAnswer) -> str:
        question = "\n".join(answer.sample.texts("user"))
        replacements = {"{question}": question, "{key}": answer.key or "(none)", "{answer}": answer.text}
        pattern = "|".join(re.escape(name) for name in replacements)
        return re.sub(pattern, lambda match: replacements[match[0]], self.settings.prompt)


def _points_of(outcome: float | BaseException | None) -> float | None:
    assert not isinstance(outcome, BaseException)
    return outcome


def _rated_record(answer: SampledAnswer, texts: Sequence[str]) -> LoadedSample:
    """The prompt with the answer, a part per text, as reward models read it."""
    content: list[ContentPart] = [TextPart(text=text) for text in texts]
    steps: list[Any] | None = [0.0] * len(content) if len(content) > 1 else None
    rated = RatedAnswer(content=content, steps=steps)
    loaded = answer.question
    if loaded is not None:
        return replace(loaded, sample=loaded.sample.model_copy(update={"answers": [rated]}))
    sample = answer.sample
    messages = sample.messages[:-1] if sample.messages[-1].role == "assistant" else sample.messages
    record = Sample(
        id=sample.id, messages=messages, task=sample.task, metadata=sample.metadata, answers=[rated]
    )
    clips = [AudioClip(p.path, sample.id, p.path, p.start_s, p.end_s) for p in record.audio_parts()]
    return LoadedSample(record, [], tuple(clips))
