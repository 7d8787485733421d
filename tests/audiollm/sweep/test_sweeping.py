"""Sweeps of a toy recipe: the optimum, shared stages, pruning, the final run, and the page."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import DamagedFile, write_json
from audiollm.recipe.runner import read_result
from audiollm.recipe.stages import load_recipe
from audiollm.sweep.command import sweep
from audiollm.sweep.figures import Figure, read_figure
from audiollm.sweep.ledger import SweepLedger, SweepRecord, Trial
from audiollm.sweep.study import front

Starts = Callable[[], Counter[str]]
LOSS = ("--minimize", "fit.loss")
RATE, WIDTH, BIAS = "fit.learning_rate=log(1e-5,1e-1)", "fit.width=int(4,32)", "fit.bias=[true,false]"
FOLDER = Path("runs/toy/sweep")


def run_sweep(*arguments: str) -> str:
    """The command's output.

    Raises:
        what the command raises.
    """
    app = typer.Typer()
    app.command()(sweep)
    result = CliRunner().invoke(app, ["toy.yaml", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def record_of(folder: Path = FOLDER) -> SweepRecord:
    return SweepLedger(folder / "ledger.jsonl").record


@pytest.mark.usefixtures("inline_runs")
def test_tpe_finds_the_optimum(toy: Path) -> None:
    """Close to 1e-3, 16 and no bias. As many random draws come to 0.52."""
    run_sweep(*LOSS, RATE, WIDTH, BIAS, "--trials", "22", "--seed", "1")
    best = front(list(record_of().trials.values()), [Figure("fit", "loss")])[0]
    assert best.figures["fit.loss"] < 0.1
    assert abs(math.log10(float(best.parameters["fit.learning_rate"])) + 3) < 0.3
    assert abs(float(best.parameters["fit.width"]) - 16) <= 3 and best.parameters["fit.bias"] == "false"


@pytest.mark.usefixtures("inline_runs")
def test_shared_stages_run_once_and_the_final_figures_are_the_winners(
    toy: Path, stage_starts: Starts
) -> None:
    command = (*LOSS, RATE, BIAS, "--trials", "5", "--confirm", "2", "--final", "score_test")
    run_sweep(*command)
    trials = {f"trial_{number:04d}/fit": 1 for number in range(5)}
    best = min(record_of().in_state("done"), key=lambda trial: trial.figures["fit.loss"])
    seeds = {f"confirm_{best.number:04d}_{seed}/fit": 1 for seed in (1, 2)}
    assert stage_starts() == {"toy/data": 1, **trials, **seeds, "final/score_test": 1}
    record = record_of()
    assert record.final is not None and record.final["trial"] == best.number
    assert record.final["figures"] == {"score_test": {"quality": -best.figures["fit.loss"], "held_out": 1.0}}
    further = [run["figures"]["fit.loss"] for run in record.confirmations[best.number].values()]
    assert further == pytest.approx([best.figures["fit.loss"] + 0.01, best.figures["fit.loss"] + 0.02])
    before = (FOLDER / "ledger.jsonl").read_bytes()
    run_sweep(*command)  # nothing is left to do
    assert stage_starts().total() == 9 and (FOLDER / "ledger.jsonl").read_bytes() == before


@pytest.mark.usefixtures("inline_runs")
def test_the_shared_stages_of_a_finished_run_are_used(toy: Path, stage_starts: Starts) -> None:
    from rich.console import Console

    from audiollm.recipe.runner import run_recipe

    run_recipe(load_recipe(Path("toy.yaml")), Console(quiet=True))
    run_sweep(*LOSS, RATE, "--trials", "2")
    assert stage_starts()["toy/data"] == 1 and stage_starts()["toy/fit"] == 1


@pytest.mark.usefixtures("inline_runs")
def test_a_held_out_split_is_scored_once(toy: Path, stage_starts: Starts) -> None:
    """By an override of a stage that the figures depend on; then neither more trials nor another winner."""
    command = ("--maximize", "score.quality", RATE, "--final-override", "score.split=test")
    run_sweep(*command, "--trials", "3")
    record = record_of()
    assert record.final is not None
    assert record.final["figures"]["score"]["held_out"] == 1.0
    assert stage_starts()["final/score"] == 1 and not stage_starts()["final/fit"]
    for more in (["--trials", "4"], ["--trials", "3", "--pick", str((record.final["trial"] + 1) % 3)]):
        with pytest.raises(ConfigError, match="has been scored"):
            run_sweep(*command, *more)
    with pytest.raises(ConfigError, match="another one"):
        run_sweep(*command[:-1], "score.split=train", "--trials", "3")


@pytest.mark.usefixtures("inline_runs")
def test_a_trial_that_falls_behind_is_pruned(toy: Path) -> None:
    run_sweep(*LOSS, RATE, WIDTH, "--prune-by", "fit.evaluation/loss", "--trials", "12")
    record = record_of()
    pruned, done = record.in_state("pruned"), record.in_state("done")
    assert pruned and len(pruned) + len(done) == 12
    for trial in pruned:
        step, value = trial.evaluations[-1]
        assert (
            trial.number >= 4 and 2 <= step < 8
        )  # not before four have finished, nor at the first evaluation
        finished = [rival.evaluations[step - 1][1] for rival in done if rival.number < trial.number]
        assert value > statistics.median(finished)


@pytest.mark.usefixtures("inline_runs")
def test_evaluations_of_which_larger_is_better_prune_the_smaller(toy: Path) -> None:
    """The same column, read the other way round: the better trials are ended."""
    run_sweep(*LOSS, RATE, "--prune-by", "fit.evaluation/loss:max", "--trials", "12")
    record = record_of()
    worst_done = max(trial.figures["fit.loss"] for trial in record.in_state("done"))
    losses = [value - 4 / step for trial in record.in_state("pruned") for step, value in trial.evaluations]
    assert losses and max(losses) < worst_done


@pytest.mark.usefixtures("inline_runs")
def test_a_grid_has_every_combination_once(toy: Path) -> None:
    run_sweep(*LOSS, "fit.width=int(15,17)", BIAS, "fit.learning_rate=1e-3", "--sampler", "grid")
    parameters = [tuple(trial.parameters.values()) for trial in record_of().in_state("done")]
    assert sorted(parameters) == [(width, bias) for width in (15, 16, 17) for bias in ("false", "true")]


@pytest.mark.usefixtures("inline_runs")
def test_two_figures_have_a_front(toy: Path) -> None:
    two = (*LOSS, "--minimize", "fit.cost.width", "fit.width=[4,8,12,20]", "fit.bias=[true,false]")
    run_sweep(*two, "--sampler", "grid")
    page = (FOLDER / "report.html").read_text()
    assert page.count("★") == 4 and "--pick NUMBER" in page and not (FOLDER / "best.yaml").exists()
    number = next(
        trial.number for trial in record_of().in_state("done") if trial.parameters["fit.width"] == "8"
    )
    run_sweep(*two, "--sampler", "grid", "--pick", str(number), "--final", "score_test")
    record = record_of()
    assert record.final is not None and record.final["trial"] == number


def test_the_front_of_equal_trials_is_the_first() -> None:
    figures = [Figure("a", "x"), Figure("a", "y", is_larger_better=True)]
    values = [(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (2.0, 3.0)]
    trials = [Trial(number, {}, "done", {"a.x": x, "a.y": y}) for number, (x, y) in enumerate(values)]
    assert [trial.number for trial in front(trials, figures)] == [0, 3]


@pytest.mark.usefixtures("inline_runs")
def test_failed_trials_are_listed_and_run_again_when_asked(toy: Path, stage_starts: Starts) -> None:
    command = (*LOSS, RATE, "--trials", "8", "--sampler", "random")
    run_sweep(*command, "fit.highest_rate=0.01")
    failed = record_of().in_state("failed")
    assert failed and all("the loss is not finite" in trial.error for trial in failed)
    assert all(float(trial.parameters["fit.learning_rate"]) > 0.01 for trial in failed)
    assert "the loss is not finite" in (FOLDER / "report.html").read_text()
    run_sweep(*command, "fit.highest_rate=0.01", "--retry-failed")
    starts = stage_starts()
    assert {trial.number for trial in record_of().in_state("failed")} == {trial.number for trial in failed}
    assert all(starts[f"trial_{trial.number:04d}/fit"] == 2 for trial in failed)
    with pytest.raises(StageError, match="the first 3 trials failed"):
        run_sweep(*command, "fit.highest_rate=1e-9", "--sweep-name", "none")


@pytest.mark.usefixtures("inline_runs")
def test_a_figure_that_the_stage_lacks_ends_the_sweep_at_once(toy: Path, stage_starts: Starts) -> None:
    with pytest.raises(StageError, match=r"did you mean 'loss'"):
        run_sweep("--minimize", "fit.los", RATE, "--trials", "3")
    assert stage_starts().total() == 2
    run_sweep(
        "--minimize", "fit.loss", RATE, "--trials", "3"
    )  # the name is mended, and the same folder serves
    assert len(record_of().in_state("done")) == 3 and stage_starts().total() == 4


@pytest.mark.usefixtures("inline_runs")
def test_another_sweep_in_the_same_folder_is_refused(toy: Path) -> None:
    run_sweep(*LOSS, RATE, "--trials", "1")
    for arguments, reason in (
        ([*LOSS, RATE, WIDTH], "spaces"),
        ([*LOSS, RATE, "fit.width=9"], "fixed"),
        ([*LOSS, RATE, "--seed", "1"], "seed"),
        ([*LOSS, RATE, "--sampler", "random"], "sampler"),
    ):
        with pytest.raises(ConfigError, match=f"{reason}: .*when this sweep began"):
            run_sweep(*arguments)
    recipe = Path("toy.yaml").read_text()
    Path("toy.yaml").write_text(recipe.replace("size: 3", "size: 4"))
    with pytest.raises(ConfigError, match="data, fit: settings, inputs or source changed"):
        run_sweep(*LOSS, RATE, "--trials", "2")


@pytest.mark.usefixtures("inline_runs")
def test_cpu_minutes_end_a_sweep(toy: Path) -> None:
    run_sweep(*LOSS, RATE, "--cpu-minutes", "0.0001")
    record = record_of()
    spent = [trial.cpu_seconds for trial in record.in_state("done")]
    assert sum(spent) >= 0.006 > sum(spent[:-1])


@pytest.mark.usefixtures("inline_runs")
def test_the_winners_recipe_has_its_settings(toy: Path) -> None:
    (toy / "elsewhere").mkdir()
    (toy / "toy.yaml").rename(toy / "elsewhere" / "toy.yaml")
    recipe = (toy / "elsewhere" / "toy.yaml").read_text()
    (toy / "elsewhere" / "data.json").write_text("{}")
    (toy / "toy.yaml").write_text("base: elsewhere/toy.yaml\nwidth: 5\n")
    (toy / "elsewhere" / "toy.yaml").write_text(
        recipe.replace('{data: "${data.data}"}', '{data: "${here}/elsewhere/data.json", width: "${width}"}')
    )
    run_sweep(*LOSS, RATE, "width=int(4,32)", "--trials", "3")
    best = min(record_of().in_state("done"), key=lambda trial: trial.figures["fit.loss"])
    settings = load_recipe(FOLDER / "best.yaml").stages[1].settings()
    result = read_result(FOLDER / f"trial_{best.number:04d}" / "fit")
    assert result is not None and result.settings == settings
    assert settings["width"] == best.parameters["width"]


@pytest.mark.usefixtures("inline_runs")
def test_the_page_has_what_it_must(toy: Path) -> None:
    run_sweep(*LOSS, RATE, WIDTH, BIAS, "--trials", "5", "--confirm", "2")
    page = (FOLDER / "report.html").read_text()
    text = re.sub(r"<[^>]+>", " ", page)
    record = record_of()
    for trial in record.in_state("done"):
        assert f"{trial.figures['fit.loss']:.5g}" in text
        assert f"{float(trial.parameters['fit.learning_rate']):.4g}" in text
    for sentence in (
        "no held-out figure",
        "fit.loss over the trials",
        "optuna's PED-ANOVA",
        "standard deviation",
        "audiollm run runs/toy/sweep/best.yaml --name toy-sweep-best",
        "fit.learning_rate=log(1e-5,1e-1)",
    ):
        assert sentence in page.replace("&#39;", "'"), sentence
    shares = [float(share) for share in re.findall(r"</span> (0\.\d\d)<", page)]
    assert len(shares) == 3 and sum(shares) == pytest.approx(1, abs=0.02)
    run_sweep(*LOSS, RATE, WIDTH, BIAS, "--trials", "5", "--confirm", "2", "--final", "score_test")
    page = (FOLDER / "report.html").read_text()
    assert "no held-out figure" not in page and "score_test.quality" in page


@pytest.mark.usefixtures("inline_runs")
def test_long_choices_stand_below_their_chart_by_number(toy: Path) -> None:
    run_sweep(*LOSS, "fit.learning_rate=[0.0123456789012,0.0223456789012]", "--sampler", "grid")
    assert "1: 0.0123456789012; 2: 0.0223456789012" in (FOLDER / "report.html").read_text()


@pytest.mark.usefixtures("inline_runs")
def test_a_dry_run_lists_the_stages_and_runs_none(toy: Path, stage_starts: Starts) -> None:
    arguments = (*LOSS, WIDTH, BIAS, "--sampler", "grid", "--final", "score_test", "--dry-run")
    output = run_sweep(*arguments)
    for line in (
        "shared stages, once, in runs/toy: data",
        "stages of each trial, in runs/toy/sweep: fit",
        "for the winner alone: score_test",
        "no figure depends on them: score\n",
        "58 trials by grid",
    ):
        assert line in output, output
    assert not stage_starts() and not Path("runs").exists()


def test_a_figure_is_of_the_result_or_the_last_evaluation(tmp_path: Path) -> None:
    figures = {"loss": 1, "words": {"rate": 0.5, "dtw": None}, "name": "x", "is_good": True}
    write_json(
        tmp_path / "stage.json",
        {**dict.fromkeys(("name", "kind", "fingerprint"), "a"), "state": "done", "figures": figures},
    )
    rows = [
        {"step": 5, "evaluation/loss": 2.0},
        {"step": 6, "loss": 9.0},
        {"step": 9, "evaluation/loss": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 10, "eval'
    )
    values = {
        name: read_figure(Figure("fit", name), tmp_path) for name in ("loss", "words.rate", "evaluation/loss")
    }
    assert values == {"loss": 1.0, "words.rate": 0.5, "evaluation/loss": 1.5}
    assert math.isnan(read_figure(Figure("fit", "words.dtw"), tmp_path))
    for name in ("name", "is_good", "words", "evaluation/los"):
        with pytest.raises(StageError, match="no such figure"):
            read_figure(Figure("fit", name), tmp_path)


def test_a_line_that_a_kill_cut_short_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = SweepLedger(path)
    header: dict[str, Any] = {"seed": 0, "stages": {"fit": "a"}}
    ledger.begin(header)
    ledger.write("begin", trial=0, parameters={"x": 0.1})
    content = path.read_bytes()
    for cut in range(len(content) - 1, len(content) - 20, -1):
        path.write_bytes(content[:cut])
        again = SweepLedger(path)
        assert not again.record.trials and path.read_bytes() == content[:cut]
        again.begin(header)
        again.write("begin", trial=0, parameters={"x": 0.1})
        assert path.read_bytes() == content
    path.write_bytes(b"nonsense\n" + content)
    with pytest.raises(DamagedFile, match="line 1"):
        SweepLedger(path)
    assert [json.loads(line)["event"] for line in content.splitlines()] == ["sweep", "begin"]


@pytest.mark.usefixtures("inline_runs")
def test_a_sweep_goes_on_from_another_working_directory(
    toy: Path, stage_starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recordings beside the folder of all runs are the same ones wherever the command is called."""
    (toy / "data.json").write_text("{}")
    recipe = Path("toy.yaml").read_text()
    Path("toy.yaml").write_text(recipe.replace("${data.data}", "${here}/data.json"))
    monkeypatch.syspath_prepend(str(toy))
    run_sweep(*LOSS, RATE, "--trials", "2", "--sampler", "random")
    (toy / "inner").mkdir()
    monkeypatch.chdir(toy / "inner")
    app = typer.Typer()
    app.command()(sweep)
    words = ["../toy.yaml", *LOSS, RATE, "--trials", "3", "--sampler", "random", "--runs", str(toy / "runs")]
    result = CliRunner().invoke(app, words)
    assert result.exception is None
    assert stage_starts() == {f"trial_{number:04d}/fit": 1 for number in range(3)}
