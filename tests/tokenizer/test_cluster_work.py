"""Samples on a cluster: results in order; a lost machine's task is done again, a deadly one ends the run."""

from __future__ import annotations

from typing import Any

import pytest

from audiollm.cluster import ClusterError, TeamReply
from audiollm.errors import StageError
from tokenizer.corpus.cluster_work import MAX_LOST_MACHINES, ClusterWorkers, _Queue, _work
from tokenizer.corpus.processes import AHEAD

TWO = ClusterWorkers(2)


class FakeTeam:
    """Doubles numbers, the newest first; actors die over a task as often as `deaths` says."""

    def __init__(self, deaths: dict[int, list[TeamReply]], refused: int = 0) -> None:
        self.deaths, self.refused = deaths, refused
        self.started, self.longest = 0, 0
        self.news: list[TeamReply] = []
        self.dead: set[int] = set()

    def start(self, workers: ClusterWorkers, argument: Any) -> int:
        self.started += 1
        is_refused = self.started <= self.refused
        self.news.append(TeamReply(self.started, death="no such package" if is_refused else None))
        return self.started

    def send(self, number: int, task: int) -> None:
        assert number not in self.dead
        if self.deaths.get(task):
            death = self.deaths[task].pop()
            self.dead.add(number)
            self.news.append(TeamReply(number, None, death.death, death.is_machine_lost))
        else:
            self.news.append(TeamReply(number, 2 * task))

    def replies(self) -> list[TeamReply]:
        if not self.news:
            raise ClusterError("nothing is waited for")
        return [self.news.pop()]


def run(team: FakeTeam, count: int = 20) -> list[tuple[int, Any]]:
    tasks = ((number, 10 * number) for number in range(count))
    return list(_work(_Queue(tasks, AHEAD * TWO.workers), team, None, TWO))  # type: ignore[arg-type]


LOST = TeamReply(0, None, "its node has died", True)
DIED = TeamReply(0, None, "its process has died")


@pytest.mark.parametrize("count", [0, 1, 20])
def test_results_come_in_the_order_of_the_samples(count: int) -> None:
    assert run(FakeTeam({}), count) == [(number, 20 * number) for number in range(count)]


@pytest.mark.parametrize("deaths", [[LOST], [LOST] * (MAX_LOST_MACHINES - 1), [DIED], [LOST, DIED]])
def test_the_task_of_a_worker_that_died_is_done_again(deaths: list[TeamReply]) -> None:
    team = FakeTeam({0: [*deaths], 70: [LOST]})
    assert run(team) == [(number, 20 * number) for number in range(20)]
    assert team.started == 2 + len(deaths) + 1  # each has another in its place


@pytest.mark.parametrize("deaths", [[DIED, DIED], [LOST] * MAX_LOST_MACHINES])
def test_a_sample_that_kills_its_workers_is_named(deaths: list[TeamReply]) -> None:
    with pytest.raises(StageError, match=r"workers die over sample 8 of the list \(its"):
        run(FakeTeam({70: [*deaths]}))


def test_workers_that_cannot_begin() -> None:
    assert len(run(FakeTeam({}, refused=1))) == 20
    with pytest.raises(StageError, match="no worker can begin: no such package"):
        run(FakeTeam({}, refused=2))
