"""Measured values in words: columns for `compose`, with the edges between low and high.

What people hear in relation to other voices (pitch, rate, energy) is binned by the corpus itself; what is good or bad
in itself (noise, reverberation) by fixed edges: in a clean corpus everything is clear. The edges go into JSON, and a
corpus that comes later can be described by the same ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FiniteFloat, RootModel, ValidationError, model_validator

from audiollm.errors import ConfigError
from audiollm.files.atomic import write_text
from pipelines.steps.results import Row

Method = Literal["percentile", "width", "fixed"]
_SHARES = {
    5: (0.07, 0.27, 0.73, 0.93),
    6: (0.05, 0.2, 0.5, 0.8, 0.95),
    7: (0.04, 0.14, 0.32, 0.68, 0.86, 0.96),
}
"""Number of names -> share of the values below each edge. The extreme bins are small: their words mean rare values."""
_TRIM_SIGMAS = 5.0
_MIN_GROUP = 20
"""Fewest values of a group, such as the male voices, for edges of its own; a smaller group has the edges of all."""


class Column(NamedTuple):
    """Rule by which a measured number becomes a word.

    Args:
        value: the measured number, as `step.name`.
        names: five to seven words, from the lowest to the highest.
        resolution: smallest distance of two edges, in the number's unit, a difference that nobody hears: voices that
                        are all alike all get the middle name.
        edges: for the method `fixed`.
        grouped: relative to the speaker's group, where that is known.
    """

    value: str
    names: tuple[str, ...]
    method: Method = "percentile"
    resolution: float = 0.0
    edges: tuple[float, ...] = ()
    grouped: bool = False


# fmt: off
COLUMNS: dict[str, Column] = {
    "pitch": Column(
        "prosody.pitch_hz",
        ("very low", "low", "rather low", "medium", "rather high", "high", "very high"),
        resolution=8.0, grouped=True,
    ),
    "pitch_variation": Column(
        "prosody.pitch_deviation_semitones",
        ("very monotone", "monotone", "moderately varied", "expressive", "very expressive"), resolution=0.5,
    ),
    "rate": Column(
        "prosody.rate_syllables_s",
        ("very slowly", "slowly", "rather slowly", "at a moderate speed", "rather fast", "fast", "very fast"),
        resolution=0.3,
    ),
    "energy": Column(
        "prosody.energy_db", ("very softly", "softly", "at a moderate level", "loudly", "very loudly"), resolution=2.0,
    ),
    "noise": Column(
        "quality.snr_db",
        ("very noisy", "noisy", "slightly noisy", "fairly clear", "clear", "very clear"),
        "fixed", edges=(3.0, 8.0, 15.0, 25.0, 35.0),
    ),
    "reverberation": Column(
        "quality.c50_db",
        ("very distant", "distant", "slightly distant", "fairly close", "close", "very close"),
        "fixed", edges=(0.0, 6.0, 12.0, 17.0, 22.0),
    ),
}
# fmt: on


class Edges(BaseModel):
    """Names, and the numbers between them: a value on an edge has the higher name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: str = ""
    """The measured number, as `step.name`."""
    names: tuple[str, ...]
    edges: tuple[FiniteFloat, ...]
    groups: dict[str, tuple[FiniteFloat, ...]] = {}
    """Group of speakers -> edges that replace those of all."""
    count: int = 0
    """Number of values that the edges were fitted to; 0: fixed edges."""

    @model_validator(mode="after")
    def _in_order(self) -> Edges:
        for edges in (self.edges, *self.groups.values()):
            if len(edges) != len(self.names) - 1:
                raise ValueError(
                    f"{len(self.names)} names have {len(self.names) - 1} edges, not {len(edges)}"
                )
            if any(low > high for low, high in pairwise(edges)):
                raise ValueError(f"edges must not fall: {list(edges)}")
        return self

    def label(self, value: float | None, group: str | None = None) -> str | None:
        """The name for a value, among its group where that has edges of its own; None for None, NaN and infinity."""
        if value is None or not math.isfinite(value):
            return None
        return self.names[bisect_right(self.groups.get(group or "", self.edges), value)]


