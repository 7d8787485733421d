"""The report of an annotation: one safe page of bounded size that says what the files in the folder say."""

from __future__ import annotations

import json
import math
import os
import re
import tracemalloc
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jiwer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.audio import save
from audiollm.files import write_json, write_jsonl
from audiollm.set_aside import set_aside_row
from pipelines.annotate.report import numbers as numbers_module
from pipelines.annotate.report import page as page_module
from pipelines.annotate.report import survey as survey_module
from pipelines.annotate.report import write_report
from pipelines.annotate.report.agreement import agreement_section, marked
from pipelines.annotate.report.browser import MOST_SHOWN
from pipelines.annotate.report.folder import Folder, measured, named
from pipelines.annotate.report.histogram import draw_histogram
from pipelines.annotate.report.numbers import MOST_VALUES, Numbers, Rule, read_rules
from pipelines.annotate.report.survey import Chosen, survey
from pipelines.report.formats import duration
from tests.pipelines.report_run import Page, beep

SHARED = Path(__file__).parents[3] / "shared" / "data"
HOSTILE = '"><script>alert(1)</script>.wav'
NAMES = [
    HOSTILE,
    "two\nlines.wav",
    "left\u202etfel.wav",
    "long" * 75 + ".wav",
    "bad\udcff.wav",
    "日本語.wav",
    "c.wav",
]
RULES = [
    ("min_duration_s", "segment", "duration_s", ">=", 0.1, "too short", "s"),
    ("min_level_dbfs", "signal", "signal.level_dbfs", ">=", -45.0, "too quiet", "dBFS"),
    ("max_pairwise_wer", "consensus", "consensus.pairwise_wer", "<=", 0.4, "recognizers disagree", ""),
    ("languages", "language", "language.language", "in", ["en"], "other language", ""),
    ("min_utmos", "quality", "quality.utmos", ">=", 3.4, "sounds unnatural", ""),
]
TEXTS = ["the cat sat on the mat", "a dog barked twice", "rain fell all day", "eleven ships sailed"]


def rules_json() -> list[dict[str, Any]]:
    keys = ("rule", "step", "value", "op", "threshold", "title", "unit")
    return [dict(zip(keys, rule, strict=True)) for rule in RULES]


def segment(number: int, path: Path | str, name: str, **columns: Any) -> dict[str, Any]:
    """A row whose values follow from its number."""
    text = TEXTS[number % len(TEXTS)]
    words = text.split()
    return {
        "id": f"s{number:05d}", "path": str(path), "file": name, "digest": "d", "start_s": 0.0, "end_s": 0.15,
        "duration_s": 0.15, "kind": "speech", "speaker": f"S{number % 30}", "split": "train", "text": text,
        "text_source": "consensus", "language": "en", "sample_rate": 24_000, "num_channels": 1,
        "heard": {"first": text, "second": " ".join(words[1:]), "third": " ".join([*words[:-1], "moose"])},
        "measured": {
            "signal": {"level_dbfs": -60.0 + number % 50, "clipped_share": 0.0},
            "quality": {"dnsmos": {"ovr": 2 + number % 20 / 10}, "snr_db": float(number % 40)},
            "consensus": {"pairwise_wer": number % 10 / 20, "vote_share": 0.8},
            "events": {"events": [{"label": f"<i>{name[:9]}", "start_s": 0.0, "end_s": 0.1, "score": 0.5}], "tags": []},
        },
        "pitch": "low",
    } | columns  # fmt: skip


def dropped(row: dict[str, Any], rule: int, value: Any) -> dict[str, Any]:
    name, step, _, _, threshold, title, unit = RULES[rule]
    reason = f"{value} {unit}, the limit is {threshold}"
    return row | {"dropped": {"step": step, "rule": name, "kind": title, "value": value, "threshold": threshold,
                              "reason": reason}}  # fmt: skip


