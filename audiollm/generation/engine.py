"""Generation of audio codes: a batch of prompts with guidance branches over one preallocated cache.

Shapes: B prompts, R rows of the model's batch (prompts times branches), Q new positions, K codebooks, V codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from audiollm.data.conditions import without_condition
from audiollm.data.delay import undelay
from audiollm.data.sample import Message
from audiollm.data.template import Kind, Template, TokenStream
from audiollm.generation.sampling import SamplingConfig, draw, guide
from audiollm.models.cache import Cache
from audiollm.models.dual_ffn import DualFFN


@dataclass(frozen=True)
class Prompt:
    """What to say: the messages before the assistant's turn, and the seed of the draws."""

    messages: list[Message]
    seed: int
    codes: Sequence[Tensor] = ()
    """`[K, T]` of each recording in the messages, in order of appearance."""


@dataclass(frozen=True)
class Spoken:
    """What came of a prompt."""

    codes_KT: Tensor
    stopped: bool
    """False where the length limit ended it."""


@torch.inference_mode()
def generate_codes(
    model: DualFFN,
    template: Template,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    max_frames: int,
    on_step: Callable[[int], None] = lambda step: None,
) -> list[Spoken]:
    """Codes for every prompt.

    The first codebook's EOS ends a prompt: codebook k then has its EOS k rows later, as in training. BOS is
    never drawn. A prompt that has ended changes no other.

    Args:
        max_frames: the most code frames a prompt may take.
        on_step: called with the number of rows made so far.
    """
    device = next(model.parameters()).device
    state = _Delayed(len(prompts), template, max_frames)
    branches = _branches(prompts, sampling)
    streams = [
        template.prompt(messages, prompt.codes)
        for branch in branches
        for prompt, messages in zip(prompts, branch, strict=True)
    ]
    longest = max(len(stream) for stream in streams)
    dtype = next(model.parameters()).dtype
    cache = Cache.empty(
        model.config, len(streams), longest + max_frames + template.num_codebooks + 2, device, dtype
    )
    hidden_RC = _prefill(model, streams, cache, device)
    generators = [torch.Generator().manual_seed(prompt.seed) for prompt in prompts]
    state.append(torch.full((len(prompts), template.num_codebooks), template.audio_bos))
    hidden_RC = _extend(model, state.last(), len(branches), cache, device, template)
    while not state.all_done():
        logits = model.audio_logits(hidden_RC).float().cpu().unflatten(0, (len(branches), -1))
        guided_BKV = _combine(logits, branches, sampling)
        guided_BKV[:, :, template.audio_bos] = -torch.inf
        guided_BKV[:, 1:, template.audio_eos] = -torch.inf
        if state.rows == 1:  # at least one frame
            guided_BKV[:, 0, template.audio_eos] = -torch.inf
        state.append(draw(guided_BKV, sampling, generators))
        on_step(state.rows)
        hidden_RC = _extend(model, state.last(), len(branches), cache, device, template)
    return state.results()


class _Delayed:
    """The delayed rows in the making, with BOS and EOS forced where the pattern has them."""

    def __init__(self, batch: int, template: Template, max_frames: int) -> None:
        self._template, self._max_frames = template, max_frames
        self._rows: list[Tensor] = []
        self._end_B = torch.full((batch,), -1)
        """The row in which the first codebook ends; -1 while it has not."""
        self._stopped_B = torch.zeros(batch, dtype=torch.bool)

    @property
    def rows(self) -> int:
        return len(self._rows)

    def last(self) -> Tensor:
        return self._rows[-1]

    def append(self, codes_BK: Tensor) -> None:
        row, books = self.rows, torch.arange(self._template.num_codebooks)
        codes_BK = codes_BK.clone()
        codes_BK[:, books >= row] = self._template.audio_bos
        going = self._end_B < 0
        said_end = going & (codes_BK[:, 0] == self._template.audio_eos)
        too_long = going & ~said_end & (row > self._max_frames)
        self._stopped_B |= said_end
        self._end_B = torch.where(said_end | too_long, row, self._end_B)
        ended_BK = (self._end_B >= 0)[:, None] & (row >= self._end_B[:, None] + books[None])
        codes_BK[ended_BK] = self._template.audio_eos
        self._rows.append(codes_BK)

    def all_done(self) -> bool:
        last_row = self._end_B + self._template.num_codebooks - 1
        return bool(((self._end_B >= 0) & (last_row < self.rows)).all())

    def results(self) -> list[Spoken]:
        delayed_BFK = torch.stack(self._rows, dim=1)
        ends = (self._end_B + self._template.num_codebooks).tolist()
        stopped = self._stopped_B.tolist()
        return [Spoken(undelay(delayed_BFK[b, :end]), stopped[b]) for b, end in enumerate(ends)]


def _branches(prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[list[list[Message]]]:
    """The prompts' messages in full, then without text, then without speaker, as the guidance needs."""
    wanted = [(False, False)]
    wanted += [(True, False)] if sampling.text_guidance != 1 else []
    wanted += [(False, True)] if sampling.speaker_guidance != 1 else []
    return [[[without_condition(m, *drop) for m in p.messages] for p in prompts] for drop in wanted]


def _combine(logits: Tensor, branches: Sequence[object], sampling: SamplingConfig) -> Tensor:
    no_text = logits[1] if sampling.text_guidance != 1 else None
    no_speaker = logits[-1] if sampling.speaker_guidance != 1 else None
    return guide(logits[0], no_text, no_speaker, sampling)


def _prefill(model: DualFFN, streams: Sequence[TokenStream], cache: Cache, device: torch.device) -> Tensor:
    text = pad_sequence([s.text_ids_S for s in streams], batch_first=True).to(device)
    codes = pad_sequence([s.codes_SK for s in streams], batch_first=True).to(device)
    audio = pad_sequence([s.kinds_S != Kind.TEXT for s in streams], batch_first=True).to(device)
    lengths = torch.tensor([len(s) for s in streams], device=device)
    hidden_RQC = model.extend(text, codes, audio, lengths, cache)
    return hidden_RQC[torch.arange(len(streams), device=device), lengths - 1]


def _extend(
    model: DualFFN, codes_BK: Tensor, branches: int, cache: Cache, device: torch.device, template: Template
) -> Tensor:
    codes_R1K = codes_BK.repeat(branches, 1)[:, None].to(device)
    ids = torch.zeros(codes_R1K.shape[:2], dtype=torch.long, device=device)
    ones = torch.ones(len(ids), dtype=torch.long, device=device)
    return model.extend(ids, codes_R1K, torch.ones_like(ids, dtype=torch.bool), ones, cache)[:, 0]