class CorpusBins(RootModel[dict[str, Edges]]):
    """The edges of a corpus, by column. `model_dump_json` and `model_validate_json` take them to a file and back."""

    model_config = ConfigDict(frozen=True)

    def labels(self, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Words for a segment's values, by column; values that were not measured are left out.

        Args:
            measured: the segment's values, by step.
        """
        group = speaker_group(measured)
        labels = {
            name: edges.label(_read_measured_number(measured, edges.value), group)
            for name, edges in self.root.items()
        }
        return {name: label for name, label in labels.items() if label is not None}


def fit_bins(
    values: Iterable[float | None], names: Sequence[str], method: Method, resolution: float = 0.0
) -> Edges:
    """Edges for `names` from the values of a corpus.

    Values beyond five (robust) standard deviations from the median are left out. `percentile`: the middle name for the
    middle third or half, the outer ones for a few in a hundred; `width`: names of equal width between what is left.

    Args:
        values: None and what is not finite does not count.
        resolution: edges are at least so far apart.

    Raises:
        ValueError: no values; a method or a number of names that there is no rule for.
    """
    if method not in _METHODS:
        raise ValueError(f"no method {method!r}: choose from {', '.join(_METHODS)}")
    if len(names) not in _SHARES:
        raise ValueError(f"{len(names)} names: give {', '.join(map(str, _SHARES))}")
    numbers = np.sort([value for value in values if value is not None and math.isfinite(value)])
    if len(numbers) == 0:
        raise ValueError("no values to fit edges to: was the number measured at all?")
    trimmed = _trimmed(numbers)
    middle = float(np.median(trimmed))
    places = np.arange(len(names) - 1) - (len(names) - 2) / 2
    away = places * resolution
    distances = _METHODS[method](trimmed, len(names)) - middle
    edges = middle + np.where(places < 0, np.minimum(distances, away), np.maximum(distances, away))
    return Edges(names=tuple(names), edges=tuple(round(float(edge), 3) for edge in edges), count=len(numbers))


def fit_corpus(rows: Iterable[Mapping[str, Mapping[str, Any]]]) -> CorpusBins:
    """The edges of every column of which a number was measured anywhere; the order of the rows does not matter.

    Args:
        rows: the measured values of each segment, by step.
    """
    values: dict[str, list[float]] = {name: [] for name in COLUMNS}
    by_group: dict[str, dict[str, list[float]]] = {name: {} for name in COLUMNS}
    for measured in rows:
        group = speaker_group(measured)
        for name, column in COLUMNS.items():
            if (number := _read_measured_number(measured, column.value)) is not None:
                values[name].append(number)
                if column.grouped and group:
                    by_group[name].setdefault(group, []).append(number)
    return CorpusBins(
        {
            name: _fit_column(COLUMNS[name], numbers, by_group[name])
            for name, numbers in values.items()
            if numbers
        }
    )


def speaker_group(measured: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The group whose voices a pitch is compared with: the gender that the step `attributes` found."""
    gender = (measured.get("attributes") or {}).get("gender") or {}
    label = gender.get("label") if isinstance(gender, Mapping) else None
    return label.lower() if isinstance(label, str) and label else None


# Private


def _fit_column(column: Column, numbers: Sequence[float], by_group: Mapping[str, Sequence[float]]) -> Edges:
    if column.method == "fixed":
        return Edges(value=column.value, names=column.names, edges=column.edges)
    large = {
        group: group_numbers
        for group, group_numbers in sorted(by_group.items())
        if len(group_numbers) >= _MIN_GROUP
    }
    groups = {
        group: fit_bins(group_numbers, column.names, column.method, column.resolution).edges
        for group, group_numbers in large.items()
    }
    everybody = fit_bins(numbers, column.names, column.method, column.resolution)
    return everybody.model_copy(update={"value": column.value, "groups": groups})


def _read_measured_number(measured: Mapping[str, Mapping[str, Any]], place: str) -> float | None:
    step, _, name = place.partition(".")
    value = (measured.get(step) or {}).get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _trimmed(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    middle = np.median(numbers)
    sigma = 1.4826 * np.median(np.abs(numbers - middle))
    return numbers[np.abs(numbers - middle) <= _TRIM_SIGMAS * sigma] if sigma > 0 else numbers


def _percentiles(numbers: NDArray[np.float64], num_names: int) -> NDArray[np.float64]:
    return np.quantile(numbers, _SHARES[num_names])


def _equal_widths(numbers: NDArray[np.float64], num_names: int) -> NDArray[np.float64]:
    return np.linspace(numbers[0], numbers[-1], num_names + 1)[1:-1]


_METHODS: dict[str, Callable[[NDArray[np.float64], int], NDArray[np.float64]]] = {
    "percentile": _percentiles,
    "width": _equal_widths,
}


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
