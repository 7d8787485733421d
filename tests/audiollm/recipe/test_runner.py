"""Stages: done ones are skipped, changed ones run again, killed ones resume, failed ones are reported."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import Context, ResourceMeter, read_result, run_recipe
from audiollm.recipe.stages import Recipe, RecipeStage, Stage, StageConfig, load_recipe

QUIET = Console(quiet=True)


class CountConfig(StageConfig):
    value: int = 0


def counting(
    ran: list[str], fail: Callable[[str], bool] = lambda name: False
) -> Callable[..., dict[str, Any]]:
    def run(config: CountConfig, context: Context) -> dict[str, Any]:
        name = context.folder.name
        ran.append(name)
        kept = context.folder / "partial"
        seen = kept.exists()
        kept.touch()
        if fail(name):
            raise StageError("it broke", "mend it", exit_code=3)
        (context.folder / "out.txt").write_text(str(config.value))
        return {"resumed": seen, "results": sorted(context.results)}

    return run


def recipe_of(folder: Path, ran: list[str], values: dict[str, int], **options: Any) -> Recipe:
    """Stages a -> b -> c and a report; b reads a, c reads b."""
    run = counting(ran, **options)
    stages = []
    for name, upstream in (("a", ()), ("b", ("a",)), ("c", ("b",)), ("report", ("a", "b", "c"))):
        is_report = name == "report"
        stage = Stage(name, CountConfig, run, {"out": "out.txt"}, "counts", reads_run=is_report)
        config = CountConfig(value=values.get(name, 0))
        stages.append(RecipeStage(name, stage, config, folder / name, upstream, ()))
    return Recipe("demo", Path("demo.yaml"), "tiny", 0, folder, tuple(stages), {})


def test_paths_may_be_spelled_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, data = tmp_path / "project", tmp_path / "data"
    for folder in (project / "recipes", project / "runs", data / "clips"):
        folder.mkdir(parents=True)
    (data / "clips" / "ä.wav").write_bytes(b"sound")
    (project / "recipes" / "tasks.yaml").write_text("{}\n")
    (project / "recipes" / "demo.yaml").write_text("""\
audio: null
stages:
  - annotate: {input: "${audio}"}
  - compose: {segments: "${annotate.segments}", tasks: {tts: 1.0}, tasks_file: "${here}/tasks.yaml"}
""")

    def prints(working: Path, recipe: str, audio: str, runs: str) -> list[str]:
        monkeypatch.chdir(working)
        known: dict[str, str] = {}
        for stage in load_recipe(Path(recipe), [f"audio={audio}"], runs=Path(runs)).stages:
            known[stage.name] = stage.fingerprint(known)
        return list(known.values())

    usual = prints(project, "recipes/demo.yaml", "../data/clips", "runs")
    assert usual == prints(project, f"{project}/recipes/demo.yaml", f"{data}/clips", "runs")
    assert usual == prints(data, "../project/recipes/demo.yaml", "clips", f"{project}/runs")
    assert usual == prints(tmp_path, "project/./recipes/demo.yaml", "data/clips", "project/runs")
    os.utime(project / "recipes" / "tasks.yaml", ns=(0, 0))
    assert (
        prints(project, "recipes/demo.yaml", "../data/clips", "runs") == usual
    )  # the same content, copied later
    (project / "recipes" / "tasks.yaml").write_text("{} # another\n")
    changed = prints(project, "recipes/demo.yaml", "../data/clips", "runs")
    assert (changed[0] == usual[0], changed[1] == usual[1]) == (True, False)
    (project / "other").mkdir()
    (project / "other" / "ä.wav").write_bytes(b"sound")
    assert prints(project, "recipes/demo.yaml", "other", "runs")[0] != usual[0]


def test_second_run_skips_everything(tmp_path: Path) -> None:
    ran: list[str] = []
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    assert ran == ["a", "b", "c", "report"]


def test_a_change_reruns_what_depends_on_it_and_nothing_else(tmp_path: Path) -> None:
    ran: list[str] = []
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    run_recipe(recipe_of(tmp_path, ran, {"b": 5}), QUIET)
    assert ran[4:] == ["b", "c", "report"]
    assert (tmp_path / "b" / "out.txt").read_text() == "5"
    result = read_result(tmp_path / "b")
    assert result is not None and result.figures["resumed"] is False  # it began with an empty folder


def test_what_was_trained_is_kept_beside_when_settings_change(tmp_path: Path) -> None:
    """One attempt back; a stage without a checkpoint is removed."""
    for value in (1, 2, 3):
        run_recipe(recipe_of(tmp_path, [], {"a": value, "b": value}), QUIET)
        (tmp_path / "a" / "checkpoint").mkdir()
        before = tmp_path / "a.before"
        assert not before.exists() if value == 1 else (before / "out.txt").read_text() == str(value - 1)
    assert (before / "checkpoint").is_dir() and not (tmp_path / "b.before").exists()
    result = read_result(tmp_path / "a")
    assert result is not None and result.figures["resumed"] is False


def test_a_trained_stage_that_keeps_files_is_kept_beside_without_them(tmp_path: Path) -> None:
    """The verdicts of a judge stay in the stage's folder; the checkpoint and the model go to `a.before`."""
    for value in (1, 2):
        recipe = recipe_of(tmp_path, [], {"a": value})
        a = recipe.stages[0]
        keeping = replace(a, stage=replace(a.stage, keeps=("verdicts", "absent")))
        run_recipe(replace(recipe, stages=(keeping, *recipe.stages[1:])), QUIET)
        if value == 1:
            (tmp_path / "a" / "checkpoint").mkdir()
            (tmp_path / "a" / "verdicts").mkdir()
            (tmp_path / "a" / "verdicts" / "judge.jsonl").write_text("{}")
    before = tmp_path / "a.before"
    assert (before / "checkpoint").is_dir() and (before / "out.txt").read_text() == "1"
    assert (tmp_path / "a" / "verdicts" / "judge.jsonl").read_text() == "{}"
    assert not (before / "verdicts").exists() and not (tmp_path / "a" / "checkpoint").exists()


