"""Policies of the project's own DualFFN: answers in text and speech, packed.

Shapes: T answer tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Template, TokenStream
from audiollm.data.hearing.features import FeatureShape
from audiollm.data.packing import first_fit
from audiollm.data.records.source import LoadedSample
from audiollm.data.text.tokenizer import AUDIO_OUT_BOS
from audiollm.errors import ConfigError
from audiollm.families.adapters import MergedWeights, save_adapter
from audiollm.families.dual_ffn.adapting import adapt
from audiollm.families.dual_ffn.limits import MAX_SLOTS
from audiollm.families.dual_ffn.losses import packed_logits
from audiollm.families.dual_ffn.packed_scorer import PackedScorer, TargetRows, figures_of_rows
from audiollm.families.dual_ffn.rollouts import DualFFNRollouts
from audiollm.families.dual_ffn.sampled_streams import SampledStream, encode_sampled_contents, pack_sampled
from audiollm.families.dual_ffn.saving import save_continued
from audiollm.families.dual_ffn.start import start_codec, start_model, start_template
from audiollm.families.dual_ffn.stream_rollouts import run_streams
from audiollm.families.dual_ffn.streams import (
    PackedAnswers,
    check_prompt,
    encode_contents,
    part_ends_in_stream,
)
from audiollm.families.family import MAX_TOKENS
from audiollm.families.frozen_weights import share_frozen_weights
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.prompt_tokens import logprobs_of_figures, prompt_lengths, scored_batch
from audiollm.families.logprobs.text_places import actions_at, pieces_of
from audiollm.families.logprobs.token_figures import TokenFigures, TokenRequest
from audiollm.families.policy import OTHER_INPUTS, GreedyAnswer, GreedyRequest, Policy, StreamPolicy
from audiollm.families.prompts import PromptedContents, prompted_contents
from audiollm.families.streams import ActedStream, StreamCourse
from audiollm.families.target_logits import Logits
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Request, SampledTokens
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.hub_models.names import folder_label
from audiollm.models.audio_encoder import frozen_features
from audiollm.models.decoder import DualFFNLayer
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.frozen.shrink import check_whole
from audiollm.models.model_card import ModelCard
from audiollm.models.packed_decoder import GenerationDecoder
from audiollm.models.pretrained import model_folder
from audiollm.train.settings import LoRASettings, Trained

if TYPE_CHECKING:
    from peft import PeftModel

ROWS_MULTIPLE = 16
"""Less than in supervised training: the rows of answers are few, and what fills them up is computed for nothing."""


class DualFFNPolicy:
    """A `Policy` of a DualFFN; `load` makes one from a folder.

    Batches are packs; `packing.plan_step` plans them, with the answers to a prompt as a group. With an adapter, the
    reference is the model with its adapter off; otherwise it is a second, frozen model in `frozen`.
    """

    def __init__(
        self,
        folder: Path,
        template: Template,
        root: PackedScorer,
        reference: PackedScorer | None = None,
        max_tokens: int = MAX_TOKENS,
        rows_multiple: int = ROWS_MULTIPLE,
    ) -> None:
        """Join loaded parts; `reference` is None where the root has an adapter, or no reference is needed.

        Args:
            max_tokens: positions of a pack.
            rows_multiple: rows of each kind are filled up to a multiple of this (`packing.pack`).
        """
        self._folder, self._template, self._root, self._reference = folder, template, root, reference
        self._max_tokens, self._multiple = max_tokens, rows_multiple
        self._shares_encoder = reference is None or _have_one_encoder(root.model, reference.model)

    @classmethod
    def load(
        cls,
        folder: Path,
        trained: Trained = "all",
        lora: LoRASettings | None = None,
        dtype: torch.dtype = torch.float32,
        reference: Path | None = None,
        needs_reference: bool = True,
        encoder_trained: bool = True,
        max_tokens: int = MAX_TOKENS,
        rows_multiple: int = ROWS_MULTIPLE,
    ) -> DualFFNPolicy:
        """Load the model that is trained, and its reference, on the CPU.

        Args:
            folder: a DualFFN's (ours, transformers' or Boson's), or a plain Llama's or Qwen's, whose audio part then
                begins from torch's generator.
            trained: `all`, `audio_ffn`, `adapter` (LoRA), or patterns of parameter names.
            dtype: of the weights of both models.
            reference: folder of another model to begin from; None: `folder`.
            needs_reference: False where no objective reads a reference; none is loaded then.
            encoder_trained: False keeps the audio encoder as it is, whatever `trained` says.
            max_tokens, rows_multiple: as the constructor has them.

        Raises:
            ConfigError: a folder that does not load, another reference beside an adapter, a reference with another
                vocabulary or codec, or `trained` and `lora` that do not fit the model.
        """
        folder = model_folder(folder)
        template = start_template(folder)
        model = start_model(folder, template).to(dtype)
        frozen = None
        if trained == "adapter":
            _refuse_other_reference(folder, reference)
        elif needs_reference:
            reference_model = (
                _load_reference(folder, template, model, reference).to(dtype).requires_grad_(False)
            )
            frozen = PackedScorer(reference_model).eval()
        try:
            adapted = adapt(model, trained, lora, encoder_trained)
        except ValueError as error:
            raise ConfigError(str(error), "", "see `trained` and `lora`") from error
        root = PackedScorer(model, None if adapted is model else adapted)
        return cls(folder, template, root, frozen, max_tokens, rows_multiple)

    @property
    def root(self) -> PackedScorer:
        """The module that a strategy wraps."""
        return self._root

    @property
    def template(self) -> Template:
        """The chat template, with the model's vocabulary and codebooks."""
        return self._template

    @property
    def encoder(self) -> FeatureShape | None:
        """The features in which the model hears recordings; None: as codes.

        Rows that were encoded before are read where the encoder is trained neither here nor in the reference.
        """
        model = self._root.model
        config = model.config.audio_encoder
        if config is None:
            return None
        is_frozen = not model.audio_tower.is_trained and self._shares_encoder
        return frozen_features(config, self._folder) if is_frozen else config.features

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """The reference, where it is a model of its own."""
        return {} if self._reference is None else {"reference": self._reference}

    def hold_to(self, reference: nn.Module) -> None:
        """See `Policy.hold_to`."""
        assert isinstance(reference, PackedScorer)
        self._reference = reference.eval()
        self._reference.answers_in_text = self._root.answers_in_text

    def freeze_unreached(self, has_recordings: bool) -> None:
        """Freeze what no answer in text depends on, which gradients of 0 and the optimizer would keep memory for.

        Args:
            has_recordings: whether prompts have recordings.
        """
        model = self._root.model
        unreached: list[nn.Module] = [model.audio_lm_head]
        if self.encoder is not None or not has_recordings:  # features take the branch of text
            unreached.append(model.model.embed_audio_tokens)
            for layer in model.model.layers:
                if isinstance(layer, DualFFNLayer) and layer.has_audio_ffn:
                    norms = layer.audio_input_layernorm, layer.audio_post_attention_layernorm
                    unreached += [layer.audio_mlp, *norms]
        for module in unreached:
            module.requires_grad_(False)
        for scorer in (self._root, self._reference):
            if scorer is not None:
                scorer.answers_in_text = True

    def share_frozen(self) -> None:
        """Have the reference hold the weights that are not trained, where it has the same, in the policy's memory."""
        share_frozen_weights(self._root, self._reference)

    @property
    def num_codebooks(self) -> int:
        """See `Policy.num_codebooks`."""
        return self._template.num_codebooks

    def rollout_engine(self, slots: int | None = None) -> DualFFNRollouts:
        """See `Policy.rollout_engine`."""
        return DualFFNRollouts(self._root.model, self._template, slots or MAX_SLOTS)

    def check_prompt(self, prompted: PromptedContents) -> None:
        """See `StreamPolicy.check_prompt`."""
        check_prompt(self._template, prompted, self.encoder)

    def run_streams(self, courses: Sequence[StreamCourse], max_slots: int) -> list[ActedStream]:
        """See `StreamPolicy.run_streams`."""
        model = self._root.model.eval()
        return run_streams(model, self._template, GenerationDecoder(model), max_slots, courses)

    def greedy_answers(self, requests: Sequence[GreedyRequest]) -> list[GreedyAnswer]:
        """See `Policy.greedy_answers`; all prompts go through the engine together."""
        greedy = SamplingConfig(temperature=0.0)
        prompts = [
            Request(request.prompted.prompt, 0, request.prompted.audio, greedy, request.limits, request.kind)
            for request in requests
        ]
        if not prompts:
            return []
        engine = Engine.sized_for(self._root.model, self._template, prompts)
        encode = self._template.tokenizer.encode
        return [
            GreedyAnswer(
                answer.text.strip(),
                # the engine tells the text alone: its bytes may be no whole characters, and then make more tokens
                min(len(encode(answer.text, add_special_tokens=False).ids), request.limits.max_text_tokens)
                + answer.codes_KT.numel()
                + answer.stopped,
                answer.codes_KT.shape[1],
                answer.stopped,
            )
            for request, answer in zip(requests, engine.run(prompts), strict=True)
        ]

    def take(self, loaded: LoadedSample, answers: Sequence[int], place: str = "") -> PromptedContents:
        """See `Policy.take`; codes are those of the sample's first encoding."""
        return self.take_beside(loaded, loaded, answers, place)

    def take_beside(
        self, prompt: LoadedSample, loaded: LoadedSample, answers: Sequence[int], place: str = ""
    ) -> PromptedContents:
        """See `Policy.take_beside`."""
        return prompted_contents(prompt, loaded, answers, place, self.encoder)

    def part_ends(self, prompted: PromptedContents, encoded: Sequence[TokenStream]) -> list[list[int]]:
        """See `streams.part_ends_in_stream`."""
        return part_ends_in_stream(self._template, prompted, encoded)

    def num_answer_tokens(self, encoded: TokenStream) -> int:
        """The targets of the stream: words, and codes of all codebooks."""
        codes = int((encoded.audio_targets_SK != IGNORE).sum())
        return int((encoded.text_targets_S != IGNORE).sum()) + codes

    def plan(self, groups: Sequence[Sequence[TokenStream]], max_tokens: int) -> list[list[int]]:
        """First fit, longest groups first."""
        lengths = [sum(len(stream) for stream in group) for group in groups]
        return first_fit(lengths, max(max_tokens, *lengths)) if lengths else []

    def idle_batch(self) -> PackedAnswers:
        """A pack without answers."""
        return self.batch([])

    def encode(self, prompted: PromptedContents) -> list[TokenStream]:
        """See `encode_contents`."""
        return encode_contents(self._template, prompted, self.encoder, self._max_tokens)

    def encode_sampled(
        self, prompted: PromptedContents, sampled: Sequence[SampledTokens]
    ) -> list[SampledStream]:
        """See `sampled_streams.encode_sampled_contents`."""
        return encode_sampled_contents(self._template, prompted, sampled, self.encoder, self._max_tokens)

    def actions_at(self, sampled: SampledTokens, text: str, ends: Sequence[int]) -> list[int]:
        """See `text_places.actions_at`."""
        tokenizer = self._template.tokenizer
        return actions_at(sampled, text, ends, tokenizer.decode, tokenizer.token_to_id(AUDIO_OUT_BOS))

    def pieces(self, sampled: SampledTokens) -> list[str | int]:
        """See `text_places.pieces_of`."""
        tokenizer = self._template.tokenizer
        opens_speech = tokenizer.token_to_id(AUDIO_OUT_BOS)
        return pieces_of(sampled, tokenizer.decode, tokenizer.id_to_token, opens_speech)

    def batch(self, encoded: Sequence[TokenStream]) -> PackedAnswers:
        """Pack answers; of none, an idle pack, for a rank that has none left while others have.

        Sampled answers get the masks that they were sampled under.
        """
        words = self._root.model.config.vocab_size
        return pack_sampled(encoded, self._template, words, self._multiple, self.encoder)

    def check_reader(self, reader: Policy[Any, Any, Any], key: str) -> None:
        """See `Policy.check_reader`: vocabulary, codec, codebooks and audio encoder are the same.

        Recordings are heard anew where the reader's encoder has weights of its own, or is trained.
        """
        if not isinstance(reader, DualFFNPolicy):
            raise ConfigError(f"{key}: is no DualFFN, as the policy is", "", OTHER_INPUTS)
        place = reader._folder
        _check_inputs(key, place, (self._folder, self._template), (place, reader._template))
        shapes = [
            (policy._template.num_codebooks, policy._template.codebook_size) for policy in (self, reader)
        ]
        if shapes[0] != shapes[1]:
            reason = f"{key}: its codebooks and their sizes {shapes[1]} are not the policy's {shapes[0]}"
            raise ConfigError(reason, str(place), OTHER_INPUTS)
        model, reading_model = self._root.model, reader._root.model
        _check_encoder(key, place, model, reading_model)
        if model.config.audio_encoder is not None:
            is_same = _have_one_encoder(model, reading_model) and not reading_model.audio_tower.is_trained
            self._shares_encoder = self._shares_encoder and is_same

    def answer_logprobs(
        self, root: nn.Module, batch: PackedAnswers, request: TokenRequest, draw_T: Tensor | None = None
    ) -> AnswerLogprobs:
        """See `Policy.answer_logprobs`; each code of a frame is a token of its own.

        Raises:
            ValueError: the request needs a reference, and none was loaded.
        """
        scored, draw_T = scored_batch(batch, request, draw_T)
        reference_T = rows = None
        if request.kl:
            rows = self._of_reference(root, scored, None)
            assert isinstance(rows, TargetRows)
            plain = TokenRequest(temperature=request.temperature)
            reference_T = figures_of_rows(scored, rows, plain).logprob_T
        elif request.reference:
            reference_figures = self._of_reference(
                root, scored, TokenRequest(temperature=request.temperature)
            )
            assert isinstance(reference_figures, TokenFigures)
            reference_T = reference_figures.logprob_T
        figures = root(scored, request, reference=rows, draw_T=draw_T)
        assert isinstance(figures, TokenFigures)
        answers = logprobs_of_figures(batch, figures, reference_T, draw_T, request)
        return replace(answers, codebook_T=batch.codebook_T)

    def prompt_lengths(self, batch: PackedAnswers) -> Tensor:
        """See `prompt_tokens.prompt_lengths`."""
        return prompt_lengths(batch)

    @torch.no_grad()
    def target_logits(self, batch: PackedAnswers) -> Logits:
        """See `GivesLogits.target_logits`."""
        return packed_logits(self._root.model, self._root.model(batch.pack), batch.pack)

    def save(self, folder: Path, card: ModelCard | None = None) -> None:
        """Write the whole model to `folder/model`, as `train` does, and an adapter alone to `folder/adapter`.

        The adapter is added into the weights of `folder/model`. What the folder that was loaded says about sampling,
        speakers, codec and training is kept. The root must hold its weights whole: after a run on several ranks, load
        them into a policy made anew.
        """
        model = self._root.model
        check_whole(model)
        if self._root.adapted is not None:
            save_adapter(self._root.adapted, folder / "adapter")
            model = _merge_adapter(self._root.adapted)
        card = card or ModelCard(base=folder_label(self._folder))
        save_continued(model, self._template.tokenizer, self._folder, folder, card)

    @torch.no_grad()
    def _of_reference(
        self, root: nn.Module, batch: PackedAnswers, request: TokenRequest | None
    ) -> TokenFigures | TargetRows:
        if self._reference is not None:
            output = self._reference(batch, request)
        elif self._root.adapted is not None:
            output = root(batch, request, adapter=False)
        else:
            raise ValueError("the policy was loaded without a reference (needs_reference=False)")
        assert isinstance(output, TokenFigures | TargetRows)
        return output


