"""The stage `compose`: segments to samples (chat messages with audio in them), for training and test.

Test segments are chosen by group, and samples are left out where there are too many of a kind.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from audiollm.data.chat.tasks import TaskTemplate, fill_task, load_tasks
from audiollm.data.records.sample import PHRASES, AudioPart, Sample, TextPart, write_samples
from audiollm.data.records.text_origin import TEXT_RECOGNIZERS, read_text_recognizers
from audiollm.data.text.phrases import PhraseLayout
from audiollm.data.text.pronunciation import check_pronunciation
from audiollm.errors import BadSample, ConfigError, StageError, suggestion
from audiollm.files.atomic import write_jsonl
from audiollm.files.set_aside import read_set_aside, row_of
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan
from pipelines.compose.phrases import with_phrases
from pipelines.compose.rows import Row, SegmentRow, clips, conversations, format_transcript, read_segments
from pipelines.review.applied import correction_digests


class Balance(BaseModel):
    """A limit on the training samples of a task that share a property."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: str = Field("task", min_length=1)
    """Property that is limited: the `speaker`, `file`, `text` or `answer`, a column of the segments (of a list its
    first element), or the `task` alone."""
    most: int | None = Field(None, ge=1)
    """Most samples per group."""
    share: float | None = Field(None, gt=0, le=1)
    """Largest share of a group in the kept samples; where groups are too few for it, all get the same number."""

    @model_validator(mode="after")
    def _says_how_many(self) -> Balance:
        if self.most is None and self.share is None:
            raise ValueError("give `most`, a number, or `share`")
        if self.by == "task" and self.share is not None:
            raise ValueError("the share of a task is its weight in `tasks`")
        return self

    def group(self, row: Row, answer: str) -> str:
        """Return the group that a row is counted in; rows without the column form one group."""
        group_by_property = {
            "task": "",
            "speaker": row.speaker,
            "file": row.file,
            "text": row.words,
            "answer": answer,
        }
        if self.by in group_by_property:
            return group_by_property[self.by]
        value: Any = row.columns.get(self.by)
        if isinstance(value, (list, tuple)):
            value = value[0] if value else ""
        return str(value or "")


def draw_kept_ids(groups: Mapping[str, str], balance: Balance, seed: int) -> set[str]:
    """Draw, by a hash, the ids that are kept: of each group as many as the limits allow.

    Args:
        groups: id -> group.
    """
    sizes = Counter(groups.values())
    limit = max(sizes.values(), default=0)
    if balance.most is not None:
        limit = min(limit, balance.most)
    if balance.share is not None:
        limit = min(limit, _limit_of_share(list(sizes.values()), balance.share))
    members: dict[str, list[str]] = defaultdict(list)
    for id in sorted(groups, key=lambda id: (place(f"{seed}:balance:{id}"), id)):
        members[groups[id]].append(id)
    return {id for group_ids in members.values() for id in group_ids[:limit]}


def connected(segments: Sequence[SegmentRow]) -> list[str]:
    """For each segment the name of its group: those that share a speaker or a file, by any number of steps.

    The speaker of a sound without speech says nothing. A group is named after the first of its files, in order.
    """
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(node: tuple[str, str]) -> tuple[str, str]:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for segment in segments:
        nodes = [("file", segment.source)]
        if segment.kind != "sound":
            nodes.append(("speaker", segment.speaker))
        low, high = sorted((root(nodes[0]), root(nodes[-1])))
        parent[high] = low  # "file" sorts before "speaker", so a root is a file
    return [root(("file", segment.source))[1] for segment in segments]


def choose_test(
    groups: Iterable[str], share: float, seed: int, seconds: Mapping[str, float] | None = None
) -> set[str]:
    """The groups whose place (a hash of seed and name, in [0, 1)) is below `share`; never none nor all.

    Args:
        seconds: of each group; one that holds more than half of all is trained on.

    Returns:
        Their names; empty where there are fewer than two groups.
    """
    half = sum((seconds or {}).values()) / 2
    placed = {
        name: place(f"{seed}:{name}") + (seconds is not None and seconds[name] > half) for name in groups
    }
    ordered = sorted(placed, key=lambda name: (placed[name], name))
    count = sum(value < share for value in placed.values())
    return set(ordered[: min(max(count, 1), len(ordered) - 1)])


