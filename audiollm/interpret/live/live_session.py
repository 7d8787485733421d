"""A live session: a model that hears chunks and acts, with the times of everything that it does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiollm.data.hearing.features import PartAudio
from audiollm.data.records.sample import Message
from audiollm.errors import ConfigError, StageError
from audiollm.evaluate.interpret.logged_outputs import LoggedOutput
from audiollm.families.interpreting import InterpretingModel
from audiollm.families.streams import chunk_size
from audiollm.generation.engine.request import Acted, AnswerKind, Limits, OpenRequest
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.engine.streaming import code_stream
from audiollm.interpret.live.chunk_hearing import open_hearing
from audiollm.interpret.said import HeardSource, SaidPiece, logged_output

GREEDY = SamplingConfig(temperature=0.0, top_p=1.0, text_guidance=1.0, speaker_guidance=1.0)
LIMITS = Limits(max_frames=75, max_text_tokens=64)
MAX_UNFORGETTING_S = 120.0
"""Longest stream of a model without a sliding window in every layer, for which the whole stream is kept."""


@dataclass(frozen=True)
class LiveOptions:
    """How a session listens and acts."""

    chunk_frames: int
    messages: Sequence[Message] = ()
    """Messages before the stream: the kept prefix."""
    answer: AnswerKind = "text"
    sampling: SamplingConfig = GREEDY
    limits: Limits = LIMITS
    """Limits of each action."""
    silence_bias: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class LiveAction:
    """An action with its times, in seconds from the beginning of the stream."""

    chunk: int
    heard_s: float
    """Sound that had been heard when the model acted: the chunk, and what the codec looks ahead."""
    elapsed_s: float
    """Time on the clock when the action was complete, had the sound come in at its own pace."""
    text: str
    samples_1N: Tensor
    """Speech; empty for text or silence."""
    compute_s: float
    """Seconds that hearing and acting took."""
    reason: str

    @property
    def speaks(self) -> bool:
        """Whether it has words or speech."""
        return bool(self.text.strip()) or self.samples_1N.shape[1] > 0

    def row(self) -> dict[str, Any]:
        """Return the line of a transcript."""
        return {
            "chunk": self.chunk,
            "heard_s": round(self.heard_s, 3),
            "elapsed_s": round(self.elapsed_s, 3),
            "text": self.text,
            "speech_samples": self.samples_1N.shape[1],
            "compute_s": round(self.compute_s, 4),
            "reason": self.reason,
        }


class LiveSession:
    """One stream from its first sample to its last. Its memory grows by what is said alone, a line per action.

    Args:
        clock: seconds of a clock that counts computation.

    Raises:
        ConfigError: the codec cannot hear in pieces, or the prefix does not fit.
    """

    def __init__(
        self,
        model: InterpretingModel,
        options: LiveOptions,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._options, self._clock = options, clock
        self._hearing = open_hearing(model, options.chunk_frames)
        self._codec = model.codec if options.answer == "any" or model.encoder is None else None
        self._engine = model.stream_engine(options.messages, options.chunk_frames, MAX_UNFORGETTING_S)
        request = OpenRequest(
            options.messages, options.seed, (), options.sampling, options.limits, options.answer,
            silence_bias=options.silence_bias,
        )  # fmt: skip
        try:
            self._number = self._engine.open(request)
        except ValueError as error:
            raise ConfigError(
                str(error), "prompt", "shorten it, or take a model with a sliding window"
            ) from None
        self._voice = None if self._codec is None else code_stream(self._codec)
        self._chunks = 0
        self._frames = 0
        self._heard_s = 0.0
        self._ready_s = 0.0
        self._compute_s = 0.0
        self._hearing_s = 0.0
        """Computation on sound that has completed no chunk yet."""
        self.said_pieces: list[SaidPiece] = []
        """Actions with words or speech."""

    @property
    def chunks(self) -> int:
        """Chunks that were heard, each with an action."""
        return self._chunks

    @property
    def heard_s(self) -> float:
        """Seconds of sound that were heard up to the last action."""
        return self._heard_s

    @property
    def behind_s(self) -> float:
        """Seconds by which the session lags behind a source that plays at its own pace; 0 where it keeps up."""
        return max(0.0, self._ready_s - self._heard_s)

    @property
    def real_time_factor(self) -> float:
        """Seconds of computation per second of sound."""
        chunks_s = self._frames / self._hearing.frame_rate
        return self._compute_s / chunks_s if chunks_s else 0.0

    def hear(self, samples_1N: Tensor) -> Iterator[LiveAction]:
        """Take samples at the rate of the hearing; yield the actions after the chunks that they complete.

        Raises:
            StageError: the model has no sliding window, and has heard as much as it can keep.
        """
        began = self._clock()
        chunks = self._hearing.push(samples_1N)
        if not chunks:
            self._hearing_s += self._clock() - began
        yield from self._act(chunks, began)

    def finish(self) -> Iterator[LiveAction]:
        """End the source: yield the actions after the last chunks.

        Raises:
            StageError: as `hear`.
        """
        began = self._clock()
        chunks = self._hearing.flush()
        end_s = (self._frames + sum(map(chunk_size, chunks))) / self._hearing.frame_rate
        yield from self._act(chunks, began, end_s)

    def log(self, index: int, source: str = "", reference: str = "", prediction: str = "") -> LoggedOutput:
        """Return what was said as a line of SimulEval's log.

        Args:
            prediction: path of the output's sound, for an output in speech.
        """
        heard_source = HeardSource(index, self._heard_s, source, reference)
        return logged_output(self.said_pieces, heard_source, prediction or None)

    def _act(
        self, chunks: Sequence[PartAudio], began: float, end_s: float = math.inf
    ) -> Iterator[LiveAction]:
        """
        Args:
            end_s: end of the source, where it is over.
        """
        for chunk in chunks:
            try:
                self._engine.feed(self._number, chunk)
            except ValueError as error:
                raise StageError(
                    f"after {self._heard_s:.0f} s: {error}", "train the model with shape.sliding_window", 1
                ) from None
            acted = None
            while acted is None:
                acted = next((event for event in self._engine.step() if isinstance(event, Acted)), None)
            samples_1N = self._decode_speech(acted)
            now = self._clock()
            last_s, began = now - began, now
            compute_s, earlier_s, self._hearing_s = self._hearing_s + last_s, self._hearing_s, 0.0
            self._frames += chunk_size(chunk)
            self._heard_s = heard_s = min(end_s, self._hearing.needed_s(self._frames))
            # the chunk is there at heard_s, or the model is still busy with what came before
            self._ready_s = max(heard_s, self._ready_s + earlier_s) + last_s
            action = LiveAction(
                self._chunks, heard_s, self._ready_s, acted.text, samples_1N, compute_s, acted.reason
            )
            self._chunks += 1
            self._compute_s += compute_s
            if action.speaks:
                duration_s = 0.0 if self._codec is None else samples_1N.shape[1] / self._codec.sample_rate
                self.said_pieces.append(SaidPiece(acted.text.strip(), heard_s, self._ready_s, duration_s))
            yield action

    def _decode_speech(self, acted: Acted) -> Tensor:
        codes = [action_part for action_part in acted.parts if isinstance(action_part, Tensor)]
        if not codes or self._voice is None:
            return torch.zeros(1, 0)
        pieces = [self._voice.push(torch.cat(codes, dim=1)).cpu(), self._voice.flush().cpu()]
        return torch.cat(pieces, dim=1)
