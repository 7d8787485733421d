"""Injects the bugs of `mutants.yaml`, one at a time in a copy of the project, and says which the tests notice.

    python tests/mutants/mutate.py [--only WORDS] [--jobs N]

A bug counts as caught where a test that is named for it fails, where the interpreter crashes, or where the tests take
longer than `limit_s` allows. A source that no longer imports, or a name that is not defined, is no bug that tests
catch: such an entry is `broken`, and so is one whose old text is not in its file exactly once. The command succeeds
only if every bug is caught.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, TypeVar
from xml.etree import ElementTree

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.yaml")
LEAST_LIMIT_S = 120.0
SLOWDOWN = 6
"""Tests that take so many times as long with a bug as without it hang."""
NO_BUGS = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError")
"""A failure that begins with one of these tells of an edit that makes no program."""
UNEDITED_LIMIT_S = 1800.0
LIBRARIES = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers",
    "peft",
    "hypothesis",
    "scipy.signal",
    "webdataset",
    "av",
)
"""What takes long to import, and is the same with every bug."""
T = TypeVar("T")
Outcome = Literal["caught", "survived", "broken"]


class StaleMutant(Exception):
    """An edit that no longer applies: says which and why."""


@dataclass(frozen=True)
class Mutant:
    """A bug: a small edit of one file, and the tests that should notice it."""

    bug: str
    path: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids, relative to the root."""

    def edited(self, root: Path) -> str:
        """The file's text with the bug.

        Raises:
            StaleMutant: the edit does not apply, or what it makes is no Python.
        """
        file = root / self.path
        if not file.is_file():
            raise StaleMutant(f"{self.bug}: there is no file {self.path}")
        text = file.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise StaleMutant(f"{self.bug}: the old text occurs {count} times in {self.path}, not once")
        edited = text.replace(self.old, self.new)
        if edited == text:
            raise StaleMutant(f"{self.bug}: old and new text are equal")
        if file.suffix == ".py":
            try:
                compile(edited, self.path, "exec")
            except SyntaxError as error:
                raise StaleMutant(f"{self.bug}: {self.path} is no Python with it: {error}") from None
        return edited

    def check_tests(self, root: Path) -> None:
        """Raises: StaleMutant: a named test is not there."""
        for test in self.tests:
            name, *inside = test.split("::")
            if not (root / name).is_file():
                raise StaleMutant(f"{self.bug}: there is no file {name}")
            text = (root / name).read_text(encoding="utf-8")
            for part in (each.partition("[")[0] for each in inside):
                if f"def {part}(" not in text and f"class {part}" not in text:
                    raise StaleMutant(f"{self.bug}: {name} has no {part}")


@dataclass(frozen=True)
class Verdict:
    """Result of the tests for a bug."""

    outcome: Outcome
    why: str


@dataclass(frozen=True)
class Run:
    """Result of a run of pytest."""

    passed: int
    failures: list[str] = field(default_factory=list)
    """First line of each failure of a test, behind the test's name."""
    errors: list[str] = field(default_factory=list)
    """Reasons why tests did not run: failed collections, no such test, failures that tell of no program."""
    crash: str = ""
    seconds: float = 0.0
    timed_out: bool = False


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """The list.

    Raises:
        StaleMutant: two entries of one name, or one without tests.
    """
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    mutants = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    names = [mutant.bug for mutant in mutants]
    for mutant in mutants:
        if names.count(mutant.bug) > 1 or not mutant.tests:
            raise StaleMutant(f"{mutant.bug}: listed twice, or without tests")
    return mutants


