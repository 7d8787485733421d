"""Whatever file of a finished run is damaged: no command ends in a traceback, and the file is named."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.commands import cli
from audiollm.files.atomic import (
    DamagedFile,
    read_json,
    read_jsonl,
    read_record,
    read_whole_lines,
    write_json,
)
from audiollm.files.disk_errors import disk_error
from audiollm.train.loop.budget import steps_of_budget
from audiollm.train.loop.guard import LeftOut
from audiollm.train.settings import LoopConfig
from tests.audiollm.supervised.train_samples import write_shards
from tests.forked import run_command
from tokenizer.native.model import AudioTokenizer, TokenizerConfig

RECIPE = """
name: any
stages:
  - train:
      samples: a
      codec: codec
      eval_audio_samples: 1
      steps: 10
      batch_size: 3
      precision: fp32
      report_to: []
      keep_best: true
      checkpoint_seconds: 0
      evaluations: 3
      ema_decay: 0.9
      shape: {hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64}
  - report: {}
"""
RUN = ("run", "recipe.yaml", "--runs", "runs", "--name", "r")
TRAIN, REPORT = (*RUN, "--only", "train"), (*RUN, "--only", "report")
SPEAK = ("generate", "--model", "runs/r/train", "--codec", "codec", "--text", "seven", "-o", "out.wav",
         "--max-duration-s", "0.3", "--text-guidance", "1", "--speaker-guidance", "1")  # fmt: skip
RESUMED = [
    *(f"{one}/{file}" for one in ("checkpoint", "best") for file in ("state.json", "modules.safetensors")),
    "checkpoint/optimizers.safetensors", "checkpoint/ema.safetensors", "metrics.jsonl", "performance.jsonl",
    "survey.safetensors", "vocabulary/tokenizer.json", "vocabulary/digest.json", "stage.json",
    "set_aside.jsonl", "left_out.jsonl", "alarms.jsonl", "listening/prompts.jsonl",
]  # fmt: skip
SPOKEN = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "trained.json",
    "speakers.json",
    "generation_config.json",
]
SHARDS = ["index.json", "index.safetensors", "shard-000000.tar", "codebooks.safetensors"]
CASES = [
    *((TRAIN, f"runs/r/train/{name}") for name in RESUMED),
    *((TRAIN, f"a/{name}") for name in SHARDS),
    *((command, f"codec/{name}") for name in ("config.json", "model.safetensors") for command in (TRAIN, SPEAK)),
    *((SPEAK, f"runs/r/train/model/{name}") for name in SPOKEN),
    *((REPORT, f"runs/r/train/{name}") for name in ("metrics.jsonl", "alarms.jsonl", "listening/prompts.jsonl")),
]  # fmt: skip
MENDED = ("performance.jsonl", "set_aside.jsonl", "prompts.jsonl", "index.safetensors", "shard-000000.tar")
"""Files that a run makes again, or sets parts of aside, without a word."""


def flip(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 0x04
    return bytes(changed)


def break_middle_line(content: bytes) -> bytes:
    lines = content.split(b"\n")
    lines[(len(lines) - 1) // 2] = lines[(len(lines) - 1) // 2][:5]
    return b"\n".join(lines)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "zeroed": lambda content: bytes(len(content)),
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "early byte": lambda content: flip(content, min(9, len(content) - 1)),
    "middle byte": lambda content: flip(content, len(content) // 2),
    "random byte": lambda content: flip(content, random.Random(len(content)).randrange(len(content))),
    "broken line": break_middle_line,
    "another kind": lambda content: b'{"a": [null, "\\ud800"]}\n',
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a finished run and all that it was made of, and a copy of it beside."""
    folder = tmp_path_factory.mktemp("finished") / "work"
    write_shards(folder / "a", 7)
    torch.manual_seed(0)
    shape = TokenizerConfig(
        num_codebooks=4, codebook_size=32, latent_dim=8, mel_hidden_size=16, hidden_size=16,
        encoder_layers=(1, 1), decoder_layers=(1, 1),
    )  # fmt: skip
    codec = AudioTokenizer(shape)
    codec.save_pretrained(folder / "codec")
    from safetensors.torch import save_file

    save_file(
        {"vectors_KVD": codec.codebook_vectors_KVD.contiguous()}, folder / "a" / "codebooks.safetensors"
    )
    (folder / "recipe.yaml").write_text(RECIPE)
    before = Path.cwd()
    os.chdir(folder)
    assert command(*RUN) == 0
    train = folder / "runs" / "r" / "train"
    (train / "left_out.jsonl").write_text('{"step": 99, "kind": "loss spike", "text": "a"}\n')
    (train / "alarms.jsonl").write_text('{"step": 1, "kind": "loud", "text": "a"}\n' * 3)
    row = {"place": "a", "id": "b", "stage": "train", "kind": "c", "reason": "d"}
    (train / "set_aside.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    shutil.copytree(folder, folder.with_name("copy"))
    yield folder
    os.chdir(before)


def command(*arguments: str) -> int:
    """`audiollm ARGUMENTS` in this process; its exit code. What it does not foresee is raised."""
    given, sys.argv = sys.argv, ["audiollm", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = given
    return 0


@pytest.fixture
def pristine(finished: Path) -> Path:
    for path in finished.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(finished.with_name("copy"), finished, dirs_exist_ok=True)
    return finished


def resume(folder: Path) -> None:
    """Have the training taken for one that failed at its end: it is resumed, and reads everything."""
    path = folder / "runs" / "r" / "train" / "stage.json"
    write_json(path, {**read_json(path), "state": "failed"})


def damaged_files() -> Iterator[Any]:
    """Every file with every damage. A seventh is quick: one or two damages of each file, a seventh of the files of each
    damage."""
    for number, (arguments, file) in enumerate(CASES):
        for place, damage in enumerate(DAMAGES):
            slow = () if (number + place) % 7 == 0 else pytest.mark.slow
            yield pytest.param(
                arguments, file, damage, marks=slow, id=f"{arguments[0]}-{arguments[-1]}-{file}-{damage}"
            )


@pytest.mark.parametrize(("arguments", "file", "damage"), damaged_files())
def test_no_damage_ends_in_a_traceback_and_the_file_is_named(
    pristine: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], file: str, damage: str
) -> None:
    path = pristine / file
    assert path.is_file()
    if arguments == TRAIN:
        resume(pristine)
    before = path.read_bytes()
    path.write_bytes(DAMAGES[damage](before))
    code = command(*arguments)
    output = "".join(capfd.readouterr())
    assert "Traceback" not in output, output
    named = path.name in output.replace("\n", "")
    if code:
        assert named, output
    elif path.name not in MENDED and damage in ("zeroed", "empty", "cut") and path.suffix != ".jsonl":
        assert named, f"{damage}, and nothing was said"
    if "checkpoint" in file or "best" in file or "vocabulary" in file:
        assert code == 1 and path.read_bytes() == DAMAGES[damage](before), "nothing is overwritten"


def test_a_broken_line_of_the_metrics_is_said_and_left_out(
    pristine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = pristine / "runs" / "r" / "train" / "metrics.jsonl"
    whole = read_jsonl(path)
    lines = path.read_text().splitlines()
    lines.insert(1, '{"step": 0, "loss"')
    path.write_text("\n".join(lines) + "\n")
    assert command(*REPORT) == 0
    assert "metrics.jsonl: line 2 broken and left out" in capfd.readouterr().out.replace("\n", "")
    resume(pristine)
    assert command(*TRAIN) == 0
    assert "metrics.jsonl: line 2 broken and left out" in capfd.readouterr().out.replace("\n", "")
    assert read_jsonl(path) == whole


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "broken line"])
def test_a_damaged_survey_is_made_again_as_it_was(
    pristine: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    path = pristine / "runs" / "r" / "train" / "survey.safetensors"
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    resume(pristine)
    assert command(*TRAIN) == 0
    output = capfd.readouterr().out.replace("\n", "")
    assert "survey.safetensors is damaged" in output and "measuring the samples again" in output
    assert path.read_bytes() == whole


def test_a_trained_stage_with_a_damaged_result_is_not_begun_again(
    pristine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = pristine / "runs" / "r" / "train" / "stage.json"
    path.write_text("")
    assert command(*RUN) == 1
    said = capfd.readouterr().err.replace("\n", "")
    assert "stage.json is damaged" in said and "kept in train.before" in said
    path.unlink()
    assert command(*TRAIN) == 0
    assert (path.parent.with_name("train.before") / "checkpoint" / "state.json").exists()


@pytest.mark.parametrize("limit", [pytest.param(2_000, marks=pytest.mark.slow), 20_000])
def test_a_file_limit_ends_every_command_with_a_sentence(pristine: Path, limit: int) -> None:
    """As a full disk does, for those who cannot mount one."""
    shutil.rmtree(pristine / "runs")
    result = run_command(*RUN, file_limit=limit)
    assert result.returncode == 1 and "Traceback" not in result.stdout, result.stdout
    assert "size limit" in result.stdout


@pytest.mark.parametrize("kilobytes", [64, 700])
def test_a_full_disk_ends_a_run_with_a_sentence(pristine: Path, kilobytes: int) -> None:
    runs = pristine / "runs"
    shutil.rmtree(runs)
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(runs)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        result = run_command(*RUN)
        assert result.returncode == 1 and "Traceback" not in result.stdout, result.stdout
        assert "the disk is full" in result.stdout
    finally:
        subprocess.run(["umount", str(runs)], check=True)


@pytest.mark.parametrize(("out", "told"), [("file", "a file is there"), ("file/out", "a file is on its way")])
def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path, out: str, told: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "input").mkdir()
    result = run_command("annotate", str(tmp_path / "input"), "-o", str(tmp_path / out))
    assert result.returncode == 1 and "Traceback" not in result.stdout, result.stdout
    assert f"{out}: {told}, where a folder is needed" in result.stdout.replace("\n", "")


def test_a_place_that_was_handled_is_not_what_ended_a_command(tmp_path: Path) -> None:
    try:
        try:
            tmp_path.mkdir()
        except FileExistsError:
            raise ValueError("something else")  # noqa: B904
    except ValueError as error:
        assert disk_error(error) is None


def test_lines_that_are_not_whole_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a"\n[1]\n\xff\xfe\n{"a": "b"}\n\0\0\n{"a": 2}')
    assert read_whole_lines(path) == ([{"a": 1}, {"a": "b"}, {"a": 2}], [3, 4, 5, 7])
    assert read_whole_lines(path, {"a": int}).broken == [3, 4, 5, 6, 7]
    with pytest.raises(DamagedFile, match=r"rows\.jsonl is damaged: lines 3, 4, 5 and 1 more: .*\n  mend"):
        read_jsonl(path)
    for content in (b"", b"\0\0", b"[1]", b'{"a": '):
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match=r"rows\.jsonl is damaged"):
            read_record(path)


def test_a_damaged_list_of_steps_left_out_ends_the_run(tmp_path: Path) -> None:
    """Its steps would be trained on again, and spoil the run again."""
    path = tmp_path / "left_out.jsonl"
    path.write_text('{"step": 7, "kind": "not finite", "text": "a"}\n{"step": 8, "kInd": "a", "text": "b"}\n')
    with pytest.raises(DamagedFile, match=r"left_out\.jsonl is damaged: line 2"):
        LeftOut(path).steps()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps": "many"}', '{"steps": 0}'])
def test_a_damaged_budget_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "budget.json").write_text(content)
    from rich.console import Console

    from audiollm.recipe.runner import Context
    from audiollm.recipe.stages import Recipe

    context = Context(tmp_path, Recipe("t", Path("t"), "tiny", 0, tmp_path, (), {}), Console(quiet=True), {})
    with pytest.raises(DamagedFile, match=r"budget\.json is damaged: .*\n.*measured again"):
        steps_of_budget(
            LoopConfig(seed=0, steps=None, minutes=1.0, learning_rate=0.1), tmp_path, context, pytest.fail
        )
