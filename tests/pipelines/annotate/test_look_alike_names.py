"""Transcripts find their recordings, and speakers are one, whatever Unicode characters spell their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.annotate.input.sources import collect_recordings, match_sources

NFC, NFD = "Zo\u00eb", "Zoe\u0308"


@pytest.mark.parametrize(
    ("on_disk", "in_table"), [(NFC, NFD), (NFD, NFC), (NFC, "Zo\u200b\u00eb"), (NFD, NFD)]
)
def test_a_name_in_other_characters_is_the_same_file_and_speaker(
    tmp_path: Path, on_disk: str, in_table: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"{on_disk}.wav").write_bytes(b"RIFF")
    table = tmp_path / "t.csv"
    table.write_text(
        f"path,text,speaker\n{in_table}.wav,caf\u0065\u0301 \u00adbar,{in_table}\n", encoding="utf-8"
    )
    inputs = collect_recordings([str(tmp_path / "in")], tmp_path / "fetched", lambda name: None)
    sources = match_sources(inputs, {item.path: "digest" for item in inputs.files}, str(table), None)
    assert not sources.orphans
    assert [(source.metadata.text, source.metadata.speaker) for source in sources.recordings] == [
        ("caf\u00e9 bar", NFC)
    ]


def test_two_files_that_look_the_same_are_told_apart_by_their_characters(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in (NFC, NFD):
        (tmp_path / "in" / f"{name}.wav").write_bytes(b"RIFF")
    table = tmp_path / "t.csv"
    table.write_text(f"path,text\n{NFC}.wav,one\n{NFD}.wav,two\n", encoding="utf-8")
    inputs = collect_recordings([str(tmp_path / "in")], tmp_path / "fetched", lambda name: None)
    if len(inputs.files) != 2:
        pytest.skip("this file system takes both names for one")
    sources = match_sources(inputs, {item.path: "digest" for item in inputs.files}, str(table), None)
    assert {source.name: source.metadata.text for source in sources.recordings} == {
        f"{NFC}.wav": "one",
        f"{NFD}.wav": "two",
    }