def stale(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Why entries no longer apply."""
    found = []
    for mutant in mutants:
        try:
            mutant.edited(root)
            mutant.check_tests(root)
        except StaleMutant as error:
            found.append(str(error))
    return found


def judge(run: Run) -> Verdict:
    """Judge a run of a bug's tests."""
    if run.timed_out:
        return Verdict("caught", "the tests hang")
    if run.crash:
        return Verdict("caught", run.crash)
    if run.failures:
        return Verdict("caught", run.failures[0])
    if run.errors:
        return Verdict("broken", run.errors[0])
    if not run.passed:
        return Verdict("broken", "no test ran")
    return Verdict("survived", f"{run.passed} tests pass with it")


STARTER = """
import json, os, sys
from importlib import import_module
from importlib.util import find_spec

for name in sys.argv[1:]:
    if find_spec(name) is not None:
        import_module(name)
import pytest

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT)
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        sys.argv = ["pytest", *job["arguments"]]
        code = int(pytest.main(job["arguments"]))
        sys.stdout.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has imported the libraries runs pytest in forks of itself, one after another."""


class Starter:
    """Runs tests in processes that have the libraries, but nothing of the project, imported already.

    To import them takes longer than most tests of a bug.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", STARTER, *LIBRARIES], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def begin(self, arguments: Sequence[str], output: Path) -> int:
        """Start pytest in a group of its own; returns the leader's process id."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(
            json.dumps({"arguments": arguments, "output": str(output)}), file=self._process.stdin, flush=True
        )
        return int(self._process.stdout.readline())

    def wait(self, limit_s: float) -> int | None:
        """Exit status of what was begun, negative for a signal; None: it still runs after so many seconds."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        return int(self._process.stdout.readline()) if ready else None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Copy:
    """A copy of the project that is edited and tested; the checkout stays as it is."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self._root = folder, root
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        self._starter = Starter(folder, self._environment())

    def close(self) -> None:
        self._starter.close()

    @contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[None]:
        """The copy with the bug, and then without it again. Raises: StaleMutant: it does not apply."""
        edited = mutant.edited(self.folder)
        file = self.folder / mutant.path
        original = file.read_bytes()
        try:
            _write(file, edited.encode())
            yield
        finally:
            _write(file, original)

    def test(self, tests: Sequence[str], limit_s: float, running: set[int]) -> Run:
        """Run these tests here up to the first failure, with this copy's code in subprocesses, too.

        Args:
            running: holds the process while it runs, so that an interrupt can end it.
        """
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            report, output = Path(scratch) / "report.xml", Path(scratch) / "output.txt"
            arguments = [
                "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--basetemp={scratch}/pytest", "-x", *tests,
            ]  # fmt: skip
            leader = self._starter.begin(arguments, output)
            running.add(leader)
            try:
                code = self._starter.wait(limit_s)
            finally:
                _kill_group(leader)
                running.discard(leader)
            if code is None:
                self._starter.wait(UNEDITED_LIMIT_S)
            last = output.read_text(errors="replace").strip().splitlines()[-1:]
            return _told(report, code, "".join(last), time.monotonic() - begun)

    def check_imports(self) -> None:
        """Raises: StaleMutant: another tree's code would be tested."""
        code = "import audiollm, sys; sys.stdout.write(audiollm.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=self.folder, env=self._environment(), check=True,
            capture_output=True, text=True,
        ).stdout  # fmt: skip
        if not Path(found).resolve().is_relative_to(self.folder.resolve()):
            raise StaleMutant(f"the tests would run the code of {found}, not that of the copy")

    def _environment(self) -> dict[str, str]:
        beside = self._root.parent / "shared" / "data"
        given = {"AUDIOLLM_SHARED_DATA": str(beside)} if beside.is_dir() else {}
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        return {**given, **threads, **os.environ, "PYTHONPATH": str(self.folder)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="bugs in whose name, path or tests this text is")
    parser.add_argument("--jobs", type=int, default=2, help="bugs tried at a time, each in a copy of its own")
    parser.add_argument("--list", type=Path, default=LIST, help="the YAML file of the bugs")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    given = parser.parse_args(arguments)
    every = read_mutants(given.list)
    if reasons := stale(every, given.root):
        print("\n".join(["entries that no longer apply:", *reasons]))
        return 2
    wanted = [m for m in every if given.only in " ".join((m.bug, m.path, *m.tests))]
    if not wanted:
        print(f"no bug has {given.only!r} in its name, path or tests")
        return 2
    return run_all(wanted, given.root, given.jobs)


def run_all(mutants: Sequence[Mutant], root: Path, jobs: int) -> int:
    """Try all and print what becomes of each; 0 if all are caught."""
    sets = sorted({mutant.tests for mutant in mutants})
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        print(f"==> {len(mutants)} bugs, {len(sets)} sets of tests, {jobs} at a time", flush=True)
        bench = Bench([Copy(root, Path(scratch) / str(number)) for number in range(jobs)])
        try:
            limits = _limits(sets, bench)
            verdicts = _verdicts(mutants, limits, bench)
        finally:
            bench.close()
    missed = {mutant.bug: verdict for mutant, verdict in verdicts.items() if verdict.outcome != "caught"}
    print(f"==> {len(mutants) - len(missed)} of {len(mutants)} caught in {time.monotonic() - begun:.0f} s")
    for bug, verdict in missed.items():
        print(f"    {verdict.outcome}: {bug}: {verdict.why}")
    return 1 if missed else 0


