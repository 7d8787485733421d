"""Speech of the model, frame by frame: for rollouts, greedy answers and `generate`.

Shapes: A answers to one text, L rows, K codebooks, T frames, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from audiollm.generation.engine.request import SampledTokens
from audiollm.generation.engine.sampling import SamplingConfig, sample_codes
from toy_talker.model import FRAME, Talker


@dataclass
class SpeechState:
    """An answer while it is spoken."""

    generator: torch.Generator
    frames: list[Tensor] = field(default_factory=list)
    """Codes `[K]` of each frame."""
    logprobs: list[Tensor] = field(default_factory=list)
    """Of every action: each code of each frame, and the end."""
    has_ended: bool = False

    def tokens(self, num_codebooks: int, is_greedy: bool) -> SampledTokens:
        """The answer as policies encode it: one stretch of speech, no text that was drawn."""
        codes_KT = torch.stack(self.frames, dim=1) if self.frames else torch.zeros(num_codebooks, 0).long()
        logprob_A = None if is_greedy else torch.stack(self.logprobs)
        no_text = torch.zeros(0, dtype=torch.long)
        return SampledTokens("audio", no_text, no_text.bool(), (codes_KT,), (self.has_ended,), logprob_A)


def speak(
    model: Talker, text: Tensor, seeds: Sequence[int], sampling: SamplingConfig, max_frames: int
) -> list[SpeechState]:
    """Say a text once for each seed; an answer does not depend on those beside it, up to rounding.

    Args:
        text: `[L]`, as `answers.text_rows` gives it.
        sampling: the log-probabilities are right where it is plain: temperature alone.
    """
    states = [SpeechState(torch.Generator().manual_seed(seed)) for seed in seeds]
    for _ in range(max_frames):
        if not next_frames(model, text, states, sampling):
            break
    return states


@torch.no_grad()
def next_frames(model: Talker, text: Tensor, states: Sequence[SpeechState], sampling: SamplingConfig) -> bool:
    """Choose the next frame of each answer that has not ended, or its end; False where all have ended."""
    states = [state for state in states if not state.has_ended]
    if not states:
        return False
    model.eval()
    count, device = len(states[0].frames), next(model.parameters()).device
    text_L = torch.cat([text, torch.full((count,), FRAME)])
    codes_ALK = torch.zeros(len(states), len(text_L), model.config.num_codebooks).long()
    for number, state in enumerate(states):
        for place, codes_K in enumerate(state.frames, len(text)):
            codes_ALK[number, place] = codes_K
    text_AL = text_L.expand(len(states), -1).to(device)
    hidden_AH = model.hidden(text_AL, codes_ALK.to(device), text_AL == FRAME)[:, -1]
    codes_AK = torch.zeros(len(states), model.config.num_codebooks, dtype=torch.long, device=device)
    logprob_AK = torch.zeros(codes_AK.shape, device=device)
    uniform_A2K = torch.stack(
        [torch.rand(2, codes_AK.shape[1], generator=state.generator) for state in states]
    )
    for book in range(codes_AK.shape[1]):  # each code is chosen knowing those before it
        logits_AV = model.code_logits(hidden_AH, codes_AK.clamp_max(model.end - 1))[:, book]
        uniform_A21 = uniform_A2K[:, :, book, None].to(device)
        codes_AK[:, book] = sample_codes(logits_AV[:, None].float(), sampling, uniform_A21)[:, 0]
        warm_AV = (logits_AV / (sampling.temperature or 1.0)).log_softmax(dim=1)
        logprob_AK[:, book] = warm_AV.gather(1, codes_AK[:, book, None])[:, 0]
    for state, codes_K, logprob_K in zip(states, codes_AK.cpu(), logprob_AK.float().cpu(), strict=True):
        state.has_ended = int(codes_K[0]) == model.end
        state.logprobs += logprob_K[:1] if state.has_ended else logprob_K
        if not state.has_ended:
            state.frames.append(codes_K)
    return True
