"""Scores of answers to a prompt, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from audiollm.data.records.sample import Sample
from audiollm.data.records.source import AudioClip, LoadedSample
from audiollm.errors import BadSample, ConfigError
from audiollm.evaluate.listening.audio_qa import read_choice
from audiollm.evaluate.listening.stage import choices_of
from audiollm.rl.reward.model import RewardModel
from pipelines.answers.select import text_of

ScoreAnswers = Callable[[Sample], list[float]]


def make_scorers(
    names: Sequence[str], reward_model: Path | None, samples: Sequence[Sample]
) -> dict[str, ScoreAnswers]:
    """The scorers of these names: `choice`, `exact`, `reward_model`.

    Args:
        reward_model: folder of a trained one, for the scorer of that name.
        samples: whose answers to the same question are its choices, where a sample names none.

    Raises:
        ConfigError: the folder holds no reward model.
    """
    made: dict[str, ScoreAnswers] = {}
    if "choice" in names:
        told = choices_of([s for s in samples if s.messages[-1].role == "assistant" and s.texts("assistant")])
        made["choice"] = partial(_choice_scores, told)
    if "exact" in names:
        made["exact"] = _exact_scores
    if reward_model is not None:
        made["reward_model"] = partial(_reward_scores, RewardModel.load(reward_model))
    return made


def check_labels(names: Sequence[str], samples: Sequence[Sample], where: str) -> None:
    """Check, before any answer is sampled, that some sample has what the scorers compare with.

    Raises:
        ConfigError: none has a right answer.
    """
    compared = sorted({"choice", "exact"}.intersection(names))
    if compared and not any(sample.messages[-1].role == "assistant" for sample in samples):
        raise ConfigError(
            f"score.{compared[0]}: no sample has a right answer",
            where,
            "end the messages of each with the assistant's right answer, or score by a reward_model",
        )


def _choice_scores(told: dict[str, tuple[str, ...]], sample: Sample) -> list[float]:
    right = _right(sample)
    question = " ".join(" ".join(sample.texts("user")).split())
    choices = sample.metadata.get("choices") or told.get(question, ())
    if right not in choices:
        raise BadSample(
            "", sample.id, "the right answer is none of the choices: give metadata.choices", "no choices"
        )
    wanted = list(choices).index(right)
    return [float(read_choice(text_of(answer), list(choices)) == wanted) for answer in sample.answers]


def _exact_scores(sample: Sample) -> list[float]:
    right = _right(sample)
    return [float(text_of(answer) == right) for answer in sample.answers]


def _reward_scores(model: RewardModel, sample: Sample) -> list[float]:
    clips = tuple(
        AudioClip(part.path, sample.id, part.path, part.start_s, part.end_s) for part in sample.audio_parts()
    )
    return model.score(LoadedSample(sample, [], clips))


def _right(sample: Sample) -> str:
    right = sample.metadata.get("right")
    if not isinstance(right, str):
        raise BadSample(
            "", sample.id, "has no right answer: its last message must be the assistant's", "no right answer"
        )
    return right
