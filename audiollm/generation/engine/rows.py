"""The plan of a step: its text rows, its audio rows, and the groups of rows that are drawn from together.

A plan is made anew when an answer begins, ends or goes from text to speech or back, and kept in between.

Shapes: R rows of the cache in use, X of them that are fed text, Y codes; K codebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.data.chat.template import Kind, TokenStream
from audiollm.generation.engine.record import TokenRecord
from audiollm.generation.engine.request import OpenRequest, Request
from audiollm.generation.engine.state import AnswerState, Codes

UNIFORM_STEPS = 256
"""Steps whose random numbers are made at once."""
FedRow = int | Codes | Tensor
"""A position that a cache row is fed: a text token, the codes of a frame, or an embedded row of features."""


class FedRows:
    """The positions of a step in which cache rows are fed different numbers of them, by their kind."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.features: list[Tensor] = []
        self.codes: list[Codes] = []
        self._places: tuple[list[int], list[int], list[int]] = ([], [], [])
        """Numbers of the text positions, of those of features, and of those of codes."""

    def __len__(self) -> int:
        return sum(map(len, self._places))

    def add(self, position: FedRow) -> None:
        """Add the next position."""
        number = len(self)
        if isinstance(position, int):
            self.ids.append(position)
            self._places[0].append(number)
        elif isinstance(position, Tensor):
            self.features.append(position)
            self._places[1].append(number)
        else:
            self.codes.append(position)
            self._places[2].append(number)

    def order_X(self, device: torch.device) -> Tensor | None:
        """The number of each row of the model's batch; None where all are of one kind, and so in order."""
        if sum(map(bool, self._places)) < 2:
            return None
        return torch.tensor(list(chain(*self._places)), device=device)


@dataclass
class OpenStream:
    """The course of an open request."""

    silence_bias: float
    record: TokenRecord | None
    pending: list[FedRow] = field(default_factory=list)
    """Rows that the model is fed next: text tokens, codes of heard frames, and embedded rows of features."""
    actions: int = 0
    """Finished actions."""
    finished_speech: list[tuple[Tensor, bool]] = field(default_factory=list)
    """Codes of all stretches of speech of finished actions, and whether the model ended each."""
    draws_first: bool = False
    """Whether the next draw begins an action."""


@dataclass
class Running:
    """A request in its slots, or in line for them."""

    number: int
    request: Request | OpenRequest
    streams: list[TokenStream]
    """The prompt of each branch, in the order of `SamplingConfig.branches`."""
    state: AnswerState
    submitted: float
    generator: torch.Generator
    group: Hashable = 0
    """Requests of the same group have the same prompt: the number of the first one, or the prompt itself."""
    lengths: list[int] = field(default_factory=list)
    """Positions of the prompt of each branch."""
    weight_changes: int = 0
    """The model's count of announced changes when the prompt went through it."""
    rows: list[int] = field(default_factory=list)
    """Rows of the cache, one per branch."""
    first_frame: float | None = None
    paused: bool = False
    """Whether the request rests in its slots."""
    unread: list[list[FedRow]] = field(default_factory=list)
    """For each branch, rows of a prompt that is read in pieces; empty once all are read."""
    stream: OpenStream | None = None
    """Frames fed to an open request, and its actions; None for an answer to a prompt."""
    _steps: int = 0
    _uniform_S2K: Tensor = field(default_factory=lambda: torch.empty(0))

    def read(self, row: int, max_rows: int) -> list[FedRow]:
        """Take the next positions of the prompt in a row of the cache, at most so many."""
        branch = self.rows.index(row)
        piece, self.unread[branch] = self.unread[branch][:max_rows], self.unread[branch][max_rows:]
        return piece

    def next_uniform_2K(self) -> Tensor:
        """Return the random numbers of the next draws, which depend on the seed and the steps taken only."""
        place = self._steps % UNIFORM_STEPS
        if place == 0:
            shape = (UNIFORM_STEPS, 2, self.state.marks.num_codebooks)
            self._uniform_S2K = torch.rand(shape, generator=self.generator)
        self._steps += 1
        return self._uniform_S2K[place]


