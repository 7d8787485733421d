"""Scores of a model: the tables of its run's evaluations, flat, with their conditions and 95 % intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError
from audiollm.files.atomic import DamagedFile, read_json
from audiollm.publish.lineage import ModelOrigin
from audiollm.publish.release_files import without_machine_paths
from audiollm.recipe.runner import StageResult

RESULT_FILES = ("results.json", "scores.json", "figures.json")
_ESTIMATES = ("accuracy", "mean", "rate", "share", "ratio", "value")
"""Keys of tables whose interval is `low` to `high`."""
_BOUNDS = ("low", "high")
_NO_SCORES = frozenset(
    [
        "asked",
        "bandwidth_hz",
        "columns",
        "confusion",
        "durations",
        "examples",
        "judges",
        "lengths",
        "reasons",
        "rows",
    ]
)
"""Branches of results that are facts about the data or the judges."""
_REAL = "real"
_FACTS = ("suite", "judge", "recognizer", "split", "language", "chance", "seed")
"""Entries at the top of results, and settings of the stage, that are conditions of all its scores."""


@dataclass(frozen=True)
class PublishedScore:
    """A figure of an evaluation."""

    suite: str
    name: str
    """The way to it in the results: `generated, classifier: accuracy`."""
    value: float
    low: float | None = None
    """The 95 % interval's ends; None: the evaluation states none."""
    high: float | None = None
    count: int | None = None
    """Cases it is computed of."""
    of_real_recordings: bool = False
    """Whether it is a figure of real recordings, beside which the model's are read."""

    @property
    def metric(self) -> str:
        """Its last word."""
        return self.name.rpartition(": ")[2].replace(" ", "_")

    @property
    def interval(self) -> str:
        """`0.163 to 0.563`; empty where there is none."""
        return "" if self.low is None or self.high is None else f"{self.low:.3f} to {self.high:.3f}"


@dataclass(frozen=True)
class PublishedEvaluation:
    """All scores of one file of results."""

    name: str
    dataset: str
    """The samples that it is of, for people."""
    conditions: str
    scores: tuple[PublishedScore, ...]
    warnings: tuple[str, ...] = ()


def run_evaluations(origin: ModelOrigin) -> tuple[list[PublishedEvaluation], list[tuple[str, str]]]:
    """Read the evaluations of a model in its run.

    Returns:
        The evaluations, and the stages that are left out, each with the reason.
    """
    evaluations: list[PublishedEvaluation] = []
    omitted: list[tuple[str, str]] = []
    if origin.stage_folder is None:
        return evaluations, omitted
    weights_time = max((path.stat().st_mtime for path in origin.folder.glob("*.safetensors")), default=0.0)
    for name, result in origin.stages.items():
        if not result.kind.startswith("evaluate"):
            continue
        folder = origin.stage_folder.parent / name
        if not _judges(result, origin):
            omitted.append((name, "it judges another model"))
        elif (folder / "stage.json").stat().st_mtime < weights_time:
            omitted.append((name, "it is older than the weights: run the recipe again"))
        else:
            evaluations += [
                read_evaluation(path, name, result.settings)
                for path in sorted(folder.rglob("*.json"))
                if path.name in RESULT_FILES and _is_table_of_suite(path, folder)
            ]
    return [evaluation for evaluation in evaluations if evaluation.scores], omitted


def score_folders(folders: Sequence[Path]) -> list[PublishedEvaluation]:
    """Read folders that `audiollm evaluate` wrote.

    Raises:
        ConfigError: one has no results.
    """
    evaluations = []
    for folder in folders:
        paths = [folder / name for name in RESULT_FILES if (folder / name).is_file()]
        if not paths:
            remedy = "give the folder that `audiollm evaluate ... -o FOLDER` wrote"
            raise ConfigError("no results.json here", str(folder), remedy)
        evaluations += [read_evaluation(path, folder.name, {}) for path in paths]
    return evaluations


def read_evaluation(path: Path, name: str, settings: Mapping[str, Any]) -> PublishedEvaluation:
    """Read a file of results.

    Args:
        name: of the evaluation.
        settings: of its stage, for the conditions; empty: no stage of a run made it.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        results = read_json(path)
    except DamagedFile as error:
        raise ConfigError(error.reason, str(path), "evaluate again") from None
    if not isinstance(results, dict):
        raise ConfigError("no mapping of scores", str(path), "evaluate again")
    facts = without_machine_paths({key: results.get(key, settings.get(key)) for key in _FACTS})
    conditions = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in facts.items()
        if isinstance(value, str | int | float)
    )
    suite = str(results.get("suite") or path.parent.name)
    warnings = tuple(text for text in results.get("warnings", ()) if isinstance(text, str))
    dataset = f"held-out samples of the run, stage {name}" if settings else f"the list of {name}"
    return PublishedEvaluation(name, dataset, conditions, tuple(_scores_in(results, suite, ())), warnings)


def _judges(result: StageResult, origin: ModelOrigin) -> bool:
    """Whether an evaluation is of this model: it names the model, or the stage whose clips it judges does."""
    subject = result.settings.get("model")
    if subject is not None:
        return origin.made(subject)
    audio = Path(str(result.settings.get("audio") or ""))
    generation = origin.stages.get(audio.parent.name)
    return generation is not None and origin.made(generation.settings.get("model"))


def _is_table_of_suite(path: Path, folder: Path) -> bool:
    """Whole tables lie below the folder of a stage that has several suites; its own file is then their summary."""
    return path.parent != folder or not any(folder.glob("*/results.json"))


def _scores_in(table: Mapping[str, Any], suite: str, way: tuple[str, ...]) -> Iterator[PublishedScore]:
    estimate = next((key for key in _ESTIMATES if isinstance(table.get(key), float)), None)
    count = next((table[key] for key in ("n", "questions") if isinstance(table.get(key), int)), None)
    for key, value in table.items():
        if key in _NO_SCORES or key in _BOUNDS or key in _FACTS or key.startswith("by_"):
            continue
        if isinstance(value, dict):
            step = () if key == "sets" else (key.replace("_", " "),)
            yield from _scores_in(value, suite, (*way, *step))
        elif isinstance(value, float):
            name = f"{', '.join(way)}: {key}" if way else key
            low, high = (table.get(bound) for bound in _BOUNDS) if key == estimate else (None, None)
            of_real = _REAL in way or key.startswith(f"{_REAL}_")
            yield PublishedScore(suite, name.replace("_", " "), value, low, high, count, of_real)
