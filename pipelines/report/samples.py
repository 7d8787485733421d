"""The section on generated samples: clips of each stage with the judges' answers, wrong ones among them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audiollm.evaluate.report.clips import Gallery, shares
from pipelines.report.material import Material, Row, Trace, pick_evenly


def samples_section(material: Material, gallery: Gallery, count: int) -> Row:
    """Clips of every stage `generate`, `count` in all if there are as many."""
    groups = _collect_sample_groups(material)
    filled_groups = [group for group in groups if group["rows"]]
    for group, share in zip(filled_groups, shares(count, len(filled_groups)), strict=True):
        group["count"] = share
    if filled_groups and not count:
        return {"absent": "None was asked for (samples: 0).", "stages": []}
    absent = "" if groups else "This recipe has no stage generate."
    # the last first: where the page has its fill of sound, that of the earlier ones is left out
    sections = [_build_sample_group(group, gallery) for group in reversed(groups)]
    return {"absent": absent, "stages": sections[::-1]}


def _collect_sample_groups(material: Material) -> list[Row]:
    """Judged clips by the stage that generated them, and the clips of stages without a judge."""
    judging = material.stages("evaluate")
    rows_by_judge = {stage.name: stage.rows("clips.jsonl") for stage in judging}
    groups: list[Row] = []
    for stage in material.stages("generate", "evaluate"):
        if stage.kind == "evaluate":
            generators = [
                generator.name
                for generator in material.stages("generate")
                if generator.name in stage.upstream
            ]
            if rows_by_judge[stage.name]:
                groups.append(
                    _pack_sample_group(
                        generators[0] if len(generators) == 1 else stage.name,
                        stage,
                        rows_by_judge[stage.name],
                    )
                )
            continue
        judges = [judge for judge in judging if stage.name in judge.upstream]
        if any(rows_by_judge[judge.name] for judge in judges):
            continue
        rows = stage.rows("generated.jsonl")
        absent = "" if rows else stage.absent or f"The stage {stage.name} wrote no clips."
        unjudged = judges[-1].absent or f"The stage {judges[-1].name} wrote no clips." if judges else ""
        if not judges:
            unjudged = "No stage evaluate reads them."
        groups.append(_pack_sample_group(stage.name, stage, rows, absent, unjudged))
    return groups


def _pack_sample_group(name: str, stage: Trace, rows: list[Row], absent: str = "", unjudged: str = "") -> Row:
    return {"name": name, "stage": stage, "rows": rows, "absent": absent, "unjudged": unjudged, "count": 0}


def _build_sample_group(group: Row, gallery: Gallery) -> Row:
    rows: list[Row] = group["rows"]
    section = {key: group[key] for key in ("name", "absent", "unjudged")}
    if group["absent"]:
        return section | {"brief": group["absent"]}
    selected_rows = choose_samples(rows, group["count"])
    wrong = sum(is_wrong(row) for row in rows)
    brief = f"{len(rows):,} clips" + ("" if group["unjudged"] else f", {wrong:,} wrong")
    return section | {
        "brief": brief,
        "total": len(rows),
        "wrong": wrong,
        "wrong_shown": sum(is_wrong(row) for row in selected_rows),
        "judge": _pick_main_judge(rows[0]),
        "samples": [_build_sample_entry(row, group["stage"].folder, gallery) for row in selected_rows],
    }


def choose_samples(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` rows, evenly over texts and speakers; wrong ones by their share, at most a quarter."""
    keys = ("text", "speaker")
    wrong, right = [row for row in rows if is_wrong(row)], [row for row in rows if not is_wrong(row)]
    count = min(count, len(rows))
    share = round(count * len(wrong) / len(rows))
    num_wrong = min(len(wrong), max(share, count // 4))
    num_wrong = max(num_wrong, count - len(right))
    selected_rows = [wrong[index] for index in pick_evenly(wrong, num_wrong, keys)]
    selected_rows += [right[index] for index in pick_evenly(right, count - num_wrong, keys, selected_rows)]
    return sorted(
        selected_rows, key=lambda row: (str(row.get("text")), str(row.get("speaker")), str(row.get("id")))
    )


def is_wrong(row: Row) -> bool:
    """Whether the main judge heard another text, or the speaker judge another voice."""
    correct = row.get("correct") or {}
    return correct.get(_pick_main_judge(row)) is False or correct.get("speaker") is False


def _pick_main_judge(row: Row) -> str:
    return "classifier" if "classifier" in (row.get("correct") or {}) else "pocketsphinx"


def _build_sample_entry(row: Row, folder: Path, gallery: Gallery) -> Row:
    correct, confidence = row.get("correct") or {}, row.get("confidence") or {}
    verdicts = [
        {
            "judge": judge,
            "heard": transcript,
            "right": correct.get(judge),
            "confidence": confidence.get(judge),
        }
        for judge, transcript in (row.get("heard") or {}).items()
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
