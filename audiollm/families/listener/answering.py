"""An audio LLM of transformers that answers in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.devices import default_device
from audiollm.errors import BadSample
from audiollm.families.answering import (
    AnswerError,
    AnswerRequest,
    LikelihoodModel,
    SteppedAnswers,
    WrittenAnswer,
)
from audiollm.families.listener.answering_rows import ListenerEngine, failed_answer, joins_rows
from audiollm.families.listener.generating import drawn_options, generate_ids, stopping_criteria
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.listener.prompts import end_tokens
from audiollm.families.listener.scorer import AnswerScorer
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.policy import PromptedAnswers
from audiollm.files.atomic import folder_digest
from audiollm.generation.engine.step_engine import StepEngine
from audiollm.hub_models.names import folder_label
from audiollm.models.audio_llms.inputs import (
    InputsError,
    Turn,
    TurnPart,
    processor_inputs,
    sampling_rate,
    takes_recordings,
)
from audiollm.models.audio_llms.loading import load_audio_llm


class ListenerAnswers:
    """A `LikelihoodModel` of transformers (Qwen2-Audio, Qwen-Omni, Voxtral, ...).

    `answer` takes one conversation after the other, `step_engine` several side by side. The model's own processor and
    chat template make the inputs; nothing is downloaded, nothing of the folder is run. Greedy answers follow the
    model's own generation config.

    Args:
        folder: config, processor and safetensors in Hugging Face layout.

    Raises:
        ConfigError: the folder holds no such model, or holds pickled weights only.
    """

    def __init__(self, folder: Path) -> None:
        self.name, self._folder = folder_label(folder), folder
        model, self._processor = load_audio_llm(folder)
        self._model: Any = model.to(default_device())
        self.hears = takes_recordings(self._processor)

    @cached_property
    def fingerprint(self) -> str:
        """See `AnsweringModel.fingerprint`."""
        return folder_digest(self._folder)

    def check(self, request: AnswerRequest) -> None:
        """See `AnsweringModel.check`."""
        self._inputs(request.turns)

    def answer(
        self, requests: Sequence[AnswerRequest], check_stop: Callable[[], None] | None = None
    ) -> list[WrittenAnswer]:
        """See `AnsweringModel.answer`."""
        answers, turns, inputs = [], None, dict[str, Tensor]()
        for request in requests:
            if request.turns is not turns:  # several answers to one conversation need its inputs once
                turns, inputs = request.turns, self._inputs(request.turns)
            answers.append(self._answer(request, inputs, check_stop))
        return answers

    def step_engine(self, slots: int, max_length: int, prefill_positions: int) -> StepEngine | None:
        """See `SteppedAnswers.step_engine`."""
        try:
            is_joint = joins_rows(self._model, self._inputs([("user", self._shortest_parts())]))
        except AnswerError:
            is_joint = False
        if not is_joint:
            return None
        return ListenerEngine(
            self._model,
            self._processor,
            lambda request: self._inputs(request.turns),
            slots,
            slots * max_length,
            prefill_positions,
        )

    def notes_on(self, request: AnswerRequest) -> tuple[str, ...]:
        """See `AnsweringModel.notes_on`; nothing is known of what the model was trained on."""
        return ()

    @torch.inference_mode()
    def log_probability(self, answered: Sequence[tuple[Sequence[Turn], str]]) -> tuple[float, int]:
        """See `LikelihoodModel.log_probability`; as a policy's, one answer after the other."""
        total, tokens = 0.0, 0
        for turns, text in answered:
            try:
                encoded = self._policy.encode(PromptedAnswers("", turns, [text]))
            except BadSample as bad:
                raise AnswerError(bad.reason, bad.kind) from bad
            batch = self._policy.batch(encoded).to(self._model.device)
            answers = self._policy.answer_logprobs(self._policy.root, batch, TokenRequest(reference=False))
            total, tokens = total + float(answers.policy_T.sum()), tokens + len(answers.policy_T)
        return total, tokens

    @cached_property
    def _policy(self) -> ListenerPolicy:
        ends = end_tokens(self._model.generation_config, self._processor, self._folder)
        return ListenerPolicy(self._folder, self._processor, AnswerScorer(self._model), ends)

    def _shortest_parts(self) -> list[TurnPart]:
        if not self.hears:
            return ["."]
        rate = sampling_rate(self._processor)
        return [Waveform(torch.zeros(1, rate), rate)]

    def _inputs(self, turns: Sequence[Turn]) -> dict[str, Tensor]:
        try:
            return processor_inputs(self._processor, turns, generation_prompt=True)
        except InputsError as error:
            raise AnswerError(error.reason, error.kind) from error

    def _answer(
        self, request: AnswerRequest, inputs: dict[str, Tensor], check_stop: Callable[[], None] | None
    ) -> WrittenAnswer:
        with torch.random.fork_rng() if request.temperature > 0 else nullcontext():
            if request.temperature > 0:
                torch.manual_seed(request.seed)
            try:
                ids_1N = generate_ids(
                    self._model,
                    inputs,
                    max_new_tokens=request.max_tokens,
                    stopping_criteria=stopping_criteria(check_stop),
                    **drawn_options(request.temperature, request.top_p),
                )
            except Exception as error:
                raise failed_answer(error) from error
        text: str = self._processor.decode(ids_1N[0], skip_special_tokens=True)
        return WrittenAnswer(text.strip(), inputs["input_ids"].shape[1] + ids_1N.shape[1])


_: type[LikelihoodModel] = ListenerAnswers
__: type[SteppedAnswers] = ListenerAnswers
