"""Codes of a frame, drawn for answers side by side: by a depth decoder, or by the backbone alone, row after row.

Shapes: R answers that go on, K codebooks, T frames, C hidden size, V entries of a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from audiollm.families.talkers.kind import PromptRows, TalkerKind, TalkerSampling
from audiollm.families.talkers.packed_steps import DepthPasses, TalkerSteps
from audiollm.families.talkers.talker import DelayedTalker, DepthTalker, Talker
from audiollm.generation.engine.request import SampledTokens
from audiollm.generation.engine.sampling import SamplingConfig, sample_codes


@dataclass(eq=False)
class Speaking:
    """An answer while it is spoken."""

    prompt: PromptRows
    sampling: TalkerSampling
    max_frames: int
    seed: int
    number: int = 0
    """Number of the request."""
    codes: list[Tensor] = field(default_factory=list)
    """Codes `[K]` of each frame."""
    rows: list[Tensor] = field(default_factory=list)
    """Codes `[K]` of each row behind the prompt: those of a frame, or of K frames one behind the other."""
    logprobs: list[Tensor] = field(default_factory=list)
    """Log-probability of each action: of the codes of a frame, or of the end."""
    row_logprobs: list[Tensor] = field(default_factory=list)
    """Log-probabilities `[K]` of the codes of each row."""
    num_frames: int | None = None
    """Frames that the speech will have, once that is decided while codes of some are still to be drawn."""
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be drawn any more."""
        return self.has_ended or len(self.codes) >= self.max_frames

    def codes_KT(self, num_codebooks: int) -> Tensor:
        """Codes of all frames."""
        if not self.codes:
            return torch.zeros(num_codebooks, 0, dtype=torch.long)
        return torch.stack(self.codes, dim=1)

    def tokens(self, num_codebooks: int, is_greedy: bool) -> SampledTokens:
        """The answer as policies encode it: one stretch of speech, without drawn text."""
        no_text = torch.zeros(0, dtype=torch.long)
        logprob_A = None if is_greedy else torch.cat([torch.zeros(0), *self.logprobs])
        codes = (self.codes_KT(num_codebooks),)
        return SampledTokens("audio", no_text, no_text.bool(), codes, (self.has_ended,), logprob_A)


class FrameDrawer(Protocol):
    """Draws the next codes of answers."""

    def draw(self, answers: Sequence[Speaking], hidden_RC: Tensor) -> None:
        """Give each answer its next row, or its end.

        Args:
            hidden_RC: of the last row of each, on the model's device.
        """


