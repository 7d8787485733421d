"""Folders of published weights, which AUDIOLLM_REAL names, and what tests make of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from audiollm.audio import save
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


def short_understanding(place: Path) -> Path:
    """The run of recipes/understanding/small with a few sentences and steps: Whisper base before SmolLM2-135M."""
    language_model, whisper = folders("smollm2-135m", "whisper-base")
    speaker = make_synthesizer("hibari")
    (place / "people").mkdir()
    for number, sentence in enumerate(SENTENCES[:24]):
        [voice] = speaker.pick_voices(1, 0)
        speech = speaker.speak(sentence, voice, rate=1.0, seed=number)
        samples_1N = torch.from_numpy(speech.samples_N)[None]
        save(place / "people" / f"{number}.wav", samples_1N, speech.sample_rate)
    (place / "texts.txt").write_text("\n".join(SENTENCES[24:]))
    recipe = load_recipe(
        ROOT / "recipes" / "understanding" / "small.yaml",
        [
            f"language_model={language_model}", f"encoder={whisper}", f"texts={place / 'texts.txt'}",
            f"audio={place / 'people'}", "num_texts=40", "voices_texts=30", "align_steps=12", "steps=10",
            "people_samples.min_seconds=10", "spoken_samples.min_seconds=10", "voiced_samples.min_seconds=10",
            "spoken.corpus.test_texts=4", "voiced.corpus.test_texts=4",
        ],
        "small",
        place / "runs",
    )  # fmt: skip
    run_recipe(recipe, Console(quiet=True))
    return place / "runs" / "small"
