"""Files whose names a table writes in composed letters, and the disk in decomposed ones, or the other way round."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from audiollm.audio import load, probe, save
from audiollm.audio.streams import stream_mono
from audiollm.commands.cli import build_app
from audiollm.evaluate.listening.asr import read_recordings
from audiollm.files.spelled_paths import as_spelled

FORMS = [("NFC", "NFD"), ("NFD", "NFC")]


def spell(form: str, text: str) -> str:
    return unicodedata.normalize(form, text)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stored", "written"), FORMS)
def test_a_name_that_looks_the_same_is_the_file(tmp_path: Path, stored: str, written: str) -> None:
    file = tmp_path / spell(stored, "é") / spell(stored, "Straßenlärm ö.wav")
    save(file, 0.1 * torch.ones(1, 800), 8000)
    name = tmp_path / spell(written, "é") / spell(written, "Straßenlärm ö.wav")
    assert as_spelled(name) == file and as_spelled(file) == file
    assert load(name).num_samples == probe(name).num_samples == 800
    assert sum(piece_1N.shape[1] for piece_1N in stream_mono(name, 8000)) == 800
    assert as_spelled(name.with_name("ä")) == name.with_name("ä")


@pytest.mark.parametrize(("stored", "written"), FORMS)
def test_tables_name_files_in_either_form(tmp_path: Path, stored: str, written: str) -> None:
    save(tmp_path / spell(stored, "Grüße.wav"), 0.1 * torch.ones(1, 800), 8000)
    table = tmp_path / "list.csv"
    table.write_text(f"path,text\n{spell(written, 'Grüße.wav')},hello\n")
    assert load(read_recordings(table, "de", None, lambda _: None)[0].path).num_samples == 800
    rows, out = tmp_path / "list.json", tmp_path / "samples.jsonl"
    rows.write_text(json.dumps({"data": [{"path": spell(written, "Grüße.wav"), "text": "hello"}]}))
    answer = CliRunner().invoke(build_app(), ["convert", "jsonl", str(rows), "-o", str(out), "--task", "asr"])
    assert answer.exit_code == 0, answer.output
    sample = json.loads(out.read_text())
    assert spell(stored, "Grüße.wav") in json.dumps(sample, ensure_ascii=False)
