"""The generation engine: continuous batches of text and speech over one preallocated cache.

A slot is a row of the cache. A request takes one, and one more for each branch of its guidance; the rows in use are
always the first ones, so that a step computes nothing for the others.

Shapes: R rows of the cache in use, X of them that are fed text, Y codes; B answers of a group, C hidden size,
K codebooks, V codes or words, S positions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audiollm.data.chat.conditions import without_conditions
from audiollm.data.chat.template import Template, TokenStream
from audiollm.data.hearing.features import PackedFeatures, PartAudio
from audiollm.data.packing import pack
from audiollm.data.text.tokenizer import HEADER_STYLES
from audiollm.generation.engine.record import Logprobs, TokenRecord
from audiollm.generation.engine.request import (
    Acted,
    Answer,
    Event,
    Finished,
    Frames,
    OpenRequest,
    Request,
    SampledTokens,
    TextPiece,
)
from audiollm.generation.engine.rows import (
    FedRow,
    FedRows,
    Group,
    OpenStream,
    Running,
    StepPlan,
    batch_rows,
    prompt_rows,
)
from audiollm.generation.engine.sampling import check_plain, guide, sample_codes, sample_plain
from audiollm.generation.engine.state import (
    AnswerState,
    Codes,
    Marks,
    PhraseTokens,
    SpeechState,
    forbidden_words,
)
from audiollm.models.cache import Cache
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import GenerationDecoder, PackedDecoder
from audiollm.models.static_steps import StaticSteps, StepKind

ENDLESS = 2**31
"""Room of a slot that forgets."""
FED = -1
"""In the place of the token that an answer begins with: an action begins with what its request was fed."""
GROWTH_POSITIONS = 256
"""The length of a cache that grows is a multiple of this."""
PREFILL_POSITIONS = 8192
"""Most positions of the prompts that go through the model together."""


class Engine:
    """Answers requests, as many at a time as there are slots.

    Args:
        model: taken as it is at every step: `eval()` is the caller's, and weights may change between answers.
        slots: rows of the cache. A request takes one for each branch of its guidance.
        max_length: the longest prompt and answer together, in positions.
        decoder: of this model, where several engines share it.
        steps: `static` computes steps in static shapes, and `cuda_graph` replays them as CUDA graphs; steps in which
            some rows write and others speak, and those of open requests, are computed plainly all the same.
        grows_to: a request that is longer than `max_length` makes the cache longer, up to this; None: it never grows.
        prefill_positions: most positions of prompts that go through the model between two steps: a longer prompt is
            read in pieces, beside the steps of others, but for one with features; None: there is no bound.

    Raises:
        ValueError: `steps` is `cuda_graph`, and the model is on no CUDA device, or a cache of static steps is to grow.
    """

    def __init__(
        self,
        model: DualFFN,
        template: Template,
        slots: int = 8,
        max_length: int = 2048,
        decoder: GenerationDecoder | None = None,
        steps: StepKind = "plain",
        *,
        grows_to: int | None = None,
        prefill_positions: int | None = None,
    ) -> None:
        if grows_to is not None and steps != "plain":
            raise ValueError(f"steps {steps!r} belong to a cache of one length: it cannot grow")
        weight = next(model.parameters())
        self._model, self._template, self._device = model, template, weight.device
        self._decoder = decoder or GenerationDecoder(model)
        self._layers: DualFFN | PackedDecoder = model
        """Decoder that computes the steps, with the weights of the time when an answer last began."""
        self._marks = Marks.of(template)
        self._cache = Cache.empty(model.config, slots, max_length, weight.device, weight.dtype)
        self._static = (
            None if steps == "plain" else StaticSteps(model, self._cache, recorded=steps == "cuda_graph")
        )
        self._slots, self._submitted = slots, 0
        self._grows_to, self._prefill_positions = grows_to, prefill_positions
        self._waiting: deque[Running] = deque()
        self._owners: list[Running] = []
        """The running answer that owns each cache row in use."""
        self._plan: StepPlan | None = None
        end_of_turn = template.tokenizer.token_to_id(HEADER_STYLES[template.header_style].end_of_turn)
        assert end_of_turn is not None  # a template has it
        self._end_of_turn: int = end_of_turn
        windows = map(model.config.window_of, range(model.config.num_layers))
        self._forgets = all(window is not None for window in windows)
        """Whether open requests forget what lies behind the window."""
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
        steps: StepKind = "plain",
    ) -> Engine:
        """Make an engine with a slot for each branch of these requests, up to a limit, and room for the longest one."""
        branches = [
            len(request.sampling.branches) for request in requests for _ in range(answers_per_request)
        ]
        longest = max(
            _positions(template, request, _lay_out_prompts(template, request)) for request in requests
        )
        return cls(
            model, template, max(max(branches), min(sum(branches), most_slots)), longest, decoder, steps
        )

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._owners or self._waiting)

    def can_take(self, request: Request) -> bool:
        """Whether a request would begin at the next step; true, too, for one that `submit` refuses for its slots."""
        free = self._slots - len(self._owners) - sum(len(running.streams) for running in self._waiting)
        branches = len(request.sampling.branches)
        return branches <= free or branches > self._slots

    def pause(self, number: int, paused: bool = True) -> None:
        """Let a request rest in its slots, or go on; does nothing for a finished or unknown one."""
        for running in (*self._running(), *self._waiting):
            if running.number == number and running.paused != paused:
                running.paused, self._plan = paused, None

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number, which its events carry. Raises: ValueError: see `submit_group`."""
        return self.submit_group(request, [request.seed])[0]

    def submit_group(self, request: Request, seeds: Sequence[int]) -> list[int]:
        """Queue a request several times, with a seed for each answer; returns their numbers.

        The prompt goes through the audio encoder and the model once, and its cache rows are copied for the other
        answers, as long as one of the group is running when another begins and the weights are the same.

        Raises:
            ValueError: it needs more slots or more room than there are, its audio does not fit its messages, or it
                has `record_tokens` and is not sampled plainly (`check_plain`); or phrases of what is not speech alone,
                or whose tokens are to be recorded.
        """
        if request.record_tokens:
            check_plain(request.sampling)
        if request.phrases and (request.answer != "audio" or request.record_tokens):
            raise ValueError("phrases are said by an answer in speech alone, whose tokens are not recorded")
        branches = len(request.sampling.branches)
        if branches > self._slots:
            raise ValueError(
                f"guidance gives the request {branches} branches, and there are {self._slots} slots"
            )
        streams = _lay_out_prompts(self._template, request)
        num_positions = _positions(self._template, request, streams)
        self._check_length(num_positions)
        first_id = None
        if request.answer != "audio":  # the prompt's last token is fed with the first step
            first_id = int(streams[0].text_ids_S[-1])
            streams = [_without_last(stream) for stream in streams]
        # where the cache grows, an answer ends as in an engine that is sized for it alone
        positions = self._cache.length if self._grows_to is None else num_positions
        room = positions - max(len(stream) for stream in streams)
        kind, limits = request.answer, request.limits
        phrases = PhraseTokens.of(request.phrases, self._template)
        group, now, lengths = self._submitted + 1, time.perf_counter(), [len(stream) for stream in streams]
        for seed in seeds:
            record = TokenRecord(kind) if request.record_tokens else None
            state = AnswerState(
                self._marks, self._template.tokenizer, kind, limits, room, first_id, record, phrases
            )
            self._submitted += 1
            generator = torch.Generator().manual_seed(seed)
            self._waiting.append(
                Running(self._submitted, request, streams, state, now, generator, group, lengths)
            )
        return list(range(group, self._submitted + 1))

    def _check_length(self, num_positions: int) -> None:
        """Check that a slot has so many positions, and make the cache longer where it may grow."""
        longest = max(self._grows_to or 0, self._cache.length)
        if num_positions > longest:
            raise ValueError(
                f"prompt and answer may take {num_positions} positions, a slot has {longest}: "
                "lower the limits, shorten the prompt, or give the engine a larger max_length"
            )
        if num_positions > self._cache.length:
            length = min(-(-num_positions // GROWTH_POSITIONS) * GROWTH_POSITIONS, longest)
            self._cache = self._cache.lengthened(self._model.config, length)

    def open(self, request: OpenRequest) -> int:
        """Queue a request that stays open; returns its number. Its prompt is prefilled when there is a slot.

        A model with a sliding window in every layer forgets what lies behind the window, but not the prompt: the
        request may then stay open for ever. Another model is fed until its slot is full. A prompt that a running
        request has, too, is copied from its rows, as in `submit_group`.

        Raises:
            ValueError: guidance, an answer in speech alone, a prompt that does not fit, or `record_tokens` of what is
                not sampled plainly.
        """
        if len(request.sampling.branches) > 1:
            raise ValueError("an open request takes no guidance")
        if request.answer == "audio":
            raise ValueError("an open request answers in text, or `any`: its actions may be silent")
        if request.record_tokens:
            check_plain(request.sampling)
            if request.silence_bias:
                raise ValueError(
                    "tokens of another distribution than the model's are not recorded: silence_bias is set"
                )
        prompt = self._template.stream_prompt(request.messages, request.audio)
        window = self._model.config.sliding_window if self._forgets else None
        if len(prompt) + (window or 1) > self._cache.length:
            raise ValueError(
                f"the prompt takes {len(prompt)} positions beside a window of {window}, and a slot has "
                f"{self._cache.length}: shorten the prompt, or give the engine a larger max_length"
            )
        record = TokenRecord(request.answer) if request.record_tokens else None
        stream = OpenStream(request.silence_bias, record)
        waiting = AnswerState(self._marks, self._template.tokenizer, request.answer, request.limits, 0, FED)
        waiting.reason = "end"
        self._submitted += 1
        generator = torch.Generator().manual_seed(request.seed)
        running = Running(
            self._submitted, request, [prompt], waiting, time.perf_counter(), generator, _shared_prompt(prompt),
            [len(prompt)], stream=stream,
        )  # fmt: skip
        self._waiting.append(running)
        return self._submitted

    @torch.inference_mode()
    def feed(self, number: int, chunk: PartAudio) -> None:
        """Let an open request hear a chunk, codes `[K, T]` or features; the next steps take its action, which ends
        with `Acted`.

        Raises:
            ValueError: no open request of this number, it has not finished its last action, or its slot is full.
        """
        running = self._open_one(number)
        stream, request = running.stream, running.request
        assert stream is not None
        if running.state.reason is None or stream.pending:
            raise ValueError(
                f"request {number} is still acting on what it heard before: take steps until `Acted`"
            )
        heard = self._heard_rows(chunk)
        rows: list[FedRow] = []
        if stream.actions:
            rows += running.state.unfed(self._end_of_turn)
            if stream.record is not None:  # else an endless stream would gather its speech for nobody
                stream.finished_speech += running.state.speech_codes()
        rows += heard
        room = ENDLESS
        if not self._forgets:
            before = self._cache.lengths[running.rows[0]] if running.rows else running.lengths[0]
            room = self._cache.length - before - len(rows)
            if room < 1:
                raise ValueError(
                    f"the slot of request {number} is full, and the model has no sliding window in every layer"
                )
        if stream.record is not None:
            stream.record.hears(chunk.cpu() if isinstance(chunk, Tensor) else chunk)
        stream.pending = rows
        running.submitted, running.first_frame = time.perf_counter(), None
        running.state = AnswerState(
            self._marks, self._template.tokenizer, request.answer, request.limits, room, FED, stream.record
        )
        self._plan = None

    def _heard_rows(self, chunk: PartAudio) -> list[Codes] | list[Tensor]:
        """The rows of a chunk: codes, or embedded features.

        Raises:
            ValueError: codes of another codec, or features for a model without an audio encoder.
        """
        if isinstance(chunk, Tensor):
            self._template.check_codes(chunk)
            return list(chunk.T.cpu().numpy())
        features = PackedFeatures.of(chunk.windows)
        assert features is not None  # a chunk has at least one window
        return list(self._model.embed_features(features.to(self._device)))

    def close(self, number: int) -> SampledTokens | None:
        """End an open request and free its slot; return its tokens where they were recorded.

        Raises:
            ValueError: no open request of this number, or its last action is not finished.
        """
        running = self._open_one(number)
        stream = running.stream
        assert stream is not None
        if running.state.reason is None:
            raise ValueError(f"request {number} is still acting: take steps until `Acted`, or cancel it")
        if stream.actions:
            if running.state.drawn_end is None:
                running.state.unfed(self._end_of_turn)
            stream.finished_speech += running.state.speech_codes()
        self.cancel(number)
        has_logprobs = running.request.sampling.temperature > 0
        return None if stream.record is None else stream.record.tokens(stream.finished_speech, has_logprobs)

    @property
    def acting(self) -> bool:
        """Whether a step would do anything: an answer runs, an open request was fed, or a waiting one has its slots."""
        fits = self._waiting and len(self._owners) + len(self._waiting[0].streams) <= self._slots
        return bool(fits) or any(map(_is_active, self._owners))

    def _open_one(self, number: int) -> Running:
        for running in (*self._running(), *self._waiting):
            if running.number == number and running.stream is not None:
                return running
        raise ValueError(f"there is no open request {number}")

    def cancel(self, number: int) -> None:
        """Drop a request and free its slots; does nothing for a finished or unknown one."""
        self._waiting = deque(running for running in self._waiting if running.number != number)
        for running in [running for running in self._running() if running.number == number]:
            self._release(running)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit waiting requests, feed every row in use, draw, and return the events."""
        self._admit()
        active = [row for row, owner in enumerate(self._owners) if _is_active(owner)]
        if not active:
            return []
        uneven = any(
            owner.stream is not None or owner.unread or owner.state.turning is not None
            for owner in self._owners
        )
        if uneven or len(active) < len(self._owners):
            return self._append(active)
        plan = self._plan = self._plan or batch_rows(self._owners, self._device)
        ids_X = np.array([running.state.input_id for running in plan.writing], dtype=np.int64)[plan.writer_X]
        codes_YK = self._codes([running.state.speech.last_K for running in plan.speaking])[plan.speaker_Y]
        hidden_XC, logits_YKV = self._feed(torch.from_numpy(ids_X), torch.from_numpy(codes_YK), plan.order_R)
        return self._draw(plan, hidden_XC, logits_YKV)

    def _append(self, active: Sequence[int]) -> list[Event]:
        """Take a step in which rows of the cache are fed different numbers of positions.

        What is heard is fed at once, as far as a row that forgets takes it; such a row draws when it has heard all. So
        is all that lies between two phrases.
        """
        counts = [0] * len(self._owners)
        fed = FedRows()
        last: dict[int, int] = {}
        drawing: list[int] = []
        unread_rows = self._prefill_positions or 0
        for row in active:
            if self._owners[row].unread:
                rows = self._owners[row].read(row, unread_rows)
                unread_rows -= len(rows)
            else:
                rows, draws = self._take_rows(row)
                if draws:
                    drawing.append(row)
            for position in rows:
                fed.add(position)
            counts[row], last[row] = len(rows), len(fed) - 1
        for owner in self._owners:
            if not any(owner.unread):
                owner.unread = []
        for row in active:
            self._owners[row].state.turning = None
        order_X = fed.order_X(self._device)
        hidden_XC = self._layers.append(
            torch.tensor(fed.ids, dtype=torch.long, device=self._device),
            torch.from_numpy(self._codes(fed.codes)).to(self._device),
            self._cache,
            counts,
            order_X,
            torch.stack(fed.features) if fed.features else None,
        )
        if not drawing:
            return []
        hidden_FC = hidden_XC if order_X is None else hidden_XC.index_select(0, order_X.argsort())
        plan = batch_rows(self._owners, self._device, drawing)
        writers = [last[row] for row in drawing if not self._owners[row].state.speaks]
        speakers = [last[row] for row in drawing if self._owners[row].state.speaks]
        if not speakers:
            return self._draw(plan, hidden_FC[writers], hidden_FC.new_zeros(0))
        return self._draw(plan, hidden_FC[writers], self._layers.audio_logits(hidden_FC[speakers]).float())

    def _take_rows(self, row: int) -> tuple[list[FedRow], bool]:
        """Return the positions that a cache row is fed next, and whether its request draws behind them."""
        owner = self._owners[row]
        if owner.stream is not None and owner.stream.pending:
            max_rows = self._cache.largest_append(row)
            rows, owner.stream.pending = owner.stream.pending[:max_rows], owner.stream.pending[max_rows:]
            owner.stream.draws_first = True
            return rows, not owner.stream.pending
        if owner.stream is not None:
            owner.stream.draws_first = False
        state = owner.state
        if state.turning is not None:
            hides_text, _ = owner.request.sampling.branches[owner.rows.index(row)]
            return [*state.turn_rows(shows_words=not hides_text)], True
        return [state.speech.last_K if state.input_id is None else state.input_id], True

    def _draw(self, plan: StepPlan, hidden_XC: Tensor, logits_YKV: Tensor) -> list[Event]:
        """Draw for every answer of the plan, and advance."""
        draws = [self._draw_words(hidden_XC, group) for group in plan.text_groups]
        draws += [self._draw_codes(logits_YKV, group) for group in plan.audio_groups]
        # the one wait for the device
        flat = torch.cat([codes.flatten() for codes, _ in draws]).cpu().numpy()
        logprobs = None
        if any(logprob is not None for _, logprob in draws):
            logprob_groups = [
                torch.zeros(codes.shape, device=self._device) if logprob is None else logprob
                for codes, logprob in draws
            ]
            logprobs = torch.cat([logprob.flatten() for logprob in logprob_groups]).float().cpu().numpy()
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
        twins = {running.group: running for running in self._running() if running.weight_changes == changes}
        limit = self._prefill_positions
        while self._waiting and len(self._owners) + len(self._waiting[0].streams) <= self._slots:
            if admitted and limit is not None:
                limit -= sum(admitted[-1].lengths)
                if sum(self._waiting[0].lengths) > limit:
                    break
            running = self._waiting.popleft()
            running.rows = list(range(len(self._owners), len(self._owners) + len(running.streams)))
            self._owners += [running] * len(running.rows)
            admitted.append(running)
            self._plan = None
        if admitted:
            self._layers = self._decoder.current()
            if self._static is not None:
                self._static.refresh()
        pairs: list[tuple[TokenStream, int]] = []
        copies: list[tuple[int, int, int]] = []
        for member in admitted:
            member.weight_changes = changes
            twin = twins.setdefault(member.group, member)
            if self._reads_in_pieces(member) and (twin is member or twin.unread):
                member.unread = [prompt_rows(stream) for stream in member.streams]
                for row in member.rows:
                    self._cache.clear(row)
            elif twin is member:
                pairs += zip(member.streams, member.rows, strict=True)
            else:
                copies += zip(twin.rows, member.rows, member.lengths, strict=True)
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
            if running.stream is not None and self._forgets:
                self._cache.keep_prefix(running.rows[0], running.lengths[0])

    def _reads_in_pieces(self, running: Running) -> bool:
        """Return whether a prompt is read beside the steps of others; features, which an encoder makes, never are."""
        limit = self._prefill_positions
        if limit is None or running.stream is not None or max(running.lengths) <= limit:
            return False
        return not any(stream.features for stream in running.streams)

    def _feed(self, ids_X: Tensor, codes_YK: Tensor, order_R: Tensor | None) -> tuple[Tensor, Tensor]:
        """Feed one position to every row; returns hidden states of text rows and audio logits of code rows."""
        ids_X, codes_YK = ids_X.to(self._device), codes_YK.to(self._device)
        if self._static is None or order_R is not None:
            hidden_RC = self._layers.extend(ids_X, codes_YK, self._cache, order_R)
        else:
            hidden_RC = self._static.extend(ids_X, codes_YK)
        if not len(codes_YK):
            return hidden_RC, hidden_RC.new_zeros(0)
        return hidden_RC[: len(ids_X)], self._layers.audio_logits(hidden_RC[len(ids_X) :]).float()

    def _draw_words(self, hidden_XC: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
        """Draw one token per answer, `[B, 1]`, from the full prompt's branch alone: guidance is for speech.

        Returns:
            The tokens, and their log-probabilities where they are recorded.
        """
        full, request = group.branches[0], group.members[0].request
        hidden_BC = hidden_XC if full is None else hidden_XC[full]
        logits_BV = self._layers.text_logits(hidden_BC).float()
        logits_BV.masked_fill_(self._forbidden_V[request.answer], -torch.inf)
        first = group.members[0].stream
        if first is not None and first.draws_first and first.silence_bias:
            logits_BV[:, self._end_of_turn] += first.silence_bias
        uniform_B2K = self._uniform(group)
        return _draw(logits_BV[:, None], uniform_B2K[:, :, :1], group)

    def _draw_codes(self, logits_YKV: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
        """Draw one code per codebook and answer, `[B, K]`: never BOS, and EOS in the first codebook only.

        Returns:
            The codes, and their log-probabilities where they are recorded.
        """
        sampling, marks = group.members[0].request.sampling, self._marks
        branches = [logits_YKV if rows is None else logits_YKV[rows] for rows in group.branches]
        logits_BKV = branches[0]
        if len(branches) > 1:
            no_text = branches[1] if sampling.text_guidance != 1 else None
            no_speaker = branches[-1] if sampling.speaker_guidance != 1 else None
            logits_BKV = guide(logits_BKV, no_text, no_speaker, sampling)
        logits_BKV[:, :, marks.audio_bos] = -torch.inf
        logits_BKV[:, 1:, marks.audio_eos] = -torch.inf
        fresh = [place for place, running in enumerate(group.members) if running.state.speech.rows == 1]
        if fresh:  # at least one frame
            logits_BKV[fresh, 0, marks.audio_eos] = -torch.inf
        recent_BWK = None
        if sampling.ras_window and sampling.temperature:
            recent = [running.state.speech.recent_WK(sampling.ras_window) for running in group.members]
            recent_BWK = torch.from_numpy(np.stack(recent)).to(self._device)
        return _draw(logits_BKV, self._uniform(group), group, recent_BWK)

    def _uniform(self, group: Group) -> Tensor:
        """Return the members' random numbers, `[B, 2, K]`; an empty tensor where the most likely code is taken."""
        if group.members[0].request.sampling.temperature == 0:
            return torch.empty(0, 2, 0)
        return torch.stack([running.next_uniform_2K() for running in group.members]).to(self._device)

    def _advance(self, plan: StepPlan, flat_codes: Codes, logprobs: Logprobs | None) -> list[Event]:
        """Advance every answer's state by what was drawn for it, and free the slots of finished answers."""
        events: list[Event] = []
        logprobs = np.zeros(flat_codes.shape, dtype=np.float32) if logprobs is None else logprobs
        start = 0
        for group in plan.text_groups:
            drawn_words = zip(
                group.members, flat_codes[start:].tolist(), logprobs[start:].tolist(), strict=False
            )
            for running, token, logprob in drawn_words:
                if piece := running.state.take_text(token, logprob):
                    events.append(TextPiece(running.number, piece))
            start += len(group.members)
        books = self._marks.num_codebooks
        rows = zip(flat_codes[start:].reshape(-1, books), logprobs[start:].reshape(-1, books), strict=True)
        for running in (running for group in plan.audio_groups for running in group.members):
            codes_KT = running.state.take_codes(*next(rows))
            if codes_KT is not None:
                running.first_frame = running.first_frame or time.perf_counter()
                stretch = 0 if running.state.phrases else running.state.stretches - 1
                events.append(Frames(running.number, codes_KT, stretch))
        changed = any(running.state.speaks for running in plan.writing)
        if changed or not all(running.state.speaks for running in plan.speaking):
            self._plan = None
        for running in [running for running in (*plan.writing, *plan.speaking) if running.state.reason]:
            if running.stream is None:
                events.append(Finished(running.number, self._answer(running)))
                self._release(running)
                continue
            parts, reason = _collect_answer_parts(running), running.state.reason
            assert reason is not None
            seconds = time.perf_counter() - running.submitted
            events.append(Acted(running.number, running.stream.actions, parts, reason, seconds))
            running.stream.actions += 1
        return events

    def _answer(self, running: Running) -> Answer:
        parts = _collect_answer_parts(running)
        speech = [answer_part for answer_part in parts if isinstance(answer_part, Tensor)]
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


def _is_active(running: Running) -> bool:
    """Return whether a request has something to do: it is not paused, nor open and waiting to be fed."""
    return running.state.reason is None and not running.paused


def _collect_answer_parts(running: Running) -> tuple[str | Tensor, ...]:
    return tuple(
        stretch.codes_KT() if isinstance(stretch, SpeechState) else stretch.text
        for stretch in running.state.parts
    )


def _shared_prompt(prompt: TokenStream) -> Hashable:
    """Return what prompts that are equal have in common; features are not compared, and such a prompt is its own."""
    if prompt.features:
        return object()
    return prompt.text_ids_S.numpy().tobytes(), prompt.codes_SK.numpy().tobytes()


def _lay_out_prompts(template: Template, request: Request) -> list[TokenStream]:
    """Lay out the prompt of each branch."""
    prompts = []
    for hides_text, hides_speaker in request.sampling.branches:
        messages, audio = without_conditions(request.messages, request.audio, hides_text, hides_speaker)
        words = request.phrases[0].text if request.phrases and not hides_text else ""
        if request.answer == "audio":
            prompts.append(template.prompt(messages, audio, words))
        else:
            prompts.append(template.text_prompt(messages, audio))
    return prompts


def _draw(
    logits_BKV: Tensor, uniform_B2K: Tensor, group: Group, recent_BWK: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Draw a code per codebook, with its log-probability where it is recorded."""
    sampling = group.members[0].request.sampling
    if group.has_logprobs:
        return sample_plain(logits_BKV, sampling.temperature, uniform_B2K[:, 0])
    return sample_codes(logits_BKV, sampling, uniform_B2K, recent_BWK), None


def _positions(template: Template, request: Request, prompts: Sequence[TokenStream]) -> int:
    """Positions of the longest prompt with its longest answer (with one stretch of speech, where it is `any`)."""
    speech = request.limits.max_frames + template.num_codebooks + 1
    if request.phrases:
        phrases = PhraseTokens.of(request.phrases, template)
        speech = sum(phrase.most_rows(template.num_codebooks) for phrase in phrases)
    text = request.limits.max_text_tokens
    answer = {"audio": speech, "text": text, "any": text + speech + 3}[request.answer]
    return max(len(stream) for stream in prompts) + answer


def _without_last(stream: TokenStream) -> TokenStream:
    """Remove a stream's last position, which is text."""
    rows: dict[str, Any] = {
        name: rows[:-1] for name, rows in stream.__dict__.items() if isinstance(rows, Tensor)
    }
    return replace(stream, **rows)
