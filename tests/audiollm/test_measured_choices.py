"""The fastest of several ways is measured once, kept for later processes, and restored from a checkpoint."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from audiollm.measured_choices import MeasuredChoices, Ways, fastest_of, machine_digest


def way(milliseconds: float) -> Callable[[], None]:
    return lambda: time.sleep(milliseconds / 1000)


def test_the_fastest_way_wins_and_a_tie_goes_to_the_plain_one() -> None:
    assert fastest_of({"plain": way(6), "other": way(1)}) == "other"
    assert fastest_of({"plain": way(1), "other": way(6)}) == "plain"
    assert fastest_of({"plain": way(6), "other": way(5.95)}) == "plain"  # within `MIN_GAIN`


def test_what_was_measured_is_kept_for_the_next_process(tmp_path: Path) -> None:
    path, asked = tmp_path / "cache" / "fastest.json", []

    def ways() -> Ways:
        asked.append(1)
        return {"plain": way(6), "other": way(1)}

    assert MeasuredChoices(path).choose("a", ways) == "other"
    later = MeasuredChoices(path)
    assert [later.choose("a", ways), later.choose("a", ways)] == ["other", "other"]
    assert len(asked) == 1
    assert json.loads(path.read_text()) == {"a": "other"}


def test_a_measurement_may_ask_for_another_choice(tmp_path: Path) -> None:
    choices = MeasuredChoices(tmp_path / "fastest.json")

    def inner() -> None:
        choices.choose("inner", lambda: {"plain": way(1), "other": way(6)})

    assert choices.choose("outer", lambda: {"plain": inner, "other": way(30)}) == "plain"
    assert json.loads(choices.path.read_text()) == {"inner": "plain", "outer": "plain"}


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    began = MeasuredChoices(tmp_path / "first.json")
    began.choose("a", lambda: {"plain": way(6), "other": way(1)})
    resumed = MeasuredChoices(tmp_path / "second.json")
    resumed.restore(json.loads(json.dumps(began.state())))
    assert resumed.choose("a", lambda: pytest.fail("measured again")) == "other"
    elsewhere = MeasuredChoices(tmp_path / "third.json")
    elsewhere.restore({**began.state(), "machine": "another"})
    assert elsewhere.choose("a", lambda: {"plain": way(1), "other": way(6)}) == "plain"
    elsewhere.restore({})  # of a checkpoint without choices


def test_a_cut_file_is_measured_again_and_a_folder_without_leave_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "fastest.json"
    path.write_text('{"a": "oth')
    assert MeasuredChoices(path).choose("a", lambda: {"plain": way(6), "other": way(1)}) == "other"
    assert json.loads(path.read_text()) == {"a": "other"}
    path.write_text("3")
    assert MeasuredChoices(path).choose("a", lambda: {"plain": way(6), "other": way(1)}) == "other"
    blocked = tmp_path / "file"
    blocked.write_text("")
    nowhere = MeasuredChoices(blocked / "fastest.json")
    assert nowhere.choose("a", lambda: {"plain": way(6), "other": way(1)}) == "other"


def test_the_digest_names_what_limits_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_digest()
    machine_digest.cache_clear()
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
    assert machine_digest() != before
    machine_digest.cache_clear()
