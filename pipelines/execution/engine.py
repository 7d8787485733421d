"""Runs walks: each goes from call to call, workers answer the calls, and a ledger keeps every answer.

A walk is a generator: it yields a `Call`, is sent its `Outcome`, and goes on; what it returns are further walks (the
segments of a recording). The engine answers a call from the ledger, or sends it to a worker of its step's pool. What
comes out depends on the walks alone: not on the number of workers, their kind, or the order. An exception, or a hard
death while a call is worked on, becomes that call's error; it stops the run only where the step fails on every item for
the same reason (`audiollm.failures`). Such errors are not recorded, so that the next run tries again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from audiollm.failures import FailureWatch, shared_watch
from audiollm.files.set_aside import UNREADABLE
from pipelines.execution.ledger import Ledger, Outcome

MAX_DEATHS = 2
"""A call is set aside when this many workers have died over it alone."""
MAX_LOST_MACHINES = 4
"""A call is set aside when this many machines were lost over it: machines die of other causes, too."""


@dataclass(frozen=True)
class Call:
    """One piece of work.

    Args:
        key: of the ledger: equal keys have equal outcomes; None: it is made each time, and finds by itself what is
            done.
        item: what the worker gets; pickled.
        size: calls of similar size make up a batch.
    """

    step: str
    key: str | None
    item: Any
    size: float = 0.0


Walk: TypeAlias = Generator[Call, Outcome, "Sequence[Walk]"]


class Worker(Protocol):
    """Interface of the object that answers calls; pickled to every process, it loads a step at its first call."""

    def process(self, step: str, items: Sequence[Any]) -> list[Outcome]:
        """The outcomes of the items, in their order; what fails is an outcome with an error.

        Raises:
            Exception: the step cannot be set up, so that the run cannot go on.
        """


@dataclass(frozen=True)
class Pool:
    """A number of equal workers, and the steps that they do.

    Args:
        cpus, gpus: resources of each worker.
        batch_sizes: step -> most items per call, for the steps that take several.
    """

    name: str
    steps: tuple[str, ...]
    workers: int
    cpus: float = 1.0
    gpus: float = 0.0
    batch_sizes: Mapping[str, int] = field(default_factory=dict)


class EngineError(Exception):
    """The workers cannot be set up, so that no call can be answered."""


class RunHalted(Exception):
    """A call cannot be answered now (a spent budget, a server that is down); what was answered is in the ledger."""


@dataclass(frozen=True)
class WorkerReply:
    """A worker's outcomes to the items it was sent; None: it died over them, or when it began (`how`).

    Args:
        outcomes: empty where the worker says that it is ready.
        is_machine_lost: whether it died with its machine.
    """

    worker: int
    outcomes: list[Outcome] | None
    how: str = ""
    is_machine_lost: bool = False


class WorkerBackend(Protocol):
    """Host of the workers, which it numbers: processes of this machine, or actors of a cluster."""

    def start(self, pool: Pool) -> int:
        """A new worker of the pool."""

    def is_ready(self, worker: int) -> bool:
        """Whether a new worker may be sent to; if not, it replies when it may."""

    def send(self, worker: int, step: str, items: Sequence[Any]) -> None:
        """Give an idle worker something to do."""

    def wait(self) -> list[WorkerReply]:
        """Block until a worker replies; return the replies.

        Raises:
            EngineError: a step cannot be set up.
        """

    def close(self) -> None:
        """End all workers."""


def run_walks(
    walks: Iterable[Walk],
    pools: Sequence[Pool],
    backend: WorkerBackend,
    ledger: Ledger,
    on_answer: Callable[[Call, Outcome, bool], None] | None = None,
) -> None:
    """Walk all walks to their ends. Walks are begun one after the other as workers become free, and those that
    another one returns before all others, so that few are under way at any time.

    Args:
        pools: every step is in one of them.
        on_answer: called with each call, its outcome, and whether it was known from the ledger.

    Raises:
        EngineError: a step cannot be set up.
        RunHalted: a call cannot be answered now; the calls that other workers are at were answered and recorded first.
        FailedOnEveryItem: a step fails on every item for one reason; where the run is watched (`watched_failures`),
            one of few items is judged when the watch ends.
    """
    answered = on_answer or (lambda call, outcome, is_cached: None)
    with shared_watch() as watch:
        try:
            _Schedule(iter(walks), pools, backend, ledger, answered, watch).run()
        finally:
            backend.close()


@dataclass(eq=False)
class _Waiting:
    """A call that is to be worked on, and whose walk waits for it."""

    call: Call
    walk: Walk
    alone: bool = False
    """Whether the call must be sent alone, because a worker died over it."""
    deaths: int = 0
    """Workers that died while this was their only call."""
    lost_machines: int = 0
    """Machines that were lost while a worker there was at this call."""


@dataclass
class _Lane:
    """A pool, what waits for it, and its workers: those that begin, those without work, and those with it."""

    pool: Pool
    queue: deque[_Waiting] = field(default_factory=deque)
    beginning: set[int] = field(default_factory=set)
    idle: list[int] = field(default_factory=list)
    busy: dict[int, list[_Waiting]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.max_workers = self.pool.workers
        """Fewer than the pool's, where some could not begin."""
        self._most_calls = 2 * self.pool.workers * max(self.pool.batch_sizes.values(), default=1)

    @property
    def room(self) -> int:
        """Number of further calls that may wait here: enough for the next batch of every worker."""
        return self._most_calls - len(self.queue) - len(self.busy)

    @property
    def needs_worker(self) -> bool:
        """Whether a call waits for a worker that is not there."""
        num_workers = len(self.beginning) + len(self.idle) + len(self.busy)
        return len(self.queue) > len(self.beginning) + len(self.idle) and num_workers < self.max_workers

    def take(self) -> list[_Waiting]:
        """Take the next batch: the first waiting call, and others of its step that are closest in size."""
        first = self.queue.popleft()
        size = self.pool.batch_sizes.get(first.call.step, 1)
        if size == 1 or first.alone:
            return [first]
        alike = [
            waiting for waiting in self.queue if waiting.call.step == first.call.step and not waiting.alone
        ]
        alike.sort(key=lambda waiting: abs(waiting.call.size - first.call.size))
        closest = alike[: size - 1]
        for member in closest:
            self.queue.remove(member)
        return sorted([first, *closest], key=lambda waiting: waiting.call.size)


