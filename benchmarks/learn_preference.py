"""Does a model that listens learn from preferences? Questions about real recordings that it never heard.

    make -C benchmarks learn-preference DATA=../shared/data

Multiple choice of four about spoken digits (takes 0 to 4 held out) and ESC-10 (a fold held out), made by
make_questions.py. For each of three seeds:

- a model is trained from scratch on few answered questions (`first`);
- from it, one training on preferences between the right and a wrong option of all training recordings (`dpo`: DPO with
  a part of cross entropy on the right option);
- the same budget with chosen and rejected exchanged at random (`shuffled`), and, with one seed, with the recordings
  exchanged among the pairs (`exchanged`): both must gain nothing;
- the first model trained on with the right answers alone, for the same CPU time (`further`);
- a reward model from the first model, which is a supervised one as InstructGPT's (`reward`), and one whose labels are
  shuffled (`reward_shuffled`).

Every model answers the held-out questions greedily, scored as `audiollm evaluate audio-qa` scores. The settings below
were chosen with seed 0, which is not among the three. Bars: at least 0.90 of the held-out pairs are ordered right, and
20 points more of the answers are right; the controls gain at most 2 points.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from make_questions import AskedRecording, answered, ask, preference
from rich.console import Console
from rich.table import Table
from scipy import stats

from audiollm.data.records.sample import Sample, write_samples
from audiollm.evaluate.listening.audio_qa import evaluate_audio_qa
from audiollm.evaluate.listening.replies import ask_all, by_answerer
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.subjects.loading import load_answerer
from audiollm.files.atomic import read_json
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe

SEEDS = (1, 2, 3)
EXCHANGED_SEED = 1
"""The seed of the control whose recordings are exchanged."""
SOURCES: dict[str, dict[str, str]] = {
    "digits": {
        "folder": "fsdd/recordings",
        "pattern": "{text}_{speaker}_{take}.wav",
        "held_out": "take<5",
        "question": "Which digit is spoken?",
    },
    "sounds": {
        "folder": "esc10",
        "pattern": "{number} - {text}/{fold}-{clip}-{take}.ogg",
        "held_out": "fold==1",
        "question": "Which sound is this?",
    },
}
FEW = {"digits": 300, "sounds": 120}
"""Answered questions that the first models are trained on."""
MAX_QUESTIONS = {"digits": 100, "sounds": 80}
"""Held-out questions that are asked, at most, evenly picked."""
WEIGHTS = {"digits": 2, "sounds": 1}
HEARING: dict[str, Any] = {
    "audio_in": "features",
    "text_weight": 1.0,
    "augment": {},
    "eval_audio_samples": 0,
}
FIRST: dict[str, Any] = {
    "shape": {"audio_encoder": {"stem": "conv2d", "num_layers": 2, "window_s": 8}},
    "learning_rate": 5e-4,
    "steps": 300,
    "batch_size": 24,
}
ALIGNED: dict[str, Any] = {
    "objective": [{"name": "dpo", "beta": 0.1}, {"name": "sft", "weight": 0.5}],
    "learning_rate": 3e-4,
    "steps": 400,
    "batch_size": 16,
}
REWARD: dict[str, Any] = {"learning_rate": 3e-4, "steps": 400, "batch_size": 16}
FURTHER: dict[str, Any] = {"learning_rate": 3e-4, "batch_size": 16}
BARS = {"pairs": 0.90, "gain": 0.20}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd and esc10")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = arguments.runs / "learn_preference"
    recordings = read_asked(arguments.data)
    write_data(folder, recordings, arguments.seeds)
    console = Console(stderr=True)
    run_stages(folder, recipe_of(folder, arguments.seeds), console)
    run_stages(folder, further_of(folder, arguments.seeds), console, name="further")
    run_stages(folder, rewards_of(folder, arguments.seeds), console, name="rewards")
    questions = [
        record for name in SOURCES for record in evenly_picked(recordings[name], MAX_QUESTIONS[name])
    ]
    scores = {
        stage: score(folder / stage / "model", questions, folder / "answers" / stage)
        for stage in stages_of(arguments.seeds)
    }
    report(folder, scores, arguments.seeds, console)


def read_asked(data: Path) -> dict[str, list[AskedRecording]]:
    """The questions about each source's recordings.

    Raises:
        SystemExit: the recordings are not there.
    """
    recordings = {}
    for name, source in SOURCES.items():
        audio = data / source["folder"]
        if not audio.is_dir():
            raise SystemExit(f"no recordings in {audio}: give the folder of real recordings with --data")
        recordings[name] = ask(audio, source["pattern"], source["held_out"], source["question"])
    return recordings


def write_data(folder: Path, recordings: dict[str, list[AskedRecording]], seeds: Sequence[int]) -> None:
    """Write the samples of every training, each file once."""
    for name, records in recordings.items():
        trained = [record for record in records if not record.is_held_out]
        held_out = [record for record in records if record.is_held_out]
        few = random.Random(0).sample(trained, FEW[name])
        write_once(folder / "data" / f"few-{name}.jsonl", [answered(record) for record in [*few, *held_out]])
        write_once(folder / "data" / f"right-{name}.jsonl", [answered(record) for record in records])
        write_once(folder / "data" / f"pairs-{name}.jsonl", [_pair(record) for record in records])
        for seed in seeds:
            coins = random.Random(f"{name}/{seed}")
            shuffled = [_pair(r, not r.is_held_out and coins.random() < 0.5) for r in records]
            write_once(folder / "data" / f"shuffled{seed}-{name}.jsonl", shuffled)
        order = random.Random(1).sample(range(len(trained)), len(trained))
        moved = [
            replace(record, path=trained[index].path) for record, index in zip(trained, order, strict=True)
        ]
        write_once(
            folder / "data" / f"exchanged-{name}.jsonl", [_pair(record) for record in [*moved, *held_out]]
        )


def stages_of(seeds: Sequence[int]) -> list[str]:
    """Names of all trained models."""
    names = [f"{kind}_{seed}" for seed in seeds for kind in ("first", "dpo", "shuffled", "further")]
    return [*names, f"exchanged_{EXCHANGED_SEED}"] if EXCHANGED_SEED in seeds else names


def recipe_of(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """All trainings but `further`, whose budget is the CPU time of `dpo`."""
    stages = []
    for seed in seeds:
        few = data_sources(folder, "few")
        stages.append({"name": f"first_{seed}", "train": {"samples": few, **HEARING, **FIRST, "seed": seed}})
        stages.append(_aligned(folder, "dpo", "pairs", seed))
        stages.append(_aligned(folder, "shuffled", f"shuffled{seed}", seed))
        if seed == EXCHANGED_SEED:
            stages.append(_aligned(folder, "exchanged", "exchanged", seed))
    return {"name": "learn_preference", "size": "tiny", "stages": [*stages]}


def further_of(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The first models trained on with the right answers, each for the CPU time that its `dpo` took."""
    stages = []
    for seed in seeds:
        spent = read_json(folder / f"dpo_{seed}" / "stage.json")["figures"]["cpu_seconds"]
        settings = {
            **HEARING,
            **FURTHER,
            "seed": seed,
            "start": str(folder / f"first_{seed}" / "model"),
            "cpu_minutes": round(spent / 60, 3),
        }
        shards = data_sources(folder, "right")
        stages.append({"name": f"further_{seed}", "train": {"samples": shards, **settings}})
    return {"name": "learn_preference", "size": "tiny", "stages": stages}


