"""Audio context: existing sound as latents, and what of it the model keeps, is shown, or does not see.

Kept latents are part of the result: they are put back after every step of the sampler. Shown latents are heard and
made anew (the track before an edit). Hidden ones are not given. Two mask channels tell the three apart, so that a
hidden latent is not taken for a latent of zeros.

Shapes: L latents of all samples, D latent dimension, T latents of one sample, E channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

import torch
from torch import Tensor

ContextKind = Literal["everything", "nothing", "spans", "end", "pair"]
"""The hidden part of a training sample: all of it, nothing (all is shown), spans, the end (the start is kept); or the
input track of a pair is shown, and the output track is wanted."""
CONTEXT_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)


class LatentState(IntEnum):
    """The use of one latent of the context."""

    HIDDEN = 0
    VISIBLE = 1
    FIXED = 2


@dataclass(frozen=True)
class AudioContext:
    """Latents of existing sound, normalized, and the state of each."""

    latents_LD: Tensor
    state_L: Tensor
    """int64, values of `LatentState`."""

    @property
    def fixed_L(self) -> Tensor:
        return self.state_L == LatentState.FIXED

    def channels(self) -> Tensor:
        """Input channels `[L, D + 2]`: latents (zeros where hidden), whether kept, whether shown."""
        seen_L1 = (self.state_L != LatentState.HIDDEN)[:, None]
        masks = [self.state_L == state for state in (LatentState.FIXED, LatentState.VISIBLE)]
        latents_LD = torch.where(seen_L1, self.latents_LD, 0)
        return torch.cat([latents_LD, torch.stack(masks, dim=1).to(latents_LD)], dim=1)

    def without(self) -> AudioContext:
        """The context with everything hidden: what a model hears where the context is dropped, too."""
        return AudioContext(self.latents_LD, torch.zeros_like(self.state_L))


@dataclass(frozen=True)
class ContextShares:
    """How often each kind of context is trained; the shares are divided by their sum."""

    everything: float = 0.5
    nothing: float = 0.05
    spans: float = 0.25
    end: float = 0.2
    pair: float = 0.5
    """Share of the pairs that are trained as pairs; the others are trained as if there were no input."""

    def draw(self, is_pair: bool, generator: torch.Generator) -> ContextKind:
        """The kind of context of a sample."""
        pair, draw = torch.rand(2, generator=generator).tolist()
        if is_pair and pair < self.pair:
            return "pair"
        shares = (self.everything, self.nothing, self.spans, self.end)
        draw *= sum(shares)
        for kind, share in zip(CONTEXT_KINDS, shares, strict=False):
            if draw < share:
                return kind
            draw -= share
        return "everything"


def hidden_context(length: int, latent_dim: int) -> AudioContext:
    """The context of a sample without existing sound."""
    return AudioContext(torch.zeros(length, latent_dim), torch.zeros(length, dtype=torch.long))


def training_context(
    kind: ContextKind, wanted_TD: Tensor, input_TD: Tensor | None, generator: torch.Generator
) -> AudioContext:
    """The context of a training sample.

    Args:
        wanted_TD: the track that the model is to make.
        input_TD: the track before the edit, of a pair.

    Raises:
        ValueError: a pair without its input track.
    """
    length = len(wanted_TD)
    state_T = torch.full((length,), int(LatentState.FIXED))
    if kind == "everything":
        return AudioContext(wanted_TD, torch.zeros_like(state_T))
    if kind == "nothing":
        return AudioContext(wanted_TD, torch.full_like(state_T, int(LatentState.VISIBLE)))
    if kind == "end":
        num_fixed = int(torch.randint(1, max(2, length), (1,), generator=generator))
        state_T[num_fixed:] = LatentState.HIDDEN
        return AudioContext(wanted_TD, state_T)
    if kind == "spans":
        for start, end in _draw_spans(length, generator):
            state_T[start:end] = LatentState.HIDDEN
        return AudioContext(wanted_TD, state_T)
    if input_TD is None:
        raise ValueError("a pair needs its input track")
    if float(torch.rand((), generator=generator)) < 0.5:
        return AudioContext(input_TD, torch.full_like(state_T, int(LatentState.VISIBLE)))
    # as an edit of a span has it: outside of it the track is kept, inside the input is shown
    ((start, end),) = _draw_spans(length, generator, max_spans=1)
    state_T[start:end] = LatentState.VISIBLE
    latents_TD = wanted_TD.clone()
    latents_TD[start:end] = input_TD[start:end]
    return AudioContext(latents_TD, state_T)


def span_context(
    latents_TD: Tensor, start: int, end: int, inside: LatentState, outside: LatentState = LatentState.FIXED
) -> AudioContext:
    """The context of an edit: one state inside the span of latents, one outside.

    Raises:
        ValueError: a span without a latent of the track in it.
    """
    if not 0 <= start < end <= len(latents_TD):
        raise ValueError(f"the span of latents [{start}, {end}) does not lie in a track of {len(latents_TD)}")
    state_T = torch.full((len(latents_TD),), int(outside))
    state_T[start:end] = int(inside)
    return AudioContext(latents_TD, state_T)


def _draw_spans(length: int, generator: torch.Generator, max_spans: int = 3) -> list[tuple[int, int]]:
    """One to `max_spans` spans of a latent or more; several may overlap."""
    count = int(torch.randint(1, max_spans + 1, (1,), generator=generator))
    spans = []
    for _ in range(count):
        size = int(torch.randint(1, max(2, round(length * 0.7) // count + 1), (1,), generator=generator))
        start = int(torch.randint(0, length - size + 1, (1,), generator=generator))
        spans.append((start, start + size))
    return spans
