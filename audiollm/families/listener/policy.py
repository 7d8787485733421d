"""Policies from audio LLMs of transformers: Qwen2-Audio, Qwen-Omni thinkers, Audio Flamingo 3, Voxtral and their like.

Shapes: T answer tokens, V entries of the vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.data.records.source import LoadedSample
from audiollm.data.records.video_clips import PictureReader, PictureSettings
from audiollm.errors import ConfigError
from audiollm.families.adapters import MergedWeights, save_adapter
from audiollm.families.adapting import TrainedPart, adapt_model
from audiollm.families.frozen_weights import share_frozen_weights
from audiollm.families.listener.encoding import (
    EncodedAnswer,
    PaddedAnswers,
    batches_by_length,
    encode_answers,
    encode_filler,
    encode_sampled_answers,
    pad_answers,
    part_ends_in_tokens,
)
from audiollm.families.listener.generating import generate_ids
from audiollm.families.listener.limits import MAX_ROWS
from audiollm.families.listener.prompts import end_tokens, prompted_answers
from audiollm.families.listener.rollouts import ListenerRollouts
from audiollm.families.listener.scorer import AnswerScorer
from audiollm.families.listener.serving import ServedListener
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.prompt_tokens import logprobs_of_figures, prompt_lengths, scored_batch
from audiollm.families.logprobs.text_places import actions_at, pieces_of
from audiollm.families.logprobs.token_figures import TokenFigures, TokenRequest, token_figures
from audiollm.families.policies import plain_model
from audiollm.families.policy import OTHER_INPUTS, GreedyAnswer, GreedyRequest, Policy, PromptedAnswers
from audiollm.families.talkers.published_weights import check_stored, write_published
from audiollm.families.target_logits import MAX_TARGETS, Logits
from audiollm.generation.engine.request import SampledTokens
from audiollm.models.audio_llms.inputs import (
    extractor_of,
    placeholder_ids,
    processor_inputs,
    takes_recordings,
)
from audiollm.models.audio_llms.loading import load_audio_llm
from audiollm.models.frozen.shrink import check_whole
from audiollm.models.pretrained import model_folder
from audiollm.train.settings import LoRASettings

PROCESSOR_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
UNREACHED = ("*audio_bos_eos_token.*",)
"""Parameters that no answer reaches: a table of Qwen2.5-Omni's encoder that its forward pass does not read."""
VISION = ("*visual.*", "*vision_tower.*")
"""Parameters that only pictures reach."""
MODEL_FILES = ("config.json", "generation_config.json", "*.index.json", "adapter_config.json")
"""Files of a model's folder that are written anew, and not copied with the processor's."""