class _Schedule:
    def __init__(
        self,
        walks: Iterator[Walk],
        pools: Sequence[Pool],
        backend: WorkerBackend,
        ledger: Ledger,
        on_answer: Callable[[Call, Outcome, bool], None],
        watch: FailureWatch,
    ) -> None:
        self._walks, self._backend, self._ledger, self._on_answer = walks, backend, ledger, on_answer
        self._watch = watch
        self._unrecorded: list[tuple[str, Call, Outcome]] = []
        """Errors of steps that have failed on all items so far, for one reason."""
        self._lanes = [_Lane(pool) for pool in pools]
        self._lane_of = {step: lane for lane in self._lanes for step in lane.pool.steps}
        self._children: deque[Walk] = deque()
        self._answered: set[str] = set()
        self._buried: Counter[str] = Counter()
        self._exhausted = False
        self._halt: str | None = None

    def run(self) -> None:
        while True:
            goes_on = self._halt is None and self._watch.stuck_step is None
            if goes_on:
                self._begin_walks()
                self._dispatch()
            if not any(lane.busy or (goes_on and lane.queue) for lane in self._lanes):
                break
            for answer in self._backend.wait():
                self._receive(answer)
        self._watch.stop_if_stuck()
        for key, call, outcome in self._unrecorded:
            if self._watch.reason_of_all(_watched_name(call)) is None:
                self._ledger.put(key, call.step, outcome)
        if self._halt is not None:
            raise RunHalted(self._halt)

    def _begin_walks(self) -> None:
        """Begin walks while every pool has room: a pool that is behind holds up the work before it."""
        while all(lane.room > 0 for lane in self._lanes):
            if self._children:
                walk = self._children.popleft()
            else:
                next_walk = None if self._exhausted else next(self._walks, None)
                if next_walk is None:
                    self._exhausted = True
                    return
                walk = next_walk
            self._advance(walk, None)

    def _advance(self, walk: Walk, outcome: Outcome | None) -> None:
        """Advance a walk to its next call that the ledger does not know; walks under way come before new ones."""
        begins = outcome is None
        while True:
            try:
                call = next(walk) if outcome is None else walk.send(outcome)
            except StopIteration as stop:
                self._children.extendleft(reversed(stop.value))
                return
            outcome = None if call.key is None else self._ledger.get(call.key)
            if outcome is None:
                queue = self._lane_of[call.step].queue
                (queue.append if begins else queue.appendleft)(_Waiting(call, walk))
                return
            self._note(call, outcome)
            self._on_answer(call, outcome, True)

    def _dispatch(self) -> None:
        for lane in self._lanes:
            while lane.needs_worker:
                worker = self._backend.start(lane.pool)
                if self._backend.is_ready(worker):
                    lane.idle.append(worker)
                else:
                    lane.beginning.add(worker)
            while lane.queue and lane.idle:
                worker = lane.idle.pop()
                batch = lane.take()
                lane.busy[worker] = batch
                self._backend.send(worker, batch[0].call.step, [waiting.call.item for waiting in batch])

    def _receive(self, answer: WorkerReply) -> None:
        beginning = next((lane for lane in self._lanes if answer.worker in lane.beginning), None)
        if beginning is not None:
            self._welcome(beginning, answer)
            return
        lane = next((lane for lane in self._lanes if answer.worker in lane.busy), None)
        if lane is None:  # an idle worker died: another is started when there is work
            for lane in self._lanes:
                lane.idle = [worker for worker in lane.idle if worker != answer.worker]
            return
        batch = lane.busy.pop(answer.worker)
        if answer.outcomes is None:
            self._bury(lane, batch, answer)
            return
        self._answered.add(batch[0].call.step)
        lane.idle.append(answer.worker)
        for waiting, outcome in zip(batch, answer.outcomes, strict=True):
            self._finish(waiting, outcome)

    def _welcome(self, lane: _Lane, answer: WorkerReply) -> None:
        """Note that a worker has begun, or could not: it has no other in its place, unless its machine was lost."""
        lane.beginning.remove(answer.worker)
        if answer.outcomes is not None:
            lane.idle.append(answer.worker)
        elif not answer.is_machine_lost:
            lane.max_workers -= 1
            if not lane.max_workers:
                raise EngineError(f"no worker of the pool {lane.pool.name} can begin: {answer.how}")

    def _finish(self, waiting: _Waiting, outcome: Outcome) -> None:
        if outcome.halts:  # what other workers are at may be paid for: it is waited for and recorded
            self._halt = self._halt or outcome.error or ""
            return
        self._note(waiting.call, outcome)
        self._record(waiting.call, outcome)
        self._on_answer(waiting.call, outcome, False)
        self._advance(waiting.walk, outcome)

    def _note(self, call: Call, outcome: Outcome) -> None:
        if outcome.error is None:
            self._watch.succeed(_watched_name(call))
        else:
            self._watch.fail(_watched_name(call), outcome.error, outcome.error.startswith(UNREADABLE))

    def _record(self, call: Call, outcome: Outcome) -> None:
        """Write an outcome into the ledger; errors of a step that has failed on all items so far, for one reason, wait
        for an outcome of another kind."""
        if call.key is None:
            return
        self._unrecorded.append((call.key, call, outcome))
        self._write_unrecorded()

    def _write_unrecorded(self) -> None:
        waiting = []
        for key, call, outcome in self._unrecorded:
            is_item_fault = (outcome.error or "").startswith(UNREADABLE)
            if self._watch.is_suspect(_watched_name(call)) and not is_item_fault:
                waiting.append((key, call, outcome))
            else:
                self._ledger.put(key, call.step, outcome)
        self._unrecorded = waiting

    def _bury(self, lane: _Lane, batch: list[_Waiting], answer: WorkerReply) -> None:
        """Retry the calls of a dead worker's batch, each alone where they may be the cause of its death; a call that
        kills `MAX_DEATHS` workers alone, or `MAX_LOST_MACHINES` machines, is set aside."""
        for waiting in reversed(batch):
            waiting.lost_machines += answer.is_machine_lost
            waiting.deaths += len(batch) == 1 and not answer.is_machine_lost
            waiting.alone = waiting.alone or not answer.is_machine_lost or waiting.lost_machines > 1
            if waiting.deaths >= MAX_DEATHS:
                self._refuse_a_broken_step(waiting.call.step, answer.how)
                self._set_aside(waiting, f"its worker process died {waiting.deaths} times", answer)
            elif len(batch) == 1 and waiting.lost_machines >= MAX_LOST_MACHINES:
                self._set_aside(waiting, f"{waiting.lost_machines} machines were lost over it", answer)
            else:
                lane.queue.appendleft(waiting)

    def _set_aside(self, waiting: _Waiting, reason: str, answer: WorkerReply) -> None:
        self._finish(waiting, Outcome(error=f"{reason} ({answer.how})"))

    def _refuse_a_broken_step(self, step: str, how: str) -> None:
        """Raise an error for a step that has never answered while its workers keep dying: it cannot be set up."""
        self._buried[step] += 1
        if step not in self._answered and self._buried[step] > MAX_DEATHS:
            raise EngineError(f"the step {step} cannot be set up: its worker processes die ({how})")


def _watched_name(call: Call) -> str:
    return f"the step {call.step}"
