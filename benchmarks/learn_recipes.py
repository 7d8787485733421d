"""Does every small recipe give what it promises? Each `tiny.yaml` from nothing, alone and beside a busy process.

    make -C benchmarks learn-recipes [ONLY="align rlhf"] [SEEDS="1 2 3"] [PLACES="alone busy"] [DATA=../shared/data]

A recipe is run by the command of its README, in a process of its own, and scored by its own evaluation stages on
held-out recordings: of the model that the training of interest begins from, and of the one that it ends with. The same
items are compared, so a line has the mean change with its 95 % interval; over several seeds it is the interval of the
items of all of them. `alone` and `busy` run on the corpus that the recipe speaks itself, `busy` beside a process that
takes a core; `digits` on 600 recordings of people, takes 0 to 9 of the free spoken digit dataset with 0 to 2 held out,
as a user gives them. Budgets of recipes are steps or CPU minutes, so a busy machine takes longer and learns as much.

Bar for the recipes of reinforcement learning and of preferences: the interval of the change lies above 0. The others
have no bar: their lines say what came out. Settings were chosen with seed 0, which is not among the three.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from sacrebleu.metrics import CHRF

from audiollm.evaluate.report.statistics import mean_of_normal
from audiollm.files.atomic import read_json, read_jsonl

RECIPES = Path(__file__).parent.parent / "recipes"
PLACES = ("alone", "busy", "digits")
DIGITS = {"transcripts": "{text}_{speaker}_{take}.wav", "test": "take<3"}
"""How a user describes recordings of people."""
DIGIT_RECORDINGS, DIGIT_TAKES = Path("fsdd/recordings"), 10
"""Their folder below `--data`, and how many takes of each speaker and digit are used."""
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

Scores = Mapping[str, float]
"""Score of each held-out item by its id."""


def right_answers(stage: Path) -> Scores:
    """1 where a question is answered right: the rows of `evaluate_listening`."""
    return {row["id"]: float(row["right"]) for row in read_jsonl(stage / "audio-qa" / "rows.jsonl")}


def right_words(stage: Path) -> Scores:
    """1 where the classifier of words, which is trained on recordings alone, recognizes the text of a spoken clip."""
    return {row["id"]: float(row["correct"]["classifier"]) for row in read_jsonl(stage / "clips.jsonl")}


def translation_quality(stage: Path) -> Scores:
    """chrF of each interpreted stream, from 0 to 1."""
    metric = CHRF()
    return {
        str(row["index"]): metric.sentence_score(row["prediction"], [row["reference"]]).score / 100
        for row in read_jsonl(stage / "instances.log")
    }


@dataclass(frozen=True)
class Case:
    """A recipe, and the stages whose scores tell what it gave."""

    recipe: str
    after: str
    before: str | None
    """None: the recipe promises a model, and not that one becomes better."""
    scores: Callable[[Path], Scores] = right_answers
    must_gain: bool = False
    seeded: bool = False
    """Whether it is run with every seed, or with the first alone."""
    on_recordings: str = ""
    """Recipe that the README gives for recordings of people; empty: the same."""


CASES = {
    "align": Case("align/tiny.yaml", "after", "before", must_gain=True, seeded=True),
    "align_speech": Case(
        "align/speech_tiny.yaml", "after", "before", right_words, must_gain=True, seeded=True
    ),
    "audio_reasoner": Case("audio_reasoner/tiny.yaml", "after", "before", must_gain=True, seeded=True),
    "ke_omni_r": Case("ke_omni_r/tiny.yaml", "after", "before", must_gain=True, seeded=True),
    "r1_aqa": Case("r1_aqa/tiny.yaml", "after", "before", must_gain=True, seeded=True),
    "rlhf": Case("rlhf/tiny.yaml", "after", "before", must_gain=True, seeded=True),
    "iterative_grpo": Case("iterative_grpo/tiny.yaml", "heard_2", "before", must_gain=True, seeded=True),
    "tts_grpo": Case(
        "tts_grpo/tiny.yaml",
        "after",
        "before",
        right_words,
        must_gain=True,
        seeded=True,
        on_recordings="tts_grpo/recordings.yaml",
    ),
    "interpret": Case(
        "interpret/tiny.yaml", "after", "before", translation_quality, must_gain=True, seeded=True
    ),
    "tts": Case("tts/tiny.yaml", "evaluate", None, right_words),
    "finetune_qwen3_tts": Case("finetune_qwen3_tts/tiny.yaml", "evaluate", None, right_words),
    "finetune_csm": Case("finetune_csm/tiny.yaml", "evaluate", None, right_words),
    "finetune_higgs_v3": Case("finetune_higgs_v3/tiny.yaml", "evaluate", None, right_words),
    "understanding": Case("understanding/tiny.yaml", "evaluate_listening", None),
    "mutual": Case("mutual/tiny.yaml", "score_after", "score_before"),
    "audioverse": Case("audioverse/tiny.yaml", "second_score", "first_score"),
}


@dataclass(frozen=True)
class Outcome:
    """Scores and costs of a run of a recipe."""

    seed: int
    before: Scores
    """Empty where the case has no stage before."""
    after: Scores
    minutes: float
    """Minutes of all stages on the wall clock."""
    cpu_minutes: float
    warnings: Sequence[str]

    @property
    def changes(self) -> list[float]:
        """The change of each item that was scored before and after."""
        return [after - self.before[id] for id, after in self.after.items() if id in self.before]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd, for `digits`")
    parser.add_argument("--runs", type=Path, default=Path("runs/learn_recipes"))
    options = parser.parse_args()
    missed = [
        f"{name}, {place}"
        for name in options.only
        for place in options.places
        if not _run_case(name, CASES[name], place, options)
    ]
    if missed:
        sys.exit(f"no gain: {'; '.join(missed)}")


def _run_case(name: str, case: Case, place: str, options: argparse.Namespace) -> bool:
    """Run a case with its seeds, print its line, and return whether it is as it must be."""
    if place == "digits" and not (options.data / DIGIT_RECORDINGS).is_dir():
        print(f"{name}, digits: skipped, no recordings in {options.data}: --data", file=sys.stderr)
        return True
    seeds = options.seeds if case.seeded else options.seeds[:1]
    outcomes = []
    for seed in seeds:
        with _busy_process() if place == "busy" else nullcontext():
            outcomes.append(_outcome(case, seed, f"{name}-{place}-{seed}", place, options))
    print(json.dumps(_build_recipe_line(f"{name}, {place}", case, outcomes)), flush=True)
    return not case.must_gain or _change(outcomes)["low"] > 0


def _outcome(case: Case, seed: int, run: str, place: str, options: argparse.Namespace) -> Outcome:
    """Run a recipe by its command; stages that are done are not done again."""
    folder = (options.runs / run).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    recipe = case.on_recordings if place == "digits" and case.on_recordings else case.recipe
    command = [sys.executable, "-m", "audiollm.commands.cli", "run", str(RECIPES / recipe)]
    command += ["--name", run, "--runs", str(options.runs), f"seed={seed}"]
    if place == "digits":
        command += [
            f"{key}={value}" for key, value in {**DIGITS, "audio": str(_find_digits(options))}.items()
        ]
        command += ["phrases=" + str(_phrases(options.runs))] if case.recipe.startswith("interpret") else []
    print(f"{time.strftime('%H:%M')} {run}", file=sys.stderr, flush=True)
    with (options.runs / f"{run}.log").open("w") as log:
        status = subprocess.call(command, stdout=log, stderr=subprocess.STDOUT)
    if status:
        sys.exit(f"{run} ended with status {status}: see {options.runs / run}.log")
    results = [read_json(path) for path in sorted(folder.glob("*/stage.json"))]
    return Outcome(
        seed,
        case.scores(folder / case.before) if case.before else {},
        case.scores(folder / case.after),
        sum(result["seconds"] for result in results) / 60,
        sum(result["cpu_seconds"] for result in results) / 60,
        [text for result in results for text in (result["figures"] or {}).get("warnings") or ()],
    )


def _build_recipe_line(label: str, case: Case, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The line of a case: mean scores over all seeds, and the change of the items with its interval."""
    after = statistics.fmean(value for outcome in outcomes for value in outcome.after.values())
    line: dict[str, object] = {"bench": "learn_recipes", "case": label, "ours": round(after, 4)}
    unit = "chrF" if case.scores is translation_quality else "share right"
    if case.before is not None:
        before = statistics.fmean(value for outcome in outcomes for value in outcome.before.values())
        change = _change(outcomes)
        line |= {"peer": round(before, 4), "ratio": round(after / before, 3) if before else None}
        line |= {
            "change": round(change["mean"], 4),
            "interval": [round(change[end], 4) for end in ("low", "high")],
        }
        line["changes_by_seed"] = [round(statistics.fmean(outcome.changes), 4) for outcome in outcomes]
        unit += " (peer: before)"
    line |= {"unit": unit, "minutes": round(statistics.fmean(outcome.minutes for outcome in outcomes), 1)}
    line["cpu_minutes"] = round(statistics.fmean(outcome.cpu_minutes for outcome in outcomes), 1)
    warnings = [f"seed {outcome.seed}: {text}" for outcome in outcomes for text in outcome.warnings]
    return {**line, **({"warnings": warnings} if warnings else {})}


