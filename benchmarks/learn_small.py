"""Do the small recipes give what they promise? Each `small.yaml` from published weights, judged by held-out recordings.

    make -C benchmarks learn-small REAL=FOLDERS [DATA=../shared/data] [ONLY="understanding"] [SEED=1] [SET="steps=100"]

`REAL` has folders of published weights: whisper-base, smollm2-135m, kokoro. A recipe is run by the command of its
README, in a process of its own below `--runs`; the same command resumes it, and skips stages that are done. Cases that
begin from the model of `understanding` run that case first, or take the run that `--understanding` names.

A line of JSON for each proof: figure with its 95 % interval, bar, what was there before, minutes of the whole recipe.
The exit status is 1 where a bar is missed. A case of yours is an entry in `CASES`.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from audiollm.evaluate.report.statistics import mean_of_normal
from audiollm.files.atomic import read_json, read_jsonl

RECIPES = Path(__file__).parent.parent / "recipes"
TEST_SPEAKERS = ("1688", "2033", "2414", "lj")
"""Speakers of the recordings of people that no training hears."""
LJ_RECORDINGS = 8
MUSIC = ("Hungarian", "Karissa", "Kevin", "sorohanro")
"""Beginnings of the names of recordings of music."""


@dataclass(frozen=True)
class Inputs:
    """Places that the settings of cases are made of."""

    real: Path
    data: Path
    runs: Path
    seed: int
    finished: Mapping[str, Path]
    """Finished runs that stand in place of those of cases."""

    def run(self, case: str) -> Path:
        """The folder of a case's run."""
        return self.finished.get(case, self.runs / f"{case}-{self.seed}")

    def weights(self, name: str) -> Path:
        """A folder of published weights.

        Raises:
            SystemExit: it is not there.
        """
        folder = self.real / name
        if not folder.is_dir():
            sys.exit(f"{folder}: no such folder: REAL names the folder that has {name}")
        return folder.resolve()


@dataclass(frozen=True)
class Figure:
    """A measured value with its interval."""

    value: float
    low: float | None
    high: float | None
    before: float | None = None
    after: float | None = None
    """Where `value` is a change: the scores before and after."""


@dataclass(frozen=True)
class Proof:
    """A figure of a finished run, and the bar that it has to reach."""

    name: str
    unit: str
    stages: Sequence[str]
    """Stages of the recipe whose results are read."""
    measure: Callable[[Path], Figure]
    """Takes the folder of the run."""
    bar: float
    is_met: Callable[[Figure], bool]


@dataclass(frozen=True)
class Case:
    """A recipe, what it is given, and what it has to show."""

    recipe: str
    settings: Callable[[Inputs], Mapping[str, object]]
    """Keys of the recipe; data that they name are prepared below `Inputs.runs`."""
    proofs: Sequence[Proof]
    after: str | None = None
    """The case whose run it begins from."""
    prepare: Callable[[Inputs], None] | None = None
    """Makes data that `settings` names, where that takes long."""


def word_errors(name: str, stage: str, at_most: float) -> Proof:
    """The share of words that a stage `evaluate_listening` counts as wrong in English transcripts."""

    def measure(run: Path) -> Figure:
        table = read_json(run / stage / "asr" / "results.json")["words"]["en"]
        return Figure(table["rate"], table["low"], table["high"])

    return Proof(name, "words wrong", [stage], measure, at_most, lambda figure: figure.value <= at_most)


def spoken_word_errors(name: str, at_most: float) -> Proof:
    """The share of words that the recognizer of the stage `evaluate` does not hear in generated clips; no interval."""

    def measure(run: Path) -> Figure:
        figures = read_json(run / "evaluate" / "stage.json")["figures"]
        return Figure(figures["recognizer_generated_word_error_rate"], None, None)

    return Proof(name, "words wrong", ["evaluate"], measure, at_most, lambda figure: figure.value <= at_most)


def new_voices(name: str, key: str, bar: float, at_most: bool) -> Proof:
    """A figure of the stage `evaluate` of clips in voices that no training recording has."""

    def measure(run: Path) -> Figure:
        figures = read_json(run / "evaluate" / "stage.json")["figures"]
        low, high = (None, None) if at_most else figures["new_voice_generated_interval"]
        return Figure(figures[f"new_voice_generated_{key}"], low, high)

    unit = "words wrong" if at_most else "share of clips nearest to their own of ten voices"
    return Proof(
        name, unit, ["evaluate"], measure, bar, lambda f: (f.value <= bar) if at_most else (f.value >= bar)
    )


