"""Figures of stages: which of them a sweep improves, and their values in a finished or a running trial."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError, StageError, suggestion
from audiollm.files.atomic import read_whole_lines
from audiollm.recipe.runner import read_result
from audiollm.recipe.stages import Recipe

METRICS = "metrics.jsonl"
LARGER = ":max"
"""Ending of an evaluation's name of which larger values are better."""


@dataclass(frozen=True)
class Figure:
    """A figure of a stage that is to fall, or to rise.

    Args:
        name: a figure of `stage.json`, groups parted by dots (`accuracy.value`); or a column of `metrics.jsonl`.
    """

    stage: str
    name: str
    is_larger_better: bool = False

    def __str__(self) -> str:
        return f"{self.stage}.{self.name}"

    @property
    def sign(self) -> int:
        """What a value is multiplied with so that smaller ones are better."""
        return -1 if self.is_larger_better else 1


def parse_figure(text: str, option: str, is_larger_better: bool = False) -> Figure:
    """Read `STAGE.NAME`.

    Raises:
        ConfigError: it is something else.
    """
    stage, _, name = text.partition(".")
    if not stage or not name:
        raise ConfigError(f"{text!r} is not STAGE.NAME", option, "example: train.evaluation/loss")
    return Figure(stage, name, is_larger_better)


def parse_evaluation(text: str, option: str) -> Figure:
    """Read `STAGE.NAME` of which smaller values are better, or `STAGE.NAME:max`.

    Raises:
        ConfigError: it is something else.
    """
    return parse_figure(text.removesuffix(LARGER), option, text.endswith(LARGER))


def require_stage(figure: Figure, recipe: Recipe) -> None:
    """
    Raises:
        ConfigError: the recipe has no stage of the figure.
    """
    names = [stage.name for stage in recipe.stages]
    if figure.stage not in names:
        problem = f"{figure}: this recipe has no stage {figure.stage!r}"
        raise ConfigError(problem, "command line", suggestion(figure.stage, names))


def read_figure(figure: Figure, folder: Path) -> float:
    """The figure of a finished stage: of its `stage.json`, else the last of its `metrics.jsonl`.

    Args:
        folder: the stage's.

    Returns:
        NaN where the stage has the figure and no value of it.

    Raises:
        StageError: the stage has no such figure, with the nearest that it has.
    """
    result = read_result(folder)
    figures = dict(scalar_figures(result.figures)) if result else {}
    if figure.name in figures:
        return figures[figure.name]
    if result and _is_without_value(result.figures, figure.name):
        return math.nan
    if rows := evaluations(figure, folder):
        return rows[-1][1]
    names = {*figures, *_column_names(folder)}
    problem = f"{figure}: the stage {figure.stage} has no such figure"
    raise StageError(problem, suggestion(figure.name, names), exit_code=2)


def evaluations(figure: Figure, folder: Path) -> list[tuple[int, float]]:
    """Step and value of each row of a stage's `metrics.jsonl` that has the figure; a row that is being written waits.

    Args:
        folder: the stage's.
    """
    path = folder / METRICS
    if not path.is_file():
        return []
    rows = [row for row in read_whole_lines(path).rows if _is_real(row.get(figure.name))]
    return [(int(row.get("step", place)), float(row[figure.name])) for place, row in enumerate(rows)]


def scalar_figures(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers among a stage's figures, those of groups with the group's name and a dot before their own."""
    for key, value in figures.items():
        if isinstance(value, Mapping):
            yield from scalar_figures(value, f"{prefix}{key}.")
        elif _is_real(value):
            yield f"{prefix}{key}", float(value)


def are_finite(values: Mapping[str, float]) -> bool:
    """Whether all of these figures are numbers by which trials can be compared."""
    return all(math.isfinite(value) for value in values.values())


def _is_without_value(figures: Mapping[str, Any], name: str) -> bool:
    """Whether the stage has the figure without a value: nothing could be counted."""
    if name in figures:
        return figures[name] is None
    group, _, inner = name.partition(".")
    return isinstance(figures.get(group), Mapping) and _is_without_value(figures[group], inner)


def _column_names(folder: Path) -> set[str]:
    path = folder / METRICS
    rows = read_whole_lines(path).rows if path.is_file() else []
    return {key for row in rows for key, value in row.items() if key != "step" and _is_real(value)}


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
