"""The policy of a talker: what `train`, `train_preference`, `train_policy` and `sample_answers` ask of it.

Shapes: T actions, K codebooks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.data.packing import first_fit
from audiollm.data.records.source import LoadedSample
from audiollm.errors import BadSample, ConfigError
from audiollm.families.adapters import MergedWeights, save_adapter
from audiollm.families.adapting import adapt_model
from audiollm.families.family import PolicySettings
from audiollm.families.frozen_weights import share_frozen_weights
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.prompt_tokens import logprobs_of_figures
from audiollm.families.logprobs.token_figures import HeadRows, TokenFigures, TokenRequest
from audiollm.families.policy import OTHER_INPUTS, GreedyAnswer, GreedyRequest, Policy
from audiollm.families.prompts import PromptedContents, prompted_contents
from audiollm.families.talkers.decoding import speak_to_end
from audiollm.families.talkers.drawing import Speaking
from audiollm.families.talkers.kind import TalkerKind, TalkerSampling
from audiollm.families.talkers.packed_steps import TalkerSteps
from audiollm.families.talkers.published_weights import check_stored, load_published, write_published
from audiollm.families.talkers.rollouts import TalkerRollouts
from audiollm.families.talkers.rows import NONE, SpeechBatch, SpeechRows, fold_ends, speech_batch
from audiollm.families.talkers.scorer import SpeechScorer, offset_losses
from audiollm.families.talkers.talker import Talker
from audiollm.families.talkers.turns import SpeechPrompt, read_speech_prompt
from audiollm.families.target_logits import Logits, head_logits
from audiollm.generation.engine.request import SampledTokens
from audiollm.models.frozen.shrink import check_whole
from audiollm.models.pretrained import StoredWeights
from audiollm.train.settings import LoRASettings, PromptMix


def load_talker(kind: TalkerKind, dtype: torch.dtype = torch.float32) -> Talker:
    """Load the model of a folder, on the CPU.

    Raises:
        ConfigError: the weights are not those of config.json, or of no model of this kind.
    """
    unknown = kind.unknown_weights(StoredWeights(kind.folder).names)
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: a weight that models of {kind.model_type} do not have",
            str(kind.folder),
            "give the folder as it was published",
        )
    with torch.device("meta"):
        model = kind.new_talker()
    load_published(model, kind.folder, kind.tied(), dtype)
    return model.eval()


class TalkerPolicy:
    """A `Policy`, as `audiollm/families/policy.py` explains each of its methods.

    Args:
        kind: of the folder to begin from.
    """

    def __init__(self, kind: TalkerKind, settings: PolicySettings) -> None:
        self._kind, self._has_adapter = kind, settings.trained == "adapter"
        self._mix, self._vectors = settings.prompt_mix, dict[str, Tensor]()
        model, suppressed = load_talker(kind), (kind.suppressed, kind.suppressed_depth)
        self._reference: SpeechScorer | None = None
        if self._has_adapter and settings.reference not in (None, kind.folder):
            raise ConfigError(
                "reference: with trained: adapter, the reference is the model without its adapter",
                str(settings.reference),
                "leave reference out, or train all weights",
            )
        if settings.needs_reference and not self._has_adapter:
            folder = settings.reference or kind.folder
            reference = load_talker(kind if folder == kind.folder else type(kind)(folder))
            self._reference = SpeechScorer(reference.requires_grad_(False), suppressed=suppressed)
        lora = None
        if settings.lora is not None:
            check_ties(settings.lora, kind)
            lora = expand_groups(model, settings.lora, kind)
        adapted = adapt_model(model, settings.trained, lora)
        self._root = SpeechScorer(model, adapted if self._has_adapter else None, suppressed)

    @property
    def root(self) -> SpeechScorer:
        """See `Policy.root`."""
        return self._root

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """See `Policy.frozen`."""
        return {} if self._reference is None else {"reference": self._reference}

    @property
    def num_codebooks(self) -> int:
        """See `Policy.num_codebooks`."""
        return self._root.model.num_codebooks

    @property
    def codebook_size(self) -> int:
        """See `guards.offsets.GivesOffsets.codebook_size`."""
        return self._root.model.codebook_size

    @property
    def has_tied_heads(self) -> bool:
        """See `guards.offsets.GivesOffsets.has_tied_heads`."""
        return self._kind.has_tied_heads

    @property
    def depth_weight(self) -> float | None:
        """See `DepthPolicy.depth_weight`."""
        return self._kind.depth_weight

    def count_parts(self, encoded: SpeechRows) -> tuple[int, int]:
        """See `DepthPolicy.count_parts`."""
        firsts = len(encoded.target_F)
        return firsts, encoded.num_targets - firsts

    def hold_to(self, reference: nn.Module) -> None:
        """See `Policy.hold_to`."""
        assert isinstance(reference, SpeechScorer)
        self._reference = reference.eval()

    def take(self, loaded: LoadedSample, answers: Sequence[int], place: str = "") -> PromptedContents:
        """See `Policy.take`."""
        return self.take_beside(loaded, loaded, answers, place)

    def take_beside(
        self, prompt: LoadedSample, loaded: LoadedSample, answers: Sequence[int], place: str = ""
    ) -> PromptedContents:
        """See `Policy.take_beside`. A voice is heard from the prompt's recording, else the first answer's."""
        prompted = prompted_contents(prompt, loaded, answers, place)
        if not self._kind.reads_vectors:
            return prompted
        return replace(prompted, vector_C=self._voice_vector(prompt, loaded, answers))

    def encode(self, prompted: PromptedContents) -> list[SpeechRows]:
        """See `Policy.encode`."""
        return spoken_answers(prompted, self._kind, self._root.model, self._mix)

    def encode_sampled(
        self, prompted: PromptedContents, sampled: Sequence[SampledTokens]
    ) -> list[SpeechRows]:
        """See `Policy.encode_sampled`."""
        prompt = read_prompt(prompted, self._kind, self._mix)
        return [
            self._kind.answer_rows(prompt, tokens.codes[0], tokens.ended[0], is_sampled=True)
            for tokens in sampled
        ]

    def actions_at(self, sampled: SampledTokens, text: str, ends: Sequence[int]) -> list[int]:
        """See `Policy.actions_at`: no text is drawn."""
        return [0] * len(ends)

    def pieces(self, sampled: SampledTokens) -> list[str | int]:
        """See `Policy.pieces`."""
        return [sampled.num_actions]

    def part_ends(self, prompted: PromptedContents, encoded: Sequence[SpeechRows]) -> list[list[int]]:
        """See `Policy.part_ends`."""
        raise BadSample(prompted.place, prompted.id, "its answers are one stretch of speech", "no parts")

    def num_answer_tokens(self, encoded: SpeechRows) -> int:
        """See `Policy.num_answer_tokens`."""
        if not encoded.is_sampled or self._kind.end_codes is None:
            return encoded.num_targets
        return len(self._pack_actions([encoded]).answer_T)

    def plan(self, groups: Sequence[Sequence[SpeechRows]], max_tokens: int) -> list[list[int]]:
        """See `Policy.plan`."""
        rows = [sum(answer.num_rows for answer in group) for group in groups]
        return first_fit(rows, max(max_tokens, *rows)) if rows else []

    def batch(self, encoded: Sequence[SpeechRows]) -> SpeechBatch:
        """See `Policy.batch`."""
        return self._pack_actions(encoded)

    def idle_batch(self) -> SpeechBatch:
        """See `Policy.idle_batch`."""
        rows = self._kind.answer_rows(
            SpeechPrompt("a"), torch.zeros(self.num_codebooks, 1, dtype=torch.long), ended=False
        )
        batch = speech_batch([rows])
        none = torch.zeros(0, dtype=torch.long)
        return replace(
            batch,
            source_F=none,
            target_F=none,
            depth_D=none,
            target_DJ=batch.target_DJ[:0],
            sampled_F=none.bool(),
            order_T=none,
            answer_T=none,
            codebook_T=none,
        )

    def check_reader(self, reader: Policy[Any, Any, Any], key: str) -> None:
        """See `Policy.check_reader`."""
        if not isinstance(reader, TalkerPolicy) or not _same_shape(reader._root.model, self._root.model):
            raise ConfigError(f"{key}: is another kind of model than the policy", "", OTHER_INPUTS)

    def answer_logprobs(
        self, root: nn.Module, batch: SpeechBatch, request: TokenRequest, draw_T: Tensor | None = None
    ) -> AnswerLogprobs:
        """See `Policy.answer_logprobs`.

        Raises:
            ValueError: the request needs a reference, and none was loaded.
        """
        reference_T, rows = None, None
        spread_T = draw_T if draw_T is None or batch.fold_T is None else draw_T[batch.fold_T]
        if request.reference or request.kl:
            rows = self._reference_rows(root, batch)
            plain = TokenRequest(temperature=request.temperature)
            reference_T = batch.fold(self._root.figures_of_rows(batch, rows, plain).logprob_T)
        figures = root(batch, request, reference=rows if request.kl else None, draw_T=spread_T)
        assert isinstance(figures, TokenFigures)
        folded = TokenFigures(*(None if value is None else batch.fold(value) for value in figures))  # type: ignore[arg-type]
        logprobs = logprobs_of_figures(batch, folded, reference_T, draw_T, request)
        return replace(logprobs, codebook_T=batch.codebook_T)

    def offset_losses(self, root: nn.Module, batch: SpeechBatch, places: Sequence[tuple[int, int]]) -> Tensor:
        """See `guards.offsets.GivesOffsets.offset_losses`."""
        rows = root(batch, None)
        assert isinstance(rows, list)
        return offset_losses(batch, rows, places, self.codebook_size)

    def prompt_lengths(self, batch: SpeechBatch) -> Tensor:
        """See `Policy.prompt_lengths`: no token of a prompt has a likelihood."""
        return torch.zeros(batch.num_answers, dtype=torch.long)

    def freeze_unreached(self, has_recordings: bool) -> None:
        """See `Policy.freeze_unreached`: speech reaches all weights."""

    def share_frozen(self) -> None:
        """See `Policy.share_frozen`."""
        share_frozen_weights(self._root, self._reference)

    def rollout_engine(self, slots: int | None = None) -> TalkerRollouts:
        """See `Policy.rollout_engine`."""
        return TalkerRollouts(self._root.model, self._kind, slots, self._mix)

    def greedy_answers(self, requests: Sequence[GreedyRequest]) -> list[GreedyAnswer]:
        """See `Policy.greedy_answers`; one after the other."""
        answers, steps = [], TalkerSteps(self._root.model)
        for request in requests:
            prompt = self._kind.prompt_rows(read_prompt(request.prompted, self._kind))
            speaking = Speaking(prompt, TalkerSampling.plain(0.0), request.limits.max_frames, 0)
            speak_to_end(self._root.model, self._kind, [speaking], 1, steps)
            actions = speaking.tokens(self.num_codebooks, True).num_actions
            answers.append(GreedyAnswer("", actions, len(speaking.codes), speaking.has_ended))
        return answers

    def target_logits(self, batch: SpeechBatch) -> Logits:
        """See `GivesLogits.target_logits`; a vocabulary is a codebook's."""
        rows = self._root(batch, None)
        assert isinstance(rows, list)
        targets = [batch.target_F, *batch.target_DJ.unbind(1)]
        return [
            head_logits(hidden_XC[target_X != NONE], weight)
            for (hidden_XC, weight), target_X in zip(rows, targets, strict=True)
        ]

    def save(self, folder: Path) -> None:
        """Write the model in its published layout to `folder/model`, and an adapter alone to `folder/adapter`."""
        model = self._root.model
        check_whole(model)
        weights: Mapping[str, Tensor] = model.state_dict()
        if self._has_adapter:
            save_adapter(self._root.adapted, folder / "adapter")
            weights = MergedWeights(self._root.adapted)
        tied = self._kind.tied()
        check_stored(self._kind.folder, weights, tied)
        write_published(self._kind.folder, folder / "model", weights, tied)

    def _voice_vector(
        self, prompt: LoadedSample, loaded: LoadedSample, answers: Sequence[int]
    ) -> Tensor | None:
        """The vector of a sample's voice; None where there is no sound to hear it from."""
        asked = [clip for clip in prompt.audio[: prompt.num_asked] if clip.content is not None]
        answered = loaded.answered(answers[0]).audio[-1:] if answers and loaded.audio else ()
        clips = [*asked[-1:], *(clip for clip in answered if clip.content is not None)]
        if not clips:
            return None
        key = f"{loaded.sample.id} {clips[0].place} {clips[0].start_s} {clips[0].end_s}"
        if key not in self._vectors:
            try:
                self._vectors[key] = self._kind.vector_of(clips[0].load(mono=True))
            except ValueError as error:
                raise BadSample(clips[0].place, loaded.sample.id, str(error), "short reference") from None
        return self._vectors[key]

    def _pack_actions(self, encoded: Sequence[SpeechRows]) -> SpeechBatch:
        batch = speech_batch(encoded)
        if self._kind.end_codes is None or not bool(batch.sampled_F.any()):
            return batch
        end_K = torch.tensor([self._kind.end, *self._kind.end_codes])
        is_end_F = torch.zeros(len(batch.target_F), dtype=torch.bool)
        is_end_F[batch.depth_D] = (batch.codes_DK == end_K).all(dim=1)
        return fold_ends(batch, is_end_F)

    @torch.no_grad()
    def _reference_rows(self, root: nn.Module, batch: SpeechBatch) -> list[HeadRows]:
        if self._reference is not None:
            rows = self._reference(batch, None)
        elif self._has_adapter:
            rows = root(batch, None, adapter=False)
        else:
            raise ValueError("the policy was loaded without a reference")
        assert isinstance(rows, list)
        return rows