def place(text: str) -> float:
    """Hash a text to a number in [0, 1)."""
    return int(sha256(text.encode()).hexdigest()[:16], 16) / 16**16


def _limit_of_share(sizes: Sequence[int], share: float) -> int:
    """The largest number that is at most `share` of what is left when every group is cut to it; 1 at the least."""
    share = max(share, 1 / len(sizes)) if sizes else 1.0
    low, high = 1, max(sizes, default=1)
    while low < high:
        middle = (low + high + 1) // 2
        # the share that the largest group has falls as the limit falls, so it can be searched by halves
        fits = middle <= share * sum(min(size, middle) for size in sizes) + 1e-9
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


WORDS_PER_SECOND = 2.7
"""Words of a second of speech, for plans: AudioCaps' captions and LibriSpeech's sentences by one fast voice."""


class ComposeConfig(StageConfig):
    """Settings of the stage `compose`."""

    segments: InputPath
    """`segments.jsonl` of an annotate stage."""
    tasks_file: InputPath | None = None
    """Tasks of your own, in YAML (`audiollm/data/chat/tasks.yaml` shows how they read)."""
    tasks: dict[str, float] = Field(default={"tts": 1.0})
    """A task's name, or task -> relative weight. The task of the largest weight is made of every segment that has its
    fields; another is made of a share of its segments, its weight over the largest."""
    balance: dict[str, Balance] = Field(default={})
    """Task -> a limit to its training samples of one speaker, file, text, answer or label. Which ones stay is drawn by
    a hash of seed and id."""
    split: Literal["speaker", "file", "group", "given"] = "given"
    """given: as the transcripts say; speaker, file: a seeded share of the speakers or files is tested; group: of what
    hangs together by speakers and files, so that neither is ever on both sides."""
    test_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the speakers, files or groups that is tested, for the splits of those names."""
    min_seconds: float = Field(default=300.0, ge=0)
    """Least training audio; with less the run ends here."""
    phrase_words: int | None = Field(None, ge=1, exclude_if=lambda value: value is None)
    """Most words of a phrase: speech is laid out phrase by phrase, each as its words and its codes, in the place of all
    codes behind all words. Needs the step `alignment` of annotate; what has no word times is set aside. None: no
    phrases."""
    pronunciation: str | None = Field(None, exclude_if=lambda value: value is None)
    """The words of a phrase are given as phonemes, by the rules of `espeak:LANGUAGE` (as in espeak:en-us) or `hibari`
    (American English); the model then reads every text so. None: as they are written."""
    normalize_text: bool = True
    """Write numbers as words of the segment's language, and sounds such as [laugh] as Higgs's tags."""
    seed: int = 0
    """Seed of phrasings, splits and limits."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _one_task_by_its_name(cls, tasks: Any) -> Any:
        return {tasks: 1.0} if isinstance(tasks, str) else tasks

    @field_validator("tasks")
    @classmethod
    def _tasks_are_known(cls, tasks: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        known_tasks = load_tasks(info.data.get("tasks_file"))
        for name, weight in tasks.items():
            if name not in known_tasks:
                raise ValueError(f"no such task: {name!r}; {suggestion(name, known_tasks)}")
            if not 0 < weight < float("inf"):
                raise ValueError(f"the weight of {name!r} must be positive, not {weight}")
        if not tasks:
            raise ValueError(f"name at least one task; known: {', '.join(known_tasks)}")
        return tasks

    @field_validator("pronunciation")
    @classmethod
    def _phrases_are_pronounced(cls, pronunciation: str | None, info: ValidationInfo) -> str | None:
        if pronunciation is not None:
            if info.data.get("phrase_words") is None:
                raise ValueError("phonemes are those of phrases: set phrase_words, too")
            try:
                check_pronunciation(pronunciation)
            except ConfigError as error:
                raise ValueError(f"{error.message}: {error.remedy}") from None
        return pronunciation

    @field_validator("balance")
    @classmethod
    def _balance_is_of_the_tasks(
        cls, balance: dict[str, Balance], info: ValidationInfo
    ) -> dict[str, Balance]:
        tasks = info.data.get("tasks", balance)
        for name in balance:
            if name not in tasks:
                raise ValueError(f"{name!r} is not a task of this stage; {suggestion(name, tasks)}")
        return balance

    @property
    def phrase_layout(self) -> PhraseLayout | None:
        """How speech is laid out phrase by phrase; None: it is not."""
        return None if self.phrase_words is None else PhraseLayout(self.phrase_words, self.pronunciation)

    @property
    def shares(self) -> dict[str, float]:
        """Task -> the share of its segments that is made a sample of."""
        return {name: weight / max(self.tasks.values()) for name, weight in self.tasks.items()}


def run_compose(config: ComposeConfig, context: Context) -> dict[str, Any]:
    """Write `samples.jsonl` and `set_aside.jsonl`; returns counts and seconds.

    Raises:
        StageError: too little training audio, nothing to split, or a task without a sample (exit code 2);
            `set_aside.jsonl` is there.
    """
    task_by_name = load_tasks(config.tasks_file)
    tasks = [task_by_name[name] for name in config.tasks]
    segments, dropped = read_segments(config.segments)
    usable: list[SegmentRow] = []
    for segment in segments:
        text = format_transcript(segment.text, config.normalize_text, segment.language)
        if text or any("text" not in task.required for task in tasks):
            usable.append(segment.model_copy(update={"text": text}))
        else:
            dropped.append(_without_text(segment))
    listing = context.folder / "set_aside.jsonl"
    _write_set_aside(config.segments, listing, dropped)
    _refuse_too_little(sum(segment.duration_s for segment in usable), config, "")
    refused = Counter(
        segment.text_refused.kind for segment in usable if segment.text_refused and not segment.text
    )
    usable = split_segments(usable, config, context)
    train_s, test_s = (sum(s.duration_s for s in usable if s.split == split) for split in ("train", "test"))
    _refuse_too_little(train_s, config, f", and {test_s:.0f} s are set apart for the test")
    samples, lacking, bad = make_samples(usable, tasks, config)
    dropped += bad
    _write_set_aside(config.segments, listing, dropped)
    write_samples(context.folder / "samples.jsonl", samples)
    figures: dict[str, Any] = {
        "train_samples": sum(sample.metadata["split"] == "train" for sample in samples),
        "test_samples": sum(sample.metadata["split"] == "test" for sample in samples),
        "train_seconds": round(train_s, 3),
        "test_seconds": round(test_s, 3),
        "speakers": len({segment.speaker for segment in usable if segment.kind == "speech"}),
        "texts": len({segment.text for segment in usable if segment.text}),
        "set_aside": len(dropped),
        "tasks": {task.name: sum(sample.task == task.name for sample in samples) for task in tasks},
        "lacking_fields": lacking,
        "text_refused": dict(sorted(refused.items())),
    }
    context.say(
        f"{figures['train_samples']} samples to train on, from {train_s / 60:.1f} minutes of recordings; "
        f"{figures['test_samples']} to test; {figures['speakers']} speakers, {figures['texts']} texts"
    )
    if len(tasks) > 1:
        context.say(", ".join(f"{name} {count}" for name, count in figures["tasks"].items()))
    if refused:
        reasons = ", ".join(f"{count} {reason}" for reason, count in figures["text_refused"].items())
        context.say(f"not in tasks of text, because their recognized text was refused: {reasons}")
    for name, count in lacking.items():
        context.say(f"{name}: {count} lack one of its fields")
    return figures


def make_samples(
    segments: Sequence[SegmentRow], tasks: Sequence[TaskTemplate], config: ComposeConfig
) -> tuple[list[Sample], dict[str, int], list[BadSample]]:
    """All samples, task after task; how many rows lack a task's fields; what can be made no sample of.

    The first task's samples bear the ids of the segments (a conversation that of its first); those of the
    others end in the task's name.

    Raises:
        StageError: no segment has a task's fields.
    """
    row_makers = {"segment": clips, "conversation": conversations}
    samples: list[Sample] = []
    lacking: dict[str, int] = {}
    bad: list[BadSample] = []
    used_ids: set[str] = set()
    for number, task in enumerate(tasks):
        usable = 0
        drawn_samples: list[tuple[Row, Sample]] = []
        rows = row_makers[task.over](segments, config.seed)
        for row in rows:
            name = row.id if number == 0 else f"{row.id}.{task.name}"
            try:
                fields = row.fields_for(task)
                if task.lacks(set(fields)):
                    lacking[task.name] = lacking.get(task.name, 0) + 1
                    continue
                if name in used_ids:
                    raise ValueError(f"the id {name!r} is taken")
                sample = fill_task(task, name, fields, config.seed, _sample_columns(row))
                sample.metadata.update(_reply_language(sample, row))
                if config.phrase_layout is not None:
                    sample = with_phrases(sample, row, config.phrase_layout)
            except ValueError as error:
                bad.append(BadSample(str(config.segments), row.segment, str(error), "malformed field"))
                continue
            used_ids.add(name)
            usable += 1
            if place(f"{config.seed}:{task.name}:{row.id}") < config.shares[task.name]:
                drawn_samples.append((row, sample))
        if not usable:
            raise _no_sample(task, rows, bad)
        samples += _balanced(drawn_samples, config.balance.get(task.name), config.seed)
    return samples, lacking, bad


def _balanced(
    drawn_samples: Sequence[tuple[Row, Sample]], balance: Balance | None, seed: int
) -> list[Sample]:
    """The samples within the limits; those of the test are all there."""
    if balance is None:
        return [sample for _, sample in drawn_samples]
    groups = {
        sample.id: balance.group(row, " ".join(sample.texts("assistant")))
        for row, sample in drawn_samples
        if row.split == "train"
    }
    stays = draw_kept_ids(groups, balance, seed)
    return [sample for row, sample in drawn_samples if row.split != "train" or sample.id in stays]


def _no_sample(task: TaskTemplate, rows: Sequence[Row], bad: Sequence[BadSample]) -> StageError:
    reason = f"there is no {task.over}"
    for row in rows[:1]:
        needed = sorted(task.lacks(row.names))
        malformed = bad[-1].reason if bad else "no field is as it must be"
        reason = f"{row.id} and all others lack {', '.join(needed)}" if needed else malformed
    return StageError(
        f"compose: no sample of the task {task.name}: {reason}",
        "give the segments these columns, or take the task out of compose.tasks",
        exit_code=2,
    )


def _sample_columns(row: Row) -> dict[str, Any]:
    columns = {"split": row.split, "speaker": row.speaker, "text": row.words, "segment": row.segment}
    recognizers = read_text_recognizers(row.columns)
    return columns | ({TEXT_RECOGNIZERS: recognizers} if recognizers else {})


def _reply_language(sample: Sample, row: Row) -> dict[str, str]:
    """The segment's language, where the reply is its speech or holds its text."""
    language = row.columns.get("language")
    reply = sample.messages[-1].content
    holds_text = bool(row.words) and any(isinstance(p, TextPart) and row.words in p.text for p in reply)
    is_in_it = holds_text or any(isinstance(reply_part, AudioPart) for reply_part in reply)
    return {"language": language} if isinstance(language, str) and language and is_in_it else {}


def split_segments(
    segments: Sequence[SegmentRow], config: ComposeConfig, context: Context
) -> list[SegmentRow]:
    """The segments with `split` set to train or test.

    By speaker, file or what hangs together, a group is tested when the hash of its name and the seed is below
    `test_share`, so that it stays where it is when others are added; at least one group goes to either side.

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
    if by == "group":
        groups = connected(segments)
    else:
        groups = [segment.speaker if by == "speaker" else segment.source for segment in segments]
    seconds: defaultdict[str, float] = defaultdict(float)
    for group, segment in zip(groups, segments, strict=True):
        seconds[group] += segment.duration_s
    tested = choose_test(groups, config.test_share, config.seed, seconds if by == "group" else None)
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


def _refuse_too_short(config: ComposeConfig, plans: Mapping[str, StagePlan]) -> None:
    """
    Raises:
        ConfigError: all recordings that an annotate stage would read are shorter than `min_seconds`.
    """
    for plan in plans.values():
        seconds = plan.facts.get("most_audio_s", math.inf)
        if seconds < config.min_seconds:
            raise ConfigError(
                f"too little to train on: the recordings last {seconds:.0f} s in all, and compose needs "
                f"{config.min_seconds:.0f} s",
                "compose.min_seconds",
                "give more recordings, or lower it",
            )


def _refuse_too_little(seconds: float, config: ComposeConfig, more: str) -> None:
    needed = config.min_seconds
    if seconds < needed or seconds == 0:
        raise StageError(
            f"compose: too little to train on: {seconds:.0f} s found and {needed:.0f} s needed{more}",
            "give more recordings (set_aside.jsonl says what was left out and why), or lower min_seconds",
            exit_code=2,
        )


def _without_text(segment: SegmentRow) -> BadSample:
    """Why it is in no sample; a refused text is counted by the reason."""
    refused = segment.text_refused
    if refused is None:
        return BadSample(segment.path, segment.id, "no text")
    kind = f"no text: {refused.kind}"
    reason = f"{kind}: {refused.reason}" if refused.reason else kind
    return BadSample(segment.path, segment.id, reason, kind)


def _write_set_aside(segments: Path, target: Path, dropped: Sequence[BadSample]) -> None:
    """Write the samples that the annotation set aside, then those of this stage."""
    upstream = read_set_aside(segments.parent / "set_aside.jsonl")
    write_jsonl(target, [*upstream, *(row_of(bad, "compose") for bad in dropped)])


def plan_compose(config: ComposeConfig, upstream: Mapping[str, StagePlan]) -> StagePlan:
    """Counts from the plan of the stage that makes the segments, or of segments that are there; the stage itself takes
    a moment."""
    plans_with_audio = [plan for plan in upstream.values() if "audio_s" in plan.facts]
    makers = [plan for plan in plans_with_audio if Path(config.segments) in plan.artifacts.values()]
    if not makers and Path(config.segments).is_file():
        segments, _ = read_segments(Path(config.segments))
        facts: Mapping[str, float] = {
            "audio_s": sum(segment.duration_s for segment in segments),
            "clips": float(len(segments)),
        }
    else:
        facts = next((plan.facts for plan in [*makers, *plans_with_audio]), {"audio_s": 0.0, "clips": 0.0})
    recordings, audio_s = facts["clips"], facts["audio_s"]
    samples = recordings * sum(config.shares.values())
    note = (
        f"{audio_s:.0f} s of audio, {config.min_seconds:.0f} s needed" if audio_s < config.min_seconds else ""
    )
    share = sum(config.shares.values())
    phrases = 0.0 if config.phrase_words is None else WORDS_PER_SECOND * audio_s * share / config.phrase_words
    return StagePlan(
        memory_mb=100.0 + 0.005 * samples,
        disk_mb=0.0006 * samples,
        core_seconds=1.0 + 1e-4 * samples,
        note=note,
        # each sample's audio is encoded for itself
        facts={"audio_s": audio_s * share, "clips": samples, "samples": samples, PHRASES: phrases},
    )


STAGE = Stage(
    kind="compose",
    config=ComposeConfig,
    run=run_compose,
    artifacts={"samples": "samples.jsonl", "set_aside": "set_aside.jsonl"},
    help="make training samples of the segments",
    plan=plan_compose,
    refuse=_refuse_too_short,
    facts=lambda config: correction_digests(config.segments),
)
