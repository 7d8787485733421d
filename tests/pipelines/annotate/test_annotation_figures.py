"""The figures of an annotation's report: counted right, whatever the rows hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jiwer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.files.atomic import write_jsonl
from audiollm.pages.histogram import draw_histogram
from pipelines.annotate.report.agreement import agreement_section, compare_recognizers, marked
from pipelines.annotate.report.survey import survey_annotation
from pipelines.steps.page.folder import Folder, measured, named
from pipelines.steps.page.funnel import headline_figures
from pipelines.steps.page.numbers import MAX_HELD_VALUES, Comparison, Numbers, read_rules
from pipelines.steps.page.survey import RowSample
from tests.pipelines.annotate.annotation_report_run import (
    many_rows,
    rules_json,
    segment,
)
from tests.pipelines.report.report_run import Page, tree


def test_shares_beyond_a_threshold_are_counted_over_all_rows(tmp_path: Path) -> None:
    many_rows(tmp_path, 1_000)
    tally = survey_annotation(Folder(tmp_path), read_rules(rules_json())).numbers
    level, errors = tally.get("signal.level_dbfs"), tally.get("consensus.pairwise_wer")
    assert level is not None and errors is not None
    assert level.beyond[0] == sum(-60 + n % 50 < -45 for n in range(1_000))
    assert errors.beyond[0] == sum(n % 10 / 20 > 0.4 for n in range(1_000)) and errors.applicable[0] == 1_000
    assert f"{errors.beyond[0]} of 1,000 beyond it" in Page(str(errors.chart())).text
    assert [rule.name for rule in tally.never_measured()] == ["min_utmos"]


def test_sounds_are_free_of_rules_about_speech() -> None:
    rule = Comparison("min_snr_db", "quality", "quality.snr_db", ">=", 10.0, "too noisy", "dB", sounds=False)
    numbers = Numbers(rule.value, [rule])
    for value, is_sound in ((5.0, False), (5.0, True), (20.0, False)):
        numbers.add(value, 1, is_sound)
    assert (numbers.beyond, numbers.applicable, numbers.count) == ([1], [2], 3)


@pytest.mark.parametrize(
    ("op", "threshold", "kept", "broken"),
    [(">=", 3, 3, 2.99), ("<=", 3, 3, 3.1), (">", 3, 4, 3), ("<", 3, 2, 3), ("in", ["en"], "en", "de"),
     ("not in", ["en"], "de", "en"), ("==", 1, 1, 2), ("!=", 1, 2, 1), ("is", True, "", "thanks for watching")],
)  # fmt: skip
def test_rules_compare_as_they_say(op: str, threshold: Any, kept: Any, broken: Any) -> None:
    rule = Comparison("r", "s", "s.v", op, threshold, "", "")
    assert rule.broken_by(kept) is False and rule.broken_by(broken) is True
    if op in (">=", "<="):
        assert rule.broken_by("word") is None


def test_the_rules_compare_as_the_annotation_does() -> None:
    """Every operation that the annotation knows is one that the page can draw."""
    from typing import get_args

    from pipelines.steps import rules

    for op in get_args(rules.Operation):
        limit: Any = ["en"] if op == "in" else 3.0
        for value in ("en", "de") if op in ("in", "is") else (2.0, 3.0, 3.0000001, 4.0):
            theirs = rules.keeps(value, op, limit)
            assert Comparison("r", "s", "s.v", op, limit, "", "").broken_by(value) is not theirs, (op, value)


@given(
    st.lists(st.tuples(st.floats(-1e12, 1e12), st.integers(0, 2)), min_size=1, max_size=60),
    st.lists(st.floats(-1e12, 1e12), max_size=2),
)
@settings(max_examples=150)
def test_a_histogram_holds_every_value(pairs: list[tuple[float, int]], limits: list[float]) -> None:
    values, fates = zip(*pairs, strict=True)
    svg = str(draw_histogram(values, fates, limits, "a <title>"))
    Page(svg)
    assert "nan" not in svg and "inf" not in svg and "a &lt;title&gt;" in svg
    for fate, name in ((1, "kept"), (2, "dropped by this rule"), (0, "dropped for another reason")):
        assert sum(int(n.replace(",", "")) for n in re.findall(rf"([\d,]+) {name}", svg)) == fates.count(fate)


def test_many_values_are_thinned_evenly() -> None:
    numbers = Numbers("x.y")
    for value in range(5 * MAX_HELD_VALUES):
        numbers.add(value, value % 2)
    text = Page(str(numbers.chart())).text
    match = re.search(r"n = ([\d,]+) \(drawn from ([\d,]+)\), median ([\d,]+), 0 to ([\d,]+)", text)
    assert match is not None
    count, sampled, median, highest = (int(number.replace(",", "")) for number in match.groups())
    assert count == 5 * MAX_HELD_VALUES and sampled <= MAX_HELD_VALUES and highest == count - 1
    assert median == pytest.approx(2.5 * MAX_HELD_VALUES, rel=0.01)


def test_word_errors_between_recognizers_are_those_of_jiwer(tmp_path: Path) -> None:
    rows = [segment(n, "a.wav", "a.wav") for n in range(4)]
    rows[0] |= {"text": "The cat sat on THE mat.", "text_source": "given"}
    rows[0]["heard"] = {"first": "the cat sat", "second": "a cat sat on the hat", "third": ""}
    write_jsonl(tmp_path / "segments.jsonl", rows)
    survey = survey_annotation(Folder(tmp_path), [])
    pairs, argued = compare_recognizers(survey)
    names = pairs.ordered_names()
    assert names == ["given text", "first", "second", "third"]
    heard = {name: [row["heard"][name] for row in rows] for name in names[1:]}
    rates = pairs.rates()
    assert rates["first", "second"] == pytest.approx(jiwer.wer(heard["first"], heard["second"]))
    assert rates["second", "first"] == pytest.approx(jiwer.wer(heard["second"], heard["first"]))
    given = jiwer.wer("the cat sat on the mat", heard["second"][0])
    assert rates["given text", "second"] == pytest.approx(given)
    (matrix,) = tree(str(agreement_section(survey, 0.5).content)).all("table", "heat")
    assert matrix.rows()[0][:2] == ["given text", "–"] and matrix.rows()[0][3] == f"{100 * given:.1f}"
    words = {row["word"]: row for row in argued.rows()}
    # of "the" in the given text twice, and once in no other: once "a", once in place, and the rest is not there
    assert words["the"]["times"] == 2 and words["the"]["share"] == pytest.approx(1 - 4 / 6)
    assert words["the"]["instead"] == [("", 3), ("a", 1)]


def test_differing_words_are_marked() -> None:
    parts = marked("The cat sat on the mat.", "the cat sit on mat", "en")
    assert [(part.text, part.kind) for part in parts] == [
        ("the cat ", "same"), ("sit", "differs"), (" on ", "same"), ("the", "missing"), (" mat", "same"),
    ]  # fmt: skip
    assert [part.kind for part in marked("I paid $5", "I paid five dollars", "en")] == ["same"]
    assert [(part.text, part.kind) for part in marked("今天很好", "今天不好", "zh")] == [
        ("今天", "same"), ("不", "differs"), ("好", "same"),
    ]  # fmt: skip


WORDS = st.lists(st.sampled_from(["one", "two", "Three,", "four.", "don't"]), max_size=7).map(" ".join)


@given(WORDS, WORDS)
@settings(max_examples=100)
def test_marking_loses_no_word(text: str, heard: str) -> None:
    parts = marked(text, heard, "en")
    assert "".join(part.text for part in parts if part.kind != "missing").split() == heard.split()
    assert (text.split() == heard.split()) == all(part.kind == "same" for part in parts) or text == ""


@given(st.permutations(range(30)), st.integers(1, 10))
@settings(max_examples=50)
def test_the_choice_of_rows_does_not_depend_on_their_order(order: list[int], most: int) -> None:
    def chosen(numbers: Any) -> list[str]:
        choice = RowSample(most)
        for number in numbers:
            choice.offer({"id": str(number)}, number % 4)
        return [row["id"] for row in choice.rows()]

    assert chosen(order) == chosen(range(30))
    assert [int(number) % 4 for number in chosen(order)] == sorted(n % 4 for n in range(30))[:most]


@given(st.text())
def test_a_name_is_one_line_of_what_can_be_seen(name: str) -> None:
    shown = named(name)
    assert len(shown) <= 300 and shown.isprintable()


def test_values_are_found_below_measured_and_in_the_row() -> None:
    row = {"measured": {"a": {"b": 1}, "segment": {"c": 2}}, "d": 3, "level_dbfs": 4}
    assert [measured(row, path) for path in ("a.b", "c", "d", "signal.level_dbfs", "x.y")] == [
        1,
        2,
        3,
        4,
        None,
    ]


@pytest.mark.parametrize(
    ("run", "note"),
    [
        ({"driver_cpu_s": 46.8, "workers": 1, "engine": "local"}, "6.3 s of CPU in the steps, 47 s in all"),
        ({"driver_cpu_s": 13.7, "workers": 2, "engine": "local"}, "6.3 s of CPU in the steps, 20 s in all"),
        ({"driver_cpu_s": 1.0, "workers": 2, "engine": "local", "known": 40}, "6.3 s of CPU in the steps"),
        ({"workers": 1, "engine": "local"}, "6.3 s of CPU in the steps"),
    ],
)
def test_the_cpu_seconds_of_a_run_are_those_of_its_steps_and_of_all(run: dict[str, Any], note: str) -> None:
    timings = {"steps": {"tags": {"seconds": 6.3, "audio_s": 700.0}}, "audio_s": 700.0, **run}
    notes = {tile.title: tile.note for tile in headline_figures({}, timings, "clips")}
    assert notes["of audio an hour of one core"] == note
