"""Tokens of an answer, recorded while they are drawn.

Shapes: K codebooks, T code frames, F rows of a stretch of speech, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.data.hearing.features import PartAudio
from audiollm.generation.engine.request import AnswerKind, SampledTokens

Logprobs = NDArray[np.float32]


@dataclass
class SpeechRecord:
    """Rows of one stretch of speech."""

    rows: list[Logprobs] = field(default_factory=list)
    """Log-probabilities `[K]` of each row from the first frame on, forced codes among them."""

    def actions(self, num_codebooks: int, frames: int, ended: bool) -> Logprobs:
        """Return the log-probabilities of the codes, and of the first codebook's EOS where the model drew it."""
        logprob_FK = np.stack(self.rows)
        frame_FK = np.arange(len(logprob_FK))[:, None] - np.arange(num_codebooks)
        is_action_FK = (frame_FK >= 0) & (frame_FK < frames)
        if ended:
            is_action_FK[frames, 0] = True
        return logprob_FK[is_action_FK]


@dataclass
class TokenRecord:
    """Tokens of one answer in the making."""

    kind: AnswerKind
    ids: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    input_frames: list[tuple[int, PartAudio]] = field(default_factory=list)
    """Heard chunks of an open request, with the number of text tokens before them."""
    parts: list[float | SpeechRecord] = field(default_factory=list)
    """Log-probability of each drawn text token, and the record of each stretch of speech, in order."""

    def drew(self, token: int, logprob: float) -> None:
        """Add a text token that was drawn."""
        self.ids.append(token)
        self.is_action.append(True)
        self.parts.append(logprob)

    def forced(self, token: int) -> None:
        """Add a text token that nothing drew."""
        self.ids.append(token)
        self.is_action.append(False)

    def hears(self, chunk: PartAudio) -> None:
        """Add a heard chunk, which nothing drew."""
        self.input_frames.append((len(self.ids), chunk))

    def opened_speech(self) -> None:
        """Begin a stretch of speech."""
        self.parts.append(SpeechRecord())

    def drew_codes(self, logprob_K: Logprobs) -> None:
        """Add a row of the present stretch of speech."""
        speech = self.parts[-1]
        assert isinstance(speech, SpeechRecord)
        speech.rows.append(logprob_K)

    def tokens(self, speech: list[tuple[Tensor, bool]], has_logprobs: bool) -> SampledTokens:
        """Return the record of a complete answer.

        Args:
            speech: for each stretch, its codes `[K, T]` and whether the model ended it.
            has_logprobs: False for greedy answers.
        """
        codes, ended = tuple(codes_KT for codes_KT, _ in speech), tuple(by_model for _, by_model in speech)
        return SampledTokens(
            self.kind,
            torch.tensor(self.ids, dtype=torch.long),
            torch.tensor(self.is_action, dtype=torch.bool),
            codes,
            ended,
            self._logprobs(speech) if has_logprobs else None,
            tuple(self.input_frames),
        )

    def _logprobs(self, speech: list[tuple[Tensor, bool]]) -> Tensor:
        stretches = iter(speech)
        pieces = [np.zeros(0, dtype=np.float32)]
        for entry in self.parts:
            if isinstance(entry, SpeechRecord):
                codes_KT, ended = next(stretches)
                num_codebooks, frames = codes_KT.shape
                pieces.append(entry.actions(num_codebooks, frames, ended))
            else:
                pieces.append(np.array([entry], dtype=np.float32))
        return torch.from_numpy(np.concatenate(pieces).astype(np.float32, copy=False))
