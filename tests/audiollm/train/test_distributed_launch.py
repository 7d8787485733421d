"""Ranks under torchrun, SLURM and `--launch`; launched processes share what trains, and fail together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from audiollm.recipe.ranks import first_host, rank_environment


def test_a_process_knows_its_rank_from_torchrun_and_from_slurm() -> None:
    assert rank_environment({}) is None
    assert rank_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert rank_environment({**torchrun, "HOME": "/"}) == torchrun
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT not"):
        rank_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    batch_script = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}
    assert rank_environment(batch_script) is None
    step = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    found = rank_environment({**batch_script, **step, "SLURM_STEP_NODELIST": "gpu[03-07,12],login"})
    assert (
        found is not None and found["MASTER_ADDR"] == "gpu03" and 20_000 <= int(found["MASTER_PORT"]) < 40_000
    )
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("9", "16", "1")
    assert [first_host(nodes) for nodes in ("n1", "n1,n2", "a-[1,4]", "rack2-gpu[007-9]")] == [
        "n1", "n1", "a-1", "rack2-gpu007",
    ]  # fmt: skip


LAUNCHED = """
import os
import sys
from pathlib import Path

from rich.console import Console

from audiollm.recipe.stages import Recipe, RecipeStage, Stage, StageConfig
from audiollm.recipe.runner import StageError, run_recipe
from audiollm.recipe.ranks import join_ranks, launch, leave

folder, fails = Path(sys.argv[1]), sys.argv[2]


def note(name):
    def run(config, context):
        ranks = context.ranks
        total = sum(ranks.gather(ranks.rank + 1))
        if fails == f"{name}{ranks.rank}" or fails == name:
            raise StageError(f"{name} broke on rank {ranks.rank}", "mend it", 3)
        (context.folder / f"{ranks.rank}.txt").write_text(str(total))
        return {"total": total}

    return run


stages = []
for name, all_ranks in (("prepare", False), ("train", True), ("report", False)):
    stage = Stage(name, StageConfig, note(name), {}, "notes", reads_run=name == "report", all_ranks=all_ranks)
    stages.append(RecipeStage(name, stage, StageConfig(), folder / name, (), ()))
ranks = join_ranks()
recipe = Recipe("demo", Path("demo.yaml"), "tiny", 0, folder, tuple(stages), {})
try:
    run_recipe(recipe, Console(quiet=True), ranks=ranks)
except StageError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
leave(ranks)
"""


@pytest.mark.parametrize(
    ("fails", "code", "noted"),
    [
        ("none", 0, {"prepare/0.txt": "1", "train/0.txt": "3", "train/1.txt": "3", "report/0.txt": "1"}),
        pytest.param("train", 3, {"prepare/0.txt": "1", "report/0.txt": "1"}, marks=pytest.mark.slow),
        pytest.param("prepare", 3, {"report/0.txt": "1"}, marks=pytest.mark.slow),
    ],
)
def test_launched_processes_share_the_training_and_a_failure_ends_all(
    tmp_path: Path, fails: str, code: int, noted: dict[str, str]
) -> None:
    """Through the elastic launcher, in processes of their own: which ranks ran what, and what is told."""
    (tmp_path / "launched.py").write_text(LAUNCHED)
    arguments = [str(tmp_path / "run"), fails]
    start = (
        f"import sys; from audiollm.recipe.ranks import launch; sys.exit(launch(2, 'launched', {arguments}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    found = {str(p.relative_to(tmp_path / "run")): p.read_text() for p in (tmp_path / "run").glob("*/*.txt")}
    assert found == noted
    if code:
        assert f"{fails} broke on rank 0" in done.stderr


def test_the_launch_option_is_not_passed_on() -> None:
    from audiollm.commands.run import without_option

    assert without_option(["run", "a.yaml", "--launch", "8", "x=1"], "--launch") == ["run", "a.yaml", "x=1"]
    assert without_option(["run", "--launch=8", "a.yaml"], "--launch") == ["run", "a.yaml"]