def gain(name: str, before: str, after: str, at_least: float) -> Proof:
    """The change of the share of right answers between two stages `evaluate_listening`, question by question; its
    interval has to lie above 0."""

    def measure(run: Path) -> Figure:
        scores, first_scores = _right_answers(run / after), _right_answers(run / before)
        change = mean_of_normal([right - first_scores[id] for id, right in scores.items()])
        return Figure(change["mean"], change["low"], change["high"], _mean(first_scores), _mean(scores))

    def is_met(figure: Figure) -> bool:
        return figure.value >= at_least and figure.low is not None and figure.low > 0

    return Proof(name, "change of the share of right answers", [before, after], measure, at_least, is_met)


def no_better_than_chance(name: str, stage: str) -> Proof:
    """The share of right answers of a stage `evaluate_listening` above chance; its interval has to reach down to 0."""

    def measure(run: Path) -> Figure:
        table = read_json(run / stage / "results.json")
        accuracy, chance = table["accuracy"], table["chance"]
        return Figure(accuracy - chance, table["low"] - chance, table["high"] - chance, chance, accuracy)

    def is_met(figure: Figure) -> bool:
        return figure.low is not None and figure.low <= 0

    return Proof(name, "share of right answers above chance", [stage], measure, 0.0, is_met)


# ------------------------------------------------------------------------------------------------ cases


def _understanding(inputs: Inputs) -> Mapping[str, object]:
    audio, table = _people(inputs)
    return {
        "language_model": inputs.weights("smollm2-135m"),
        "encoder": inputs.weights("whisper-base"),
        "texts": _sentences(inputs),
        "audio": audio,
        "transcripts": table,
        "untranscribed": "recognize",
        "voices": f"kokoro={inputs.weights('kokoro')}",
        "num_voices": 48,
        "test_voices": 8,
    }


def _audio_reasoner(inputs: Inputs) -> Mapping[str, object]:
    heard = inputs.run("understanding")
    segments = [str(heard / stage / "segments.jsonl") for stage in ("people", "voiced")]
    return {
        "model": heard / "train",
        "encoder": inputs.weights("whisper-base"),
        "events": (inputs.data / "esc10").resolve(),
        "events_test": "4-*",
        "segments": json.dumps(segments),
        "music": json.dumps([{"folder": str(_music(inputs)), "held_out": "Kevin*"}]),
    }


def _align(inputs: Inputs) -> Mapping[str, object]:
    reasoner = inputs.run("audio_reasoner")
    return {
        "model": reasoner / "train",
        "encoder": inputs.weights("whisper-base"),
        "samples": reasoner / "multiple_choice" / "samples.jsonl",
    }


def _voice(inputs: Inputs) -> Mapping[str, object]:
    texts = f"texts: {_sentences(inputs)}, num_texts: 2400, test_texts: 60"
    return {"judge": inputs.weights("whisper-base"), "corpus": f"{{synthesizer: hibari, {texts}}}"}


def _voices(inputs: Inputs) -> Mapping[str, object]:
    folder = inputs.runs / "voices"
    return {
        "judge": inputs.weights("whisper-tiny.en"),
        "audio": folder,
        "transcripts": folder.with_suffix(".csv"),
    }


CASES: dict[str, Case] = {
    "understanding": Case(
        "understanding/small.yaml",
        _understanding,
        (
            word_errors("a voice of the training", "hear_spoken", at_most=0.06),
            word_errors("synthetic voices, trained and new", "hear_voiced", at_most=0.12),
            word_errors("people never heard", "hear_people", at_most=0.25),
        ),
    ),
    "audio_reasoner": Case(
        "audio_reasoner/small.yaml",
        _audio_reasoner,
        (
            gain("GRPO, questions about recordings never heard", "before", "after", at_least=0.10),
            no_better_than_chance("the same questions without the recordings", "without_audio"),
        ),
        after="understanding",
    ),
    "align": Case(
        "align/small.yaml",
        _align,
        (gain("DPO, questions about recordings never heard", "before", "after", at_least=0.0),),
        after="audio_reasoner",
    ),
    "voice": Case(
        "voice/small.yaml",
        _voice,
        (spoken_word_errors("sentences never trained on, in one voice", at_most=0.15),),
    ),
    "voices": Case(
        "voice/small_voices.yaml",
        _voices,
        (
            new_voices("sentences never trained on, in new voices", "word_error_rate", 0.25, at_most=True),
            new_voices("nearest to its own of ten new voices", "accuracy", 0.8, at_most=False),
        ),
        prepare=lambda inputs: _speak_voices(inputs),
    ),
}


