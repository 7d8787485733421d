"""Recipes and commands that name models as on the hub: plan, run, record, run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopback_hub import LoopbackHub, llama_folder, use_hub
from rich.console import Console
from transformers import EncodecConfig
from typer.testing import CliRunner

from audiollm.audio import save
from audiollm.commands.cli import build_app
from audiollm.commands.run import untimed_plans
from audiollm.errors import ConfigError
from audiollm.hub_models.folders import hub_access
from audiollm.recipe.runner import read_result, run_recipe
from audiollm.recipe.stages import load_recipe
from tests.audiollm.models.tiny_audio_llms import qwen2_audio
from tests.audiollm.supervised.heard_samples import sound, write_manifest
from tests.pipelines.annotate.steps.tiny_recognizers import whisper_folder
from tokenizer.codecs.encodec import EncodecCodec

LLAMA, WHISPER = "tiny/llama", "tiny/whisper"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {LLAMA: llama_folder(folder / "llama"), WHISPER: whisper_folder(folder / "whisper")}


@pytest.fixture()
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: dict[str, Path]) -> Iterator[LoopbackHub]:
    monkeypatch.chdir(tmp_path)
    with LoopbackHub(tmp_path / "cache") as running:
        use_hub(running, monkeypatch)
        for name, folder in models.items():
            running.publish(name, folder)
        yield running


@pytest.fixture()
def recipe(tmp_path: Path) -> Path:
    """Whisper's encoder, frozen, before a Llama, as recipes/understanding has it."""
    train: dict[str, Any] = {
        "samples": str(write_manifest(tmp_path, 6)),
        "start": LLAMA,
        "audio_in": "features",
        "shape": {
            "audio_ffn_layers": [],
            "audio_encoder": {"path": WHISPER, "trained": False, "padded": False},
        },
        "steps": 10,
        "batch_size": 2,
        "precision": "fp32",
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "heard", "stages": [{"train": train}, {"report": {}}]}))
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return " ".join(result.output.split())


