"""The figures of a run as plain data: `summary.json`."""

from __future__ import annotations

from typing import Any

from audiollm.pages.formats import without_home
from audiollm.pages.run_record import Row, RunRecord, plain

SCORES = (
    "judge",
    "real_accuracy",
    "generated_accuracy",
    "relative_accuracy",
    "pocketsphinx_real_accuracy",
    "pocketsphinx_generated_accuracy",
    "pocketsphinx_relative",
    "speaker_real_accuracy",
    "speaker_generated_accuracy",
    "speaker_relative",
    "n_real",
    "n_generated",
)
SECTIONS = {
    "annotate": "annotate",
    "compose": "compose",
    "tokenizer": "train_tokenizer",
    "tokenize": "tokenize",
    "train": "train",
    "train_preference": "train_preference",
    "train_reward": "train_reward",
    "train_policy": "train_policy",
    "train_interpreter": "train_interpreter",
    "evaluate_interpreter": "evaluate_interpreter",
    "generate": "generate",
    "evaluate": "evaluate",
    "evaluate_listening": "evaluate_listening",
    "train_flow": "train_flow",
    "generate_sound": "generate_sound",
    "edit_sounds": "edit_sounds",
    "evaluate_sound": "evaluate_sound",
}


def summarize_run(run: RunRecord, seconds: dict[str, float], memory_mb: dict[str, float]) -> dict[str, Any]:
    """The figures of a run for programs, with sorted keys.

    A section holds what its stage returned, None where that is not done. In a recipe with several stages of the kind
    it holds that by the name of the stage; and the scores at the top are then None, for there is not one of each.

    Args:
        seconds, memory_mb: by stage; apart from these the result depends on the run's content alone.
    """
    recipe, failed = run.recipe, run.failed
    evaluated = run.stages("evaluate")
    scores = (evaluated[0].figures or {}) if len(evaluated) == 1 else {}
    summary: dict[str, Any] = {key: scores.get(key) for key in SCORES}
    summary |= {key: _collect_kind_figures(run, kind) for key, kind in SECTIONS.items()}
    summary |= {
        "name": recipe.name,
        "size": recipe.size,
        "seed": recipe.seed,
        "hub_models": sorted({name for result in run.results.values() for name in result.hub_models}),
        "warnings": _warnings_of(run),
        "failed": {"stage": failed.name, "message": without_home(failed.error)} if failed else None,
        "seconds": {**_round_values(seconds), "total": round(sum(seconds.values()), 1)},
        "memory_mb": _round_values(memory_mb),
        "peak_memory_mb": round(max(memory_mb.values(), default=0.0), 1),
    }
    ordered = plain(summary)
    assert isinstance(ordered, dict)
    return ordered


def seconds_and_memory(
    run: RunRecord, report_name: str, report_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and peak memory in MB by stage; those of the stage `report` itself are measured up to now."""
    import psutil

    seconds = {name: result.seconds for name, result in run.results.items()}
    memory_mb = {name: result.peak_memory_mb for name, result in run.results.items()}
    seconds[report_name] = report_s
    memory_mb[report_name] = psutil.Process().memory_info().rss / 2**20
    return seconds, memory_mb


def _warnings_of(run: RunRecord) -> list[Row]:
    """The warnings of all stages: a model that is worse than its start, a training that was stopped."""
    return [
        {"stage": name, "text": str(text)}
        for name, result in run.results.items()
        for text in (result.figures or {}).get("warnings") or ()
    ]


def _collect_kind_figures(run: RunRecord, kind: str) -> dict[str, Any] | None:
    """The figures of the only stage of a kind, or of each stage by its name."""
    stages = run.stages(kind)
    if len(stages) > 1:
        return {stage.name: stage.figures for stage in stages}
    return stages[0].figures if stages else None


def _round_values(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}
