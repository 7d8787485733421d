"""The stage `compose_talks`: short segments of a speaker, joined into recordings with aligned translations.

A table of phrases with translations says what can be said. A talk is a row of phrases by one speaker, each word a
segment of its own, with short pauses inside a phrase and longer ones between phrases. It stands for a corpus of aligned
talks where there is none, and shows a model every phrase in many places.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from audiollm.errors import StageError
from audiollm.files.atomic import write_jsonl
from audiollm.files.set_aside import SetAside
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan
from pipelines.review.applied import correction_digests

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines.compose.rows import SegmentRow

RECORDINGS, SEGMENTS, AUDIO = "recordings.jsonl", "segments.jsonl", "audio"
SAMPLE_RATE = 24_000
SPEEDS = 9
"""Speeds of a range: few ratios of rates, whose filters are made once each."""


class ComposeTalksConfig(StageConfig):
    """Settings of `compose_talks`."""

    segments: InputPath
    """`segments.jsonl` of an annotate stage, each segment a word (or whatever a phrase is made of)."""
    phrases: InputPath
    """A table (.csv, .jsonl) with `text`, words of segments separated by spaces, and `target`, its translation."""
    talks: int = Field(400, ge=1)
    """Talks to train on, of segments of the train split."""
    test_talks: int = Field(40, ge=0)
    """Held-out talks, of segments of the test split."""
    phrases_per_talk: tuple[int, int] = (3, 5)
    """Least and largest number of phrases of a talk."""
    pause_s: tuple[float, float] = (0.05, 0.3)
    """Shortest and longest pause between the words of a phrase."""
    gap_s: tuple[float, float] = (0.6, 1.2)
    """Shortest and longest pause between phrases."""
    tail_s: float = Field(1.5, ge=0)
    """Silence after the last phrase, in which it can still be translated."""
    speed: tuple[float, float] = Field((1.0, 1.0), exclude_if=lambda value: value == (1, 1))
    """Slowest and fastest speed at which the words of a talk to train on are played, one of nine for each talk; pitch
    and tempo go together. Few recordings then teach as more voices would. Held-out talks are as recorded."""
    seed: int = 0
    """Seed of the talks."""

    @model_validator(mode="after")
    def _check_ranges(self) -> ComposeTalksConfig:
        for name in ("phrases_per_talk", "pause_s", "gap_s"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} must rise from at least 0, not {low:g} to {high:g}")
        if not 0.5 <= self.speed[0] <= self.speed[1] <= 2:
            raise ValueError(
                f"speed must rise from at least 0.5 to at most 2, not {self.speed[0]:g} to {self.speed[1]:g}"
            )
        if self.phrases_per_talk[0] < 1:
            raise ValueError("phrases_per_talk must begin at 1 or more")
        if self.gap_s[0] <= self.pause_s[1]:
            raise ValueError(
                f"gap_s must begin above the longest pause_s, {self.pause_s[1]:g}: else no pause tells that a phrase "
                "is over"
            )
        return self


class Phrase(BaseModel):
    """A row of the table of phrases."""

    model_config = ConfigDict(extra="allow")

    text: str = Field(min_length=1)
    target: str = Field(min_length=1)

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.text.casefold().split())


@dataclass(frozen=True)
class PlacedWord:
    """A word of a talk: its segment, and where it begins."""

    row: SegmentRow
    start_s: float
    speed: float = 1.0

    @property
    def end_s(self) -> float:
        return self.start_s + self.row.duration_s / self.speed


@dataclass(frozen=True)
class PlannedTalk:
    """A talk before its sound is put together."""

    id: str
    speaker: str
    split: str
    phrases: Sequence[tuple[Phrase, Sequence[PlacedWord]]]
    duration_s: float


def plan_talks(
    rows: Sequence[SegmentRow], phrases: Sequence[Phrase], config: ComposeTalksConfig
) -> list[PlannedTalk]:
    """Draw the talks: a speaker, phrases by their number of words and then by chance, a segment for each word.

    Raises:
        StageError: no speaker of a split has the words of any phrase.
    """
    talks: list[PlannedTalk] = []
    for split, count in (("train", config.talks), ("test", config.test_talks)):
        if not count:
            continue
        takes = _takes_of(rows, split)
        sayable = {speaker: _sayable(phrases, takes_by_word) for speaker, takes_by_word in takes.items()}
        speakers = sorted(speaker for speaker, lengths in sayable.items() if lengths)
        if not speakers:
            raise StageError(
                f"no speaker has the words of a phrase among the segments of the split {split}",
                "write phrases of words that are texts of segments, or set test_talks: 0",
                2,
            )
        for number in range(count):
            rng = random.Random(f"{config.seed}/{split}/{number}")
            speaker = speakers[number % len(speakers)]
            talks.append(
                _draw_talk(
                    f"{split}-{number:05d}", split, speaker, takes[speaker], sayable[speaker], rng, config
                )
            )
    return talks


def _takes_of(rows: Sequence[SegmentRow], split: str) -> dict[str, dict[str, list[SegmentRow]]]:
    """Segments by speaker and word; those without a split are trained on."""
    takes: dict[str, dict[str, list[SegmentRow]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row.id):
        if (row.split or "train") == split and row.kind == "speech" and row.text:
            takes[row.speaker][" ".join(row.text.casefold().split())].append(row)
    return takes


def _sayable(phrases: Sequence[Phrase], takes: Mapping[str, Sequence[SegmentRow]]) -> dict[int, list[Phrase]]:
    """Phrases by their number of words, whose words all have takes."""
    by_length: dict[int, list[Phrase]] = defaultdict(list)
    for phrase in phrases:
        if all(word in takes for word in phrase.words):
            by_length[len(phrase.words)].append(phrase)
    return dict(sorted(by_length.items()))


def _draw_talk(
    id: str,
    split: str,
    speaker: str,
    takes: Mapping[str, Sequence[SegmentRow]],
    sayable: Mapping[int, Sequence[Phrase]],
    rng: random.Random,
    config: ComposeTalksConfig,
) -> PlannedTalk:
    lengths = list(sayable)
    slow, fast = config.speed if split == "train" else (1.0, 1.0)
    speed = slow + (fast - slow) * rng.randrange(SPEEDS) / (SPEEDS - 1) if slow < fast else slow
    now_s = rng.uniform(*config.gap_s)
    placed_phrases: list[tuple[Phrase, list[PlacedWord]]] = []
    for _ in range(rng.randint(*config.phrases_per_talk)):
        phrase = rng.choice(sayable[rng.choice(lengths)])
        words: list[PlacedWord] = []
        for word in phrase.words:
            now_s += rng.uniform(*config.pause_s) if words else 0.0
            words.append(PlacedWord(rng.choice(takes[word]), now_s, speed))
            now_s = words[-1].end_s
        placed_phrases.append((phrase, words))
        now_s += rng.uniform(*config.gap_s)
    return PlannedTalk(id, speaker, split, placed_phrases, placed_phrases[-1][1][-1].end_s + config.tail_s)


def aligned_record(talk: PlannedTalk, phrases: Sequence[Phrase], longest_pause_s: float) -> dict[str, Any]:
    """Return the talk as `compose_streams` takes it.

    A phrase with which a longer one begins is over only when no more word can follow: its segment ends
    `longest_pause_s` after its last word.
    """
    begun = {phrase.words[:count] for phrase in phrases for count in range(1, len(phrase.words))}
    segments = []
    for phrase, words in talk.phrases:
        wait_s = longest_pause_s if phrase.words in begun else 0.0
        end_s = min(words[-1].end_s + wait_s, talk.duration_s)
        times = {"start_s": round(words[0].start_s, 4), "end_s": round(end_s, 4)}
        segments.append({**times, "text": phrase.text, "target": phrase.target, "speaker": talk.speaker})
    return {"id": talk.id, "audio": f"{AUDIO}/{talk.id}.flac", "segments": segments, "split": talk.split}


def talk_samples(talk: PlannedTalk, sounds: Mapping[str, Tensor]) -> Tensor:
    """Return the sound of a talk `[1, N]`.

    Args:
        sounds: samples `[1, N]` of each segment, by its id.
    """
    import torch

    from audiollm.audio import resample

    samples_1N = torch.zeros(1, round(talk.duration_s * SAMPLE_RATE))
    for _, words in talk.phrases:
        for word in words:
            sound_1N = resample(sounds[word.row.id], SAMPLE_RATE, round(SAMPLE_RATE / word.speed))
            first = round(word.start_s * SAMPLE_RATE)
            sound_1N = sound_1N[:, : samples_1N.shape[1] - first]
            samples_1N[:, first : first + sound_1N.shape[1]] += sound_1N
    return samples_1N


def _compose_talks(config: ComposeTalksConfig, context: Context) -> dict[str, Any]:
    from audiollm.audio import AudioError, load, save
    from audiollm.errors import BadSample
    from audiollm.evaluate.report.lists import read_records
    from pipelines.compose.rows import read_segments

    set_aside = SetAside(context.folder / "set_aside.jsonl", "compose_talks")
    rows, bad = read_segments(Path(config.segments))
    set_aside.add(bad)
    phrases = read_records(Path(config.phrases), Phrase)
    sounds: dict[str, Tensor] = {}
    for row in rows:
        try:
            wave = load(row.path, row.start_s, row.end_s, sample_rate=SAMPLE_RATE, mono=True)
        except AudioError as error:
            set_aside.add([BadSample(str(config.segments), row.id, error.reason, "cannot be read")])
        else:
            sounds[row.id] = wave.samples_CN
    talks = plan_talks([row for row in rows if row.id in sounds], phrases, config)
    (context.folder / AUDIO).mkdir(parents=True, exist_ok=True)
    with context.progress("joining talks", len(talks)) as bar:
        for talk in talks:
            save(context.folder / AUDIO / f"{talk.id}.flac", talk_samples(talk, sounds), SAMPLE_RATE)
            bar.advance(bar.task_ids[0])
    write_jsonl(
        context.folder / RECORDINGS, [aligned_record(talk, phrases, config.pause_s[1]) for talk in talks]
    )
    write_jsonl(
        context.folder / SEGMENTS, [row for talk in talks for row in _segment_rows(talk, context.folder)]
    )
    seconds = sum(talk.duration_s for talk in talks)
    num_phrases = sum(len(talk.phrases) for talk in talks)
    context.say(f"{len(talks)} talks of {seconds / 60:.1f} minutes, {num_phrases} phrases")
    return {
        "talks": len(talks),
        "hours": seconds / 3600,
        "phrases": num_phrases,
        "set_aside": len(set_aside.rows),
    }


def _segment_rows(talk: PlannedTalk, folder: Path) -> list[dict[str, Any]]:
    """Rows of the phrases of a talk, as `compose` takes them, with `target` as a column."""
    return [
        {
            "id": f"{talk.id}-{number}",
            "path": str((folder / AUDIO / f"{talk.id}.flac").resolve()),
            "file": f"{talk.id}.flac",
            "start_s": round(words[0].start_s, 4),
            "end_s": round(words[-1].end_s, 4),
            "speaker": talk.speaker,
            "text": phrase.text,
            "target": phrase.target,
            "split": talk.split,
        }
        for number, (phrase, words) in enumerate(talk.phrases)
    ]


def _plan_talk_stage(config: ComposeTalksConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    low, high = config.phrases_per_talk
    talks = config.talks + config.test_talks
    num_phrases = talks * (low + high) / 2
    return StagePlan(
        memory_mb=500,
        disk_mb=talks * 0.3,
        core_seconds=1 + 0.006 * talks,
        note=f"{talks} talks of {low} to {high} phrases",
        facts={"clips": num_phrases, "audio_s": num_phrases},  # about a second of speech each
    )


STAGE = Stage(
    kind="compose_talks",
    config=ComposeTalksConfig,
    run=_compose_talks,
    artifacts={"recordings": RECORDINGS, "segments": SEGMENTS},
    help="join short segments into recordings with aligned translations, for compose_streams",
    plan=_plan_talk_stage,
    facts=lambda config: correction_digests(config.segments),
)
