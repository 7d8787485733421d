"""The small recipes, from published weights; their folders are named by AUDIOLLM_REAL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from audiollm.audio import save
from audiollm.files.atomic import read_json
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from pipelines.annotate.synthesizers.choice import make_synthesizer

ROOT = Path(__file__).parent.parent
SENTENCES = [
    f"{who} {verb} {what} {where}."
    for who in ("The old man", "A young woman", "My neighbour", "Nobody")
    for verb in ("carried", "painted", "remembered")
    for what in ("the wooden boat", "a heavy basket", "the song")
    for where in ("in the garden", "before winter")
]


def folders(*names: str) -> list[Path]:
    """Folders of published weights, or a skip with its reason."""
    root = os.environ.get("AUDIOLLM_REAL")
    if not root or not all((Path(root) / name).is_dir() for name in names):
        pytest.skip(f"AUDIOLLM_REAL names no folder with {', '.join(names)}")
    return [Path(root) / name for name in names]


@pytest.mark.slow
def test_understanding_begins_from_published_weights(tmp_path: Path) -> None:
    """All stages with a few sentences and steps: the loss falls, and the encoder hears each recording once."""
    language_model, whisper = folders("smollm2-135m", "whisper-base")
    speaker = make_synthesizer("hibari")
    (tmp_path / "people").mkdir()
    for number, sentence in enumerate(SENTENCES[:24]):
        [voice] = speaker.pick_voices(1, 0)
        speech = speaker.speak(sentence, voice, rate=1.0, seed=number)
        samples_1N = torch.from_numpy(speech.samples_N)[None]
        save(tmp_path / "people" / f"{number}.wav", samples_1N, speech.sample_rate)
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES[24:]))
    recipe = load_recipe(
        ROOT / "recipes" / "understanding" / "small.yaml",
        [
            f"language_model={language_model}", f"encoder={whisper}", f"texts={tmp_path / 'texts.txt'}",
            f"audio={tmp_path / 'people'}", "num_texts=40", "voices_texts=30", "align_steps=12", "steps=10",
            "people_samples.min_seconds=10", "spoken_samples.min_seconds=10", "voiced_samples.min_seconds=10",
            "spoken.corpus.test_texts=4", "voiced.corpus.test_texts=4",
        ],
        "small",
        tmp_path / "runs",
    )  # fmt: skip
    run_recipe(recipe, Console(quiet=True))
    folder = tmp_path / "runs" / "small"
    losses = [read_json(folder / name / "stage.json")["figures"]["text_loss"] for name in ("align", "train")]
    assert losses[1] < losses[0] < 6
    assert (folder / "report.html").is_file() and (folder / "train" / "adapter").is_dir()
