"""Rollouts of a DualFFN by the generation engine, in text, in speech, or in both by turns."""

from __future__ import annotations

from collections.abc import Sequence

from audiollm.data.chat.template import Template
from audiollm.errors import BadSample
from audiollm.families.dual_ffn.limits import MAX_SLOTS
from audiollm.families.dual_ffn.stream_rollouts import sample_streams
from audiollm.families.prompts import PromptedContents
from audiollm.families.rollout import Rollout, RolloutEngine, RolloutSettings
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Answer, Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import GenerationDecoder


class DualFFNRollouts:
    """A `RolloutEngine` of a DualFFN.

    Each prompt goes through the audio encoder and the model once for its whole group.

    Args:
        model: on its device. Its weights are read at each call of `sample`.
        template: with the model's vocabulary and codebooks.
        max_slots: most answers in progress at a time, and so rows of the cache.
    """

    def __init__(self, model: DualFFN, template: Template, max_slots: int = MAX_SLOTS) -> None:
        self._model, self._template, self._max_slots = model, template, max_slots
        self._decoder = GenerationDecoder(model)

    def sample(
        self,
        prompts: Sequence[PromptedContents],
        numbers: Sequence[Sequence[int]],
        settings: RolloutSettings,
    ) -> list[list[Rollout]]:
        """See `RolloutEngine.sample`."""
        seeds = [
            [settings.seed_of(prompt.id, number) for number in group]
            for prompt, group in zip(prompts, numbers, strict=True)
        ]
        if not any(seeds):
            return [[] for _ in prompts]
        if any(prompt.chunk_frames is not None for prompt in prompts):
            return self._streams(prompts, numbers, seeds, settings)
        requests = [self._request(prompt, settings) for prompt in prompts]
        training = self._model.training
        self._model.eval()
        try:
            engine = Engine.sized_for(
                self._model, self._template, requests, self._max_slots, self._decoder, max(map(len, seeds))
            )
            answers = engine.run_groups(list(zip(requests, seeds, strict=True)))
        finally:
            self._model.train(training)
            self._decoder.release()
        return [
            [_build_answer_rollout(prompt.id, *rollout_parts) for rollout_parts in zip(*group, strict=True)]
            for prompt, *group in zip(prompts, numbers, seeds, answers, strict=True)
        ]

    def _streams(
        self,
        prompts: Sequence[PromptedContents],
        numbers: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        settings: RolloutSettings,
    ) -> list[list[Rollout]]:
        """Sample streams side by side, each fed its next chunk as soon as it has acted."""
        training = self._model.training
        self._model.eval()
        try:
            rollouts = sample_streams(
                self._model, self._template, self._decoder, self._max_slots, prompts, numbers, seeds, settings
            )
        finally:
            self._model.train(training)
            self._decoder.release()
        return rollouts

    def weights_changed(self) -> None:
        """See `RolloutEngine.weights_changed`."""
        self._model.weights_changed()

    def _request(self, prompt: PromptedContents, settings: RolloutSettings) -> Request:
        try:
            self._template.text_prompt(prompt.prompt, prompt.audio)
        except ValueError as error:
            raise BadSample(prompt.place, prompt.id, str(error), "does not compile") from error
        sampling = SamplingConfig(temperature=settings.temperature, top_p=1.0)
        limits = Limits(settings.max_frames, settings.max_text_tokens)
        return Request(
            prompt.prompt,
            audio=prompt.audio,
            sampling=sampling,
            limits=limits,
            answer=settings.answer,
            record_tokens=True,
        )


def _build_answer_rollout(prompt: str, number: int, seed: int, answer: Answer) -> Rollout:
    assert answer.tokens is not None  # the request records them
    return Rollout(prompt, number, answer.tokens, not answer.stopped, answer.text, seed)


_: type[RolloutEngine[PromptedContents]] = DualFFNRollouts