# ------------------------------------------------------------------------------------------------ data


def _people(inputs: Inputs) -> tuple[Path, Path]:
    """A folder of LibriSpeech's and LJ Speech's recordings, and the table that says who speaks and who is held out."""
    folder, rows = inputs.runs / "people", []
    folder.mkdir(parents=True, exist_ok=True)
    readings = sorted((inputs.data / "librispeech_speakers").rglob("*.flac"))
    lj_texts = dict(
        line.split("|")[:2]
        for line in (inputs.data / "ljspeech_32" / "metadata.csv").read_text(encoding="utf-8").splitlines()
    )
    lj_paths = [inputs.data / "ljspeech_32" / "wavs" / f"{name}.flac" for name in sorted(lj_texts)]
    for path in (*readings, *lj_paths[:LJ_RECORDINGS]):
        is_lj = path.stem in lj_texts
        speaker = "lj" if is_lj else path.stem.split("-")[0]
        split = "test" if speaker in TEST_SPEAKERS else "train"
        rows.append((path.name, lj_texts.get(path.stem, ""), speaker, split))
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    table = inputs.runs / "people.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("path", "text", "speaker", "split"), *rows])
    return folder.resolve(), table.resolve()


def _speak_voices(inputs: Inputs) -> None:
    """Fill the folder and the table of `_voices`: a hundred of Kokoro's mixtures and ten held-out ones, and hibari,
    which says most of the training's sentences."""
    kokoro = {"voices": 110, "test_voices": 10, "num_texts": 1700, "test_texts": 60}
    many = _speak(inputs, f"kokoro={inputs.weights('kokoro')}", "kokoro", kokoro)
    one = _speak(inputs, "hibari", "hibari", {"num_texts": 3600, "test_texts": 1})
    held_out = {row["text"] for row in many if row["split"] == "test"}
    folder = inputs.runs / "voices"
    folder.mkdir(exist_ok=True)
    with folder.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("path", "text", "speaker", "split"))
        for row in (*many, *(row for row in one if row["split"] == "train" and row["text"] not in held_out)):
            name = f"{row['speaker'].replace('+', '_')}_{Path(row['path']).name}"
            if not (folder / name).exists():
                shutil.copyfile(row["path"], folder / name)
            table.writerow((name, row["text"], row["speaker"], row["split"]))


def _speak(inputs: Inputs, synthesizer: str, name: str, settings: Mapping[str, int]) -> list[dict[str, str]]:
    """The segments of a spoken corpus, which is made where it is not there."""
    folder = inputs.runs / f"corpus_{name}"
    if not (folder / "segments.jsonl").exists():
        corpus = {"synthesizer": synthesizer, "texts": _sentences(inputs), **settings}
        command = [
            sys.executable,
            "-m",
            "audiollm.commands.cli",
            "annotate",
            "-o",
            str(folder),
            "--recognizer",
            "none",
        ]
        subprocess.run(
            [*command, *(f"--set=corpus.{key}={value}" for key, value in corpus.items())], check=True
        )
    return list(read_jsonl(folder / "segments.jsonl"))


def _sentences(inputs: Inputs) -> Path:
    """A file of sentences: AudioCaps' captions and LibriSpeech-PC's transcripts, of 4 to 20 words."""
    texts = inputs.data / "text_benchmarks"
    captions = [
        row["caption"] for path in sorted((texts / "audiocaps").rglob("*.csv")) for row in _read_table(path)
    ]
    listed = texts / "F5-TTS" / "data" / "librispeech_pc_test_clean_cross_sentence.lst"
    transcripts = [
        line.rstrip("\n").split("\t")[-1] for line in listed.read_text(encoding="utf-8").splitlines()
    ]
    sentences = {text.strip() for text in (*captions, *transcripts) if 4 <= len(text.split()) <= 20}
    path = inputs.runs / "sentences.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{sentence}\n" for sentence in sorted(sentences)), encoding="utf-8")
    return path.resolve()


