"""The stage `compose_scenes`: scenes for sound models, from any folder of labelled short sounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.errors import StageError
from audiollm.files.set_aside import set_aside_row
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from pipelines.scenes.settings import ComposeScenesConfig

SECONDS_PER_SCENE_SECOND = 0.06
"""CPU-seconds of a second of a scene at the default size."""
_BYTES_PER_SCENE_SECOND = 150_000


def run_compose_scenes(config: ComposeScenesConfig, context: Context) -> dict[str, Any]:
    """Write `scenes.jsonl` and the files of the scenes; scenes that an earlier attempt finished are kept.

    Raises:
        ConfigError: the settings fit no recordings.
        StageError: no scene could be made.
    """
    from audiollm.audio.discovery import AudioError
    from audiollm.data.records.sample import Sample, write_samples
    from audiollm.files.atomic import atomic_path, write_jsonl
    from pipelines.scenes.making import make_scene
    from pipelines.scenes.plans import plan_scene
    from pipelines.scenes.sounds import by_label, find_sounds, make_sounds

    sources = config.events, config.backdrops
    if not config.events:
        sources = make_sounds(context.folder / "made", config.sample_rate, config.seed)
    tests = config.held_out_scenes > 0
    events = find_sounds(sources[0], "events", tests)
    backdrops = find_sounds(sources[1], "backdrops", tests)
    labels = sorted({sound.label for sound in events + backdrops})
    looks = {label: number for number, label in enumerate(labels)}
    scene_numbers = [(False, number) for number in range(config.scenes)]
    scene_numbers += [(True, number) for number in range(config.held_out_scenes)]
    samples: list[Sample] = []
    refused: dict[str, dict[str, Any]] = {}
    groups = {
        held_out: [by_label(s for s in sounds if s.held_out is held_out) for sounds in (events, backdrops)]
        for held_out in (False, True)
    }
    with context.progress("composing scenes", len(scene_numbers)) as bar:
        for held_out, number in scene_numbers:
            plan = plan_scene(config, groups[held_out][0], groups[held_out][1], number, held_out)
            record = context.folder / plan.id / "scene.json"
            try:
                if record.exists():
                    sample = Sample.model_validate_json(record.read_bytes())
                else:
                    sample = make_scene(plan, config, looks, context.folder)
                    with atomic_path(record) as temporary:
                        temporary.write_text(sample.model_dump_json(), encoding="utf-8")
                samples.append(sample)
            except AudioError as error:
                row = set_aside_row("compose_scenes", str(error.path), "unreadable file", error.reason)
                refused[str(error.path)] = row
            bar.advance(bar.task_ids[0])
    write_jsonl(context.folder / "set_aside.jsonl", refused.values())
    if not samples:
        reason = next(iter(refused.values()))["reason"]
        raise StageError("compose_scenes: no scene could be made", f"the first reason: {reason}", 2)
    write_samples(context.folder / "scenes.jsonl", samples)
    events_made = sum(len(sample.metadata["events"]) for sample in samples)
    context.say(f"{len(samples)} scenes with {events_made} events of {len(labels)} labels")
    return {"scenes": len(samples), "events": events_made, "labels": len(labels), "set_aside": len(refused)}


def plan_compose_scenes(config: ComposeScenesConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    scenes = config.scenes + config.held_out_scenes
    seconds = scenes * config.duration_s
    return StagePlan(
        memory_mb=400,
        disk_mb=seconds * _BYTES_PER_SCENE_SECOND / 2**20,
        core_seconds=3 + seconds * SECONDS_PER_SCENE_SECOND,
        note=f"{scenes} scenes of {config.duration_s:g} s",
        facts={"samples": scenes, "seconds": seconds},
    )


STAGE = Stage(
    kind="compose_scenes",
    config=ComposeScenesConfig,
    run=run_compose_scenes,
    artifacts={"samples": "scenes.jsonl", "set_aside": "set_aside.jsonl"},
    help="make scenes of moving objects that sound, from folders of labelled sounds",
    plan=plan_compose_scenes,
)
