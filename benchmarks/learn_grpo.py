"""Does a model that listens and thinks learn from rewards? Questions about real recordings that it never heard.

    make -C benchmarks learn-grpo DATA=../shared/data

Seven kinds of questions (make_reasoning.py) about spoken digits and sounds, on held-out takes and a held-out fold. A
model is trained from scratch to name what it hears in recordings of the training takes, and on ten answered questions
of each kind, with thoughts (`first`). From it, for each of three seeds:

- GRPO on the training questions, rewarded where the answer is right and in form, and for each step of the thought by
  the share of the names in it that are heard (`grpo`); with outcomes alone the thought is lost, and without a KL the
  form is;
- the same with the rewards shuffled over each step's answers (`shuffled`), and, with one seed, with the recordings
  exchanged among the questions (`exchanged`): both must gain nothing;

and the first model trained on with what it has, for the CPU time of GRPO (`further`).

Every model answers the held-out questions greedily, scored as `audiollm evaluate audio-qa` scores. The settings below
were chosen with seed 0 of GRPO, which is not among the three, from the same first model. Bars: 20 points more of the
answers are right, format in 0.98, thoughts of at most 50 words in 0.99; the controls gain at most 2 points on average.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learn_preference import print_case, run_stages, write_once
from make_reasoning import KINDS, NAMES, Reasoned, ReasoningMaker, exchanged
from rich.console import Console
from rich.table import Table

from audiollm.evaluate.listening.audio_qa import Question, evaluate_audio_qa
from audiollm.evaluate.listening.replies import ask_all, by_answerer
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.subjects.loading import load_answerer
from audiollm.files.atomic import read_json

SEEDS = (1, 2, 3)
EXCHANGED_SEED = 1
NAMING_COUNTS = {"digit": 3000, "sound": 1200, "first": 1000, "count": 400}
"""Recordings of each kind, for the model that names what it hears."""
FEW, TRAIN_COUNT, HELD_OUT_COUNT = 10, 500, 60
"""Questions of each kind: answered ones for the first model, those of GRPO, held-out ones."""
ANSWER_TOKENS = 40
FIRST: dict[str, Any] = {
    "audio_in": "features",
    "text_weight": 1.0,
    "augment": {},
    "eval_audio_samples": 0,
    "shape": {
        "hidden_size": 192,
        "num_layers": 4,
        "audio_ffn_layers": [],
        "audio_encoder": {"stem": "conv2d", "num_layers": 2, "window_s": 8},
    },
    "learning_rate": 5e-4,
    "batch_size": 24,
    "steps": 1000,
    "evaluations": 2,
    "seed": 0,
}
HEARD_WEIGHT, FEW_WEIGHT = 4.0, 1.0
"""Shares of the two in every step of the first model's training."""
GRPO: dict[str, Any] = {
    "group_size": 8,
    "batch_size": 8,
    "max_answer_tokens": ANSWER_TOKENS,
    "learning_rate": 1e-4,
    "steps": 1000,
    "evaluations": 3,
    "eval_prompts": 70,
}
HELD: dict[str, Any] = {"kl": {"controller": {"name": "fixed", "coefficient": 0.04}}}
"""The KL that holds the policy to the first model (k3, ratio-corrected, in the loss)."""
OUTCOME: dict[str, Any] = {"accuracy": 2.0, "format": 1.0}
HEARD_STEPS: dict[str, Any] = {"weight": 1.0, "names": list(NAMES)}
"""Each step of the thought earns the share of the names in it that are heard."""
REWARDS: dict[str, dict[str, Any]] = {
    "grpo": {**OUTCOME, "steps": HEARD_STEPS},
    "shuffled": {"shuffled_rewards:accuracy": 2.0, "format": 1.0, "shuffled_rewards:steps": 1.0},
    "exchanged": {**OUTCOME, "steps": HEARD_STEPS},
}
ADVANTAGE = "grpo_process"
BARS = {"gain": 0.20, "format": 0.98, "short": 0.99}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd and esc10")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = (arguments.runs / "learn_grpo").resolve()
    questions = write_data(folder / "data", arguments.data)
    console = Console(stderr=True)
    run_stages(folder, recipe_of(folder, arguments.seeds), console)
    run_stages(folder, further_of(folder, arguments.seeds), console, name="further")
    scores = {stage: score(folder / stage / "model", questions, folder / "answers" / stage)
              for stage in ["first", *stages_of(arguments.seeds), "further"]}  # fmt: skip
    report(folder, scores, arguments.seeds, console)