class Bench:
    """Copies, each of which does one piece of work at a time."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        copies[0].check_imports()
        self._jobs, self._copies, self._free = len(copies), copies, SimpleQueue[Copy]()
        for copy in copies:
            self._free.put(copy)
        self._running: set[int] = set()

    def do(
        self,
        items: Sequence[T],
        work: Callable[[T, Copy, set[int]], Run],
        tell: Callable[[T, Run], None],
    ) -> None:
        """The work for each item, and what came of it as soon as it is done; an interrupt ends what runs."""

        def with_copy(item: T) -> Run:
            copy = self._free.get()
            try:
                return work(item, copy, self._running)
            finally:
                self._free.put(copy)

        with ThreadPoolExecutor(self._jobs) as pool:
            futures = {pool.submit(with_copy, item): item for item in items}
            try:
                for future in as_completed(futures):
                    tell(futures[future], future.result())
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for leader in tuple(self._running):
                    _kill_group(leader)

    def close(self) -> None:
        for copy in self._copies:
            copy.close()


def _limits(sets: Sequence[tuple[str, ...]], bench: Bench) -> Mapping[tuple[str, ...], float]:
    """By set of tests, the seconds after which they hang. Raises: SystemExit: one does not pass without a bug."""
    limits: dict[tuple[str, ...], float] = {}

    def tell(tests: tuple[str, ...], run: Run) -> None:
        verdict = judge(run)
        if verdict.outcome != "survived":
            raise SystemExit(f"without any bug, {' '.join(tests)}: {verdict.why}")
        limits[tests] = max(LEAST_LIMIT_S, SLOWDOWN * run.seconds)
        place = f"[{len(limits)}/{len(sets)}]"
        print(f"{place:>9} passes   {run.seconds:5.1f} s  {' '.join(tests)}", flush=True)

    bench.do(sets, lambda tests, copy, running: copy.test(tests, UNEDITED_LIMIT_S, running), tell)
    return limits


def _verdicts(
    mutants: Sequence[Mutant], limits: Mapping[tuple[str, ...], float], bench: Bench
) -> dict[Mutant, Verdict]:
    verdicts: dict[Mutant, Verdict] = {}

    def attempt(mutant: Mutant, copy: Copy, running: set[int]) -> Run:
        with copy.with_bug(mutant):
            return copy.test(mutant.tests, limits[mutant.tests], running)

    def tell(mutant: Mutant, run: Run) -> None:
        verdict = verdicts[mutant] = judge(run)
        place = f"[{len(verdicts)}/{len(mutants)}]"
        print(f"{place:>9} {verdict.outcome:8} {run.seconds:5.1f} s  {mutant.bug}", flush=True)
        print(f"{'':29}{verdict.why[:160]}", flush=True)

    bench.do(mutants, attempt, tell)
    return verdicts


def _write(file: Path, content: bytes) -> None:
    """And let no compiled form of what it was stay: one of the same second and size would be taken for its own."""
    file.write_bytes(content)
    if file.suffix == ".py":
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _kill_group(leader: int) -> None:
    """End what the tests have started and left."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _told(report: Path, code: int | None, last_line: str, seconds: float) -> Run:
    """Read pytest's report and exit status."""
    if code is None:
        return Run(0, seconds=seconds, timed_out=True)
    if code < 0:
        return Run(0, crash=f"the interpreter ended by {signal.Signals(-code).name}", seconds=seconds)
    if not report.exists():
        return Run(0, errors=[last_line or f"pytest ended with {code}"], seconds=seconds)
    passed = 0
    failures: list[str] = []
    errors: list[str] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        failed = case.find("failure") if case.find("failure") is not None else case.find("error")
        if failed is None:
            passed += case.find("skipped") is None
            continue
        message = failed.get("message", "").strip()
        text = f"{case.get('name')}: {(message.splitlines() or [''])[0]}"
        whole = f"{message}\n{failed.text or ''}"
        broken = message == "collection failure" or any(
            f"\nE   {name}" in whole or message.startswith(name) for name in NO_BUGS
        )
        (errors if broken else failures).append(text)
    if code not in (0, 1) and not failures:
        errors.append(last_line or f"pytest ended with {code}")
    return Run(passed, failures, errors, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
