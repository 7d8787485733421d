"""Methods of reinforcement learning side by side at equal rollouts: questions about real recordings, with thoughts.

    make -C benchmarks compare-rl DATA=../shared/data

Questions, recordings and the first model are those of learn_grpo.py (what that has trained is not trained again).

1. Methods. Each trains the first model on as many sampled answers: GRPO, Dr. GRPO, DAPO (without its refill, which
   samples more), GSPO, RLOO, REINFORCE++, ReMax (its greedy answers count), PPO with a critic, online DPO and RFT on
   its own right answers. Greedy answers to held-out questions: right, in form; CPU-seconds. methods.png shows the
   rewards over the sampled answers.
2. Process rewards. GRPO on the outcome alone (that of the methods), and with a reward for each step of the thought that
   names what is heard: sampled answers until the greedy answers to held-out questions are right in a stated share.
3. KL. An adaptive coefficient, whose KL must end within 25 % of its target, and a fixed one that begins alike.

Policy gradients are held to the first model by the KL of learn_grpo.py, without which form is lost within as many
steps; online DPO by its own reference, and RFT by nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from learn_grpo import GRPO, HEARD_STEPS, HELD, OUTCOME, first_of, score, write_data
from learn_preference import print_case, run_stages
from rich.console import Console
from rich.table import Table

from audiollm.evaluate.listening.audio_qa import Question
from audiollm.files.atomic import read_json

matplotlib.use("Agg")
from matplotlib import pyplot

BENCH = "compare_rl"
STEPS = 300
SHARED: dict[str, Any] = {**GRPO, "steps": STEPS, "evaluations": 6, "rewards": OUTCOME, "patience": 0}
GRADIENTS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "objective": "grpo"},
    "dr_grpo": {"advantage": "dr_grpo", "objective": "dr_grpo"},
    "dapo": {"advantage": "grpo", "objective": "dapo", "overlong": {"buffer": 8}},
    "gspo": {"advantage": "grpo", "objective": "gspo"},
    "rloo": {"advantage": "rloo", "objective": "rloo"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", "objective": "clip"},
    "remax": {"advantage": "remax", "objective": "clip", "group_size": GRPO["group_size"] - 1},
    "ppo": {"advantage": "gae", "objective": "clip", "critic": {}},
}
METHODS: dict[str, dict[str, Any]] = {
    **{name: {**HELD, **settings} for name, settings in GRADIENTS.items()},
    "online_dpo": {"objective": {"name": "online_dpo", "beta": 0.1}},
    "rft": {"objective": {"name": "online_rft", "least": sum(OUTCOME.values())}},
}
PROCESS: dict[str, dict[str, Any]] = {
    "outcome": METHODS["grpo"],
    "process": {**HELD, "advantage": "grpo_process", "rewards": {**OUTCOME, "steps": HEARD_STEPS}},
}
TARGET_ACCURACY = 0.7
"""Share of right greedy answers to the held-out prompts of the training's evaluations."""
TARGET_KL, WITHIN = 1.0, 0.25
"""Nats an answer, and the relative distance from it that is allowed at the end."""
KL: dict[str, dict[str, Any]] = {
    "adaptive": {
        "kl": {"controller": {"name": "proportional", "coefficient": 0.1, "target": TARGET_KL, "gain": 2.0}}
    },
    "fixed": {"kl": {"controller": {"name": "fixed", "coefficient": 0.1}}},
}
LAST_STEPS = 10
"""Steps at the end of a training whose mean KL counts."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd and esc10")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each training")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = (arguments.runs / "learn_grpo").resolve()
    questions = write_data(folder / "data", arguments.data)
    console = Console(stderr=True)
    for part_name in arguments.parts:
        run_stages(
            folder, recipe_of(folder, part_name, arguments.seeds, arguments.steps), console, name=part_name
        )
        PARTS[part_name](folder, questions, arguments.seeds, arguments.steps, console)


def recipe_of(folder: Path, part_name: str, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """The first model, and every training of a part from it."""
    data = folder / "data"
    stages = first_of(data)
    shared = {"start": "${first.checkpoint}", "samples": str(data / "many.jsonl"), **SHARED, "steps": steps}
    for name, seed in ((name, seed) for seed in seeds for name in TRAININGS[part_name]):
        settings = {**shared, **TRAININGS[part_name][name], "seed": seed}
        stages.append({"name": stage_name(part_name, name, seed), "train_policy": settings})
    return {"name": "learn_grpo", "size": "tiny", "stages": stages}


def stage_name(part_name: str, name: str, seed: int) -> str:
    """The name of a training; GRPO on the outcome alone is one of the methods, and is trained once."""
    return (
        f"methods_grpo_{seed}"
        if (part_name, name) == ("process", "outcome")
        else f"{part_name}_{name}_{seed}"
    )


def report_methods(
    folder: Path, questions: Sequence[Question], seeds: Sequence[int], steps: int, console: Console
) -> None:
    """The table of all methods, means over the seeds; a JSON line for each; and the picture."""
    table = Table(title=f"{steps} steps of {GRPO['batch_size'] * GRPO['group_size']} answers each")
    for column in ("method", "held-out answers right", "in form", "CPU-s"):
        table.add_column(column)
    for name in ("first", *METHODS):
        stages = [name] if name == "first" else [f"methods_{name}_{seed}" for seed in seeds]
        stage_scores = [
            score(folder / stage / "model", questions, folder / "answers" / stage) for stage in stages
        ]
        right = [row["accuracy"] for row in stage_scores]
        formed = [row["well_formed"]["accuracy"] for row in stage_scores]
        spent = [read_json(folder / stage / "stage.json")["figures"]["cpu_seconds"] for stage in stages]
        cells = (f"{statistics.mean(right):.3f}", f"{statistics.mean(formed):.3f}")
        table.add_row(name, *cells, f"{statistics.mean(spent):.0f}")
        print_case(f"{name}: answers right", right, None, BENCH)
        print_case(f"{name}: answers in form", formed, None, BENCH)
    console.print(table)
    draw(folder, seeds[0], steps)


def draw(folder: Path, seed: int, steps: int) -> None:
    """Draw the reward of every method over the sampled answers, smoothed, to `methods.png`."""
    figure, axes = pyplot.subplots(figsize=(8, 5))
    window = max(1, steps // 10)
    for name in METHODS:
        reward = [row["reward"] for row in rows_of(folder / f"methods_{name}_{seed}", "reward")]
        smooth = [statistics.mean(reward[max(0, place - window) : place + 1]) for place in range(len(reward))]
        answers = GRPO["batch_size"] * GRPO["group_size"]
        axes.plot([answers * (place + 1) for place in range(len(smooth))], smooth, label=name)
    axes.set(xlabel="sampled answers", ylabel=f"reward, mean of {window} steps")
    axes.legend(fontsize=8)
    figure.savefig(folder / "methods.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def report_process(
    folder: Path, questions: Sequence[Question], seeds: Sequence[int], steps: int, console: Console
) -> None:
    """Sampled answers until the stated accuracy, and the accuracy at the end, of both."""
    table = Table(title=f"Sampled answers until {TARGET_ACCURACY:.0%} are right")
    for column in ("rewards", *(f"seed {seed}" for seed in seeds), "held-out answers right"):
        table.add_column(column)
    for name in PROCESS:
        stages = [folder / stage_name("process", name, seed) for seed in seeds]
        needed = [answers_until(stage, TARGET_ACCURACY) for stage in stages]
        right = [
            score(stage / "model", questions, folder / "answers" / stage.name)["accuracy"] for stage in stages
        ]
        cells = ["not reached" if count is None else str(count) for count in needed]
        table.add_row(name, *cells, f"{statistics.mean(right):.3f}")
        case = f"{name} rewards: answers until {TARGET_ACCURACY} are right"
        line = {"bench": BENCH, "case": case, "seeds": needed, "unit": "answers (null: not reached)"}
        print(json.dumps(line))
        print_case(f"{name} rewards: answers right", right, None, BENCH)
    console.print(table)


def report_kl(
    folder: Path, questions: Sequence[Question], seeds: Sequence[int], steps: int, console: Console
) -> None:
    """The KL that each controller ends with."""
    table = Table(title=f"KL an answer over the last {LAST_STEPS} steps; the target is {TARGET_KL}")
    for column in ("controller", "KL", "coefficient"):
        table.add_column(column)
    for name in KL:
        rows = [rows_of(folder / f"kl_{name}_{seed}", "kl")[-LAST_STEPS:] for seed in seeds]
        ends = [statistics.mean(row["kl"] for row in seed_rows) for seed_rows in rows]
        weight = statistics.mean(seed_rows[-1]["kl_weight"] for seed_rows in rows)
        table.add_row(name, f"{statistics.mean(ends):.3f}", f"{weight:.4f}")
        print_case(f"{name} KL at the end", ends, None, BENCH, "nats an answer")
        if name == "adaptive":
            distances = [abs(end / TARGET_KL - 1) for end in ends]
            line: dict[str, Any] = {"bench": BENCH, "case": "adaptive KL: relative distance from its target"}
            line |= {"ours": round(max(distances), 3), "peer": WITHIN, "unit": "share (peer: the bar)"}
            print(json.dumps(line))
    console.print(table)


def rows_of(stage: Path, key: str) -> list[dict[str, float]]:
    """The rows of a training's log that have a figure, step after step."""
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def answers_until(stage: Path, accuracy: float) -> int | None:
    """The answers that were sampled when an evaluation first found as many right; None: none did."""
    key = "evaluation/reward/accuracy"
    for row in rows_of(stage, key):
        if row[key] >= accuracy:
            return int(row["step"] + 1) * int(GRPO["batch_size"]) * int(GRPO["group_size"])
    return None


TRAININGS = {"methods": METHODS, "process": PROCESS, "kl": KL}
PARTS = {"methods": report_methods, "process": report_process, "kl": report_kl}


if __name__ == "__main__":
    main()
