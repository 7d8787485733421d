"""The stage `new_thinker`, and `train_preference` as SFT of what it leaves: pictures and sound to records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from audiollm.audio import Waveform
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart, write_samples
from audiollm.data.records.video_clips import PictureSettings
from audiollm.errors import ConfigError, StageError
from audiollm.models.audio_llms.loading import load_audio_llm
from audiollm.models.audio_llms.new_thinker import NewThinkerConfig, planned_size, write_thinker
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from audiollm.video.writing import write_video

COLOURS = ("red", "green", "blue")
SMALL = {
    "vocabulary": 320, "width": 32, "layers": 1, "encoder_width": 32, "audio_layers": 1, "vision_layers": 1,
    "mel_bins": 16, "window_s": 1, "min_pixels": 784, "max_pixels": 3136,
}  # fmt: skip


def samples(folder: Path) -> Path:
    """Films of one colour with a tone, whose record names the colour; every third one is held out."""
    made = []
    for number in range(9):
        colour = number % 3
        frame = np.zeros((32, 32, 3), np.uint8)
        frame[..., colour] = 200
        tone = torch.sin(2 * torch.pi * 300 * torch.arange(8_000) / 16_000)[None]
        write_video(folder / f"{number}.mkv", [frame] * 4, 8, Waveform(0.3 * tone, 16_000))
        span = {"path": f"{number}.mkv", "start_s": 0.0, "end_s": 0.5}
        answer = {"events": [{"sound": COLOURS[colour], "start_s": 0.25, "end_s": 0.5}]}
        messages = [
            Message(role="user", content=[VideoPart(**span), AudioPart(**span), TextPart(text="What?")]),
            Message(role="assistant", content=[TextPart(text=json.dumps(answer))]),
        ]
        split = {"split": "test"} if number >= 6 else {}
        made.append(Sample(id=f"s{number}", task="think", messages=messages, metadata=split))
    write_samples(folder / "thinking.jsonl", made)
    return folder / "thinking.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run: a new thinker, all of its weights trained, and an adapter for what came of it."""
    place = tmp_path_factory.mktemp("thinker")
    train: dict[str, Any] = {
        "samples": str(samples(place)), "objective": "sft", "pictures": {"per_second": 4, "side": 28},
        "steps": 30, "batch_size": 6, "learning_rate": 1e-2, "evaluations": 1, "eval_answers": 2,
    }  # fmt: skip
    stages = [
        {"new_thinker": {"samples": train["samples"], **SMALL}},
        {"name": "whole", "train_preference": {"start": "${new_thinker.checkpoint}", **train}},
        {
            "name": "adapter",
            "train_preference": {
                "start": "${whole.checkpoint}", **train, "trained": "adapter", "steps": 10, "learning_rate": 1e-3,
            },
        },
    ]  # fmt: skip
    (place / "r.yaml").write_text(yaml.safe_dump({"name": "r", "stages": stages}))
    run_recipe(load_recipe(place / "r.yaml", runs=place), Console(quiet=True))
    return place / "r"


def test_a_new_thinker_has_a_vocabulary_of_records(folder: Path) -> None:
    loaded = load_audio_llm(folder / "new_thinker" / "model")
    assert type(loaded.model) is Qwen2_5OmniThinkerForConditionalGeneration
    tokenizer = loaded.processor.tokenizer
    text = json.dumps({"events": [{"sound": "red", "start_s": 0.25, "end_s": 12.5}]})
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and len(ids) < 20
    assert [token for token in tokenizer.convert_ids_to_tokens(ids) if token.isdigit()] == list("025125")
    assert tokenizer.decode(tokenizer("ü 声 <|x|>")["input_ids"]) == "ü 声 <|x|>"
    assert (loaded.processor.video_processor.min_pixels, loaded.processor.video_processor.max_pixels) == (
        784,
        3136,
    )


