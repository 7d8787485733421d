"""Rollouts of an audio LLM of transformers by its own `generate`: answers in text, batches of groups.

Every answer is drawn with random numbers of its own, from the logits over the temperature and nothing else: what the
model's generation_config.json would do to them (top-p, top-k, penalties, suppressed tokens) is off. Only the
tokens that stand for recordings in a prompt are never drawn.

Shapes: A answers of a batch, L tokens of the longest prompt, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from audiollm.errors import BadSample, ConfigError
from audiollm.families.listener.encoding import EncodedAnswer, encode_prompt, pad_prompts
from audiollm.families.listener.generating import generate_ids
from audiollm.families.listener.limits import MAX_ROWS
from audiollm.families.listener.shared_recordings import encoded_once
from audiollm.families.policy import PromptedAnswers
from audiollm.families.rollout import Rollout, RolloutEngine, RolloutSettings
from audiollm.generation.engine.request import SampledTokens
from audiollm.generation.engine.sampling import sample_plain
from audiollm.models.audio_llms.inputs import InputsError, placeholder_ids


class ListenerRollouts:
    """A `RolloutEngine` of an audio LLM of transformers.

    Args:
        model: with `generate`; a `PeftModel` samples with its adapter. Its weights are read at each call of `sample`.
        processor: the model's.
        ends: ids of the tokens that end an answer (`ListenerPolicy.ends`).
        max_rows: most answers of a batch; a prompt's group may be parted.
    """

    def __init__(self, model: Any, processor: Any, ends: Collection[int], max_rows: int = MAX_ROWS) -> None:
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._processor, self._ends, self._max_rows = processor, frozenset(ends), max_rows

    def sample(
        self,
        prompts: Sequence[PromptedAnswers],
        numbers: Sequence[Sequence[int]],
        settings: RolloutSettings,
    ) -> list[list[Rollout]]:
        """See `RolloutEngine.sample`."""
        if settings.answer != "text":
            raise ConfigError(
                f"answer: {settings.answer!r}, and this model answers in text", "", "set answer to text"
            )
        encoded = [self._encoded(prompt) for prompt in prompts]
        rollout_keys = [
            (place, number)
            for place, group in enumerate(numbers)
            for number in group
        ]  # fmt: skip
        rollout_keys.sort(key=lambda key: -encoded[key[0]].num_tokens)  # little padding
        rollouts: dict[tuple[int, int], Rollout] = {}
        for first in range(0, len(rollout_keys), self._max_rows):
            rows = rollout_keys[first : first + self._max_rows]
            seeds = [settings.seed_of(prompts[place].id, number) for place, number in rows]
            answers = self._draw([encoded[place] for place, _ in rows], seeds, settings)
            for (place, number), seed, (tokens, truncated) in zip(rows, seeds, answers, strict=True):
                text = self._processor.tokenizer.decode(tokens.ids_N.tolist(), skip_special_tokens=True)
                rollouts[place, number] = Rollout(
                    prompts[place].id, number, tokens, truncated, text.strip(), seed
                )
        return [[rollouts[place, number] for number in group] for place, group in enumerate(numbers)]

    def weights_changed(self) -> None:
        """Do nothing: `generate` reads the model's own weights."""

    def _encoded(self, prompt: PromptedAnswers) -> EncodedAnswer:
        try:
            return encode_prompt(self._processor, prompt)
        except InputsError as error:
            raise BadSample(prompt.place, prompt.id, error.reason, error.kind) from error

    @torch.inference_mode()
    def _draw(
        self, prompts: Sequence[EncodedAnswer], seeds: Sequence[int], settings: RolloutSettings
    ) -> list[tuple[SampledTokens, bool]]:
        """Draw an answer behind each prompt; return its tokens, and whether the limit ended it."""
        import transformers

        tokenizer, ends = self._processor.tokenizer, sorted(self._ends)
        pad_id = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        inputs, shared = pad_prompts(prompts, pad_id)
        forbidden = placeholder_ids(self._model.config)
        draws = _Draws(
            settings.temperature, forbidden, [torch.Generator().manual_seed(seed) for seed in seeds]
        )
        plain = transformers.GenerationConfig(
            max_new_tokens=settings.max_text_tokens,
            eos_token_id=ends,
            pad_token_id=pad_id,
            do_sample=False,
            repetition_penalty=1.0,
        )
        training = self._model.training
        self._model.eval()
        try:
            with (
                _generation_config(self._model, plain),
                encoded_once(self._model, shared, inputs["input_ids"]),
            ):
                answer_ids = generate_ids(
                    self._model,
                    inputs,
                    generation_config=plain,
                    logits_processor=transformers.LogitsProcessorList([draws]),
                )
        finally:
            self._model.train(training)
        ids_AN = answer_ids.cpu()
        logprob_AN = torch.stack(draws.logprobs, dim=1).cpu() if draws.logprobs else None
        return [
            self._tokens(ids_N, None if logprob_AN is None else logprob_AN[row])
            for row, ids_N in enumerate(ids_AN)
        ]

    def _tokens(self, ids_N: Tensor, logprob_N: Tensor | None) -> tuple[SampledTokens, bool]:
        is_end_N = torch.isin(ids_N, torch.tensor(sorted(self._ends)))
        truncated = not bool(is_end_N.any())
        length = len(ids_N) if truncated else int(is_end_N.nonzero()[0, 0]) + 1
        actions_N = torch.ones(length, dtype=torch.bool)
        logprob_A = None if logprob_N is None else logprob_N[:length].clone()
        return SampledTokens("text", ids_N[:length].clone(), actions_N, (), (), logprob_A), truncated


@dataclass
class _Draws:
    """A logits processor that draws the next token of each row, and leaves it alone for `generate` to take.

    `generate` itself draws a whole batch from one generator, where a row's tokens hang on the rows beside it.
    """

    temperature: float
    forbidden: list[int]
    """Ids that are never drawn."""
    generators: list[torch.Generator]
    logprobs: list[Tensor] = field(default_factory=list)
    """Log-probabilities `[A]` of each step; none at a temperature of 0."""

    def __call__(self, input_ids: Tensor, logits_AV: Tensor) -> Tensor:
        logits_AV = logits_AV.float()
        logits_AV[:, self.forbidden] = -torch.inf
        if self.temperature == 0:
            return logits_AV
        uniform_A = torch.cat([torch.rand(1, generator=generator) for generator in self.generators])
        token_A, logprob_A = sample_plain(logits_AV, self.temperature, uniform_A.to(logits_AV.device))
        self.logprobs.append(logprob_A)
        return torch.full_like(logits_AV, -torch.inf).scatter(1, token_A[:, None], 0.0)


@contextmanager
def _generation_config(model: Any, config: Any) -> Iterator[None]:
    """Replace the model's own generation config within: `generate` fills what is unset from it."""
    previous_config = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = previous_config


_: type[RolloutEngine[PromptedAnswers]] = ListenerRollouts
