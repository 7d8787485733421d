"""The service: one thread that carries out the plans of many callers with the engines of the loaded models.

All work of the models is done in this thread, so that nothing of them needs a lock. Callers hand jobs in and hear of
them from other threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from audiollm.generation.engine.step_engine import StepEngine
from audiollm.generation.service.jobs import MakePlan, PlanJob, Progress
from audiollm.generation.service.lane import Lane


class ServiceFull(Exception):
    """There are as many jobs as the service takes."""


class GenerationService:
    """Carries out plans beside each other.

    Args:
        max_jobs: most jobs that run or wait.
    """

    def __init__(self, max_jobs: int = 64) -> None:
        self.max_jobs = max_jobs
        self.lanes: list[Lane] = []
        self._jobs: set[PlanJob] = set()
        """Jobs that have not ended; guarded by `_awake`."""
        self._calls: deque[Callable[[], None]] = deque()
        self._awake = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)
        self._thread.start()

    def add_engine(self, make_engine: Callable[[], StepEngine]) -> Lane:
        """Add a model's engine; jobs name the lane that is returned."""
        lane = Lane(make_engine)
        with self._awake:
            self.lanes = [*self.lanes, lane]
        return lane

    def submit(self, lane: Lane, make_plan: MakePlan, listener: Callable[[Progress], None]) -> PlanJob:
        """Hand in a job.

        Args:
            make_plan: makes the plan, in the thread of the service; its argument gives the caller a piece.
            listener: called in that thread with each piece and the end; it must return at once.

        Raises:
            ServiceFull: there are `max_jobs` already.
        """

        def listen(progress: Progress) -> None:
            if job.is_over:
                with self._awake:
                    self._jobs.discard(job)
            listener(progress)

        job = PlanJob(make_plan, listen)
        with self._awake:
            if len(self._jobs) >= self.max_jobs:
                raise ServiceFull(f"{self.max_jobs} requests run or wait already")
            self._jobs.add(job)
            self._calls.append(lambda: lane.add(job))
            self._awake.notify()
        return job

    def cancel(self, lane: Lane, job: PlanJob) -> None:
        """End a job whose caller has left; does nothing where it is over."""
        with self._awake:
            self._jobs.discard(job)
            self._calls.append(lambda: lane.drop(job))
            self._awake.notify()

    def take(self, job: PlanJob, sound_s: float) -> None:
        """Tell that a caller has taken seconds of sound of its job."""
        job.take(sound_s)
        with self._awake:
            self._awake.notify()

    @property
    def num_jobs(self) -> int:
        """Jobs that run or wait."""
        with self._awake:
            return len(self._jobs)

    def close(self) -> None:
        """End the thread; jobs that have not ended are dropped without a word."""
        with self._awake:
            self._is_closing = True
            self._awake.notify()
        self._thread.join()

    def _work(self) -> None:
        while self._take_turn():
            pass
        for lane in self.lanes:  # an engine may have a thread of its own that would go on
            for job in [*lane.jobs]:
                lane.drop(job)

    def _take_turn(self) -> bool:
        """Wait for something to do and do it; return whether the service goes on."""
        with self._awake:
            while not (self._is_closing or self._calls or any(lane.busy for lane in self.lanes)):
                self._awake.wait()
            if self._is_closing:
                return False
            calls, lanes = [*self._calls], self.lanes
            self._calls.clear()
        for call in calls:
            call()
        for lane in lanes:
            lane.turn()
        return True
