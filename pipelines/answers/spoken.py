"""Spoken answers of a DualFFN: their codes as the model said them, and their sound for people and judges.

Shapes: K codebooks, T code frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from audiollm.audio import AudioError, load, save
from audiollm.codec import codec_digest
from audiollm.data.chat.conditions import is_spoken
from audiollm.data.records.part_codes import save_part_codes
from audiollm.data.records.sample import (
    AudioPart,
    ContentPart,
    Message,
    RatedAnswer,
    Sample,
    TextPart,
    check_without_phrases,
)
from audiollm.errors import BadSample, ConfigError
from audiollm.evaluate.report.store import Row, RowStore
from audiollm.families.registry import open_model_folder
from audiollm.files.atomic import folder_digest, safe_name
from audiollm.generation.engine.request import Answer, AnswerKind, Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.speaking.speech_generator import SpeechGenerator
from pipelines.answers.samplers import RIGHT_ANSWER, answer_seed
from pipelines.answers.score_store import conversation_content

MAX_TOGETHER = 64
"""Most answers in the engine at a time."""


@dataclass(frozen=True)
class SpeechSampling:
    """How spoken answers are drawn."""

    codes: SamplingConfig
    max_duration_s: float
    max_tokens: int
    """Most words of an answer that is in words and speech."""
    seed: int


def load_speaker_model(model: Path, codec: Path | None) -> tuple[SpeechGenerator, str]:
    """Load a model that answers in speech with its codec, and a fingerprint of both.

    Raises:
        ConfigError: the model answers in words alone, or there is no codec.
    """
    opened = open_model_folder(model)
    if not opened.speaks:
        raise ConfigError(
            "modality: this model answers in words alone",
            str(opened.path),
            "leave `modality: speech` out, or give a model that was trained to speak",
        )
    generator = opened.generator(codec)
    return generator, f"{folder_digest(opened.path)} {codec_digest(generator.codec)}"


class SpokenAnswers:
    """Answers in speech: an `AnswerSource`.

    Args:
        folder: of the stage; the codes of every recording go to `codes`, the sound of answers to `audio`.
        origin: name of the model.
    """

    def __init__(
        self,
        generator: SpeechGenerator,
        fingerprint: str,
        sampling: SpeechSampling,
        count: int,
        origin: str,
        store: RowStore,
        folder: Path,
    ) -> None:
        self._generator, self._fingerprint, self._sampling = generator, fingerprint, sampling
        self._count, self._origin, self._store, self._folder = count, origin, store, folder
        self.block = max(1, MAX_TOGETHER // count)
        self._encoded: dict[tuple[str, float, float | None], str] = {}

    def prepare(self, samples: Sequence[Sample]) -> None:
        """See `AnswerSource.prepare`."""
        work: list[tuple[Sample, int]] = []
        requests: list[Request] = []
        for sample in samples:
            try:
                missing = self._missing(sample)
                requests += self._requests(sample, missing) if missing else []
            except BadSample:
                continue  # `answers` raises it
            work += [(sample, number) for number in missing]
        answers = self._generator.answer_all(requests) if requests else []
        for (sample, number), answer in zip(work, answers, strict=True):
            self._store.add(self._keep(sample, answer), *self._key(sample), number)

    def prompt_sample(self, sample: Sample) -> Sample:
        """See `AnswerSource.prompt_sample`; each recording of the prompt has its codes."""
        messages = [
            message.model_copy(
                update={
                    "content": [self._encoded_part(content_part, sample) for content_part in message.content]
                }
            )
            for message in speech_prompt(sample)
        ]
        return sample.model_copy(update={"messages": messages, "answers": []})

    def right(self, sample: Sample) -> RatedAnswer | None:
        """See `AnswerSource.right`.

        Raises:
            BadSample: its recording cannot be read.
        """
        if not is_spoken(sample.messages):
            return None
        answer_parts = sample.messages[-1].content
        content = [
            content_part if _has_codes(content_part) else self._encoded_part(content_part, sample)
            for content_part in answer_parts
        ]
        return RatedAnswer(content=content, origin=RIGHT_ANSWER)

    def answers(self, sample: Sample) -> list[RatedAnswer | None]:
        """See `AnswerSource.answers`."""
        if missing := self._missing(sample):
            self._requests(sample, missing)  # says what is wrong with the prompt
            self.prepare([sample])
        rows = [self._store.get(*self._key(sample), number) for number in range(self._count)]
        return [self._answer(row) for row in rows if row is not None]

    def _key(self, sample: Sample) -> list[Any]:
        conversation = conversation_content(speech_prompt(sample), sample.id)
        return ["speech", self._fingerprint, sample.id, conversation, asdict(self._sampling)]

    def _missing(self, sample: Sample) -> list[int]:
        """Numbers of the answers that are not there, or whose files are gone."""
        rows = [self._store.get(*self._key(sample), number) for number in range(self._count)]
        return [number for number, row in enumerate(rows) if row is None or not self._is_whole(row)]

    def _is_whole(self, row: Row) -> bool:
        names = [row_part["name"] for row_part in row["parts"] if "name" in row_part]
        return all(path.is_file() for name in names for path in (self._codes(name), self._audio(name)))

    def _requests(self, sample: Sample, numbers: Sequence[int]) -> list[Request]:
        check_without_phrases(sample, "")
        messages = speech_prompt(sample)
        try:
            audio = self._generator.audio_of(messages)
            self._generator.check_messages(messages, len(audio))
        except (AudioError, OSError, ValueError, RuntimeError) as error:
            raise BadSample("", sample.id, f"cannot be asked: {error}", "refused by model") from error
        sampling = self._sampling
        limits = Limits(
            max(1, round(sampling.max_duration_s * self._generator.codec.frame_rate)), sampling.max_tokens
        )
        kind = _answer_kind(sample)
        return [
            Request(
                messages, answer_seed(sampling.seed, sample.id, number), audio, sampling.codes, limits, kind
            )
            for number in numbers
        ]

    def _keep(self, sample: Sample, answer: Answer) -> Row:
        """Write the files of an answer; what is found of them later is in the row."""
        parts: list[dict[str, Any]] = []
        for answer_part in answer.parts:
            if isinstance(answer_part, str):
                parts.append({"text": answer_part})
            elif answer_part.shape[1]:
                name = f"{safe_name(sample.id)}_{_hash_codes(answer_part)}"
                codec = self._generator.codec
                save_part_codes(self._codes(name), answer_part)
                save(self._audio(name), codec.decode(answer_part).cpu(), codec.sample_rate)
                parts.append({"name": name, "frames": answer_part.shape[1]})
        return {"parts": parts, "stopped": answer.stopped}

    def _answer(self, row: Row) -> RatedAnswer | None:
        frames = sum(row_part.get("frames", 0) for row_part in row["parts"])
        if not frames:
            return None
        content: list[ContentPart] = [
            TextPart(text=row_part["text"])
            if "text" in row_part
            else AudioPart(path=str(self._audio(row_part["name"])), codes=str(self._codes(row_part["name"])))
            for row_part in row["parts"]
        ]
        seconds = round(frames / self._generator.codec.frame_rate, 3)
        about = {"frames": frames, "seconds": seconds, "stopped": row["stopped"]}
        return RatedAnswer(content=content, origin=self._origin, metadata=about)

    def _encoded_part(self, content_part: ContentPart, sample: Sample) -> ContentPart:
        """Encode a recording as the engine's prompts are encoded."""
        if isinstance(content_part, TextPart):
            return content_part
        span = (content_part.path, content_part.start_s, content_part.end_s)
        if span not in self._encoded:
            try:
                codes_KT = self._generator.encode(load(*span, mono=True))
            except (AudioError, OSError, ValueError, RuntimeError) as error:
                raise BadSample("", sample.id, f"cannot be asked: {error}", "refused by model") from error
            path = self._codes(f"{safe_name(Path(content_part.path).stem)}_{_hash_codes(codes_KT)}")
            save_part_codes(path, codes_KT)
            self._encoded[span] = str(path)
        return content_part.model_copy(update={"codes": self._encoded[span]})

    def _codes(self, name: str) -> Path:
        return self._folder / "codes" / f"{name}.safetensors"

    def _audio(self, name: str) -> Path:
        return self._folder / "audio" / f"{name}.flac"


def speech_prompt(sample: Sample) -> list[Message]:
    """The messages that ask for speech.

    Raises:
        BadSample: the sample is answered in words.
    """
    *prompt_messages, last = sample.messages
    if last.role != "assistant":
        return list(sample.messages)
    if not is_spoken(sample.messages):
        raise BadSample(
            "", sample.id, "asks for an answer in words: leave `modality: speech` out", "asks for words"
        )
    return prompt_messages


def _answer_kind(sample: Sample) -> AnswerKind:
    """Words and speech in turn, where the sample's own answer begins with words; else speech alone."""
    last = sample.messages[-1]
    return "any" if last.role == "assistant" and isinstance(last.content[0], TextPart) else "audio"


def _has_codes(content_part: ContentPart) -> bool:
    return isinstance(content_part, AudioPart) and content_part.codes is not None


def _hash_codes(codes_KT: Tensor) -> str:
    content = codes_KT.cpu().numpy().astype("<i4")
    return hashlib.sha256(f"{content.shape}".encode() + content.tobytes()).hexdigest()[:12]
