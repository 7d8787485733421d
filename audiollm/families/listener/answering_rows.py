"""Continuous batches for audio LLMs of transformers: answers join and leave between steps, each with its own state.

transformers' own continuous batching (`generate_batch`) takes ids of text alone, so prompts with recordings cannot go
through it.

Shapes: B answers under way, N ids of prompt and answer, V entries of the vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer
from transformers.generation.configuration_utils import GenerationMode

from audiollm.families.answering import AnswerError, AnswerRequest
from audiollm.families.listener.generating import GenerationPlan, drawn_options, prepare_generation
from audiollm.families.listener.joined_cache import JoinedCache
from audiollm.families.listener.prompt_reading import CACHE_NAMES, PromptReading
from audiollm.generation.engine.request import Answer, Event, Finished, TextPiece
from audiollm.generation.engine.state import Text
from audiollm.generation.engine.step_engine import StepEngine, Unanswered

MakeInputs = Callable[[AnswerRequest], Mapping[str, Tensor]]
_JOINT_ARGUMENTS = frozenset(
    {*CACHE_NAMES, "input_ids", "position_ids", "attention_mask", "use_cache", "logits_to_keep"}
)
"""Arguments of a forward pass that a step of several rows fills."""


@dataclass
class _Row:
    """One answer under way."""

    number: int
    begun: float
    plan: GenerationPlan
    """Without the features of the prompt."""
    cache_name: str
    generator: torch.Generator
    ids_1N: Tensor
    position_ids: Tensor
    """`[..., 1, 1]`: of the last id."""
    text: Text


@dataclass
class _Decoding:
    """A processor's decoder, as `Text` calls it."""

    processor: Any

    def decode(self, ids: list[int], /) -> str:
        return str(self.processor.decode(ids, skip_special_tokens=True))


