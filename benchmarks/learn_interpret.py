"""Do rewards teach an interpreter to wait no longer than it must? Spoken digits to German number words, three seeds.

    make -C benchmarks learn-interpret DATA=../shared/data

The free spoken digit dataset, one speaker per stream (takes 0 to 4 are held out), in groups of one or two digits with
pauses of 0.05 to 0.3 s inside a group and 0.6 to 1.2 s between groups. *two one* is *einundzwanzig*: the digit that is
heard last is said first. References imitate people: the earliest chunk of 0.32 s at which the output can be right, plus
a lag of 0 to 4 chunks that is drawn once per stream.

A model first learns to write single takes down, and the German numbers as texts (`digits`), and then to interpret
without lag, half of it talks of a single group (`hearing`): from scratch, 600 steps of such talks teach when to speak,
and no digit. It is one for all seeds. From it, for each seed, a model is trained on the references (the
start), and then by PPO, in the settings of proofs/learn_interpret.yaml:

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

import json
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from num2words import num2words
from proof import Proof, arms_of, check_data, interval, json_lines, print_table, proof_parser, write_changed

from audiollm.audio import probe
from audiollm.evaluate.interpret.pictures import QualityPoint, quality_over_latency
from audiollm.files.atomic import read_json, read_jsonl

NAME, RECORDINGS = "learn_interpret", "fsdd/recordings"
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VARIANTS: dict[str, Sequence[str]] = {
    "two stages": ("stage_1", "stage_2"),
    "stage 1 alone": ("stage_1", "stage_1_on"),
    "rewards of streams alone": ("streams_1", "streams_2"),
    "two stages, fixed weight of the KL": ("fixed_1", "fixed_2"),
}
"""Variant -> its trainings, one after the other."""
TARGET_KL = {"stage_1": 3.0, "stage_2": 5.0}
"""Nats per stream."""
FASTER, WORSE = 0.2, 1.0
SMOKE_TAKES = range(4, 7)

Row = dict[str, float]
"""The figures of an evaluation."""


def main() -> None:
    parser = proof_parser(__doc__)
    smoke_help = "everything at a size of two CPU minutes, one seed"
    parser.add_argument("--smoke", action="store_true", help=smoke_help)
    options = parser.parse_args()
    check_data(options.data, RECORDINGS)
    chain = f"{NAME}_smoke" if options.smoke else NAME
    seeds = (0,) if options.smoke else options.seeds
    proof = Proof(options.runs / chain, seeds, options.overrides, [chain])
    segments = digit_segments(options.data / RECORDINGS, SMOKE_TAKES if options.smoke else None)
    write_segments(proof.folder, segments, number_phrases())
    write_changed(proof.folder / "numbers.jsonl", json_lines(number_texts()))
    proof.run(chain)
    report(proof, chain)


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


def write_segments(
    folder: Path, segments: Sequence[dict[str, Any]], phrases: Sequence[dict[str, str]]
) -> None:
    """Write the takes, those that a tokenizer is trained on, and the phrases of the talks.

    The tokenizer measures the pitch of every clip: it has the training takes, and every tenth of the held-out ones.
    """
    held_out = [row for row in segments if row["split"] == "test"]
    clips = [*(row for row in segments if row["split"] == "train"), *held_out[::10]]
    for name, rows in (("segments", segments), ("clips", clips), ("phrases", phrases)):
        write_changed(folder / f"{name}.jsonl", json_lines(rows))


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


# --------------------------------------------------------------------------------------------------- report


def report(proof: Proof, chain: str) -> None:
    """Print a table, a JSON line for each bar, and write the picture of quality over latency."""
    folder = proof.folder
    rows = {
        case: [figures_of(folder / stage) for stage in proof.stages(kind)] for case, kind in cases().items()
    }
    curve = []
    for place, values in arms_of(chain, "biases").items():
        curve.append([figures_of(folder / stage) for stage in proof.stages(f"bias_{place}")])
        rows[f"start, silence {values['constant']:+g}"] = curve[-1]
    _print_interpret_table(proof, rows)
    for line in bars(rows, curve, [kl_shares(folder, seed) for seed in proof.seeds]):
        print(json.dumps(line))
    points = [
        QualityPoint(
            case, _mean(case_rows, "AL"), _mean(case_rows, "chrF"), is_on_curve=case.startswith("start")
        )
        for case, case_rows in rows.items()
        if "drawn" not in case
    ]
    picture = folder / "quality_latency.html"
    picture.write_text(quality_over_latency(points, "AL, s", "chrF"), encoding="utf-8")
    print(f"picture: {picture}", file=sys.stderr)


def cases() -> dict[str, str]:
    """Row of the table -> the name of its evaluation."""
    models = {"start": "sft", "supervised without lag": "sft_punctual"}
    models |= {variant: stages[-1] for variant, stages in VARIANTS.items()}
    decodings = {"greedy": "greedy", "drawn": "random"}
    return {
        f"{case}, {decoding}": f"{stage}_{name}"
        for case, name in models.items()
        for decoding, stage in decodings.items()
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
        line |= {"fewer": _interval([1 - share for share in shares]), "chrF_gained": _interval(gained)}
        met = statistics.mean(shares) <= 1 - FASTER and statistics.mean(gained) >= -WORSE
        lines.append(line | {"met": met} if variant == "two stages" else line)
    for latency in ("AL", "LAAL"):
        gains = []
        for place, led in enumerate(ours):
            points = sorted((row[place][latency], row[place]["chrF"]) for row in [start, *curve])
            gains.append(led["chrF"] - at(points, led[latency]))
        case = f"two stages: chrF above the start with a constant on silence at the same {latency}"
        low = _interval(gains).get("low")
        met = low is not None and low > 0
        lines.append({"bench": NAME, "case": case, "ours": _interval(gains), "unit": "points", "met": met})
    for stage in VARIANTS["two stages"]:
        shares = [seed_shares[stage] for seed_shares in kl]
        met = all(abs(share - 1) <= 0.25 for share in shares)
        line = {"bench": NAME, "case": f"{stage}: KL of the last third over its target"}
        lines.append(line | {"ours": _interval(shares), "unit": "share", "met": met})
    return lines


def kl_shares(folder: Path, seed: int) -> dict[str, float]:
    """The mean KL of the last third of each of the two stages, over its target."""
    shares = {}
    for stage in VARIANTS["two stages"]:
        kl = [row["kl"] for row in read_jsonl(folder / f"{stage}_{seed}" / "metrics.jsonl") if "kl" in row]
        shares[stage] = statistics.mean(kl[-max(1, len(kl) // 3) :]) / TARGET_KL[stage]
    return shares


def at(points: Sequence[tuple[float, float]], latency: float) -> float:
    """Quality of a curve at a latency, between its points; beyond its ends that of the nearest."""
    if latency <= points[0][0]:
        return points[0][1]
    for (x1, y1), (x2, y2) in pairwise(points):
        if latency <= x2:
            return y1 + (y2 - y1) * (latency - x1) / (x2 - x1) if x2 > x1 else max(y1, y2)
    return points[-1][1]


def _build_interpret_line(
    case: str, our_rows: Sequence[Row], peer: Sequence[Row], key: str, unit: str
) -> dict[str, Any]:
    ours, theirs = _mean(our_rows, key), _mean(peer, key)
    values = {"ours": round(ours, 3), "peer": round(theirs, 3), "ratio": round(theirs / ours, 3)}
    return {"bench": NAME, "case": case, **values, "unit": unit}


def _print_interpret_table(proof: Proof, rows: dict[str, list[Row]]) -> None:
    def cell(case_rows: list[Row], key: str, digits: int) -> str:
        bounds = _interval([row[key] for row in case_rows])
        spread = f" ± {bounds['high'] - bounds['mean']:.{digits}f}" if "high" in bounds else ""
        return f"{bounds['mean']:.{digits}f}{spread}"

    keys = (("AL", 2), ("LAAL", 2), ("chrF", 1), ("right", 3))
    cells = [[case, *(cell(case_rows, *key) for key in keys)] for case, case_rows in rows.items()]
    columns = ("", "AL, s", "LAAL, s", "chrF", "groups right")
    print_table(proof.console, "Held-out streams, mean over seeds", columns, cells)


def _interval(values: Sequence[float]) -> Row:
    """Mean over seeds, with its 95 % interval where there are several."""
    bounds = interval(values)
    table = {
        "mean": statistics.mean(values),
        **(dict(zip(("low", "high"), bounds, strict=True)) if bounds else {}),
    }
    return {name: round(value, 4) for name, value in table.items()}


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.mean(row[key] for row in rows)


if __name__ == "__main__":
    main()
