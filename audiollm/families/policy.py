"""The protocol of policies: what a training on preferences asks of a model, whatever the model is.

A policy turns prompts and answers into batches, and batches into `AnswerLogprobs`. The training owns the rest: which
answers belong together, the objective, the loop and its strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

from torch import Tensor, nn

from audiollm.audio import Waveform
from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import FeatureShape
from audiollm.data.records.sample import AudioPart, ContentPart, Sample, TextPart
from audiollm.data.records.source import LoadedSample
from audiollm.errors import BadSample
from audiollm.families.logprobs.answers import AnswerLogprobs
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.prompts import PromptedContents
from audiollm.families.rollout import RolloutEngine
from audiollm.families.streams import ActedStream, StreamCourse
from audiollm.generation.engine.request import AnswerKind, Limits, SampledTokens
from audiollm.models.audio_llms.inputs import Pictures, Turn, turns_of

OTHER_INPUTS = "give the model that the policy begins from, or one trained from it"
"""The remedy where a second model cannot read the policy's batches."""


@dataclass(frozen=True)
class GreedyRequest:
    """A prompt to answer with the likeliest tokens."""

    prompted: Any
    """What the policy takes, without answers."""
    kind: AnswerKind
    limits: Limits


@dataclass(frozen=True)
class GreedyAnswer:
    """The likeliest answer of a policy."""

    text: str
    tokens: int
    """Words and codes of all codebooks; with the token that ends the answer, where it ended."""
    frames: int
    """Code frames of its speech."""
    stopped: bool
    """Whether it ended by itself and was not cut."""


Prompted = TypeVar("Prompted")
Encoded = TypeVar("Encoded")
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class PromptedAnswers:
    """A prompt, and the answers to it in text whose log-probabilities are asked for."""

    id: str
    """Of the sample, for errors."""
    prompt: Sequence[Turn]
    """All turns before the assistant's answer: roles, texts, recordings and pictures."""
    answers: Sequence[str]
    recordings: Sequence[str] = ()
    """Names of the recordings in their order, for errors (paths)."""
    place: str = ""
    """Where the sample was read, for errors."""
    parts: Sequence[Sequence[str]] = ()
    """Texts of the parts of each answer, in order; read by `Policy.part_ends`."""

    @classmethod
    def of(
        cls,
        sample: Sample,
        recordings: Sequence[Waveform],
        answers: Sequence[Sequence[ContentPart]],
        place: str = "",
        videos: Sequence[Pictures] = (),
    ) -> PromptedAnswers:
        """Make it of a conversation that is to be answered.

        Args:
            sample: the prompt.
            recordings: those of its audio parts, in order.
            answers: contents of the answers, in text.
            place: where the sample was read.
            videos: pictures of its video parts, in order.

        Raises:
            BadSample: an answer with sound.
            ValueError: another number of recordings than of audio parts, or of videos than of video parts.
        """
        parts = []
        for answer in answers:
            if any(isinstance(content_part, AudioPart) for content_part in answer):
                raise BadSample(
                    place, sample.id, "an answer is speech, and this policy writes text", "spoken answer"
                )
            parts.append([content_part.text for content_part in answer if isinstance(content_part, TextPart)])
        names = [
            content_part.path
            for message in sample.messages
            for content_part in message.content
            if isinstance(content_part, AudioPart)
        ]
        texts = ["".join(answer_parts) for answer_parts in parts]
        return cls(sample.id, turns_of(sample.messages, recordings, videos), texts, names, place, parts)


