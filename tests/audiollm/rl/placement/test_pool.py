"""Actors of a rank: one that dies is replaced and its work done once; what has no room is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audiollm.cluster import Cluster, ClusterError
from audiollm.errors import StageError
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.placement.pool import ActorPool, free_gpus, joined_cluster
from audiollm.rl.placement.settings import ActorShare, PlacementChoice
from tests.audiollm.rl.placement.hosts import Host

SMALL = ActorShare(actors=2, cpus=0.25)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield Cluster([SMALL], None)
    ray.shutdown()


@pytest.mark.slow
def test_work_of_a_dead_actor_is_done_once(cluster: Any, tmp_path: Path) -> None:
    told: list[str] = []
    pool = ActorPool(cluster, "rollout", SMALL, 2, Host, [str(tmp_path)], told.append)
    prepared: list[int] = []
    pool.prepare = prepared.append
    asked = [pool.ask(number % 2, "double", number, 2 if number == 3 else 0) for number in range(6)]
    assert [pool.answer(each) for each in asked] == [0, 2, 4, 6, 8, 10]
    # those behind the deaths in the same actor's queue are done by its successor, and so are those whose answers died
    assert set((tmp_path / "done").read_text().split()) == set(map(str, range(6)))
    assert prepared == [1, 1] and len(told) == 2 and "a rollout actor died" in told[0]
    assert pool.answer(pool.ask(1, "place")) == 1
    with pytest.raises(StageError, match="rollout actors died 3 times at the same work"):
        pool.answer(pool.ask(0, "double", 9, 3))
    with pytest.raises(StageError, match="a rollout actor failed: KeyError: 'gone'"):
        pool.answer(pool.ask(0, "fail"))
    pool.close()
    (tmp_path / "refuse").touch()
    with pytest.raises(StageError, match="a rollout actor failed: RuntimeError: no card"):
        ActorPool(cluster, "rollout", SMALL, 1, Host, [str(tmp_path)], told.append)


def test_what_has_no_room_is_refused(cluster: Any) -> None:
    def error(**shares: Any) -> str:
        choice = PlacementChoice.model_validate(shares)
        with pytest.raises(StageError) as caught, joined_cluster(choice, ALONE, print):
            pass
        return str(caught.value)

    assert "the workers take 3 CPUs and the cluster has 2" in error(rollout={"actors": 3})
    assert "the workers take 2.5 CPUs and the cluster has 2" in error(
        rollout={"actors": 2}, reward={"cpus": 0.5}
    )
    assert "the workers take 1.5 GPUs and the cluster has 1" in error(
        rollout={"gpus": 1, "cpus": 0.1}, reference={"gpus": 0.5, "cpus": 0.1}
    )
    with joined_cluster(PlacementChoice(rollout="ranks"), ALONE, print) as none:
        assert none is None


def test_an_actor_must_fit_on_one_machine(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = [{"Alive": True, "Resources": {"CPU": 1.0}}, {"Alive": True, "Resources": {"CPU": 1.0}}]
    monkeypatch.setattr(cluster.ray, "nodes", lambda: machines)
    with pytest.raises(ClusterError, match="a worker takes 2 CPUs and 0 GPUs, and no single machine"):
        Cluster([ActorShare(actors=1, cpus=2)], None)


def test_actors_are_dealt_evenly_to_ranks() -> None:
    choice = PlacementChoice.model_validate({"rollout": {"actors": 3}})
    with (
        pytest.raises(StageError, match="3 actors cannot be dealt evenly to 2 ranks"),
        joined_cluster(choice, Ranks(1, 2), print),
    ):
        pass


def test_gpus_without_a_rank_come_first() -> None:
    assert free_gpus(["4", "5", "6", "7"], 1) == ["5", "6", "7"]
    assert free_gpus(["4", "5"], 2) == ["4", "5"]
    assert free_gpus([], 2) == []