def _refuse_other_reference(folder: Path, reference: Path | None) -> None:
    if reference is not None and model_folder(reference).resolve() != folder.resolve():
        raise ConfigError(
            "reference: with trained: adapter, the reference is the model without its adapter",
            str(reference),
            "leave reference out, or train all weights",
        )


def _load_reference(folder: Path, template: Template, model: DualFFN, reference: Path | None) -> DualFFN:
    """Load the reference; where it is the model itself, a copy, whose new parts began alike."""
    if reference is None or model_folder(reference).resolve() == folder.resolve():
        return deepcopy(model)
    theirs = start_template(reference)
    _check_inputs("reference", reference, (folder, template), (reference, theirs))
    loaded = start_model(reference, template)
    _check_encoder("reference", reference, model, loaded)
    return loaded


def _check_inputs(key: str, where: Path, ours: tuple[Path, Template], theirs: tuple[Path, Template]) -> None:
    """Raises: ConfigError: a vocabulary or a codec other than the policy's."""
    words, their_words = (template.tokenizer.get_vocab() for _, template in (ours, theirs))
    if words != their_words:
        reason = f"{key}: its vocabulary of {len(their_words)} tokens is not the policy's of {len(words)}"
        raise ConfigError(reason, str(where), OTHER_INPUTS)
    codecs = start_codec(ours[0]), start_codec(theirs[0])
    shared_keys = codecs[0].keys() & codecs[1].keys()
    if any(codecs[0][name] != codecs[1][name] for name in shared_keys):
        reason = f"{key}: its codec {codecs[1]} is not the policy's {codecs[0]}"
        raise ConfigError(reason, str(where), OTHER_INPUTS)


