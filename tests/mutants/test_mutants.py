"""The list of injected bugs still applies, and what the runner calls caught is caught."""

from __future__ import annotations

import subprocess
from pathlib import Path

import mutate
import pytest
import yaml
from mutate import LIST, ROOT, Mutant, Run, StaleMutant, judge, main, read_mutants, stale

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_the_bug_still_applies(mutant: Mutant) -> None:
    """Its old text is in its file exactly once, what it makes is Python, and its tests are there."""
    assert not stale([mutant], ROOT)


def test_there_are_enough_bugs() -> None:
    assert len(MUTANTS) >= 60


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two functions with a test for the sum and none for the difference; pytest loads no plugin."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(mutate, "LIBRARIES", ("json",))
    root = tmp_path / "project"
    (root / "audiollm").mkdir(parents=True)
    (root / "audiollm" / "__init__.py").write_text(
        "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
    )
    (root / "test_it.py").write_text(
        "import audiollm\n\n\ndef test_add():\n    assert audiollm.add(1, 2) == 3\n"
    )
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


def bugs(project: Path, *edits: tuple[str, str, str]) -> list[str]:
    """Arguments for a list of these edits of the package: bug, old text, new text."""
    common = {"path": "audiollm/__init__.py", "tests": ["test_it.py"]}
    rows = [{"bug": bug, "old": old, "new": new, **common} for bug, old, new in edits]
    (project / "bugs.yaml").write_text(yaml.safe_dump(rows))
    return ["--list", str(project / "bugs.yaml"), "--root", str(project), "--jobs", "1"]


def test_a_bug_that_the_tests_notice_is_caught(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (project / "audiollm" / "__init__.py").read_text()
    assert main(bugs(project, ("sum", "a + b", "a * b"))) == 0
    assert "1 of 1 caught" in capsys.readouterr().out
    assert (project / "audiollm" / "__init__.py").read_text() == source, "the checkout is never edited"


def test_a_bug_that_no_test_notices_survives(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edits = (("difference", "a - b", "b - a"), ("sum", "a + b", "a * b"))
    assert main(bugs(project, *edits)) == 1
    out = capsys.readouterr().out
    assert "1 of 2 caught" in out and "survived: difference: 1 tests pass with it" in out
    assert main([*bugs(project, *edits), "--only", "sum"]) == 0


@pytest.mark.parametrize("new", ["import nothing_of_this_name", "return undefined"])
def test_a_program_that_cannot_run_is_not_caught(
    project: Path, capsys: pytest.CaptureFixture[str], new: str
) -> None:
    assert main(bugs(project, ("wrong", "return a + b", new))) == 1
    assert "broken: wrong" in capsys.readouterr().out


def test_an_edit_that_no_longer_applies_fails_before_anything_runs(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(bugs(project, ("gone", "a ** b", "a"))) == 2
    assert main(bugs(project, ("twice", "return a", "return b"))) == 2
    assert main(bugs(project, ("no Python", "a + b", "a +"))) == 2
    assert main(bugs(project, ("equal", "a + b", "a + b"))) == 2
    out = capsys.readouterr().out
    assert "occurs 0 times" in out and "occurs 2 times" in out and "no Python" in out and "equal" in out


def test_tests_that_fail_without_a_bug_end_the_run(project: Path) -> None:
    arguments = bugs(project, ("sum", "a + b", "a * b"))
    (project / "test_it.py").write_text("def test_wrong():\n    assert 0\n")
    with pytest.raises(SystemExit, match=r"without any bug, test_it.py: test_wrong"):
        main(arguments)


def test_tests_that_hang_are_ended(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mutate.LEAST_LIMIT_S", 3.0)
    monkeypatch.setattr("mutate.SLOWDOWN", 0)
    assert main(bugs(project, ("endless", "return a + b", "import time; time.sleep(600)"))) == 0


def test_what_a_run_tells() -> None:
    assert judge(Run(2, ["test_a: assert 1 == 2"])).outcome == "caught"
    assert judge(Run(0, crash="the interpreter ended by SIGSEGV")).outcome == "caught"
    assert judge(Run(0, timed_out=True)).why == "the tests hang"
    assert judge(Run(0, errors=["collection failure"])).outcome == "broken"
    assert judge(Run(0)).outcome == "broken", "all tests were skipped"
    assert judge(Run(3)).outcome == "survived"


def test_an_entry_is_listed_once(tmp_path: Path) -> None:
    rows = yaml.safe_load(LIST.read_text())
    (tmp_path / "twice.yaml").write_text(yaml.safe_dump([rows[0], rows[0]]))
    with pytest.raises(StaleMutant, match="listed twice"):
        read_mutants(tmp_path / "twice.yaml")