def read_prompt(prompted: PromptedContents, kind: TalkerKind, mix: PromptMix | None = None) -> SpeechPrompt:
    """The prompt of a sample as it is shown.

    Raises:
        BadSample: no talker's prompt holds it.
    """
    try:
        prompt = read_speech_prompt(prompted.prompt, prompted.audio, prompted.language)
        return kind.complete(prompt, prompted.vector_C, mix, prompted.id)
    except ValueError as error:
        raise BadSample(prompted.place, prompted.id, str(error), "prompt") from None


def spoken_answers(
    prompted: PromptedContents, kind: TalkerKind, model: Talker, mix: PromptMix | None = None
) -> list[SpeechRows]:
    """The answers behind their prompt.

    Raises:
        BadSample: an answer that is not one stretch of speech, that was coded by another codec, or a prompt that the
            model does not take.
    """
    prompt, encoded = read_prompt(prompted, kind, mix), []
    for turn in prompt.before if prompt.learns_turns else ():
        check_spoken_codes(turn.codes_KT, model, prompted)
    for answer in prompted.answers:
        if len(answer.codes) != 1 or len(answer.content) != 1:
            reason = "an answer of this model is one stretch of speech, and nothing else"
            raise BadSample(prompted.place, prompted.id, reason, "no speech")
        codes_KT = answer.codes[0].long()
        check_spoken_codes(codes_KT, model, prompted)
        try:
            encoded.append(kind.answer_rows(prompt, codes_KT))
        except ValueError as error:
            raise BadSample(prompted.place, prompted.id, str(error), "prompt") from None
    return encoded


