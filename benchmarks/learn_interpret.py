"""Do rewards teach an interpreter to wait no longer than it must? Spoken digits to German number words, three seeds.

    make -C benchmarks learn-interpret DATA=../shared/data

The free spoken digit dataset, one speaker per stream (takes 0 to 4 are held out), in groups of one or two digits with
pauses of 0.05 to 0.3 s inside a group and 0.6 to 1.2 s between groups. *two one* is *einundzwanzig*: the digit that is
heard last is said first. References imitate people: the earliest chunk of 0.32 s at which the output can be right, plus
a lag of 0 to 4 chunks that is drawn once per stream.

A model first learns to write single takes down, and the German numbers as texts (`digits`), and then to interpret
without lag, half of it talks of a single group (`hearing`): from scratch, 600 steps of such talks teach when to speak,
and no digit. It is one for all seeds. From it, for each seed, a model is trained on the references (the
start), and then by PPO, in the settings of this file:

- two stages: rewards of single actions, then those of whole streams, too;
- stage 1 alone, rewards of streams alone, two stages at a fixed weight of the KL, all at equal numbers of updates;
- supervised, on references without lag;
- the start with a constant added to the logit of silence, as a curve.

Bars, on held-out streams, greedy: AL at least 20 % below the start's at chrF at most 1 point lower; at the AL that PPO
reaches, the curve's chrF is lower (by LAAL, too: a curve that says too many words has a low AL); KL in the last third
of each stage within 25 % of its target.

CPU-minutes of one core of a Xeon, both of whose cores were busy: tokenizer 13, codes of clips 2, of short talks 8, of
long ones 14; `digits` 3, `hearing` 15; for each seed two supervised trainings of 6 each, 4 for every 40 updates of PPO
(50 in all), and 18 evaluations of 10 seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from learn_tts import STUDENT_T
from num2words import num2words
from rich.console import Console
from rich.table import Table

from audiollm.audio import probe
from audiollm.evaluate.interpret.pictures import QualityPoint, quality_over_latency
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe

NAME = "learn_interpret"
SEEDS = (1, 2, 3)
"""Seeds of the models and of their trainings. Seed 0 is for choosing settings."""
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CHUNK_S, LAG = 0.32, (0, 4)
TALKS, TEST_TALKS, GROUPS = 3_000, 80, 4
PHRASES = {
    "segments": "${here}/segments.jsonl", "phrases": "${here}/phrases.jsonl", "speed": [0.85, 1.15],
}  # fmt: skip
TOKENIZER: dict[str, Any] = {"preset": "native", "teacher": "own", "crop_frames": 12, "steps": 1_500}
MODEL: dict[str, Any] = {
    "hidden_size": 128, "num_layers": 4, "sliding_window": 200, "code_embeddings": "latents",
}  # fmt: skip
"""With a window of 8 s, so that the model may listen for hours (`interpret_long.py`)."""
SHORT_TALKS, SHORT_TEST_TALKS, SHORT_TAIL_S = 6_000, 100, 0.8
"""Talks of a single group."""
DIGITS_ALONE: dict[str, Any] = {"steps": 500, "batch_size": 48, "learning_rate": 2e-3}
NUMBERS_WEIGHT = 0.1
"""Share of the texts among the samples of `digits`; they give it the German words, too."""
HEARING: dict[str, Any] = {"steps": 600, "batch_size": 40, "learning_rate": 1e-3, "corrupt_codes": 0.3}
SFT: dict[str, Any] = {"steps": 200, "batch_size": 32, "learning_rate": 1e-3, "corrupt_codes": 0.3}
FIRST_UPDATES, SECOND_UPDATES = 60, 80
"""Updates of the two trainings of a variant."""
PPO: dict[str, Any] = {
    "batch_size": 32, "max_answer_tokens": 8, "max_tokens": 16_384, "learning_rate": 2e-4,
}  # fmt: skip
GAIN = 0.5
"""The controller's gain: its weight changes by 10 % per update at most, since 2 %, as in arXiv 1909.08593, let the KL
rise to 14 times its target before the weight had followed."""
STAGE_1 = {"detection": 1.0, "initiative": 1.0, "quality": 1.0, "format": 1.0}
OF_STREAMS = {"lagging": 3.0, "sequence_quality": 10.0}
BOTH = {"detection": 0.5, "initiative": 0.25, "quality": 1.0, "format": 0.25, **OF_STREAMS}
"""Some forty rewards of actions outweigh one of a stream at equal weights."""
FOR_ACTIONS: dict[str, Any] = {"lam": 0.95, "coefficient": 0.15, "target": 3.0, "similarity": "chrf"}
FOR_STREAMS: dict[str, Any] = {"lam": 1.0, "coefficient": 0.4, "target": 5.0, "similarity": "word_accuracy"}
"""Settings of a training by its rewards: the first weight of the KL, or the fixed one; KL per stream in nats.

