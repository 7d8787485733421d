"""Parts of your own, for the recipes beside this file. Change them, rename them, add to them.

A recipe names a function or a stage as `my_parts:NAME` and finds it where `audiollm run` is started. The digest of
this file belongs to the stages that name it: what you change here runs again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import write_samples
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer


class ShortTextsConfig(StageConfig):
    samples: InputPath
    """`samples.jsonl` of `compose`."""
    most_words: int = 12
    """Samples with longer texts are left out."""


def run_short_texts(config: ShortTextsConfig, context: Context) -> dict[str, Any]:
    """Keep the samples whose texts are short. What is returned stands in the report."""
    samples, _ = read_samples(Path(config.samples))
    short = [sample for sample in samples if len(" ".join(sample.texts("user")).split()) <= config.most_words]
    write_samples(context.folder / "samples.jsonl", short)
    context.say(f"{len(short)} of {len(samples)} samples have at most {config.most_words} words")
    return {"samples": len(short), "left_out": len(samples) - len(short)}


short_texts = Stage(
    kind="short_texts",
    config=ShortTextsConfig,
    run=run_short_texts,
    artifacts={"samples": "samples.jsonl"},
    help="keep the samples with short texts",
)
"""In a recipe, behind `compose`: `- my_parts:short_texts: {samples: "${compose.samples}"}`; what follows reads
`${short_texts.samples}`."""


def concise(batch: RewardBatch) -> list[float]:
    """A reward: 1 for an empty answer, a half for five words or for two seconds of speech, and less the longer it is.

    In `train_policy`: `rewards: {accuracy: 1.0, my_parts:concise: 0.2}`.
    """
    return [_shortness(answer) for answer in batch]


def _shortness(answer: SampledAnswer) -> float:
    if answer.recording is not None:
        return 2 / (2 + answer.recording.duration_s)
    return 5 / (5 + len(answer.text.split()))
