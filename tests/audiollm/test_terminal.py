"""Tables on terminals of any width."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from audiollm.terminal import MAX_WHOLE_WIDTH, print_table

CODECS = [
    "original",
    "quickstart/train_tokenizer",
    "encodec_24khz",
    "mimi",
    "dac_44khz",
    "higgs_audio_v2_tokenizer_hf",
]


def _printed(width: int, *arguments: object, **options: object) -> str:
    console = Console(width=width, file=io.StringIO())
    print_table(console, *arguments, **options)  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("width", [60, 80, 120, 300])
@pytest.mark.parametrize("codecs", [1, 2, 4, 6])
def test_every_figure_is_whole_beside_the_name_of_its_row(width: int, codecs: int) -> None:
    draw = random.Random(codecs)
    headings = ["metric", *CODECS[:codecs]]
    rows = []
    for place in range(9):
        figures = [f"{draw.uniform(0, 1000):.4f} (n={draw.randrange(99)})" for _ in CODECS[:codecs]]
        rows.append([f"measure {place} [{place}] ↓", *figures])
    text = _printed(width, headings, rows, "music: 9 clips [all]")
    lines = text.splitlines()
    assert "…" not in text and max(map(len, lines)) <= width
    assert all(heading in text for heading in headings) and text.count("music: 9 clips [all]") == 1
    for name, *figures in rows:
        row = " ".join(line for line in lines if line.split("  ")[1:] and name in line)
        assert [figure for figure in figures if figure not in row] == []


@pytest.mark.parametrize("width", [50, 80])
def test_long_texts_go_on_in_the_next_line(width: int) -> None:
    path = "/home/" + "a_long_folder/" * 8
    rows = [
        ["short", "one"],
        ["yamnet.tflite", f"docs/models.md says where it is published; put it at {path}"],
    ]
    text = _printed(width, ["what", "remedy"], rows, figures=False)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    joined = "".join(line[len("  yamnet.tflite") :].strip() for line in text.splitlines()).replace(" ", "")
    assert path in joined and "docs/models.md" in text


def test_a_table_that_fits_is_one() -> None:
    text = _printed(80, ["a", "b"], [["1", "2" * MAX_WHOLE_WIDTH]])
    assert len([line for line in text.splitlines() if "─" in line]) == 1
