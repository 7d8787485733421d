"""Methods of preference learning side by side at equal steps, and what each does to the length of answers.

    make -C benchmarks compare-preference DATA=../shared/data

Questions, recordings and first models are those of learn_preference.py (what that has trained is not trained again).

1. Every method of recipes/align/compare.yaml trains each seed's first model on the same pairs for as many steps. A
   method without cross entropy of its own gets as much of it as in learn_preference.py: a model this small forgets
   how to answer under a contrast alone. Greedy answers right, held-out pairs ordered right, words, CPU-seconds.
2. Length. Answers come in wordings of one to thirteen words. First models learn all four from few examples; then
   pairs whose chosen answer is the longer one in 90 %, and the right one in 75 %, train DPO, R-DPO, SamPO, LD-DPO and
   SimPO, all beside the same cross entropy on those few. Words of an answer drawn at temperature 1, before and after;
   DPO's must grow, the others' less.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learn_preference import (
    FEW,
    FIRST,
    HEARING,
    MAX_QUESTIONS,
    SEEDS,
    SOURCES,
    data_sources,
    evenly_picked,
    print_case,
    read_asked,
    run_stages,
    score,
    write_data,
    write_once,
)
from make_questions import AskedRecording, answered, conversation, preference
from rich.console import Console
from rich.table import Table

from audiollm.data.records.sample import Message, Sample, TextPart
from audiollm.files.atomic import read_json
from pipelines.answers.samplers import AnswerSampling, load_sampler

CROSS_ENTROPY = {"name": "sft", "weight": 0.5}
METHODS: dict[str, list[dict[str, Any]]] = {
    "dpo": [{"name": "dpo", "beta": 0.1}, CROSS_ENTROPY],
    "ipo": [{"name": "ipo", "beta": 0.1}, CROSS_ENTROPY],
    "r_dpo": [{"name": "r_dpo", "beta": 0.1, "alpha": 0.01}, CROSS_ENTROPY],
    "sampo": [{"name": "sampo", "beta": 0.1}, CROSS_ENTROPY],
    "ld_dpo": [{"name": "ld_dpo", "beta": 0.1, "ld_alpha": 0.5}, CROSS_ENTROPY],
    "simpo": [{"name": "simpo", "beta": 2.0}, CROSS_ENTROPY],
    "cpo": [{"name": "cpo"}],
    "orpo": [{"name": "orpo"}],
    "dpop": [{"name": "dpop", "beta": 0.1}, CROSS_ENTROPY],
    "tdpo": [{"name": "tdpo2", "beta": 0.1}, CROSS_ENTROPY],
    "kto": [{"name": "kto", "beta": 0.1}, CROSS_ENTROPY],
    "bco": [{"name": "bco", "beta": 0.1}, CROSS_ENTROPY],
    "sft": [{"name": "sft"}],
}
ALIGNED: dict[str, Any] = {"learning_rate": 3e-4, "steps": 100, "batch_size": 16, "evaluations": 1}
WORDINGS = (
    "{}",
    "It is {}.",
    "What I hear in it is {}.",
    "I have listened to it with care, and what I hear is {}.",
)
CHOSEN_LONGER, CHOSEN_RIGHT = 0.90, 0.75
LENGTH_METHODS: dict[str, list[dict[str, Any]]] = {
    "dpo": [{"name": "dpo", "beta": 0.1}],
    "r_dpo": [{"name": "r_dpo", "beta": 0.1, "alpha": 0.2}],
    "sampo": [{"name": "sampo", "beta": 0.1}],
    "ld_dpo": [{"name": "ld_dpo", "beta": 0.1, "ld_alpha": 0.3}],
    "simpo": [{"name": "simpo", "beta": 2.0}],
}
LENGTH_ALIGNED: dict[str, Any] = {"learning_rate": 5e-5, "steps": 60, "batch_size": 16, "evaluations": 1}
LENGTH_PTX = 0.5
"""Weight of the cross entropy on the few answered questions, whose wordings are even. Their first models are trained
with `normalization: token` (`sequence` would let them say short wordings more often), so that it changes no length."""
BENCH = "compare_preference"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd and esc10")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--part", choices=("methods", "length", "both"), default="both")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = arguments.runs / "learn_preference"
    recordings = read_asked(arguments.data)
    write_data(folder, recordings, arguments.seeds)
    console = Console(stderr=True)
    questions = [
        record for name in SOURCES for record in evenly_picked(recordings[name], MAX_QUESTIONS[name])
    ]
    if arguments.part != "length":
        run_stages(folder, methods_of(folder, arguments.seeds), console, name=BENCH)
        report_methods(folder, questions, arguments.seeds, console)
    if arguments.part != "methods":
        write_lengths(folder, recordings)
        run_stages(folder, lengths_of(folder, arguments.seeds), console, name="lengths")
        report_lengths(folder, questions, arguments.seeds, console)


def methods_of(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Every method from each seed's first model."""
    stages: list[dict[str, Any]] = []
    for seed in seeds:
        few = data_sources(folder, "few")
        stages.append({"name": f"first_{seed}", "train": {"samples": few, **HEARING, **FIRST, "seed": seed}})
        pairs = data_sources(folder, "pairs")
        for method, objective in METHODS.items():
            settings = {"samples": pairs, "start": f"${{first_{seed}.checkpoint}}", "objective": objective}
            stages.append({"name": f"by_{method}_{seed}",
                           "train_preference": {**settings, **ALIGNED, "seed": seed}})  # fmt: skip
    return {"name": "learn_preference", "size": "tiny", "stages": stages}


