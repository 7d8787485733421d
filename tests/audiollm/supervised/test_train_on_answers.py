"""The stage `train` on published models that answer in words: learning, parity of the loss, refused settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.errors import ConfigError
from audiollm.families.policies import load_policy
from audiollm.files.set_aside import SetAside
from audiollm.models.audio_llms.inputs import processor_inputs, turns_of
from audiollm.models.audio_llms.loading import load_audio_llm
from audiollm.recipe.ranks import ALONE
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.supervised.answers.batches import AnswerBatchMaker
from audiollm.supervised.answers.task import AnswerTask
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.rl.preference.records import tone


def write_conversations(folder: Path, count: int = 24) -> None:
    """Which of two tones is heard; the last 8 are held out."""
    samples = []
    for n in range(count):
        high = n % 2 == 1
        tone(folder / f"{n}.wav", (700.0 if high else 200.0) + 5 * n)
        question = [AudioPart(path=f"{n}.wav"), TextPart(text="High or low?")]
        answer = [TextPart(text="high" if high else "low")]
        messages = [Message(role="user", content=question), Message(role="assistant", content=answer)]
        metadata = {"split": "test"} if n >= count - 8 else {}
        samples.append(Sample(id=f"tone{n}", messages=messages, task="question", metadata=metadata))
    write_samples(folder / "samples.jsonl", samples)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    write_conversations(folder)
    save_tiny("qwen2_audio", folder / "model")
    return folder


def train(place: Path, name: str, **settings: Any) -> tuple[dict[str, Any], Path]:
    stage = {
        "samples": str(place / "samples.jsonl"),
        "start": str(place / "model"),
        "steps": 30,
        "batch_size": 8,
        "evaluations": 3,
        "ema_decay": 0.0,
        **settings,
    }
    recipe = place / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, "stages": [{"train": stage}]}))
    loaded = load_recipe(recipe, runs=place / "runs")
    run_recipe(loaded, Console(quiet=True))
    figures: dict[str, Any] = json.loads((loaded.folder / "train" / "stage.json").read_text())["figures"]
    return figures, loaded.folder / "train"


@pytest.mark.parametrize("trained", ["all", "adapter", ["*mlp*"]])
def test_a_published_model_learns_answers(place: Path, trained: Any) -> None:
    """Other words than at the start, in a folder of transformers; an adapter is written beside it."""
    name = trained if isinstance(trained, str) else "patterns"
    figures, folder = train(place, name, trained=trained, learning_rate=1e-2)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    losses = [row["evaluation/text_loss"] for row in rows if "evaluation/text_loss" in row]
    assert losses[-1] < 0.5 * losses[0] or trained != "all"
    assert losses[-1] < losses[0]
    assert (figures["sequences"], figures["held_out"], figures["set_aside"]) == (16, 8, 0)
    assert (folder / "adapter" / "adapter_config.json").exists() == (trained == "adapter")
    result = CliRunner().invoke(
        build_app(), ["ask", str(place / "1.wav"), "High or low?", "--model", str(folder)]
    )
    assert result.exit_code == 0 and result.stdout.strip()


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_the_loss_is_that_of_transformers(place: Path, normalization: Any) -> None:
    """Of each answer alone, by the model's own `labels`, with the prompt masked."""
    policy = load_policy(place / "model")
    source = ManifestSource(place / "samples.jsonl")
    aside = SetAside(place / "aside.jsonl", "train")
    maker = AnswerBatchMaker(policy, [source], StepDraws(16, max_tokens=4096), aside, ALONE, "samples")
    task = AnswerTask(policy, maker, normalization)
    (update,) = task.updates(task.batch(0, torch.Generator()), 0, 1)
    ours = sum(float(loss.detach()) for loss in update.loss)
    model, processor = load_audio_llm(place / "model", torch.float32)
    totals, counts = [], []
    for index in range(len(source)):
        loaded = source[index]
        if loaded.sample.is_held_out:
            continue
        *before, last = loaded.sample.messages
        recordings = [clip.load() for clip in loaded.audio]
        inputs = processor_inputs(processor, turns_of(before, recordings), generation_prompt=True)
        answer = f"{last.content[0].text}{processor.tokenizer.eos_token}"  # type: ignore[union-attr]
        words = processor.tokenizer(answer, add_special_tokens=False, return_tensors="pt").input_ids
        ids = torch.cat([inputs["input_ids"], words], dim=1)
        labels = ids.clone()
        labels[:, : inputs["input_ids"].shape[1]] = -100
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            mean = float(model(**inputs, labels=labels).loss)
        totals.append(mean * words.shape[1])
        counts.append(words.shape[1])
    means = [total / count for total, count in zip(totals, counts, strict=True)]
    wanted = sum(totals) / sum(counts) if normalization == "token" else sum(means) / len(means)
    assert ours == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"text_dropout": 0.2}, "text_dropout"),
        ({"shape": {"num_layers": 2}}, "model"),
        ({"codec": "codec"}, "codec"),
        ({"trained": "audio_ffn"}, "audio_ffn"),
    ],
)
def test_settings_without_a_use_are_refused(place: Path, settings: dict[str, Any], key: str) -> None:
    (place / "codec").mkdir(exist_ok=True)
    if "codec" in settings:
        settings = {"codec": str(place / "codec")}
    with pytest.raises(ConfigError, match=key):
        train(place, f"refused-{key}", **settings)


def test_a_sample_without_an_answer_is_set_aside(place: Path, tmp_path: Path) -> None:
    rows = (place / "samples.jsonl").read_text().splitlines()
    broken = json.loads(rows[0])
    broken["messages"] = broken["messages"][:1]
    for n in range(24):
        (tmp_path / f"{n}.wav").write_bytes((place / f"{n}.wav").read_bytes())
    (tmp_path / "samples.jsonl").write_text("\n".join([json.dumps(broken), *rows[1:]]) + "\n")
    figures, folder = train(place, "unanswered", samples=str(tmp_path / "samples.jsonl"), steps=10)
    assert (figures["sequences"], figures["set_aside"]) == (15, 1)
    assert "no answer" in (folder / "set_aside.jsonl").read_text()
