"""The stage `encode_features`: recordings as a frozen audio encoder hears them, computed once. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan, planned_fact, required
from audiollm.supervised.features.settings import EncodeFeaturesConfig


def _run(config: EncodeFeaturesConfig, context: Context) -> dict[str, Any]:
    from audiollm.supervised.features.encoding import encode_features

    return encode_features(config, context)


def _plan_encode_features(config: EncodeFeaturesConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    from audiollm.families.audio_encoders import published_encoder
    from audiollm.families.model_sizes import ASSUMED_CLIP_S, ENCODED
    from audiollm.supervised.features.encoding import count_clip_flops

    source = Path(config.samples)
    samples, seconds = (planned_fact(plans, source, name) for name in ("clips", "audio_s"))
    seconds = seconds or samples * ASSUMED_CLIP_S
    folder = required(config.audio_encoder.path)
    if not folder.exists():
        return StagePlan(facts={ENCODED: samples}, note=f"unknown until {folder} is there")
    encoder = published_encoder(config.audio_encoder)
    values = 2 if config.dtype == "float16" else 4
    views = 1 + config.views
    rows = seconds * encoder.features.rows_per_second
    clip_s = seconds / samples if samples else ASSUMED_CLIP_S
    chunk_s = planned_fact(plans, source, "chunk_s")
    windows = (
        (1 + clip_s / chunk_s) / 2 if chunk_s else 1.0
    )  # of streams, which are heard in windows that grow
    return StagePlan(
        memory_mb=1000,
        disk_mb=views * rows * encoder.row_width * values / 2**20,
        flops=windows * views * samples * count_clip_flops(encoder, clip_s),
        facts={"samples": samples, "clips": samples, "audio_s": seconds, ENCODED: samples},
        note=f"{samples:.0f} samples, {views} views" if samples else "",
    )


STAGE = Stage(
    kind="encode_features",
    config=EncodeFeaturesConfig,
    run=_run,
    artifacts={"shards": "shards"},
    help="what a frozen audio encoder makes of recordings, computed once, for trainings that leave it as it is",
    plan=_plan_encode_features,
)