def write_lengths(folder: Path, recordings: dict[str, list[AskedRecording]]) -> None:
    """Write few answered questions in every wording, and pairs whose chosen answer is more often longer than right."""
    for name, records in recordings.items():
        trained = [record for record in records if not record.is_held_out]
        held_out = [record for record in records if record.is_held_out]
        dice = random.Random(f"wordings/{name}")
        few = [*random.Random(0).sample(trained, FEW[name]), *held_out]
        worded = [_worded(record, dice.choice(WORDINGS)) for record in few]
        write_once(folder / "data" / f"worded-{name}.jsonl", worded)
        write_once(folder / "data" / f"long-{name}.jsonl", [_long_pair(record, dice) for record in trained])


def lengths_of(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """First models of all wordings, and the methods against length beside DPO."""
    stages: list[dict[str, Any]] = []
    for seed in seeds:
        few = data_sources(folder, "worded")
        taught = {"samples": few, **HEARING, **FIRST, "normalization": "token", "seed": seed}
        stages.append({"name": f"worded_{seed}", "train": taught})
        for method, objective in LENGTH_METHODS.items():
            settings = {
                "samples": data_sources(folder, "long"),
                "start": f"${{worded_{seed}.checkpoint}}",
                "objective": objective,
                "ptx": {"samples": few, "weight": LENGTH_PTX},
                **LENGTH_ALIGNED,
            }
            stages.append({"name": f"long_{method}_{seed}", "train_preference": {**settings, "seed": seed}})
    return {"name": "learn_preference", "size": "tiny", "stages": stages}


def report_methods(
    folder: Path, questions: Sequence[AskedRecording], seeds: Sequence[int], console: Console
) -> None:
    """The table of all methods: means over the seeds; and a JSON line for each."""
    table = Table(title=f"{ALIGNED['steps']} steps each, held-out questions and pairs")
    for column in ("method", "answers right", "pairs ordered right", "words", "CPU-s"):
        table.add_column(column)
    for method in ("first", *METHODS):
        stages = [f"{method}_{seed}" if method == "first" else f"by_{method}_{seed}" for seed in seeds]
        right = [
            score(folder / stage / "model", questions, folder / "answers" / stage)["accuracy"]
            for stage in stages
        ]
        figures = [read_json(folder / stage / "stage.json")["figures"] for stage in stages]
        ordered = [row["accuracy"] for row in figures if "accuracy" in row]
        words = [
            mean_words(folder / stage / "model", questions, seed)
            for stage, seed in zip(stages, seeds, strict=True)
        ]
        spent = [row["cpu_seconds"] for row in figures]
        table.add_row(method, f"{_mean_value(right):.3f}", f"{_mean_value(ordered):.3f}" if ordered else "",
                      f"{_mean_value(words):.2f}", f"{_mean_value(spent):.0f}")  # fmt: skip
        print_case(f"{method}: answers right", right, None, BENCH)
        if ordered:
            print_case(f"{method}: held-out pairs ordered right", ordered, None, BENCH)
        print_case(f"{method}: words of an answer", words, None, BENCH, "words")
    console.print(table)


def report_lengths(
    folder: Path, questions: Sequence[AskedRecording], seeds: Sequence[int], console: Console
) -> None:
    """Words and accuracy of each method, and how many words fewer than DPO's, seed by seed."""
    table = Table(title=f"Chosen longer in {CHOSEN_LONGER:.0%}, right in {CHOSEN_RIGHT:.0%}")
    for column in ("method", "words of an answer", "more than before", "fewer than DPO", "answers right"):
        table.add_column(column)
    words: dict[str, list[float]] = {}
    for method in ("worded", *LENGTH_METHODS):
        stages = [f"{method}_{seed}" if method == "worded" else f"long_{method}_{seed}" for seed in seeds]
        words[method] = [
            mean_words(folder / stage / "model", questions, seed)
            for stage, seed in zip(stages, seeds, strict=True)
        ]
        right = [
            score(folder / stage / "model", questions, folder / "answers" / stage)["accuracy"]
            for stage in stages
        ]
        grown = [after - first for after, first in zip(words[method], words["worded"], strict=True)]
        fewer = [
            dpo - after for after, dpo in zip(words[method], words.get("dpo", words[method]), strict=True)
        ]
        table.add_row(method, f"{_mean_value(words[method]):.2f}", f"{_mean_value(grown):+.2f}",
                      f"{_mean_value(fewer):+.2f}", f"{_mean_value(right):.3f}")  # fmt: skip
        print_case(f"length, {method}: words of an answer", words[method], None, BENCH, "words")
        print_case(f"length, {method}: answers right", right, None, BENCH)
        if method != "worded":
            print_case(f"length, {method}: words more than before", grown, None, BENCH, "words")
            print_case(f"length, {method}: words fewer than DPO", fewer, None, BENCH, "words")
    console.print(table)


def mean_words(model: Path, questions: Sequence[AskedRecording], seed: int) -> float:
    """Mean number of words of an answer to each question, drawn at temperature 1."""
    sampler = load_sampler(model, None)
    sampling = AnswerSampling(temperature=1.0, top_p=1.0, max_tokens=64, seed=seed)
    prompts = [
        Sample(id=recording.question.id, task="audio-qa", messages=conversation(recording))
        for recording in questions
    ]
    answers = [sampler.sample(sample, [0], sampling)[0] for sample in prompts]
    return _mean_value([len(answer.split()) for answer in answers])


# ------------------------------------------------------------------------------------------------ private


def _worded(record: AskedRecording, wording: str) -> Sample:
    right = Message(role="assistant", content=[TextPart(text=wording.format(record.question.answer))])
    sample = answered(record)
    return sample.model_copy(update={"messages": [*sample.messages[:-1], right]})


def _long_pair(record: AskedRecording, dice: random.Random) -> Sample:
    short, long = sorted(dice.sample(range(len(WORDINGS)), 2))
    chosen, rejected = (long, short) if dice.random() < CHOSEN_LONGER else (short, long)
    right, wrong = record.question.answer, record.wrong
    is_right = dice.random() < CHOSEN_RIGHT
    return preference(
        record,
        WORDINGS[chosen].format(right if is_right else wrong),
        WORDINGS[rejected].format(wrong if is_right else right),
    )


def _mean_value(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
