"""The questions about clips with their sound as shards, which `train` reads; each shard is written by a worker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from audiollm.data.records.sample import Message, Sample, TextPart
from audiollm.data.records.shard_index import index_shards
from audiollm.files.atomic import write_json
from pipelines.steps.results import Row

SHARDS_FOLDER = "shards"


class SoundShard(NamedTuple):
    """A shard to be written.

    Args:
        folder: of all shards.
        samples_per_shard: of all shards but the last one.
        first: number of the first sample among those of all shards.
    """

    folder: Path
    samples_per_shard: int
    first: int
    samples: Sequence[Sample]


def plan_sound_shards(
    folder: Path, questions: Sequence[Sample], clips: Sequence[Row], samples_per_shard: int
) -> list[SoundShard]:
    """Plan the shards of questions about clips. Those of an earlier run are removed where their samples or sounds
    were others.

    Args:
        folder: of the run.
    """
    shards_folder = folder / SHARDS_FOLDER
    note = shards_folder / "made_of.json"
    digest_of = {clip["id"]: clip["digest"] for clip in clips}
    made_of = {
        "samples_per_shard": samples_per_shard,
        "samples": [sample.model_dump(mode="json") for sample in questions],
        "digests": [digest_of[sample.metadata["clip"]] for sample in questions],
    }
    if not note.exists() or json.loads(note.read_text(encoding="utf-8")) != made_of:
        shutil.rmtree(shards_folder, ignore_errors=True)
        write_json(note, made_of)
    return [
        SoundShard(
            shards_folder, samples_per_shard, first, tuple(questions[first : first + samples_per_shard])
        )
        for first in range(0, len(questions), samples_per_shard)
    ]


def write_sound_shard(shard: SoundShard) -> dict[str, Any]:
    """Write a shard, or find that it is there already; returns the number of its samples that were written."""
    from audiollm.audio import AudioError, encode_bytes, load
    from audiollm.data.records.shards import ShardWriter

    writer = ShardWriter(shard.folder, shard.samples_per_shard)
    if writer.has(shard.first):
        return {"samples": 0}
    count = 0
    for number, sample in enumerate(shard.samples, start=shard.first):
        (audio_part,) = sample.audio("user")
        try:
            sound = load(audio_part.path, audio_part.start_s, audio_part.end_s)
        except AudioError:  # it was read before: a file that went away meanwhile is missed by whoever trains
            continue
        flac = encode_bytes(sound.samples_CN, sound.sample_rate, "flac")
        writer.write(number, _heard_alone(sample), [], {"0.flac": flac})
        count += 1
    writer.flush()
    return {"samples": count}


def index_sound_shards(folder: Path) -> int:
    """Write the index of a run's shards; returns the number of their samples."""
    return index_shards(folder / SHARDS_FOLDER, {}).counts.get("samples", 0)


def _heard_alone(sample: Sample) -> Sample:
    """The question about a clip with its sound as a member of the shard, and without its pictures."""
    user, assistant = sample.messages
    (sound,) = sample.audio("user")
    words = [content_part for content_part in user.content if isinstance(content_part, TextPart)]
    member = sound.model_copy(update={"path": "0.flac", "start_s": 0.0, "end_s": None})
    question = Message(role="user", content=[member, *words])
    return sample.model_copy(update={"messages": [question, assistant]})
