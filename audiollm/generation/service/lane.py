"""The jobs of one model: they take turns at its engine."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from audiollm.errors import ConfigError
from audiollm.generation.engine.request import Event, Finished, Frames
from audiollm.generation.engine.step_engine import StepEngine, Unanswered
from audiollm.generation.service.jobs import PlanJob

MAX_AHEAD_S = 2.0
"""Seconds of sound that are made ahead of a caller who does not take them, at most."""
RESTING_AHEAD_S = 0.3
"""Seconds from which on the requests of such a caller rest: one more piece, with the end of a codec's last window, is
no longer than what is left of `MAX_AHEAD_S`."""


class Lane:
    """A model's engine and its jobs; all methods are called by the thread of the service.

    A turn does one thing of each kind: it begins or goes on with one plan (a reference is encoded, a chunk decoded),
    gives the engine requests, by turns of one from each job, and takes one step of the engine.

    Args:
        make_engine: called again where an engine has failed.
    """

    def __init__(self, make_engine: Callable[[], StepEngine]) -> None:
        self._make_engine, self._engine = make_engine, make_engine()
        self._ready: deque[PlanJob] = deque()
        """Jobs whose plan is to begin, or has its answers."""
        self._unsubmitted: deque[PlanJob] = deque()
        """Jobs with requests that the engine has not been given yet."""
        self._owners: dict[int, PlanJob] = {}
        """PlanJob of each request in the engine."""
        self.jobs: set[PlanJob] = set()
        self.counts: Counter[str] = Counter()
        """Jobs that are `done`, `failed` and `cancelled`; `steps` of the engine and code `frames`."""

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._ready or self._engine.acting or self._resumable() or self._can_submit())

    def add(self, job: PlanJob) -> None:
        """Take on a job."""
        self.jobs.add(job)
        self._ready.append(job)

    def drop(self, job: PlanJob, error: BaseException | None = None) -> None:
        """End a job before its end; does nothing where it is over."""
        if job not in self.jobs:
            return
        self._release(job)
        self.counts["cancelled" if error is None else "failed"] += 1
        job.end(error)

    def turn(self) -> None:
        """Go on with all jobs."""
        if self._ready:
            self._advance(self._ready.popleft())
        self._submit()
        for job in self._resumable():
            self._pause(job, False)
        if not self._engine.acting:
            return
        try:
            events = self._engine.step()
        except Exception as error:
            self._restart(error)
            return
        self.counts["steps"] += 1
        for event in events:
            self._route(event)

    def _resumable(self) -> list[PlanJob]:
        return [job for job in self.jobs if job.paused and job.ahead_s < RESTING_AHEAD_S]

    def _can_submit(self) -> bool:
        if not self._unsubmitted:
            return False
        job = self._unsubmitted[0]
        assert job.ask is not None
        return self._engine.can_take(job.ask.requests[job.unsubmitted[0]])

    def _submit(self) -> None:
        while self._can_submit():
            job = self._unsubmitted.popleft()
            assert job.ask is not None
            place = job.unsubmitted.popleft()
            try:
                number = self._engine.submit(job.ask.requests[place])
            except ValueError as error:
                remedy = "shorten what is asked, or start the server with larger limits"
                self.drop(job, ConfigError(str(error), "input", remedy))
                continue
            except Exception as error:
                self.drop(job, error)
                continue
            self._owners[number], job.running[number] = job, place
            if job.paused:
                self._engine.pause(number)
            if job.unsubmitted:
                self._unsubmitted.append(job)

    def _advance(self, job: PlanJob) -> None:
        try:
            is_over = job.advance()
        except Exception as error:
            self.drop(job, error)
            return
        if is_over:
            self._release(job)
            self.counts["done"] += 1
        else:
            self._unsubmitted.append(job)

    def _route(self, event: Event | Unanswered) -> None:
        job = self._owners.get(event.request)
        if job is None:
            return
        if isinstance(event, Unanswered):
            self.drop(job, event.error)
            return
        if isinstance(event, Frames):
            self.counts["frames"] += event.codes_KT.shape[1]
        try:
            job.hear(event)
        except Exception as error:
            self.drop(job, error)
            return
        if isinstance(event, Finished):
            del self._owners[event.request]
            job.answers[job.running.pop(event.request)] = event.answer
            if None not in job.answers:
                self._ready.append(job)
        if not job.paused and job.ahead_s >= RESTING_AHEAD_S:
            self._pause(job, True)

    def _pause(self, job: PlanJob, paused: bool) -> None:
        job.paused = paused
        for number in job.running:
            self._engine.pause(number, paused)

    def _release(self, job: PlanJob) -> None:
        self.jobs.discard(job)
        for number in job.running:
            self._engine.cancel(number)
            del self._owners[number]
        job.running = {}
        for queue in (self._ready, self._unsubmitted):
            if job in queue:
                queue.remove(job)

    def _restart(self, error: Exception) -> None:
        """Replace an engine that has failed: the jobs in it fail, those in line go on."""
        for job in {*self._owners.values()}:
            self.drop(job, error)
        self._owners = {}
        self._engine = self._make_engine()