class DepthDrawer:
    """A `FrameDrawer` of frames whose codes a depth decoder chooses one after the other.

    Args:
        depth: its passes, with room for as many answers as are spoken side by side.
    """

    def __init__(self, model: DepthTalker, kind: TalkerKind, depth: DepthPasses) -> None:
        self._model, self._kind, self._depth = model, kind, depth

    def draw(self, answers: Sequence[Speaking], hidden_RC: Tensor) -> None:
        """See `FrameDrawer.draw`."""
        codes_RK, logprob_RK = self._draw_frames(answers, hidden_RC)
        for answer, codes_K, logprob_K in zip(answers, codes_RK, logprob_RK, strict=True):
            self._take_frame(answer, codes_K, logprob_K)

    def _draw_frames(self, answers: Sequence[Speaking], hidden_RC: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and their log-probabilities, `[R, K]` on the CPU."""
        model = self._model
        uniform_R2K = _draw_uniform(answers, model)
        first_RV: Tensor = model.first_head(hidden_RC).float()
        _leave_out(first_RV, answers, self._kind)
        firsts, depths = _sampling_of(answers)
        codes, rest = [_draw_codes(first_RV, firsts, uniform_R2K[..., 0])], list[Tensor]()
        # an end without other codes draws them for nothing: its answer leaves its slot afterwards
        self._depth.extend(model.project_depth(hidden_RC), 0)
        for book in range(1, model.num_codebooks):
            hidden_RC = self._depth.extend(model.project_depth(model.embed_code(codes[-1], book - 1)), book)
            logits_RV = model.through_rest_head(hidden_RC, book).float()
            if self._kind.suppressed_depth:
                logits_RV[:, list(self._kind.suppressed_depth)] = -torch.inf
            codes.append(_draw_codes(logits_RV, depths, uniform_R2K[..., book]))
            rest.append(logits_RV)
        codes_RK = torch.stack(codes, 1)
        logprobs = [_logprobs_of(first_RV[:, None], codes_RK[:, :1], firsts)]
        if rest:
            logprobs.append(_logprobs_of(torch.stack(rest, 1), codes_RK[:, 1:], depths))
        return codes_RK.cpu(), torch.cat(logprobs, 1).cpu()

    def _take_frame(self, answer: Speaking, codes_K: Tensor, logprob_K: Tensor) -> None:
        answer.has_ended = self._kind.is_end(codes_K)
        if not answer.has_ended:
            answer.codes.append(codes_K)
            answer.rows.append(codes_K)
            answer.logprobs.append(logprob_K)
        else:
            parts = logprob_K[:1] if self._kind.end_codes is None else logprob_K
            answer.logprobs.append(parts.sum()[None])


class DelayDrawer:
    """A `FrameDrawer` of frames whose codes the backbone chooses, codebook k in the row k behind that of codebook 0.

    The end is drawn in codebook 0 alone, in the place of any frame. From then on, as from the limit of frames on, only
    the codes that the last frames lack are drawn; all else is what the layout says of a clip of so many frames.
    """

    def __init__(self, model: DelayedTalker, kind: TalkerKind) -> None:
        self._model, self._kind = model, kind

    def draw(self, answers: Sequence[Speaking], hidden_RC: Tensor) -> None:
        """See `FrameDrawer.draw`."""
        logits_RKV = self._model.logits(hidden_RC).float()
        first_RV, others_RJV = logits_RKV[:, 0], logits_RKV[:, 1:]
        _leave_out(first_RV, answers, self._kind)
        if self._kind.suppressed_depth:
            others_RJV[..., list(self._kind.suppressed_depth)] = -torch.inf
        uniform_R2K = _draw_uniform(answers, self._model)
        firsts, depths = _sampling_of(answers)
        codes_RK = torch.stack(
            [
                _draw_codes(logits_RV, depths if book else firsts, uniform_R2K[..., book])
                for book, logits_RV in enumerate(logits_RKV.unbind(1))
            ],
            dim=1,
        )
        parts = [(slice(0, 1), firsts), (slice(1, None), depths)]
        logprobs = [
            _logprobs_of(logits_RKV[:, books], codes_RK[:, books], configs) for books, configs in parts
        ]
        codes_RK, logprob_RK = codes_RK.cpu(), torch.cat(logprobs, 1).cpu()
        for answer, codes_K, logprob_K in zip(answers, codes_RK, logprob_RK, strict=True):
            self._take_row(answer, codes_K, logprob_K)

    def _take_row(self, answer: Speaking, codes_K: Tensor, logprob_K: Tensor) -> None:
        """Put what is no frame's code into its place, and complete the frame whose last code this row has."""
        row, end = len(answer.rows), self._kind.end
        is_drawn_end = answer.num_frames is None and row < answer.max_frames and int(codes_K[0]) == end
        if is_drawn_end or (answer.num_frames is None and row == answer.max_frames):
            answer.num_frames = row
        frame_K = row - torch.arange(len(codes_K))
        codes_K = codes_K.masked_fill(frame_K < 0, self._model.begin)
        if answer.num_frames is not None:
            codes_K = codes_K.masked_fill(frame_K >= answer.num_frames, end)
        answer.rows.append(codes_K)
        answer.row_logprobs.append(logprob_K)
        frame = int(frame_K[-1])
        if frame >= 0 and (answer.num_frames is None or frame < answer.num_frames):
            answer.codes.append(_diagonal(answer.rows, frame))
            answer.logprobs.append(_diagonal(answer.row_logprobs, frame))
        if answer.num_frames == len(answer.codes) and answer.num_frames < answer.max_frames:
            answer.logprobs.append(answer.row_logprobs[answer.num_frames][:1])
            answer.has_ended = True


def new_drawer(model: Talker, kind: TalkerKind, steps: TalkerSteps, slots: int) -> FrameDrawer:
    """Return what draws the frames of a model.

    Args:
        steps: the model's.
        slots: most answers side by side.
    """
    if isinstance(model, DelayedTalker):
        return DelayDrawer(model, kind)
    assert isinstance(model, DepthTalker)
    return DepthDrawer(model, kind, steps.depth_passes(model.depth.new_cache(slots, model.num_codebooks)))


def _diagonal(rows: Sequence[Tensor], frame: int) -> Tensor:
    """Values of a frame in delayed rows: codebook k stands k rows behind the frame's first row."""
    return torch.stack([row_K[book] for book, row_K in enumerate(rows[frame:])])


def _draw_uniform(answers: Sequence[Speaking], model: Talker) -> Tensor:
    """Two numbers `[R, 2, K]` of each answer's own generator for each code."""
    drawn = [torch.rand(2, model.num_codebooks, generator=answer.generator) for answer in answers]
    return torch.stack(drawn).to(model.backbone.norm.weight.device)


def _leave_out(logits_RV: Tensor, answers: Sequence[Speaking], kind: TalkerKind) -> None:
    """Take from the first codebook what is never drawn, in place."""
    if kind.suppressed:
        logits_RV[:, list(kind.suppressed)] = -torch.inf
    for row, answer in enumerate(answers):
        if len(answer.rows) < answer.sampling.min_frames:
            logits_RV[row, kind.end] = -torch.inf
        penalty = answer.sampling.repetition_penalty
        if penalty != 1.0 and answer.rows:
            repeated = torch.stack(answer.rows)[:, 0].unique().to(logits_RV.device)
            logits_RV[row, repeated] = torch.where(
                logits_RV[row, repeated] < 0,
                logits_RV[row, repeated] * penalty,
                logits_RV[row, repeated] / penalty,
            )


def _sampling_of(answers: Sequence[Speaking]) -> tuple[list[SamplingConfig], list[SamplingConfig]]:
    """How the first codebook of each answer is drawn, and how the others are."""
    return [answer.sampling.first for answer in answers], [answer.sampling.depth for answer in answers]


def _draw_codes(logits_RV: Tensor, configs: Sequence[SamplingConfig], uniform_R2: Tensor) -> Tensor:
    """A code of each row."""
    different = dict.fromkeys(configs)
    if len(different) == 1:
        return sample_codes(logits_RV[:, None], configs[0], uniform_R2[..., None])[:, 0]
    code_R = torch.zeros(len(logits_RV), dtype=torch.long, device=logits_RV.device)
    for config in different:
        rows = torch.tensor([row for row, other in enumerate(configs) if other == config])
        drawn = sample_codes(logits_RV[rows, None], config, uniform_R2[rows][..., None])
        code_R[rows] = drawn[:, 0].to(code_R.device)
    return code_R


def _logprobs_of(logits_RKV: Tensor, codes_RK: Tensor, configs: Sequence[SamplingConfig]) -> Tensor:
    """Log-probabilities of codes at the row's temperature, under all codes that are not -inf."""
    heat_R = torch.tensor([config.temperature or 1.0 for config in configs], device=logits_RKV.device)
    warm_RKV = logits_RKV / heat_R[:, None, None]
    return warm_RKV.log_softmax(2).gather(2, codes_RK[..., None])[..., 0]
