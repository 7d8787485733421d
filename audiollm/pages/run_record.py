"""The results of a run, as the report reads them: stages by kind, their files, text fit to be shown.

Reading never fails: a stage may have been killed or have failed anywhere, and the report is then wanted most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.files.atomic import DamagedFile, line_numbers, read_json, read_whole_lines
from audiollm.pages.formats import without_home
from audiollm.recipe.runner import StageResult
from audiollm.recipe.stages import Recipe

Row = dict[str, Any]


@dataclass(frozen=True)
class StageRecord:
    """One stage: its result, if it ran, and the files in its folder.

    Of a stage that was not tried in this run nothing is read: its folder may be that of an earlier one.
    """

    name: str
    kind: str
    folder: Path
    upstream: tuple[str, ...]
    """Names of the stages whose results this stage reads."""
    result: StageResult | None
    damage: dict[Path, str] = field(default_factory=dict)
    """Problems by file, for the log; all stages of a run share it."""

    @property
    def figures(self) -> Row | None:
        """The result of the stage; None where it has not finished."""
        return self.result.figures if self.result is not None and self.result.state == "done" else None

    @property
    def absent(self) -> str:
        """One line on why the stage has no result; empty where it is done."""
        if self.result is None:
            return f"The stage {self.name} has not run."
        return "" if self.result.state == "done" else f"The stage {self.name} failed."

    def rows(self, file: str) -> list[Row]:
        """The rows of a JSONL file; broken lines are left out."""
        path = self.folder / file
        if self.result is None or not path.is_file():
            return []
        try:
            contents = read_whole_lines(path)
        except OSError as error:
            self.damage[path] = f"cannot be read ({error.strerror})"
            return []
        if contents.broken:
            self.damage[path] = f"{line_numbers(contents.broken)} broken and left out"
        return contents.rows

    def json(self, file: str) -> Any:
        """The content of a JSON file, or None."""
        path = self.folder / file
        if self.result is None or not path.is_file():
            return None
        try:
            return read_json(path)
        except DamagedFile as error:
            self.damage[path] = f"{error.reason}: it is left out"
        except OSError as error:
            self.damage[path] = f"cannot be read ({error.strerror})"
        return None


@dataclass(frozen=True)
class RunRecord:
    """A run: its recipe and what is known of the stages that have run or failed."""

    recipe: Recipe
    results: Mapping[str, StageResult]
    damage: dict[Path, str] = field(default_factory=dict)
    """Damaged files that were read, and their problems."""

    def stages(self, *kinds: str) -> list[StageRecord]:
        """All stages of these kinds, in the order of the recipe."""
        return [
            StageRecord(
                stage.name,
                stage.stage.kind,
                stage.folder,
                stage.upstream,
                self.results.get(stage.name),
                self.damage,
            )
            for stage in self.recipe.stages
            if stage.stage.kind in kinds
        ]

    def last(self, kind: str) -> StageRecord | None:
        """The last finished stage of a kind, else the last that was tried, else the last; None if there is none."""
        stages = self.stages(kind)
        tried = [stage for stage in stages if stage.result is not None]
        done = [stage for stage in tried if stage.figures is not None]
        return next(reversed(done or tried or stages), None)

    def has(self, *kinds: str) -> bool:
        """Whether the recipe has a stage of one of these kinds."""
        return bool(self.stages(*kinds))

    @property
    def failed(self) -> StageResult | None:
        """The stage that ended the run, if one did."""
        return next((result for result in self.results.values() if result.state == "failed"), None)

    def shorten_paths(self, text: object) -> str:
        """Text for a page that others may read: paths inside the run are relative, home folders are `~`."""
        return without_home(str(text).removeprefix(f"{self.recipe.folder}/"))


def plain(value: Any) -> Any:
    """`value` as strict JSON with its keys in order: NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def pick_evenly(
    rows: Sequence[Row], count: int, keys: Sequence[str], already: Sequence[Row] = ()
) -> list[int]:
    """Indices of `count` rows in which the values of each key occur as evenly as can be; the first on a tie.

    Args:
        already: rows chosen before, which count as well.
    """
    used = [Counter(str(row.get(key)) for row in already) for key in keys]
    values = [[str(row.get(key)) for key in keys] for row in rows]
    remaining = list(range(len(rows)))
    selected: list[int] = []
    while remaining and len(selected) < count:
        best = min(
            remaining, key=lambda i: sum(counter[v] for counter, v in zip(used, values[i], strict=True))
        )
        remaining.remove(best)
        selected.append(best)
        for counter, value in zip(used, values[best], strict=True):
            counter[value] += 1
    return selected
