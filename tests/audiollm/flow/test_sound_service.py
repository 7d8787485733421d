"""The queue of the models that stay loaded: places, stops, and what is kept of what has ended."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from audiollm.errors import ConfigError
from audiollm.flow.service import Job, JobStopped, SoundService


def test_what_has_ended_keeps_none_of_its_sounds() -> None:
    service, kept = SoundService(), []

    def sound() -> Any:
        made = np.zeros(1000)
        kept.append(weakref.ref(made))
        return made

    def stops(job: Job) -> None:
        made = sound()
        job.stop()
        job.took_step(len(made))

    def fails(job: Job) -> None:
        try:
            read()
        except ValueError as error:
            raise ConfigError("no", "", "mend it") from error

    def read() -> None:
        made = sound()
        raise ValueError(f"cut off after {len(made)} samples")

    jobs = [service.submit(stops), service.submit(fails)]
    assert all(job.wait(10) for job in jobs) and [job.state for job in jobs] == ["stopped", "failed"]
    service.close()
    gc.collect()
    assert [each() is None for each in kept] == [True, True]


def test_a_request_that_waits_is_stopped_at_once() -> None:
    service, go_on = SoundService(), threading.Event()
    first, second, third = (service.submit(lambda job: go_on.wait(10), each) for each in "aba")
    while first.state != "running":
        time.sleep(0.005)
    service.stop("b")
    assert second.state == "stopped" and second.wait(0) and service.place(third) == 1
    assert service.jobs("b") == [second]
    with pytest.raises(JobStopped):
        second.value()
    go_on.set()
    assert third.wait(10) and third.state == "done"
    service.close()


def test_the_queue_tells_places_and_keeps_nothing_of_what_failed() -> None:
    service, go_on = SoundService(), threading.Event()

    def wait(job: Job) -> None:
        go_on.wait(10)

    def fail(job: Job) -> None:
        raise ConfigError("no", "", "mend it")

    jobs = [service.submit(wait, "a"), service.submit(fail, "b"), service.submit(wait, "a")]
    while jobs[0].state != "running":
        time.sleep(0.005)
    assert [service.place(job) for job in jobs] == [0, 1, 2]
    go_on.set()
    assert jobs[2].wait(10) and jobs[1].state == "failed"
    with pytest.raises(ConfigError, match="mend it"):
        jobs[1].value()
    with pytest.raises(ConfigError, match="audiollm run recipes/thinksound/tiny.yaml"):
        _ = service.generator
    service.close()
