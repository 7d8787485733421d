"""Measured values in words: columns for `compose`, with the edges between low and high."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from audiollm.errors import ConfigError
from audiollm.files.atomic import write_text
from pipelines.annotate.output.bins import CorpusBins, fit_corpus
from pipelines.steps.spool import Row

MIN_TAG_SCORE = 0.1
"""Smallest score of a tag that describes a segment."""
_DESCRIBED = ("scene", "speakers", "content")
_ATTRIBUTES = ("age", "gender", "emotion")


@dataclass(frozen=True)
class ColumnMaker:
    """The columns of a row: description, attributes, sound events, and numbers as words."""

    bins: CorpusBins

    def __call__(self, row: Row) -> dict[str, Any]:
        measured = row["measured"]
        columns: dict[str, Any] = {}
        described = measured.get("description") or {}
        if (described.get("gate") or {}).get("accepted"):
            columns |= {name: described[name] for name in _DESCRIBED if described.get(name)}
        attributes = measured.get("attributes") or {}
        columns |= {name: attributes[name]["label"] for name in _ATTRIBUTES if attributes.get(name)}
        tags = (measured.get("events") or {}).get("tags", ())
        event_labels = [tag["label"] for tag in tags if tag["score"] >= MIN_TAG_SCORE]
        if event_labels:
            columns["events"] = event_labels
        return columns | (self.bins.labels(measured) if row["kind"] == "speech" else {})

    def save(self, path: Path) -> None:
        """Write the edges, for use by another corpus."""
        write_text(path, self.bins.model_dump_json(indent=2) + "\n")


def make_columns(edges: Path | None, rows: Iterable[Row]) -> ColumnMaker:
    """Make the columns with the edges of an earlier run, or with edges fitted to these rows.

    Raises:
        ConfigError: `edges` holds none.
    """
    if edges is None:
        return ColumnMaker(fit_corpus(row["measured"] for row in rows if row["kind"] == "speech"))
    try:
        return ColumnMaker(CorpusBins.model_validate_json(edges.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(
            f"annotate.bins: {edges} holds no edges: {error}", "", "give bins.json of an earlier run"
        ) from None
