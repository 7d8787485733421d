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
from audiollm.flow.service import WORDS_AT_ONCE, Job, JobStopped, Line, SoundService


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
    service.stop_job(second)
    assert second.state == "stopped" and second.wait(0) and service.place(third) == 1
    assert service.jobs("b") == [second]
    with pytest.raises(JobStopped):
        second.value()
    go_on.set()
    assert third.wait(10) and third.state == "done"
    service.close()


@pytest.mark.parametrize("line", ["sounds", "words"])
def test_requests_of_an_owner_are_held_and_go_on_where_they_were(line: Line) -> None:
    service, begun, go_on = SoundService(), threading.Event(), threading.Event()

    def work(job: Job) -> int:
        job.result = (job.result or 0) + 1  # a part that is done is not done again
        begun.set()
        while not go_on.wait(0.005):
            job.check_stop()
        return int(job.result)

    running, waiting, stranger = (service.submit(work, owner, line=line) for owner in "aab")
    assert begun.wait(10)
    service.hold("a")
    while running.state != "held":
        time.sleep(0.005)
    while stranger.state != "running":
        time.sleep(0.005)
    assert waiting.state == "held" and not running.wait(0)
    assert {job.state for job in service.jobs("a")} == {"held"}
    service.resume("b")
    assert running.state == "held"
    service.resume("a")
    assert service.place(waiting) and service.place(running)
    go_on.set()
    assert running.value() == 2 and waiting.value() == 1 and stranger.value() == 1
    service.close()


def test_a_hold_that_is_taken_back_at_once_loses_nothing() -> None:
    service, begun = SoundService(), threading.Event()

    def work(job: Job) -> str:
        begun.set()
        for _ in range(40):
            time.sleep(0.005)
            job.check_stop()
        return "done"

    job = service.submit(work, "a")
    assert begun.wait(10)
    for _ in range(20):
        service.hold("a")
        service.resume("a")
    assert job.value() == "done"
    service.close()


def test_a_held_request_is_stopped_at_once_and_by_the_end_of_the_service() -> None:
    service, go_on = SoundService(), threading.Event()
    blocking = service.submit(lambda job: go_on.wait(10), "b")
    first, second = (service.submit(lambda job: "done", "a", subject="p") for _ in range(2))
    service.hold("a")
    service.stop_job(first)
    assert first.state == "stopped" and first.wait(0) and second.state == "held"
    go_on.set()
    assert blocking.wait(10)
    service.close()
    assert second.state == "stopped" and second.wait(0)


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


def test_words_wait_for_no_sound_and_no_sound_for_them() -> None:
    """Requests in words go on beside each other, those on one subject in their order."""
    service, go_on, together = SoundService(), threading.Event(), threading.Barrier(WORDS_AT_ONCE + 1)
    written: list[int] = []

    def wait(job: Job) -> None:
        assert go_on.wait(60)

    def write(job: Job) -> None:
        together.wait(60)
        written.append(job.number)
        assert go_on.wait(60)

    sounds = [service.submit(wait), service.submit(wait)]
    words = [service.submit(write, subject=str(number), line="words") for number in range(WORDS_AT_ONCE)]
    together.wait(60)  # as many as may run at once do, while a sound is made
    last = [
        service.submit(lambda job: written.append(job.number), subject=subject, line="words")
        for subject in "0z0"
    ]
    assert [service.place(job) for job in (*sounds, *words, *last)] == [0, 1, *[0] * WORDS_AT_ONCE, 4, 5, 6]
    go_on.set()
    assert all(job.wait(60) and job.state == "done" for job in (*sounds, *words, *last))
    assert written.index(last[0].number) < written.index(last[2].number)
    service.close()


def test_words_on_one_subject_wait_for_each_other_alone() -> None:
    service, begun, go_on = SoundService(), threading.Event(), threading.Event()

    def write(job: Job) -> None:
        begun.set()
        assert go_on.wait(60)

    first = service.submit(write, subject="p", line="words")
    assert begun.wait(60)
    second, other = (service.submit(lambda job: "done", subject=each, line="words") for each in "pq")
    assert other.value() == "done" and second.state == "waiting" and first.state == "running"
    go_on.set()
    assert second.value() == "done"
    service.close()


def test_the_end_of_the_service_stops_words_and_ends_all_threads() -> None:
    service, begun = SoundService(), threading.Event()

    def write(job: Job) -> None:
        begun.set()
        while True:
            job.check_stop()
            time.sleep(0.005)

    jobs = [service.submit(write, subject="p", line="words") for _ in range(2)]
    assert begun.wait(60)
    service.close()
    assert [job.state for job in jobs] == ["stopped", "stopped"]
    assert not any(thread.is_alive() for thread in service._threads)
