"""What the engine is asked, what it answers, and what it tells on the way.

Shapes: K codebooks, T code frames.
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
    """How long an answer may become."""

    max_frames: int = 750
    """Code frames, of all its speech together."""
    max_text_tokens: int = 512


@dataclass(frozen=True)
class Request:
    """What to answer, and how."""

    messages: Sequence[Message]
    """What comes before the assistant's turn."""
    seed: int = 0
    audio: Sequence[PartAudio] = ()
    """Codes `[K, T]` or features of each recording in the messages, in order of appearance."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    limits: Limits = field(default_factory=Limits)
    answer: AnswerKind = "audio"
    """`audio`: speech and nothing else; `text`: no speech; `any`: text, with speech where the model opens it."""


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    parts: tuple[str | Tensor, ...]
    """Text, and the codes `[K, T]` of each stretch of speech, in the order in which they came."""
    codes_KT: Tensor
    """All its speech."""
    reason: Reason
    """`length` where a limit ended it."""
    first_frame_s: float | None
    """From the request to its first complete code frame; None without speech."""
    seconds: float
    """From the request to the end."""

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def stopped(self) -> bool:
        """It ended by itself."""
        return self.reason == "end"


@dataclass(frozen=True)
class TextPiece:
    """Whole characters, as soon as there are any."""

    request: int
    text: str


@dataclass(frozen=True)
class Frames:
    """Code frames, as soon as all their codebooks are there: K - 1 rows after the first one."""

    request: int
    codes_KT: Tensor
    stretch: int = 0
    """Of which stretch of speech: one that follows text is another."""


@dataclass(frozen=True)
class Finished:
    """The answer is complete, and its slots are free."""

    request: int
    answer: Answer


Event = TextPiece | Frames | Finished
