"""Work on samples in actors of a Ray cluster; results come in the samples' order, and a machine's death costs none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from audiollm.cluster import ActorTeam, Cluster, ClusterError, TeamMember, TeamReply
from audiollm.errors import StageError, error_line
from tokenizer.corpus.processes import AHEAD

MAX_DEATHS = 2
"""Workers that may die over one task: a third would die, too."""
MAX_LOST_MACHINES = 4
"""Machines that may be lost while at one task."""


@dataclass(frozen=True)
class ClusterWorkers:
    """Number and shares of the actors of a Ray cluster.

    Args:
        address: of a running cluster; None: one on this machine, which ends with the work.
        cpus, gpus: of each actor.
    """

    workers: int
    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0


@dataclass(eq=False)
class _Task:
    number: int
    content: Any
    deaths: int = 0
    lost_machines: int = 0


@dataclass
class _Queue:
    """Tasks that wait for a worker, those that are at work, and results that wait for earlier ones."""

    tasks: Iterator[tuple[int, Any]]
    max_begun: int
    order: deque[int] = field(default_factory=deque)
    """Numbers of the tasks that are begun and whose results are not handed out, in order."""
    repeated: deque[_Task] = field(default_factory=deque)
    """Tasks whose worker has died."""
    at_work: dict[int, _Task] = field(default_factory=dict)
    """Task by its worker."""
    results: dict[int, Any] = field(default_factory=dict)

    def next_task(self) -> _Task | None:
        """A task to work on now; None: there is none, or too many wait for the oldest."""
        if self.repeated:
            return self.repeated.popleft()
        if len(self.order) >= self.max_begun or (numbered := next(self.tasks, None)) is None:
            return None
        self.order.append(numbered[0])
        return _Task(*numbered)

    def ordered_results(self) -> Iterator[tuple[int, Any]]:
        while self.order and self.order[0] in self.results:
            number = self.order.popleft()
            yield number, self.results.pop(number)


def work_on_cluster(
    tasks: Iterable[tuple[int, Any]], member: type[TeamMember], argument: Any, workers: ClusterWorkers
) -> Iterator[tuple[int, Any]]:
    """The number and the result of each task, in order.

    Args:
        tasks: numbered; `member.process` gets the second part.
        member: class of the actors, built with `argument`.

    Raises:
        StageError: no cluster or no room in it, or a task or the start of an actor kills its workers.
    """
    try:
        cluster = Cluster([workers], workers.address)
    except ClusterError as error:
        raise StageError(f"--engine ray: {error}", exit_code=2) from None
    team = ActorTeam(cluster, member)
    try:
        yield from _work(_Queue(iter(tasks), AHEAD * workers.workers), team, argument, workers)
    except ClusterError as error:
        raise StageError(f"--engine ray: {error}", "the same command goes on") from None
    except cluster.ray.exceptions.RayTaskError as error:
        raise StageError(f"a worker failed: {error_line(error.cause)}", "the same command goes on") from None
    finally:
        team.close()
        cluster.leave()


def _work(
    queue: _Queue, team: ActorTeam, argument: Any, workers: ClusterWorkers
) -> Iterator[tuple[int, Any]]:
    beginning = {team.start(workers, argument) for _ in range(workers.workers)}
    idle: list[int] = []
    while True:
        while idle and (task := queue.next_task()) is not None:
            worker = idle.pop()
            queue.at_work[worker] = task
            team.send(worker, task.content)
        if not queue.at_work and idle and not queue.order:
            return
        for reply in team.replies():
            if reply.number in beginning:
                beginning.remove(reply.number)
                _check_begun(reply, bool(beginning or idle or queue.at_work))
            if reply.death is not None:
                is_replaced = reply.is_machine_lost or reply.number in queue.at_work
                _repeat_task(queue, reply)
                beginning |= {team.start(workers, argument)} if is_replaced else set()
                continue
            if (finished := queue.at_work.pop(reply.number, None)) is not None:
                queue.results[finished.number] = reply.value
            idle.append(reply.number)
        yield from queue.ordered_results()


def _check_begun(reply: TeamReply, has_others: bool) -> None:
    """Raises: StageError: no actor can begin."""
    if reply.death is not None and not reply.is_machine_lost and not has_others:
        raise StageError(f"no worker can begin: {reply.death}", "audiollm doctor says what is missing")


def _repeat_task(queue: _Queue, reply: TeamReply) -> None:
    """Put the task of a dead worker first.

    Raises:
        StageError: several workers, or machines, have died over it.
    """
    task = queue.at_work.pop(reply.number, None)
    if task is None:
        return
    task.deaths += not reply.is_machine_lost
    task.lost_machines += reply.is_machine_lost
    if task.deaths >= MAX_DEATHS or task.lost_machines >= MAX_LOST_MACHINES:
        raise StageError(
            f"workers die over sample {task.number + 1} of the list ({reply.death})",
            "if memory ran out, take fewer workers or leave it out; the same command goes on",
        )
    queue.repeated.append(task)