def write_data(folder: Path, data: Path) -> list[Question]:
    """Write the samples of every training; return the held-out questions.

    Raises:
        SystemExit: the recordings are not there.
    """
    if not (data / "fsdd").is_dir() or not (data / "esc10").is_dir():
        raise SystemExit(f"no recordings in {data}: give the folder of real recordings with --data")
    train, test = (ReasoningMaker(data, folder / "joined", is_held_out) for is_held_out in (False, True))
    named_train = [reasoned for kind, count in NAMING_COUNTS.items() for reasoned in train.make(kind, count)]
    train_questions = {kind: train.make(kind, TRAIN_COUNT) for kind in KINDS}
    test_questions = [reasoned for kind in KINDS for reasoned in test.make(kind, HELD_OUT_COUNT)]
    held_out = [reasoned.sample(True) for reasoned in test_questions]
    named = [reasoned.named(True) for reasoned in test_questions if reasoned.kind in NAMING_COUNTS]
    write_once(folder / "heard.jsonl", [*(reasoned.named(False) for reasoned in named_train), *named])

    def write(name: str, examples: Sequence[Reasoned]) -> None:
        write_once(folder / f"{name}.jsonl", [*(reasoned.sample(False) for reasoned in examples), *held_out])

    write("few", [reasoned for kind in KINDS for reasoned in train_questions[kind][:FEW]])
    write("many", [reasoned for kind in KINDS for reasoned in train_questions[kind]])
    write("exchanged", [reasoned for kind in KINDS for reasoned in exchanged(train_questions[kind])])
    return [reasoned.question for reasoned in test_questions]


def stages_of(seeds: Sequence[int]) -> list[str]:
    """Names of all trainings on fresh answers."""
    names = [f"{kind}_{seed}" for seed in seeds for kind in ("grpo", "shuffled")]
    return [*names, f"exchanged_{EXCHANGED_SEED}"] if EXCHANGED_SEED in seeds else names


def recipe_of(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """All trainings but `further`, whose budget is the CPU time of GRPO."""
    data = folder / "data"
    stages = first_of(data)
    for name in stages_of(seeds):
        kind, seed = name.split("_")
        samples = data / ("exchanged.jsonl" if kind == "exchanged" else "many.jsonl")
        settings = {"start": "${first.checkpoint}", "samples": str(samples), "rewards": REWARDS[kind]}
        settings["advantage"] = ADVANTAGE
        stages.append({"name": name, "train_policy": {**settings, **GRPO, **HELD, "seed": int(seed)}})
    return {"name": "learn_grpo", "size": "tiny", "stages": stages}


def first_of(data: Path) -> list[dict[str, Any]]:
    """The model that all trainings on fresh answers start from."""
    return [{"name": "first", "train": {"samples": first_sources(data), **FIRST}}]


def first_sources(data: Path) -> list[dict[str, Any]]:
    """What is heard, and the few answered questions."""
    return [
        {"path": str(data / "heard.jsonl"), "weight": HEARD_WEIGHT},
        {"path": str(data / "few.jsonl"), "weight": FEW_WEIGHT},
    ]


def further_of(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The first model trained on with what it was trained on, for the CPU time of the first GRPO."""
    spent = read_json(folder / f"grpo_{seeds[0]}" / "stage.json")["figures"]["cpu_seconds"]
    settings = {
        **{key: value for key, value in FIRST.items() if key not in ("steps", "shape")},
        "start": str(folder / "first" / "model"),
        "samples": first_sources(folder / "data"),
        "cpu_minutes": round(spent / 60, 3),
    }
    return {"name": "learn_grpo", "size": "tiny", "stages": [{"name": "further", "train": settings}]}


def score(model: Path, questions: Sequence[Question], out: Path) -> dict[str, Any]:
    """Ask a model all questions, greedily, and score its answers as `audiollm evaluate audio-qa` does."""
    subject = load_answerer(str(model), None, max_tokens=ANSWER_TOKENS)
    inquiries = [question.inquiry(Path("/")) for question in questions]
    replies = ask_all(
        by_answerer(subject), subject.fingerprint, inquiries, RowStore(out / "kept.jsonl"), lambda _: None
    )
    return dict(evaluate_audio_qa(questions, replies, Path("/")).result)


def report(folder: Path, scores: dict[str, dict[str, Any]], seeds: Sequence[int], console: Console) -> None:
    """The table for people, and the JSON lines."""
    names = list(scores["first"]["by_task"])
    table = Table(title="Held-out questions answered right")
    for column in ("model", "all", *names, "CPU-s"):
        table.add_column(column)
    for stage, stage_scores in scores.items():
        spent = read_json(folder / stage / "stage.json")["figures"]["cpu_seconds"]
        parts = [f"{stage_scores['by_task'][name]['accuracy']:.3f}" for name in names]
        table.add_row(stage, f"{stage_scores['accuracy']:.3f}", *parts, f"{spent:.0f}")
    console.print(table)
    before = scores["first"]["accuracy"]
    print_case("first: answers right", [before], None, "learn_grpo")
    for kind, bar in (("grpo", BARS["gain"]), ("shuffled", None)):
        gained = [scores[f"{kind}_{seed}"]["accuracy"] - before for seed in seeds]
        print_case(f"{kind}: answers gained", gained, bar, "learn_grpo")
    if (stage := f"exchanged_{EXCHANGED_SEED}") in scores:
        print_case(
            "exchanged recordings: answers gained", [scores[stage]["accuracy"] - before], None, "learn_grpo"
        )
    print_case("further SFT: answers gained", [scores["further"]["accuracy"] - before], None, "learn_grpo")
    for name, key, bar in (
        ("in form", "well_formed", BARS["format"]),
        ("short", "short_thoughts", BARS["short"]),
    ):
        shares = [scores[f"grpo_{seed}"][key]["accuracy"] for seed in seeds]
        print_case(f"grpo: answers {name}", shares, bar, "learn_grpo")


if __name__ == "__main__":
    main()
