"""The stage `describe`: a model that understands audio is asked about every segment; its answers become columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from audiollm.files.atomic import write_jsonl
from audiollm.files.set_aside import Row, row_of, set_aside_row
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputModel, InputPath, Stage, StageConfig, StagePlan
from pipelines.compose.rows import SegmentRow, read_segments
from pipelines.review.applied import correction_digests

SEGMENT_COLUMNS = frozenset({"id", "path", "file", "start_s", "end_s", "speaker", "split", "duration_s"})
"""Columns that identify a segment and do not describe its sound; answers cannot replace them."""


class DescribeConfig(StageConfig):
    """Settings of `describe`."""

    segments: InputPath
    """`segments.jsonl` of a stage that makes segments."""
    model: InputModel
    """Model that describes: an audiollm model, or an audio LLM of Hugging Face."""
    codec: InputModel | None = None
    """Codec of an audiollm model that hears codes."""
    columns: dict[str, str] = Field(min_length=1)
    """Column -> the question that it answers. `compose` takes columns as fields of its tasks: `scene` and `voice` go
    into system prompts, `text` is the transcript. A column that a segment has already, and that is not empty, stays."""
    replace: bool = False
    """Replace values that the columns hold already."""
    max_answer_tokens: int = Field(64, ge=1)
    """The longest answer."""

    @field_validator("columns")
    @classmethod
    def _are_about_content(cls, columns: dict[str, str]) -> dict[str, str]:
        for name, question in columns.items():
            if name in SEGMENT_COLUMNS or not name.isidentifier():
                raise ValueError(f"{name!r} is not a valid column name for an answer")
            if not question.strip():
                raise ValueError(f"{name}: the question is empty")
        return columns


def run_description(config: DescribeConfig, context: Context) -> dict[str, Any]:
    """Write `segments.jsonl` with the columns, and who answered in `described_by`; what failed has no answer."""
    from audiollm.evaluate.listening.replies import Inquiry, ask_all, by_answerer
    from audiollm.evaluate.report.store import RowStore
    from audiollm.evaluate.subjects.loading import load_answerer

    segments, bad = read_segments(config.segments)
    subject = load_answerer(str(config.model), config.codec, config.max_answer_tokens)
    questions = [
        (segment, name, question)
        for segment in segments
        for name, question in config.columns.items()
        if config.replace or not _read_column(segment, name)
    ]
    inquiries = [
        Inquiry(f"{s.id} {name}", Path(s.path), question, s.start_s, s.end_s)
        for s, name, question in questions
    ]
    with context.progress("describing", len(inquiries)) as bar:
        store = RowStore(context.folder / "kept.jsonl")
        write = by_answerer(subject)
        replies = ask_all(
            write, subject.fingerprint, inquiries, store, lambda _: bar.advance(bar.task_ids[0])
        )
    answers: dict[str, dict[str, str]] = {}
    failed: list[Row] = [row_of(bad_row, "describe") for bad_row in bad]
    for (segment, name, _), inquiry in zip(questions, inquiries, strict=True):
        reply = replies[inquiry.id]
        text = " ".join(reply.text.split())
        if text:
            answers.setdefault(segment.id, {})[name] = text
        else:
            reason = reply.problem or "an empty answer"
            failed.append(set_aside_row("describe", segment.path, f"no {name}", reason, segment.id))
    described_rows = [segment.model_dump() | answers.get(segment.id, {}) for segment in segments]
    by = {"model": subject.name, "columns": sorted(config.columns)}
    write_jsonl(
        context.folder / "segments.jsonl",
        [row | {"described_by": by} if row["id"] in answers else row for row in described_rows],
    )
    write_jsonl(context.folder / "set_aside.jsonl", failed)
    answered = sum(map(len, answers.values()))
    context.say(f"{answered} answers on {len(segments)} segments, {len(failed)} not answered")
    return {"segments": len(segments), "answers": answered, "not_answered": len(failed)}


def plan_description(config: DescribeConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    """Counts of the segments' stage; nothing of their audio changes."""
    facts = next((p.facts for p in plans.values() if config.segments in p.artifacts.values()), {})
    questions = facts.get("clips", 0.0) * len(config.columns)
    return StagePlan(
        memory_mb=1500,
        disk_mb=2e-3 * questions,
        core_seconds=4 + 0.015 * questions if questions else None,
        note=f"{questions:.0f} questions" if questions else "",
        facts=dict(facts),
    )


def _read_column(segment: SegmentRow, name: str) -> Any:
    return segment.text if name == "text" else (segment.model_extra or {}).get(name)


STAGE = Stage(
    kind="describe",
    config=DescribeConfig,
    run=run_description,
    artifacts={"segments": "segments.jsonl", "set_aside": "set_aside.jsonl"},
    help="write a model's answers about segments into their columns",
    plan=plan_description,
    facts=lambda config: correction_digests(config.segments),
)
