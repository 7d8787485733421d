"""What a run left behind, as the report reads it: results by kind, JSON files, text fit to be shown.

Reading never fails: a stage may have been killed or have failed anywhere, and the report is then wanted most.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audiollm.recipe import Recipe
from audiollm.runner import StageResult

Row = dict[str, Any]
_HOMES = re.compile(r"/(?:home|Users)/[^/\s'\":,;()]+")


@dataclass(frozen=True)
class Material:
    """A run: its recipe and what is known of the stages that have run or failed."""

    recipe: Recipe
    results: Mapping[str, StageResult]

    def result(self, kind: str) -> StageResult | None:
        """The last stage of that kind that is done, else the last that was tried; None: none was."""
        tried = [result for result in self.results.values() if result.kind == kind]
        done = [result for result in tried if result.state == "done"]
        return next(reversed(done or tried), None)

    @property
    def failed(self) -> StageResult | None:
        """The stage that ended the run, if one did."""
        return next((result for result in self.results.values() if result.state == "failed"), None)

    def figures(self, kind: str) -> Row | None:
        """What the stage of that kind returned; None where it is not done."""
        result = self.result(kind)
        return result.figures if result is not None and result.state == "done" else None

    def why_absent(self, kind: str) -> str:
        """One line on why there is nothing of that kind; empty where it is done."""
        result = self.result(kind)
        if result is not None:
            return "" if result.state == "done" else f"The stage {result.name} failed."
        names = [stage.name for stage in self.recipe.stages if stage.stage.kind == kind]
        return f"The stage {names[-1]} has not run." if names else f"This recipe has no stage {kind}."

    def folder(self, kind: str) -> Path:
        """The folder of the stage of that kind, which must have been tried."""
        result = self.result(kind)
        assert result is not None
        return self.recipe.folder / result.name

    def rows(self, kind: str, file: str) -> list[Row]:
        """The rows of a JSONL file of that stage; lines that are cut short are left out.

        Of a stage that was not tried in this run there are none: its folder may be that of an earlier one.
        """
        if self.result(kind) is None:
            return []
        try:
            text = (self.folder(kind) / file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        rows = []
        for line in text.split("\n"):
            try:
                row = json.loads(line) if line.strip() else None
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows

    def json(self, kind: str, file: str) -> Any:
        """The content of a JSON file of that stage, or None; see `rows`."""
        if self.result(kind) is None:
            return None
        try:
            return json.loads((self.folder(kind) / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def shown(self, text: object) -> str:
        """Text for a page that others may read: paths inside the run are relative, home folders are `~`."""
        return without_home(str(text).removeprefix(f"{self.recipe.folder}/"))


def without_home(text: str) -> str:
    """`text` with the home folders of people written as `~`."""
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(re.escape(home) + r"(?=[/\s'\":,;()]|$)", "~", text)
    return _HOMES.sub("~", text)


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
    left = list(range(len(rows)))
    chosen: list[int] = []
    while left and len(chosen) < count:
        best = min(left, key=lambda i: sum(counter[v] for counter, v in zip(used, values[i], strict=True)))
        left.remove(best)
        chosen.append(best)
        for counter, value in zip(used, values[best], strict=True):
            counter[value] += 1
    return chosen