def test_a_lost_artifact_is_made_again(tmp_path: Path) -> None:
    ran: list[str] = []
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    (tmp_path / "b" / "out.txt").unlink()
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    assert ran[4:] == ["b"]


def test_failure_keeps_the_folder_reports_and_resumes(tmp_path: Path) -> None:
    ran: list[str] = []
    with pytest.raises(StageError, match="mend it") as caught:
        run_recipe(recipe_of(tmp_path, ran, {}, fail=lambda name: name == "b"), QUIET)
    assert caught.value.exit_code == 3
    assert ran == ["a", "b", "report"]
    result, report = read_result(tmp_path / "b"), read_result(tmp_path / "report")
    assert result is not None and (result.state, result.error) == ("failed", "it broke\n  mend it")
    assert report is not None and report.figures["results"] == ["a", "b"]
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    assert ran[3:] == ["b", "c", "report"]
    resumed = read_result(tmp_path / "b")
    assert resumed is not None and resumed.figures["resumed"] is True


def test_the_report_of_a_failure_is_announced(tmp_path: Path) -> None:
    """Else its "done in 8 s" reads as that of the stage that failed."""
    output = io.StringIO()
    with pytest.raises(StageError):
        run_recipe(
            recipe_of(tmp_path, [], {}, fail=lambda name: name == "b"), Console(file=output, width=100)
        )
    lines = [line.strip() for line in output.getvalue().splitlines()]
    assert lines.index("b failed; report: counts") == len(lines) - 2 and lines[-1].startswith("done in")


def test_settings_that_a_stage_finds_wrong_end_it_as_failed(tmp_path: Path) -> None:
    def refuses(config: CountConfig, context: Context) -> dict[str, Any]:
        raise ConfigError("model_type: no such codec: 'x'", "codec/config.json", "give another")

    ran: list[str] = []
    recipe = recipe_of(tmp_path, ran, {})
    a = recipe.stages[0]
    refusing = replace(a, stage=replace(a.stage, run=refuses))
    with pytest.raises(ConfigError, match="no such codec"):
        run_recipe(replace(recipe, stages=(refusing, *recipe.stages[1:])), QUIET)
    assert ran == ["report"]
    result = read_result(tmp_path / "a")
    assert result is not None and result.state == "failed"
    assert result.error == "codec/config.json  model_type: no such codec: 'x'\n  give another"
    run_recipe(recipe, QUIET)
    assert ran == ["report", "a", "b", "c", "report"]


def test_from_and_only(tmp_path: Path) -> None:
    ran: list[str] = []
    with pytest.raises(ConfigError, match="needs 'a'"):
        run_recipe(recipe_of(tmp_path, ran, {}), QUIET, only="b")
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET, start="b")
    assert ran[4:] == ["b", "c", "report"]
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET, only="b")
    assert ran[7:] == ["b"]
    with pytest.raises(ConfigError, match="no such stage"):
        run_recipe(recipe_of(tmp_path, ran, {}), QUIET, start="x")


def test_a_torn_stage_file_means_not_done(tmp_path: Path) -> None:
    ran: list[str] = []
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    (tmp_path / "c" / "stage.json").write_text('{"name": "c", "ki')
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    assert ran[4:] == ["c"]


def test_time_and_memory_are_kept_over_attempts(tmp_path: Path) -> None:
    ran: list[str] = []
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    file = tmp_path / "c" / "stage.json"
    earlier = {"state": "running", "seconds": 100.0, "cpu_seconds": 50.0, "peak_memory_mb": 1e6}
    file.write_text(json.dumps(json.loads(file.read_text()) | earlier))
    run_recipe(recipe_of(tmp_path, ran, {}), QUIET)
    result = read_result(tmp_path / "c")
    assert result is not None and result.seconds > 100 and result.peak_memory_mb == 1e6
    assert 50 <= result.cpu_seconds < 60


def test_the_cpu_time_of_children_counts_while_they_live_and_afterwards(tmp_path: Path) -> None:
    busy = (
        "import sys, time\nwhile time.process_time() < 0.7: pass\nprint('done', flush=True)\nsys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    with ResourceMeter(tmp_path / "stage.json", {"name": "a", "kind": "a", "fingerprint": ""}, None) as meter:
        child.stdout.readline()
        alive = meter.write("running")
        child.stdin.close()
        child.wait()
        after = meter.write("done")
    assert 0.3 < alive.cpu_seconds <= after.cpu_seconds  # what it spent before the meter began is not counted
    with ResourceMeter(tmp_path / "stage.json", {"name": "b", "kind": "b", "fingerprint": ""}, None) as meter:
        assert meter.write("done").cpu_seconds < alive.cpu_seconds
