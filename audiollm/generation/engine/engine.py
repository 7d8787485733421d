"""The generation engine: continuous batches of text and speech over one preallocated cache.

A slot is a row of the cache. A request takes one, and one more for each branch of its guidance; the rows in use are
always the first ones, so that a step computes nothing for the others.

Shapes: R rows of the cache in use, X of them that are fed text, Y codes; B answers of a group, C hidden size,
K codebooks, V codes or words, S positions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audiollm.data.chat.conditions import without_conditions
from audiollm.data.chat.template import Template, TokenStream
from audiollm.data.packing import pack
from audiollm.generation.engine.forbidden import forbidden_words
from audiollm.generation.engine.record import Logprobs, TokenRecord
from audiollm.generation.engine.request import Answer, Event, Finished, Frames, Request, TextPiece
from audiollm.generation.engine.rows import Group, Running, StepPlan, batch_rows
from audiollm.generation.engine.sampling import check_plain, drawn_logprobs, guide, sample_codes
from audiollm.generation.engine.state import AnswerState, Codes, Marks, SpeechState
from audiollm.models.cache import Cache
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import GenerationDecoder, PackedDecoder

PREFILL_POSITIONS = 8192
"""Most positions of the prompts that go through the model together."""


class Engine:
    """Answers requests, as many at a time as there are slots.

    Args:
        model: taken as it is at every step: `eval()` is the caller's, and weights may change between answers.
        slots: rows of the cache. A request takes one for each branch of its guidance.
        max_length: the longest prompt and answer together, in positions.
        decoder: of this model, where several engines share it.
    """

    def __init__(
        self,
        model: DualFFN,
        template: Template,
        slots: int = 8,
        max_length: int = 2048,
        decoder: GenerationDecoder | None = None,
    ) -> None:
        weight = next(model.parameters())
        self._model, self._template, self._device = model, template, weight.device
        self._decoder = decoder or GenerationDecoder(model)
        self._layers: DualFFN | PackedDecoder = model
        """Decoder that computes the steps, with the weights of the time when an answer last began."""
        self._marks = Marks.of(template)
        self._cache = Cache.empty(model.config, slots, max_length, weight.device, weight.dtype)
        self._slots, self._submitted = slots, 0
        self._waiting: deque[Running] = deque()
        self._owners: list[Running] = []
        """The running answer that owns each cache row in use."""
        self._plan: StepPlan | None = None
        forbidden = forbidden_words(template, model.config.vocab_size)
        self._forbidden_V = {kind: mask.to(weight.device) for kind, mask in forbidden.items()}

    @classmethod
    def sized_for(
        cls,
        model: DualFFN,
        template: Template,
        requests: Sequence[Request],
        most_slots: int = 256,
        decoder: GenerationDecoder | None = None,
        answers_per_request: int = 1,
    ) -> Engine:
        """Make an engine with a slot for each branch of these requests, up to a limit, and room for the longest one."""
        branches = [
            len(request.sampling.branches) for request in requests for _ in range(answers_per_request)
        ]
        longest = max(_positions(template, request, _prompts(template, request)) for request in requests)
        return cls(model, template, max(max(branches), min(sum(branches), most_slots)), longest, decoder)

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._owners or self._waiting)

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number, which its events carry. Raises: ValueError: see `submit_group`."""
        return self.submit_group(request, [request.seed])[0]

    def submit_group(self, request: Request, seeds: Sequence[int]) -> list[int]:
        """Queue a request several times, with a seed for each answer; returns their numbers.

        The prompt goes through the audio encoder and the model once, and its cache rows are copied for the other
        answers, as long as one of the group is running when another begins and the weights are the same.

        Raises:
            ValueError: it needs more slots or more room than there are, its audio does not fit its messages, or it
                has `record_tokens` and is not sampled plainly (`check_plain`).
        """
        if request.record_tokens:
            check_plain(request.sampling)
        branches = len(request.sampling.branches)
        if branches > self._slots:
            raise ValueError(
                f"guidance gives the request {branches} branches, and there are {self._slots} slots"
            )
        streams = _prompts(self._template, request)
        wanted = _positions(self._template, request, streams)
        if wanted > self._cache.length:
            raise ValueError(
                f"prompt and answer may take {wanted} positions, a slot has {self._cache.length}: "
                "lower the limits, shorten the prompt, or give the engine a larger max_length"
            )
        first_id = None
        if request.answer != "audio":  # the prompt's last token is fed with the first step
            first_id = int(streams[0].text_ids_S[-1])
            streams = [_without_last(stream) for stream in streams]
        room = self._cache.length - max(len(stream) for stream in streams)
        kind, limits = request.answer, request.limits
        group, now, lengths = self._submitted + 1, time.perf_counter(), [len(stream) for stream in streams]
        for seed in seeds:
            record = TokenRecord(kind) if request.record_tokens else None
            state = AnswerState(self._marks, self._template.tokenizer, kind, limits, room, first_id, record)
            self._submitted += 1
            generator = torch.Generator().manual_seed(seed)
            self._waiting.append(
                Running(self._submitted, request, streams, state, now, generator, group, lengths)
            )
        return list(range(group, self._submitted + 1))

    def cancel(self, number: int) -> None:
        """Drop a request and free its slots; does nothing for a finished or unknown one."""
        self._waiting = deque(each for each in self._waiting if each.number != number)
        for running in [each for each in self._running() if each.number == number]:
            self._release(running)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit waiting requests, feed every row in use, draw, and return the events."""
        self._admit()
        if not self._owners:
            return []
        plan = self._plan = self._plan or batch_rows(self._owners, self._device)
        ids_X = np.array([each.state.input_id for each in plan.writing], dtype=np.int64)[plan.writer_X]
        codes_YK = self._codes([each.state.speech.last_K for each in plan.speaking])[plan.speaker_Y]
        hidden_XC, logits_YKV = self._feed(torch.from_numpy(ids_X), torch.from_numpy(codes_YK), plan.order_R)
        drawn = [self._draw_words(hidden_XC, group) for group in plan.text_groups]
        drawn += [self._draw_codes(logits_YKV, group) for group in plan.audio_groups]
        # the one wait for the device
        flat = torch.cat([codes.flatten() for codes, _ in drawn]).cpu().numpy()
        logprobs = None
        if any(found is not None for _, found in drawn):
            found = [torch.zeros(codes.shape, device=self._device) if logprob is None else logprob
                     for codes, logprob in drawn]  # fmt: skip
            logprobs = torch.cat([each.flatten() for each in found]).float().cpu().numpy()
        return self._advance(plan, flat, logprobs)

    def run(
        self, requests: Sequence[Request], on_step: Callable[[Sequence[Event]], None] = lambda events: None
    ) -> list[Answer]:
        """Answer all of these requests, in their order; those submitted before run on beside them."""
        return self._finished([self.submit(request) for request in requests], on_step)

    def run_groups(self, groups: Sequence[tuple[Request, Sequence[int]]]) -> list[list[Answer]]:
        """Answer each request once per seed (`submit_group`); returns each group's answers in order of its seeds."""
        numbers = [self.submit_group(request, seeds) for request, seeds in groups]
        answers = iter(self._finished([number for group in numbers for number in group]))
        return [[next(answers) for _ in group] for group in numbers]

    def _finished(
        self, numbers: Sequence[int], on_step: Callable[[Sequence[Event]], None] = lambda events: None
    ) -> list[Answer]:
        """Take steps until the answers of these numbers are complete."""
        answers: dict[int, Answer] = {}
        while any(number not in answers for number in numbers):
            events = self.step()
            answers |= {event.request: event.answer for event in events if isinstance(event, Finished)}
            on_step(events)
        return [answers[number] for number in numbers]

    def stream(self, request: Request) -> Iterator[Event]:
        """Yield the events of one request; the last is `Finished`. Closing the iterator early cancels the request.

        Events of others that run beside it are not told: with several at a time, `submit` and `step`.
        """
        number, over = self.submit(request), False
        try:
            while not over:
                for event in self.step():
                    if event.request == number:
                        over = isinstance(event, Finished)
                        yield event
        finally:
            self.cancel(number)

    def _admit(self) -> None:
        """Admit waiting requests that there are slots for; their prompts go through the model without padding.

        A prompt that an answer of the same group has in its rows is copied from there.
        """
        admitted: list[Running] = []
        if not self._waiting:
            return
        changes = self._model.weight_changes
        twins = {each.group: each for each in self._running() if each.weight_changes == changes}
        while self._waiting and len(self._owners) + len(self._waiting[0].streams) <= self._slots:
            running = self._waiting.popleft()
            running.rows = list(range(len(self._owners), len(self._owners) + len(running.streams)))
            self._owners += [running] * len(running.rows)
            admitted.append(running)
            self._plan = None
        if admitted:
            self._layers = self._decoder.current()
        pairs: list[tuple[TokenStream, int]] = []
        copies: list[tuple[int, int, int]] = []
        for each in admitted:
            each.weight_changes = changes
            twin = twins.setdefault(each.group, each)
            if twin is each:
                pairs += zip(each.streams, each.rows, strict=True)
            else:
                copies += zip(twin.rows, each.rows, each.lengths, strict=True)
        while pairs:
            count, positions = 1, len(pairs[0][0])
            while count < len(pairs) and positions + len(pairs[count][0]) <= PREFILL_POSITIONS:
                positions += len(pairs[count][0])
                count += 1
            streams, rows = zip(*pairs[:count], strict=True)
            lengths = [len(stream) for stream in streams]
            self._layers.prefill(pack(streams).to(self._device), self._cache, rows, lengths)
            del pairs[:count]
        for source, target, filled in copies:
            self._cache.copy(source, target, filled)
        for running in admitted:
            running.streams = []

    def _feed(self, ids_X: Tensor, codes_YK: Tensor, order_R: Tensor | None) -> tuple[Tensor, Tensor]:
        """Feed one position to every row; returns hidden states of text rows and audio logits of code rows."""
        ids_X, codes_YK = ids_X.to(self._device), codes_YK.to(self._device)
        hidden_RC = self._layers.extend(ids_X, codes_YK, self._cache, order_R)
        return hidden_RC[: len(ids_X)], self._layers.audio_logits(hidden_RC[len(ids_X) :]).float()

    def _draw_words(self, hidden_XC: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
        """Draw one token per answer, `[B, 1]`, from the full prompt's branch alone: guidance is for speech.

        Returns:
            The tokens, and their log-probabilities where they are recorded.
        """
        full, request = group.branches[0], group.members[0].request
        hidden_BC = hidden_XC if full is None else hidden_XC[full]
        logits_BV = self._layers.text_logits(hidden_BC).float()
        logits_BV = logits_BV.masked_fill(self._forbidden_V[request.answer], -torch.inf)
        uniform_B2K = self._uniform(group)
        logits_B1V = logits_BV[:, None]
        return _with_logprobs(
            logits_B1V, sample_codes(logits_B1V, request.sampling, uniform_B2K[:, :, :1]), group
        )

    def _draw_codes(self, logits_YKV: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
        """Draw one code per codebook and answer, `[B, K]`: never BOS, and EOS in the first codebook only.

        Returns:
            The codes, and their log-probabilities where they are recorded.
        """
        sampling, marks = group.members[0].request.sampling, self._marks
        branches = [logits_YKV if each is None else logits_YKV[each] for each in group.branches]
        logits_BKV = branches[0]
        if len(branches) > 1:
            no_text = branches[1] if sampling.text_guidance != 1 else None
            no_speaker = branches[-1] if sampling.speaker_guidance != 1 else None
            logits_BKV = guide(logits_BKV, no_text, no_speaker, sampling)
        logits_BKV[:, :, marks.audio_bos] = -torch.inf
        logits_BKV[:, 1:, marks.audio_eos] = -torch.inf
        fresh = [place for place, each in enumerate(group.members) if each.state.speech.rows == 1]
        if fresh:  # at least one frame
            logits_BKV[fresh, 0, marks.audio_eos] = -torch.inf
        recent_BWK = None
        if sampling.ras_window and sampling.temperature:
            recent = [each.state.speech.recent_WK(sampling.ras_window) for each in group.members]
            recent_BWK = torch.from_numpy(np.stack(recent)).to(self._device)
        codes_BK = sample_codes(logits_BKV, sampling, self._uniform(group), recent_BWK)
        return _with_logprobs(logits_BKV, codes_BK, group)

    def _uniform(self, group: Group) -> Tensor:
        """Return the members' random numbers, `[B, 2, K]`; an empty tensor where the most likely code is taken."""
        if group.members[0].request.sampling.temperature == 0:
            return torch.empty(0, 2, 0)
        return torch.stack([each.next_uniform_2K() for each in group.members]).to(self._device)

    def _advance(self, plan: StepPlan, drawn: Codes, logprobs: Logprobs | None) -> list[Event]:
        """Advance every answer's state by what was drawn for it, and free the slots of finished answers."""
        events: list[Event] = []
        logprobs = np.zeros(drawn.shape, dtype=np.float32) if logprobs is None else logprobs
        start = 0
        for group in plan.text_groups:
            drawn_words = zip(group.members, drawn[start:].tolist(), logprobs[start:].tolist(), strict=False)
            for running, token, logprob in drawn_words:
                if piece := running.state.take_text(token, logprob):
                    events.append(TextPiece(running.number, piece))
            start += len(group.members)
        books = self._marks.num_codebooks
        rows = zip(drawn[start:].reshape(-1, books), logprobs[start:].reshape(-1, books), strict=True)
        for running in (each for group in plan.audio_groups for each in group.members):
            codes_KT = running.state.take_codes(*next(rows))
            if codes_KT is not None:
                running.first_frame = running.first_frame or time.perf_counter()
                events.append(Frames(running.number, codes_KT, running.state.stretches - 1))
        changed = any(each.state.speaks for each in plan.writing)
        if changed or not all(each.state.speaks for each in plan.speaking):
            self._plan = None
        for running in [each for each in self._running() if each.state.reason]:
            events.append(Finished(running.number, self._answer(running)))
            self._release(running)
        return events

    def _answer(self, running: Running) -> Answer:
        parts = tuple(
            part.codes_KT() if isinstance(part, SpeechState) else part.text for part in running.state.parts
        )
        speech = [part for part in parts if isinstance(part, Tensor)]
        none_K0 = torch.zeros(self._marks.num_codebooks, 0, dtype=torch.long)
        reason, first = running.state.reason, running.first_frame
        assert reason is not None
        return Answer(
            parts=parts,
            codes_KT=torch.cat([none_K0, *speech], dim=1),
            reason=reason,
            first_frame_s=None if first is None else first - running.submitted,
            seconds=time.perf_counter() - running.submitted,
            tokens=running.state.tokens(running.request.sampling.temperature > 0),
        )

    def _running(self) -> list[Running]:
        return list({owner.number: owner for owner in self._owners}.values())

    def _release(self, running: Running) -> None:
        """Free an answer's rows; the last rows in use move into the gaps."""
        self._plan = None
        for row in sorted(running.rows, reverse=True):
            last = len(self._owners) - 1
            owner = self._owners.pop()
            if row != last:
                self._cache.move(last, row)
                owner.rows[owner.rows.index(last)] = row
                self._owners[row] = owner
        running.rows = []

    def _codes(self, rows: Sequence[Codes]) -> Codes:
        return np.stack(rows) if rows else np.zeros((0, self._marks.num_codebooks), dtype=np.int64)


def _prompts(template: Template, request: Request) -> list[TokenStream]:
    """Lay out the prompt of each branch."""
    open_turn = template.prompt if request.answer == "audio" else template.text_prompt
    return [
        open_turn(*without_conditions(request.messages, request.audio, *hidden))
        for hidden in request.sampling.branches
    ]


def _with_logprobs(logits_BKV: Tensor, codes_BK: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
    if not group.has_logprobs:
        return codes_BK, None
    return codes_BK, drawn_logprobs(logits_BKV, codes_BK, group.members[0].request.sampling.temperature)


def _positions(template: Template, request: Request, prompts: Sequence[TokenStream]) -> int:
    """Positions of the longest prompt with its longest answer (with one stretch of speech, where it is `any`)."""
    speech = request.limits.max_frames + template.num_codebooks + 1
    text = request.limits.max_text_tokens
    answer = {"audio": speech, "text": text, "any": text + speech + 3}[request.answer]
    return max(len(stream) for stream in prompts) + answer


def _without_last(stream: TokenStream) -> TokenStream:
    """Remove a stream's last position, which is text."""
    rows: dict[str, Any] = {
        name: rows[:-1] for name, rows in stream.__dict__.items() if isinstance(rows, Tensor)
    }
    return replace(stream, **rows)
