"""The one reader of tables: no row is swallowed, whatever the export; and names of columns and splits."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiollm.data.tables.columns import find_columns, is_missing
from audiollm.data.tables.rows import checked_rows, read_rows
from audiollm.data.tables.splits import HELD_OUT_NAMES, TRAINED_NAMES, holds_out, is_of_split, split_of
from audiollm.data.tables.table import BadRow, read_table
from audiollm.errors import ConfigError

KNOWN = ("path", "text", "speaker")


def cells(path: Path, content: str | bytes) -> list[list[str] | str]:
    """The cells of each row, or the reason why it is none."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = read_table(path, KNOWN).rows
    return [row.cells.reason if isinstance(row.cells, BadRow) else list(row.cells.values()) for row in rows]


# ------------------------------------------------------------------------------------------ quotation marks


@pytest.mark.parametrize("separator", ["\t", ",", ";", "|"])
def test_a_mark_that_another_row_closes_swallows_none(tmp_path: Path, separator: str) -> None:
    """`"a begins` and, two rows on, `c ends"`: together they are a well-formed cell of three lines."""
    rows = [
        ["a.wav", '"a begins', "ann"],
        ["b.wav", "b", "ann"],
        ["c.wav", 'c ends"', "ben"],
        ["d.wav", "d", "ben"],
    ]
    lines = [separator.join(row) for row in [["path", "text", "speaker"], *rows]]
    assert cells(tmp_path / "t.csv", "\n".join(lines)) == rows


def test_where_no_file_names_tell_a_row_the_span_is_refused_with_its_lines(tmp_path: Path) -> None:
    content = 'key,text\n1,one\n2,"two begins\n3,three\n4,"ends\n5,five"\n6,six\n'
    rows = cells(tmp_path / "t.csv", 'key,text\n1,one\n2,"two begins\n3,three\n4,ends"\n6,six\n')
    assert rows[0] == ["1", "one"] and rows[-1] == ["6", "six"]
    assert len(rows) == 5 and all("opens on line 3 and closes on line 5" in str(row) for row in rows[1:4])
    assert len(cells(tmp_path / "t.csv", content)) == 6


def test_a_cell_of_several_lines_stays_one(tmp_path: Path) -> None:
    content = (
        'path,text,speaker\na.wav,"one, two\nthree, four",ann\n'
        'b.wav,"hello\n\nthere, ""friend"", x",ben\nc.wav,plain,ann\n'
    )
    assert cells(tmp_path / "t.csv", content) == [
        ["a.wav", "one, two\nthree, four", "ann"],
        ["b.wav", 'hello\n\nthere, "friend", x', "ben"],
        ["c.wav", "plain", "ann"],
    ]
    assert [row.line for row in read_table(tmp_path / "t.csv").rows] == [2, 4, 7]


cell = st.text(st.sampled_from('ab ,;|\t"\nü'), max_size=8)


@given(
    st.lists(st.tuples(cell, cell), min_size=1, max_size=6), st.sampled_from([",", ";", "\t"]), st.booleans()
)
def test_what_a_writer_of_csv_quotes_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str]], separator: str, quotes_all: bool
) -> None:
    """Files of `csv.writer`: what it quotes is read back, or refused where it looks like rows of a broken file."""
    rows = [[f"{number}.wav", first, f"x{second}"] for number, (first, second) in enumerate(texts)]
    file = io.StringIO(newline="")
    writer = csv.writer(
        file,
        delimiter=separator,
        quoting=csv.QUOTE_ALL if quotes_all else csv.QUOTE_MINIMAL,
        lineterminator="\n",
    )
    writer.writerows([["path", "text", "speaker"], *rows])
    folder = tmp_path_factory.mktemp("t")
    assert cells(folder / "t.csv", file.getvalue()) == rows


