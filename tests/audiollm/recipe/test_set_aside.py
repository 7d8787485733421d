"""The one list of what could not be used: its rows, attempts that go on, a line cut by a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from audiollm.errors import BadSample
from audiollm.files.atomic import write_jsonl
from audiollm.files.set_aside import TEXTS, SetAside, read_set_aside, row_of, set_aside_row


def bad_samples() -> Iterator[BadSample]:
    yield BadSample("a.tar/1", "x", "codes 7 to 9", "codes out of range")
    yield BadSample("a.tar/2", "y", "codes 7 to 8", "codes out of range")
    yield BadSample("b.jsonl:3", "", "a line\u2028of it", "wrong JSON")
    yield BadSample("a.tar/1", "x", "codes 7 to 9", "codes out of range")


def test_each_is_listed_once_over_all_attempts(tmp_path: Path) -> None:
    path = tmp_path / "run/set_aside.jsonl"
    first = SetAside(path, "train")
    assert not path.exists(), "nothing is set aside yet"
    first.add(bad_samples())
    with path.open("a") as file:
        file.write('{"place": "cut by a ki')
    again = SetAside(path, "train", read_set_aside(path))
    again.add([*bad_samples(), BadSample("c", "z", "new")])
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert rows == read_set_aside(path) == again.rows
    assert [row["id"] for row in rows] == ["x", "y", "", "z"]
    assert all(list(row) == list(TEXTS) and row["stage"] == "train" for row in rows)
    assert again.counts == {"codes out of range": 2, "wrong JSON": 1, "new": 1}


def test_what_an_attempt_does_not_take_over_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "set_aside.jsonl"
    SetAside(path, "tokenize").add(bad_samples())
    kept = [row for row in read_set_aside(path) if row["id"] != "x"]
    SetAside(path, "tokenize", kept).add([BadSample("n", "new", "r")])
    assert [row["id"] for row in read_set_aside(path)] == ["y", "", "new"]
    SetAside(path, "tokenize")
    assert path.read_text() == ""


def test_strict_raises_and_lists_it(tmp_path: Path) -> None:
    strict = SetAside(tmp_path / "strict.jsonl", "train", strict=True)
    with pytest.raises(BadSample, match=r"a\.tar/1: sample 'x': codes 7 to 9"):
        strict.add(bad_samples())
    assert [row["id"] for row in read_set_aside(tmp_path / "strict.jsonl")] == ["x"]


def test_a_row_says_who_where_and_why() -> None:
    row = set_aside_row("annotate", "/d/a.wav", "too short", value=0.1, threshold=0.3)
    assert row["reason"] == row["kind"] == "too short" and (row["value"], row["threshold"]) == (0.1, 0.3)
    bad = BadSample("s.jsonl:3", "x", "wrong JSON: ...", "wrong JSON")
    assert row_of(bad, "tokenize") == {**bad.row(), "stage": "tokenize"}


@pytest.mark.parametrize("line", ["[]", "7", "null", '{"path": "a", "reason": "b"}', '{"place": 3}', "{"])
def test_what_is_no_row_is_left_out(tmp_path: Path, line: str) -> None:
    path, good = tmp_path / "s.jsonl", set_aside_row("compose", "a", "no text")
    write_jsonl(path, [good])
    path.write_text(f"{line}\n{path.read_text()}")
    assert read_set_aside(path) == [good] and read_set_aside(tmp_path / "none.jsonl") == []
