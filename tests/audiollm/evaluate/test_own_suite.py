"""A suite of a user's own, named as `module:function`: the example of docs/extending.md."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from audiollm.audio import save
from audiollm.commands.cli import main

GUIDE = Path(__file__).parents[3] / "docs" / "extending.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    section = GUIDE.read_text(encoding="utf-8").partition("## An evaluation suite")[2]
    (tmp_path / "my_parts.py").write_text(re.findall(r"```python\n(.*?)```", section, flags=re.S)[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["audiollm", "evaluate", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_suite_of_the_guide_scores_recordings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder / "recordings" / "half.wav", torch.tensor([[1.0, 0.5] * 800]), 16_000)
    save(folder / "recordings" / "none.wav", torch.full((1, 1600), 0.25), 16_000)
    assert run(monkeypatch, "my_parts:clipping", "recordings", "--out", "scores", "--level", "0.9") == 0
    assert json.loads((folder / "scores" / "results.json").read_text()) == {"clipped": pytest.approx(0.25)}
    rows = [json.loads(line) for line in (folder / "scores" / "rows.jsonl").read_text().splitlines()]
    assert {row["id"]: round(row["clipped"], 3) for row in rows} == {"half.wav": 0.5, "none.wav": 0.0}
    assert "Share of samples of at least 0.9" in (folder / "scores" / "report.html").read_text()


@pytest.mark.parametrize("name", ["my_parts:clippings", "my_part:clipping"])
def test_a_suite_that_is_not_there_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(monkeypatch, name, "recordings") == 2
    said = capsys.readouterr().err
    assert name in said and "cannot be imported" in said and "package.module:function" in said
