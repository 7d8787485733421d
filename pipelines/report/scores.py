"""The section on scores: tables of the judges' verdicts on real and generated clips, for every stage `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from audiollm.evaluate.report.formats import percent_or_dash
from pipelines.report.material import Material, Row, Trace

JUDGES = {
    "classifier": "a classifier of the texts, trained on the real training takes",
    "pocketsphinx": "CMU Pocketsphinx",
    "speaker": "a classifier of the voices, trained on the real training takes",
}
SETS = {"real": "real", "reference": "real, through the codec", "generated": "generated"}
GROUPS_SHOWN = 60


def scores_section(material: Material) -> Row:
    """The tables of every stage `evaluate`, in the order of the recipe, and one that holds them side by side."""
    stages = [_build_scores_stage(stage) for stage in material.stages("evaluate")]
    scored = [stage for stage in stages if not stage["absent"]]
    return {
        "absent": "" if stages else "This recipe has no stage evaluate.",
        "stages": stages,
        "overview": _overview(scored) if len(scored) > 1 else None,
    }


def _overview(stages: Sequence[Row]) -> Row:
    """One row per stage: each judge's score of the generated clips, and its ratio to the real ones."""
    rows_by_judge = [{row["judge"]: row for row in stage["judges"]} for stage in stages]
    judges = [judge for judge in JUDGES if any(judge in rows for rows in rows_by_judge)]
    titles = [
        next((judge, rows[judge]["what"]) for rows in rows_by_judge if judge in rows) for judge in judges
    ]
    rows = [
        {
            "name": stage["name"],
            "cells": [
                (rows[judge]["cells"]["generated"], rows[judge]["relative"]) if judge in rows else None
                for judge in judges
            ],
        }
        for stage, rows in zip(stages, rows_by_judge, strict=True)
    ]
    return {"judges": titles, "rows": rows}


def _build_scores_stage(stage: Trace) -> Row:
    scores = stage.json("scores.json")
    absent = stage.absent or ("" if isinstance(scores, dict) else f"The stage {stage.name} left no scores.")
    if absent:
        return {"name": stage.name, "absent": absent, "brief": absent}
    sets = {name: scores["sets"][name] for name in SETS if name in scores["sets"]}
    facts = scores.get("judges") or {}
    judges = [name for name in JUDGES if name in sets["generated"]]
    main = "classifier" if "classifier" in judges else "pocketsphinx"
    matrices = [(main, "generated")] + [(j, s) for j in judges for s in sets if (j, s) != (main, "generated")]
    tables = [(judge, name, heat((sets[name].get(judge) or {}).get("confusion"))) for judge, name in matrices]
    return {
        "name": stage.name,
        "absent": "",
        "brief": f"{sets['generated'].get('n', 0):,} clips",
        "sets": [(name, SETS[name]) for name in sets],
        "judges": [_judge_row(judge, sets, scores, facts) for judge in judges],
        "left_out": [(name, fact["left_out"]) for name, fact in facts.items() if fact.get("left_out")],
        "groups": [
            group
            for group in (
                _tabulate_accuracy("text", "by_text", [j for j in judges if j != "speaker"], sets),
                _tabulate_accuracy("speaker", "by_speaker", judges, sets),
            )
            if group["rows"]
        ],
        "confusions": [
            {"judge": judge, "set": SETS[name], **table} for judge, name, table in tables if table is not None
        ],
        "measures": _tabulate_voice_measures(sets, scores.get("voicing") or {}),
    }


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
    """A judge's score of a set, as `evaluate` defines it: 1 - word error rate in an open vocabulary."""
    if not table or not table.get("n"):
        return {"value": None, "low": None, "high": None, "n": 0}
    if "confusion" in table:
        return {key: table.get(key) for key in ("low", "high", "n")} | {"value": table.get("accuracy")}
    rate = table.get("word_error_rate")
    value = None if rate is None else max(0.0, 1.0 - rate)
    return {"value": value, "low": None, "high": None, "n": table["n"]}


def _tabulate_accuracy(title: str, key: str, judges: Sequence[str], sets: Mapping[str, Row]) -> Row:
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


def heat(matrix: Row | None) -> Row | None:
    """A confusion matrix of `evaluate.statistics` for the page; None where there is none.

    Each count has its share of its row; the column of nothing heard is left out where it is empty.
    """
    if not matrix or not matrix["counts"]:
        return None
    heard_labels, counts = list(matrix["heard"]), [list(row) for row in matrix["counts"]]
    if len(heard_labels) > len(matrix["asked"]) and not any(row[-1] for row in counts):
        heard_labels, counts = heard_labels[:-1], [row[:-1] for row in counts]
    rows = [
        {
            "asked": asked_label,
            "cells": [
                {"count": c, "share": c / max(1, sum(row)), "hit": heard_labels[i] == asked_label}
                for i, c in enumerate(row)
            ],
        }
        for asked_label, row in zip(matrix["asked"], counts, strict=True)
    ]
    return {"heard": heard_labels, "rows": rows}


def _tabulate_voice_measures(
    sets: Mapping[str, Row], voicing: Mapping[str, Row]
) -> list[tuple[str, list[str]]]:
    """Rows of a small table: a measure and its value in each set."""
    tables = list(sets.values())
    lengths = [table.get("durations") or {} for table in tables]

    def seconds(key: str) -> list[str]:
        return ["–" if length.get(key) is None else f"{length[key]:.2f} s" for length in lengths]

    errors = [(table.get("pocketsphinx") or {}).get("word_error_rate") for table in tables]
    stopped = [
        percent_or_dash(table.get("not_stopped")) if name == "generated" else "–"
        for name, table in sets.items()
    ]
    return [
        ("clips", [f"{table.get('n', 0):,}" for table in tables]),
        ("voiced frames", [percent_or_dash((voicing.get(name) or {}).get("voiced_share")) for name in sets]),
        (
            "mean pitch within 2 semitones of the speaker's own",
            [percent_or_dash((voicing.get(name) or {}).get("pitch_right")) for name in sets],
        ),
        ("mean duration", seconds("mean_s")),
        ("5 % are shorter than", seconds("p5_s")),
        ("5 % are longer than", seconds("p95_s")),
        ("word error rate, pocketsphinx", [percent_or_dash(rate) for rate in errors]),
        ("did not stop by themselves", stopped),
        ("could not be read", [f"{len(table.get('unreadable') or []):,}" for table in tables]),
    ]
