"""`make bench`: failures end nothing and are named; the table has bars and times; every bar names a case."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench

BENCHMARKS = Path(bench.__file__).parent

LINE = {"bench": "speed", "case": "sorting, 40 rows", "ours": 2.0, "peer": 5.0, "ratio": 2.5, "unit": "CPU-s"}
MAKEFILE = """\
good:
	@echo 'a word'
	@echo '{line}'
bad:
	@echo '{{"bench": "speed", "case": "memory", "ours": 3, "unit": "MB"}}'
	@exit 3
"""


def run_bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name in ("bench.py", "measure.py"):
        shutil.copy(BENCHMARKS / name, folder)
    (folder / "bars.yaml").write_text(
        "speed:\n  'sorting, *': {at_least: 2}\n  memory: {figure: ours, at_most: 2}\n"
    )
    (folder / "Makefile").write_text(MAKEFILE.format(line=json.dumps(LINE)))
    command = [sys.executable, "bench.py", "--runs", "lines", *arguments, "bad", "good"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def table_rows(output: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in output.splitlines()
        if line.startswith("|")
    ]


def test_a_failure_ends_no_other_benchmark_and_is_named(tmp_path: Path) -> None:
    done = run_bench(tmp_path)
    assert done.returncode == 1 and "failed: bad (status 2)" in done.stderr
    headings, _, *rows = table_rows(done.stdout)
    assert headings == list(bench.HEADINGS)
    assert [(row[0], row[4], row[-2], row[-1]) for row in rows] == [
        ("bad", "", "", "failed, status 2"),
        ("", "memory", "ours ≤ 2", "missed"),
        ("good", "sorting, 40 rows", "ratio ≥ 2", "met"),
    ]
    assert rows[2][1:3] == ["0.0", "0"] and rows[2][5:9] == ["2", "5", "2.5", "CPU-s"]
    (path,) = (tmp_path / "lines").glob("*.jsonl")
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert {"commit", "machine", "full"} == lines[0].keys() and lines[-2] == {"target": "good", **LINE}
    assert lines[2]["target"] == "bad" and lines[2]["status"] == 2


def test_a_quotient_shows_both_of_its_entries() -> None:
    bars = {
        "heads": [bench.Bar("memory", "dense / ours", at_least=3)],
        "layers": [bench.Bar("*", "dual / single")],
    }
    cells = bench.figure_cells(
        {"bench": "heads", "case": "memory", "ours": 2, "dense": 8, "trl": 5}, bars, False
    )
    assert cells == ["heads", "memory", "2", "8", "", "", "dense / ours ≥ 3", "met"]
    cells = bench.figure_cells({"bench": "layers", "case": "any", "dual": 4, "single": 3}, bars, False)
    assert cells is not None and cells[2:4] == ["4", "3"]
    assert bench.figure_cells({"bench": "heads", "case": "time", "trl": 5}, bars, False) is None


def test_only_chooses_benchmarks(tmp_path: Path) -> None:
    done = run_bench(tmp_path, "--only", "good")
    assert done.returncode == 0 and "==> good" in done.stdout and "==> bad" not in done.stdout
    with pytest.raises(SystemExit, match="ONLY: absent: no such benchmark; choose from bad good"):
        bench.select_targets(["bad", "good"], ["absent"])


def test_a_benchmark_over_four_minutes_is_marked_at_default_sizes() -> None:
    runs = [bench.TargetRun("slow", [LINE], minutes=4.2, cpu_seconds=250.0)]
    assert "4.2 (over 4)" in bench.table(runs, {}, is_full=False)
    assert "over" not in bench.table(runs, {}, is_full=True)


def test_bars_judge_entries_and_quotients() -> None:
    quotient = bench.Bar("*", "dual / single", at_most=1.1, text="1.10")
    assert str(quotient) == "dual / single ≤ 1.1"
    assert quotient.judge({"dual": 1.05, "single": 1.0}, False) == "met"
    assert quotient.judge({"dual": 1.2, "single": 1.0}, False) == "missed"
    reached = bench.Bar("*", "ours", at_most=10, full=True)
    assert reached.judge({"ours": 30.0}, False) == "FULL=1 judges it"
    assert reached.judge({"ours": "not reached"}, True) == "missed"


def strings_of(script: Path) -> set[str]:
    """The words of all texts in a script but its docstrings."""
    tree = ast.parse(script.read_text())
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    texts -= {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, ast.Module)}
    return {word for text in texts for word in re.findall(r"[\w-]+", text)}


def test_every_bar_names_a_bench_and_a_case_of_a_script_and_is_a_bar_of_the_results() -> None:
    makefile = (BENCHMARKS / "Makefile").read_text()
    listed = re.search(r"^BENCH := (.*)$", makefile, re.M)
    assert listed is not None
    targets = {name: re.search(rf"^{name}: .*\n((?:\t.*\n)+)", makefile, re.M) for name in listed[1].split()}
    rows = [
        line.split("|")
        for line in (BENCHMARKS / "RESULTS.md").read_text().splitlines()
        if line.count("|") == 7
    ]
    for name, bars in bench.read_bars().items():
        script = BENCHMARKS / f"{name}.py"
        words = strings_of(script)
        assert name in words or "BENCH" in script.read_text(), name
        running = [target for target, recipe in targets.items() if recipe and name in recipe[1]]
        assert running, f"{name}: no target of BENCH runs it"
        written = [row[3] for row in rows if any(f"`{target}`" in row[4] for target in running)]
        for bar in bars:
            absent = [word for word in re.findall(r"[\w-]{3,}", bar.case) if word not in words]
            assert not absent, f"{name}, {bar.case}: no text of the script has {absent}"
            bound = bar.at_least if bar.at_least is not None else bar.at_most
            assert bound is not None, f"{name}, {bar.case}: it has no bound"
            assert any(
                bar.text in cell if bar.text else str(bound) in cell or f"{bound:.2f}" in cell
                for cell in written
            ), f"{name}, {bar.case}: {bar.text or bound} is no bar of RESULTS.md: {written}"
