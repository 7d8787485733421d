"""Killed at any moment and run again, `audiocot` ends with the files of a run that nobody disturbed, and pays once."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from audiollm.audio.files import save
from tests.pipelines.audiocot.cot_run import RATE, ChatServer, compose, made, think, tone

OF_THE_RUN = {"timings.json", "report.html", "config.yaml"}
"""Files that depend on the run's time and place, and not only on the data."""


def content(out: Path) -> dict[str, str]:
    """Every file that is made of the data, by its digest; the ledger is how it is made."""
    files = [path for path in out.rglob("*") if path.is_file() and "ledger" not in path.parts]
    return {
        path.relative_to(out).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name not in OF_THE_RUN and not path.name.startswith(".")
    }


class Killed(BaseException):
    """A kill within the process: nothing may catch it."""


def test_a_run_that_ends_at_any_point_of_its_work_ends_as_if_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cheap: the process is one, and it 'dies' at outcomes and files that are drawn."""
    source = tmp_path / "in"
    for number in range(3):
        save(made(source / f"{number}.wav"), tone(0.6, 300 + number), RATE)
    settings: dict[str, Any] = {"review_share": 0.5, "samples_per_shard": 2}
    think(tmp_path / "plain", source, **settings)
    from audiollm.files import atomic
    from pipelines.execution.ledger import Ledger

    dice, left, asked = random.Random(0), [0], [0]
    put, replace = Ledger.put, os.replace

    def counted() -> None:
        asked[0] += 1
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    def dying_put(self: Any, *arguments: Any) -> None:
        counted()
        put(self, *arguments)

    def dying_replace(*arguments: Any) -> None:
        counted()
        replace(*arguments)

    monkeypatch.setattr(Ledger, "put", dying_put)
    monkeypatch.setattr(atomic.os, "replace", dying_replace)
    deaths = 0
    for _ in range(6):
        left[0] = dice.randrange(1, 30)
        try:
            think(tmp_path / "killed", source, **settings)
        except Killed:
            deaths += 1
    left[0] = -1
    think(tmp_path / "killed", source, **settings)
    assert deaths >= 4
    plain, killed = content(tmp_path / "plain"), content(tmp_path / "killed")
    assert plain == killed and len(plain) > 15


def question_of(request: dict[str, Any]) -> str:
    """The name of a question, which its answer repeats."""
    return sha256(json.dumps(request["messages"]).encode()).hexdigest()


def kept_answers(out: Path) -> set[str]:
    """The questions whose answers a run has kept."""
    path = out / "ledger" / "answers.sqlite"
    if not path.is_file():
        return set()
    with closing(sqlite3.connect(path, timeout=60)) as database:
        tables = database.execute("select name from sqlite_master where name = 'answers'").fetchall()
        texts = database.execute("select text from answers").fetchall() if tables else []
    return {json.loads(text)["events"][0]["source"] for (text,) in texts}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    def reply(request: dict[str, Any]) -> str:
        event = {"sound": "tone", "start_s": 0.1, "end_s": 0.4, "source": question_of(request)}
        return json.dumps({"events": [event], "background": []})

    started = ChatServer(reply)
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "workers"), [("local", 1), ("local", 2), ("ray", 2)])
def test_killed_twenty_times_and_no_answer_paid_for_twice(
    tmp_path: Path, server: ChatServer, engine: str, workers: int
) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    scenes = compose(tmp_path)
    settings = tmp_path / "settings.yaml"
    steps = {"listen": server.step(), "objects": {}}
    form = {"sample_rate": RATE, "channels": 1}
    settings.write_text(json.dumps({"steps": steps, "made": form, "samples_per_shard": 3}))

    def command(out: Path) -> list[str]:
        return [
            *(str(Path(sys.executable).with_name("audiollm")), "audiocot", str(scenes), "-o", str(out)),
            *("--preset", "everything", "--settings", str(settings), "--workers", str(workers)),
            *("--engine", engine),
        ]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    subprocess.run(command(tmp_path / "plain"), check=True, env=environment, stdout=subprocess.DEVNULL)
    whole_s = time.monotonic() - began
    questions = len(server.requests)
    server.requests.clear()
    killed, moments, in_flight, deaths = tmp_path / "killed", random.Random(0), 0, 0
    kept = list[
        tuple[set[str], int]
    ]()  # after each kill: the answers that are kept, then the requests so far
    for number in range(20):
        process = subprocess.Popen(
            command(killed), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(moments.uniform(0.2, 0.8) * whole_s)
        process.send_signal(signal.SIGKILL)
        deaths += process.wait() == -signal.SIGKILL
        kept.append((kept_answers(killed), len(server.requests)))
        in_flight += workers  # an answer on its way when its reader is killed is lost, and nothing else
        time.sleep(1.0)
        if number % 5 == 4:  # the answers are kept by themselves
            for path in (killed / "ledger").glob("ledger.sqlite*"):
                path.unlink()
    subprocess.run(command(killed), check=True, env=environment, stdout=subprocess.DEVNULL)
    assert content(killed) == content(tmp_path / "plain")
    assert deaths >= 12
    for answers, count in kept:
        assert not answers.intersection(map(question_of, server.requests[count:]))
    assert kept[-1][0]
    asked = Counter(question_of(request) for request in server.requests)
    assert len(asked) == questions
    assert sum(asked.values()) - questions <= in_flight and max(asked.values()) <= 1 + 20
