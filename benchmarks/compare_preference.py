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

import random
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from learn_preference import ANSWER_TOKENS, FEW, asked_questions, read_asked, split, write_data
from make_questions import AskedRecording, answered, conversation, preference
from proof import Proof, arms_of, print_line, print_table, proof_parser, write_once

from audiollm.data.records.sample import Message, Sample, TextPart
from pipelines.answers.samplers import AnswerSampling, load_sampler

BENCH = "compare_preference"
WORDINGS = (
    "{}",
    "It is {}.",
    "What I hear in it is {}.",
    "I have listened to it with care, and what I hear is {}.",
)
CHOSEN_LONGER, CHOSEN_RIGHT = 0.90, 0.75
print_case = partial(print_line, BENCH)


def main() -> None:
    parser = proof_parser(__doc__)
    parser.add_argument("--part", choices=("methods", "length", "both"), default="both")
    options = parser.parse_args()
    recordings = read_asked(options.data)
    folder = options.runs / "learn_preference"
    chains = ("learn_preference_first", BENCH, f"{BENCH}_length")
    proof = Proof(folder, options.seeds, options.overrides, chains)
    write_data(proof.folder / "data", recordings, options.seeds)
    questions = asked_questions(recordings)
    if options.part != "length":
        proof.run("learn_preference_first")
        proof.run(BENCH)
        report_methods(proof, questions)
    if options.part != "methods":
        write_lengths(proof.folder / "data", recordings)
        proof.run(f"{BENCH}_length")
        report_lengths(proof, questions)


def write_lengths(folder: Path, recordings: dict[str, list[AskedRecording]]) -> None:
    """Write few answered questions in every wording, and pairs whose chosen answer is more often longer than right."""
    for name, records in recordings.items():
        trained, held_out = split(records)
        dice = random.Random(f"wordings/{name}")
        few = [*random.Random(0).sample(trained, FEW[name]), *held_out]
        worded = [_worded(record, dice.choice(WORDINGS)) for record in few]
        write_once(folder / f"worded-{name}.jsonl", worded)
        write_once(folder / f"long-{name}.jsonl", [_long_pair(record, dice) for record in trained])


def report_methods(proof: Proof, questions: Sequence[AskedRecording]) -> None:
    """The table of all methods: means over the seeds; and a JSON line for each."""
    rows = []
    for method in ("first", *arms_of(BENCH, "methods")):
        stages = proof.stages(method if method == "first" else f"by_{method}")
        right, words = _right_answers(proof, stages, questions), _mean_words(proof, stages, questions)
        figures = [proof.figures(stage) for stage in stages]
        ordered = [row["accuracy"] for row in figures if "accuracy" in row]
        spent = statistics.mean(row["cpu_seconds"] for row in figures)
        rows.append([method, statistics.mean(right), statistics.mean(ordered) if ordered else "",
                     f"{statistics.mean(words):.2f}", f"{spent:.0f}"])  # fmt: skip
        print_case(f"{method}: answers right", right)
        if ordered:
            print_case(f"{method}: held-out pairs ordered right", ordered)
        print_case(f"{method}: words of an answer", words, unit="words")
    columns = ("method", "answers right", "pairs ordered right", "words", "CPU-s")
    print_table(proof.console, "Equal steps each, held-out questions and pairs", columns, rows)


def report_lengths(proof: Proof, questions: Sequence[AskedRecording]) -> None:
    """Words and accuracy of each method, and how many words fewer than DPO's, seed by seed."""
    rows: list[list[object]] = []
    words: dict[str, list[float]] = {}
    for method in ("worded", *arms_of(f"{BENCH}_length", "methods")):
        stages = proof.stages(method if method == "worded" else f"long_{method}")
        right, words[method] = _right_answers(proof, stages, questions), _mean_words(proof, stages, questions)
        grown = [after - first for after, first in zip(words[method], words["worded"], strict=True)]
        dpo_words = words.get("dpo", words[method])
        fewer = [dpo - after for after, dpo in zip(words[method], dpo_words, strict=True)]
        means = (
            f"{statistics.mean(words[method]):.2f}",
            *(f"{statistics.mean(x):+.2f}" for x in (grown, fewer)),
        )
        rows.append([method, *means, statistics.mean(right)])
        print_case(f"length, {method}: words of an answer", words[method], unit="words")
        print_case(f"length, {method}: answers right", right)
        if method != "worded":
            print_case(f"length, {method}: words more than before", grown, unit="words")
            print_case(f"length, {method}: words fewer than DPO", fewer, unit="words")
    title = f"Chosen longer in {CHOSEN_LONGER:.0%}, right in {CHOSEN_RIGHT:.0%}"
    columns = ("method", "words of an answer", "more than before", "fewer than DPO", "answers right")
    print_table(proof.console, title, columns, rows)


def mean_words(model: Path, questions: Sequence[AskedRecording], seed: int) -> float:
    """Mean number of words of an answer to each question, drawn at temperature 1."""
    sampler = load_sampler(model, None)
    sampling = AnswerSampling(temperature=1.0, top_p=1.0, max_tokens=64, seed=seed)
    prompts = [
        Sample(id=recording.question.id, task="audio-qa", messages=conversation(recording))
        for recording in questions
    ]
    return statistics.mean(len(sampler.sample(sample, [0], sampling)[0].split()) for sample in prompts)


# ------------------------------------------------------------------------------------------------ private


def _right_answers(proof: Proof, stages: Sequence[str], questions: Sequence[AskedRecording]) -> list[float]:
    listed = [record.question for record in questions]
    return [proof.score(stage, listed, ANSWER_TOKENS)["accuracy"] for stage in stages]


def _mean_words(proof: Proof, stages: Sequence[str], questions: Sequence[AskedRecording]) -> list[float]:
    return [
        mean_words(proof.folder / stage / "model", questions, seed)
        for stage, seed in zip(stages, proof.seeds, strict=True)
    ]


def _worded(record: AskedRecording, wording: str) -> Sample:
    right = Message(role="assistant", content=[TextPart(text=wording.format(record.question.answer))])
    sample = answered(record)
    return sample.model_copy(update={"messages": [*sample.messages[:-1], right]})


def _long_pair(record: AskedRecording, dice: random.Random) -> Sample:
    short, long = sorted(dice.sample(range(len(WORDINGS)), 2))
    chosen, rejected = (long, short) if dice.random() < CHOSEN_LONGER else (short, long)
    right, wrong = record.question.answer, record.wrong
    pair = (right, wrong) if dice.random() < CHOSEN_RIGHT else (wrong, right)
    return preference(record, WORDINGS[chosen].format(pair[0]), WORDINGS[rejected].format(pair[1]))


if __name__ == "__main__":
    main()
