"""Models that give several answers in words to a prompt, each from a seed of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from audiollm.audio import AudioError, load
from audiollm.data.records.sample import Message, RatedAnswer, Sample, TextPart
from audiollm.devices import default_device
from audiollm.errors import BadSample
from audiollm.evaluate.report.store import RowStore
from audiollm.files.atomic import folder_digest
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.speaking.generator import Generator
from audiollm.models.audio_llms.inputs import InputsError, processor_inputs, turns_of
from audiollm.models.audio_llms.loading import load_audio_llm
from audiollm.models.hub import is_dual_ffn
from audiollm.models.pretrained import model_folder
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

    def asked(self, sample: Sample) -> Sample:
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
    """Load a model of ours, or an audio LLM of transformers, from a folder.

    Raises:
        ConfigError: there is none.
    """
    folder = model_folder(model)
    return OwnSampler(folder, codec) if is_dual_ffn(folder) else TransformersSampler(folder)


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

    def asked(self, sample: Sample) -> Sample:
        """See `AnswerSource.asked`; the words of the right answer are kept in the metadata."""
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
        asked = sample.model_copy(update={"messages": messages})
        told = conversation_content(messages, sample.id)
        key = [self._sampler.fingerprint, sample.id, told, asdict(self._sampling)]
        rows = [self._store.get(*key, number) for number in range(self._count)]
        missing = [number for number, row in enumerate(rows) if row is None]
        if missing:
            texts = self._sampler.sample(asked, missing, self._sampling)
            for number, text in zip(missing, texts, strict=True):
                self._store.add({"text": text}, *key, number)
                rows[number] = {"text": text}
        return [str(row["text"]) for row in rows if row is not None]


class OwnSampler:
    """A DualFFN, through the generation engine."""

    def __init__(self, folder: Path, codec: Path | None) -> None:
        self._generator, self.fingerprint = Generator.from_pretrained(folder, codec), folder_digest(folder)

    def sample(self, sample: Sample, numbers: Sequence[int], sampling: AnswerSampling) -> list[str]:
        """See `AnswerSampler.sample`."""
        try:
            audio = self._generator.audio_of(sample.messages)
            self._generator.template.layout(sample.messages, [1] * len(audio))
        except (AudioError, OSError, ValueError, RuntimeError) as error:
            raise BadSample("", sample.id, f"cannot be asked: {error}", "refused by model") from error
        drawn = SamplingConfig(temperature=sampling.temperature, top_p=sampling.top_p)
        limits = Limits(max_text_tokens=sampling.max_tokens)
        requests = [
            Request(list(sample.messages), sampling.seed_of(sample.id, n), audio, drawn, limits, "text")
            for n in numbers
        ]
        return [answer.text.strip() for answer in self._generator.answer_all(requests)]


class TransformersSampler:
    """An audio LLM of transformers, by its own `generate`."""

    def __init__(self, folder: Path) -> None:
        model, self._processor = load_audio_llm(folder)
        self._model: Any = model.to(default_device())
        self.fingerprint = folder_digest(folder)

    @torch.inference_mode()
    def sample(self, sample: Sample, numbers: Sequence[int], sampling: AnswerSampling) -> list[str]:
        """See `AnswerSampler.sample`."""
        try:
            recordings = [load(part.path, part.start_s, part.end_s) for part in sample.audio_parts()]
            turns = turns_of(sample.messages, recordings)
            inputs = processor_inputs(self._processor, turns, generation_prompt=True)
        except (AudioError, InputsError, OSError, ValueError, RuntimeError) as error:
            raise BadSample("", sample.id, f"cannot be asked: {error}", "refused by model") from error
        moved = {key: self._moved(value) for key, value in inputs.items()}
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            drawn = {
                "do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0,
                "repetition_penalty": 1.0,
            }  # fmt: skip
        answers = []
        for number in numbers:
            torch.manual_seed(sampling.seed_of(sample.id, number))
            made = self._model.generate(**moved, max_new_tokens=sampling.max_tokens, **drawn)
            new = made[0, inputs["input_ids"].shape[1] :]
            answers.append(self._processor.tokenizer.decode(new, skip_special_tokens=True).strip())
        return answers

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        moved = value.to(self._model.device)
        return moved.to(self._model.dtype) if torch.is_floating_point(moved) else moved


def prompt_and_answer(sample: Sample) -> tuple[list[Message], str | None]:
    """The messages to be answered, and the answer that the sample has, if any."""
    *asked, last = sample.messages
    if last.role != "assistant":
        return list(sample.messages), None
    texts = [part.text for part in last.content if isinstance(part, TextPart)]
    return asked, "".join(texts).strip()
