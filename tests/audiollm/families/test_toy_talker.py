"""A third family, a talker with a code predictor, goes through every stage without a line outside its folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart
from audiollm.data.records.shards import ShardWriter
from audiollm.errors import StageError
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from tests.audiollm.families.toy_families import TOYS, talker_installed

__all__ = ["talker_installed"]
WORDS = ("one", "two", "six")
FAST = {"batch_size": 4, "precision": "fp32", "report_to": [], "learning_rate": 1e-2, "evaluations": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, talker_installed: Path) -> Any:
    """A model with random weights, and shards: a word says which code is said, the first answer is the right one."""
    with pytest.MonkeyPatch.context() as patch:
        for place in (talker_installed, TOYS):
            patch.syspath_prepend(place)
        from toy_talker.model import MODEL_TYPE, Talker, TalkerConfig

        from audiollm.models.pretrained import save_model

        made = tmp_path_factory.mktemp("talker")
        torch.manual_seed(0)
        model = Talker(TalkerConfig())
        save_model(made / "model", model, MODEL_TYPE, model.config)
        _write(made / "spoken", pairs=False)
        _write(made / "pairs", pairs=True)
        yield made
        for name in [name for name in sys.modules if name.startswith("toy_talker")]:
            del sys.modules[name]


def _write(folder: Path, pairs: bool) -> None:
    writer = ShardWriter(folder, samples_per_shard=16)
    for number in range(16):
        word = WORDS[number % 3]
        codes = [torch.full((2, 4), 1 + number % 3), torch.full((2, 9), 7)][: 2 if pairs else 1]
        question = Message(role="user", content=[TextPart(text=word)])
        speech = [[AudioPart(path=f"{take}.wav")] for take in range(len(codes))]
        answers = (
            [RatedAnswer(content=part, score=-take) for take, part in enumerate(speech)] if pairs else []
        )
        messages = [question] if pairs else [question, Message(role="assistant", content=speech[0])]
        split = {"split": "test" if number >= 12 else "train"}
        sample = Sample(id=f"{word}{number}", messages=messages, task="tts", metadata=split, answers=answers)
        writer.write(number, sample, [[codes_KT.numpy() for codes_KT in codes]])
    writer.close({"codec": {"num_codebooks": 2, "codebook_size": 16}})


def run(folder: Path, name: str, stage: str, **settings: Any) -> dict[str, Any]:
    recipe = {"name": "any", "size": "tiny", "seed": 1, "stages": [{stage: {**FAST, **settings}}]}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(path, name=name, runs=folder), Console(quiet=True))
    figures: dict[str, Any] = json.loads((folder / name / stage / "stage.json").read_text())["figures"]
    return figures


def curve(folder: Path, run: str, stage: str, key: str) -> list[float]:
    rows = map(json.loads, (folder / run / stage / "metrics.jsonl").read_text().splitlines())
    return [row[key] for row in rows if key in row]


def spoken(folder: Path, model: Path, text: str) -> Any:
    """The likeliest codes of a text."""
    from toy_talker.model import BEGIN, Talker, TalkerConfig
    from toy_talker.policy import GREEDY
    from toy_talker.speaking import speak

    from audiollm.models.pretrained import load_model

    config, weights = load_model(model, "toy_talker", TalkerConfig)
    talker = Talker(config)
    talker.load_state_dict(weights)
    (state,) = speak(talker, torch.tensor([*text.encode(), BEGIN]), [0], GREEDY, 12)
    return state


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The model after `train`."""
    run(folder, "sft", "train", start=str(folder / "model"), shards=str(folder / "spoken"), steps=60)
    return folder / "sft" / "train" / "model"


def test_train_teaches_what_is_said(folder: Path, trained: Path) -> None:
    losses = curve(folder, "sft", "train", "audio_loss")
    assert losses[-1] < 0.2
    for number, word in enumerate(WORDS):
        state = spoken(folder, trained, word)
        assert state.has_ended and torch.stack(state.frames, 1).tolist() == [[1 + number] * 4] * 2


@pytest.mark.parametrize(
    "changed", [{}, {"trained": "adapter", "lora": {"target_modules": ["q_proj", "v_proj"]}}]
)
def test_preferences_are_learned(folder: Path, trained: Path, changed: dict[str, Any]) -> None:
    name = f"dpo{len(changed)}"
    run(
        folder, name, "train_preference", model=str(trained), samples=str(folder / "pairs"), objective="dpo",
        steps=10, **changed,
    )  # fmt: skip
    margins = curve(folder, name, "train_preference", "margin")
    assert margins[-1] > 1
    assert (folder / name / "train_preference" / "model" / "config.json").is_file()


def test_rewards_are_learned(folder: Path) -> None:
    """The model with random weights, which says noise for long, learns to say four frames."""
    run(
        folder, "grpo", "train_policy", model=str(folder / "model"), samples=str(folder / "spoken"), answer="audio",
        rewards={"toy_talker.rewards:few_frames": 1.0}, group_size=8, steps=20, max_frames=12,
    )  # fmt: skip
    rewards = curve(folder, "grpo", "train_policy", "reward")
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 1


def test_what_the_model_cannot_take_is_refused(folder: Path) -> None:
    with pytest.raises(StageError, match="set answer: audio|this model speaks"):
        run(
            folder, "text", "train_policy", model=str(folder / "model"), samples=str(folder / "spoken"),
            rewards={"toy_talker.rewards:few_frames": 1.0}, steps=10,
        )  # fmt: skip
