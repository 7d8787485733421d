"""Prompts and speech as rows of a talker, and packs of them.

Shapes: L rows of an answer, S rows of a pack, F targets of the first codebook, D frames whose other codes are targets,
K codebooks, J = K - 1, T targets in reading order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from audiollm.data.packing import SegmentLayout
from audiollm.families.talkers.talker import RowInputs

NONE = -1
"""Stands for a row without a word, or without a code, and for a code that is no target."""


def _no_targets() -> Tensor:
    return torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class SpeechRows:
    """Rows of a prompt, or of a prompt and an answer."""

    text_L: Tensor
    """int64; `NONE` where the row has no word."""
    first_L: Tensor
    """int64: the entry of the first codebook's table; `NONE` where there is none."""
    rest_LJ: Tensor
    """int64: the other codes of a frame; `NONE` in rows that are no frame."""
    vectors: tuple[tuple[int, Tensor], ...] = ()
    """Rows with a vector `[C]`, which is added to what else they hold."""
    source_F: Tensor = field(default_factory=_no_targets)
    """The row that chooses each frame, or the end."""
    target_F: Tensor = field(default_factory=_no_targets)
    """The first code of the frame, or the end."""
    target_FJ: Tensor = field(default_factory=lambda: _no_targets()[:, None][:, :0])
    """The frame's other codes; `NONE` where they are no targets."""
    is_sampled: bool = False
    """Whether the model drew it: what sampling leaves out has no probability then, and an end is one action."""

    @property
    def num_rows(self) -> int:
        """Rows, those of the prompt included."""
        return len(self.text_L)

    @property
    def num_targets(self) -> int:
        """Targets of all codebooks."""
        return len(self.target_F) + int((self.target_FJ != NONE).sum())


def text_rows(ids: Sequence[int] | Tensor, num_codebooks: int, mark: int = NONE) -> SpeechRows:
    """Rows with a word each, and a mark of the first table beside it."""
    text_L = torch.as_tensor(ids, dtype=torch.long)
    return SpeechRows(
        text_L, torch.full_like(text_L, mark), torch.full((len(text_L), num_codebooks - 1), NONE)
    )


def frame_rows(codes_KT: Tensor, text: int = NONE) -> SpeechRows:
    """Rows with a frame each, and a word beside it."""
    codes_TK = codes_KT.T.long()
    return SpeechRows(torch.full((len(codes_TK),), text), codes_TK[:, 0], codes_TK[:, 1:].contiguous())


def join_rows(blocks: Sequence[SpeechRows]) -> SpeechRows:
    """Rows one block after the other, without targets."""
    vectors, before = list[tuple[int, Tensor]](), 0
    for block in blocks:
        vectors += [(before + row, vector_C) for row, vector_C in block.vectors]
        before += block.num_rows
    return SpeechRows(
        torch.cat([block.text_L for block in blocks]),
        torch.cat([block.first_L for block in blocks]),
        torch.cat([block.rest_LJ for block in blocks]),
        tuple(vectors),
    )


def with_targets(rows: SpeechRows, spans: Sequence[SpeechTargets], is_sampled: bool = False) -> SpeechRows:
    """The rows with stretches of speech in them as targets."""
    return replace(
        rows,
        source_F=torch.cat([span.first_row - 1 + torch.arange(len(span.target_F)) for span in spans]),
        target_F=torch.cat([span.target_F for span in spans]),
        target_FJ=torch.cat([span.target_FJ for span in spans]),
        is_sampled=is_sampled,
    )


@dataclass(frozen=True)
class SpeechTargets:
    """A stretch of speech among the rows: its frames, and its end where that is a target."""

    first_row: int
    target_F: Tensor
    target_FJ: Tensor

    @classmethod
    def of(
        cls, first_row: int, codes_KT: Tensor, end: int | None, end_codes: Sequence[int] | None
    ) -> SpeechTargets:
        """Make the targets of frames.

        Args:
            first_row: the row of the first frame.
            end: the entry of the first codebook that ends the speech; None: the end is no target.
            end_codes: the other codes of the end; None: the end has none.
        """
        codes_TK = codes_KT.T.long()
        first, rest = [codes_TK[:, 0]], [codes_TK[:, 1:]]
        if end is not None:
            codes_J = torch.full((1, codes_TK.shape[1] - 1), NONE) if end_codes is None else None
            first.append(torch.tensor([end]))
            rest.append(torch.tensor([end_codes]) if codes_J is None else codes_J)
        return cls(first_row, torch.cat(first), torch.cat(rest))