The lag of a stream is decided at its first segment, some thirty tokens before its reward: lambda 0.95 leaves a fifth of
it there. By chrF, a recall above all, streams had more and more words: each lowers the mean lag, and AL, too.
"""
BIASES = (-6.0, -4.0, -3.0, -2.0, -1.0, 1.0)
"""Constants on the logit of silence."""
VARIANTS: dict[str, Sequence[str]] = {
    "two stages": ("stage_1", "stage_2"),
    "stage 1 alone": ("stage_1", "stage_1_on"),
    "rewards of streams alone": ("streams_1", "streams_2"),
    "two stages, fixed weight of the KL": ("fixed_1", "fixed_2"),
}
"""Variant -> its trainings, one after the other."""
FASTER, WORSE = 0.2, 1.0
SMOKE_TAKES = range(4, 7)
SMOKE: dict[str, Any] = {
    "talks": 12, "test_talks": 2, "short_talks": 12, "short_test_talks": 2,
    "tokenizer": {"steps": 10, "hidden_size": 32, "teacher": "none"},
    "digits": {"steps": 10, "batch_size": 8}, "hearing": {"steps": 10, "batch_size": 8},
    "sft": {"steps": 12, "batch_size": 8}, "updates": 10,
    "ppo": {"batch_size": 4},
    "model": {"hidden_size": 32, "num_layers": 2}, "biases": (-4.0,), "variations": 1,
}  # fmt: skip
"""Sizes of a run that shows that everything goes from end to end, and teaches nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd/recordings")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument(
        "--smoke", action="store_true", help="everything at a size of two CPU minutes, one seed"
    )
    parser.add_argument("overrides", nargs="*", help="settings of the recipe: sft_0.steps=900")
    arguments = parser.parse_args()
    recordings = arguments.data / "fsdd" / "recordings"
    if not recordings.is_dir():
        raise SystemExit(f"no spoken digits in {recordings}: give the folder of recordings with --data")
    name = f"{NAME}_smoke" if arguments.smoke else NAME
    seeds = (0,) if arguments.smoke else tuple(arguments.seeds)
    folder = arguments.runs / name
    folder.mkdir(parents=True, exist_ok=True)
    segments = digit_segments(recordings, SMOKE_TAKES if arguments.smoke else None)
    keep(folder / "segments.jsonl", lines(segments))
    keep(folder / "clips.jsonl", lines(tokenizer_clips(segments)))
    keep(folder / "phrases.jsonl", lines(number_phrases()))
    keep(folder / "numbers.jsonl", lines(number_texts()))
    recipe = folder / "recipe.yaml"
    sizes = SMOKE if arguments.smoke else {}
    keep(recipe, yaml.safe_dump(recipe_of(name, seeds, sizes), sort_keys=False))
    run_recipe(load_recipe(recipe, arguments.overrides, name=name, runs=arguments.runs), Console(stderr=True))
    report(folder, seeds, tuple(sizes.get("biases", BIASES)))


def digit_segments(folder: Path, takes: range | None) -> list[dict[str, Any]]:
    """A row for each take, `<digit>_<speaker>_<take>.wav`; takes 0 to 4 are held out.

    Args:
        takes: those that are used; None: all.
    """
    rows = []
    for path in sorted(folder.glob("*_*_*.wav")):
        digit, speaker, take = path.stem.split("_")
        if takes is not None and int(take) not in takes:
            continue
        info = probe(path)
        seconds = (info.num_samples or 0) / info.sample_rate
        times = {"start_s": 0.0, "end_s": round(seconds, 4), "split": "test" if int(take) < 5 else "train"}
        text = DIGITS[int(digit)] if digit.isdigit() else digit
        rows.append({"id": path.stem, "path": str(path.resolve()), "speaker": speaker, "text": text, **times})
    return rows


