"""A DualFFN that answers in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from audiollm.data.hearing.features import PartAudio
from audiollm.data.packing import pack
from audiollm.data.records.sample import Message, TextPart
from audiollm.errors import ConfigError
from audiollm.families.answering import (
    AnswerError,
    AnswerRequest,
    BatchedAnswers,
    LikelihoodModel,
    WrittenAnswer,
)
from audiollm.families.dual_ffn.losses import token_losses
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.speaking.conversation import encode_turns
from audiollm.generation.speaking.generator import Generator
from audiollm.hub_models.names import folder_label
from audiollm.models.audio_llms.inputs import Turn


class DualFFNAnswers:
    """An `AnsweringModel` of a DualFFN: all conversations go through the engine together.

    Args:
        folder: of the model, for its name.
        fingerprint: of the model and of the codec that it hears with.
    """

    def __init__(self, generator: Generator, folder: Path, fingerprint: str) -> None:
        self.name, self.fingerprint, self._generator = folder_label(folder), fingerprint, generator
        self.hears = generator.hears

    @property
    def generator(self) -> Generator:
        """See `BatchedAnswers.generator`."""
        return self._generator

    def check(self, request: AnswerRequest) -> None:
        """See `AnsweringModel.check`."""
        self._request(request)

    def answer(
        self, requests: Sequence[AnswerRequest], check_stop: Callable[[], None] | None = None
    ) -> list[WrittenAnswer]:
        """See `AnsweringModel.answer`."""
        # several answers to one recording need its codes once
        encoded_audio: dict[tuple[int, bool], PartAudio] = {}
        prompts = [self._request(request, encoded_audio) for request in requests]
        answers = self._generator.answer_all(prompts, check_stop=check_stop or (lambda: None))
        encode = self._generator.template.tokenizer.encode
        return [
            WrittenAnswer(
                answer.text.strip(),
                self._generator.prompt_length(prompt)
                + len(encode(answer.text, add_special_tokens=False).ids),
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def notes_on(self, request: AnswerRequest) -> tuple[str, ...]:
        """See `AnsweringModel.notes_on`."""
        return self._generator.notes_on(self._request(request))

    @torch.inference_mode()
    def log_probability(self, answered: Sequence[tuple[Sequence[Turn], str]]) -> tuple[float, int]:
        """See `LikelihoodModel.log_probability`; all answers go through the model as one pack."""
        model, template = self._generator.model, self._generator.template
        streams, encoded_audio = [], dict[tuple[int, bool], PartAudio]()
        for turns, text in answered:
            prompt = self._request(AnswerRequest(turns), encoded_audio)
            answer = Message(role="assistant", content=[TextPart(text=text)])
            streams.append(template.compile([*prompt.messages, answer], list(prompt.audio)))
        encoder = model.config.audio_encoder
        features = encoder.features if encoder is not None else None
        batch = pack(streams, normalization="token", encoder=features).to(next(model.parameters()).device)
        losses = token_losses(model, model(batch), batch)
        return -float(losses["text"]), int(batch.counts["text"])

    def _request(
        self, request: AnswerRequest, encoded_audio: dict[tuple[int, bool], PartAudio] | None = None
    ) -> Request:
        """Make the engine's request.

        Args:
            encoded_audio: recordings that are encoded, by identity and whether the model speaks them; it is added to.
        """
        try:
            messages, audio = encode_turns(self._generator, request.turns, encoded_audio)
        except (ConfigError, ValueError, RuntimeError) as error:
            reason = error.message if isinstance(error, ConfigError) else str(error)
            raise AnswerError(reason.partition(";")[0]) from error
        sampling = SamplingConfig(temperature=request.temperature, top_p=request.top_p)
        return Request(
            messages, request.seed, audio, sampling, Limits(max_text_tokens=request.max_tokens), "text"
        )


_: type[LikelihoodModel] = DualFFNAnswers
__: type[BatchedAnswers] = DualFFNAnswers