@dataclass(frozen=True)
class Group:
    """Answers with equal sampling settings, drawn in one call."""

    members: list[Running]
    branches: list[Tensor | None]
    """For each branch of the guidance the members' places among the rows of this kind; None: all, in order."""

    @property
    def has_logprobs(self) -> bool:
        """Whether the log-probabilities of what is drawn are recorded."""
        request = self.members[0].request
        return request.record_tokens and request.sampling.temperature > 0


@dataclass(frozen=True)
class StepPlan:
    """The rows of a step: those that are fed text, then those that are fed codes."""

    writing: list[Running]
    speaking: list[Running]
    writer_X: NDArray[np.int64]
    """Index into `writing` of the answer whose token each text row is fed."""
    speaker_Y: NDArray[np.int64]
    order_R: Tensor | None
    """Cache row of each row of the step; None: the cache's order."""
    text_groups: list[Group]
    audio_groups: list[Group]


def prompt_rows(stream: TokenStream) -> list[FedRow]:
    """Return the rows of a prompt without features as the model is fed them: text tokens, and codes `[K]`."""
    codes_SK = stream.codes_SK.cpu().numpy()
    text = zip(stream.text_ids_S.tolist(), (stream.kinds_S == Kind.TEXT).tolist(), strict=True)
    return [token if is_text else codes_SK[place] for place, (token, is_text) in enumerate(text)]


def batch_rows(
    owners: Sequence[Running], device: torch.device, rows: Sequence[int] | None = None
) -> StepPlan:
    """Plan a step for the answers that own the rows of the cache in use, row by row.

    Args:
        rows: numbers of the cache rows that are drawn from; None: all of `owners`.
    """
    rows = range(len(owners)) if rows is None else rows
    text_rows = [row for row in rows if not owners[row].state.speaks]
    audio_rows = [row for row in rows if owners[row].state.speaks]
    mixed = bool(text_rows and audio_rows)
    writing, writer_X = _deduplicate_owners([owners[row] for row in text_rows])
    speaking, speaker_Y = _deduplicate_owners([owners[row] for row in audio_rows])
    return StepPlan(
        writing,
        speaking,
        writer_X,
        speaker_Y,
        torch.tensor([*text_rows, *audio_rows], device=device) if mixed else None,
        _group_alike(
            writing, text_rows, lambda running: (_drawn_alike(running), running.request.answer), device
        ),
        _group_alike(speaking, audio_rows, _drawn_alike, device),
    )


def _drawn_alike(running: Running) -> Hashable:
    bias = 0.0
    if running.stream is not None and running.stream.draws_first:
        bias = running.stream.silence_bias
    return running.request.sampling, running.request.record_tokens, bias


def _deduplicate_owners(owners: Sequence[Running]) -> tuple[list[Running], NDArray[np.int64]]:
    places = {
        owner.number: place for place, owner in enumerate({owner.number: owner for owner in owners}.values())
    }
    distinct = list({owner.number: owner for owner in owners}.values())
    return distinct, np.array([places[owner.number] for owner in owners], dtype=np.int64)


def _group_alike(
    members: Sequence[Running],
    rows: Sequence[int],
    key: Callable[[Running], Hashable],
    device: torch.device,
) -> list[Group]:
    sets: dict[Hashable, list[Running]] = {}
    for member in members:
        sets.setdefault(key(member), []).append(member)
    place = {row: number for number, row in enumerate(rows)}
    groups = []
    for alike in sets.values():
        branches = [[place[row] for row in rows_of] for rows_of in zip(*(m.rows for m in alike), strict=True)]
        every = list(range(len(rows)))
        groups.append(
            Group(
                alike,
                [None if branch == every else torch.tensor(branch, device=device) for branch in branches],
            )
        )
    return groups
