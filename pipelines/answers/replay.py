"""The stage `replay_samples`: fresh samples, and a share of those of earlier rounds (replay).

A model that is trained further in every round on fresh samples alone forgets the earlier ones (DeepSeekMath, arXiv
2402.03300, algorithm 1: a tenth of the data that the reward model is trained on is historical).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from audiollm.errors import BadSample, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan

if TYPE_CHECKING:
    from audiollm.data.records.sample import Sample
    from audiollm.files.set_aside import SetAside

REPLAYED = "replayed"
"""Key in the metadata of samples of earlier rounds, and the end of their ids."""


class ReplayConfig(StageConfig):
    """Settings of `replay_samples`."""

    fresh: InputPath
    """A .jsonl of the samples of this round; all of them are taken."""
    earlier: InputPath
    """A .jsonl of the samples of earlier rounds: in the first round those that the rounds begin with, then the artifact
    `seen` of the round before."""
    share: float = Field(0.1, ge=0, lt=1)
    """Share of earlier samples among those that are trained on, as far as there are as many; each is drawn once at
    most."""
    seed: int = 0
    """Another one draws others: give `${round}`."""
    strict: bool = False
    """Stop at the first bad sample; otherwise it is set aside, counted and left out."""


def run_replay_samples(config: ReplayConfig, context: Context) -> dict[str, Any]:
    """Write `samples.jsonl`, what is trained on in this round, and `seen.jsonl`, what later rounds draw from.

    Held-out samples (metadata `split: test`) are fresh ones alone, and are not drawn later.

    Raises:
        StageError: no fresh sample, or a bad sample where `strict` is set.
    """
    from audiollm.data.records.sample import write_samples
    from audiollm.files.set_aside import SetAside

    set_aside = SetAside(context.folder / "set_aside.jsonl", "replay_samples", strict=config.strict)
    try:
        fresh = _read_replayed_samples(config.fresh, set_aside)
        earlier = [
            sample for sample in _read_replayed_samples(config.earlier, set_aside) if _is_trained(sample)
        ]
    except BadSample as error:
        raise StageError(str(error), "mend or remove it, or leave `strict` out to set it aside", 2) from error
    trained = [sample for sample in fresh if _is_trained(sample)]
    if not trained:
        raise StageError(f"{config.fresh} has no sample of the train split", "see set_aside.jsonl", 2)
    replayed = draw_replayed(earlier, len(trained), config.share, config.seed)
    write_samples(context.folder / "samples.jsonl", [*fresh, *map(_marked, replayed)])
    write_samples(context.folder / "seen.jsonl", [*earlier, *with_own_ids(trained, earlier)])
    return {
        "fresh": len(trained),
        "replayed": len(replayed),
        "held_out": len(fresh) - len(trained),
        "seen": len(earlier) + len(trained),
        "set_aside": len(set_aside.rows),
    }


def draw_replayed(earlier: list[Sample], fresh: int, share: float, seed: int) -> list[Sample]:
    """Draw so many earlier samples, each once, that they are the given share beside `fresh` others; in their order."""
    count = min(len(earlier), round(fresh * share / (1 - share)))
    drawn_places = random.Random(seed).sample(range(len(earlier)), count)
    return [earlier[place] for place in sorted(drawn_places)]


def with_own_ids(samples: Sequence[Sample], used_samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with `~2`, `~3`, ... behind ids that are taken: rounds answer the same prompts."""
    ids = {sample.id for sample in used_samples}
    renamed = []
    for sample in samples:
        new_id, number = sample.id, 1
        while new_id in ids:
            number += 1
            new_id = f"{sample.id}~{number}"
        ids.add(new_id)
        renamed.append(sample.model_copy(update={"id": new_id}))
    return renamed


def _read_replayed_samples(path: Any, set_aside: SetAside) -> list[Sample]:
    from audiollm.data.records.manifest import read_samples

    samples, bad = read_samples(path)
    set_aside.add(bad)
    return samples


def _is_trained(sample: Sample) -> bool:
    return not sample.is_held_out


def _marked(sample: Sample) -> Sample:
    marked = {"id": f"{sample.id}~{REPLAYED}", "metadata": {**sample.metadata, REPLAYED: True}}
    return sample.model_copy(update=marked)


def _plan_replay(config: ReplayConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    note = f"{config.share:.0%} of earlier rounds"
    return StagePlan(memory_mb=300, disk_mb=5, core_seconds=3.0, note=note)


STAGE = Stage(
    kind="replay_samples",
    config=ReplayConfig,
    run=run_replay_samples,
    artifacts={"samples": "samples.jsonl", "seen": "seen.jsonl"},
    help="mix fresh samples with a share of those of earlier rounds",
    plan=_plan_replay,
)
