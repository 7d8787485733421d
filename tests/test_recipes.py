"""Every recipe is typed and planned as it stands; the tiny ones run from their data to their report."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from audiollm.commands.cluster import MEASURED_EFFICIENCY, efficiency, reduction_seconds
from audiollm.commands.machine_speed import REFERENCE, MachineSpeed
from audiollm.commands.measuring import (
    disk_mb_per_second,
    measure_machine,
    median_seconds,
    sound_per_second,
    training_tflops,
)
from audiollm.commands.run import plan, plan_table, print_plan, stage_plans
from audiollm.commands.run import run as run_command
from audiollm.devices import one_thread
from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import read_json, read_jsonl, write_json
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import StagePlan, load_recipe
from pipelines.answers import voices

RECIPES = Path(__file__).parents[1] / "recipes"
ALL = sorted(
    path
    for path in RECIPES.rglob("*.yaml")
    if {"stages", "base"} & yaml.safe_load(path.read_text(encoding="utf-8")).keys()
)
FOLDERS = (
    "tts", "understanding", "finetune_higgs", "mutual", "audioverse", "align", "rlhf", "audio_reasoner", "ke_omni_r",
    "r1_aqa", "tts_grpo", "iterative_grpo", "interpret", "thinksound", "audiocot_writer",
)  # fmt: skip
WORDS = ["one", "two", "three"]
SMALL = (
    f"annotate.corpus.words=[{','.join(WORDS)}]",
    "annotate.corpus.takes=6",
    "annotate.corpus.test_takes=1",
    "annotate.quality_sample=0",
    "annotate.workers=1",
)


def training(*stages: str) -> list[str]:
    few = ("minutes=null", "passes=null", "steps=12", "batch_size=8", "warmup_steps=2", "strategy=auto")
    return [f"{stage}.{setting}" for stage in stages for setting in few]


def shape(*stages: str) -> list[str]:
    return [f"{stage}.model.{setting}" for stage in stages for setting in ("hidden_size=64", "num_layers=2")]


CODEC = ("train_tokenizer.passes=null", "train_tokenizer.steps=20", "train_tokenizer.hidden_size=64")
SPEECH = ("generate.takes=1", "generate.max_prompts=4", "generate.max_duration_s=1")


def required(path: Path) -> list[str]:
    """A path for each `???`, which a plan does not need to find."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    base = yaml.safe_load((path.parent / data["base"]).read_text(encoding="utf-8")) if "base" in data else {}
    return [f"{key}=/not/there/{key}" for key, value in {**base, **data}.items() if value == "???"]


METHODS = yaml.safe_load((RECIPES / "align" / "methods.yaml").read_text(encoding="utf-8"))["methods"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["tiny", "full"])
def test_every_method_is_laid_over_the_recipes_of_preferences(name: str, method: str) -> None:
    path, row = RECIPES / "align" / f"{name}.yaml", METHODS[method]
    plain = load_recipe(path, required(path), absent=[])
    recipe = load_recipe(path, [*required(path), f"method={method}"], absent=[])
    assert recipe.name == f"{plain.name}-{method}"
    assert [stage.name for stage in recipe.stages] == [stage.name for stage in plain.stages]
    settings = {stage.name: stage.config for stage in recipe.stages}
    choices = row.get("objective", plain.parameters["objective"])
    choices = choices if isinstance(choices, list) else [choices]
    expected = [choice if isinstance(choice, str) else choice["name"] for choice in choices]
    assert [choice.name for choice in settings["train_preference"].objective] == expected
    for entry in row.get("stages", []):
        ((stage, values),) = entry.items()
        for key, value in values.items():
            assert key == "samples" or getattr(settings[stage], key) == value
    table = (RECIPES / "align" / "README.md").read_text(encoding="utf-8")
    assert f"| `{method}` |" in table


def test_a_method_that_is_not_there_is_refused() -> None:
    path = RECIPES / "align" / "tiny.yaml"
    with pytest.raises(ConfigError, match="no such method: 'ipp'") as caught:
        load_recipe(path, ["method=ipp"], absent=[])
    assert "'ipo'" in str(caught.value)


def rows_of(path: Path, overrides: list[str], devices: int = 1) -> dict[str, dict[str, str]]:
    """The plan's table: stage -> heading -> cell."""
    recipe = load_recipe(path, overrides, absent=[])
    table = plan_table(recipe, stage_plans(recipe, devices, MachineSpeed(400)))
    columns = {str(column.header): list(column.cells) for column in table.columns}
    names = columns.pop("stage")
    return {
        str(name): {heading: str(cells[place]) for heading, cells in columns.items()}
        for place, name in enumerate(names)
    }


