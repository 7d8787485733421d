"""The benchmark `learn_understanding`: its chain, what it splits, and the figures that it reads out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from audiollm.files.atomic import write_json, write_jsonl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import learn_understanding as bench
import proof


def make_data(folder: Path, folds: tuple[int, ...] = (1, 2)) -> Path:
    """Empty files of the names that the two data sets have: nothing is decoded here."""
    names = [f"fsdd/recordings/7_theo_{take}.wav" for take in range(8)]
    for number, sound in ((1, "Dog bark"), (2, "Rain")):
        names += [f"esc10/{number:03d} - {sound}/{fold}-{fold}{number}-A.ogg" for fold in folds]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def recipe_of(data: Path, runs: Path) -> Any:
    segments = runs / "sounds.jsonl"
    runs.mkdir()
    write_jsonl(segments, bench.sound_segments(data / "esc10", fold=1))
    return proof.Proof(runs).load(bench.BENCH, recordings=data / "fsdd" / "recordings", segments=segments)


def test_the_recipe_is_one_that_a_user_can_run(tmp_path: Path) -> None:
    """Every setting is checked as `audiollm run` checks it."""
    recipe = recipe_of(make_data(tmp_path), tmp_path / "runs")
    stages = {stage.name: stage.config for stage in recipe.stages}
    together, alone = stages["all"], [stages[name] for name in ("speech", "digits", "sounds")]
    shown = [
        (source.weight / sum(each.weight for each in together.samples)) * together.batch_size * together.steps
        for source in together.samples
    ]
    speech, *heard = [each.batch_size * each.steps for each in alone]
    assert shown == pytest.approx([1.5 * speech, *heard])  # what is heard as often as alone
    assert together.shape == stages["digits"].shape == stages["sounds"].shape
    assert [source.augment for source in together.samples[1:]] == [
        each.samples[0].augment for each in alone[1:]
    ]


def test_the_held_out_fold_is_in_no_training(tmp_path: Path) -> None:
    data = make_data(tmp_path, folds=(1, 2, 3))
    rows = bench.sound_segments(data / "esc10", fold=2)
    assert {row["id"][0] for row in rows if row["split"] == "test"} == {"2"}
    assert {row["id"][0] for row in rows if row["split"] == "train"} == {"1", "3"}
    assert {row["sound"] for row in rows} == {"dog bark", "rain"}
    with pytest.raises(SystemExit, match="no clips of fold 5"):
        bench.sound_segments(data / "esc10", fold=5)


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer counts if it is the text itself; of the one model, what is lost is told in points."""
    for name, right in (("sounds", 8), ("all", 7)):
        rows = [{"reply": "rain " if n < right else "rain or dog bark", "answer": "rain"} for n in range(10)]
        folder = tmp_path / f"{name}_hears_sounds" / "audio-qa"
        folder.mkdir(parents=True)
        write_jsonl(folder / "rows.jsonl", rows)
    for name, right in (("digits", 98), ("all", 100)):
        rows = [{"heard_form": "one", "text_form": "one" if n < right else "two"} for n in range(99)]
        rows += [{"errors": "cannot be read", "heard": None, "missing": True}] * (right != 100)
        folder = tmp_path / f"{name}_hears_digits" / "asr"
        folder.mkdir(parents=True)
        write_jsonl(folder / "rows.jsonl", rows)
    for name, text, voice in (("speech", 0.98, 0.95), ("all", 0.96, 0.91)):
        scores = {
            "relative": {"classifier": text},
            "sets": {"generated": {"n": 180, "speaker": {"accuracy": voice}}},
        }
        scores["sets"]["generated"]["speaker"] |= {"low": 0.8, "high": 1.0, "n": 180}
        (tmp_path / f"{name}_judged").mkdir()
        write_json(tmp_path / f"{name}_judged" / "scores.json", scores)
    bench.report(tmp_path, fold=1)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["ours"] for line in lines] == [0.98, 0.8, 1.0, 0.7, 0.96, 0.91]
    assert [line["peer"] for line in lines] == [0.99, 0.75, 0.98, 0.8, 0.98, 0.95]
    assert [line.get("points_lost") for line in lines] == [None, None, -2.0, 10.0, 2.0, 4.0]
    assert [line["kept"] for line in lines[2:]] == [True, False, True, False]
    low, high = lines[1]["interval"]
    assert low == pytest.approx(0.490, abs=1e-3) and high == pytest.approx(0.943, abs=1e-3)  # Wilson, by hand
    assert all({"bench", "case", "ours", "peer", "ratio", "unit"} <= set(line) for line in lines)