def tokenizer_clips(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training takes, and every tenth of the held-out ones: the tokenizer measures the pitch of each of these."""
    held_out = [row for row in segments if row["split"] == "test"]
    return [row for row in segments if row["split"] == "train"] + held_out[::10]


def number_phrases() -> list[dict[str, str]]:
    """Digits, and pairs of digits that are a number of two, with the German word of each."""
    rows = [{"text": word, "target": num2words(value, lang="de")} for value, word in enumerate(DIGITS)]
    for value in range(10, 100):
        text = f"{DIGITS[value // 10]} {DIGITS[value % 10]}"
        rows.append({"text": text, "target": num2words(value, lang="de")})
    return rows


def number_texts() -> list[dict[str, Any]]:
    """Samples without sound: each phrase, and its German word."""
    return [
        {
            "id": f"number-{place}",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": f"In German: {row['text']}"}]},
                {"role": "assistant", "content": [{"type": "text", "text": row["target"]}]},
            ],
            "task": "translate_text",
        }
        for place, row in enumerate(number_phrases())
    ]


def recipe_of(name: str, seeds: Sequence[int], sizes: dict[str, Any]) -> dict[str, Any]:
    """Streams, their codes and a model that hears digits once; start, variants and curve for each seed.

    Args:
        sizes: in place of those of this file, as `SMOKE` has them.
    """
    talks = {
        **PHRASES, "phrases_per_talk": [GROUPS, GROUPS], "talks": sizes.get("talks", TALKS),
        "test_talks": sizes.get("test_talks", TEST_TALKS),
    }  # fmt: skip
    clips = {"segments": "${here}/clips.jsonl", "tasks": {"tts": 1.0}, "min_seconds": 1}
    codec = "${train_tokenizer.checkpoint}"
    stages: list[dict[str, Any]] = [
        {"compose_talks": talks},
        {"compose": clips},
        {"train_tokenizer": {"audio": "${compose.samples}", **TOKENIZER, **sizes.get("tokenizer", {})}},
        *_compose_text_streams("late", "compose_talks", LAG, codec),
        *_compose_text_streams(
            "punctual", "compose_talks", (0, 0), codec, {"codes_from": "${late_codes.shards}"}
        ),
        *_hearing_stages(codec, sizes),
    ]
    for seed in seeds:
        stages += _stages_of(seed, sizes)
    return {"name": name, "size": "tiny", "seed": 0, "stages": stages}


def _compose_text_streams(
    name: str, talks: str, lag: tuple[int, int], codec: str, encoded: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The streams of talks with references of a lag, and their codes.

    Args:
        encoded: shards that have the codes of these talks.
    """
    streams = {
        "recordings": f"${{{talks}.recordings}}",
        "chunk_s": CHUNK_S,
        "lag": list(lag),
        "instruction": "",
    }
    shards = {"samples": f"${{{name}.streams}}", "codec": codec, "encodings": 1, **(encoded or {})}
    return [{"name": name, "compose_streams": streams}, {"name": f"{name}_codes", "tokenize": shards}]


def _hearing_stages(codec: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """A model that writes single takes down and knows German numbers, and then interprets without lag.

    Half of what it then learns from are talks of a single group, half the streams `punctual`.
    """
    words = {"segments": "${here}/segments.jsonl", "tasks": {"asr": 1.0}, "min_seconds": 1}
    codes = {"samples": "${words.samples}", "codec": codec, "encodings": sizes.get("variations", 3)}
    shards = [
        {"path": "${word_codes.shards}", "weight": 1 - NUMBERS_WEIGHT},
        {"path": "${here}/numbers.jsonl", "weight": NUMBERS_WEIGHT},
    ]
    talks = {
        **PHRASES, "phrases_per_talk": [1, 1], "tail_s": SHORT_TAIL_S, "seed": 1,
        "talks": sizes.get("short_talks", SHORT_TALKS),
        "test_talks": sizes.get("short_test_talks", SHORT_TEST_TALKS),
    }  # fmt: skip
    both = {"text_weight": 1.0, "eval_audio_samples": 0, "evaluations": 4}
    digits = {**DIGITS_ALONE, **sizes.get("digits", {}), **both, "shape": {**MODEL, **sizes.get("model", {})}}
    hearing = {**HEARING, **sizes.get("hearing", {}), **both, "start": "${digits.checkpoint}"}
    talks_of = [{"path": f"${{{name}_codes.shards}}", "weight": 0.5} for name in ("short", "punctual")]
    return [
        {"name": "words", "compose": words},
        {"name": "word_codes", "tokenize": codes},
        {"name": "digits", "train": {**digits, "samples": shards}},
        {"name": "short_talks", "compose_talks": talks},
        *_compose_text_streams("short", "short_talks", (0, 0), codec),
        {"name": "hearing", "train": {**hearing, "samples": talks_of}},
    ]


def _stages_of(seed: int, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    supervised = {
        **SFT, **sizes.get("sft", {}), "start": "${hearing.checkpoint}", "text_weight": 1.0, "seed": seed,
        "eval_audio_samples": 0, "evaluations": 4,
    }  # fmt: skip
    stages: list[dict[str, Any]] = []
    for name, kind in (("sft", "late"), ("sft_punctual", "punctual")):
        stages.append(
            {"name": f"{name}_{seed}", "train": {**supervised, "samples": f"${{{kind}_codes.shards}}"}}
        )
    trainings: list[tuple[str, str, dict[str, float], bool]] = [
        ("stage_1", "sft", STAGE_1, True),
        ("stage_2", "stage_1", BOTH, True),
        ("stage_1_on", "stage_1", STAGE_1, True),
        ("streams_1", "sft", OF_STREAMS, True),
        ("streams_2", "streams_1", OF_STREAMS, True),
        ("fixed_1", "sft", STAGE_1, False),
        ("fixed_2", "fixed_1", BOTH, False),
    ]
    for name, start, rewards, is_adaptive in trainings:
        options = FOR_ACTIONS if rewards is STAGE_1 else FOR_STREAMS
        adaptive = {"name": "proportional", "target": options["target"], "gain": GAIN}
        controller = {
            **(adaptive if is_adaptive else {"name": "fixed"}),
            "coefficient": options["coefficient"],
        }
        settings = {
            **PPO,
            **sizes.get("ppo", {}),
            "samples": "${late_codes.shards}",
            "start": f"${{{start}_{seed}.checkpoint}}",
            "rewards": rewards,
            "similarity": options["similarity"],
            "advantage": {"name": "gae", "steps": True, "lam": options["lam"]},
            "language": "de",
            "allowed_wait": 0,
            "steps": sizes.get("updates", FIRST_UPDATES if start == "sft" else SECOND_UPDATES),
            "seed": seed,
            "kl": {"place": "reward", "estimator": "k1", "controller": controller},
            "critic": {"learning_rate": 1e-3},
            "evaluations": 1,
            "eval_prompts": 16,
        }
        stages.append({"name": f"{name}_{seed}", "train_interpreter": settings})
    for name in ("sft", "sft_punctual", *(variant_stages[-1] for variant_stages in VARIANTS.values())):
        for decoding, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            options = {"temperature": temperature, "seed": seed}
            stages.append(_evaluation(f"{name}_{seed}_{decoding}", f"{name}_{seed}", options))
    for place, bias in enumerate(sizes.get("biases", BIASES)):
        stages.append(_evaluation(f"bias_{place}_{seed}", f"sft_{seed}", {"silence_bias": bias}))
    return stages


def _evaluation(name: str, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    options = {
        "model": f"${{{model}.checkpoint}}",
        "samples": "${late_codes.shards}",
        "language": "de",
        "examples": 4,
    }
    return {"name": name, "evaluate_interpreter": {**options, "max_answer_tokens": 8, **settings}}


# --------------------------------------------------------------------------------------------------- report


def report(folder: Path, seeds: Sequence[int], biases: Sequence[float]) -> None:
    """Print a table, a JSON line for each bar, and write the picture of quality over latency."""
    rows: dict[str, list[dict[str, float]]] = {}
    for case, name in _cases().items():
        rows[case] = [figures_of(folder / name.format(seed=seed)) for seed in seeds]
    curve = [[figures_of(folder / f"bias_{place}_{seed}") for seed in seeds] for place in range(len(biases))]
    for bias, figures in zip(biases, curve, strict=True):
        rows[f"start, silence {bias:+g}"] = figures
    _print_interpret_table(rows)
    for line in bars(rows, curve, [kl_shares(folder, seed) for seed in seeds]):
        print(json.dumps(line))
    points = [
        QualityPoint(
            case,
            statistics.mean(row["AL"] for row in case_rows),
            statistics.mean(row["chrF"] for row in case_rows),
            is_on_curve=case.startswith("start"),
        )
        for case, case_rows in rows.items()
        if "drawn" not in case
    ]
    picture = folder / "quality_latency.html"
    picture.write_text(quality_over_latency(points, "AL, s", "chrF"), encoding="utf-8")
    print(f"picture: {picture}", file=sys.stderr)


def _cases() -> dict[str, str]:
    """Row of the table -> the name of its evaluation."""
    models = {"start": "sft", "supervised without lag": "sft_punctual"}
    models |= {variant: stages[-1] for variant, stages in VARIANTS.items()}
    return {
        f"{case}, {decoding}": f"{name}_{{seed}}_{decoding}"
        for case, name in models.items()
        for decoding in ("greedy", "drawn")
    }


def figures_of(folder: Path) -> dict[str, float]:
    """AL and LAAL in seconds, chrF, and the share of groups that are exactly right."""
    figures = read_json(folder / "figures.json")
    times = {name: figures[name] / 1000 for name in ("AL", "LAAL")}
    return {**times, "chrF": figures["chrF"], "right": figures["right_segments"]["accuracy"]}


def bars(
    rows: dict[str, list[dict[str, float]]],
    curve: Sequence[Sequence[dict[str, float]]],
    kl: Sequence[dict[str, float]],
) -> list[dict[str, Any]]:
    """Return the lines of the bars, each with its mean over seeds and its interval."""
    start, ours = rows["start, greedy"], rows["two stages, greedy"]
    lines = []
    for variant in VARIANTS:
        after_rows = rows[f"{variant}, greedy"]
        shares = [after["AL"] / before["AL"] for before, after in zip(start, after_rows, strict=True)]
        gained = [after["chrF"] - before["chrF"] for before, after in zip(start, after_rows, strict=True)]
        line = _build_interpret_line(
            f"{variant}: AL against the start", after_rows, start, "AL", "s (peer: the start)"
        )
        line |= {"fewer": interval([1 - share for share in shares]), "chrF_gained": interval(gained)}
        met = statistics.mean(shares) <= 1 - FASTER and statistics.mean(gained) >= -WORSE
        lines.append(line | {"met": met} if variant == "two stages" else line)
    for latency in ("AL", "LAAL"):
        gains = []
        for place, led in enumerate(ours):
            points = sorted((row[place][latency], row[place]["chrF"]) for row in [start, *curve])
            gains.append(led["chrF"] - at(points, led[latency]))
        case = f"two stages: chrF above the start with a constant on silence at the same {latency}"
        low = interval(gains).get("low")
        met = low is not None and low > 0
        lines.append({"bench": NAME, "case": case, "ours": interval(gains), "unit": "points", "met": met})
    for stage in VARIANTS["two stages"]:
        shares = [seed_shares[stage] for seed_shares in kl]
        met = all(abs(share - 1) <= 0.25 for share in shares)
        line = {"bench": NAME, "case": f"{stage}: KL of the last third over its target"}
        lines.append(line | {"ours": interval(shares), "unit": "share", "met": met})
    return lines


def kl_shares(folder: Path, seed: int) -> dict[str, float]:
    """The mean KL of the last third of each of the two stages, over its target."""
    shares = {}
    for stage in VARIANTS["two stages"]:
        kl = [row["kl"] for row in read_jsonl(folder / f"{stage}_{seed}" / "metrics.jsonl") if "kl" in row]
        target = (FOR_ACTIONS if stage == "stage_1" else FOR_STREAMS)["target"]
        shares[stage] = statistics.mean(kl[-max(1, len(kl) // 3) :]) / target
    return shares


def at(points: Sequence[tuple[float, float]], latency: float) -> float:
    """Quality of a curve at a latency, between its points; beyond its ends that of the nearest."""
    if latency <= points[0][0]:
        return points[0][1]
    for (x1, y1), (x2, y2) in pairwise(points):
        if latency <= x2:
            return y1 + (y2 - y1) * (latency - x1) / (x2 - x1) if x2 > x1 else max(y1, y2)
    return points[-1][1]


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean over seeds, with the 95 % interval of Student's t where there are several."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return {"mean": round(mean, 4)}
    half = STUDENT_T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4)}


def _build_interpret_line(
    case: str, our_rows: Sequence[Any], peer: Sequence[Any], key: str, unit: str
) -> dict[str, Any]:
    ours, theirs = (statistics.mean(row[key] for row in rows) for rows in (our_rows, peer))
    values = {"ours": round(ours, 3), "peer": round(theirs, 3), "ratio": round(theirs / ours, 3)}
    return {"bench": NAME, "case": case, **values, "unit": unit}


def _print_interpret_table(rows: dict[str, list[dict[str, float]]]) -> None:
    table = Table("", "AL, s", "LAAL, s", "chrF", "groups right", title="Held-out streams, mean over seeds")
    for case, case_rows in rows.items():
        cells = []
        for key, digits in (("AL", 2), ("LAAL", 2), ("chrF", 1), ("right", 3)):
            bounds = interval([row[key] for row in case_rows])
            spread = f" ± {bounds['high'] - bounds['mean']:.{digits}f}" if "high" in bounds else ""
            cells.append(f"{bounds['mean']:.{digits}f}{spread}")
        table.add_row(case, *cells)
    Console(stderr=True, width=120).print(table)


def lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def keep(path: Path, text: str) -> None:
    """Write it if it is new: stages that read a file that was written again start afresh."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
