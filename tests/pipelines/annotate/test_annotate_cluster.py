"""A Ray cluster of several machines, simulated on this one, gives what local processes give, file for file."""

from __future__ import annotations

import sqlite3
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from audiollm.errors import StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.input.synthetic import CorpusConfig, speak_corpus
from pipelines.annotate.stage import STAGE

STEPS = (
    "probe",
    "voice_activity",
    "segments",
    "signal",
    "pocketsphinx",
    "consensus",
    "repetition",
    "quality",
)
CORPUS = CorpusConfig(words=["one", "seven", "nine"], voices=2, takes=3, test_takes=1)
OF_THE_RUN = {"timings.json", "report.html"}


def _annotate(folder: Path, **settings: Any) -> dict[str, str]:
    folder.mkdir(parents=True)
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    config = AnnotationConfig.model_validate({"quality_sample": 3, "shards": True, **settings})
    STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "ledger" not in path.parts and path.name not in OF_THE_RUN
    }


@pytest.mark.slow
def test_four_machines_give_what_one_gives(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    source = tmp_path / "in"
    speak_corpus(source, CORPUS, seed=0, on_done=lambda done: None)
    settings = {
        "input": str(source),
        "transcripts": "{text}_{speaker}_{take}.wav",
        "steps": {"repetition": {}},
    }
    here = _annotate(tmp_path / "here", **settings, workers=1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        share = {name: {"cpus": 0.75, "gpus": 0} for name in STEPS}
        there = _annotate(
            tmp_path / "there",
            **settings,
            engine="ray",
            ray_address=cluster.address,
            workers=4,
            resources=share,
        )
    finally:
        cluster.shutdown()
    assert there == here
    assert "shards/000000.tar" in here


@pytest.mark.slow
def test_a_machine_that_dies_costs_nothing(tmp_path: Path) -> None:
    """Two machines have room for two workers; one is ended like by a power cut, and the other does its work."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    source = tmp_path / "in"
    speak_corpus(source, CORPUS, seed=0, on_done=lambda done: None)
    settings = {"input": str(source), "transcripts": "{text}_{speaker}_{take}.wav", "quality_sample": 0}
    here = _annotate(tmp_path / "here", **settings, workers=1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        raylet = psutil.Process(nodes[0].all_processes["raylet"][0].process.pid)
        killer = threading.Thread(
            target=_kill_amid, args=(tmp_path / "there" / "ledger", raylet), daemon=True
        )
        killer.start()
        there = _annotate(
            tmp_path / "there", **settings, engine="ray", ray_address=cluster.address, workers=2
        )
        killer.join(timeout=10)
        assert not raylet.is_running() or raylet.status() == psutil.STATUS_ZOMBIE
    finally:
        cluster.shutdown()
    assert there == here
    with sqlite3.connect(tmp_path / "there" / "ledger" / "ledger.sqlite") as database:
        assert database.execute("select count(*) from calls where error is not null").fetchone() == (0,)


def _kill_amid(ledger: Path, raylet: psutil.Process) -> None:
    """Kill a machine, worker and all, when some calls of the run are answered."""
    recent = ledger / "ledger.sqlite-recent"
    while not recent.exists() or recent.read_bytes().count(b'"step": "voice_activity"') < 3:
        time.sleep(0.05)
    for process in (*raylet.children(recursive=True), raylet):
        process.kill()


@pytest.mark.slow
def test_more_workers_than_the_cluster_has_room_for_are_refused(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    source = tmp_path / "in"
    speak_corpus(source, CORPUS, seed=0, on_done=lambda done: None)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(StageError, match="take 3 CPUs and the cluster has 1"):
            _annotate(tmp_path / "out", input=str(source), engine="ray", workers=3)
    finally:
        ray.shutdown()
