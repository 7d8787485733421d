"""Numbers to words: shares by hand, properties, and edges that come back from their file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipelines.annotate.output.columns import COLUMNS, CorpusBins, Edges, Method, fit_bins, fit_corpus

FIVE = ("a", "b", "c", "d", "e")
NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def test_the_middle_name_is_for_the_middle_values() -> None:
    """1,000 evenly spread values: the shares are those of the rule, 7, 20, 46, 20 and 7 %."""
    edges = fit_bins(np.arange(1000.0), FIVE, "percentile")
    labels = [edges.label(value) for value in range(1000)]
    assert [labels.count(name) / 1000 for name in FIVE] == pytest.approx(
        [0.07, 0.2, 0.46, 0.2, 0.07], abs=0.002
    )


def test_equal_widths_after_trimming() -> None:
    """One value a thousand times off is left out: the rest, 0 to 100, is cut at 20, 40, 60 and 80."""
    edges = fit_bins([*np.arange(101.0), 1e5], FIVE, "width")
    assert edges.edges == pytest.approx((20, 40, 60, 80))
    assert edges.label(1e5) == "e"


@given(NUMBERS, st.sampled_from(["percentile", "width"]), st.floats(0, 10))
def test_names_rise_with_the_value(values: list[float], method: Method, resolution: float) -> None:
    edges = fit_bins(values, FIVE, method, resolution)
    places = [FIVE.index(str(edges.label(value))) for value in sorted(values)]
    assert places == sorted(places)
    assert fit_bins(values[::-1], FIVE, method, resolution) == edges


@given(NUMBERS)
def test_edges_come_back_from_their_file(values: list[float]) -> None:
    edges = fit_bins(values, FIVE, "percentile")
    assert Edges.model_validate_json(edges.model_dump_json()) == edges


@pytest.mark.parametrize("value", [-20.0, 0.0, 123.4])
@pytest.mark.parametrize("size", [1, 2, 500])
def test_voices_that_are_all_alike_are_in_the_middle(value: float, size: int) -> None:
    edges = fit_bins([value] * size, FIVE, "percentile", resolution=0.5)
    assert {edges.label(value + step) for step in (-0.2, 0.0, 0.2)} == {"c"}
    assert edges.label(value + 0.6) == "d"
    assert edges.label(value - 0.6) == "b"


def test_what_is_no_number_has_no_name() -> None:
    edges = fit_bins([None, 1.0, float("nan"), 2.0], FIVE, "percentile")
    assert edges.count == 2
    assert [edges.label(value) for value in (None, float("nan"), float("inf"))] == [None, None, None]


@pytest.mark.parametrize(
    ("values", "names", "method", "message"),
    [
        ([], FIVE, "percentile", "no values"),
        ([1.0], FIVE[:3], "width", "3 names"),
        ([1.0], FIVE, "mean", "no method"),
    ],
)
def test_errors_say_what_to_do(
    values: list[float], names: tuple[str, ...], method: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_bins(values, names, method)


@pytest.mark.parametrize("edges", ["[1, 2, 3]", "[1, 2, 3, 2]", "[1, 2, 3, NaN]"])
def test_a_damaged_file_is_refused(edges: str) -> None:
    with pytest.raises(ValidationError):
        Edges.model_validate_json(f'{{"names": ["a", "b", "c", "d", "e"], "edges": {edges}}}')


def test_every_column_has_names_from_low_to_high() -> None:
    for column in COLUMNS.values():
        assert 5 <= len(column.names) == len(set(column.names)) <= 7
        assert (column.method == "fixed") == bool(column.edges)


def _row(pitch_hz: float, gender: str | None, **quality: float) -> dict[str, Any]:
    attributes = {"gender": {"label": gender, "score": 0.9}} if gender else {}
    return {"prosody": {"pitch_hz": pitch_hz}, "attributes": attributes, "quality": quality}


def test_pitch_is_relative_to_the_group() -> None:
    """150 Hz is high for these men, low for these women, and in the middle of all."""
    dice = np.random.default_rng(0)
    rows = [_row(float(dice.normal(110, 12)), "male") for _ in range(200)]
    rows += [_row(float(dice.normal(210, 20)), "female") for _ in range(200)]
    bins = fit_corpus(rows)
    assert bins.labels(_row(150, "male"))["pitch"] == "very high"
    assert bins.labels(_row(150, "Female"))["pitch"] == "very low"
    assert bins.labels(_row(150, None))["pitch"] == "medium"
    assert bins == fit_corpus(reversed(rows)) == CorpusBins.model_validate_json(bins.model_dump_json())


def test_a_small_group_is_described_by_the_edges_of_all() -> None:
    rows = [_row(float(hz), "male") for hz in range(100, 200)] + [_row(300.0, "child")] * 5
    bins = fit_corpus(rows)
    assert set(bins.root["pitch"].groups) == {"male"}
    assert bins.labels(_row(300, "child"))["pitch"] == "very high"


def test_a_clean_corpus_is_clear_and_not_moderate() -> None:
    """A signal 47.8 dB above the noise is very clear, whatever the other recordings are like."""
    rows = [_row(120, None, snr_db=snr_db, c50_db=30.0) for snr_db in np.linspace(47, 60, 50)]
    labels = fit_corpus(rows).labels(_row(120, None, snr_db=47.8, c50_db=-3.0))
    assert (labels["noise"], labels["reverberation"]) == ("very clear", "very distant")


def test_what_was_not_measured_has_no_column() -> None:
    bins = fit_corpus([_row(120, None), {"prosody": {"pitch_hz": None}}])
    assert set(bins.root) == {"pitch"}
    assert bins.labels({}) == {}
    assert fit_corpus([]).root == {}