def _change(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Mean change of the items of all seeds, `low` and `high` of its interval, and `n`."""
    return mean_of_normal([value for outcome in outcomes for value in outcome.changes])


def _find_digits(options: argparse.Namespace) -> Path:
    """A folder with the recordings that are used."""
    folder: Path = (options.runs / "digits").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((options.data / DIGIT_RECORDINGS).resolve().glob("*.wav")):
        copy = folder / path.name
        if int(path.stem.rpartition("_")[2]) < DIGIT_TAKES and not copy.exists():
            shutil.copyfile(path, copy)
    return folder


def _phrases(runs: Path) -> Path:
    """The phrases of `interpret` in the digits that the dataset's file names spell: `2 1` is `einundzwanzig`."""
    path = runs / "phrases.csv"
    rows = (RECIPES / "interpret" / "numbers.csv").read_text().splitlines()
    digits = {word: str(number) for number, word in enumerate(WORDS)}
    spelled = [
        ",".join(
            [" ".join(digits.get(word, word) for word in row.split(",")[0].split()), *row.split(",")[1:]]
        )
        for row in rows
    ]
    path.write_text("\n".join(spelled) + "\n")
    return path


@contextmanager
def _busy_process() -> Iterator[None]:
    """A process that takes a core for as long as the block runs."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
