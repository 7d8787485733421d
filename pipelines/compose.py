"""The stage `compose`: segments to samples (chat messages with audio in them), for training and test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from audiollm.config import nearest
from audiollm.data.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.text import spoken_form
from audiollm.files import read_jsonl, write_jsonl
from audiollm.recipe import InputPath, Stage, StageConfig, StagePlan
from audiollm.runner import Context, StageError

TASKS = ("tts",)
SPEAK_PROMPT = "Generate audio following instruction.\n\nSpeaker: {speaker}"


class Config(StageConfig):
    """Settings of the stage `compose`."""

    segments: InputPath
    """`segments.jsonl` of an annotate stage."""
    tasks: dict[str, float] = Field(default={"tts": 1.0})
    """What the samples ask for, and how much of each (weights relative to one another). Known: tts."""
    split: Literal["speaker", "file", "given"] = "given"
    """given: as the transcripts say; speaker, file: a seeded share of the speakers or files is tested."""
    test_share: float = Field(default=0.1, gt=0, lt=1)
    """Of the speakers or files, for the splits of those names."""
    min_seconds: float = Field(default=300.0, ge=0)
    """Of training audio; with less the run ends here."""
    normalize_text: bool = True
    """Write numbers as words."""
    seed: int = 0

    @field_validator("tasks")
    @classmethod
    def _tasks_are_known(cls, tasks: dict[str, float]) -> dict[str, float]:
        for name, weight in tasks.items():
            if name not in TASKS:
                raise ValueError(f"no such task: {name!r}; {nearest(name, TASKS)}")
            if not 0 < weight < float("inf"):
                raise ValueError(f"the weight of {name!r} must be positive, not {weight}")
        if not tasks:
            raise ValueError(f"name at least one task; known: {', '.join(TASKS)}")
        return tasks


class Segment(BaseModel):
    """What compose reads of a row of `segments.jsonl`."""

    model_config = ConfigDict(extra="ignore")

    id: str = Field(min_length=1)
    path: str = Field(min_length=1)
    file: str | None = None
    start_s: float = Field(ge=0)
    end_s: float
    speaker: str = Field(min_length=1)
    text: str
    split: Literal["train", "test"] | None = None

    @property
    def source(self) -> str:
        """The recording that it comes from, by a name that stays when the folder moves."""
        return self.file or self.path

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def run(config: Config, context: Context) -> dict[str, Any]:
    """Write `samples.jsonl` and `set_aside.jsonl`; returns counts and seconds.

    Raises:
        StageError: too little training audio, or nothing to split (exit code 2); `set_aside.jsonl` is there.
    """
    segments, dropped = read_segments(config.segments)
    kept: list[Segment] = []
    for segment in segments:
        text = " ".join((spoken_form(segment.text) if config.normalize_text else segment.text).split())
        if text:
            kept.append(segment.model_copy(update={"text": text}))
        else:
            dropped.append(_set_aside(segment.path, "no text", segment.id))
    _write_set_aside(config.segments, context.folder / "set_aside.jsonl", dropped)
    _refuse_too_little(sum(segment.duration_s for segment in kept), config, "")
    kept = split_segments(kept, config, context)
    samples = [speech_sample(segment) for segment in kept]
    train_s, test_s = (sum(s.duration_s for s in kept if s.split == split) for split in ("train", "test"))
    _refuse_too_little(train_s, config, f", and {test_s:.0f} s are set apart for the test")
    write_samples(context.folder / "samples.jsonl", samples)
    figures: dict[str, Any] = {
        "train_samples": sum(segment.split == "train" for segment in kept),
        "test_samples": sum(segment.split == "test" for segment in kept),
        "train_seconds": round(train_s, 3),
        "test_seconds": round(test_s, 3),
        "speakers": len({segment.speaker for segment in kept}),
        "texts": len({segment.text for segment in kept}),
        "set_aside": len(dropped),
    }
    context.say(
        f"{figures['train_samples']} samples to train on ({train_s / 60:.1f} minutes), "
        f"{figures['test_samples']} to test; {figures['speakers']} speakers, {figures['texts']} texts"
    )
    return figures


def speech_sample(segment: Segment) -> Sample:
    """The chat in which a speaker is asked to say a text, and says it."""
    voice = AudioPart(
        path=segment.path, start_s=segment.start_s, end_s=segment.end_s, speaker=segment.speaker
    )
    return Sample(
        id=segment.id,
        messages=[
            Message(role="system", content=[TextPart(text=SPEAK_PROMPT.format(speaker=segment.speaker))]),
            Message(role="user", content=[TextPart(text=segment.text)]),
            Message(role="assistant", content=[voice]),
        ],
        task="tts",
        metadata={
            "split": segment.split,
            "speaker": segment.speaker,
            "text": segment.text,
            "segment": segment.id,
        },
    )


def read_segments(path: Path) -> tuple[list[Segment], list[dict[str, Any]]]:
    """The usable rows of a `segments.jsonl`, and a set-aside row for each of the others."""
    segments: list[Segment] = []
    bad: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            segment = Segment.model_validate_json(line)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            detail = f"{where}  {'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            bad.append(_set_aside(str(path), "malformed segment", detail))
            continue
        if segment.end_s <= segment.start_s or segment.id in seen:
            detail = "its id was used before" if segment.id in seen else "it ends before it starts"
            bad.append(_set_aside(segment.path, "malformed segment", f"{where}  {detail}"))
            continue
        seen.add(segment.id)
        segments.append(segment)
    return segments, bad


def split_segments(segments: Sequence[Segment], config: Config, context: Context) -> list[Segment]:
    """The segments with `split` set to train or test.

    By speaker or file, a group is tested when the hash of its name and the seed is below `test_share`, so
    that it stays where it is when others are added; at least one group goes to either side.

    Raises:
        StageError: no test segments are given, or there is but one group.
    """
    by = config.split
    if by == "given":
        if any(segment.split == "test" for segment in segments):
            return [s if s.split else s.model_copy(update={"split": "train"}) for s in segments]
        if any(segment.split == "train" for segment in segments):
            raise StageError(
                "compose: the transcripts mark segments as train and none as test",
                "mark some as test, or set compose.split=file",
                exit_code=2,
            )
        context.say("no split is given: testing on a share of the files")
        by = "file"
    groups = [segment.speaker if by == "speaker" else segment.source for segment in segments]
    tested = choose_test(groups, config.test_share, config.seed)
    if not tested:
        raise StageError(
            f"compose: split by {by} needs at least two {by}s, and there is {len(set(groups))}",
            "choose another compose.split, or give more recordings",
            exit_code=2,
        )
    return [
        segment.model_copy(update={"split": "test" if group in tested else "train"})
        for segment, group in zip(segments, groups, strict=True)
    ]


def choose_test(groups: Iterable[str], share: float, seed: int) -> set[str]:
    """The groups whose place (a hash of seed and name, in [0, 1)) is below `share`; never none nor all.

    Returns:
        Their names; empty where there are fewer than two groups.
    """
    place = {name: int(sha256(f"{seed}:{name}".encode()).hexdigest()[:16], 16) / 16**16 for name in groups}
    ordered = sorted(place, key=lambda name: (place[name], name))
    count = sum(value < share for value in place.values())
    return set(ordered[: min(max(count, 1), len(ordered) - 1)])


def _refuse_too_little(seconds: float, config: Config, more: str) -> None:
    needed = config.min_seconds
    if seconds < needed or seconds == 0:
        raise StageError(
            f"compose: too little to train on: {seconds:.0f} s found and {needed:.0f} s needed{more}",
            "give more recordings (set_aside.jsonl says what was left out and why), or lower min_seconds",
            exit_code=2,
        )


def _write_set_aside(segments: Path, target: Path, dropped: Sequence[dict[str, Any]]) -> None:
    upstream = segments.parent / "set_aside.jsonl"
    write_jsonl(target, [*(read_jsonl(upstream) if upstream.is_file() else []), *dropped])


def _set_aside(path: str, reason: str, detail: str) -> dict[str, Any]:
    return {"path": path, "stage": "compose", "reason": reason, "detail": detail}


def plan(config: Config, upstream: Mapping[str, StagePlan]) -> StagePlan:
    """Counts from the annotate stage's plan; the stage itself takes a moment."""
    facts = next((p.facts for p in upstream.values() if "audio_s" in p.facts), {"audio_s": 0.0, "clips": 0.0})
    clips, audio_s = facts["clips"], facts["audio_s"]
    note = (
        f"{audio_s:.0f} s of audio, {config.min_seconds:.0f} s needed" if audio_s < config.min_seconds else ""
    )
    return StagePlan(
        memory_mb=100.0 + 0.005 * clips,
        disk_mb=0.0006 * clips,
        seconds=1.0 + 1e-4 * clips,
        note=note,
        facts={"audio_s": audio_s, "clips": clips, "samples": clips},
    )


STAGE = Stage(
    kind="compose",
    config=Config,
    run=run,
    artifacts={"samples": "samples.jsonl", "set_aside": "set_aside.jsonl"},
    help="make training samples of the segments",
    plan=plan,
)
