"""What the page shows of the model's voice: headline, generated samples, tables of the judges' scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.report.material import Material, Row, pick_evenly
from pipelines.report.media import Gallery

JUDGES = {
    "classifier": "a classifier of the texts, trained on the real training takes",
    "pocketsphinx": "CMU Pocketsphinx",
    "speaker": "a classifier of the voices, trained on the real training takes",
}
SETS = {"real": "real", "reference": "real, through the codec", "generated": "generated"}
GROUPS_SHOWN = 60


def headline(summary: Mapping[str, Any]) -> list[Row]:
    """The big figures at the top: a value, what it is, and what it was made of."""
    main = str(summary["judge"] or "")
    tiles = [_score_tile(summary, main, "", "relative_accuracy")]
    if not main.startswith("pocketsphinx"):
        tiles.append(_score_tile(summary, "pocketsphinx", "pocketsphinx_", "pocketsphinx_relative"))
    if summary["speaker_generated_accuracy"] is not None:
        value, real = (
            percent(summary["speaker_generated_accuracy"]),
            percent(summary["speaker_real_accuracy"]),
        )
        tiles.append(_tile(value, "right voice", f"classifier of the voices: {real} on real takes"))
    seconds, memory = dict(summary["seconds"]), summary["memory_mb"]
    total = seconds.pop("total")
    longest, largest = max(seconds, key=seconds.__getitem__), max(memory, key=memory.__getitem__)
    tiles.append(_tile(duration(total), "total time", f"longest: {longest}, {duration(seconds[longest])}"))
    tiles.append(_tile(megabytes(summary["peak_memory_mb"]), "peak memory", f"in {largest}"))
    return [tile for tile in tiles if tile is not None]


def _tile(value: str, title: str, note: str) -> Row:
    return {"value": value, "title": title, "note": note}


def _score_tile(summary: Mapping[str, Any], judge: str, prefix: str, relative: str) -> Row | None:
    if summary[relative] is None:
        return None
    real, generated = summary[f"{prefix}real_accuracy"], summary[f"{prefix}generated_accuracy"]
    note = f"{judge}: {percent(generated)} generated, {percent(real)} real"
    return _tile(percent(summary[relative]), "right text, relative to real", note)


# ---------------------------------------------------------------------------------------------- samples


def samples_section(material: Material, gallery: Gallery, count: int) -> Row:
    """Generated clips with what the judges heard, the wrong ones among them."""
    rows, kind = material.rows("evaluate", "clips.jsonl"), "evaluate"
    if not rows:
        rows, kind = material.rows("generate", "generated.jsonl"), "generate"
    section: Row = {"absent": material.why_absent("generate") if not rows else "", "unjudged": ""}
    if not rows and not section["absent"]:
        section["absent"] = "The stage generate wrote no clips."
    if rows and not count:
        section["absent"] = "None was asked for (samples: 0)."
    if section["absent"]:
        return section
    if kind == "generate":
        section["unjudged"] = material.why_absent("evaluate") or "The stage evaluate wrote no clips."
    chosen = choose_samples(rows, count)
    folder = material.folder(kind)
    section |= {
        "total": len(rows),
        "wrong": sum(is_wrong(row) for row in rows),
        "wrong_shown": sum(is_wrong(row) for row in chosen),
        "judge": _main_judge(rows[0]),
        "samples": [_sample(row, folder, gallery) for row in chosen],
    }
    return section


def choose_samples(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` rows evenly over texts and speakers; of the wrong ones their share, and up to a quarter."""
    keys = ("text", "speaker")
    wrong, right = [row for row in rows if is_wrong(row)], [row for row in rows if not is_wrong(row)]
    count = min(count, len(rows))
    share = round(count * len(wrong) / len(rows))
    num_wrong = min(len(wrong), max(share, count // 4))
    num_wrong = max(num_wrong, count - len(right))
    chosen = [wrong[index] for index in pick_evenly(wrong, num_wrong, keys)]
    chosen += [right[index] for index in pick_evenly(right, count - num_wrong, keys, chosen)]
    return sorted(chosen, key=lambda row: (str(row.get("text")), str(row.get("speaker")), str(row.get("id"))))


def is_wrong(row: Row) -> bool:
    """Whether the main judge heard another text, or the speaker judge another voice."""
    correct = row.get("correct") or {}
    return correct.get(_main_judge(row)) is False or correct.get("speaker") is False


def _main_judge(row: Row) -> str:
    return "classifier" if "classifier" in (row.get("correct") or {}) else "pocketsphinx"


def _sample(row: Row, folder: Path, gallery: Gallery) -> Row:
    correct, confidence = row.get("correct") or {}, row.get("confidence") or {}
    verdicts = [
        {"judge": judge, "heard": heard, "right": correct.get(judge), "confidence": confidence.get(judge)}
        for judge, heard in (row.get("heard") or {}).items()
    ]
    if row.get("speaker_heard") is not None:
        speaker = {"right": correct.get("speaker"), "confidence": confidence.get("speaker")}
        verdicts.append({"judge": "speaker", "heard": row["speaker_heard"], **speaker})
    return {
        "id": row.get("id", ""),
        "text": row.get("text", ""),
        "speaker": row.get("speaker") or "",
        "stopped": row.get("stopped", True),
        "problem": row.get("problem") or "",
        "wrong": is_wrong(row),
        "verdicts": verdicts,
        "clip": gallery.clip(folder / str(row.get("path", ""))),
    }


# ----------------------------------------------------------------------------------------------- tables


def scores_section(material: Material) -> Row:
    """The judges' scores of real and generated clips, as tables."""
    section: Row = {"absent": material.why_absent("evaluate")}
    scores = material.json("evaluate", "scores.json")
    if section["absent"] or not isinstance(scores, dict):
        section["absent"] = section["absent"] or "The stage evaluate left no scores."
        return section
    sets = {name: scores["sets"][name] for name in SETS if name in scores["sets"]}
    facts = scores.get("judges") or {}
    judges = [name for name in JUDGES if name in sets["generated"]]
    main = "classifier" if "classifier" in judges else "pocketsphinx"
    matrices = [(main, "generated")] + [(j, s) for j in judges for s in sets if (j, s) != (main, "generated")]
    tables = [_confusion(sets[name].get(judge), judge, name) for judge, name in matrices]
    section |= {
        "sets": [(name, SETS[name]) for name in sets],
        "judges": [_judge_row(judge, sets, scores, facts) for judge in judges],
        "left_out": [(name, fact["left_out"]) for name, fact in facts.items() if fact.get("left_out")],
        "groups": [
            group
            for group in (
                _groups("text", "by_text", [j for j in judges if j != "speaker"], sets),
                _groups("speaker", "by_speaker", judges, sets),
            )
            if group["rows"]
        ],
        "confusions": [table for table in tables if table is not None],
        "measures": _measures(sets),
    }
    return section


def _judge_row(judge: str, sets: Mapping[str, Row], scores: Row, facts: Row) -> Row:
    fact = facts.get(judge) or {}
    about = JUDGES[judge]
    if fact.get("training_clips"):
        about += f" ({fact['training_clips']:,} clips)"
    if judge == "pocketsphinx":
        about += (
            f" with a grammar of {len(fact['grammar'])} texts" if fact.get("grammar") else ", open vocabulary"
        )
    cells = {name: _score(tables.get(judge)) for name, tables in sets.items()}
    open_text = judge == "pocketsphinx" and not fact.get("grammar")
    return {
        "judge": judge,
        "about": about,
        "what": "1 − word error rate" if open_text else "voice right" if judge == "speaker" else "text right",
        "cells": cells,
        "relative": (scores.get("relative") or {}).get(judge),
    }


def _score(table: Row | None) -> Row:
    """A judge's score of a set, as `evaluate` counts it: in an open vocabulary 1 - word error rate."""
    if not table or not table.get("n"):
        return {"value": None, "low": None, "high": None, "n": 0}
    if "confusion" in table:
        return {key: table.get(key) for key in ("low", "high", "n")} | {"value": table.get("accuracy")}
    rate = table.get("word_error_rate")
    value = None if rate is None else max(0.0, 1.0 - rate)
    return {"value": value, "low": None, "high": None, "n": table["n"]}


def _groups(title: str, key: str, judges: Sequence[str], sets: Mapping[str, Row]) -> Row:
    """Accuracy by text or speaker: a row for each, a pair of columns for each judge."""
    names = [name for name in ("real", "generated") if name in sets]
    columns = [(judge, name) for judge in judges for name in names if key in (sets[name].get(judge) or {})]
    tables = [sets[name][judge][key] for judge, name in columns]
    labels = sorted({label for table in tables for label in table})
    rows = [
        {"label": label, "cells": [(table.get(label) or {}).get("accuracy") for table in tables]}
        for label in labels
    ]
    rows_shown = rows[:GROUPS_SHOWN]
    heads = [
        (judge, sum(column[0] == judge for column in columns))
        for judge in dict.fromkeys(j for j, _ in columns)
    ]
    return {
        "title": title,
        "heads": heads,
        "columns": columns,
        "rows": rows_shown,
        "more": len(rows) - len(rows_shown),
    }


def _confusion(table: Row | None, judge: str, name: str) -> Row | None:
    """Counts, each with its share of its row; the column of nothing heard is left out where it is empty."""
    matrix = (table or {}).get("confusion")
    if not matrix or not matrix["counts"]:
        return None
    heard, counts = list(matrix["heard"]), [list(row) for row in matrix["counts"]]
    if len(heard) > len(matrix["asked"]) and not any(row[-1] for row in counts):
        heard, counts = heard[:-1], [row[:-1] for row in counts]
    rows = [
        {
            "asked": asked,
            "cells": [
                {"count": c, "share": c / max(1, sum(row)), "hit": heard[i] == asked}
                for i, c in enumerate(row)
            ],
        }
        for asked, row in zip(matrix["asked"], counts, strict=True)
    ]
    return {"judge": judge, "set": SETS[name], "heard": heard, "rows": rows}


def _measures(sets: Mapping[str, Row]) -> list[tuple[str, list[str]]]:
    """Rows of a small table: a measure and its value in each set."""
    tables = list(sets.values())
    lengths = [table.get("durations") or {} for table in tables]

    def seconds(key: str) -> list[str]:
        return ["–" if length.get(key) is None else f"{length[key]:.2f} s" for length in lengths]

    errors = [(table.get("pocketsphinx") or {}).get("word_error_rate") for table in tables]
    stopped = [
        percent(table.get("not_stopped")) if name == "generated" else "–" for name, table in sets.items()
    ]
    return [
        ("clips", [f"{table.get('n', 0):,}" for table in tables]),
        ("mean duration", seconds("mean_s")),
        ("5 % are shorter than", seconds("p5_s")),
        ("5 % are longer than", seconds("p95_s")),
        ("word error rate, pocketsphinx", [percent(rate) for rate in errors]),
        ("did not stop by themselves", stopped),
        ("could not be read", [f"{len(table.get('unreadable') or []):,}" for table in tables]),
    ]


# ---------------------------------------------------------------------------------------------- numbers


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def megabytes(value: float) -> str:
    """From MB of 2**20 bytes, as the runner measures them."""
    value *= 2**20 / 1e6
    return f"{value / 1000:.2f} GB" if value >= 1000 else f"{value:.0f} MB"
