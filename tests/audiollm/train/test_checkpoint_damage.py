"""Checkpoints that were damaged, or killed while they replaced each other: named, never loaded, nothing overwritten."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_checkpoint import Reporting, readers_of
from torch import Tensor

from audiollm.errors import StageError
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.train.loop import checkpoint
from audiollm.train.loop.checkpoint import open_part, read_state, save_checkpoint, trained_weights
from audiollm.train.loop.loop import LoopConfig, train
from tests.audiollm.train.two_ranks import on_two_ranks

FILES = ("modules.safetensors", "optimizers.safetensors", "ema.safetensors", "state.json")


def weights_of(step: int) -> dict[str, Tensor]:
    return {"model.a.weight": torch.full((40, 3), float(step)), "model.b": torch.arange(5) + step}


def save_step(folder: Path, step: int) -> None:
    readers = readers_of(weights_of(step))
    save_checkpoint(folder, dict.fromkeys(("modules", "optimizers", "ema"), readers), {"step": step})


def assert_whole(folder: Path, step: int) -> None:
    assert read_state(folder) == {"step": step}
    for part in ("modules", "optimizers", "ema"):
        with open_part(folder, part) as readers:
            assert all(torch.equal(readers[name](), tensor) for name, tensor in weights_of(step).items())


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "first byte": partial(flip, place=0),
    "middle byte": lambda path: flip(path, path.stat().st_size // 2),
    "last byte": partial(flip, place=-1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_every_damage_of_every_file_is_named_and_the_one_before_is_offered(
    tmp_path: Path, file: str, damage: str
) -> None:
    folder = tmp_path / "a run's" / "checkpoint"
    save_step(folder, 6)
    save_step(folder, 7)
    assert_whole(folder, 7)
    DAMAGES[damage](folder / file)
    before = contents(tmp_path)
    with pytest.raises(StageError) as found:
        read_state(folder)
    said = str(found.value)
    assert (
        said.startswith(f"{folder / file} is ") and "step 6" in said and "Expecting" not in said.split("(")[0]
    )
    with pytest.raises(StageError, match=re.escape(str(folder / file))):
        trained_weights(folder.parent, "model")
    assert contents(tmp_path) == before, "nothing is overwritten"
    command = next(line for line in re.findall("rm -r .*", said))
    subprocess.run(command, shell=True, check=True)  # as the person would
    assert not folder.exists()
    assert_whole(folder, 6)


def test_every_single_flipped_byte_of_the_state_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_step(folder, 7)
    whole = (folder / "state.json").read_bytes()
    for place in range(len(whole)):
        for mask in (0x01, 0x10, 0x80):
            content = bytearray(whole)
            content[place] ^= mask
            (folder / "state.json").write_bytes(content)
            try:
                assert read_state(folder) == {"step": 7}
            except StageError:
                continue
            assert chr(whole[place]) == " ", "between two tokens nothing is said"


def test_where_both_are_damaged_both_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_step(folder, 6)
    save_step(folder, 7)
    flip(folder / "modules.safetensors", -1)
    (tmp_path / "checkpoint.before" / "ema.safetensors").unlink()
    with pytest.raises(StageError) as found:
        read_state(folder)
    said = str(found.value)
    assert "checkpoint/modules.safetensors" in said and "checkpoint.before/ema.safetensors" in said
    assert f"rm -r {shlex.quote(str(folder))} {shlex.quote(str(folder))}.before" in said


def test_a_checkpoint_of_an_earlier_version_is_read_and_checked_by_size(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_step(folder, 7)
    state = json.loads((folder / "state.json").read_text())
    del state["sha256"], state["state_sha256"]
    (folder / "state.json").write_text(json.dumps(state))
    assert_whole(folder, 7)
    save_step(folder, 8)
    assert_whole(folder, 8)
    shutil.rmtree(folder)
    (tmp_path / "checkpoint.before" / "ema.safetensors").write_bytes(b"short")
    with pytest.raises(StageError, match="ema.safetensors is damaged: 5 bytes"):
        read_state(folder)


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code runs."""


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Makes the `n`-th call that touches the disk the last one: half of what it would do is done."""
    calls: list[str] = []
    fatal = [-1]

    def touch(name: str, function: Callable[..., Any], half: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == fatal[0]:
                half(*args)
                raise Killed
            return function(*args, **options)

        return called

    def half_removed(path: Path) -> None:
        for file in sorted(path.iterdir())[:2] if path.exists() else ():
            file.unlink()

    def half_written(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
        path.write_bytes(b"half of it")

    nothing = lambda *args: None  # noqa: E731
    monkeypatch.setattr(os, "replace", touch("replace", os.replace, nothing))
    monkeypatch.setattr(os, "fsync", touch("fsync", os.fsync, nothing))
    monkeypatch.setattr(shutil, "rmtree", touch("rmtree", shutil.rmtree, half_removed))
    monkeypatch.setattr(checkpoint, "save_file", touch("save", checkpoint.save_file, half_written))

    def arm(number: int) -> list[str]:
        calls.clear()
        fatal[0] = number
        return calls

    return arm


def test_a_kill_at_any_point_of_a_save_leaves_two_whole_checkpoints(
    tmp_path: Path, killer: Callable[[int], list[str]]
) -> None:
    calls = killer(-1)
    reference = tmp_path / "reference" / "checkpoint"
    save_step(reference, 1)
    save_step(reference, 2)
    calls.clear()
    save_step(reference, 3)
    points = len(calls)
    assert points > 10 and calls.count("replace") == 3
    for point in range(1, points + 1):
        killer(-1)
        folder = tmp_path / f"{point}" / "checkpoint"
        for step in (1, 2):
            save_step(folder, step)
        killer(point)
        with pytest.raises(Killed):
            save_step(folder, 3)
        killer(-1)
        state = read_state(folder)
        assert state in ({"step": 2}, {"step": 3}), point
        assert_whole(folder, state["step"])
        shutil.rmtree(folder)  # the newest was damaged, and the person takes the one before
        assert_whole(folder, state["step"] - 1)
        save_step(folder, 4)
        assert_whole(folder, 4)
        assert_whole(folder.with_name("checkpoint.before"), state["step"] - 1)


def test_a_kill_at_any_point_of_the_first_save_leaves_none_or_all(
    tmp_path: Path, killer: Callable[[int], list[str]]
) -> None:
    calls = killer(-1)
    save_step(tmp_path / "reference" / "checkpoint", 1)
    for point in range(1, len(calls) + 1):
        folder = tmp_path / f"{point}" / "checkpoint"
        killer(point)
        with pytest.raises(Killed):
            save_step(folder, 1)
        killer(-1)
        assert read_state(folder) in (None, {"step": 1})
        save_step(folder, 2)
        assert_whole(folder, 2)


def test_the_files_and_the_folder_are_on_the_disk_before_the_older_checkpoint_moves(
    tmp_path: Path, killer: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    save_step(folder, 1)
    calls, synced = killer(-1), []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd))
    )
    save_step(folder, 2)
    new = tmp_path / "checkpoint.new"
    assert {str(new / name) for name in FILES} | {str(new), str(tmp_path)} == set(synced)
    first_rename = calls.index("replace")
    assert calls[:first_rename].count("fsync") == len(FILES) + 1 and calls[first_rename:].count("fsync") == 1


def trained(folder: Path, steps: int, rollbacks: int = 0) -> None:
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    config = LoopConfig(
        seed=1, steps=steps, minutes=None, learning_rate=0.01, warmup_steps=2, schedule="constant", ema_decay=0.9,
        log_every=2, evaluate_every=3, best="ones", checkpoint_seconds=0.0, precision="fp32", report_to=(),
        rollbacks=rollbacks,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    context = Context(folder, recipe, Console(quiet=True), {})
    train(Reporting(lambda moment: None), config, folder, context, torch.device("cpu"))


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_run_does_not_begin_again_where_its_state_is_damaged(tmp_path: Path, damage: str) -> None:
    trained(tmp_path / "run", 7)
    trained(tmp_path / "whole", 9)
    DAMAGES[damage](tmp_path / "run" / "checkpoint" / "state.json")
    before = contents(tmp_path / "run")
    with pytest.raises(StageError, match=r"state\.json is .*\n.*step 6"):
        trained(tmp_path / "run", 9)
    assert contents(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    trained(tmp_path / "run", 9)
    found, expected = (contents(tmp_path / name) for name in ("run", "whole"))
    tensors = {name for name in expected if name.endswith(".safetensors") or name == "metrics.jsonl"}
    assert len(tensors) == 8 and all(found[name] == expected[name] for name in tensors), "an exact resume"


def test_a_damaged_best_does_not_go_into_the_model(tmp_path: Path) -> None:
    trained(tmp_path, 7)
    file = tmp_path / "best" / "modules.safetensors"
    flip(file, -1)
    for again in (lambda: trained_weights(tmp_path, "model"), lambda: trained(tmp_path, 9)):
        with pytest.raises(StageError, match=r"best/modules\.safetensors is damaged: .*\n.*rm -r .*best"):
            again()
    (tmp_path / "best" / "state.json").unlink()
    with pytest.raises(StageError, match=r"best/state\.json is missing"):
        trained_weights(tmp_path, "model")
    shutil.rmtree(tmp_path / "best")
    trained(tmp_path, 9)
    assert trained_weights(tmp_path, "model")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("spare", [0, 4096, 8192, 12288])
def test_a_full_disk_ends_the_save_with_a_sentence_and_the_older_ones_stay(
    small_disk: Path, spare: int
) -> None:
    folder = small_disk / "checkpoint"
    save_step(folder, 1)
    save_step(folder, 2)
    ballast = small_disk / "ballast"
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(bytes(max(0, free - spare)))
    with pytest.raises(
        StageError, match=r"could not be saved: .*the disk is full\n.*the one before it stays"
    ):
        save_step(folder, 3)
    assert not (small_disk / "checkpoint.new").exists(), "what was written in vain takes no space"
    assert_whole(folder, 2)
    ballast.unlink()
    save_step(folder, 3)
    assert_whole(folder, 3)
    assert_whole(small_disk / "checkpoint.before", 2)


def test_a_file_limit_is_met_in_the_same_way(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_step(folder, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(StageError, match=r"could not be saved: .*size limit"):
            save_step(folder, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_whole(folder, 1)


def save_together(folder: Path, step: int, ranks: Ranks) -> None:
    readers = readers_of(weights_of(step))
    save_checkpoint(folder, {"modules": readers, "ema": readers}, {"step": step}, ranks)


def two_ranks_meet_damage(folder: Path, ranks: Ranks) -> None:
    """An error on one rank is raised on both: neither waits for the other for ever."""
    newest = folder / "checkpoint"
    for step in (1, 2):
        save_together(newest, step, ranks)
    assert read_state(newest, ranks) == {"step": 2}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not ranks.first:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60, limits[1]))
    with pytest.raises(StageError, match="could not be saved: .*size limit"):
        save_together(newest, 3, ranks)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_state(newest, ranks) == {"step": 2}
    for file in ("modules-00001-of-00002.safetensors", "ema-00002-of-00002.safetensors", "state.json"):
        whole = (newest / file).read_bytes()
        ranks.barrier()
        if ranks.first:
            flip(newest / file, -1)
        ranks.barrier()
        with pytest.raises(StageError, match=rf"checkpoint/{file} is damaged: .*\n.*step 1"):
            read_state(newest, ranks)
        ranks.barrier()
        if ranks.first:
            (newest / file).write_bytes(whole)
        ranks.barrier()
    if ranks.first:
        shutil.rmtree(newest)
    ranks.barrier()
    assert read_state(newest, ranks) == {"step": 1}


def test_two_ranks_end_with_the_same_error(tmp_path: Path) -> None:
    on_two_ranks(two_ranks_meet_damage, tmp_path)
    assert read_state(tmp_path / "checkpoint") == {"step": 1}