def annotated(folder: Path, audio: Path) -> dict[str, Any]:
    """A folder as an annotation leaves it, of recordings with names that do harm; returns its funnel."""
    paths = [audio / f"{number}.wav" for number in range(len(NAMES))]
    for path in paths:
        beep(path)
    kept = [segment(n, path, name) for n, (path, name) in enumerate(zip(paths, NAMES, strict=True))]
    kept[0] |= {"text": HOSTILE, "text_source": "given", "speaker": HOSTILE}
    kept.append(segment(90, paths[0], "rain.ogg", kind="sound", text="", heard={}))
    filtered = [dropped(segment(10 + n, paths[n], NAMES[n]), 1, -60.0 + n) for n in range(5)]
    filtered += [dropped(segment(20 + n, paths[n], NAMES[n]), 2, 0.45) for n in range(2)]
    files = [
        {"name": name, "path": str(path), "digest": "d", "status": "kept", "reason": "", "segments": 2, "kept": 1,
         "duration_s": 0.2, "kept_s": 0.15} for path, name in zip(paths, NAMES, strict=True)
    ]  # fmt: skip
    files.append(
        files[0] | {"name": "noise.wav", "status": "filtered", "reason": "no speech found", "kept": 0}
    )
    files.append(
        files[0] | {"name": HOSTILE, "status": "failed", "reason": f"{HOSTILE}: no sound", "duration_s": None}
    )
    funnel = {
        "files_seen": 12_345, "not_audio": 12, "audio_files": 12_333, "files_kept": 9_871, "files_filtered": 2_461,
        "files_failed": 1, "segments_found": 23_456, "segments": 17_171, "seconds_seen": 360_000.0,
        "seconds_found": 250_000.0, "seconds": 180_000.0, "reasons": {"too quiet": 6_262, "recognizers disagree": 23},
        "stages": [
            {"step": "signal", "rule": "min_level_dbfs", "title": "too quiet", "threshold": -45.0,
             "segments_in": 23_456, "segments_out": 17_194, "seconds_in": 250_000.0, "seconds_out": 181_000.0},
            {"step": "consensus", "rule": "max_pairwise_wer", "title": "recognizers disagree", "threshold": 0.4,
             "segments_in": 17_194, "segments_out": 17_171, "seconds_in": 181_000.0, "seconds_out": 180_000.0},
        ],
        "errors": {"events": 7}, "text_agreement": 0.8125, "quality": {"n": 0},
    }  # fmt: skip
    put(folder / "segments.jsonl", kept)
    put(folder / "filtered.jsonl", filtered)
    put(folder / "files.jsonl", files)
    write_jsonl(
        folder / "set_aside.jsonl", [set_aside_row("annotate", f"/home/alice/{HOSTILE}", "cannot be read")]
    )
    write_json(folder / "funnel.json", funnel)
    write_json(folder / "rules.json", rules_json())
    write_json(folder / "not_applied.json", [
        {"threshold": "min_utmos", "value": 3.4, "scorer": "quality", "reason": "no UTMOS: give its .onnx file"}
    ])  # fmt: skip
    write_json(folder / "timings.json", {
        "steps": {"signal": {"seconds": 36.0, "calls": 23_456, "audio_s": 250_000.0},
                  "quality": {"seconds": 3564.0, "calls": 17_194, "audio_s": 181_000.0}},
        "audio_s": 360_000.0, "wall_s": 1_860.0, "workers": 2, "engine": "local", "known": 3,
    })  # fmt: skip
    write_json(
        folder / "bins.json",
        {"pitch": {"value": "prosody.pitch_hz", "edges": [120], "names": ["low", "high"]}},
    )
    (folder / "config.yaml").write_text(
        "preset: emilia\nthresholds: {min_utmos: 3.4}\ninput: /home/alice/raw\n"
    )
    return funnel


