"""Requests to the engine, its answers, and the events on the way.

Shapes: K codebooks, T code frames, N text tokens of an answer, A actions (tokens and codes that were drawn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from audiollm.data.hearing.features import PartAudio
from audiollm.data.records.sample import Message
from audiollm.generation.engine.sampling import SamplingConfig

AnswerKind = Literal["audio", "text", "any"]
Reason = Literal["end", "length"]


@dataclass(frozen=True)
class Limits:
    """The largest size of an answer."""

    max_frames: int = 750
    """Most code frames, over all stretches of speech."""
    max_text_tokens: int = 512


@dataclass(frozen=True)
class SpokenPhrase:
    """The words of a phrase that an answer says (`Message.phrases`), and the most frames that it may take."""

    text: str
    max_frames: int


@dataclass(frozen=True)
class Request:
    """A chat to answer, and how to answer it."""

    messages: Sequence[Message]
    """Messages before the assistant's turn."""
    seed: int = 0
    audio: Sequence[PartAudio] = ()
    """Codes `[K, T]` or features of each recording in the messages, in order of appearance."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    limits: Limits = field(default_factory=Limits)
    answer: AnswerKind = "audio"
    """`audio`: speech and nothing else; `text`: no speech; `any`: text, with speech where the model opens it."""
    record_tokens: bool = False
    """Whether the answer tells its tokens and their log-probabilities. Only plain sampling is recorded: temperature
    alone, as `sampling.check_plain` has it. Its text is given out whole, and not in pieces."""
    phrases: Sequence[SpokenPhrase] = ()
    """Phrases that the answer, in speech alone, says one after the other, each behind its words; empty: as it comes."""
    language: str | None = None
    """Language of what is said, for models whose prompts name it; None: not known."""


@dataclass(frozen=True)
class SampledTokens:
    """Tokens of an answer as they were drawn, never encoded again from text.

    An *action* is a token or a code that the model drew. What the answer's form forces is none: the marks around
    speech that nothing drew, and BOS and EOS where the delay pattern has them. Actions stand in reading order, as
    targets of training do: position by position, the codebooks of a row side by side.
    """

    kind: AnswerKind
    """Which tokens could be drawn at all (`forbidden.py`)."""
    ids_N: Tensor
    """int64: every text token behind the header of the turn, drawn or forced, with the end of the turn where it was
    drawn. Each `<|audio_out_bos|>` is followed by a stretch of speech."""
    is_action_N: Tensor
    """bool: whether the text token was drawn."""
    codes: tuple[Tensor, ...]
    """Codes `[K, T]` of each stretch of speech, all of them actions."""
    ended: tuple[bool, ...]
    """For each stretch, whether the model ended it: the EOS of its first codebook is then an action, too."""
    logprob_A: Tensor | None
    """float32: log-probability of each action under the distribution that it was drawn from, temperature and
    forbidden tokens included; None for greedy answers (temperature 0), which have no distribution."""
    input_frames: tuple[tuple[int, PartAudio], ...] = ()
    """Chunks fed to an open request: for each, the text tokens before it, and its codes `[K, T]` or features."""

    @property
    def num_actions(self) -> int:
        """Number of drawn tokens and codes."""
        return int(self.is_action_N.sum()) + sum(codes.numel() for codes in self.codes) + sum(self.ended)


@dataclass(frozen=True)
class Answer:
    """The complete answer to a request."""

    parts: tuple[str | Tensor, ...]
    """Text, and the codes `[K, T]` of each stretch of speech, in the order in which they came."""
    codes_KT: Tensor
    """Codes of all speech in the answer."""
    reason: Reason
    """Why the answer ended: `end`, by itself; `length`, by a limit."""
    first_frame_s: float | None
    """Seconds from the request to its first complete code frame; None without speech."""
    seconds: float
    """Seconds from the request to the end of the answer."""
    tokens: SampledTokens | None = None
    """Tokens of the answer where the request had `record_tokens`."""

    @property
    def text(self) -> str:
        return "".join(answer_part for answer_part in self.parts if isinstance(answer_part, str))

    @property
    def stopped(self) -> bool:
        """Whether the answer ended by itself, not by a limit."""
        return self.reason == "end"


@dataclass(frozen=True)
class TextPiece:
    """Text of an answer, told as soon as whole characters are there."""

    request: int
    text: str


@dataclass(frozen=True)
class Frames:
    """Code frames, told once all their codebooks are there: K - 1 rows after the first codebook's code."""

    request: int
    codes_KT: Tensor
    stretch: int = 0
    """Number of the stretch of speech that the frames belong to: speech after text begins another."""


@dataclass(frozen=True)
class Finished:
    """End of a request: its answer is complete, and its slots are free."""

    request: int
    answer: Answer


@dataclass(frozen=True)
class OpenRequest:
    """A request that stays open: it is fed heard frames, acts, and is fed again."""

    messages: Sequence[Message]
    """Messages before the stream: the kept prefix."""
    seed: int = 0
    audio: Sequence[PartAudio] = ()
    """Codes of each recording in these messages."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Guidance is not for open requests."""
    limits: Limits = field(default_factory=Limits)
    """Limits of each action."""
    answer: AnswerKind = "text"
    """Form of an action: `text`, or `any`, with speech where the model opens it."""
    record_tokens: bool = False
    """Keep sampled tokens with their log-probabilities, as `Request.record_tokens` does."""
    silence_bias: float = 0.0
    """Added to the logit of the end token where an action begins: above 0 the model speaks less."""


@dataclass(frozen=True)
class Acted:
    """End of an action of an open request, which now waits for the next chunk."""

    request: int
    action: int
    """Number of the action, from 0."""
    parts: tuple[str | Tensor, ...]
    """Text, and the codes `[K, T]` of each stretch of speech; none for silence."""
    reason: Reason
    seconds: float
    """Seconds from the feeding of the chunk to the end of the action."""

    @property
    def text(self) -> str:
        return "".join(answer_part for answer_part in self.parts if isinstance(answer_part, str))


Event = TextPiece | Frames | Finished | Acted
