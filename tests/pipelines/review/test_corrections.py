"""The file of corrections: lines, revisions, conflicts, kills; and rows with and without corrections."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from audiollm.files.atomic import DamagedFile, write_jsonl
from pipelines.compose.rows import read_segments
from pipelines.review.applied import CorrectionIndex, corrected_row, correction_digests, unmatched_rows
from pipelines.review.corrections import (
    CORRECTIONS,
    CorrectedFields,
    CorrectionConflict,
    CorrectionLedger,
    CorrectionRequest,
    SegmentIdentity,
    identity_of,
    read_corrections,
)

SEGMENT = SegmentIdentity("d1", "a.wav", 500, 2500)


def request(
    operation: str, revision: int = 0, identity: SegmentIdentity = SEGMENT, **fields: Any
) -> CorrectionRequest:
    return CorrectionRequest(identity, CorrectedFields(**fields), revision, operation.ljust(8, "x"))


def row(**changes: Any) -> dict[str, Any]:
    return {
        "id": "a--00000", "path": "/data/a.wav", "file": "a.wav", "digest": "d1", "start_s": 0.5, "end_s": 2.5,
        "duration_s": 2.0, "kind": "speech", "speaker": "ann", "split": None, "text": "a dog", "text_source": "whisper",
        "text_refused": None, "text_recognizers": ["abc"], "heard": {"whisper": "a dog"},
        "measured": {"alignment": {"words": []}, "signal": {"level_dbfs": -20.0}},
        **changes,
    }  # fmt: skip


def test_a_correction_is_synced_before_it_is_acknowledged(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    ledger = CorrectionLedger(tmp_path)
    line = ledger.put(request("first", text="  the\ndog "))
    assert synced[-1] == (tmp_path / CORRECTIONS).stat().st_size > 0
    assert (line.revision, line.fields.text) == (1, "the dog")
    assert CorrectionLedger(tmp_path).latest() == {SEGMENT: line}


def test_a_revision_that_was_not_seen_is_a_conflict_and_an_operation_counts_once(tmp_path: Path) -> None:
    anna, ben = CorrectionLedger(tmp_path), CorrectionLedger(tmp_path)
    first = anna.put(request("by-anna", text="a fox"))
    with pytest.raises(CorrectionConflict) as conflict:
        ben.put(request("by-ben", text="a box"))
    assert conflict.value.correction == first
    assert anna.put(request("by-anna", text="a fox")) == first  # its answer was lost: it is sent again
    second = ben.put(request("by-ben2", 1, text="a box", speaker="ben"))
    anna.refresh()
    assert anna.latest() == {SEGMENT: second}
    assert len((tmp_path / CORRECTIONS).read_bytes().splitlines()) == 2


def test_writers_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    ledgers = [CorrectionLedger(tmp_path) for _ in range(4)]

    def write(number: int) -> None:
        for count in range(25):
            identity = SegmentIdentity("d", f"{number}-{count}.wav", 0, 1000)
            ledgers[number % 4].put(request(f"{number}-{count}", 0, identity, keep=True))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_corrections(tmp_path)) == 200


def test_a_line_that_a_kill_cut_short_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    CorrectionLedger(tmp_path).put(request("first", text="a"))
    path = tmp_path / CORRECTIONS
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    ledger = CorrectionLedger(tmp_path)
    assert len(ledger.latest()) == 1
    ledger.put(request("second", 1, text="b"))
    assert [json.loads(line)["fields"] for line in path.read_bytes().splitlines()] == [
        {"text": "a"},
        {"text": "b"},
    ]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: Any) -> None:
    ledger = CorrectionLedger(tmp_path)
    ledger.put(request("first", text="a"))
    before = (tmp_path / CORRECTIONS).read_bytes()

    def refuse(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        ledger.put(request("second", 1, text="b"))
    assert (tmp_path / CORRECTIONS).read_bytes() == before
    assert ledger.latest()[SEGMENT].revision == 1


@pytest.mark.parametrize("line", ["{}", "not JSON", json.dumps({"operation": "first", "revision": 3})])
def test_a_damaged_line_is_named_and_never_skipped(tmp_path: Path, line: str) -> None:
    CorrectionLedger(tmp_path).put(request("first", text="a"))
    with (tmp_path / CORRECTIONS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DamagedFile, match="(?s)line 2: no correction.*mend that line"):
        read_corrections(tmp_path)


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / CORRECTIONS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        CorrectionLedger(tmp_path).put(request("first", text="a"))
    assert (tmp_path / "elsewhere").read_text() == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"start_s": 1.0}, {"start_s": 2.0, "end_s": 1.0}, {"start_s": 1.0, "end_s": 1.01},
        {"start_s": -1.0, "end_s": 1.0}, {"end_s": float("nan"), "start_s": 0.0}, {"speaker": " "}, {"text": "\ud800"},
        {"text": "a" * 20_001}, {"other": 1},
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CorrectedFields(**fields)


def test_a_row_is_corrected_and_taken_back(tmp_path: Path) -> None:
    ledger = CorrectionLedger(tmp_path)
    assert corrected_row(row(), None) == row()
    first = ledger.put(request("first", text="the dog", speaker="ben", start_s=0.75, end_s=2.25))
    corrected = corrected_row(row(), first)
    assert (corrected["text"], corrected["text_source"], corrected["speaker"]) == ("the dog", "person", "ben")
    assert (corrected["start_s"], corrected["end_s"], corrected["duration_s"]) == (0.75, 2.25, 1.5)
    # the times of words are of another text and span, and its recognizers wrote another text
    assert corrected["measured"] == {"signal": {"level_dbfs": -20.0}} and "text_recognizers" not in corrected
    assert identity_of(corrected) == identity_of(row()) == SEGMENT
    assert corrected_row(corrected, first) is corrected
    rejected = corrected_row(corrected, ledger.put(request("second", 1, keep=False)))
    assert rejected["dropped"]["kind"] == "rejected by a person" and rejected["text"] == "a dog"
    undone = corrected_row(rejected, ledger.put(request("third", 2)))
    assert undone == row(measured={"signal": {"level_dbfs": -20.0}})


def test_an_accepted_row_that_rules_dropped_is_kept_and_dropped_again_when_taken_back(tmp_path: Path) -> None:
    drop = {"step": "signal", "rule": "r", "kind": "too quiet", "value": 1, "threshold": 2, "reason": "1"}
    ledger = CorrectionLedger(tmp_path)
    accepted = corrected_row(row(dropped=drop), ledger.put(request("first", keep=True)))
    assert "dropped" not in accepted
    assert corrected_row(accepted, ledger.put(request("second", 1)))["dropped"] == drop


def test_a_renamed_recording_keeps_its_corrections_and_another_of_equal_content_gets_none(
    tmp_path: Path,
) -> None:
    ledger = CorrectionLedger(tmp_path)
    line = ledger.put(request("first", text="the dog"))
    renamed = CorrectionIndex(ledger.latest(), ["b.wav"])
    assert renamed.of_segment("d1", "b.wav", 0.5, 2.5) == line
    both = CorrectionIndex(ledger.latest(), ["a.wav", "b.wav"])
    assert (
        both.of_segment("d1", "a.wav", 0.5, 2.5) == line and both.of_segment("d1", "b.wav", 0.5, 2.5) is None
    )
    assert both.of_segment("d1", "a.wav", 0.5, 2.4) is None
    assert both.without_segment({SEGMENT}) == [] and both.without_segment(set()) == [line]
    (aside,) = unmatched_rows([line], {"a.wav": "d2"})
    assert (
        aside["kind"] == "correction without a segment"
        and "'the dog' from 0.500 to 2.500 s" in aside["reason"]
    )


def test_stages_read_segments_with_the_corrections_that_the_annotation_lacks(tmp_path: Path) -> None:
    drop = {"step": "signal", "rule": "r", "kind": "too quiet", "value": 1, "threshold": 2, "reason": "1"}
    write_jsonl(
        tmp_path / "segments.jsonl", [row(), row(id="b", start_s=3.0, end_s=4.0), {"id": "of no annotation"}]
    )
    write_jsonl(
        tmp_path / "filtered.jsonl",
        [
            row(id="c", start_s=5.0, end_s=6.0, dropped=drop),
            row(id="e", start_s=7.0, end_s=8.0, dropped=drop),
        ],
    )
    assert correction_digests(tmp_path / "segments.jsonl") == []
    ledger = CorrectionLedger(tmp_path)
    ledger.put(request("first", text="the dog", start_s=0.6, end_s=2.4))
    ledger.put(request("second", identity=SegmentIdentity("d1", "a.wav", 3000, 4000), keep=False))
    ledger.put(
        request("third", identity=SegmentIdentity("d1", "a.wav", 5000, 6000), keep=True, speaker="eve")
    )
    segments, bad = read_segments(tmp_path / "segments.jsonl")
    assert [(s.id, s.text, s.speaker, s.start_s) for s in segments] == [
        ("a--00000", "the dog", "ann", 0.6), ("c", "a dog", "eve", 5.0),
    ]  # fmt: skip
    assert [(item.id, item.kind) for item in bad] == [
        ("b", "rejected by a person"),
        ("", "malformed segment"),
    ]
    (before,) = correction_digests(tmp_path / "segments.jsonl")
    ledger.put(request("fourth", 1, text="the dogs"))
    assert correction_digests(tmp_path / "segments.jsonl") != [before]
