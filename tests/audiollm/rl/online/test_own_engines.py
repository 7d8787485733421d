"""An engine of a user's own, by its import path: it samples, its source counts, and its faults are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from audiollm.files.atomic import read_jsonl
from audiollm.recipe.stages import load_recipe
from tests.audiollm.families.dual_ffn.packed_samples import save_model
from tests.audiollm.rl.online.own_engines import OWN_ENGINES, TwoParts
from tests.audiollm.rl.online.prompt_records import write_prompts
from tests.audiollm.rl.online.stage_runs import error_of, run, write_recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "llm", "features")
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_samples_in_the_place_of_ours(folder: Path) -> None:
    ours = run(folder, "ours", steps=10, evaluations=1)
    TwoParts.announced = 0
    own = run(folder, "own", steps=10, evaluations=1, rollouts=f"{OWN_ENGINES}TwoParts")
    assert TwoParts.announced >= 10  # before every step
    for step in range(10):
        rows = [read_jsonl(out / "rollouts" / f"{step:06d}.jsonl") for out in (ours, own)]
        assert [row["answer"] for row in rows[0]] == [row["answer"] for row in rows[1]]


def test_its_source_is_part_of_the_fingerprint(folder: Path) -> None:
    shutil.copy(Path(__file__).parent / "own_engines.py", folder / "my_engine.py")

    def fingerprint() -> str:
        (stage,) = load_recipe(write_recipe(folder, rollouts="my_engine:TwoParts"), runs=folder).stages
        return stage.fingerprint({})

    before = fingerprint()
    assert fingerprint() == before
    (folder / "my_engine.py").write_text((folder / "my_engine.py").read_text() + "\n# other\n")
    assert fingerprint() != before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Forgetful", "no log-probability of its tokens"),
        ("Backwards", "and asked for were [0, 1, 2, 3], in this order"),
        ("NOT_CALLABLE", "int cannot be called"),
        ("no_engine", "dict has no method sample"),
        ("broken", "cannot be made: RuntimeError: no such card"),
        ("Missing", "cannot be imported"),
    ],
)
def test_what_is_wrong_with_it_is_named(folder: Path, name: str, reason: str) -> None:
    assert reason in error_of(folder, rollouts=OWN_ENGINES + name)
    assert not (folder / "bad" / "train_policy" / "rollouts").exists()


def test_a_path_that_is_none_is_refused(folder: Path) -> None:
    assert "no import path" in error_of(folder, rollouts="engine")