def test_both_towers_are_trained_and_transformers_reads_what_is_saved(folder: Path) -> None:
    losses = [json.loads(line).get("loss") for line in (folder / "whole" / "metrics.jsonl").open()]
    trained = [loss for loss in losses if loss is not None]
    assert trained[-1] < min(1.0, trained[0])  # random weights have log 320 = 5.8
    before = load_audio_llm(folder / "new_thinker" / "model").model.state_dict()
    after = load_audio_llm(folder / "whole" / "model").model.state_dict()
    for tower in ("visual", "audio_tower"):
        names = [name for name in before if f".{tower}." in f".{name}" and "proj" in name]
        assert names and all(not torch.equal(before[name], after[name]) for name in names)
    assert PictureSettings.beside(folder / "whole" / "model") == PictureSettings(per_second=4, side=28)
    rows = [json.loads(line) for line in (folder / "whole" / "answers.jsonl").open()]
    assert rows and "[pictures of " in json.dumps(rows[0])


def test_an_adapter_is_merged_into_what_is_saved(folder: Path) -> None:
    before, after = (
        load_audio_llm(folder / stage / "model").model.state_dict() for stage in ("whole", "adapter")
    )
    assert before.keys() == after.keys() and any(not torch.equal(before[n], after[n]) for n in before)
    assert (folder / "adapter" / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize("changes", [{}, {"width": 288, "layers": 6, "encoder_width": 192}])
def test_the_planned_size_is_near_the_real_one(tmp_path: Path, changes: dict[str, int]) -> None:
    words = [f"{number:x} word{number}" for number in range(3000)]
    config = NewThinkerConfig.model_validate({"samples": str(samples(tmp_path)), **changes})
    figures = write_thinker(tmp_path / "model", config, words)
    assert planned_size(config) == pytest.approx(figures["parameters"], rel=0.1)


def test_a_sound_is_heard_in_one_piece(tmp_path: Path) -> None:
    """Pieces of 2 s would all have the same positions: a click at 0.5 s would be as one at 2.5 s."""
    config = NewThinkerConfig.model_validate({"samples": str(samples(tmp_path)), **SMALL, "window_s": 4})
    write_thinker(tmp_path / "model", config, ["a"])
    heard = []
    for click in (50, 250):
        mel_BMT = torch.zeros(1, 16, 400)
        mel_BMT[..., click] = 1
        model = load_audio_llm(tmp_path / "model").model
        with torch.no_grad():
            found = model.get_audio_features(
                mel_BMT, feature_attention_mask=torch.ones(1, 400, dtype=torch.long)
            )
        heard.append(getattr(found, "pooler_output", found))
    early_LD, late_LD = heard[0][:50], heard[1][50:]
    assert early_LD.shape == late_LD.shape == (50, 32)
    assert (early_LD - late_LD).abs().amax() > 0.05 * early_LD.abs().amax()


def test_a_weight_without_samples_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    given = [
        {"path": str(samples(tmp_path)), "weight": 0.9},
        {"path": str(tmp_path / "none.jsonl"), "weight": 0.1},
    ]
    train = {"start": str(folder / "whole" / "model"), "samples": given, "objective": "sft", "steps": 10}
    train["pictures"] = {"per_second": 4, "side": 28}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"name": "r", "stages": [{"train_preference": train}]}))
    with pytest.raises(StageError, match=r"source 1 has weight 0\.1 and no samples") as caught:
        run_recipe(load_recipe(tmp_path / "r.yaml", runs=tmp_path), Console(quiet=True))
    assert "none.jsonl" in str(caught.value)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="min_pixels 5000 is above max_pixels 3136"):
        NewThinkerConfig.model_validate({"samples": str(samples(tmp_path)), **SMALL, "min_pixels": 5000})
    (tmp_path / "pictures.json").write_text('{"per_second": -1}')
    with pytest.raises(ConfigError, match=r"pictures\.json"):
        PictureSettings.beside(tmp_path)