def _check_encoder(key: str, where: Path, ours: DualFFN, theirs: DualFFN) -> None:
    """Raises: ConfigError: an audio encoder other than the policy's."""
    if ours.config.audio_encoder != theirs.config.audio_encoder:
        raise ConfigError(
            f"{key}: its audio encoder takes other features than the policy's", str(where), OTHER_INPUTS
        )


def _have_one_encoder(ours: DualFFN, theirs: DualFFN) -> bool:
    """Whether two models hear through encoders of the same weights."""
    if ours.config.audio_encoder is None or theirs.config.audio_encoder is None:
        return False
    our_weights, weights = ours.audio_tower.state_dict(), theirs.audio_tower.state_dict()
    return our_weights.keys() == weights.keys() and all(
        torch.equal(weight, weights[name].to(weight.device)) for name, weight in our_weights.items()
    )


def _merge_adapter(adapted: PeftModel) -> DualFFN:
    """Return a plain model with the adapter added into its weights; the adapted one stays as it is."""
    weights = MergedWeights(adapted)
    with torch.device("meta"):
        plain = DualFFN(adapted.get_base_model().config)  # type: ignore[arg-type]
    plain.load_state_dict(weights, assign=True)
    return plain


_: type[StreamPolicy] = DualFFNPolicy
