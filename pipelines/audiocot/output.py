"""Results of a run: clips, made pairs and edits, the samples that trainings read, and the clips to review."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from audiollm.data.records.sample import AudioPart, Message, Region, Sample, TextPart, VideoPart
from audiollm.data.records.thoughts import ThoughtRecord, caption_of_record, prose_of, record_json
from audiollm.data.tables.splits import holds_out
from audiollm.errors import StageError
from audiollm.files.atomic import JsonLines, line_numbers, read_whole_lines, write_jsonl
from pipelines.audiocot.corpus import Partners, review_ids
from pipelines.audiocot.made.plans import MadePlan, plan_edits, plan_pairs
from pipelines.audiocot.made.words import caption_of_plan, instruction_of_plan, thought_of_plan
from pipelines.audiocot.rules import BALANCE, RULES, ClipThresholds
from pipelines.audiocot.settings import AudioCotConfig
from pipelines.audiocot.sources import STAGE_NAME, FileSources
from pipelines.steps.results import (
    FileFates,
    PartTally,
    Place,
    Row,
    Spool,
    dropped_part_row,
    funnel_counts,
    merge_set_aside,
    open_lines,
    part_ids,
    put_line,
)
from pipelines.steps.rules import Drop

CLIPS, FILTERED, COT, EDITS, THINKING = (
    "clips.jsonl",
    "filtered.jsonl",
    "cot.jsonl",
    "edits.jsonl",
    "thinking.jsonl",
)
BY_QUESTION = {
    "clip": "thinking_clip.jsonl",
    "region": "thinking_region.jsonl",
    "instruction": "thinking_instruction.jsonl",
}
"""The samples of `thinking.jsonl` by their kind of question, for trainings that weigh the kinds."""
REVIEW, JUDGED, MADE_FOLDER = "review.jsonl", "judged.jsonl", "made"
VERDICTS = ("accepted", "rejected")
WHAT_IS_HEARD = "Write the chain of thought of the sound of this clip, as a JSON record."
WHAT_THE_OBJECT_SOUNDS = "Write the chain of thought of the sound of this object, as a JSON record."
WHAT_TO_DO = "Turn the instruction into operation, span and chain of thought, as a JSON record. Instruction: "
_FATES = FileFates(STAGE_NAME, "no clip found")


def write_clips(
    folder: Path, spool: Spool, sources: FileSources, drops: Mapping[Place, Drop], limits: ClipThresholds
) -> dict[str, Any]:
    """Write `clips.jsonl`, `filtered.jsonl`, `files.jsonl`, `set_aside.jsonl`; returns the counts of the funnel."""
    names = {number: source.name for number, source in enumerate(sources.files)}
    ids = part_ids([(file, number) for file, number, _ in spool.parts()], names)
    tally = PartTally()
    with ExitStack() as stack:
        kept_file, filtered_file, aside_file = (
            stack.enter_context(open_lines(folder / name)) for name in (CLIPS, FILTERED, "aside.jsonl")
        )
        for file, number, row in spool.parts():
            drop = row.pop("dropped")
            if drop is None and (file, number) in drops:
                drop = drops[file, number].as_row()
            row = {"id": ids[file, number], **row}
            tally.add(file, row, drop)
            if drop is None:
                put_line(kept_file, _with_record(row))
            else:
                put_line(filtered_file, {**row, "dropped": drop})
                put_line(aside_file, dropped_part_row(STAGE_NAME, row, drop))
        files = list(_FATES.rows(spool, sources.rejected, tally))
    write_jsonl(folder / "files.jsonl", (row for row, _ in files))
    set_aside_rows = [*sources.rejected, *(row for _, row in files if row is not None)]
    merge_set_aside(folder, folder / "aside.jsonl", set_aside_rows)
    rows = [row for row, _ in files]
    num_files = len(sources.files) + len(sources.rejected)
    return funnel_counts(
        num_files, sources.num_other_files, rows, set_aside_rows, tally, (*RULES, BALANCE), limits
    )


def plan_made(clips: Sequence[Row], config: AudioCotConfig) -> list[MadePlan]:
    """Plan the pairs and edits of all kept clips; the id of each is its own, and no clip's."""
    partners = Partners(clips, config.seed)
    plans: list[MadePlan] = []
    for clip in clips:
        if config.made.pairs:
            plans += plan_pairs(clip, partners, config.seed)
        plans += plan_edits(clip, partners, config.made.edits, config.seed)
    clip_ids = {clip["id"] for clip in clips}  # `dog.wav` and `dog-remove.wav` may lie in one folder
    return [plan._replace(id=_other_id(plan)) if plan.id in clip_ids else plan for plan in plans]


def remove_stale(folder: Path, plans: Sequence[MadePlan]) -> None:
    """Remove what an earlier run made of other clips."""
    plan_ids = {plan.id for plan in plans}
    for old in (folder / MADE_FOLDER).glob("*") if (folder / MADE_FOLDER).is_dir() else ():
        if old.name not in plan_ids:
            shutil.rmtree(old, ignore_errors=True)


