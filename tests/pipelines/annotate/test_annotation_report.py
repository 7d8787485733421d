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

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.audio import save
from audiollm.files.atomic import write_jsonl
from audiollm.pages.formats import duration
from pipelines.annotate.report import page as page_module
from pipelines.annotate.report import survey as survey_module
from pipelines.annotate.report import write_annotation_report
from pipelines.annotate.report.browser import MAX_CARDS
from pipelines.annotate.report.survey import survey_annotation
from pipelines.steps.page import numbers as numbers_module
from pipelines.steps.page import survey as parts_module
from pipelines.steps.page.folder import Folder
from pipelines.steps.page.numbers import read_rules
from tests.pipelines.annotate.annotation_report_run import (
    HOSTILE,
    SHARED,
    annotated,
    many_rows,
    put,
    rules_json,
    segment,
)
from tests.pipelines.report.report_run import Page, beep


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder, audio = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("audio")
    funnel = annotated(folder, audio)
    return write_annotation_report(folder).read_text(encoding="utf-8"), funnel


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
        "100 h", "of audio an hour of one core", "60.0 min of CPU in the steps", "31.0 min", "2 workers, engine local",
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
    page = Page(write_annotation_report(tmp_path).read_text(encoding="utf-8"))
    assert "could not be made" not in page.text and "There is no funnel.json" in page.text
    assert page.tags["article"] == rows
    assert "There is no timings.json" in page.text and "There is no files.jsonl" in page.text


def test_a_folder_of_nothing_and_of_rubbish_has_a_page(tmp_path: Path) -> None:
    assert (
        "There are no segments." in Page(write_annotation_report(tmp_path).read_text(encoding="utf-8")).text
    )
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
    page = Page(write_annotation_report(tmp_path).read_text(encoding="utf-8"))
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
@settings(max_examples=25)
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
        assert Page(write_annotation_report(folder).read_text(encoding="utf-8")).tags["section"] == 7


def test_what_cannot_be_heard_leaves_a_note(tmp_path: Path) -> None:
    (tmp_path / "noise.wav").write_bytes(b"not audio at all")
    os.mkfifo(tmp_path / "pipe.wav")  # opened, it would wait for a writer for ever
    paths = [tmp_path / "gone.wav", tmp_path / "noise.wav", tmp_path / "pipe.wav", "/dev/zero", "\0", ""]
    write_jsonl(tmp_path / "segments.jsonl", [segment(n, path, f"{n}.wav") for n, path in enumerate(paths)])
    page = Page(write_annotation_report(tmp_path).read_text(encoding="utf-8"))
    assert page.tags["article"] == page.text.count("No sound:") == len(paths) and not page.tags["audio"]


def test_a_section_that_breaks_does_not_take_the_page_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("<rows>")

    annotated(tmp_path, tmp_path / "audio")
    monkeypatch.setattr(page_module, "tables_section", broken)
    text = Page(write_annotation_report(tmp_path).read_text(encoding="utf-8")).text
    assert "This section could not be made: KeyError: '<rows>'" in text and "17,171" in text


def test_nothing_is_written_but_the_page(tmp_path: Path) -> None:
    annotated(tmp_path / "out", tmp_path / "audio")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert write_annotation_report(tmp_path / "out") == tmp_path / "out" / "report.html"
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    page = after.pop(tmp_path / "out" / "report.html")
    assert after == before
    write_annotation_report(tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_bytes() == page  # from the same files the same page


# ------------------------------------------------------------------------------------------------ bounds


def test_the_page_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    many_rows(tmp_path, 10_000)
    page = write_annotation_report(tmp_path)
    assert page.stat().st_size < 2_000_000  # no sound is there to be heard
    parsed = Page(page.read_text(encoding="utf-8"))
    assert parsed.tags["article"] <= MAX_CARDS and "6,666" in parsed.text and "3,334" in parsed.text
    assert "Of 1,000 of 10,000 segments" in parsed.text and "And 9,988 more" in parsed.text


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_KEYS", "CANDIDATES"):
        monkeypatch.setattr(parts_module, name, 50)
    monkeypatch.setattr(survey_module, "COMPARED_ROWS", 50)
    monkeypatch.setattr(parts_module, "CANDIDATES_PER_REASON", 2)
    monkeypatch.setattr(numbers_module, "MAX_HELD_VALUES", 50)
    peaks = []
    for count in (1_000, 3_000):
        many_rows(tmp_path, count)
        measured = []
        for _ in range(2):  # other threads of the process may take memory meanwhile: the lower peak counts
            tracemalloc.start()
            survey_annotation(Folder(tmp_path), read_rules(rules_json()))
            measured.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        peaks.append(min(measured))
    size = sum((tmp_path / name).stat().st_size for name in ("segments.jsonl", "filtered.jsonl"))
    assert peaks[1] - peaks[0] < size / 20


# ------------------------------------------------------------------------------------------------ real sound


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared/data on this machine")
def test_real_recordings_of_all_kinds(tmp_path: Path) -> None:
    sounds = [next(iter(sorted((SHARED / folder).rglob(pattern)))) for folder, pattern in (
        ("ljspeech_32", "*.flac"), ("esc10", "*.ogg"), ("fsdd", "*.wav"), ("odd_formats", "*.mp3"),
        ("odd_formats", "*.opus"), ("noisy_pairs", "*.wav"))]  # fmt: skip
    rows = [segment(n, path, path.name, end_s=0.5) for n, path in enumerate(sounds)]
    write_jsonl(tmp_path / "segments.jsonl", rows)
    page = Page(write_annotation_report(tmp_path).read_text(encoding="utf-8"))
    assert page.tags["audio"] == page.tags["img"] == len(sounds)
    assert "No sound:" not in page.text


def test_sound_fills_the_page_only_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MAX_SOUND_BYTES", 20_000)
    times = torch.arange(24_000 * 2) / 24_000
    save(tmp_path / "a.wav", 0.3 * torch.sin(2 * math.pi * 440 * times)[None], 24_000)
    rows = [segment(n, tmp_path / "a.wav", "a.wav", end_s=2.0) for n in range(8)]
    write_jsonl(tmp_path / "segments.jsonl", rows)
    page = Page(write_annotation_report(tmp_path).read_text(encoding="utf-8"))
    assert 0 < page.tags["audio"] < 8 and page.tags["img"] == 8
    assert f"{8 - page.tags['audio']} are without sound" in page.text
