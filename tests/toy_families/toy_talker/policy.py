"""The policy: what `train`, `train_preference` and `train_policy` ask of the model.

Shapes: T targets, A answers, K codebooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.data.packing import first_fit
from audiollm.data.records.source import LoadedSample
from audiollm.errors import BadSample, ConfigError
from audiollm.families.adapters import MergedWeights, adapter_off, save_adapter
from audiollm.families.adapting import adapt_model
from audiollm.families.family import PolicySettings
from audiollm.families.frozen_weights import share_frozen_weights
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.prompt_tokens import logprobs_of_figures
from audiollm.families.logprobs.token_figures import TokenFigures, TokenRequest, token_figures
from audiollm.families.policy import OTHER_INPUTS, GreedyAnswer, GreedyRequest, Policy
from audiollm.families.prompts import PromptedContents, prompted_contents
from audiollm.families.rollout import Rollout, RolloutSettings
from audiollm.generation.engine.request import SampledTokens
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.pretrained import save_model
from toy_talker.answers import EncodedSpeech, SpeechBatch, speech_batch, spoken_answers, text_rows
from toy_talker.model import MODEL_TYPE, Talker, load_talker
from toy_talker.speaking import speak

GREEDY = SamplingConfig(temperature=0.0)


class SpeechScorer(nn.Module):
    """The root that a strategy wraps: every pass of the training goes through its `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.model.eval()

    def forward(
        self,
        batch: SpeechBatch,
        request: TokenRequest,
        reference_TV: Tensor | None = None,
        draw_T: Tensor | None = None,
    ) -> TokenFigures:
        """Figures of the batch's targets."""
        return token_figures(self.logits(batch), batch.target_T, request, reference_TV, draw_T)

    def logits(self, batch: SpeechBatch) -> Tensor:
        """Logits `[T, V + 1]` of the batch's targets."""
        hidden_ALH = self.model.hidden(batch.text_AL, batch.codes_ALK, batch.is_frame_AL)
        hidden_FH = hidden_ALH.flatten(0, 1)[batch.row_F]
        logits_TV: Tensor = self.model.code_logits(hidden_FH, batch.codes_FK).flatten(0, 1)[batch.place_T]
        return logits_TV


class TalkerPolicy:
    """A `Policy`, as `audiollm/families/policy.py` explains each of its methods."""

    def __init__(self, folder: Path, settings: PolicySettings) -> None:
        model = load_talker(folder)
        self.config, self._has_adapter = model.config, settings.trained == "adapter"
        self._reference: SpeechScorer | None = None
        if settings.needs_reference and not self._has_adapter:
            reference = load_talker(settings.reference or folder)
            self._reference = SpeechScorer(reference.requires_grad_(False))
        self._root = SpeechScorer(adapt_model(model, settings.trained, settings.lora))

    @property
    def root(self) -> SpeechScorer:
        return self._root

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        return {} if self._reference is None else {"reference": self._reference}

    @property
    def num_codebooks(self) -> int:
        return self.config.num_codebooks

    def hold_to(self, reference: nn.Module) -> None:
        assert isinstance(reference, SpeechScorer)
        self._reference = reference

    def take(self, loaded: LoadedSample, answers: Sequence[int], place: str = "") -> PromptedContents:
        return prompted_contents(loaded, loaded, answers, place)

    def take_beside(
        self, prompt: LoadedSample, loaded: LoadedSample, answers: Sequence[int], place: str = ""
    ) -> PromptedContents:
        return prompted_contents(prompt, loaded, answers, place)

    def encode(self, prompted: PromptedContents) -> list[EncodedSpeech]:
        return spoken_answers(prompted, self.config)

    def encode_sampled(
        self, prompted: PromptedContents, sampled: Sequence[SampledTokens]
    ) -> list[EncodedSpeech]:
        text = text_rows(prompted)
        return [EncodedSpeech(text, tokens.codes[0], tokens.ended[0]) for tokens in sampled]

    def actions_at(self, sampled: SampledTokens, text: str, ends: Sequence[int]) -> list[int]:
        return [0] * len(ends)  # no text is drawn

    def pieces(self, sampled: SampledTokens) -> list[str | int]:
        return [sampled.num_actions]

    def part_ends(self, prompted: PromptedContents, encoded: Sequence[EncodedSpeech]) -> list[list[int]]:
        raise BadSample(prompted.place, prompted.id, "its answers are one stretch of speech", "no parts")

    def num_answer_tokens(self, encoded: EncodedSpeech) -> int:
        return encoded.num_targets

    def plan(self, groups: Sequence[Sequence[EncodedSpeech]], max_tokens: int) -> list[list[int]]:
        rows = [sum(answer.num_rows for answer in group) for group in groups]
        return first_fit(rows, max(max_tokens, *rows)) if rows else []

    def batch(self, encoded: Sequence[EncodedSpeech]) -> SpeechBatch:
        return speech_batch(encoded, self.config)

    def idle_batch(self) -> SpeechBatch:
        return self.batch([])

    def check_reader(self, reader: Policy[Any, Any, Any], key: str) -> None:
        if not isinstance(reader, TalkerPolicy) or reader.config != self.config:
            raise ConfigError(f"{key}: is another model than the policy", "", OTHER_INPUTS)

    def answer_logprobs(
        self, root: nn.Module, batch: SpeechBatch, request: TokenRequest, draw_T: Tensor | None = None
    ) -> AnswerLogprobs:
        reference_T = reference_TV = None
        if request.reference or request.kl:
            reference_TV = self._reference_logits(batch)
            plain = TokenRequest(temperature=request.temperature)
            reference_T = token_figures(reference_TV, batch.target_T, plain).logprob_T
        figures = root(batch, request, reference_TV if request.kl else None, draw_T)
        logprobs = logprobs_of_figures(batch, figures, reference_T, draw_T, request)
        return replace(logprobs, codebook_T=batch.place_T % self.config.num_codebooks)

    def prompt_lengths(self, batch: SpeechBatch) -> Tensor:
        return torch.zeros(batch.num_answers, dtype=torch.long)

    def freeze_unreached(self, has_recordings: bool) -> None:
        """Nothing: speech reaches all weights."""

    def share_frozen(self) -> None:
        share_frozen_weights(self._root, self._reference)

    def rollout_engine(self, slots: int | None = None) -> TalkerRollouts:
        return TalkerRollouts(self._talker)

    def greedy_answers(self, requests: Sequence[GreedyRequest]) -> list[GreedyAnswer]:
        answers = []
        for request in requests:
            (state,) = speak(
                self._talker, text_rows(request.prompted), [0], GREEDY, request.limits.max_frames
            )
            actions = state.tokens(self.num_codebooks, True).num_actions
            answers.append(GreedyAnswer("", actions, len(state.frames), state.has_ended))
        return answers

    def save(self, folder: Path) -> None:
        if self._has_adapter:
            save_adapter(self._root.model, folder / "adapter")
            whole = Talker(self.config)
            whole.load_state_dict(MergedWeights(self._root.model))
            save_model(folder / "model", whole, MODEL_TYPE, self.config)
        else:
            save_model(folder / "model", self._root.model, MODEL_TYPE, self.config)

    @property
    def _talker(self) -> Talker:
        model: Talker = self._root.model.get_base_model() if self._has_adapter else self._root.model
        return model

    @torch.no_grad()
    def _reference_logits(self, batch: SpeechBatch) -> Tensor:
        if self._reference is not None:
            return self._reference.logits(batch)
        if not self._has_adapter:
            raise ValueError("the policy was loaded without a reference")
        with adapter_off(self._root.model):
            return self._root.logits(batch)


class TalkerRollouts:
    """A `RolloutEngine`."""

    def __init__(self, model: Talker) -> None:
        self._model = model

    def sample(
        self,
        prompts: Sequence[PromptedContents],
        numbers: Sequence[Sequence[int]],
        settings: RolloutSettings,
    ) -> list[list[Rollout]]:
        if settings.answer != "audio":
            raise ConfigError(f"answer: {settings.answer}, and this model speaks", "", "set answer: audio")
        return [self._group(*group, settings) for group in zip(prompts, numbers, strict=True)]

    def weights_changed(self) -> None:
        """Nothing: no weight is held in another form."""

    def _group(
        self, prompt: PromptedContents, numbers: Sequence[int], settings: RolloutSettings
    ) -> list[Rollout]:
        seeds = [settings.seed_of(prompt.id, number) for number in numbers]
        sampling = SamplingConfig(temperature=settings.temperature, top_p=1.0)
        states = speak(self._model, text_rows(prompt), seeds, sampling, settings.max_frames)
        is_greedy = settings.temperature == 0
        return [
            Rollout(
                prompt.id,
                number,
                state.tokens(self._model.config.num_codebooks, is_greedy),
                not state.has_ended,
                "",
                seed,
            )
            for number, seed, state in zip(numbers, seeds, states, strict=True)
        ]
