"""Methods of reinforcement learning side by side at equal rollouts: questions about real recordings, with thoughts.

    make -C benchmarks compare-rl DATA=../shared/data

Questions, recordings and the first model are those of learn_grpo.py (what that has trained is not trained again); all
trainings are arms of proofs/compare_rl.yaml.

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

import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from learn_grpo import ANSWER_TOKENS, write_data
from proof import Proof, print_line, print_table, proof_parser

from audiollm.evaluate.listening.audio_qa import Question
from audiollm.files.atomic import read_jsonl

matplotlib.use("Agg")
from matplotlib import pyplot

BENCH = "compare_rl"
STEPS, ANSWERS_PER_STEP = 300, 64
METHODS = (
    "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_plus_plus", "remax", "ppo", "online_dpo", "rft"
)  # fmt: skip
PROCESS = {"outcome": "grpo", "process": "process"}
"""Rewards -> their arm."""
KL = ("adaptive", "fixed")
TARGET_ACCURACY = 0.7
"""Share of right greedy answers to the held-out prompts of the training's evaluations."""
TARGET_KL, WITHIN = 1.0, 0.25
"""Nats an answer, and the relative distance from it that is allowed at the end."""
LAST_STEPS = 10
"""Steps at the end of a training whose mean KL counts."""
print_case = partial(print_line, BENCH)


def main() -> None:
    parser = proof_parser(__doc__, seeds=[1])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each training")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    proof = Proof(options.runs / "learn_grpo", options.seeds, options.overrides, ("learn_grpo_first", BENCH))
    questions = write_data(proof.folder / "data", options.data)
    proof.run("learn_grpo_first")
    for arms, report in (PARTS[part] for part in options.parts):
        proof.run(BENCH, arms=arms, steps=options.steps)
        report(proof, questions, options.steps)


def report_methods(proof: Proof, questions: Sequence[Question], steps: int) -> None:
    """The table of all methods, means over the seeds; a JSON line for each; and the picture."""
    rows = []
    for name in ("first", *METHODS):
        stages = [name] if name == "first" else proof.stages(f"by_{name}")
        scores = [proof.score(stage, questions, ANSWER_TOKENS) for stage in stages]
        right = [row["accuracy"] for row in scores]
        formed = [row["well_formed"]["accuracy"] for row in scores]
        spent = statistics.mean(proof.figures(stage)["cpu_seconds"] for stage in stages)
        rows.append([name, statistics.mean(right), statistics.mean(formed), f"{spent:.0f}"])
        print_case(f"{name}: answers right", right)
        print_case(f"{name}: answers in form", formed)
    title = f"{steps} steps of {ANSWERS_PER_STEP} answers each"
    print_table(proof.console, title, ("method", "held-out answers right", "in form", "CPU-s"), rows)
    draw(proof.folder, proof.seeds[0], steps)


def draw(folder: Path, seed: int, steps: int) -> None:
    """Draw the reward of every method over the sampled answers, smoothed, to `methods.png`."""
    figure, axes = pyplot.subplots(figsize=(8, 5))
    window = max(1, steps // 10)
    for name in METHODS:
        reward = [row["reward"] for row in rows_of(folder / f"by_{name}_{seed}", "reward")]
        smooth = [statistics.mean(reward[max(0, place - window) : place + 1]) for place in range(len(reward))]
        axes.plot([ANSWERS_PER_STEP * (place + 1) for place in range(len(smooth))], smooth, label=name)
    axes.set(xlabel="sampled answers", ylabel=f"reward, mean of {window} steps")
    axes.legend(fontsize=8)
    figure.savefig(folder / "methods.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def report_process(proof: Proof, questions: Sequence[Question], steps: int) -> None:
    """Sampled answers until the stated accuracy, and the accuracy at the end, of both."""
    rows = []
    for name, arm in PROCESS.items():
        stages = proof.stages(f"by_{arm}")
        needed = [answers_until(proof.folder / stage, TARGET_ACCURACY) for stage in stages]
        right = [proof.score(stage, questions, ANSWER_TOKENS)["accuracy"] for stage in stages]
        cells = ["not reached" if count is None else str(count) for count in needed]
        rows.append([name, *cells, statistics.mean(right)])
        case = f"{name} rewards: answers until {TARGET_ACCURACY} are right"
        line = {"bench": BENCH, "case": case, "seeds": needed, "unit": "answers (null: not reached)"}
        print(json.dumps(line))
        print_case(f"{name} rewards: answers right", right)
    columns = ("rewards", *(f"seed {seed}" for seed in proof.seeds), "held-out answers right")
    print_table(proof.console, f"Sampled answers until {TARGET_ACCURACY:.0%} are right", columns, rows)


def report_kl(proof: Proof, questions: Sequence[Question], steps: int) -> None:
    """The KL that each controller ends with."""
    rows = []
    for name in KL:
        logs = [rows_of(proof.folder / stage, "kl")[-LAST_STEPS:] for stage in proof.stages(f"by_{name}")]
        ends = [statistics.mean(row["kl"] for row in seed_rows) for seed_rows in logs]
        weight = statistics.mean(seed_rows[-1]["kl_weight"] for seed_rows in logs)
        rows.append([name, statistics.mean(ends), f"{weight:.4f}"])
        print_case(f"{name} KL at the end", ends, unit="nats an answer")
        if name == "adaptive":
            distances = [abs(end / TARGET_KL - 1) for end in ends]
            line: dict[str, Any] = {"bench": BENCH, "case": "adaptive KL: relative distance from its target"}
            line |= {"ours": round(max(distances), 3), "peer": WITHIN, "unit": "share (peer: the bar)"}
            print(json.dumps(line))
    title = f"KL an answer over the last {LAST_STEPS} steps; the target is {TARGET_KL}"
    print_table(proof.console, title, ("controller", "KL", "coefficient"), rows)


def rows_of(stage: Path, key: str) -> list[dict[str, float]]:
    """The rows of a training's log that have a figure, step after step."""
    return [row for row in read_jsonl(stage / "metrics.jsonl") if key in row]


def answers_until(stage: Path, accuracy: float) -> int | None:
    """The answers that were sampled when an evaluation first found as many right; None: none did."""
    key = "evaluation/reward/accuracy"
    for row in rows_of(stage, key):
        if row[key] >= accuracy:
            return int(row["step"] + 1) * ANSWERS_PER_STEP
    return None


PARTS = {
    "methods": (METHODS, report_methods),
    "process": (tuple(PROCESS.values()), report_process),
    "kl": (KL, report_kl),
}
"""Part -> its arms and its report."""


if __name__ == "__main__":
    main()