@dataclass(frozen=True)
class SpeechBatch:
    """Answers end to end, each behind its prompt."""

    inputs: RowInputs
    layout: SegmentLayout
    position_S: Tensor
    source_F: Tensor
    """int64: the row of the pack that chooses each first code."""
    target_F: Tensor
    depth_D: Tensor
    """int64: which of the F have other codes as targets."""
    target_DJ: Tensor
    """The frame's other codes; `NONE` where one is no target."""
    sampled_F: Tensor
    """bool: whether the answer was sampled."""
    order_T: Tensor
    """int64: of each target in reading order, its place among all first codes, then all others."""
    answer_T: Tensor
    codebook_T: Tensor
    num_answers: int
    fold_T: Tensor | None = None
    """int64: the action that each target is part of, where a drawn end has codes in all codebooks; None: every target
    is an action."""

    @property
    def codes_DK(self) -> Tensor:
        """Codes of the frames that the depth decoder learns."""
        return torch.cat([self.target_F[self.depth_D][:, None], self.target_DJ], dim=1)

    def to(self, device: torch.device) -> SpeechBatch:
        """Return the batch on a device."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | SegmentLayout | RowInputs)
        }
        return replace(self, **moved)

    def with_prompts(self) -> SpeechBatch:
        """See `prompt_tokens.ScoredAnswers`: a talker writes no text, so that no token of a prompt has a likelihood."""
        return self

    def fold(self, values_T: Tensor) -> Tensor:
        """Sum figures of targets over each action."""
        if self.fold_T is None:
            return values_T
        return values_T.new_zeros(len(self.answer_T)).index_add(0, self.fold_T, values_T)


def speech_batch(answers: Sequence[SpeechRows]) -> SpeechBatch:
    """Pack answers.

    Raises:
        ValueError: no answers.
    """
    if not answers:
        raise ValueError("no answers")
    lengths = [answer.num_rows for answer in answers]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    firsts = [len(answer.target_F) for answer in answers]
    target_FJ = torch.cat([answer.target_FJ for answer in answers])
    has_depth_F = (target_FJ != NONE).any(dim=1)
    answer_F = torch.repeat_interleave(torch.arange(len(answers)), torch.tensor(firsts))
    sampled_A = torch.tensor([answer.is_sampled for answer in answers])
    order_T, answer_T, codebook_T = _reading_order(target_FJ != NONE, answer_F)
    batch = SpeechBatch(
        join_inputs(answers),
        SegmentLayout.in_order(lengths, torch.device("cpu")),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.cat([start + answer.source_F for start, answer in zip(starts, answers, strict=True)]),
        torch.cat([answer.target_F for answer in answers]),
        has_depth_F.nonzero()[:, 0],
        target_FJ[has_depth_F],
        sampled_A[answer_F],
        order_T,
        answer_T,
        codebook_T,
        len(answers),
    )
    return batch


def fold_ends(batch: SpeechBatch, is_end_F: Tensor) -> SpeechBatch:
    """Make one action of each drawn end that has codes in all codebooks.

    Args:
        is_end_F: bool: which of the first codes are of an end.
    """
    firsts = batch.codebook_T == 0
    frame_T = firsts.cumsum(0) - 1
    is_folded_T = (is_end_F & batch.sampled_F)[frame_T] & ~firsts
    if not bool(is_folded_T.any()):
        return batch
    fold_T = (~is_folded_T).cumsum(0) - 1
    stay = ~is_folded_T
    return replace(batch, answer_T=batch.answer_T[stay], codebook_T=batch.codebook_T[stay], fold_T=fold_T)


def join_inputs(answers: Sequence[SpeechRows]) -> RowInputs:
    """What the rows of several blocks hold, end to end."""
    starts = torch.tensor([0, *(answer.num_rows for answer in answers)]).cumsum(0)[:-1].tolist()
    text_S = torch.cat([answer.text_L for answer in answers])
    first_S = torch.cat([answer.first_L for answer in answers])
    rest_SJ = torch.cat([answer.rest_LJ for answer in answers])
    rows = [(text_S != NONE).nonzero()[:, 0], (first_S != NONE).nonzero()[:, 0]]
    rest_row_Z = (rest_SJ[:, 0] != NONE).nonzero()[:, 0] if rest_SJ.shape[1] else rows[0][:0]
    vectors = [
        (start + row, vector_C)
        for start, answer in zip(starts, answers, strict=True)
        for row, vector_C in answer.vectors
    ]
    vector_VC = torch.stack([vector_C for _, vector_C in vectors]) if vectors else torch.zeros(0, 0)
    vector_row_V = torch.tensor([row for row, _ in vectors], dtype=torch.long)
    return RowInputs(
        len(text_S), text_S[rows[0]], rows[0], first_S[rows[1]], rows[1], rest_SJ[rest_row_Z], rest_row_Z,
        vector_VC, vector_row_V,
    )  # fmt: skip


def _reading_order(is_target_FJ: Tensor, answer_F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each target, frame after frame: its place among first codes then others, its answer, its codebook."""
    frames, others = is_target_FJ.shape
    rank_F = is_target_FJ.any(dim=1).long().cumsum(0) - 1
    place_FJ = frames + rank_F[:, None] * others + torch.arange(others)
    place_FK = torch.cat([torch.arange(frames)[:, None], place_FJ], dim=1)
    is_target_FK = torch.cat([torch.ones(frames, 1, dtype=torch.bool), is_target_FJ], dim=1)
    frame_T, codebook_T = is_target_FK.nonzero(as_tuple=True)
    return place_FK[is_target_FK], answer_F[frame_T], codebook_T