class ListenerPolicy:
    """A `Policy` of an audio LLM of transformers; `load` makes one from a folder.

    Batches are padded; `batches_by_length` plans them. With an adapter, the reference is the model with its adapter
    off; otherwise it is a second, frozen model in `frozen`.
    """

    def __init__(
        self,
        folder: Path,
        processor: Any,
        root: AnswerScorer,
        ends: frozenset[int],
        reference: AnswerScorer | None = None,
        pictures: PictureSettings | None = None,
    ) -> None:
        """Join loaded parts; `reference` is None where the root has an adapter, or no reference is needed."""
        self._pictures = None if pictures is None else PictureReader(pictures)
        self._folder, self._processor, self._root = folder, processor, root
        self._ends, self._reference = ends, reference

    @classmethod
    def load(
        cls,
        folder: Path,
        trained: TrainedPart = "all",
        lora: LoRASettings | None = None,
        dtype: torch.dtype = torch.float32,
        reference: Path | None = None,
        needs_reference: bool = True,
        pictures: PictureSettings | None = None,
    ) -> ListenerPolicy:
        """Load the model that is trained, and its reference, on the CPU.

        Args:
            folder: config, processor and safetensors in Hugging Face layout, or the stage's folder around its `model`.
                Of a whole Qwen-Omni, the thinker is loaded.
            trained: `all`, `adapter` (LoRA), or patterns of parameter names.
            dtype: of the weights of both models: float32, bfloat16 or float64.
            reference: folder of another model to begin from; None: `folder`.
            needs_reference: False where no objective reads a reference; none is loaded then.
            pictures: how the pictures of videos are shown; None: samples with videos are refused.

        Raises:
            ConfigError: a folder that does not load, one that takes no pictures where they are to be shown, another
                reference beside an adapter, a reference with another vocabulary, or `trained` and `lora` that do not
                fit the model.
        """
        folder = model_folder(folder)
        reference = None if reference is None else model_folder(reference)
        loaded = load_audio_llm(folder, dtype)
        if pictures is not None and getattr(loaded.processor, "video_processor", None) is None:
            raise ConfigError(
                f"pictures: {type(loaded.processor).__name__} takes no pictures of videos",
                str(folder),
                "leave pictures out, or give a model that sees (Qwen2.5-Omni, Qwen3-Omni)",
            )
        if trained == "adapter" and reference is not None and reference.resolve() != folder.resolve():
            raise ConfigError(
                "reference: with trained: adapter, the reference is the model without its adapter",
                str(reference),
                "leave reference out, or train all weights",
            )
        frozen = None
        if needs_reference and trained != "adapter":
            reference_llm = load_audio_llm(reference or folder, dtype)
            _check_vocabulary(loaded.processor, reference_llm.processor, reference or folder, "reference")
            reference_llm.model.requires_grad_(False)
            frozen = AnswerScorer(reference_llm.model)
        ends = end_tokens(loaded.model.generation_config, loaded.processor, folder)
        unreached = UNREACHED if pictures is not None else (*UNREACHED, *VISION)
        root = AnswerScorer(adapt_model(loaded.model, trained, lora, unreached))
        return cls(folder, loaded.processor, root, ends, frozen, pictures)

    @property
    def root(self) -> AnswerScorer:
        """The module that a strategy wraps."""
        return self._root

    @property
    def processor(self) -> Any:
        """The model's processor: feature extractor, tokenizer and chat template."""
        return self._processor

    @property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""
        return self._ends

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """The reference, where it is a model of its own."""
        return {} if self._reference is None else {"reference": self._reference}

    def hold_to(self, reference: nn.Module) -> None:
        """See `Policy.hold_to`."""
        assert isinstance(reference, AnswerScorer)
        self._reference = reference.eval()

    num_codebooks = 0

    def freeze_unreached(self, has_recordings: bool) -> None:
        """See `Policy.freeze_unreached`; `adapt_model` has frozen what no answer reaches."""

    def share_frozen(self) -> None:
        """See `Policy.share_frozen`."""
        share_frozen_weights(self._root, self._reference)

    def rollout_engine(self, slots: int | None = None) -> ListenerRollouts:
        """See `Policy.rollout_engine`."""
        return ListenerRollouts(self._root.model, self._processor, self._ends, slots or MAX_ROWS)

    def served_model(self) -> ServedListener:
        """See `ServedPolicy.served_model`."""
        return ServedListener(self._folder, plain_model(self._root), self._processor, self._ends)

    def greedy_answers(self, requests: Sequence[GreedyRequest]) -> list[GreedyAnswer]:
        """See `Policy.greedy_answers`; one prompt after the other, by the model's own generation config."""
        return [self._greedy_answer(request) for request in requests]

    def take(self, loaded: LoadedSample, answers: Sequence[int], place: str = "") -> PromptedAnswers:
        """See `Policy.take`."""
        return self.take_beside(loaded, loaded, answers, place)

    def take_beside(
        self, prompt: LoadedSample, loaded: LoadedSample, answers: Sequence[int], place: str = ""
    ) -> PromptedAnswers:
        """See `Policy.take_beside`. A model that does not hear gets a sample with pictures without its sound."""
        return prompted_answers(self._processor, self._pictures, prompt, loaded, answers, place)

    def encode(self, prompted: PromptedAnswers) -> list[EncodedAnswer]:
        """See `encode_answers`."""
        return encode_answers(self._processor, self._ends, prompted)

    def encode_sampled(
        self, prompted: PromptedAnswers, sampled: Sequence[SampledTokens]
    ) -> list[EncodedAnswer]:
        """See `encode_sampled_answers`."""
        return encode_sampled_answers(self._processor, prompted, sampled)

    def actions_at(self, sampled: SampledTokens, text: str, ends: Sequence[int]) -> list[int]:
        """See `text_places.actions_at`."""
        decode = partial(self._processor.tokenizer.decode, skip_special_tokens=True)
        return actions_at(sampled, text, ends, decode)

    def pieces(self, sampled: SampledTokens) -> list[str | int]:
        """See `text_places.pieces_of`."""
        tokenizer = self._processor.tokenizer
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        return pieces_of(sampled, decode, tokenizer.convert_ids_to_tokens)

    def part_ends(self, prompted: PromptedAnswers, encoded: Sequence[EncodedAnswer]) -> list[list[int]]:
        """See `encoding.part_ends_in_tokens`."""
        return part_ends_in_tokens(self._processor, prompted, encoded)

    def num_answer_tokens(self, encoded: EncodedAnswer) -> int:
        """See `Policy.num_answer_tokens`."""
        return encoded.num_answer_tokens

    def plan(self, groups: Sequence[Sequence[EncodedAnswer]], max_tokens: int) -> list[list[int]]:
        """See `batches_by_length`."""
        return batches_by_length(groups, max_tokens)

    def idle_batch(self) -> PaddedAnswers:
        """A row of silence, and of dark pictures where pictures are shown, without answer tokens."""
        return self.batch([self._filler])

    def batch(self, encoded: Sequence[EncodedAnswer]) -> PaddedAnswers:
        """Pad answers; a filler row keeps encoders in the step that the answers give nothing to.

        Raises:
            ValueError: no answers.
        """
        pad_id = self._processor.tokenizer.pad_token_id
        pad_id = min(self._ends) if pad_id is None else pad_id
        return pad_answers(encoded, pad_id, self._filler, placeholder_ids(self._root.model.config))

    def check_reader(self, reader: Policy[Any, Any, Any], key: str) -> None:
        """See `Policy.check_reader`: the type of the model, vocabulary and features are the same."""
        if not isinstance(reader, ListenerPolicy):
            raise ConfigError(
                f"{key}: is a DualFFN, and the policy a model of transformers", "", OTHER_INPUTS
            )
        where = reader._folder
        kinds = [policy._root.model.config.model_type for policy in (self, reader)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"{key}: is a {kinds[1]}, and the policy a {kinds[0]}", str(where), OTHER_INPUTS
            )
        _check_vocabulary(self._processor, reader._processor, where, key)
        features = [
            extractor_of(policy._processor).to_dict() if takes_recordings(policy._processor) else None
            for policy in (self, reader)
        ]
        if features[0] != features[1]:
            raise ConfigError(
                f"{key}: takes other features of recordings than the policy", str(where), OTHER_INPUTS
            )

    def answer_logprobs(
        self, root: nn.Module, batch: PaddedAnswers, request: TokenRequest, draw_T: Tensor | None = None
    ) -> AnswerLogprobs:
        """See `Policy.answer_logprobs`.

        Raises:
            ValueError: the request needs a reference, and none was loaded.
        """
        scored, draw_T = scored_batch(batch, request, draw_T)
        reference_T = reference_TV = None
        if request.reference or request.kl:
            reference_TV = self._reference_logits(root, scored)
            plain = TokenRequest(temperature=request.temperature)
            forbidden = scored.forbidden(reference_TV.shape[1])
            reference_figures = token_figures(reference_TV, scored.target_T, plain, forbidden=forbidden)
            reference_T = reference_figures.logprob_T
            reference_TV = reference_TV if request.kl else None  # not kept through the policy's pass
        figures = root(scored, request, reference_TV=reference_TV, draw_T=draw_T)
        assert isinstance(figures, TokenFigures)
        return logprobs_of_figures(batch, figures, reference_T, draw_T, request)

    def prompt_lengths(self, batch: PaddedAnswers) -> Tensor:
        """See `prompt_tokens.prompt_lengths`."""
        return prompt_lengths(batch)

    @torch.no_grad()
    def target_logits(self, batch: PaddedAnswers) -> Logits:
        """See `GivesLogits.target_logits`."""
        logits_TV = self._root(batch, None)
        assert isinstance(logits_TV, Tensor)
        return [logits_TV[:MAX_TARGETS].float().cpu()]

    def save(self, folder: Path) -> None:
        """Write the whole model with its processor to `folder/model`, and an adapter alone to `folder/adapter`.

        The adapter is added into the weights of `folder/model`, which loads with transformers' own classes. The root
        must hold its weights whole: after a run on several ranks, load them into a policy made anew. A model of a
        class that is not transformers' is written into files like those that it began from.
        """
        target, model = folder / "model", self._root.model
        check_whole(model)
        target.mkdir(parents=True, exist_ok=True)
        plain = model.get_base_model() if self._has_adapter else model
        if self._has_adapter:
            save_adapter(model, folder / "adapter")
        weights = MergedWeights(model) if self._has_adapter else model.state_dict()
        if getattr(plain, "writes_published_files", False):
            check_stored(self._folder, weights, tied={})
            write_published(self._folder, target, weights)
        else:
            plain.save_pretrained(str(target), state_dict=dict(weights))
            _copy_processor(self._folder, target)
        if self._pictures is not None:
            self._pictures.settings.save(target)

    def _greedy_answer(self, request: GreedyRequest) -> GreedyAnswer:
        prompted, ends = request.prompted, sorted(self._ends)
        inputs = processor_inputs(self._processor, prompted.prompt, True, prompted.recordings)
        ids_1N = generate_ids(
            self._root.model,
            inputs,
            max_new_tokens=request.limits.max_text_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        ids = ids_1N[0].tolist()
        text: str = self._processor.decode(ids, skip_special_tokens=True)
        return GreedyAnswer(text.strip(), len(ids), 0, bool(ids) and ids[-1] in self._ends)

    @cached_property
    def _filler(self) -> EncodedAnswer:
        return encode_filler(self._processor, self._pictures is not None)

    @property
    def _has_adapter(self) -> bool:
        return hasattr(self._root.model, "disable_adapter")

    @torch.no_grad()
    def _reference_logits(self, root: nn.Module, batch: PaddedAnswers) -> Tensor:
        if self._reference is not None:
            logits_TV = self._reference(batch, None)
        elif self._has_adapter:
            logits_TV = root(batch, None, adapter=False)
        else:
            raise ValueError("the policy was loaded without a reference (needs_reference=False)")
        assert isinstance(logits_TV, Tensor)
        return logits_TV


def _check_vocabulary(policy_processor: Any, reader_processor: Any, folder: Path, key: str) -> None:
    ours, theirs = (processor.tokenizer.get_vocab() for processor in (policy_processor, reader_processor))
    if ours != theirs:
        raise ConfigError(
            f"{key}: its vocabulary of {len(theirs)} tokens is not the policy's of {len(ours)}",
            str(folder),
            OTHER_INPUTS,
        )


def _copy_processor(source: Path, target: Path) -> None:
    """Copy the processor's files as they are; weights, code and the model's config are not among them."""
    for pattern in PROCESSOR_FILES:
        for path in sorted(source.glob(pattern)):
            if not any(path.match(name) for name in MODEL_FILES):
                shutil.copyfile(path, target / path.name)


_: type[Policy[PromptedAnswers, EncodedAnswer, PaddedAnswers]] = ListenerPolicy