class Policy(Protocol[Prompted, Encoded, Batch]):
    """A model that is trained on answers.

    `Prompted` is what it takes for a prompt with its answers: `PromptedAnswers` where answers are text.

    `encode` and `batch` run on the CPU, in worker processes too. Dropout is off in every pass, and every input reaches
    the pass of the policy and that of the reference alike.
    """

    @property
    def root(self) -> nn.Module:
        """The module that a strategy wraps, and whose trainable parameters are trained."""

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """Models beside the root that are not trained, by name; the training places them on its device."""

    @property
    def num_codebooks(self) -> int:
        """Codebooks of the speech that it answers in; 0: it answers in words alone."""

    def hold_to(self, reference: nn.Module) -> None:
        """Take another policy's root as the reference, in place of the one that the policy was loaded with."""

    def take(self, loaded: LoadedSample, answers: Sequence[int], place: str = "") -> Prompted:
        """Make what `encode` takes of a record.

        Args:
            loaded: a sample with answers to choose among.
            answers: numbers of those that are used.
            place: where the sample was read, for errors.

        Raises:
            BadSample: a recording cannot be read, or an answer is of a kind that the policy does not give.
        """

    def take_beside(
        self, prompt: LoadedSample, loaded: LoadedSample, answers: Sequence[int], place: str = ""
    ) -> Prompted:
        """As `take`, with the answers of `loaded` behind the messages of another sample (KTO's mismatched pairs)."""

    def encode(self, prompted: Prompted) -> list[Encoded]:
        """Return one encoded answer per answer, in order.

        Raises:
            BadSample: the prompt or an answer cannot be used; place, sample and reason are named.
        """

    def encode_sampled(self, prompted: Prompted, sampled: Sequence[SampledTokens]) -> Sequence[Encoded]:
        """Return one encoded answer per sampled answer to the prompt, from its ids and codes.

        Its answer tokens are the actions, in their order: `answer_logprobs` gives the log-probability of each under
        the masks that it was sampled under, to be compared with that of the engine one by one.

        Args:
            prompted: its `answers` are not read.

        Raises:
            BadSample: the prompt or an answer cannot be used.
        """

    def actions_at(self, sampled: SampledTokens, text: str, ends: Sequence[int]) -> list[int]:
        """Return the numbers of the actions that complete so many characters of a sampled answer's text.

        See `text_places.actions_at`.
        """

    def pieces(self, sampled: SampledTokens) -> list[str | int]:
        """Return the text of each drawn token, and the number of actions of each stretch of speech, in order.

        See `text_places.pieces_of`.
        """

    def part_ends(self, prompted: Prompted, encoded: Sequence[Encoded]) -> list[list[int]]:
        """Return, for each answer, the position of the last token of each part of its content.

        Args:
            encoded: what `encode` made of `prompted`.

        Raises:
            BadSample: the ends cannot be told from the answer's tokens.
        """

    def num_answer_tokens(self, encoded: Encoded) -> int:
        """Return the number of log-probabilities that the answer has."""

    def plan(self, groups: Sequence[Sequence[Encoded]], max_tokens: int) -> list[list[int]]:
        """Plan batches of whole groups of at most so many tokens; a larger group has a batch of its own.

        Returns:
            Numbers of the groups of each batch; each group is in one batch.
        """

    def batch(self, encoded: Sequence[Encoded]) -> Batch:
        """Join encoded answers; the answers of the batch are numbered as they are given here."""

    def idle_batch(self) -> Batch:
        """A batch without answer tokens, through which every trained weight has a gradient of 0."""

    def check_reader(self, reader: Policy[Any, Any, Any], key: str) -> None:
        """Check that another policy's root reads the batches of this one as its own.

        Args:
            key: the setting that names the other model, for errors.

        Raises:
            ConfigError: another kind of model, vocabulary, codec, or features of recordings.
        """

    def answer_logprobs(
        self, root: nn.Module, batch: Batch, request: TokenRequest, draw_T: Tensor | None = None
    ) -> AnswerLogprobs:
        """Compute the log-probabilities of a batch's answers, with gradient to the root's parameters.

        Args:
            root: `self.root` as the strategy wrapped it.
            batch: on the root's device.
            request: which figures per token are computed.
            draw_T: a random number per token (`length.answer_draws`), for SamPO and for `contrast_T`.
        """

    def prompt_lengths(self, batch: Batch) -> Tensor:
        """Return the number `[A]` of prompt tokens that `TokenRequest.prompts` scores before each answer."""

    def freeze_unreached(self, has_recordings: bool) -> None:
        """Freeze the weights that no answer in words depends on.

        Args:
            has_recordings: whether prompts have recordings.
        """

    def share_frozen(self) -> None:
        """Have the reference hold the weights that are not trained in the policy's memory."""

    def rollout_engine(self, slots: int | None = None) -> RolloutEngine[Any]:
        """Make an engine that samples rollouts from the policy's own weights.

        Args:
            slots: most rollouts side by side; None: `ModelFolder.rollout_slots`.
        """

    def greedy_answers(self, requests: Sequence[GreedyRequest]) -> list[GreedyAnswer]:
        """Answer prompts with the likeliest tokens, in order; whole weights, in eval mode."""

    def save(self, folder: Path) -> None:
        """Write the policy in the layout that its own classes load."""


@runtime_checkable
class DepthPolicy(Protocol):
    """A policy whose frames are chosen by two decoders: supervised training takes a mean over the targets of each."""

    @property
    def depth_weight(self) -> float | None:
        """Weight of the mean over the depth decoder's targets, where none is set; None: one decoder chooses all codes,
        and there is one mean."""

    def count_parts(self, encoded: Any) -> tuple[int, int]:
        """Return the targets of the first codebook (ends included), and those of the others, of an encoded answer."""


def has_depth(policy: object) -> TypeGuard[DepthPolicy]:
    """Whether two decoders choose the codes of a frame."""
    return isinstance(policy, DepthPolicy) and policy.depth_weight is not None


@runtime_checkable
class HiddenScorer(Protocol):
    """The root of a policy whose hidden states can be scored: by reward models, and by critics."""

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states."""

    def hidden_before_end(self, batch: Any) -> Tensor:
        """The hidden state `[A, C]` that the token which ends each answer is chosen from: it has seen all the rest.

        Behind that token a supervised training has no target: what a trained model has heard and said is hardly there.
        """

    def hidden_at(self, batch: Any, answer_S: Tensor, position_S: Tensor) -> Tensor:
        """The hidden state `[S, C]` at positions of answers, counted from the beginning of their prompts."""

    def hidden_before(self, batch: Any) -> Tensor:
        """The hidden state `[T, C]` that each answer token is chosen from."""

    def freeze_head(self) -> None:
        """Take the output head, which a score does not depend on, out of what is trained."""


@runtime_checkable
class StreamPolicy(Policy[Any, Any, Any], Protocol):
    """A policy of a family that takes streams: prompts that are open while more sound arrives."""

    @property
    def template(self) -> Template:
        """The chat template, with the model's vocabulary and codebooks."""

    @property
    def encoder(self) -> FeatureShape | None:
        """The features in which the model hears recordings; None: as codes."""

    def check_prompt(self, prompted: PromptedContents) -> None:
        """Check that a prompt compiles.

        Raises:
            BadSample: it does not.
        """

    def run_streams(self, courses: Sequence[StreamCourse], max_slots: int) -> list[ActedStream]:
        """Let the model act over streams, in eval mode, many side by side.

        Raises:
            BadSample: a stream that does not fit the model.
        """