def run(folder: Path, recipe: str, *overrides: str) -> Path:
    loaded = load_recipe(RECIPES / recipe, [*SMALL, *overrides], runs=folder)
    run_recipe(loaded, Console(quiet=True))
    return loaded.folder


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(plan)
    made.command()(lambda: None)  # a second one, so that the first has a name
    return made


def llama_of_published_size(folder: Path) -> Path:
    """The config.json of Llama-3.2-3B, and nothing else."""
    settings = {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    write_json(folder / "config.json", settings)
    return folder


# -------------------------------------------------------------------------------------- every recipe


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(RECIPES)))
def test_a_recipe_is_typed_and_planned_before_anything_is_there(path: Path) -> None:
    absent: list[Path] = []
    recipe = load_recipe(path, required(path), absent=absent)
    given = {Path(text.partition("=")[2]) for text in required(path)}
    assert {next((top for top in given if each.is_relative_to(top)), each) for each in absent} == given
    table = plan_table(recipe, stage_plans(recipe, 8, MachineSpeed(400)))
    assert table.row_count == len(recipe.stages) + 1
    if required(path):
        with pytest.raises(ConfigError, match="no such file or folder: /not/there/"):
            load_recipe(path, required(path))


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(RECIPES)))
def test_a_recipe_has_no_budget_on_the_clock(path: Path) -> None:
    """A busy machine would learn less of it: `steps`, `passes` or `cpu_minutes`."""
    recipe = load_recipe(path, required(path), absent=[])
    timed = [stage.name for stage in recipe.stages if getattr(stage.config, "minutes", None) is not None]
    assert timed == []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_a_small_and_a_large_recipe_and_says_what_they_are(name: str) -> None:
    folder = RECIPES / name
    assert (folder / "tiny.yaml") in ALL and (folder / "full.yaml") in ALL
    text = (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.glob("*.yaml"):
        assert path.name in text
    installed = files("recipes").joinpath(name, "README.md")
    assert installed.is_file()


def test_the_folder_of_a_recipe_can_be_named_in_it(tmp_path: Path) -> None:
    (tmp_path / "speech.jsonl").write_text("")
    recipe = tmp_path / "own.yaml"
    recipe.write_text("stages:\n  - compose: {segments: '${here}/speech.jsonl'}\n")
    config = load_recipe(recipe).stages[0].config
    assert config.model_dump()["segments"] == tmp_path / "speech.jsonl"
    recipe.write_text("here: elsewhere\nstages:\n  - compose: {segments: '${here}/speech.jsonl'}\n")
    with pytest.raises(ConfigError, match="here: is the recipe's folder"):
        load_recipe(recipe)


# ---------------------------------------------------------------------------------------------- plans


def test_the_plan_counts_what_a_language_model_becomes(tmp_path: Path) -> None:
    path = RECIPES / "tts" / "full.yaml"
    llama = llama_of_published_size(tmp_path / "llama")
    given = [text for text in required(path) if not text.startswith("language_model=")]
    rows = rows_of(path, [*given, f"language_model={llama}"])
    # facts of the published model: 5.771 B, of which 2.114 B are audio feed-forwards and 50.4 M tables of codes
    assert all(rows[stage]["parameters"] == "5.8 G" for stage in ("pretrain", "joint", "sft"))
    assert rows["pretrain"]["what"].endswith("2164.5 M trained")
    assert "trained" not in rows["joint"]["what"]
    # 50,000 steps of 1,024 clips of 250 frames and 40 other positions
    assert rows["pretrain"]["tokens"] == "14.8 G"
    alone, eight = (rows_of(path, [*given, f"language_model={llama}"], devices) for devices in (1, 8))
    gigabytes = [float(each["joint"]["memory a device"].split()[0]) for each in (alone, eight)]
    # fp32 weights, gradients, Adam's two states and averages: 20 bytes a parameter; whole on one device
    assert 115 < gigabytes[0] < 150 and 23 < gigabytes[1] < 30
    # the same work, shared by eight
    assert float(alone["joint"]["time"].split()[0]) == pytest.approx(
        8 * float(eight["joint"]["time"].split()[0]), rel=0.02
    )


def plan_output(*arguments: str) -> str:
    done = CliRunner().invoke(app(), ["plan", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_says_what_it_reckoned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[dict[str, Any]] = []

    def measure(folder: Path, devices: int, **parts: bool) -> MachineSpeed:
        measured.append({"folder": folder, "devices": devices, **parts})
        return MachineSpeed(0.05, 1.0, 50.0, notes=("the disk takes 50 MB/s",))

    monkeypatch.setattr("audiollm.commands.measuring.measure_machine", measure)
    path = RECIPES / "finetune_higgs" / "lora.yaml"
    output = plan_output(str(path), *required(path), "--launch", "4", "--tflops", "150")
    assert "trained on 4 devices that reach 150 TFLOP/s" in output and measured == []
    assert "not there yet: /not/there/audio" in output and "measured here" not in output
    output = plan_output(str(RECIPES / "quickstart.yaml"))
    assert "trained on 1 device that reaches 0.05 TFLOP/s" in output
    assert "measured here: the disk takes 50 MB/s" in output and "cluster" not in output
    assert measured.pop() == {
        "folder": Path("runs/quickstart"), "devices": 1, "products": True, "sound": True, "disk": True,
    }  # fmt: skip
    output = plan_output(str(RECIPES / "quickstart.yaml"), "--tflops", "2")
    assert "trained on 1 device that reaches 2 TFLOP/s" in output and not measured.pop()["products"]


def test_the_plan_of_a_cluster_says_what_it_assumes_and_what_much_sound_takes(tmp_path: Path) -> None:
    path = RECIPES / "tts" / "full.yaml"
    llama = llama_of_published_size(tmp_path / "llama")
    given = [text for text in required(path) if not text.startswith("language_model=")]
    output = plan_output(str(path), *given, f"language_model={llama}", "--launch", "64")
    assert "cluster: 64 devices, each 400 TFLOP/s (an H100 in bf16, MFU 40%, assumed)" in output
    assert "gradients are summed at 300 GB/s a device" in output
    assert "benchmarks/scaling.py" in output
    (line,) = [line for line in output.splitlines() if line.startswith("  joint: ")]
    found = re.fullmatch(
        r"  joint: ([\d,]+) hours of sound, efficiency (0\.\d\d); "
        r"1,000 hours take ([\d.]+) (\w+), 100,000 hours take ([\d.]+) (\w+)",
        line,
    )
    assert found is not None, line
    recipe = load_recipe(path, [*given, f"language_model={llama}"], absent=[])
    speed = MachineSpeed(400, gradient_bytes=300e9)
    joint = stage_plans(recipe, 64, speed)["joint"]
    assert joint.seconds is not None
    units = {"min": 60, "h": 3600, "days": 86_400}
    short, long = (float(found[group]) * units[found[group + 1]] for group in (3, 5))
    assert long == pytest.approx(100 * short, rel=0.05)
    assert short == pytest.approx(joint.seconds * 3.6e6 / joint.sound_s, rel=0.05)
    work_s = joint.flops / (64 * 400e12)
    assert float(found[2]) == pytest.approx(work_s / joint.seconds, abs=0.006)


def test_the_rule_of_reductions_gives_the_efficiency_that_ranks_were_measured_to_have() -> None:
    for measured, computed in MEASURED_EFFICIENCY.values():
        assert computed == pytest.approx(measured, rel=0.05)
    # a ring: what each of many devices sends and receives approaches twice its gradients
    seconds = [reduction_seconds(1e9, devices, 1e9) for devices in (1, 2, 4, 10_000)]
    assert seconds == pytest.approx([0, 1, 1.5, 2], abs=1e-3)
    assert efficiency(1.0, 1e9, 2, 1e9) == pytest.approx(0.5)


MEASURED_SECONDS = {
    "iterative_grpo/tiny.yaml": {
        "annotate": 51, "train": 149, "first_answers": 74, "first_reward": 114, "train_policy_1": 280,
        "sample_answers_1": 84, "train_reward_1": 50, "heard_1": 10, "train_policy_2": 280, "sample_answers_2": 79,
        "train_reward_2": 50, "before": 7, "report": 6,
    },
    "ke_omni_r/tiny.yaml": {"annotate": 51, "train": 303, "train_policy": 220},
    "tts_grpo/tiny.yaml": {"annotate": 51, "train_tokenizer": 923, "tokenize": 173, "train": 653},
}  # fmt: skip
"""CPU-seconds of stages with one thread on an AMD EPYC with AVX2 (0.073 TFLOP/s), beside busy neighbours; `annotate` on
two cores (75 of its workers and 13 of the stage itself); 2026-11-28."""


@pytest.mark.parametrize("path", MEASURED_SECONDS)
def test_the_times_of_a_plan_are_those_of_the_clock(path: str) -> None:
    measured = MEASURED_SECONDS[path]
    # as it was measured
    as_measured = ["tokenize.workers=1", "train_tokenizer.passes=22"] if "tokenize" in measured else []
    recipe = load_recipe(RECIPES / path, as_measured, absent=[])
    plans = stage_plans(recipe, 1, REFERENCE)
    planned = {name: plans[name].seconds or 0.0 for name in measured}
    assert 1 / 1.5 < sum(planned.values()) / sum(measured.values()) < 1.5
    far = {name: (planned[name], measured[name]) for name in measured if measured[name] > 100}
    assert all(1 / 1.8 < mine / clock < 1.8 for mine, clock in far.values()), far
    twice = stage_plans(recipe, 1, MachineSpeed(2 * REFERENCE.tflops, core=2.0))
    assert sum(twice[name].seconds or 0.0 for name in measured) == pytest.approx(
        sum(planned.values()) / 2, rel=0.05
    )


XEON = MachineSpeed(tflops=0.089, core=1.95, disk_mb=280)
"""What `measure_machine` said, on average of five times, of an Intel Xeon with AMX at a load of 6; 2026-11-29."""
SECONDS_ON_XEON = {
    "audio_reasoner/tiny.yaml": {
        "annotate": 45, "train": 117, "train_policy": 92, "before": 10, "after": 11, "report": 2,
    },
    "thinksound/tiny.yaml": {
        "compose_scenes": 23, "fit_mel_pca": 22, "encode_latents": 28, "train_flow": 1500, "generate_sound": 15,
        "edit_sounds": 50, "evaluate_sound": 39, "report": 2,
    },
}  # fmt: skip
"""CPU-seconds of stages on that machine, with one thread and one worker. Of trainings shorter ones were timed, and the
seconds of their steps multiplied: 120 of 300 steps of `train` (0.27 s each), 5 of 120 of `train_policy` (0.68 s), 60 of
2,400 of `train_flow` (0.59 s); what starts, evaluations and checkpoints took is added as it was."""


@pytest.mark.parametrize("path", SECONDS_ON_XEON)
def test_a_plan_holds_on_a_second_machine_by_its_measurement(path: str) -> None:
    overrides = ["annotate.workers=1"] if path.startswith("audio_reasoner") else []
    plans = stage_plans(load_recipe(RECIPES / path, overrides, absent=[]), 1, XEON)
    planned = sum(required_seconds(plans[name]) for name in SECONDS_ON_XEON[path])
    assert 1 / 1.5 < planned / sum(SECONDS_ON_XEON[path].values()) < 1.5


@pytest.mark.parametrize("path", [f"{folder}/tiny.yaml" for folder in FOLDERS] + ["quickstart.yaml"])
def test_a_plan_tells_the_time_of_every_training(path: str) -> None:
    recipe = load_recipe(RECIPES / path, required(RECIPES / path), absent=[])
    plans = stage_plans(recipe, 1, REFERENCE)
    kinds = {stage.name: stage.stage.kind for stage in recipe.stages}
    untimed = [name for name, plan in plans.items() if plan.seconds is None]
    assert [kinds[name] for name in untimed if kinds[name].startswith("train_tokenizer")] == []
    if path.partition("/")[0] != "finetune_higgs":  # its models are not there yet
        assert untimed == []


def test_a_machine_is_measured_in_two_seconds_and_as_far_as_is_needed(tmp_path: Path) -> None:
    measure_machine(tmp_path)  # what torch does once
    began, before = time.monotonic(), torch.get_num_threads()
    speed = measure_machine(tmp_path / "runs" / "not there yet")
    assert time.monotonic() - began < 4  # two on an idle machine
    assert torch.get_num_threads() == before and list(tmp_path.iterdir()) == []
    assert (
        len(speed.notes) == 3 and 1e-3 < speed.tflops < 1e3 and speed.core > 0.1 and speed.disk_mb < math.inf
    )
    assert measure_machine(tmp_path, products=False, sound=False, disk=False) == MachineSpeed(
        REFERENCE.tflops, gradient_bytes=speed.gradient_bytes
    )
    # processes that train together share the cores
    several = measure_machine(tmp_path, 2 * before, sound=False, disk=False)
    assert several.tflops == pytest.approx(0.5 * speed.tflops / math.sqrt(before), rel=0.5)


def test_measurements_count_the_work_that_is_done() -> None:
    cpu = torch.device("cpu")
    size = 512
    a_SS = torch.randn(size, size)
    with one_thread():
        seconds = median_seconds(lambda: torch.mm(a_SS, a_SS), 0.1, time.process_time)
    assert 0.05 < training_tflops(cpu, 0.2) / (2 * size**3 / seconds / 1e12) < 3
    assert sound_per_second(0.1) == pytest.approx(sound_per_second(0.1), rel=0.7)


def test_a_disk_that_takes_nothing_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert disk_mb_per_second(tmp_path, 0.1) is None
    speed = measure_machine(tmp_path, products=False, sound=False)
    assert speed.disk_mb == math.inf and speed.notes == (f"{tmp_path} cannot be written to",)


def test_files_take_the_time_of_the_disk() -> None:
    recipe = load_recipe(RECIPES / "thinksound" / "tiny.yaml", [], absent=[])
    slow, fast = (stage_plans(recipe, 1, MachineSpeed(1.0, disk_mb=rate)) for rate in (10.0, math.inf))
    for name, plan_ in slow.items():
        assert required_seconds(plan_) == pytest.approx(required_seconds(fast[name]) + plan_.disk_mb / 10)


def required_seconds(stage_plan: StagePlan) -> float:
    assert stage_plan.seconds is not None
    return stage_plan.seconds


def test_a_start_that_is_not_there_is_said_to_be_unknown() -> None:
    path = RECIPES / "finetune_higgs" / "full.yaml"
    row = rows_of(path, required(path))["train"]
    assert row["parameters"] == "" and "unknown until /not/there/higgs is there" in row["what"]


def test_an_adapter_is_counted_as_it_is_built(tmp_path: Path) -> None:
    config = {
        "model_type": "higgs_audio_v2", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "codebook_size": 1026,
    }  # fmt: skip
    write_json(tmp_path / "config.json", config)
    path = RECIPES / "finetune_higgs" / "lora.yaml"
    given = [text for text in required(path) if not text.startswith("higgs=")]
    row = rows_of(path, [*given, f"higgs={tmp_path}", "train.lora.rank=4"])["train"]
    # rank x (inputs + outputs) of q, k, v, o and of gate, up, down, twice in each of 2 layers
    attention = (64 + 64) + 2 * (64 + 32) + (64 + 64)
    adapter = 4 * 2 * (attention + 2 * 3 * (64 + 96))
    assert f"{adapter / 1e6:.1f} M trained" in row["what"]


def test_an_understanding_model_is_counted_with_its_encoder(tmp_path: Path) -> None:
    whisper = {
        "model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120, "num_mel_bins": 128, "max_source_positions": 1500,
    }  # fmt: skip
    write_json(tmp_path / "whisper" / "config.json", whisper)
    path = RECIPES / "understanding" / "full.yaml"
    given = [text for text in required(path) if not text.startswith(("language_model=", "encoder="))]
    llama = llama_of_published_size(tmp_path / "llama")
    rows = rows_of(path, [*given, f"language_model={llama}", f"encoder={tmp_path / 'whisper'}"])
    # Llama's 3.2 B and a text head of its own, the tables of codes, Whisper's 0.64 B, no audio feed-forwards
    assert rows["align"]["parameters"] == rows["train"]["parameters"] == "4.3 G"
    # two positions of 1280 side by side, to 3072, and a bias
    assert f"{(2 * 1280 * 3072 + 3072) / 1e6:.1f} M trained" in rows["align"]["what"]


def test_shards_that_are_there_are_planned_by_their_counts(tmp_path: Path) -> None:
    write_json(tmp_path / "shards" / "index.json", {"counts": {"samples": 480, "frames": 48_000}})
    recipe = tmp_path / "own.yaml"
    recipe.write_text(json.dumps({"stages": [{"train": {"samples": str(tmp_path / "shards"), "passes": 2}}]}))
    row = rows_of(recipe, [])["train"]
    assert row["tokens"] == "134.4 k"  # 2 passes x 480 samples x (100 frames + 40)
    assert "assumed" not in row["what"]


# --------------------------------------------------------------------------- the tiny ones, end to end


@pytest.mark.slow
def test_text_to_speech_in_stages(tmp_path: Path) -> None:
    stages = ("language", "pretrain", "joint", "sft")
    short = [f"{stage}.min_seconds=5" for stage in ("texts", "speech", "curated")]
    small = [*CODEC, *SPEECH, *short, *training(*stages), *shape("language"), "evaluate.judge_steps=10"]
    folder = run(tmp_path, "tts/tiny.yaml", *small)
    from audiollm.models.dual_ffn import DualFFN

    before, after = (
        DualFFN.from_pretrained(folder / stage / "model").state_dict() for stage in ("language", "pretrain")
    )
    moved = {name for name, weight in before.items() if not weight.equal(after[name])}
    assert moved and all("audio" in name for name in moved)
    assert read_json(folder / "summary.json")["n_generated"] == 4


@pytest.mark.slow
def test_an_understanding_model_is_trained_and_scored(tmp_path: Path) -> None:
    small = ["compose.min_seconds=5", *training("train"), *shape("train")]
    folder = run(tmp_path, "understanding/tiny.yaml", *small)
    found = read_json(folder / "evaluate_listening" / "results.json")
    assert found["recordings"] == found["questions"] == len(WORDS) * 6
    assert found["chance"] == pytest.approx(1 / 6)
    assert (folder / "evaluate_listening" / "asr" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny", "lora"])
def test_higgs_weights_are_trained_further_and_stay_what_transformers_loads(
    tmp_path: Path, recipe: str
) -> None:
    script = RECIPES / "finetune_higgs" / "random_weights.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "random")], check=True, capture_output=True)
    model, codec = tmp_path / "random" / "model", tmp_path / "random" / "tokenizer"
    given = [f"higgs={model}", f"codec={codec}", "audio=null", "compose.min_seconds=5"]
    small = [*given, *training("train"), *SPEECH, "train.workers=0"]
    folder = run(tmp_path, f"finetune_higgs/{recipe}.yaml", *small)
    assert len(read_jsonl(folder / "generate" / "generated.jsonl")) == 4
    from transformers import HiggsAudioV2ForConditionalGeneration

    before, after = (
        HiggsAudioV2ForConditionalGeneration.from_pretrained(each, use_text_head=True).state_dict()
        for each in (model, folder / "train" / "model")
    )
    name = "model.layers.0.audio_mlp.up_proj.weight"
    assert before.keys() == after.keys() and not before[name].equal(after[name])
    assert (folder / "train" / "adapter" / "adapter_model.safetensors").exists() == (recipe == "lora")


@pytest.mark.slow
def test_takes_of_a_model_that_speaks_become_preferences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voices, "STEPS", 10)
    short = ("takes=1", "max_prompts=4", "max_duration_s=1")
    small = [f"{stage}.{setting}" for stage in ("spoken_before", "spoken_after") for setting in short]
    small += [f"{stage}.judge_steps=10" for stage in ("before", "after")]
    small += [f"sample_answers.{setting}" for setting in ("answers=2", "max_samples=6", "max_duration_s=1")]
    small += [
        f"train_preference.{setting}"
        for setting in ("minutes=null", "steps=10", "batch_size=2", "eval_answers=1")
    ]
    small += [
        *CODEC,
        "compose.min_seconds=5",
        *training("train"),
        *shape("train"),
        "select_answers.min_margin=0",
    ]
    folder = run(tmp_path, "align/speech_tiny.yaml", *small)
    pairs = read_jsonl(folder / "select_answers" / "samples.jsonl")
    parts = [answer["content"][0] for pair in pairs for answer in pair["answers"]]
    assert parts and all(Path(part["path"]).is_file() and Path(part["codes"]).is_file() for part in parts)
    figures = read_json(folder / "train_preference" / "stage.json")["figures"]
    assert figures["records"] + figures["held_out_records"] == len(pairs) and not figures["set_aside"]
    assert (folder / "after" / "scores.json").exists() and (folder / "report.html").exists()


@pytest.mark.slow
def test_two_models_make_each_others_data(tmp_path: Path) -> None:
    short = [f"{stage}.min_seconds=5" for stage in ("heard", "compose")]
    small = [*CODEC, *SPEECH, *short, *training("listener", "train", "listener_again")]
    small += [*shape("listener", "train"), "evaluate.judge_steps=10"]
    with pytest.raises(StageError, match="harvest: no clip of .* can be used"):  # trained for 12 steps
        run(tmp_path, "mutual/tiny.yaml", *small)
    folder = tmp_path / "mutual-tiny"
    described = read_jsonl(folder / "describe" / "segments.jsonl")
    answered = [row for row in described if row.get("voice")]
    assert len(described) == len(WORDS) * 36 and all(row["described_by"] for row in answered)
    # as if it had spoken well: real takes in the place of its own
    rows = [
        {**row, "correct": {"classifier": True, "speaker": True}, "stopped": True, "problem": None}
        for row in described
        if row["split"] == "train"
    ]
    spoken = tmp_path / "clips.jsonl"
    spoken.write_text("".join(json.dumps(row) + "\n" for row in rows[:24]))
    folder = run(tmp_path, "mutual/tiny.yaml", *small, f"harvest.clips={spoken}")
    for stage in ("score_before", "score_after"):
        assert read_json(folder / stage / "results.json")["recordings"] == len(WORDS) * 6


@pytest.mark.slow
def test_annotating_again_with_what_was_learned(tmp_path: Path) -> None:
    """Two passes over the same recordings; an untrained listener changes nothing that is given, and is heard."""
    again = [text.replace("annotate.", "again.", 1) for text in SMALL]
    learners = ("listener", "listener_again")
    short = [f"{stage}.min_seconds=5" for stage in ("heard", "heard_again")]
    run(tmp_path, "audioverse/tiny.yaml", *again, *short, *training(*learners), *shape(*learners))
    folder = tmp_path / "audioverse-tiny"
    first, second = (read_jsonl(folder / stage / "segments.jsonl") for stage in ("annotate", "again"))
    assert [row["text"] for row in first] == [row["text"] for row in second]
    assert all(set(row["heard"]) == {"pocketsphinx", "audio_llm"} for row in second)
    assert all(row["measured"]["consensus"]["pairwise_wer"] is not None for row in second)
    compared = read_json(folder / "compare_annotations" / "compare.json")
    assert compared["first"]["segments"] == compared["second"]["segments"] == len(first)


@pytest.mark.parametrize("width", [50, 60, 80, 100, 140])
@pytest.mark.parametrize("path", ["quickstart.yaml", "tts/tiny.yaml"])
def test_a_plan_is_never_cut(path: str, width: int) -> None:
    recipe = load_recipe(RECIPES / path, [], absent=[])
    table = plan_table(recipe, stage_plans(recipe, 1, MachineSpeed(400)))
    console = Console(record=True, width=width, file=io.StringIO())
    print_plan(table, console)
    shown = console.export_text()
    assert "…" not in shown
    words = set(re.findall(r"\S+", shown.translate(str.maketrans("│┃,:", "    "))))
    for column in table.columns:
        for cell in column.cells:
            assert set(re.findall(r"\S+", str(cell).translate(str.maketrans(",:", "  ")))) <= words


@pytest.mark.slow
def test_ppo_learns_from_a_reward_model_of_its_own_answers(tmp_path: Path) -> None:
    stages = ("train", "train_reward")
    few = ("compose.min_seconds=5", "sample_answers.temperature=1.5", "sample_answers.max_answer_tokens=8")
    short = ("steps=10", "train_policy.batch_size=2", "train_policy.max_answer_tokens=6")
    folder = run(tmp_path, "rlhf/tiny.yaml", *training(*stages), *shape("train"), *few, *short)
    rows = [row for row in read_jsonl(folder / "train_policy" / "metrics.jsonl") if "value_error" in row]
    assert len(rows) == 10 and all(row["ptx_loss"] > 0 for row in rows) and "kl" in rows[-1]
    assert (folder / "train_policy" / "critic" / "model" / "reward.json").exists()
    assert (folder / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["audio_reasoner", "ke_omni_r", "r1_aqa"])
def test_questions_with_options_are_answered_and_rewarded(tmp_path: Path, recipe: str) -> None:
    few = (
        "compose.min_seconds=5",
        "steps=10",
        "train_policy.batch_size=2",
        "train_policy.max_answer_tokens=24",
    )
    folder = run(tmp_path, f"{recipe}/tiny.yaml", *training("train"), *shape("train"), *few)
    asked = read_jsonl(folder / "multiple_choice" / "samples.jsonl")
    assert all(len(row["metadata"]["choices"]) == 4 for row in asked)
    answers = read_jsonl(folder / "train_policy" / "answers.jsonl")
    assert {row["step"] for row in answers} >= {0, 10} and answers[0]["rewards"].keys() >= {
        "accuracy",
        "format",
    }
    for stage in ("before", "after"):
        assert read_json(folder / stage / "results.json")["chance"] == 0.25
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "best of 8" in page or "of equal answers" in page


def test_many_voices_need_no_classifier_of_them() -> None:
    """A stage that trains one ends where no two speakers have recordings enough, as in samples of the task clone."""
    path = RECIPES / "tts_grpo" / "full.yaml"
    recipe = load_recipe(path, required(path), absent=[])
    assert "train_voice_judge" not in {stage.name for stage in recipe.stages}
    (policy,) = [stage for stage in recipe.stages if stage.name == "train_policy"]
    assert policy.config.rewards["voice"]["judge"] == "/not/there/judge"


@pytest.mark.slow
def test_takes_of_a_voice_are_rewarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices, "STEPS", 10)
    short = ("takes=1", "max_prompts=4", "max_duration_s=1")
    small = [f"{stage}.{setting}" for stage in ("spoken_before", "spoken_after") for setting in short]
    small += [f"{stage}.judge_steps=10" for stage in ("before", "after")]
    policy = ("batch_size=2", "group_size=3", "max_frames=8", "eval_prompts=2", "evaluations=1")
    small += ["steps=10", *(f"train_policy.{setting}" for setting in policy)]
    folder = run(
        tmp_path,
        "tts_grpo/tiny.yaml",
        *CODEC,
        "compose.min_seconds=5",
        *training("train"),
        *shape("train"),
        *small,
    )
    rows = read_jsonl(folder / "train_policy" / "rollouts" / "000000.jsonl")
    assert len(rows) == 6 and all(
        row["speech"] and row["rewards"].keys() == {"words", "voice", "ends"} for row in rows
    )
    assert (folder / "train_policy" / "rollouts" / "000000.safetensors").exists()
    assert (folder / "after" / "scores.json").exists() and (folder / "report.html").exists()


@pytest.mark.slow
def test_the_reward_model_goes_on_in_rounds(tmp_path: Path) -> None:
    stages = ("train", "first_reward")
    few = ("compose.min_seconds=5", "first_answers.max_answer_tokens=8", "sample_answers.max_answer_tokens=8")
    short = (
        "steps=10",
        "train_policy.batch_size=2",
        "train_policy.max_answer_tokens=6",
        "train_reward.steps=10",
    )
    folder = run(tmp_path, "iterative_grpo/tiny.yaml", *training(*stages), *shape("train"), *few, *short)
    for number, before in ((1, "first_reward"), (2, "train_reward_1")):
        judged = read_json(folder / f"train_policy_{number}" / "stage.json")
        rows = read_jsonl(folder / f"train_policy_{number}" / "metrics.jsonl")
        assert before in str(judged) and len({row["reward"] for row in rows if "reward" in row}) > 5
        replay = read_json(folder / f"replay_samples_{number}" / "stage.json")["figures"]
        assert replay["replayed"] >= 1 and replay["set_aside"] == 0
        assert (folder / f"train_reward_{number}" / "model" / "reward.json").exists()
    assert (folder / "report.html").exists()


def test_a_plan_counts_the_segments_that_a_stage_reads() -> None:
    """`texts` is made of 696 talks, and not of the few words that these are joined from."""
    rows = rows_of(RECIPES / "interpret/tiny.yaml", [])
    assert not [cell for cell in rows["texts"].values() if "needed" in cell]
    few = rows_of(RECIPES / "interpret/tiny.yaml", ["compose_talks.talks=5"])
    assert any("300 s needed" in cell for cell in few["texts"].values())


@pytest.mark.slow
def test_an_interpreter_is_trained_in_its_stages(tmp_path: Path) -> None:
    small = ["annotate.corpus.voices=2", "annotate.corpus.takes=5", "annotate.corpus.test_takes=2"]
    small += [
        "compose_talks.talks=40",
        "compose_talks.test_talks=4",
        "short_talks.talks=40",
        "short_talks.test_talks=4",
        "words.min_seconds=5",
        "texts.min_seconds=5",
    ]
    small += [
        f"{stage}.{setting}" for stage in ("stage_1", "stage_2") for setting in ("steps=10", "batch_size=4")
    ]
    small += [
        "digits.model.hidden_size=64",
        "digits.model.num_layers=2",
        *training("digits", "continual", "sft"),
    ]
    folder = run(tmp_path, "interpret/tiny.yaml", *CODEC, *small)
    for stage in ("stage_1", "stage_2"):
        rows = [row for row in read_jsonl(folder / stage / "metrics.jsonl") if "reward/detection" in row]
        assert ("reward/lagging" in rows[0]) == (stage == "stage_2") and rows[0]["mismatch_kl"] < 1e-4
    for stage in ("before", "after"):
        assert read_json(folder / stage / "figures.json")["streams"] == 4
        assert len(read_jsonl(folder / stage / "instances.log")) == 4
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_the_writer_is_trained_scored_and_asked(tmp_path: Path) -> None:
    stages = ("written", "frames_shuffled", "videos_exchanged", "sounds_exchanged", "both_exchanged")
    small = ["compose_scenes.scenes=12", "compose_scenes.held_out_scenes=4", "steps=12", "write.batch_size=4"]
    asked = [
        f"{stage}.{setting}" for stage in stages for setting in ("max_questions=3", "max_answer_tokens=40")
    ]
    loaded = load_recipe(RECIPES / "audiocot_writer/tiny.yaml", [*small, *asked], runs=tmp_path)
    run_recipe(loaded, Console(quiet=True))
    folder = loaded.folder
    assert read_json(folder / "write" / "model" / "pictures.json") == {"per_second": 4.0, "side": 56}
    for stage in stages:
        result = read_json(folder / stage / "results.json")
        assert set(result["tables"]) == (
            {"clip", "region", "instruction"} if stage == "written" else {"clip"}
        )
    assert (folder / "report" / "report.html").exists()


def test_a_plan_names_transcripts_that_are_not_there(tmp_path: Path) -> None:
    absent: list[Path] = []
    settings = [f"audio={tmp_path}", "transcripts=texts.csv"]
    load_recipe(RECIPES / "quickstart.yaml", settings, absent=absent)
    assert absent == [Path("texts.csv")]
    pattern = [f"audio={tmp_path}", "transcripts={text}_{take}.wav"]
    load_recipe(RECIPES / "quickstart.yaml", pattern, absent=absent)
    assert absent == [Path("texts.csv")], "a pattern is no file"


def test_a_wrong_value_is_told_where_it_was_given() -> None:
    recipe = RECIPES / "tts_grpo" / "tiny.yaml"
    with pytest.raises(ConfigError, match="greater than or equal to 10, not 3") as told:
        load_recipe(recipe, ["steps=3"])
    assert told.value.where == "command line"
    with pytest.raises(ConfigError, match="greater than or equal to 10, not 4") as told:
        load_recipe(recipe, ["start_steps=4"])
    assert told.value.where == "command line" and "train.steps" in str(told.value)


def test_a_dry_run_is_a_plan(tmp_path: Path) -> None:
    words = [str(RECIPES / "quickstart.yaml"), "--runs", str(tmp_path), "--dry-run"]
    app = typer.Typer()
    app.command()(run_command)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "time" in result.output and not any(tmp_path.iterdir()), result.output
