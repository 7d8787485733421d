"""Models that give several answers in words to a prompt, each from a seed of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from audiollm.audio import AudioError, load
from audiollm.data.records.sample import Message, RatedAnswer, Sample, TextPart
from audiollm.errors import BadSample
from audiollm.evaluate.report.store import RowStore
from audiollm.families.answering import AnswerError, AnsweringModel, AnswerRequest
from audiollm.families.registry import open_model_folder
from audiollm.models.audio_llms.inputs import turns_of
from pipelines.answers.score_store import conversation_content

RIGHT_ANSWER = "right answer"
"""Origin of the answer that a sample came with."""


@dataclass(frozen=True)
class AnswerSampling:
    """How answers are drawn."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int

    def seed_of(self, sample_id: str, number: int) -> int:
        """The seed of one answer: it depends on nothing that is sampled beside it."""
        return answer_seed(self.seed, sample_id, number)


class AnswerSampler(Protocol):
    """A model that is asked."""

    @property
    def fingerprint(self) -> str:
        """Changes when the model does."""

    def sample(self, sample: Sample, numbers: Sequence[int], sampling: AnswerSampling) -> list[str]:
        """Give the answers of these numbers to the messages of a sample.

        Raises:
            BadSample: a recording that cannot be read, or a prompt that the model does not take.
        """


class AnswerSource(Protocol):
    """Answers of one model to prompts, in words or in speech; what was answered before is kept."""

    block: int
    """Samples that are answered together."""

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Answer samples together. One that cannot be asked is passed over; `answers` says why."""

    def prompt_sample(self, sample: Sample) -> Sample:
        """The sample with nothing but the messages to be answered.

        Raises:
            BadSample: a recording of the prompt that cannot be read.
        """

    def right(self, sample: Sample) -> RatedAnswer | None:
        """The answer that the sample came with; None where it has none."""

    def answers(self, sample: Sample) -> list[RatedAnswer | None]:
        """All answers of the model to a sample; None for an empty one.

        Raises:
            BadSample: a recording that cannot be read, or a prompt that the model does not take.
        """


def answer_seed(seed: int, sample_id: str, number: int) -> int:
    """The seed of one answer."""
    digest = hashlib.sha256(f"{seed}/{sample_id}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def load_sampler(model: Path, codec: Path | None) -> AnswerSampler:
    """Load a model of any family from a folder.

    Raises:
        ConfigError: there is none.
    """
    return FolderSampler(open_model_folder(model).answering_model(codec))


class WrittenAnswers:
    """Answers in words: an `AnswerSource`."""

    block = 1

    def __init__(
        self, sampler: AnswerSampler, sampling: AnswerSampling, count: int, origin: str, store: RowStore
    ) -> None:
        self._sampler, self._sampling, self._count = sampler, sampling, count
        self._origin, self._store = origin, store

    def prepare(self, samples: Sequence[Sample]) -> None:
        """See `AnswerSource.prepare`; each sample is answered alone, when its answers are asked for."""

    def prompt_sample(self, sample: Sample) -> Sample:
        """See `AnswerSource.prompt_sample`; the words of the right answer are kept in the metadata."""
        messages, right = prompt_and_answer(sample)
        metadata = {**sample.metadata, **({"right": right} if right else {})}
        return sample.model_copy(update={"messages": messages, "answers": [], "metadata": metadata})

    def right(self, sample: Sample) -> RatedAnswer | None:
        """See `AnswerSource.right`."""
        _, right = prompt_and_answer(sample)
        return RatedAnswer(content=[TextPart(text=right)], origin=RIGHT_ANSWER) if right else None

    def answers(self, sample: Sample) -> list[RatedAnswer | None]:
        """See `AnswerSource.answers`."""
        return [
            RatedAnswer(content=[TextPart(text=text)], origin=self._origin) if text.strip() else None
            for text in self._texts(sample)
        ]

    def _texts(self, sample: Sample) -> list[str]:
        messages, _ = prompt_and_answer(sample)
        prompt = sample.model_copy(update={"messages": messages})
        conversation = conversation_content(messages, sample.id)
        key = [self._sampler.fingerprint, sample.id, conversation, asdict(self._sampling)]
        rows = [self._store.get(*key, number) for number in range(self._count)]
        missing = [number for number, row in enumerate(rows) if row is None]
        if missing:
            texts = self._sampler.sample(prompt, missing, self._sampling)
            for number, text in zip(missing, texts, strict=True):
                self._store.add({"text": text}, *key, number)
                rows[number] = {"text": text}
        return [str(row["text"]) for row in rows if row is not None]


class FolderSampler:
    """A model of any family as an `AnswerSampler`."""

    def __init__(self, model: AnsweringModel) -> None:
        self._model, self.fingerprint = model, model.fingerprint

    def sample(self, sample: Sample, numbers: Sequence[int], sampling: AnswerSampling) -> list[str]:
        """See `AnswerSampler.sample`."""
        try:
            recordings = [
                load(audio_part.path, audio_part.start_s, audio_part.end_s)
                for audio_part in sample.audio_parts()
            ]
            turns = turns_of(sample.messages, recordings)
            requests = [
                AnswerRequest(
                    turns,
                    sampling.seed_of(sample.id, number),
                    sampling.temperature,
                    sampling.top_p,
                    sampling.max_tokens,
                )
                for number in numbers
            ]
            return [answer.text for answer in self._model.answer(requests)]
        except (AnswerError, AudioError, OSError, ValueError) as error:
            raise BadSample("", sample.id, f"cannot be asked: {error}", "refused by model") from error


def prompt_and_answer(sample: Sample) -> tuple[list[Message], str | None]:
    """The messages to be answered, and the answer that the sample has, if any."""
    *prompt_messages, last = sample.messages
    if last.role != "assistant":
        return list(sample.messages), None
    texts = [text_part.text for text_part in last.content if isinstance(text_part, TextPart)]
    return prompt_messages, "".join(texts).strip()