def check_spoken_codes(codes_KT: Tensor, model: Talker, prompted: PromptedContents) -> None:
    """Check that codes are of the model's codec, as far as their numbers tell.

    Raises:
        BadSample: too few or too many codebooks, codes out of range, or no frame.
    """
    books, size = model.num_codebooks, model.codebook_size
    problem = ""
    if len(codes_KT) != books:
        problem = f"has codes of {len(codes_KT)} codebooks, and the model speaks in {books}"
    elif codes_KT.shape[1] == 0:
        problem = "has no frame: the recording is shorter than one"
    elif int(codes_KT.min()) < 0 or int(codes_KT.max()) >= size:
        problem = f"has codes up to {int(codes_KT.max())}, and the model's codebooks have {size}"
    if problem:
        remedy = "encode the recordings with the codec in the model's own folder (`tokenize`, `codec`: that folder)"
        raise BadSample(prompted.place, prompted.id, f"{problem}: {remedy}", "another codec")


def check_ties(lora: LoRASettings, kind: TalkerKind) -> None:
    """Refuse to train one end of a tied table beside an adapter: PEFT would copy it, and so untie it.

    Raises:
        ConfigError: `lora.trained_beside` names a module of a tied weight.
    """
    for weight in {*kind.tied(), *kind.tied().values()}:
        module = weight.rpartition(".")[0]
        for name in lora.trained_beside:
            if f".{name}." in f".{module}.":
                raise ConfigError(
                    f"lora.trained_beside: {name} is one end of a tied table, and would be copied",
                    str(kind.folder),
                    "leave it out; or train all weights, where it stays one tensor",
                )


def expand_groups(model: nn.Module, lora: LoRASettings, kind: TalkerKind) -> LoRASettings:
    """Put the linear layers of a group in the place of its name among `lora.target_modules`.

    Raises:
        ConfigError: a group without a linear layer.
    """
    names: list[str] = []
    for target in lora.target_modules:
        inside = kind.groups.get(target)
        if inside is None:
            names.append(target)
            continue
        layers = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and re.fullmatch(inside, name)
        ]
        if not layers:
            raise ConfigError(
                f"lora.target_modules: {target} has no linear layer in this model", "", "leave it out"
            )
        names += layers
    return replace(lora, target_modules=tuple(dict.fromkeys(names)))


def _same_shape(first: Talker, second: Talker) -> bool:
    sizes = [
        (
            model.num_codebooks,
            model.codebook_size,
            model.first_entries,
            model.get_input_embeddings().weight.shape,
        )
        for model in (first, second)
    ]
    return type(first) is type(second) and sizes[0] == sizes[1]