def rewards_of(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Reward models on the pairs and on the shuffled ones, each from the first model."""
    stages = []
    for seed in seeds:
        for kind, data in (("reward", "pairs"), ("reward_shuffled", f"shuffled{seed}")):
            settings = {
                "samples": data_sources(folder, data),
                "start": str(folder / f"first_{seed}" / "model"),
            }
            stages.append({"name": f"{kind}_{seed}", "train_reward": {**settings, **REWARD, "seed": seed}})
    return {"name": "learn_preference", "size": "tiny", "stages": stages}


def score(model: Path, questions: Sequence[AskedRecording], out: Path) -> dict[str, Any]:
    """Ask a model all questions, greedily, and score its answers as `audiollm evaluate audio-qa` does."""
    subject = load_answerer(str(model), None, max_tokens=24)
    listed = [record.question for record in questions]
    inquiries = [question.inquiry(Path("/")) for question in listed]
    replies = ask_all(
        by_answerer(subject), subject.fingerprint, inquiries, RowStore(out / "kept.jsonl"), lambda _: None
    )
    return dict(evaluate_audio_qa(listed, replies, Path("/")).result)


def report(folder: Path, scores: dict[str, dict[str, Any]], seeds: Sequence[int], console: Console) -> None:
    """The table for people, and the JSON lines."""
    table = Table(title="Held-out questions answered right, and held-out pairs ordered right")
    for column in ("model", "answers", "digits", "sounds", "pairs", "CPU-s"):
        table.add_column(column)
    for stage, stage_scores in scores.items():
        figures = read_json(folder / stage / "stage.json")["figures"]
        by_task = {row: stage_scores["by_task"][row]["accuracy"] for row in stage_scores["by_task"]}
        pairs = f"{figures['accuracy']:.3f}" if "accuracy" in figures else ""
        parts = [f"{by_task[source['question']]:.3f}" for source in SOURCES.values()]
        table.add_row(
            stage, f"{stage_scores['accuracy']:.3f}", *parts, pairs, f"{figures['cpu_seconds']:.0f}"
        )
    console.print(table)
    gains = {
        kind: [scores[f"{kind}_{seed}"]["accuracy"] - scores[f"first_{seed}"]["accuracy"] for seed in seeds]
        for kind in ("dpo", "shuffled", "further")
    }
    ordered = {
        kind: [read_json(folder / f"{kind}_{seed}" / "stage.json")["figures"]["accuracy"] for seed in seeds]
        for kind in ("dpo", "shuffled")
    }
    first = [scores[f"first_{seed}"]["accuracy"] for seed in seeds]
    print_case("first: answers right", first, None)
    print_case("dpo: answers gained", gains["dpo"], BARS["gain"])
    print_case("dpo: held-out pairs ordered right", ordered["dpo"], BARS["pairs"])
    print_case("shuffled: answers gained", gains["shuffled"], None)
    print_case("shuffled: held-out pairs ordered right", ordered["shuffled"], None)
    print_case("further SFT: answers gained", gains["further"], None)
    for kind in ("reward", "reward_shuffled"):
        trained = [read_json(folder / f"{kind}_{seed}" / "stage.json")["figures"] for seed in seeds]
        bar = BARS["pairs"] if kind == "reward" else None
        print_case(f"{kind}: held-out pairs ranked right", [row["accuracy"] for row in trained], bar)
        print_case(f"{kind}: calibration error", [row["calibration_error"] for row in trained], None)
    if (stage := f"exchanged_{EXCHANGED_SEED}") in scores:
        gained = scores[stage]["accuracy"] - scores[f"first_{EXCHANGED_SEED}"]["accuracy"]
        print_case("exchanged recordings: answers gained", [gained], None)


def run_stages(folder: Path, recipe: dict[str, Any], console: Console, name: str = "recipe") -> None:
    """Run the stages into the folder; what is done is not done again."""
    path = folder / f"{name}.yaml"
    text = yaml.safe_dump(recipe, sort_keys=False)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    run_recipe(load_recipe(path, name=folder.name, runs=folder.parent), console)


def write_once(path: Path, samples: list[Sample]) -> None:
    """Once: a training whose data were written again would start afresh."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_samples(path, samples)


def data_sources(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The files of a kind, with the weights of their sources."""
    return [{"path": str((folder / "data" / f"{kind}-{name}.jsonl").resolve()), "weight": WEIGHTS[name]}
            for name in SOURCES]  # fmt: skip


def evenly_picked(records: Sequence[AskedRecording], max_count: int) -> list[AskedRecording]:
    """At most so many of the held-out ones."""
    held_out = [record for record in records if record.is_held_out]
    count = min(max_count, len(held_out))
    return [held_out[number * len(held_out) // count] for number in range(count)]


def print_case(
    case: str,
    values: Sequence[float],
    bar: float | None,
    bench: str = "learn_preference",
    unit: str = "share",
) -> None:
    """Print a JSON line: the mean over seeds, and its 95 % interval where there are several."""
    mean = sum(values) / len(values)
    line: dict[str, Any] = {"bench": bench, "case": case, "ours": round(mean, 4)}
    if bar is not None:
        line |= {"peer": bar, "ratio": round(mean / bar, 3)}
    line["unit"] = f"{unit} (peer: the bar)" if bar is not None else unit
    if len(values) > 1:
        spread = statistics.stdev(values) / math.sqrt(len(values))
        half = float(stats.t.ppf(0.975, len(values) - 1)) * spread
        line["interval"] = [round(mean - half, 4), round(mean + half, 4)]
    print(json.dumps({**line, "seeds": [round(value, 4) for value in values]}))


# ------------------------------------------------------------------------------------------------ private


def _aligned(folder: Path, kind: str, data: str, seed: int) -> dict[str, Any]:
    settings = {"samples": data_sources(folder, data), "start": f"${{first_{seed}.checkpoint}}", **ALIGNED}
    return {"name": f"{kind}_{seed}", "train_preference": {**settings, "seed": seed}}


def _pair(record: AskedRecording, is_exchanged: bool = False) -> Sample:
    right, wrong = record.question.answer, record.wrong
    return preference(record, wrong, right) if is_exchanged else preference(record, right, wrong)


if __name__ == "__main__":
    main()