def put(path: Path, rows: list[dict[str, Any]]) -> None:
    """In ASCII: a name that is no Unicode cannot be written otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder, audio = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("audio")
    funnel = annotated(folder, audio)
    return write_report(folder).read_text(encoding="utf-8"), funnel


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_needs_nothing_beside_itself(whole: tuple[str, dict[str, Any]]) -> None:
    page = Page(whole[0])
    links = [
        value for _, key, value in page.attributes if key in ("src", "href", "xlink:href", "srcset", "action")
    ]
    assert links and all(value.startswith(("data:", "#")) for value in links)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert not re.search(r"https?://|@import|url\(", whole[0])
    assert any("default-src 'none'" in value for _, key, value in page.attributes if key == "content")
    anchors = {value[1:] for tag, key, value in page.attributes if (tag, key) == ("a", "href")}
    assert anchors == {value for tag, key, value in page.attributes if (tag, key) == ("section", "id")}


def test_names_cannot_break_the_page(whole: tuple[str, dict[str, Any]]) -> None:
    page = Page(whole[0])
    assert page.tags["script"] == 1 and page.tags["i"] and HOSTILE not in whole[0]
    assert page.text.count(HOSTILE) >= 4  # a text, a speaker, a file, a failed file and its reason
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]
    assert "\u202e" not in whole[0] and r"left\u202etfel.wav" in page.text and r"two\nlines.wav" in page.text
    assert "long" * 75 not in page.text and "long" * 70 in page.text
    assert "/home/alice" not in whole[0]


def test_the_numbers_are_those_of_the_funnel(whole: tuple[str, dict[str, Any]]) -> None:
    html, funnel = whole
    page = Page(html)
    for key in (
        "files_seen",
        "not_audio",
        "audio_files",
        "files_kept",
        "files_filtered",
        "segments_found",
        "segments",
    ):
        assert f"{funnel[key]:,}" in page.text, key
    for key in ("seconds_seen", "seconds_found", "seconds"):
        assert duration(funnel[key]) in page.text, key
    for stage in funnel["stages"]:
        assert f"{stage['segments_out']:,}" in page.text
        assert f"{stage['segments_in'] - stage['segments_out']:,} dropped" in page.text
    for text in (
        "50.0 % of what came in", "6,262 too quiet", "81.2 %", "7 events", "no UTMOS: give its .onnx file",
        "100 h", "of audio an hour of one core", "60.0 min of CPU in all", "31.0 min", "2 workers, engine local",
        "3 answers were known", "8 of 8 kept and 7 of 7 dropped",
    ):  # fmt: skip
        assert text in re.sub(r"\s+", " ", page.text), text


def test_every_part_is_there(whole: tuple[str, dict[str, Any]]) -> None:
    page = Page(whole[0])
    assert "could not be made" not in page.text
    assert page.tags["article"] == page.tags["audio"] == 8 + 7
    fates = Counter(value for tag, key, value in page.attributes if (tag, key) == ("article", "data-group"))
    assert fates == {"0": 8, "1": 5, "2": 2}
    assert page.text.count("nearest to the threshold") == 2
    assert page.tags["mark"] and page.tags["del"]
    assert "a sound without words" in page.text and "-56 dBFS" in page.text and "≥ -45 dBFS" in page.text
    for title in ("Languages", "Speakers", "Sound events", "Sample rates", "Formats", "DNSMOS overall"):
        assert title in page.text
    assert "no row has" not in page.text  # of the one rule without a value it is said that it was not applied


@pytest.mark.parametrize("rows", [0, 3])
def test_a_folder_with_segments_alone_has_a_page(tmp_path: Path, rows: int) -> None:
    beep(tmp_path / "a.wav")
    write_jsonl(tmp_path / "segments.jsonl", [segment(n, tmp_path / "a.wav", "a.wav") for n in range(rows)])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "could not be made" not in page.text and "There is no funnel.json" in page.text
    assert page.tags["article"] == rows
    assert "There is no timings.json" in page.text and "There is no files.jsonl" in page.text


def test_a_folder_of_nothing_and_of_rubbish_has_a_page(tmp_path: Path) -> None:
    assert "There are no segments." in Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    for name in ("funnel.json", "rules.json", "not_applied.json", "timings.json", "bins.json", "config.yaml"):
        (tmp_path / name).write_bytes(b"\xff{[" + b"[" * 100_000)
    rows = ["null", "[1]", '{"id": ',
            '{"text": 5, "heard": [1], "measured": 7, "path": 8, "start_s": "x", "end_s": NaN}',
            '{"measured": {"a": {"b": 1e300, "c": true}}, "path": "\\u0000", "heard": {"x": null}}']  # fmt: skip
    (tmp_path / "segments.jsonl").write_text("\n".join(rows))
    (tmp_path / "filtered.jsonl").write_text(
        '{"dropped": 3, "path": "/dev/zero"}\n{"dropped": {"step": [], "value": {}}}'
    )
    (tmp_path / "files.jsonl").write_text(
        '{"status": ["x"], "name": 3}\n{"status": "failed", "duration_s": "long"}'
    )
    (tmp_path / "set_aside.jsonl").write_text('{"kind": 3}\n')
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "could not be made" not in page.text
    assert page.tags["article"] == 4 and page.text.count("No sound:") == 4


# fmt: off
KEYS = st.sampled_from([
    "id", "path", "file", "name", "start_s", "end_s", "duration_s", "kind", "speaker", "text", "text_source",
    "language", "heard", "measured", "dropped", "step", "rule", "value", "threshold", "reason", "errors",
    "pitch", "sample_rate", "status", "events", "quality", "consensus", "words", "label", "stages", "seconds",
    "segments", "steps", "calls", "edges", "names", "op", "title", "unit", "first",
])
# fmt: on
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just("kept")
    | st.just(">=")
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=15,
)
ROWS = st.lists(st.dictionaries(KEYS, JSON, max_size=9), max_size=4)
CONTENTS = st.dictionaries(
    st.sampled_from(["stages", "reasons", "steps", "seconds", "segments", "files_kept"]), JSON
)


@given(ROWS, ROWS, ROWS, ROWS, CONTENTS, CONTENTS)
@settings(max_examples=25, deadline=None)
def test_whatever_the_files_hold_there_is_a_page(
    kept: Any, filtered: Any, files: Any, rules: Any, funnel: Any, timings: Any
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        put(folder / "segments.jsonl", kept)
        put(folder / "filtered.jsonl", filtered)
        for file in ("files.jsonl", "set_aside.jsonl"):
            put(folder / file, files)
        for file, content in (("rules", rules), ("not_applied", rules), ("bins", funnel)):
            (folder / f"{file}.json").write_text(json.dumps(content))
        (folder / "funnel.json").write_text(json.dumps(funnel))
        (folder / "timings.json").write_text(json.dumps(timings))
        assert Page(write_report(folder).read_text(encoding="utf-8")).tags["section"] == 7


def test_what_cannot_be_heard_leaves_a_note(tmp_path: Path) -> None:
    (tmp_path / "noise.wav").write_bytes(b"not audio at all")
    os.mkfifo(tmp_path / "pipe.wav")  # opened, it would wait for a writer for ever
    paths = [tmp_path / "gone.wav", tmp_path / "noise.wav", tmp_path / "pipe.wav", "/dev/zero", "\0", ""]
    write_jsonl(tmp_path / "segments.jsonl", [segment(n, path, f"{n}.wav") for n, path in enumerate(paths)])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.tags["article"] == page.text.count("No sound:") == len(paths) and not page.tags["audio"]


def test_a_section_that_breaks_does_not_take_the_page_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("<rows>")

    annotated(tmp_path, tmp_path / "audio")
    monkeypatch.setattr(page_module, "tables_section", broken)
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "This section could not be made: KeyError: '<rows>'" in text and "17,171" in text


def test_nothing_is_written_but_the_page(tmp_path: Path) -> None:
    annotated(tmp_path / "out", tmp_path / "audio")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert write_report(tmp_path / "out") == tmp_path / "out" / "report.html"
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    page = after.pop(tmp_path / "out" / "report.html")
    assert after == before
    write_report(tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_bytes() == page  # from the same files the same page


# ------------------------------------------------------------------------------------------------ bounds


def many_rows(folder: Path, count: int) -> None:
    with (folder / "segments.jsonl").open("w") as kept, (folder / "filtered.jsonl").open("w") as filtered:
        for n in range(count):
            row = segment(n, folder / "gone.wav", f"{n}.wav", speaker=f"{n}.wav#S0")
            if n % 3:
                kept.write(json.dumps(row) + "\n")
            else:
                reason = {
                    "step": "s",
                    "rule": f"r{n % 150}",
                    "kind": f"reason {n % 150}",
                    "value": n,
                    "threshold": 0,
                }
                filtered.write(json.dumps(row | {"dropped": reason}) + "\n")
    write_json(folder / "rules.json", rules_json())


def test_the_page_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    many_rows(tmp_path, 10_000)
    page = write_report(tmp_path)
    assert page.stat().st_size < 2_000_000  # no sound is there to be heard
    parsed = Page(page.read_text(encoding="utf-8"))
    assert parsed.tags["article"] <= MOST_SHOWN and "6,666" in parsed.text and "3,334" in parsed.text
    assert "Of 1,000 of 10,000 segments" in parsed.text and "And 9,988 more" in parsed.text


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_KEYS", "COMPARED_ROWS", "CANDIDATES"):
        monkeypatch.setattr(survey_module, name, 50)
    monkeypatch.setattr(survey_module, "CANDIDATES_A_REASON", 2)
    monkeypatch.setattr(numbers_module, "MOST_VALUES", 50)
    peaks = []
    for count in (1_000, 3_000):
        many_rows(tmp_path, count)
        tracemalloc.start()
        survey(Folder(tmp_path), read_rules(rules_json()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    size = sum((tmp_path / name).stat().st_size for name in ("segments.jsonl", "filtered.jsonl"))
    assert peaks[1] - peaks[0] < size / 20


# ------------------------------------------------------------------------------------------------ figures


def test_shares_beyond_a_threshold_are_counted_over_all_rows(tmp_path: Path) -> None:
    many_rows(tmp_path, 1_000)
    tally = survey(Folder(tmp_path), read_rules(rules_json())).numbers
    level, errors = tally.get("signal.level_dbfs"), tally.get("consensus.pairwise_wer")
    assert level is not None and errors is not None
    assert level.chart()["rules"][0]["beyond"] == sum(-60 + n % 50 < -45 for n in range(1_000))
    assert errors.chart()["rules"][0]["share"] == pytest.approx(
        sum(n % 10 / 20 > 0.4 for n in range(1_000)) / 1_000
    )
    assert [rule.name for rule in tally.never_measured()] == ["min_utmos"]


def test_sounds_are_free_of_rules_about_speech() -> None:
    rule = Rule("min_snr_db", "quality", "quality.snr_db", ">=", 10.0, "too noisy", "dB", sounds=False)
    numbers = Numbers(rule.value, [rule])
    for value, is_sound in ((5.0, False), (5.0, True), (20.0, False)):
        numbers.add(value, 1, is_sound)
    assert (numbers.beyond, numbers.asked, numbers.count) == ([1], [2], 3)


@pytest.mark.parametrize(
    ("op", "threshold", "kept", "broken"),
    [(">=", 3, 3, 2.99), ("<=", 3, 3, 3.1), (">", 3, 4, 3), ("<", 3, 2, 3), ("in", ["en"], "en", "de"),
     ("not in", ["en"], "de", "en"), ("==", 1, 1, 2), ("!=", 1, 2, 1), ("is", True, "", "thanks for watching")],
)  # fmt: skip
def test_rules_compare_as_they_say(op: str, threshold: Any, kept: Any, broken: Any) -> None:
    rule = Rule("r", "s", "s.v", op, threshold, "", "")
    assert rule.broken_by(kept) is False and rule.broken_by(broken) is True
    if op in (">=", "<="):
        assert rule.broken_by("word") is None


def test_the_rules_compare_as_the_annotation_does() -> None:
    """Every operation that the annotation knows is one that the page can draw."""
    from typing import get_args

    from pipelines.annotate import rules

    for op in get_args(rules.Operation):
        limit: Any = ["en"] if op == "in" else 3.0
        for value in ("en", "de") if op in ("in", "is") else (2.0, 3.0, 3.0000001, 4.0):
            theirs = rules.keeps(value, op, limit)
            assert Rule("r", "s", "s.v", op, limit, "", "").broken_by(value) is not theirs, (op, value)


@given(
    st.lists(st.tuples(st.floats(-1e12, 1e12), st.integers(0, 2)), min_size=1, max_size=60),
    st.lists(st.floats(-1e12, 1e12), max_size=2),
)
@settings(max_examples=150, deadline=None)
def test_a_histogram_holds_every_value(pairs: list[tuple[float, int]], limits: list[float]) -> None:
    values, fates = zip(*pairs, strict=True)
    svg = str(draw_histogram(values, fates, limits, "a <title>"))
    Page(svg)
    assert "nan" not in svg and "inf" not in svg and "a &lt;title&gt;" in svg
    for fate, name in ((1, "kept"), (2, "dropped by this rule"), (0, "dropped for another reason")):
        assert sum(int(n.replace(",", "")) for n in re.findall(rf"([\d,]+) {name}", svg)) == fates.count(fate)


def test_many_values_are_thinned_evenly() -> None:
    numbers = Numbers("x.y")
    for value in range(5 * MOST_VALUES):
        numbers.add(value, value % 2)
    chart = numbers.chart()
    assert chart["n"] == 5 * MOST_VALUES and chart["sampled"] <= MOST_VALUES
    assert float(chart["median"].replace(",", "")) == pytest.approx(2.5 * MOST_VALUES, rel=0.01)
    assert chart["range"] == f"0 to {5 * MOST_VALUES - 1:,}"


def test_word_errors_between_recognizers_are_those_of_jiwer(tmp_path: Path) -> None:
    rows = [segment(n, "a.wav", "a.wav") for n in range(4)]
    rows[0] |= {"text": "The cat sat on THE mat.", "text_source": "given"}
    rows[0]["heard"] = {"first": "the cat sat", "second": "a cat sat on the hat", "third": ""}
    write_jsonl(tmp_path / "segments.jsonl", rows)
    section = agreement_section(survey(Folder(tmp_path), []), 0.5)
    names = section["matrix"]["names"]
    assert names == ["given text", "first", "second", "third"]
    heard = {name: [row["heard"][name] for row in rows] for name in names[1:]}
    rates = {row["name"]: dict(zip(names, row["cells"], strict=True)) for row in section["matrix"]["rows"]}
    assert rates["first"]["second"] == pytest.approx(jiwer.wer(heard["first"], heard["second"]))
    assert rates["second"]["first"] == pytest.approx(jiwer.wer(heard["second"], heard["first"]))
    assert rates["given text"]["second"] == pytest.approx(
        jiwer.wer("the cat sat on the mat", heard["second"][0])
    )
    assert rates["first"]["first"] is None
    words = {row["word"]: row for row in section["words"]}
    # of "the" in the given text twice, and once in no other: once "a", once in place, and the rest is not there
    assert words["the"]["times"] == 2 and words["the"]["share"] == pytest.approx(1 - 4 / 6)
    assert words["the"]["instead"] == [{"word": "", "count": 3}, {"word": "a", "count": 1}]


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
@settings(max_examples=100, deadline=None)
def test_marking_loses_no_word(text: str, heard: str) -> None:
    parts = marked(text, heard, "en")
    assert "".join(part.text for part in parts if part.kind != "missing").split() == heard.split()
    assert (text.split() == heard.split()) == all(part.kind == "same" for part in parts) or text == ""


@given(st.permutations(range(30)), st.integers(1, 10))
@settings(max_examples=50, deadline=None)
def test_the_choice_of_rows_does_not_depend_on_their_order(order: list[int], most: int) -> None:
    def chosen(numbers: Any) -> list[str]:
        choice = Chosen(most)
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


# ------------------------------------------------------------------------------------------------ real sound


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared/data on this machine")
def test_real_recordings_of_all_kinds(tmp_path: Path) -> None:
    sounds = [next(iter(sorted((SHARED / folder).rglob(pattern)))) for folder, pattern in (
        ("ljspeech_32", "*.flac"), ("esc10", "*.ogg"), ("fsdd", "*.wav"), ("odd_formats", "*.mp3"),
        ("odd_formats", "*.opus"), ("noisy_pairs", "*.wav"))]  # fmt: skip
    rows = [segment(n, path, path.name, end_s=0.5) for n, path in enumerate(sounds)]
    write_jsonl(tmp_path / "segments.jsonl", rows)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.tags["audio"] == page.tags["img"] == len(sounds)
    assert "No sound:" not in page.text


def test_sound_fills_the_page_only_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MOST_SOUND_BYTES", 20_000)
    times = torch.arange(24_000 * 2) / 24_000
    save(tmp_path / "a.wav", 0.3 * torch.sin(2 * math.pi * 440 * times)[None], 24_000)
    rows = [segment(n, tmp_path / "a.wav", "a.wav", end_s=2.0) for n in range(8)]
    write_jsonl(tmp_path / "segments.jsonl", rows)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert 0 < page.tags["audio"] < 8 and page.tags["img"] == 8
    assert f"{8 - page.tags['audio']} are without sound" in page.text
