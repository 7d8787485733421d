"""Rollouts of a talker: drawn speech with its behaviour log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from audiollm.errors import BadSample, ConfigError
from audiollm.families.prompts import PromptedContents
from audiollm.families.rollout import Rollout, RolloutSettings
from audiollm.families.talkers.decoding import speak_to_end
from audiollm.families.talkers.drawing import Speaking
from audiollm.families.talkers.kind import TalkerKind, TalkerSampling
from audiollm.families.talkers.talker import Talker
from audiollm.families.talkers.turns import read_speech_prompt
from audiollm.train.settings import PromptMix


class TalkerRollouts:
    """A `RolloutEngine`."""

    def __init__(
        self, model: Talker, kind: TalkerKind, slots: int | None = None, mix: PromptMix | None = None
    ) -> None:
        self._model, self._kind, self._slots, self._mix = model, kind, slots, mix

    def sample(
        self,
        prompts: Sequence[PromptedContents],
        numbers: Sequence[Sequence[int]],
        settings: RolloutSettings,
    ) -> list[list[Rollout]]:
        """See `RolloutEngine.sample`."""
        if settings.answer != "audio":
            raise ConfigError(f"answer: {settings.answer}, and this model speaks", "", "set answer: audio")
        sampling = TalkerSampling.plain(settings.temperature)
        groups = []
        for prompted, group in zip(prompts, numbers, strict=True):
            try:
                prompt = read_speech_prompt(prompted.prompt, prompted.audio, prompted.language)
                rows = self._kind.prompt_rows(
                    self._kind.complete(prompt, prompted.vector_C, self._mix, prompted.id)
                )
            except ValueError as error:
                raise BadSample(prompted.place, prompted.id, str(error), "prompt") from None
            seeds = [settings.seed_of(prompted.id, number) for number in group]
            groups.append([Speaking(rows, sampling, settings.max_frames, seed, number)
                           for seed, number in zip(seeds, group, strict=True)])  # fmt: skip
        speak_to_end(self._model, self._kind, [answer for group in groups for answer in group], self._slots)
        return [
            [self._as_rollout(prompted.id, answer, settings) for answer in group]
            for prompted, group in zip(prompts, groups, strict=True)
        ]

    def weights_changed(self) -> None:
        """See `RolloutEngine.weights_changed`: no weight is held in another form."""

    def _as_rollout(self, prompt: str, answer: Speaking, settings: RolloutSettings) -> Rollout:
        tokens = answer.tokens(self._model.num_codebooks, settings.temperature == 0)
        return Rollout(prompt, answer.number, tokens, not answer.has_ended, "", answer.seed)
