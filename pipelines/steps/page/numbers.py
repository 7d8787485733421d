"""Measured numbers of all segments: tallied in one pass at constant memory, drawn with the thresholds of the rules."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from markupsafe import Markup

from audiollm.pages.blocks import (
    bold,
    details,
    element,
    file_label,
    heading,
    join,
    label_bars,
    note,
    notice,
    small,
)  # fmt: skip
from audiollm.pages.formats import percent_or_dash
from audiollm.pages.histogram import draw_histogram
from audiollm.pages.page import Section
from pipelines.steps.page.folder import Row, finite_number, measured, named

MAX_HELD_VALUES = 20_000
"""Values held of one number; of more values, every second, fourth, ... is held."""
MAX_NUMBERS = 60
_MAX_LABELS = 40
_MAX_DEPTH = 3
_MAX_NUMBER = 1e12
"""Numbers beyond it are taken for accidents and left out: they would flatten a histogram."""
FATE_OTHER, FATE_KEPT, FATE_DROPPED = 0, 1, 2
"""The fate of a segment: dropped for another reason, kept, or dropped by a rule on this number."""
TITLES = {
    "duration_s": "duration",
    "quality.dnsmos.ovr": "DNSMOS overall",
    "quality.dnsmos.sig": "DNSMOS speech",
    "quality.dnsmos.bak": "DNSMOS background",
    "quality.snr_db": "signal to noise",
    "quality.bandwidth_hz": "bandwidth",
    "quality.rt60_s": "reverberation time",
    "quality.c50_db": "clarity C50",
    "quality.utmos": "UTMOS",
    "prosody.pitch_hz": "pitch",
    "prosody.pitch_deviation_semitones": "pitch, deviation",
    "prosody.rate_syllables_s": "speaking rate",
    "prosody.energy_db": "energy",
    "signal.level_dbfs": "level",
    "signal.peak_dbfs": "peak",
    "signal.loudness_lufs": "loudness",
    "signal.clipped_share": "clipped samples",
    "consensus.vote_share": "vote share of a word",
    "consensus.pairwise_wer": "word errors between recognizers",
    "language.language": "language",
    "language.probability": "probability of the language",
}
"""Titles of the numbers that are shown with or without a rule, in this order."""
_UNITS = {
    "_syllables_s": "syllables/s", "_words_s": "words/s", "_semitones": "semitones", "_dbfs": "dBFS",
    "_lufs": "LUFS", "_db": "dB", "_hz": "Hz", "_per_s": "/s", "_s": "s",
}  # fmt: skip
_SIGNS = {">=": "≥", "<=": "≤", "==": "=", "!=": "≠", "in": "one of", "not in": "none of"}
_SHORT_UNIT = 8


@dataclass(frozen=True)
class Comparison:
    """A comparison that a segment must satisfy: `value op threshold`."""

    name: str
    step: str
    value: str
    op: str
    threshold: Any
    title: str
    unit: str
    sounds: bool = True
    """Whether the rule applies to segments without speech, too."""
    of_text: bool = False
    """Whether the rule refuses a recognized text and keeps the segment."""

    def broken_by(self, value: Any) -> bool | None:
        """Whether a measured value breaks the rule; None where the two cannot be compared."""
        limit = self.threshold
        try:
            match self.op:
                case ">=":
                    return not value >= limit
                case ">":
                    return not value > limit
                case "<=":
                    return (
                        not value <= limit + 1e-6
                    )  # as the rules compare: a duration cut to the limit keeps to it
                case "<":
                    return not value < limit
                case "==":
                    return bool(value != limit)
                case "!=":
                    return bool(value == limit)
                case "is":
                    return bool(value) and bool(limit)
                case "in":
                    return value not in limit
                case "not in":
                    return value in limit
        except TypeError:
            return None
        return None

    @property
    def demand(self) -> str:
        """The demand of the rule: `≥ 3 dB`."""
        if self.op == "is":
            return "none" if self.threshold else "anything"
        return f"{_SIGNS.get(self.op, self.op)} {format_value(self.threshold, self.unit)}"


def read_rules(rows: Sequence[Row]) -> list[Comparison]:
    """The rules of `rules.json`; a row without a value or an operator is left out."""
    return [
        Comparison(
            named(row.get("rule") or row["value"]),
            named(row.get("step") or ""),
            row["value"].removeprefix("segment."),
            row["op"],
            row.get("threshold"),
            named(row.get("title") or ""),
            named(row.get("unit") or "").strip() or unit_of(row["value"]),
            row.get("sounds") is not False,
            row.get("of_text") is True,
        )
        for row in rows
        if isinstance(row.get("value"), str) and isinstance(row.get("op"), str)
    ]


@dataclass
class Numbers:
    """One measured value over all segments."""

    path: str
    rules: Sequence[Comparison] = ()
    count: int = 0
    total: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")
    beyond: list[int] = field(init=False)
    """Segments that break each rule, whichever rule dropped them."""
    applicable: list[int] = field(init=False)
    """Segments that each rule applies to: sounds without speech may be exempt."""
    labels: Counter[str] = field(default_factory=Counter)
    """Counts of a value that is a word, not a number."""
    _values: array[float] = field(default_factory=lambda: array("d"))
    _fates: bytearray = field(default_factory=bytearray)
    _stride: int = 1

    def __post_init__(self) -> None:
        self.beyond, self.applicable = [0] * len(self.rules), [0] * len(self.rules)

    def add(self, value: Any, fate: int, is_sound: bool = False) -> None:
        """Add one segment's value, the segment's fate, and whether it is without speech."""
        for place, rule in enumerate(self.rules):
            if rule.sounds or not is_sound:
                self.applicable[place] += 1
                self.beyond[place] += bool(rule.broken_by(value))
        figure = finite_number(value)
        self.count += 1
        if figure is None or abs(figure) > _MAX_NUMBER:
            label = named(value, 60)
            if label in self.labels or len(self.labels) < _MAX_LABELS:
                self.labels[label] += 1
            return
        self.total, self.low, self.high = self.total + figure, min(self.low, figure), max(self.high, figure)
        if (self.count - 1) % self._stride == 0:
            self._values.append(figure)
            self._fates.append(fate)
            if len(self._values) > MAX_HELD_VALUES:
                self._values, self._fates, self._stride = (
                    self._values[::2],
                    self._fates[::2],
                    2 * self._stride,
                )

    def chart(self) -> Markup:
        """A histogram or counts of words, with the effect of the rules."""
        title, unit = title_of(self.path), unit_of(self.path)
        if self.rules and len(self.rules[0].unit) <= _SHORT_UNIT:
            unit = self.rules[0].unit or unit
        limits = [
            limit for limit in (finite_number(rule.threshold) for rule in self.rules) if limit is not None
        ]
        count = len(self._values)
        drawn = draw_histogram(self._values, self._fates, limits, f"histogram of {title}") if count else None
        about = f"n = {self.count:,}" + (f" (drawn from {count:,})" if self._stride > 1 else "")
        if count:
            about += f", median {format_value(median(self._values), unit)}"
            about += f", {format_value(self.low)} to {format_value(self.high, unit)}"
        labels = [
            (name or "nothing", n, 100 * n / self.count, self._out(name))
            for name, n in self.labels.most_common(12)
        ]
        return element(
            "figure",
            element("figcaption", title, [" ", small(unit)] if unit else None),
            drawn,
            label_bars(labels),
            map(self._effect, self.rules, self.beyond, self.applicable),
            note(about),
            class_="card",
        )

    def _effect(self, rule: Comparison, beyond: int, applicable: int) -> Markup:
        """How many segments a rule drops, or would drop."""
        share = None
        if applicable:
            share = [", ", element("b", percent_or_dash(beyond / applicable), class_="whole")]
        free = None if rule.sounds else "; sounds without speech are free of it"
        return note("asked for ", bold(rule.demand), f": {beyond:,} of {applicable:,} beyond it", share, free)

    def _out(self, label: str) -> bool:
        return any(rule.broken_by(label) for rule in self.rules)


class NumberTally:
    """All measured numbers by their path below `measured`: those of the rules, those of `TITLES`, then any other."""

    def __init__(self, rules: Sequence[Comparison]) -> None:
        self._rules: dict[str, list[Comparison]] = {}
        for rule in rules:
            self._rules.setdefault(rule.value, []).append(rule)
        self._ordered_paths = list(dict.fromkeys([*self._rules, *TITLES]))
        self._numbers: dict[str, Numbers] = {}

    def add(self, row: Row, dropped_by: str | None) -> None:
        """Add the numbers of one segment; `dropped_by` is the rule that dropped it, None if it is kept."""
        is_sound = row.get("kind") == "sound"
        for path in self._ordered_paths:
            value = measured(row, path)
            if finite_number(value) is not None or (value is not None and path in self._rules):
                self._put(path, value, dropped_by, is_sound)
        for path, value in _leaves(row.get("measured"), "", _MAX_DEPTH):
            if path not in self._rules and path not in TITLES:
                self._put(path, value, dropped_by, is_sound)

    def _put(self, path: str, value: Any, dropped_by: str | None, is_sound: bool) -> None:
        numbers = self._numbers.get(path)
        if numbers is None:
            if len(self._numbers) >= MAX_NUMBERS and path not in self._rules and path not in TITLES:
                return
            numbers = self._numbers[path] = Numbers(path, self._rules.get(path, ()))
        if dropped_by is None:
            numbers.add(value, FATE_KEPT, is_sound)
        else:
            ours = any(rule.name == dropped_by for rule in numbers.rules)
            numbers.add(value, FATE_DROPPED if ours else FATE_OTHER, is_sound)

    def get(self, path: str) -> Numbers | None:
        return self._numbers.get(path)

    def ruled(self) -> list[Numbers]:
        """The numbers that a rule compares, in the order of the rules."""
        return [self._numbers[path] for path in self._rules if path in self._numbers]

    def titled(self) -> list[Numbers]:
        """The numbers of `TITLES` without a rule."""
        return [self._numbers[path] for path in TITLES if path in self._numbers and path not in self._rules]

    def untitled(self) -> list[Numbers]:
        """All other measured numbers, by name."""
        paths = sorted(path for path in self._numbers if path not in self._rules and path not in TITLES)
        return [self._numbers[path] for path in paths]

    def never_measured(self) -> list[Comparison]:
        """Rules whose value no segment has."""
        return [rule for path, rules in self._rules.items() if path not in self._numbers for rule in rules]


def numbers_section(tally: NumberTally, unit: str, never: Iterable[Comparison] = ()) -> Section:
    """Histograms of all measured numbers with the thresholds of the rules.

    Args:
        unit: what a bar counts.
        never: rules whose value no row has.
    """
    known, others = tally.titled(), tally.untitled()
    if not (tally.ruled() or known or others):
        return Section(
            "numbers", "Measures", notice(f"No {unit} has a measured number."), "What was measured"
        )
    names = {
        "": "kept",
        "dropped": "dropped by this rule",
        "other": "dropped for another reason",
        "line": "threshold",
    }
    legend = [element("span", element("i", class_=style), name) for style, name in names.items()]
    about = f"A bar is a number of {unit}s. What was dropped is not measured any further."
    content = join(
        element("p", legend, element("span", about), class_="legend"),
        [heading("Compared with a threshold"), histograms(tally.ruled())] if tally.ruled() else None,
        [
            notice(f"{rule.title or rule.name}: no row has ", file_label(named(rule.value)), " to be drawn.")
            for rule in never
        ],
        [heading("Without a threshold"), histograms(known)] if known else None,
        details(f"All other measured numbers ({len(others)})", histograms(others)) if others else None,
    )
    return Section("numbers", "Measures", content, "What was measured")


def histograms(listed: Iterable[Numbers]) -> Markup:
    """Numbers side by side."""
    return element("div", [numbers.chart() for numbers in listed], class_="charts histograms")


def title_of(path: str) -> str:
    """A value's name for people."""
    if path in TITLES:
        return TITLES[path]
    step, _, value = path.partition(".")
    unit = next((ending for ending in _UNITS if path.endswith(ending)), "")
    value = (value or step).removesuffix(unit).replace("_", " ").replace(".", " ")
    return named(f"{step}: {value}" if "." in path else value, 60)


def unit_of(path: str) -> str:
    """A value's unit by how its name ends."""
    return next((unit for ending, unit in _UNITS.items() if path.endswith(ending)), "")


def format_value(value: Any, unit: str = "") -> str:
    """A value of any kind as a short text."""
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif (figure := finite_number(value)) is not None:
        figure += 0.0  # no minus before a zero
        text = (
            f"{figure:,.0f}"
            if abs(figure) >= 1000
            else f"{figure:.4g}"
            if figure == round(figure)
            else f"{figure:.3g}"
        )
    elif isinstance(value, (list, tuple, set)):
        text = ", ".join(format_value(item) for item in list(value)[:12]) + (", …" if len(value) > 12 else "")
    elif value is None:
        return "–"
    else:
        text = named(value if isinstance(value, str) else str(value), 120)
    return f"{text} {unit}".strip()


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings; lists (spans, embeddings) are skipped."""
    if isinstance(value, Mapping):
        for key, inner in value.items() if depth else ():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key), depth - 1)
    elif path and (figure := finite_number(value)) is not None:
        yield path, figure
