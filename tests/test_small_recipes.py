"""The small recipes: from published weights, whose folders AUDIOLLM_REAL names, and from random ones of their class."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from audiollm.files.atomic import read_json, read_jsonl
from audiollm.interpret.live.live_model import LiveModel
from audiollm.interpret.live.sound_input import file_pieces
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from tests.audiollm.supervised.heard_samples import write_manifest
from tests.audiollm.supervised.test_encode_features import training, whisper
from tests.audiollm.supervised.train_samples import run_stage
from tests.pipelines.soundscapes.clip_inputs import write_inputs
from tests.published_weights import SENTENCES, folders, short_understanding

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_understanding_begins_from_published_weights(tmp_path: Path) -> None:
    """All stages with a few sentences and steps: the loss falls, and the encoder hears each recording once."""
    folder = short_understanding(tmp_path)
    losses = [read_json(folder / name / "stage.json")["figures"]["text_loss"] for name in ("align", "train")]
    assert losses[1] < losses[0] < 6
    assert (folder / "report.html").is_file() and (folder / "train" / "adapter").is_dir()


@pytest.mark.slow
def test_an_interpreter_begins_from_a_model_that_hears(tmp_path: Path) -> None:
    """All stages of interpret/small with a few sentences and steps, from a projector that has learned nothing yet."""
    language_model, whisper, enpt = folders("smollm2-135m", "whisper-base", "enpt")
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES))
    program = f"env PYTHONPATH={enpt} {sys.executable} {ROOT / 'recipes' / 'interpret' / 'english_to_portuguese.py'}"
    hearing = {"path": str(whisper), "trained": False, "padded": "auto", "stride": 4, "projector_size": 1024}
    speech = {
        "recognizers": [],
        "corpus": {
            "synthesizer": "hibari",
            "texts": str(tmp_path / "texts.txt"),
            "num_texts": 12,
            "test_texts": 2,
        },
    }
    begin = {
        "name": "begin", "size": "small", "seed": 0,
        "stages": [
            {"annotate": speech},
            {"compose": {"segments": "${annotate.segments}", "tasks": {"asr": 1.0}, "min_seconds": 5}},
            {"train": {
                "start": str(language_model), "audio_in": "features", "samples": "${compose.samples}", "steps": 10,
                "shape": {"audio_ffn_layers": [], "audio_encoder": hearing}, "trained": ["audio_encoder_proj.*"],
                "batch_size": 2, "text_weight": 1.0, "audio_weight": 0.0, "eval_audio_samples": 0,
            }},
        ],
    }  # fmt: skip
    (tmp_path / "begin.yaml").write_text(yaml.safe_dump(begin))
    run_recipe(load_recipe(tmp_path / "begin.yaml", [], "begin", tmp_path / "runs"), Console(quiet=True))
    recipe = load_recipe(
        ROOT / "recipes" / "interpret" / "small.yaml",
        [
            f"start={tmp_path / 'runs' / 'begin' / 'train'}", f"encoder={whisper}", f"texts={tmp_path / 'texts.txt'}",
            f"translator=command:{program}", "num_texts=20", "voices_texts=8", "steps=10", "ppo_steps=10",
            "spoken.corpus.test_texts=4", "voiced.corpus.test_texts=2", "sft.batch_size=2", "ppo.batch_size=2",
            "ppo.eval_prompts=2", "ppo.evaluations=1", "before.max_streams=2", "after.max_streams=2",
        ],
        "small",
        tmp_path / "runs",
    )  # fmt: skip
    run_recipe(recipe, Console(quiet=True))
    folder = tmp_path / "runs" / "small"
    for name in ("before", "after"):
        figures = read_json(folder / name / "figures.json")
        assert figures["streams"] == 2 and figures["chrF"] >= 0
    live = LiveModel.load(folder / "ppo")
    session = live.session()
    recording = next((folder / "spoken" / "corpus").rglob("*.wav"))
    actions = [
        action for piece_1N in file_pieces(recording, live.sample_rate) for action in session.hear(piece_1N)
    ]
    actions += session.finish()
    assert live.frame_rate == 12.5 and len(actions) == session.chunks >= 2


def run(folder: Path, recipe: str, *overrides: str) -> Path:
    loaded = load_recipe(ROOT / "recipes" / recipe, list(overrides), "small", folder / recipe.split("/")[0])
    run_recipe(loaded, Console(quiet=True))
    return loaded.folder


def answer_length(batch: Sequence[Any]) -> list[float]:
    """A reward of which a random model earns different shares."""
    return [float(len(answer.text)) for answer in batch]


@pytest.mark.slow
def test_reasoner_and_preferences_run_from_random_weights(tmp_path: Path) -> None:
    """All stages of both recipes, a few steps of each training: a Whisper encoder frozen before a small decoder."""
    encoder = whisper(tmp_path / "whisper")
    first = training(encoder)
    first["shape"]["audio_encoder"] |= {"stride": 4, "padded": "auto", "projector_size": 1024}
    run_stage(tmp_path / "first", str(write_manifest(tmp_path, 12)), **first)
    inputs = write_inputs(tmp_path / "inputs")
    folder = run(
        tmp_path, "audio_reasoner/small.yaml", "size=tiny", f"encoder={encoder}",
        f"model={tmp_path / 'first'}", f"events={inputs['events'][0]['folder']}", "events_test=a.*",
        f"segments={inputs['segments']}", "learned_clips=14", "clips=14", "test_clips=7", "learning_steps=10",
        "steps=10", "train_policy.batch_size=2", "train_policy.group_size=2", "train_policy.max_answer_tokens=8",
        "train_policy.eval_prompts=2", "train_policy.evaluations=1",
        "rewards={'tests.test_small_recipes:answer_length': 1.0}",
    )  # fmt: skip
    scores = {
        name: read_json(folder / name / "results.json") for name in ("before", "after", "without_audio")
    }
    assert all(score["questions"] == 7 and score["chance"] < 0.5 for score in scores.values())
    assert (folder / "train_policy" / "rollouts" / "000009.jsonl").is_file()
    replies = read_jsonl(folder / "without_audio" / "audio-qa" / "rows.jsonl")
    assert {row["category"] for row in replies} == {
        "which", "presence", "count", "order", "loudness", "voice", "words",
    }  # fmt: skip
    folder = run(
        tmp_path, "align/small.yaml", "size=tiny", f"encoder={encoder}", f"model={folder / 'train'}",
        f"samples={folder / 'multiple_choice' / 'samples.jsonl'}", "questions=7", "steps=10", "reward_steps=10",
        "sample_answers.max_answer_tokens=8",
    )  # fmt: skip
    assert (folder / "train_preference" / "model").is_dir() and (folder / "train_reward" / "model").is_dir()
    assert read_json(folder / "after" / "results.json")["questions"] == 7
    assert (folder / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "voices"),
    [("small", "synthesizer: hibari"), ("small_voices", "synthesizer: espeak, voices: 5, test_voices: 2")],
)
def test_a_voice_says_sentences_in_phrases_and_whisper_hears_it(
    tmp_path: Path, name: str, voices: str
) -> None:
    """All stages with a few sentences and steps: the model speaks in phrases, and the named judge hears it."""
    (whisper,) = folders("whisper-tiny.en")
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES[:40]))
    corpus = f"{{{voices}, texts: {tmp_path / 'texts.txt'}, test_texts: 4}}"
    recipe = load_recipe(
        ROOT / "recipes" / "voice" / f"{name}.yaml",
        [
            f"judge={whisper}", f"corpus={corpus}", "codec_steps=12", "minutes=0.2", "compose.min_seconds=10",
            "train.batch_size=4", "train.eval_audio_samples=0", "generate.max_prompts=2", "generate.max_duration_s=3",
            "train_tokenizer.hidden_size=64", "train_tokenizer.mel_hidden_size=48",
            "train_tokenizer.blocks=[1,1,1,1]",
        ],
        "voice",
        tmp_path / "runs",
    )  # fmt: skip
    run_recipe(recipe, Console(quiet=True))
    folder = tmp_path / "runs" / "voice"
    trained = read_json(folder / "train" / "model" / "trained.json")
    assert (trained["phrase_words"], trained["pronunciation"]) == (2, "hibari")
    figures = read_json(folder / "evaluate" / "stage.json")["figures"]
    assert figures["recognizer"] == "whisper-tiny.en"
    assert figures["recognizer_real_word_error_rate"] < 0.5 < figures["recognizer_generated_word_error_rate"]
    assert figures.get("new_voices") == (2 if name == "small_voices" else None), "voices of the test alone"
    assert (folder / "report.html").is_file()