def _music(inputs: Inputs) -> Path:
    """A folder of the music among the recordings of music and nature."""
    folder = inputs.runs / "music"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (inputs.data / "music_nature" / "data" / "audio").resolve().glob("*.ogg"):
        if path.name.startswith(MUSIC) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    return folder.resolve()


def _read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------ runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, required=True, help="folders of published weights")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--runs", type=Path, default=Path("runs/learn_small"))
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seed", type=int, default=1, help="settings were chosen with seed 0")
    parser.add_argument("--understanding", type=Path, help="a finished run of this case")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the cases that run"
    )
    options = parser.parse_args()
    finished = {} if options.understanding is None else {"understanding": options.understanding.resolve()}
    inputs = Inputs(options.real, options.data, options.runs.resolve(), options.seed, finished)
    missed = [text for name in options.only for text in _prove(name, inputs, options.set)]
    if missed:
        sys.exit(f"missed: {'; '.join(missed)}")


def _prove(name: str, inputs: Inputs, overrides: Sequence[str]) -> list[str]:
    """Run a case, print a line for each proof, and return what was missed."""
    folder = _run_recipe(name, inputs, overrides)
    stages = [read_json(path) for path in sorted(folder.glob("*/stage.json"))]
    missed = []
    for proof in CASES[name].proofs:
        figure = proof.measure(folder)
        is_met = proof.is_met(figure)
        line = {
            "bench": "learn_small",
            "case": f"{name}: {proof.name}",
            "ours": round(figure.value, 4),
            "interval": [None if end is None else round(end, 4) for end in (figure.low, figure.high)],
            "bar": proof.bar,
            "met": is_met,
            **({} if figure.before is None else {"before": round(figure.before, 4)}),
            **({} if figure.after is None else {"after": round(figure.after, 4)}),
            "unit": proof.unit,
            "seed": inputs.seed,
            "minutes": round(sum(stage["seconds"] for stage in stages) / 60, 1),
            "cpu_minutes": round(sum(stage["cpu_seconds"] for stage in stages) / 60, 1),
        }
        print(json.dumps(line), flush=True)
        missed += [] if is_met else [f"{name}: {proof.name}"]
    return missed


def _run_recipe(name: str, inputs: Inputs, overrides: Sequence[str] = ()) -> Path:
    """Run a recipe by its command, or resume it, after the case that it begins from; return the folder of its run.

    Raises:
        SystemExit: the recipe ended with an error.
    """
    case, folder = CASES[name], inputs.run(name)
    if name in inputs.finished:
        return folder
    if case.after is not None:
        _run_recipe(case.after, inputs)
    inputs.runs.mkdir(parents=True, exist_ok=True)
    if case.prepare is not None:
        case.prepare(inputs)
    settings = [f"{key}={value}" for key, value in case.settings(inputs).items()]
    command = [sys.executable, "-m", "audiollm.commands.cli", "run", str(RECIPES / case.recipe)]
    command += [
        "--name",
        folder.name,
        "--runs",
        str(inputs.runs),
        f"seed={inputs.seed}",
        *settings,
        *overrides,
    ]
    log = inputs.runs / f"{folder.name}.log"
    print(f"{time.strftime('%H:%M')} {folder.name}", file=sys.stderr, flush=True)
    with log.open("w") as file:
        status = subprocess.call(command, stdout=file, stderr=subprocess.STDOUT)
    if status:
        sys.exit(f"{folder.name} ended with status {status}: see {log}")
    return folder


def _right_answers(stage: Path) -> Mapping[str, float]:
    """1 where a question is answered right, by its id."""
    return {row["id"]: float(row["right"]) for row in read_jsonl(stage / "audio-qa" / "rows.jsonl")}


def _mean(scores: Mapping[str, float]) -> float:
    return sum(scores.values()) / len(scores)


if __name__ == "__main__":
    main()