@given(st.lists(st.text(st.sampled_from('ab "'), min_size=1, max_size=8), min_size=1, max_size=8))
def test_as_many_rows_as_lines_whatever_the_marks(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    """Tab-separated lines of file and text, as Common Voice has them, with marks anywhere."""
    lines = [f"{number}.mp3\t{text}" for number, text in enumerate(texts)]
    rows = cells(tmp_path_factory.mktemp("t") / "t.tsv", "\n".join(["path\tsentence", *lines]))
    assert [row[0] for row in rows] == [f"{number}.mp3" for number in range(len(texts))]


# ------------------------------------------------------------------------------- encodings, lines, separators

GRUSS = [["a.wav", "Grüße, Ann"], ["b.wav", "zwei"]]


@pytest.mark.parametrize(
    ("name", "encoding", "content"),
    [
        ("excel_de.csv", "cp1252", "Path;Text\r\na.wav;Grüße, Ann\r\nb.wav;zwei\r\n"),
        ("excel_bom.csv", "utf-8-sig", "Path;Text\r\na.wav;Grüße, Ann\r\nb.wav;zwei\r\n"),
        ("excel_sep.csv", "utf-8", "sep=;\r\nPath;Text\r\na.wav;Grüße, Ann\r\nb.wav;zwei\r\n"),
        ("unicode_text.txt", "utf-16", "path\ttext\r\na.wav\tGrüße, Ann\r\nb.wav\tzwei\r\n"),
        ("no_mark.csv", "utf-16-le", 'path,text\na.wav,"Grüße, Ann"\nb.wav,zwei\n'),
        ("no_mark.csv", "utf-16-be", 'path,text\na.wav,"Grüße, Ann"\nb.wav,zwei\n'),
        ("wide.csv", "utf-32", 'path,text\na.wav,"Grüße, Ann"\nb.wav,zwei\n'),
        ("mac.csv", "utf-8", 'path,text\ra.wav,"Grüße, Ann"\rb.wav,zwei\r'),
        ("pipes.csv", "utf-8", "path|text\na.wav|Grüße, Ann\nb.wav|zwei"),
        ("commas.tsv", "utf-8", 'path,text\na.wav,"Grüße, Ann"\nb.wav,zwei\n'),
        ("pandas.csv", "utf-8", ',path,text\n0,a.wav,"Grüße, Ann"\n1,b.wav,zwei\n'),
        ("spaces.csv", "utf-8", 'path, text\na.wav, "Grüße, Ann"\nb.wav,zwei\n'),
        ("empty_columns.csv", "utf-8", 'path,text,,\na.wav,"Grüße, Ann",,\n,,,\nb.wav,zwei,,\n'),
    ],
)
def test_exports_are_read(tmp_path: Path, name: str, encoding: str, content: str) -> None:
    assert cells(tmp_path / name, content.encode(encoding)) == GRUSS
    notes = read_table(tmp_path / name).notes
    assert bool(notes) is (encoding == "cp1252"), "a guessed encoding is said"


def test_names_of_columns_tell_the_separator_where_every_line_has_two(tmp_path: Path) -> None:
    content = "path,text,tags;of;the;clip\na.wav,one,w;x;y;z\n"
    assert cells(tmp_path / "t.csv", content) == [["a.wav", "one", "w;x;y;z"]]


def test_the_end_mark_of_dos_is_no_row(tmp_path: Path) -> None:
    assert cells(tmp_path / "t.csv", "path,text\r\na.wav,one\r\n\x1a") == [["a.wav", "one"]]


def test_a_broken_line_among_utf8_is_refused_alone(tmp_path: Path) -> None:
    content = "path,text\na.wav,für\n".encode() + b"b.wav,caf\xe9\nc.wav,x\n"
    assert cells(tmp_path / "t.csv", content) == [
        ["a.wav", "für"], "is not UTF-8: convert the file", ["c.wav", "x"],
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["cp1251", "gb18030", "shift-jis"])
def test_an_encoding_of_another_script_is_not_taken_for_a_western_one(tmp_path: Path, encoding: str) -> None:
    text = {"cp1251": "добрый день", "gb18030": "你好世界", "shift-jis": "こんにちは世界"}[encoding]
    with pytest.raises(ConfigError, match="neither UTF-8, UTF-16 nor Windows-1252"):
        cells(tmp_path / "t.csv", f"path,text\na.wav,{text}\n".encode(encoding))


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    for content, reason in (
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("path,text,text\n", "'text' occurs twice"),
    ):
        with pytest.raises(ConfigError, match=reason):
            cells(tmp_path / "t.csv", content)
    (short,) = cells(tmp_path / "t.csv", "path,text\na.wav\n")
    assert str(short).startswith("1 fields for 2 columns")
    (beyond,) = cells(tmp_path / "t.csv", "path,text,\na.wav,one, two\n")
    assert beyond == "cell 3 (two) stands under no column"


# --------------------------------------------------------------------------------------------------- lists


def test_json_lists(tmp_path: Path) -> None:
    rows = [{"path": "ä.wav"}, {"path": "b.wav", "text": "x"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.jsonl").write_bytes("\r\n".join(map(json.dumps, rows)).encode("utf-16"))
    for name in ("a.json", "b.jsonl"):
        listed = checked_rows(tmp_path / name)
        assert [values for _, values in listed.rows] == rows and listed.columns == ["path", "text"]
    (tmp_path / "b.jsonl").write_text('{"path": "a.wav"}\n7\n{\n')
    assert [row.values for row in read_rows(tmp_path / "b.jsonl").rows][1] == BadRow("no object")
    with pytest.raises(ConfigError, match=r"b\.jsonl:2  no object"):
        checked_rows(tmp_path / "b.jsonl")


@pytest.mark.parametrize("key", ["data", "samples", "items", "rows"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_in_an_object_is_read(tmp_path: Path, key: str, indent: int | None) -> None:
    path = tmp_path / "list.json"
    rows = [{"id": "a", "tags": ["x"]}, {"id": "b"}]
    path.write_text(json.dumps({"version": 1, "languages": ["en"], key: [*rows, 3]}, indent=indent))
    listed = read_rows(path)
    assert [row.values for row in listed.rows[:2]] == rows and listed.columns == ["id", "tags"]
    assert listed.rows[1].place == f"{path}:{key}[1]"
    assert isinstance(listed.rows[2].values, BadRow)


def test_an_object_that_is_a_row_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    row = {"messages": [{"role": "user", "content": "x"}], "items": ["a"]}
    path.write_text(json.dumps(row))
    assert [row.values for row in read_rows(path).rows] == [row]
    path.write_text(f"{json.dumps({'data': [{'id': 'a'}]})}\n" * 2)
    assert len(read_rows(path).rows) == 2
    path.write_text(json.dumps(row, indent=2))
    with pytest.raises(ConfigError, match="an object, and no list of rows"):
        read_rows(path)


def test_columns_are_named_in_any_capitals() -> None:
    names = ["Client ID", "FILE-NAME", "Sentence", "up_votes"]
    assert find_columns(names, {}, "t.tsv") == {
        "audio": "FILE-NAME", "text": "Sentence", "speaker": "Client ID", "up_votes": "up_votes",
    }  # fmt: skip
    assert find_columns(names, {"text": "UP_VOTES"}, "t.tsv")["text"] == "up_votes"
    with pytest.raises(ConfigError, match="did you mean 'Sentence'"):
        find_columns(names, {"text": "Sentense"}, "t.tsv")


def test_nan_is_no_name() -> None:
    assert all(
        is_missing(value, is_name=True)
        for value in (None, float("nan"), "", " ", "nan", "NaN", "None", "<NA>")
    )
    assert not any(is_missing(value, is_name=True) for value in ("Nan", "Ann", "0", 0, "nano"))
    assert is_missing("nan") and not is_missing("None"), "None may be a word of a text"


# -------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize(
    "name",
    [
        *HELD_OUT_NAMES, "Evaluation", "dev-clean", "test_prefs", "hold-out", "held_out", "eval2", "TEST", "train_dev",
        "asr-test", "validation[:10%]",
    ],
)  # fmt: skip
def test_held_out_names(name: str) -> None:
    assert holds_out(name) and split_of(name) == "test"


@pytest.mark.parametrize(
    ("name", "split", "is_of"),
    [
        ("evaluation", "test", True),
        ("dev-clean", "test", True),
        ("dev-clean", "dev-clean", True),
        ("train_sft", "train", True),
        ("train", "test", False),
        ("dev", "validation", False),
        ("latest", "test", False),
        ("latest", "latest", True),
        ("", "test", False),
        (None, "test", False),
    ],
)
def test_a_split_is_of_its_own_name_and_of_its_kind(name: str | None, split: str, is_of: bool) -> None:
    assert is_of_split(name, split) is is_of


@pytest.mark.parametrize("name", [*TRAINED_NAMES, "train-clean-100", "Train_SFT", "training set"])
def test_trained_names(name: str) -> None:
    assert not holds_out(name) and split_of(name) == "train"


@pytest.mark.parametrize("name", ["validated", "other", "contest", "latest", "7", "trian", "développement"])
def test_other_names_are_refused_with_those_that_are_known(name: str) -> None:
    assert not holds_out(name)
    with pytest.raises(ValueError, match=r"known: train, training, .*evaluation, holdout"):
        split_of(name)