def write_samples_of(
    folder: Path,
    clips: Sequence[Row],
    made_sounds: Sequence[tuple[MadePlan, Mapping[str, Any]]],
    with_little_evidence: bool,
) -> dict[str, int]:
    """Write `cot.jsonl`, `edits.jsonl` and `thinking.jsonl`; returns the number of samples of each.

    `cot.jsonl` is for sound models: clips, pairs, and edits whose two sounds have one length. `edits.jsonl` has the
    triples of all operations. `thinking.jsonl` is for models that write: clips, regions, instructions;
    `BY_QUESTION` names the files with each kind alone.

    Args:
        with_little_evidence: write the questions about clips whose records have little evidence, too.
    """
    by_id = {clip["id"]: clip for clip in clips}
    cot = [_sound_sample(clip) for clip in clips]
    thinking = clip_questions(clips, with_little_evidence)
    edits: list[Sample] = []
    for plan, sounds in made_sounds:
        clip = by_id[plan.clip]
        sample = _made_sample(clip, plan, sounds)
        if plan.operation in ("add", "remove", "extract"):
            cot.append(sample)
        if plan.operation == "extract":
            thinking.append(_region_question(clip, plan))
        else:
            edits.append(sample)
            thinking.append(_instruction_question(clip, plan, sounds))
    if not with_little_evidence:
        thinking = [sample for sample in thinking if not sample.metadata.get("little_evidence")]
    counts = {}
    for name, samples in ((COT, cot), (EDITS, edits)):
        write_jsonl(folder / name, (sample.model_dump(mode="json") for sample in samples))
        counts[name.removesuffix(".jsonl")] = len(samples)
    rows = [sample.model_dump(mode="json") for sample in thinking]
    write_jsonl(folder / THINKING, rows)
    counts[THINKING.removesuffix(".jsonl")] = len(rows)
    for question, name in BY_QUESTION.items():
        write_jsonl(folder / name, (row for row in rows if row["metadata"]["question"] == question))
    return counts


def clip_questions(clips: Sequence[Row], with_little_evidence: bool) -> list[Sample]:
    """The questions about whole clips.

    Args:
        with_little_evidence: see `write_samples_of`.
    """
    return [_clip_question(clip) for clip in clips if with_little_evidence or not clip["little_evidence"]]


def write_review(folder: Path, clips: Sequence[Row], share: float, seed: int) -> dict[str, Any]:
    """Write `review.jsonl`: a drawn share of the clips, and those that a person has judged with the same record.

    All verdicts are kept in `judged.jsonl`, those on clips that are not kept now, too.

    Returns:
        The counts of verdicts on the clips that are kept now.

    Raises:
        StageError: a file is there, and a person's verdict in it cannot be read.
    """
    judged = [*_read_verdicts(folder / JUDGED), *_read_verdicts(folder / REVIEW)]
    last = {_judged_key(row): row for row in judged}  # a verdict that was taken back has become null
    judged_by_key = {key: row for key, row in last.items() if row.get("verdict")}
    write_jsonl(folder / JUDGED, judged_by_key.values())
    review = review_ids(clips, share, seed)
    rows = []
    for clip in clips:
        judged_row = judged_by_key.get(_judged_key(clip), {})
        if clip["id"] not in review and not judged_row:
            continue
        rows.append(
            {
                **{name: clip[name] for name in ("id", "path", "start_s", "end_s", "record", "thought")},
                "verdict": judged_row.get("verdict"),
                "note": judged_row.get("note", ""),
            }
        )
    write_jsonl(folder / REVIEW, rows)
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    total = sum(counts.values())
    share_accepted = round(counts["accepted"] / total, 4) if total else None
    return {"listed": len(rows), **counts, "agreement": share_accepted}


def region_prompt(record: Mapping[str, Any]) -> str:
    """The question about an object, beside the record of its clip."""
    return f"{WHAT_THE_OBJECT_SOUNDS} The clip: {json.dumps(record, ensure_ascii=False)}"