def test_a_recipe_trains_on_models_of_the_hub_and_records_their_commits(
    hub: LoopbackHub, recipe: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    with hub_access(download=True):
        loaded = load_recipe(recipe)
    run_recipe(loaded, Console(quiet=True))
    result = read_result(tmp_path / "runs/heard/train")
    assert result is not None and result.state == "done"
    assert result.hub_models == [f"{name}@{hub.commit_of(name, 0)}" for name in (LLAMA, WHISPER)]
    summary = json.loads((tmp_path / "runs/heard/report/summary.json").read_text())
    assert summary["hub_models"] == result.hub_models

    hub.stop()  # the same command goes on without the network, and finds its stage done
    again = load_recipe(recipe)
    assert again.stages[0].fingerprint({}) == result.fingerprint
    for path in (tmp_path / "cache").rglob("*"):  # a cache that was copied: other times, the same commit
        os.utime(path, (1, 1))
    moved = tmp_path / "moved"
    (tmp_path / "cache").rename(moved)
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = str(moved)  # put back by the fixture
    assert load_recipe(recipe).stages[0].fingerprint({}) == result.fingerprint
    by_path = load_recipe(recipe, [f"train.start={models[LLAMA]}"])
    assert by_path.stages[0].fingerprint({}) != result.fingerprint


def test_another_commit_is_another_input(hub: LoopbackHub, recipe: Path, tmp_path: Path) -> None:
    newer = hub.publish(LLAMA, llama_folder(tmp_path / "newer", seed=1))
    older = hub.commit_of(LLAMA, 0)
    with hub_access(download=True):
        fingerprints = {
            load_recipe(recipe, [f"train.start={LLAMA}@{revision}"]).stages[0].fingerprint({})
            for revision in (older, newer, "main")
        }
    assert len(fingerprints) == 2  # main is the newer


def test_a_recipe_may_allow_downloads_itself(hub: LoopbackHub, recipe: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe)
    key = "stages[0].train.shape.audio_encoder.path"
    assert f"{key}: no such file or folder: tiny/whisper (nor a model of that name" in error.value.message
    assert "download: true" in error.value.remedy and error.value.where.startswith(f"{recipe}:")
    recipe.write_text("download: true\n" + recipe.read_text())
    loaded = load_recipe(recipe)
    assert loaded.stages[0].hub_models() == [f"{name}@{hub.commit_of(name, 0)}" for name in (LLAMA, WHISPER)]
    recipe.write_text(recipe.read_text().replace("download: true", "download: perhaps"))
    with pytest.raises(ConfigError, match="download: must be true or false"):
        load_recipe(recipe)


def test_a_plan_reads_config_json_alone(hub: LoopbackHub, recipe: Path) -> None:
    without = run("plan", str(recipe), "--tflops", "1")
    assert "unknown until tiny/" in without and "not there yet: tiny/llama; for a model of the hub" in without
    assert hub.requests == []
    planned = run("plan", str(recipe), "--tflops", "1", "--download")
    assert "unknown until" not in planned and "not there yet" not in planned
    assert set(hub.fetched) == {"config.json"}
    hub.stop()
    assert "unknown until" not in run("plan", str(recipe), "--tflops", "1")  # it is in the cache now
    with pytest.raises(ConfigError, match=r"the hub's cache has no model\.safetensors of it"):
        run("run", str(recipe))


def test_a_plan_counts_an_audio_llm_on_its_class(hub: LoopbackHub, recipe: Path, tmp_path: Path) -> None:
    model, processor = qwen2_audio()
    model.save_pretrained(tmp_path / "qwen")
    processor.save_pretrained(tmp_path / "qwen")
    hub.publish("tiny/qwen", tmp_path / "qwen")
    samples = str(tmp_path / "samples.jsonl")
    policy = {"samples": samples, "start": "tiny/qwen", "rewards": {"accuracy": 1.0}, "steps": 10}
    recipe.write_text(yaml.safe_dump({"name": "asked", "stages": [{"train_policy": policy}]}))
    assert "its model is not there yet" in run("plan", str(recipe), "--tflops", "1")
    loaded = load_recipe_for_plan(recipe)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert loaded == parameters and set(hub.fetched) == {"config.json"}


def load_recipe_for_plan(path: Path) -> int:
    """Parameters of the only stage, as `plan --download` has them."""
    with hub_access(download=True, config_alone=True, may_lack=True):
        return untimed_plans(load_recipe(path, absent=[]))["train_policy"].parameters


def test_a_recognizer_is_named_as_on_the_hub(hub: LoopbackHub, tmp_path: Path) -> None:
    save(tmp_path / "a.wav", sound(1.0, hz=300.0), 16_000)
    with pytest.raises(ConfigError, match="no such file or folder: tiny/whisper") as error:
        run("annotate", "a.wav", "-o", "out", "--recognizer", f"transformers={WHISPER}")
    assert error.value.where == "--recognizer" and "--download" in error.value.remedy
    dry = ["annotate", "a.wav", "-o", "out", "--recognizer", f"transformers={WHISPER}", "--dry-run"]
    with pytest.raises(ConfigError, match="no such file or folder: tiny/whisper"):
        run(*dry)
    assert hub.requests == []
    run(*dry, "--download")
    assert set(hub.fetched) == {"config.json"}
    run("annotate", "a.wav", "-o", "out", "--workers", "1", "--download", "--recognizer", WHISPER)
    rows = json.loads((tmp_path / "out/recognizers.json").read_text())
    weights = [row["weights"] for row in rows]
    assert weights == [f"{WHISPER}@{hub.commit_of(WHISPER, 0)}"]


def test_a_codec_is_named_as_on_the_hub(hub: LoopbackHub, tmp_path: Path) -> None:
    shape = {"num_filters": 4, "hidden_size": 16, "upsampling_ratios": (5, 4), "codebook_size": 64}
    config = EncodecConfig(target_bandwidths=(14.4, 28.8), **shape)
    EncodecCodec.from_config(config).save_pretrained(tmp_path / "codec")
    commit = hub.publish("tiny/encodec", tmp_path / "codec")
    save(tmp_path / "a.wav", sound(0.5, hz=300.0), 16_000)
    run("tokenize", "a.wav", "-o", "shards", "--codec", "tiny/encodec", "--download")
    hub.stop()
    run("detokenize", "shards", "-o", "sounds", "--codec", f"tiny/encodec@{commit}")
    run("evaluate", "codec", "tiny/encodec", "--audio", "a.wav", "-o", "scores", "--metrics", "si_sdr")
    assert len(list((tmp_path / "sounds").glob("*.flac"))) == 1
    assert f"encodec@{commit[:8]}" in (tmp_path / "scores/results.json").read_text()


def test_a_command_of_its_own_process_follows_the_librarys_variables(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    def tokenize(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "audiollm.commands.cli", "tokenize", "a.wav", "-o", "out"]
        environment = {**os.environ, **hub.environment, **variables}
        return subprocess.run(
            [*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    hub.publish("tiny/pickled", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    refused = tokenize("--codec", "tiny/pickled", "--download")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "tiny/pickled has no safetensors" in refused.stderr
    offline = tokenize("--codec", "tiny/pickled", "--download", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2 and "HF_HUB_OFFLINE is set" in offline.stderr
