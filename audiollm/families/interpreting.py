"""Models that interpret speech: what live sessions, and alignment by attention, ask of a model of any family.

Shapes: K codebooks, T rows of a recording, N tokens of a translation, R rows of features, C values of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from audiollm.audio import Waveform
from audiollm.codec import Codec
from audiollm.data.hearing.features import FeatureShape, FeatureWindow, PartAudio
from audiollm.data.records.sample import Message
from audiollm.generation.engine.request import Event, OpenRequest


@dataclass(frozen=True)
class HeardAttention:
    """Attention of a translation's tokens over the rows of its recording."""

    tokens_NT: Tensor
    """Mean over heads and layers; a row's share of all that the token looks at."""
    offsets: list[tuple[int, int]]
    """First and last place (exclusive) of each token in the text."""
    heard_rows: int
    """T: rows of the recording, of which each lasts the same time."""
    logprob: float
    """Mean log-probability of the tokens."""


class StreamEngine(Protocol):
    """Requests that stay open while more sound arrives."""

    def open(self, request: OpenRequest) -> int:
        """Queue a request; returns its number.

        Raises:
            ValueError: the request does not fit the model.
        """

    def feed(self, number: int, chunk: PartAudio) -> None:
        """Let an open request hear a chunk, as codes or features; the next steps take its action up to `Acted`.

        Raises:
            ValueError: there is no room left.
        """

    def step(self) -> list[Event]:
        """Take a step of all actions."""


class InterpretingModel(Protocol):
    """A loaded model that acts while it listens, and whose attention over a recording can be read."""

    @property
    def codec(self) -> Codec:
        """The codec that it speaks with, and hears with unless it has an audio encoder.

        Raises:
            ConfigError: it was loaded without one.
        """

    @property
    def encoder(self) -> FeatureShape | None:
        """The features in which it hears recordings; None: as codes."""

    def encode_window(self, window: FeatureWindow) -> Tensor:
        """The rows `[R, C]` that its audio encoder makes of a window."""

    def stream_engine(
        self, messages: Sequence[Message], chunk_frames: int, max_stream_s: float
    ) -> StreamEngine:
        """Return an engine for one stream.

        Args:
            messages: messages before the stream, which are never forgotten.
            chunk_frames: code frames, or rows of features, of a chunk.
            max_stream_s: longest stream of a model that forgets nothing.
        """

    def heard_attention(
        self, prompt: str, recording: Waveform, target: str, layers: int | None = None
    ) -> HeardAttention:
        """Read a recording and its translation, and return what the translation looks at.

        Args:
            prompt: the system message; empty for none.
            layers: how many of the last layers are looked at; None: the upper half.

        Raises:
            ValueError: control tokens in the translation, or an empty one.
        """
