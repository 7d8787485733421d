"""Does a model that listens learn from preferences? Questions about real recordings that it never heard.

    make -C benchmarks learn-preference DATA=../shared/data

Multiple choice of four about spoken digits (takes 0 to 4 held out) and ESC-10 (a fold held out), made by
make_questions.py. For each of three seeds (proofs/learn_preference*.yaml has all settings):

- a model is trained from scratch on few answered questions (`first`);
- from it, one training on preferences between the right and a wrong option of all training recordings (`dpo`: DPO with
  a part of cross entropy on the right option);
- the same budget with chosen and rejected exchanged at random (`shuffled`), and, with one seed, with the recordings
  exchanged among the pairs (`exchanged`): both must gain nothing;
- the first model trained on with the right answers alone, for the same CPU time (`further`);
- a reward model from the first model, which is a supervised one as InstructGPT's (`reward`), and one whose labels are
  shuffled (`reward_shuffled`).

Every model answers the held-out questions greedily, scored as `audiollm evaluate audio-qa` scores. The settings
were chosen with seed 0, which is not among the three. Bars: at least 0.90 of the held-out pairs are ordered right, and
20 points more of the answers are right; the controls gain at most 2 points.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from make_questions import AskedRecording, answered, ask, preference
from proof import Proof, check_data, print_line, print_table, proof_parser, write_once

from audiollm.data.records.sample import Sample

BENCH = "learn_preference"
CHAINS = (f"{BENCH}_first", BENCH, f"{BENCH}_further")
SOURCES: dict[str, tuple[str, str, str, str]] = {
    "digits": ("fsdd/recordings", "{text}_{speaker}_{take}.wav", "take<5", "Which digit is spoken?"),
    "sounds": ("esc10", "{number} - {text}/{fold}-{clip}-{take}.ogg", "fold==1", "Which sound is this?"),
}
"""Source -> its folder, the pattern of its names, the condition of held-out ones, the question."""
FEW = {"digits": 300, "sounds": 120}
"""Answered questions that the first models are trained on."""
MAX_QUESTIONS = {"digits": 100, "sounds": 80}
"""Held-out questions that are asked, at most, evenly picked."""
ANSWER_TOKENS = 24
BARS = {"pairs": 0.90, "gain": 0.20}
print_case = partial(print_line, BENCH)


def main() -> None:
    options = proof_parser(__doc__).parse_args()
    recordings = read_asked(options.data)
    proof = Proof(options.runs / BENCH, options.seeds, options.overrides, CHAINS)
    write_data(proof.folder / "data", recordings, options.seeds)
    proof.run(f"{BENCH}_first")
    proof.run(BENCH)
    spent = {seed: {"cpu_minutes": proof.cpu_minutes(f"aligned_dpo_{seed}")} for seed in proof.seeds}
    proof.run(f"{BENCH}_further", spent)
    questions = [record.question for record in asked_questions(recordings)]
    trained = [stage for stage in proof.arm_stages(BENCH) if stage.startswith("aligned_")]
    stages = [*proof.stages("first"), *trained, *proof.stages("further")]
    report(proof, {stage: proof.score(stage, questions, ANSWER_TOKENS) for stage in stages})


def read_asked(data: Path) -> dict[str, list[AskedRecording]]:
    """The questions about each source's recordings.

    Raises:
        SystemExit: the recordings are not there.
    """
    check_data(data, *(source[0] for source in SOURCES.values()))
    return {
        name: ask(data / folder, pattern, held_out, question)
        for name, (folder, pattern, held_out, question) in SOURCES.items()
    }


def write_data(folder: Path, recordings: dict[str, list[AskedRecording]], seeds: Sequence[int]) -> None:
    """Write the samples of every training, each file once."""
    for name, records in recordings.items():
        trained, held_out = split(records)
        few = random.Random(0).sample(trained, FEW[name])
        order = random.Random(1).sample(range(len(trained)), len(trained))
        moved = [
            replace(record, path=trained[index].path) for record, index in zip(trained, order, strict=True)
        ]
        samples = {
            "few": [answered(record) for record in [*few, *held_out]],
            "right": [answered(record) for record in records],
            "pairs": [_pair(record) for record in records],
            "exchanged": [_pair(record) for record in [*moved, *held_out]],
        }
        for seed in seeds:
            coins = random.Random(f"{name}/{seed}")
            samples[f"shuffled{seed}"] = [
                _pair(record, not record.is_held_out and coins.random() < 0.5) for record in records
            ]
        for kind, kind_samples in samples.items():
            write_once(folder / f"{kind}-{name}.jsonl", kind_samples)


def split(records: Sequence[AskedRecording]) -> tuple[list[AskedRecording], list[AskedRecording]]:
    """Training recordings, and held-out ones."""
    trained = [record for record in records if not record.is_held_out]
    return trained, [record for record in records if record.is_held_out]


def asked_questions(recordings: dict[str, list[AskedRecording]]) -> list[AskedRecording]:
    """The held-out recordings that are asked about, evenly picked."""
    picked = []
    for name, records in recordings.items():
        held_out = split(records)[1]
        count = min(MAX_QUESTIONS[name], len(held_out))
        picked += [held_out[number * len(held_out) // count] for number in range(count)]
    return picked


def report(proof: Proof, scores: dict[str, dict[str, Any]]) -> None:
    """The table for people, and the JSON lines."""
    rows = []
    for stage, stage_scores in scores.items():
        figures = proof.figures(stage)
        by_task = [stage_scores["by_task"][source[-1]]["accuracy"] for source in SOURCES.values()]
        spent = f"{figures['cpu_seconds']:.0f}"
        rows.append([stage, stage_scores["accuracy"], *by_task, figures.get("accuracy", ""), spent])
    title = "Held-out questions answered right, and held-out pairs ordered right"
    print_table(proof.console, title, ("model", "answers", *SOURCES, "pairs", "CPU-s"), rows)

    accuracy = {stage: row["accuracy"] for stage, row in scores.items()}

    def gained(kind: str) -> list[float]:
        pairs = [(f"{kind}_{seed}", f"first_{seed}") for seed in proof.seeds]
        return [accuracy[after] - accuracy[before] for after, before in pairs if after in accuracy]

    def trained(kind: str, figure: str = "accuracy") -> list[float]:
        return [proof.figures(stage)[figure] for stage in proof.stages(kind)]

    print_case("first: answers right", [accuracy[stage] for stage in proof.stages("first")])
    for kind, bars in (("dpo", BARS), ("shuffled", {})):
        print_case(f"{kind}: answers gained", gained(f"aligned_{kind}"), peer=bars.get("gain"))
        print_case(
            f"{kind}: held-out pairs ordered right", trained(f"aligned_{kind}"), peer=bars.get("pairs")
        )
    print_case("further SFT: answers gained", gained("further"))
    for kind, name, bar in (("right", "reward", BARS["pairs"]), ("shuffled", "reward_shuffled", None)):
        print_case(f"{name}: held-out pairs ranked right", trained(f"reward_{kind}"), peer=bar)
        print_case(f"{name}: calibration error", trained(f"reward_{kind}", "calibration_error"))
    if changes := gained("aligned_exchanged"):
        print_case("exchanged recordings: answers gained", changes)


# ------------------------------------------------------------------------------------------------ private


def _pair(record: AskedRecording, is_exchanged: bool = False) -> Sample:
    right, wrong = record.question.answer, record.wrong
    return preference(record, wrong, right) if is_exchanged else preference(record, right, wrong)


if __name__ == "__main__":
    main()