class ListenerEngine:
    """A `StepEngine` of `AnswerRequest`s for a model that `joins_rows`.

    A step draws a token of every answer under way, and reads a piece of one prompt. An answer is
    the one that `generate` gives for its request alone, up to the rounding of batches: `generate` itself prepares its
    penalties, warpers and ends, and its tokens are drawn by a generator of its own seed.

    Args:
        make_inputs: the processor's inputs of a conversation; raises `AnswerError`.
        slots: most answers side by side.
        max_positions: most positions of all rows, where each takes as many as the longest may need: a request beyond
            them waits for others to end, and is answered alone where it needs more by itself.
        piece_positions: positions of a prompt that are read in one step, where the class allows it.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        make_inputs: MakeInputs,
        slots: int,
        max_positions: int,
        piece_positions: int,
    ) -> None:
        self._model, self._processor, self._make_inputs = model, processor, make_inputs
        self._slots, self._max_positions, self._piece_positions = slots, max_positions, piece_positions
        self._submitted = 0
        self._waiting: deque[tuple[int, float, AnswerRequest]] = deque()
        """Number and time of submission of each request whose inputs are not made."""
        self._next: tuple[_Row, PromptReading] | None = None
        """The row whose inputs are made, and which waits for room."""
        self._reading: deque[tuple[_Row, PromptReading]] = deque()
        """Rows whose prompts are read by turns, a piece in a step: a short one does not wait for all of a long one."""
        self._rows: list[_Row] = []
        self._joined = JoinedCache()

    @property
    def acting(self) -> bool:
        """See `StepEngine.acting`."""
        return bool(self._rows or self._reading or self._next or self._waiting)

    def can_take(self, request: AnswerRequest) -> bool:
        """See `StepEngine.can_take`."""
        under_way = len(self._rows) + len(self._reading) + (self._next is not None)
        return under_way + len(self._waiting) < self._slots

    def submit(self, request: AnswerRequest) -> int:
        """See `StepEngine.submit`; a conversation that the model does not take is `Unanswered` by a step."""
        self._submitted += 1
        self._waiting.append((self._submitted, time.perf_counter(), request))
        return self._submitted

    @torch.inference_mode()
    def step(self) -> list[Event | Unanswered]:
        """See `StepEngine.step`."""
        events = self._step_rows()
        if self._next is None and self._waiting:
            events += self._begin_prompt(*self._waiting.popleft())
        if self._next is not None and self._has_room(self._next[0]):
            self._reading.append(self._next)
            self._next = None
        if self._reading:
            events += self._read_piece(*self._reading.popleft())
        return events

    def cancel(self, number: int) -> None:
        """See `StepEngine.cancel`."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != number)
        self._reading = deque(entry for entry in self._reading if entry[0].number != number)
        if self._next is not None and self._next[0].number == number:
            self._next = None
        self._keep([place for place, row in enumerate(self._rows) if row.number != number])

    def pause(self, number: int, paused: bool = True) -> None:
        """See `StepEngine.pause`: words are no sound, whose listener could fall behind."""

    def _begin_prompt(self, number: int, begun: float, request: AnswerRequest) -> list[Event | Unanswered]:
        """Make the inputs of a request; those of one request in a step, since others wait meanwhile."""
        try:
            plan = plan_answer(self._model, self._make_inputs(request), request)
            reading = PromptReading(self._model, plan, self._piece_positions)
            generator = torch.Generator(plan.ids_1L.device).manual_seed(request.seed)
        except Exception as error:
            return [Unanswered(number, error if isinstance(error, AnswerError) else failed_answer(error))]
        row = _Row(
            number, begun, replace(plan, arguments={}), reading.cache_name, generator, plan.ids_1L,
            _last_position(plan), Text(_Decoding(self._processor)),
        )  # fmt: skip
        self._next = row, reading
        return []

    def _has_room(self, row: _Row) -> bool:
        rows = [row, *self._rows, *(reading_row for reading_row, _ in self._reading)]
        longest = max(int(under_way.plan.config.max_length) for under_way in rows)
        return len(rows) == 1 or len(rows) * longest <= self._max_positions

    def _read_piece(self, row: _Row, reading: PromptReading) -> list[Event | Unanswered]:
        try:
            logits_1V = reading.advance()
        except Exception as error:
            return [Unanswered(row.number, failed_answer(error))]
        if logits_1V is None:
            self._reading.append((row, reading))
            return []
        events, is_over = self._draw(row, logits_1V)
        if not is_over:
            self._joined.join(reading.cache)
            self._rows.append(row)
        return events

    def _step_rows(self) -> list[Event | Unanswered]:
        if not self._rows:
            return []
        rows, joined = self._rows, self._joined
        ids_B1 = torch.cat([row.ids_1N[:, -1:] for row in rows])
        for row in rows:
            row.position_ids = row.position_ids + 1
        mask = joined.next_mask()
        logits_BV = self._model(
            input_ids=ids_B1,
            position_ids=torch.cat([row.position_ids for row in rows], dim=-2),
            attention_mask=None if mask is None else mask.to(ids_B1.device),
            use_cache=True,
            return_dict=True,
            **{rows[0].cache_name: joined.cache},
        ).logits[:, -1]
        joined.advanced()
        events, places = list[Event | Unanswered](), []
        for place, row in enumerate(rows):
            row_events, is_over = self._draw(row, logits_BV[place : place + 1])
            events += row_events
            if not is_over:
                places.append(place)
        self._keep(places)
        return events

    def _draw(self, row: _Row, logits_1V: Tensor) -> tuple[list[Event | Unanswered], bool]:
        """Draw the next token of a row; return its events, and whether its answer is over."""
        try:
            token_11 = draw_token(row.plan, row.ids_1N, logits_1V, row.generator)
            row.ids_1N = torch.cat([row.ids_1N, token_11], dim=1)
            is_over = bool(row.plan.stopping_criteria(row.ids_1N, None).all())
        except Exception as error:
            return [Unanswered(row.number, failed_answer(error))], True
        piece = row.text.take(int(token_11)) + (row.text.finish() if is_over else "")
        events: list[Event | Unanswered] = [TextPiece(row.number, piece)] if piece else []
        if is_over:
            events.append(Finished(row.number, self._answer(row)))
        return events, is_over

    def _answer(self, row: _Row) -> Answer:
        prompt = row.plan.ids_1L.shape[1]
        ids = row.ids_1N[0, prompt:].tolist()
        eos = row.plan.config.eos_token_id
        ends = set(eos if isinstance(eos, list | tuple) else [eos])
        is_cut = ids[-1] not in ends and row.ids_1N.shape[1] >= row.plan.config.max_length
        text = str(self._processor.decode(ids, skip_special_tokens=True))
        no_codes = torch.zeros(0, 0, dtype=torch.long)
        seconds = time.perf_counter() - row.begun
        return Answer((text,), no_codes, "length" if is_cut else "end", None, seconds)

    def _keep(self, places: list[int]) -> None:
        self._joined.keep(places)
        self._rows = [self._rows[place] for place in places]


