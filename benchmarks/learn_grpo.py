"""Does a model that listens and thinks learn from rewards? Questions about real recordings that it never heard.

    make -C benchmarks learn-grpo DATA=../shared/data

Seven kinds of questions (make_reasoning.py) about spoken digits and sounds, on held-out takes and a held-out fold. A
model is trained from scratch to name what it hears in recordings of the training takes, and on ten answered questions
of each kind, with thoughts (`first`). From it, for each of three seeds (proofs/learn_grpo*.yaml has all settings):

- GRPO on the training questions, rewarded where the answer is right and in form, and for each step of the thought by
  the share of the names in it that are heard (`grpo`);
- the same with the rewards shuffled over each step's answers (`shuffled`), and, with one seed, with the recordings
  exchanged among the questions (`exchanged`): both must gain nothing;

and the first model trained on with what it has, for the CPU time of GRPO (`further`).

Every model answers the held-out questions greedily, scored as `audiollm evaluate audio-qa` scores. The settings
were chosen with seed 0 of GRPO, which is not among the three, from the same first model. Bars: 20 points more of the
answers are right, format in 0.98, thoughts of at most 50 words in 0.99; the controls gain at most 2 points on average.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from make_reasoning import KINDS, Reasoned, ReasoningMaker, exchanged
from proof import Proof, check_data, print_line, print_table, proof_parser, write_once

from audiollm.evaluate.listening.audio_qa import Question

BENCH = "learn_grpo"
CHAINS = (f"{BENCH}_first", BENCH, f"{BENCH}_further")
NAMING_COUNTS = {"digit": 3000, "sound": 1200, "first": 1000, "count": 400}
"""Recordings of each kind, for the model that names what it hears."""
FEW, TRAIN_COUNT, HELD_OUT_COUNT = 10, 500, 60
"""Questions of each kind: answered ones for the first model, those of GRPO, held-out ones."""
ANSWER_TOKENS = 40
BARS = {"gain": 0.20, "format": 0.98, "short": 0.99}
print_case = partial(print_line, BENCH)


def main() -> None:
    options = proof_parser(__doc__).parse_args()
    proof = Proof(options.runs / BENCH, options.seeds, options.overrides, CHAINS)
    questions = write_data(proof.folder / "data", options.data)
    proof.run(f"{BENCH}_first")
    proof.run(BENCH)
    proof.run(f"{BENCH}_further", cpu_minutes=proof.cpu_minutes(f"policy_grpo_{proof.seeds[0]}"))
    stages = ["first", *proof.arm_stages(BENCH), "further"]
    report(proof, {stage: proof.score(stage, questions, ANSWER_TOKENS) for stage in stages})


def write_data(folder: Path, data: Path) -> list[Question]:
    """Write the samples of every training; return the held-out questions.

    Raises:
        SystemExit: the recordings are not there.
    """
    check_data(data, "fsdd", "esc10")
    train, test = (ReasoningMaker(data, folder / "joined", is_held_out) for is_held_out in (False, True))
    named_train = [reasoned for kind, count in NAMING_COUNTS.items() for reasoned in train.make(kind, count)]
    questions = {kind: train.make(kind, TRAIN_COUNT) for kind in KINDS}
    test_questions = [reasoned for kind in KINDS for reasoned in test.make(kind, HELD_OUT_COUNT)]
    named = [reasoned.named(True) for reasoned in test_questions if reasoned.kind in NAMING_COUNTS]
    write_once(folder / "heard.jsonl", [*(reasoned.named(False) for reasoned in named_train), *named])
    training: dict[str, list[list[Reasoned]]] = {
        "few": [questions[kind][:FEW] for kind in KINDS],
        "many": [questions[kind] for kind in KINDS],
        "exchanged": [exchanged(questions[kind]) for kind in KINDS],
    }
    for name, groups in training.items():
        samples = [reasoned.sample(False) for group in groups for reasoned in group]
        held_out = [reasoned.sample(True) for reasoned in test_questions]
        write_once(folder / f"{name}.jsonl", [*samples, *held_out])
    return [reasoned.question for reasoned in test_questions]


def report(proof: Proof, scores: dict[str, dict[str, Any]]) -> None:
    """The table for people, and the JSON lines."""
    kinds = list(scores["first"]["by_task"])
    rows = [
        [stage, row["accuracy"], *(row["by_task"][kind]["accuracy"] for kind in kinds),
         f"{proof.figures(stage)['cpu_seconds']:.0f}"]
        for stage, row in scores.items()
    ]  # fmt: skip
    print_table(proof.console, "Held-out questions answered right", ("model", "all", *kinds, "CPU-s"), rows)
    before = scores["first"]["accuracy"]

    def gained(*stages: str) -> list[float]:
        return [scores[stage]["accuracy"] - before for stage in stages if stage in scores]

    print_case("first: answers right", [before])
    print_case("grpo: answers gained", gained(*proof.stages("policy_grpo")), peer=BARS["gain"])
    print_case("shuffled: answers gained", gained(*proof.stages("policy_shuffled")))
    if changes := gained(*proof.stages("policy_exchanged")):
        print_case("exchanged recordings: answers gained", changes)
    print_case("further SFT: answers gained", gained("further"))
    for name, key, bar in (("in form", "well_formed", "format"), ("short", "short_thoughts", "short")):
        shares = [scores[stage][key]["accuracy"] for stage in proof.stages("policy_grpo")]
        print_case(f"grpo: answers {name}", shares, peer=BARS[bar])


if __name__ == "__main__":
    main()
