"""The stage `harvest`: speech that a model made becomes segments to train on, where independent judges agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from audiollm.errors import StageError
from audiollm.files.atomic import NUMBER, Kinds, read_jsonl, write_jsonl
from audiollm.files.set_aside import Row, set_aside_row
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan

ROW_KEYS: Mapping[str, Kinds] = {"id": str, "path": str, "text": str, "duration_s": NUMBER}
"""Columns that every row of `clips.jsonl` has."""


class HarvestConfig(StageConfig):
    """Settings of `harvest`."""

    clips: InputPath
    """`clips.jsonl` of the stage evaluate."""
    judges: list[str] | None = Field(None, min_length=1)
    """Judges that must confirm that the clip is as requested, by name (`classifier`, `speaker`, `pocketsphinx`); null:
    all that have judged it."""
    min_duration_s: float = Field(0.1, ge=0)
    """Shorter clips are left out."""


def run_harvest(config: HarvestConfig, context: Context) -> dict[str, Any]:
    """Write `segments.jsonl`, and what is refused, with its reason, to `set_aside.jsonl`.

    Raises:
        StageError: not one clip is left.
    """
    segments: list[dict[str, Any]] = []
    refused: list[Row] = []
    for row in read_jsonl(config.clips, "run the stage generate again", ROW_KEYS):
        path = str((config.clips.parent / row["path"]).resolve())
        kind = refusal(row, config)
        if kind:
            refused.append(set_aside_row("harvest", path, kind, id=row["id"]))
            continue
        segments.append(
            {
                "id": row["id"],
                "path": path,
                "file": row["id"],
                "start_s": 0.0,
                "end_s": row["duration_s"],
                "speaker": row["speaker"] or "generated",
                "text": row["text"],
                "text_source": "asked",
                "split": None,
            }
        )
    write_jsonl(context.folder / "segments.jsonl", segments)
    write_jsonl(context.folder / "set_aside.jsonl", refused)
    reasons = dict(sorted(Counter(row["kind"] for row in refused).items()))
    reasons_text = ", ".join(f"{count} {kind}" for kind, count in reasons.items()) or "there was none"
    if not segments:
        raise StageError(
            f"harvest: no clip of {config.clips} can be used: {reasons_text}",
            "train the model that speaks for longer, or name the judges that count",
            2,
        )
    context.say(f"{len(segments)} clips to train on" + (f"; refused: {reasons_text}" if refused else ""))
    return {"segments": len(segments), "refused": reasons}


def refusal(row: Mapping[str, Any], config: HarvestConfig) -> str:
    """Return the short reason why a clip is refused; empty: it is accepted."""
    if row["problem"]:
        return "not judged"
    if not row["stopped"]:
        return "did not end by itself"
    if row["duration_s"] < config.min_duration_s:
        return "too short"
    correct = {name: right for name, right in row["correct"].items() if right is not None}
    judges = config.judges or sorted(correct)
    missing = [name for name in judges if name not in correct]
    if missing or not judges:
        return f"not judged by {missing[0]}" if missing else "not judged"
    wrong = [name for name in judges if not correct[name]]
    return f"not what was asked for, says {wrong[0]}" if wrong else ""


def plan_harvest(config: HarvestConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    return StagePlan(memory_mb=300, disk_mb=1, core_seconds=2.0, note="no more than what is generated")


STAGE = Stage(
    kind="harvest",
    config=HarvestConfig,
    run=run_harvest,
    artifacts={"segments": "segments.jsonl", "set_aside": "set_aside.jsonl"},
    help="make segments of generated speech that judges agree with",
    plan=plan_harvest,
)
