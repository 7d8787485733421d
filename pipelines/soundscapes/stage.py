"""The stage `compose_soundscapes`: questions about clips whose content is known. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from audiollm.errors import BadSample
from audiollm.files.set_aside import UNREADABLE, SetAside
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from pipelines.review.applied import correction_digests
from pipelines.soundscapes.settings import ComposeSoundscapesConfig

if TYPE_CHECKING:
    from pipelines.soundscapes.mixing import SoundLoader
    from pipelines.soundscapes.planning import PlannedClip
    from pipelines.soundscapes.takes import Take, TakePool

NAME = "compose_soundscapes"
SECONDS_PER_CLIP = 0.06
"""CPU-seconds of a clip of three events."""
MEAN_CLIP_S = 4.0


def run_compose_soundscapes(config: ComposeSoundscapesConfig, context: Context) -> dict[str, Any]:
    """Write `samples.jsonl` and the clips; returns counts.

    Takes that are silent or cannot be read are set aside before anything is mixed, and all clips are planned without
    them, so that answers stay balanced.

    Raises:
        ConfigError: inputs that fit no question, or without held-out recordings.
    """
    from audiollm.data.records.sample import write_samples
    from pipelines.soundscapes.mixing import SoundLoader, write_clip
    from pipelines.soundscapes.takes import find_takes

    (context.folder / "set_aside.jsonl").unlink(missing_ok=True)
    set_aside = SetAside(context.folder / "set_aside.jsonl", NAME)
    sources, bad = find_takes(config)
    set_aside.add(bad)
    loader = SoundLoader(config)
    clips, unusable = _plan_usable_clips(config, sources, loader)
    set_aside.add(BadSample(str(take.path), "", reason, UNREADABLE) for take, reason in unusable.items())
    samples = []
    with context.progress("composing clips", len(clips)) as bar:
        for clip in clips:
            samples.append(write_clip(clip, config, loader, context.folder))
            bar.advance(bar.task_ids[0])
    write_samples(context.folder / "samples.jsonl", samples)
    held_out = sum(sample.is_held_out for sample in samples)
    kinds = sorted({str(sample.metadata["category"]) for sample in samples})
    context.say(
        f"{len(samples) - held_out} clips to train on, {held_out} to test; questions: {', '.join(kinds)}"
    )
    return {"clips": len(samples), "test_clips": held_out, "kinds": kinds, "set_aside": len(set_aside.rows)}


def _plan_usable_clips(
    config: ComposeSoundscapesConfig, sources: TakePool, loader: SoundLoader
) -> tuple[list[PlannedClip], dict[Take, str]]:
    """Plan clips until all of their takes can be used; also returns the takes that cannot."""
    from pipelines.soundscapes.planning import plan_clips, servable_kinds

    unusable: dict[Take, str] = {}
    splits = [False, True] if config.test_clips else [False]
    while True:
        inventories = {is_held_out: sources.inventory(is_held_out, unusable) for is_held_out in splits}
        kinds = servable_kinds(config, list(inventories.values()))
        clips = [
            clip
            for is_held_out, inventory in inventories.items()
            for clip in plan_clips(config, inventory, kinds, is_held_out)
        ]
        failures = loader.unusable(take for clip in clips for take in clip.takes)
        if not failures:
            return clips, unusable
        unusable |= failures


def plan_compose_soundscapes(config: ComposeSoundscapesConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    clips = config.clips + config.test_clips
    seconds = clips * MEAN_CLIP_S
    return StagePlan(
        memory_mb=500,
        disk_mb=seconds * config.sample_rate * 2 / 2**20,
        core_seconds=3 + clips * SECONDS_PER_CLIP,
        note=f"{clips} clips",
        facts={"samples": clips, "clips": clips, "audio_s": seconds},
    )


STAGE = Stage(
    kind=NAME,
    config=ComposeSoundscapesConfig,
    run=run_compose_soundscapes,
    artifacts={"samples": "samples.jsonl"},
    help="make questions about clips that are composed of labelled sounds, music and speech",
    plan=plan_compose_soundscapes,
    facts=lambda config: correction_digests(*config.segments),
)