_: type[StepEngine] = ListenerEngine


def plan_answer(model: Any, inputs: Mapping[str, Tensor], request: AnswerRequest) -> GenerationPlan:
    """Let `generate` prepare the answer to a request. Raises: AnswerError: it refuses."""
    options = drawn_options(request.temperature, request.top_p)
    try:
        return prepare_generation(model, inputs, max_new_tokens=request.max_tokens, **options)
    except Exception as error:
        raise failed_answer(error) from error


def draw_token(plan: GenerationPlan, ids_1N: Tensor, logits_1V: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the token `[1, 1]` behind the ids, as `generate` does after `torch.manual_seed`."""
    scores_1V = plan.logits_processor(ids_1N, logits_1V.to(copy=True, dtype=torch.float32))
    if plan.config.do_sample:
        return torch.multinomial(scores_1V.softmax(-1), 1, generator=generator)
    return scores_1V.argmax(-1, keepdim=True)


def failed_answer(error: Exception) -> AnswerError:
    """Return an error of the model as the one that its caller receives."""
    reason = " ".join(str(error).split())[:200]
    return AnswerError(f"failed: {type(error).__name__}: {reason}", "failed")


@torch.inference_mode()
def joins_rows(model: Any, inputs: Mapping[str, Tensor]) -> bool:
    """Whether rows of unequal length can go through a model together: it is told by a prompt's first pass.

    It cannot where the class has a `generate` of its own (which may switch adapters for a recording), where the
    generation config asks for beams or an assistant, where a layer keeps another state than the keys and values of
    all positions, or where a later step takes more than ids, positions and a mask (sound, types of tokens).

    Args:
        inputs: of a short prompt; with a recording where the model hears.
    """
    if type(model).generate is not GenerationMixin.generate or model.config.is_encoder_decoder:
        return False
    plan = plan_answer(model, inputs, AnswerRequest([], max_tokens=1))
    mode = plan.config.get_generation_mode()
    plain_cache = any(type(plan.arguments.get(name)) is DynamicCache for name in CACHE_NAMES)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or not plain_cache:
        return False
    reading = PromptReading(model, plan, plan.ids_1L.shape[1])
    try:
        reading.advance()
    except Exception:  # requests then fail with this error one by one
        return False
    arguments = model.prepare_inputs_for_generation(
        plan.ids_1L[:, -1:], **{**plan.arguments, reading.cache_name: reading.cache}
    )
    needed = {
        name
        for name, value in arguments.items()
        if value is not None and not _describes_features(value, plan.arguments.get(name))
    }
    return needed <= _JOINT_ARGUMENTS and all(
        type(layer) is DynamicLayer and layer.is_initialized for layer in reading.cache.layers
    )


def _describes_features(value: Any, prompt_value: Any) -> bool:
    """Whether an argument of a later step is a mask or length of features, which `generate` has left out by then."""
    return isinstance(value, Tensor) and value is prompt_value and not value.is_floating_point()


def _last_position(plan: GenerationPlan) -> Tensor:
    """The position of the prompt's last id: `[1, 1]`, or `[axes, 1, 1]`."""
    position_ids = plan.arguments.get("position_ids")
    if position_ids is None:
        return torch.full((1, 1), plan.ids_1L.shape[1] - 1, device=plan.ids_1L.device)
    return position_ids[..., -1:]
