"""The part of the page on what stages set aside: counts, reasons, examples; damaged lists; none where there is none."""

from __future__ import annotations

from pathlib import Path

from audiollm.files.atomic import write_jsonl
from audiollm.files.set_aside import set_aside_row
from audiollm.pages.clips import Gallery
from audiollm.pages.run_record import RunRecord
from audiollm.pages.sections import ReportContext
from pipelines.report.set_aside import MAX_EXAMPLES, MAX_REASONS, set_aside_section
from tests.pipelines.report.report_run import HOSTILE, Page, Run, section_of

FIGURES = {"train_samples": 7000, "test_samples": 257, "set_aside": 20}


def composed_with_two_reasons(run: Run) -> None:
    """230 rows of the annotation, which `compose` repeats before its own 20."""
    upstream = [
        set_aside_row("annotate", str(run.audio / f"{n}.wav"), "no speech found", id=f"r{n}")
        for n in range(230)
    ]
    composed = [set_aside_row("compose", f"{n}.wav", "no text", id=f"s{n}") for n in range(17)]
    composed += [
        set_aside_row("compose", f"{n}.wav", HOSTILE, f"{n} {HOSTILE} of 7", f"h{n}") for n in range(3)
    ]
    write_jsonl(run.folder("annotate") / "set_aside.jsonl", upstream)
    write_jsonl(run.folder("compose") / "set_aside.jsonl", [*upstream, *composed])
    run.done("annotate", {"segments": 7277})
    run.done("compose", FIGURES)


def test_the_page_tells_how_many_were_set_aside_and_why(tmp_path: Path) -> None:
    run = Run(tmp_path)
    composed_with_two_reasons(run)
    page = Page(run.report()[0])
    assert "230 set aside, beside 7,277 segments" in page.text
    assert "20 set aside, beside 7,257 samples" in page.text
    assert "Every one is in compose/set_aside.jsonl." in page.text
    first, second = section_of(run, set_aside_section).all("table", "list")
    assert first.rows() == [["no speech found", "230", "0.wav r0 1.wav r1"]]
    assert [row[:2] for row in second.rows()] == [["no text", "17"], [HOSTILE, "3"]]
    assert second.rows()[1][2].count("of 7") == MAX_EXAMPLES


def test_a_reason_is_escaped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    composed_with_two_reasons(run)
    html, _ = run.report()
    assert HOSTILE not in html and Page(html).text.count(HOSTILE) == 1 + MAX_EXAMPLES


def test_a_run_that_set_nothing_aside_has_no_such_part(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.done("compose", FIGURES | {"set_aside": 0})
    write_jsonl(run.folder("compose") / "set_aside.jsonl", [])
    assert set_aside_section(ReportContext(RunRecord(run.recipe, run.results), Gallery())) is None
    assert "set aside" not in Page(run.report()[0]).text.lower()


def test_a_damaged_list_is_told_and_its_whole_rows_are_shown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.done("compose", FIGURES)
    path = run.folder("compose") / "set_aside.jsonl"
    write_jsonl(path, [set_aside_row("compose", "a.wav", "no text"), {"kind": ["wrong"], "place": None}])
    with path.open("ab") as file:
        file.write(b'\xff\xfe{"place": "b.w')
    text = Page(run.report()[0]).text
    assert "compose/set_aside.jsonl: line 3 broken and left out" in text
    assert "no text" in text and "no reason given" in text
    path.write_bytes(b"\x00\x01")
    assert "compose/set_aside.jsonl: line 1 broken and left out" in Page(run.report()[0]).text


def test_many_reasons_are_bounded_and_lists_of_all_ranks_are_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    rows = [set_aside_row("train", f"{n}", f"reason {n:02}") for n in range(MAX_REASONS + 5)]
    write_jsonl(run.folder("train") / "set_aside.jsonl", rows)
    write_jsonl(
        run.folder("train") / "set_aside-1.jsonl", [*rows[:1], set_aside_row("train", "x", "reason 00")]
    )
    run.done("train", {"sequences": 9})
    section = section_of(run, set_aside_section)
    (listed,) = section.all("table", "list")
    assert len(listed.rows()) == MAX_REASONS and listed.rows()[0][:2] == ["reason 00", "2"]
    assert f"{MAX_REASONS + 6} set aside, beside 9 sequences" in section.text
    assert (
        "And 5 more reasons. Every one is in train/set_aside-1.jsonl, train/set_aside.jsonl." in section.text
    )


def test_a_list_that_names_an_annotation_outside_the_run_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_jsonl(run.folder("compose") / "set_aside.jsonl", [set_aside_row("annotate", "a.wav", "too short")])
    run.done("compose", FIGURES)
    assert section_of(run, set_aside_section).all("table", "list")[0].rows()[0][0] == "too short annotate"