def in_hundredths(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with its times in hundredths of a second: further digits are noise to a model that writes them.

    An event of less than that is a hundredth long.
    """
    events = []
    for event in record["events"]:
        start_s = round(event["start_s"], 2)
        end_s = max(round(event["end_s"], 2), round(start_s + 0.01, 2))
        events.append({**event, "start_s": start_s, "end_s": end_s})
    return {**record, "events": events}


def read_kept(folder: Path) -> list[Row]:
    """The rows of `clips.jsonl`."""
    return read_whole_lines(folder / CLIPS).rows


# Private


def _other_id(plan: MadePlan) -> str:
    return f"{plan.id}-{sha256(plan.seed.encode()).hexdigest()[:10]}"


def _judged_key(row: Row) -> tuple[str, str]:
    """The clip and the record that a verdict is about."""
    return str(row.get("id")), json.dumps(row.get("record"), sort_keys=True)


def _read_verdicts(path: Path) -> list[Row]:
    """The rows of `review.jsonl` or `judged.jsonl`; none where there is no file.

    Raises:
        StageError: a line that is no JSON, or another verdict than the two that there are.
    """
    before = read_whole_lines(path) if path.exists() else JsonLines([], [])
    if before.broken:
        raise StageError(f"{path}: {line_numbers(before.broken)}: not JSON", "correct it and run again")
    for row in before.rows:
        verdict = row.get("verdict")
        if verdict and verdict not in VERDICTS:
            remedy = f"write {' or '.join(VERDICTS)}, and run again"
            raise StageError(f"{path}: the verdict {verdict!r} of {row.get('id')} is none", remedy)
    return before.rows


def _with_record(row: Row) -> Row:
    """A kept clip with its record, prose and caption."""
    record = ThoughtRecord.model_validate(row["measured"]["think"]["record"])
    caption = row["text"] or caption_of_record(record)
    return {
        **row,
        "record": record_json(record),
        "thought": prose_of(record),
        "caption": caption,
        "little_evidence": row["measured"]["think"]["little_evidence"],
    }


def _video_parts(clip: Row, region: Sequence[Mapping[str, Any]] = ()) -> list[Any]:
    """The pictures of a clip, if it has any."""
    if clip["video"] is None:
        return []
    boxes = [Region.model_validate(box) for box in region]
    video = VideoPart(path=clip["video"], start_s=clip["start_s"], end_s=clip["end_s"], region=boxes)
    return [video]


def _clip_audio_part(clip: Row) -> AudioPart:
    return AudioPart(path=clip["path"], start_s=clip["start_s"], end_s=clip["end_s"])


def _sample_metadata(clip: Row, **more: Any) -> dict[str, Any]:
    split = {"split": clip["split"]} if clip["split"] else {}
    doubt = {"little_evidence": True} if clip["little_evidence"] else {}
    return {**split, **doubt, "clip": clip["id"], **more}


def _sound_sample(clip: Row) -> Sample:
    content = [*_video_parts(clip), TextPart(text=clip["caption"])]
    facts = _sample_metadata(
        clip, stage=1, caption=clip["caption"], thought=clip["thought"], record=clip["record"]
    )
    return Sample(
        id=clip["id"],
        messages=[
            Message(role="user", content=content),
            Message(role="assistant", content=[_clip_audio_part(clip)]),
        ],
        task="sound",
        metadata=facts,
    )


def _made_sample(clip: Row, plan: MadePlan, sounds: Mapping[str, Any]) -> Sample:
    """The triple: words and input in the user's message, output in the assistant's."""
    content = [
        *_video_parts(clip, plan.region),
        TextPart(text=caption_of_plan(plan)),
        AudioPart(path=sounds["input"]),
    ]
    facts = _sample_metadata(
        clip,
        stage=2 if plan.operation == "extract" else 3,
        operation=plan.operation,
        span=list(plan.span),
        instruction=_instruction(clip, plan),
        thought=thought_of_plan(plan),
        record=record_json(plan.record),
        about=record_json(plan.about),
        reference=plan.reference,
        avoid=list(plan.avoid),
        layer=sounds.get("layer"),
        gain=sounds["gain"],
    )
    return Sample(
        id=plan.id,
        messages=[
            Message(role="user", content=content),
            Message(role="assistant", content=[AudioPart(path=sounds["output"])]),
        ],
        task="sound",
        metadata=facts,
    )


def _question(id: str, clip: Row, question: str, content: list[Any], answer: Mapping[str, Any]) -> Sample:
    return Sample(
        id=id,
        messages=[
            Message(role="user", content=content),
            Message(role="assistant", content=[TextPart(text=json.dumps(answer, ensure_ascii=False))]),
        ],
        task="think",
        metadata=_sample_metadata(clip, question=question, duration_s=clip["duration_s"]),
    )


def _clip_question(clip: Row) -> Sample:
    content = [*_video_parts(clip), _clip_audio_part(clip), TextPart(text=WHAT_IS_HEARD)]
    return _question(f"{clip['id']}-think", clip, "clip", content, in_hundredths(clip["record"]))


def _region_question(clip: Row, plan: MadePlan) -> Sample:
    """The CoT of an object beside that of its clip."""
    prompt = region_prompt(in_hundredths(clip["record"]))
    record = in_hundredths(record_json(ThoughtRecord(events=plan.about.events)))
    content = [*_video_parts(clip, plan.region), _clip_audio_part(clip), TextPart(text=prompt)]
    return _question(f"{plan.id}-think", clip, "region", content, record)


def _instruction(clip: Row, plan: MadePlan) -> str:
    return instruction_of_plan(plan, holds_out(str(clip["split"] or "")))


def _instruction_question(clip: Row, plan: MadePlan, sounds: Mapping[str, Any]) -> Sample:
    span = [round(second, 2) for second in plan.span]
    answer = {"operation": plan.operation, "span": span, "record": in_hundredths(record_json(plan.about))}
    prompt = f"{WHAT_TO_DO}{_instruction(clip, plan)}"
    content = [*_video_parts(clip), AudioPart(path=sounds["input"]), TextPart(text=prompt)]
    return _question(f"{plan.id}-think", clip, "instruction", content, answer)
