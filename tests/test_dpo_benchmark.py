"""The benchmark `dpo`: both sides take the same step on the same pairs, and the heads have equal gradients."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import dpo as bench

CASE = "equal"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dpo")
    bench.write_models(made, bench.Shape(hidden=16, intermediate=24, layers=2, heads=2))
    (made / CASE).mkdir()
    bench.write_records(made / CASE / "records.jsonl", [30, 47, 24, 36])
    return made


def test_all_sides_take_the_same_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "PAIRS", 2)
    seconds, first = bench.in_turns(folder, CASE, 1, checkpointed=True)
    assert {side: len(each) for side, each in seconds.items()} == {"peer": 1, "ours": 1, "adapter": 1}
    assert abs(first["ours"].loss - math.log(2)) > 1e-3  # the reference is another model
    bench.check_equal(CASE, first)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [max(line["difference"]) < 1e-4 for line in lines] == [True, True]
    with pytest.raises(SystemExit, match="differ by more"):
        bench.check_equal(CASE, {**first, "adapter": bench.Step(first["peer"].loss, float("nan"))})


def test_heads_have_equal_gradients() -> None:
    norms = [bench.head_cost(side, 8, 16, 300)[2] for side in bench.HEADS]
    assert norms[0] == pytest.approx(norms[2], rel=1e-5)
    assert norms[1] == pytest.approx(norms[2], rel=1e-5)
