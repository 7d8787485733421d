"""Recordings with texts beside them: LJSpeech's table, tables and JSON lines with named columns, side files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from audiollm.audio import AUDIO_EXTENSIONS, AudioError, find_audio
from audiollm.data.chat.tasks import FieldValue
from audiollm.data.convert.recordings import is_recording, recording_part
from audiollm.data.convert.request import (
    ConversionRequest,
    SourceRows,
    bad_row,
    bad_rows_sample,
    row_id,
)
from audiollm.data.records.sample import Sample
from audiollm.data.tables.columns import (
    USUAL_COLUMNS,
    ColumnFinder,
    columns_note,
    find_columns,
    is_missing,
    plain_name,
)
from audiollm.data.tables.rows import RowList, read_json_rows, rows_of_table
from audiollm.data.tables.table import BadRow, Table, numbered_table, parse_table, separator_of
from audiollm.data.tables.text_lines import NOT_UTF8, TextLines, decode_text, read_lines
from audiollm.errors import BadSample, ConfigError
from audiollm.files.atomic import is_unicode
from audiollm.files.set_aside import NAME_IS_NOT_UTF8
from audiollm.files.spelled_paths import as_spelled

SIDE_FILES = (".txt", ".lab", ".json")
"""Extensions of files with the text of `a.wav`, in order of search: `a.txt`, `a.lab`, `a.json`."""
KNOWN_COLUMNS = frozenset(name for names in USUAL_COLUMNS.values() for name in names)
_LJSPEECH_ID = re.compile(r"LJ\d+(-\d+)?")
_TIMED_LABEL = re.compile(r"\s*(\d+)\s+(\d+)\s+\S.*")
"""A line of HTS's labels: beginning and end in units of 100 ns, and the phone."""
_CONTEXT_LABEL = re.compile(r"\S+\^\S+-\S+\+\S+=\S+")
"""A phone with its neighbours, as HTS's labels have it."""
_MIN_LABEL_UNITS = 1000
"""Least end of a label that stands alone: 0.1 ms. "0 10 20" is a text."""


def ljspeech(request: ConversionRequest) -> SourceRows:
    """LJSpeech's `metadata.csv` (`id|text|normalized text`), or a table with a header that names its columns.

    Columns of a table without a header are named by their numbers: `--columns id=1,text=2,speaker=3`.
    """
    source = request.source / "metadata.csv" if request.source.is_dir() else request.source
    if source.suffix.lower() in (".json", ".jsonl", ".ndjson"):
        raise ConfigError(
            "is JSON, and ljspeech reads tables", str(source), "convert jsonl (or nemo) reads its lines"
        )
    text = read_lines(source)
    lines = [line for line in text.lines if line.strip()]
    is_numbered = bool(request.columns) and all(column.isdigit() for column in request.columns.values())
    separator = separator_of(lines, source, KNOWN_COLUMNS) if lines else ","
    if lines and "|" in lines[0] and not _is_header(lines[0].split(separator)):
        separator = "|"  # a text of LJSpeech may hold as many commas
    if (
        lines
        and not _is_header(lines[0].split(separator))
        and (is_numbered or (separator == "|" and not request.columns))
    ):
        return _headerless(request, source, text, separator, is_numbered)
    table = parse_table(source, text, KNOWN_COLUMNS)
    columns = find_columns(table.columns, request.columns, str(source))
    if "audio" not in columns and "id" in columns and (request.audio / "wavs").is_dir():
        return _named_by_id(request, table, columns)
    return _named_rows(request, source, rows_of_table(table), request.columns)


def json_lines(request: ConversionRequest) -> SourceRows:
    """JSON lines, or a JSON array, of objects with `audio` and `text`, and NeMo's manifests: `audio_filepath`, `text`,
    `offset` and `duration`, the span of the recording."""
    rows = read_json_rows(request.source)
    return _named_rows(request, request.source, rows, request.columns)


def folder(request: ConversionRequest) -> SourceRows:
    """Every sound file of a folder with the text beside it; a `.json` may hold more fields than `text`."""
    try:
        paths, _ = find_audio(request.source)
    except AudioError as error:
        raise ConfigError(error.reason, str(request.source), "give a folder of sound files") from error
    return SourceRows(len(paths), (_side_sample(request, path) for path in paths))


def recorded_sample(
    request: ConversionRequest, place: str, id: str, fields: Mapping[str, str], path: Any
) -> Sample | BadSample:
    """A row's sample. Of the fields, `start_s` and `end_s`, or NeMo's `offset` and `duration`, are the span.

    Args:
        path: that of the recording, or stored sound.
    """
    wrong = [name for name, value in {"id": id, "path": str(path), **fields}.items() if not is_unicode(value)]
    if wrong:
        return BadSample(place, "", f"{wrong[0]} is not UTF-8: convert the file", "text encoding")
    values: dict[str, FieldValue] = dict(fields)
    speaker = fields.get("speaker")
    try:
        start_s, end_s = _read_row_span(fields)
        if is_recording(path):
            values["audio"] = recording_part(request, id, path)
        elif not path or is_missing(path):
            raise ValueError("names no recording")
        else:
            named = None if is_missing(speaker, is_name=True) else speaker
            values["audio"] = request.audio_part(str(path), start_s, end_s, named)
    except ValueError as error:
        return bad_row(place, id, first_line(error))
    return request.sample(place, id, values)


def first_line(error: ValueError) -> str:
    """The first line of an error."""
    return str(error).split("\n")[0]


# Private: tables


def _is_header(cells: Sequence[str]) -> bool:
    header_names = KNOWN_COLUMNS - {"id", "key", "set", "clip"}
    return any(plain_name(cell.strip('"')) in header_names for cell in cells)


def _headerless(
    request: ConversionRequest, source: Path, text: TextLines, separator: str, is_numbered: bool
) -> SourceRows:
    """A table without a header: LJSpeech's, or one whose columns are named by numbers."""
    columns = dict(request.columns) if is_numbered else {"id": "1", "text": "2"}
    widths = [line.count(separator) + 1 for line in text.lines if line.strip()]
    width = max(map(int, columns.values()))
    if is_numbered:
        table = numbered_table(source, text, separator, max(width, int(median(widths))))
        if "audio" in columns:
            return _named_rows(request, source, rows_of_table(table), columns)
        if "id" not in columns:
            raise ConfigError(
                "no column of audio files", "--columns", "name it by its number: id=1 or audio=1"
            )
        return _named_by_id(request, table, columns)
    if max(widths) > 2:
        _check_is_ljspeech(source, text.lines)
    return SourceRows(len(widths), _ljspeech_rows(request, source, text), tuple(text.notes))


def _check_is_ljspeech(source: Path, lines: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: the third column may be anything, as it is normalised text in LJSpeech's own file alone.
    """
    rows = [line.split("|") for line in lines if line.count("|") > 1]
    are_ids = all(_LJSPEECH_ID.fullmatch(row[0].strip()) for row in rows)
    are_texts = median(len(row[2].strip()) / max(1, len(row[1].strip())) for row in rows) > 0.5
    if are_ids and are_texts:
        return
    third = rows[0][2].strip()
    raise ConfigError(
        f"the third column ({third:.40}) may be a normalised text, a speaker, or something else",
        f"{source}:1",
        "name the columns by number: --columns id=1,text=2,speaker=3, or text=3 where it is the normalised text; "
        "or give the file a header, such as id|text|speaker",
    )


def _ljspeech_rows(request: ConversionRequest, source: Path, text: TextLines) -> Iterator[Sample | BadSample]:
    for number, line in enumerate(text.lines, start=1):
        if not line.strip():
            continue
        cells = line.split("|")
        place, name = f"{source}:{number}", cells[0].strip()
        if len(cells) < 2:
            yield bad_row(place, name, "has no text: id|text|normalized text is expected")
            continue
        words = next((cell.strip() for cell in reversed(cells[1:3]) if cell.strip()), "")
        yield recorded_sample(
            request, place, _make_path_id(name), {"text": words}, _recording_of(request, name)
        )


def _recording_of(request: ConversionRequest, name: str) -> str:
    """The file of an id of LJSpeech's layout; a name that is a file already stays."""
    if Path(name).suffix.lower() in AUDIO_EXTENSIONS:
        return name
    files = [
        path
        for path in (f"wavs/{name}.wav", f"wavs/{name}.flac")
        if as_spelled(request.audio / path).exists()
    ]
    return files[0] if files else f"wavs/{name}.wav"


def _named_by_id(request: ConversionRequest, table: Table, columns: Mapping[str, str]) -> SourceRows:
    """The rows of a table with ids in the place of paths, as LJSpeech's layout has them."""

    def results() -> Iterator[Sample | BadSample]:
        for place, row in rows_of_table(table).rows:
            if isinstance(row, BadRow):
                yield bad_rows_sample(place, row)
                continue
            fields = {field: row[column].strip() for field, column in columns.items()}
            id = fields.pop("id")
            yield recorded_sample(request, place, _make_path_id(id), fields, _recording_of(request, id))

    return SourceRows(len(table.rows), results(), (*table.notes, columns_note(columns, table.columns)))


def _named_rows(
    request: ConversionRequest, source: Path, rows: RowList, named: Mapping[str, str]
) -> SourceRows:
    """The rows of a list whose columns are fields.

    Args:
        named: fields and their columns where these do not have the usual names.
    """
    finder = ColumnFinder(rows.columns, named, str(source))
    if rows.columns and "audio" not in finder.columns:
        usual = ", ".join(USUAL_COLUMNS["audio"])
        raise ConfigError(
            f"no column of audio files among {', '.join(rows.columns)}",
            str(source),
            f"name it (--columns audio=NAME), or use one of the usual names: {usual}",
        )

    def results() -> Iterator[Sample | BadSample]:
        for place, row in rows.rows:
            if isinstance(row, BadRow):
                yield bad_rows_sample(place, row)
                continue
            columns = finder.of_row(row)
            path = row.get(columns.get("audio", ""))
            path = path.strip() if isinstance(path, str) else path
            fields = {
                field: _cell_as_text(row[column]) for field, column in columns.items() if field != "audio"
            }
            id = fields.pop("id", "")
            if is_missing(id, is_name=True):
                id = _id_of_span(path, fields) or row_id(source, place)
            yield recorded_sample(request, place, id, fields, path)

    return SourceRows(len(rows.rows), results(), (*rows.notes, finder.note()))


def _cell_as_text(value: Any) -> str:
    """A cell as text; nothing of what is no text or number, such as a list."""
    if is_missing(value) or isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return str(value).strip()


def _read_row_span(fields: Mapping[str, str]) -> tuple[float, float | None]:
    """
    Raises:
        ValueError: a number is expected.
    """
    if any(fields.get(name) for name in ("start_s", "end_s")):
        end_s = fields.get("end_s")
        return float(fields.get("start_s") or 0.0), float(end_s) if end_s else None
    offset, duration = fields.get("offset"), fields.get("duration")
    if not offset:
        return 0.0, None
    return float(offset), float(offset) + float(duration) if duration else None


def _id_of_span(path: Any, fields: Mapping[str, str]) -> str:
    """An id for a row without one: the recording's name, with the beginning of a span, of which it may have several."""
    name = "" if is_recording(path) else _make_path_id(str(path or ""))
    start = fields.get("start_s") or fields.get("offset")
    return f"{name}@{start}" if name and start else name


def _make_path_id(path: str) -> str:
    """An id from a path: without its extension, and for one from elsewhere without its folders."""
    place = Path(path)
    if not place.name:
        return ""
    bare = place.with_suffix("") if place.suffix.lower() in AUDIO_EXTENSIONS else place
    return bare.name if place.is_absolute() or ".." in place.parts else bare.as_posix()


# Private: side files


def _side_sample(request: ConversionRequest, path: Path) -> Sample | BadSample:
    if not is_unicode(str(path)):
        return BadSample(str(path), "", NAME_IS_NOT_UTF8, "text encoding")
    relative = path.relative_to(request.source)
    sides = [side for side in map(path.with_suffix, SIDE_FILES) if side.is_file()]
    name = _make_path_id(str(relative))
    if not sides:
        return bad_row(str(path), name, f"has no text beside it ({', '.join(SIDE_FILES)})")
    for side in sides:
        try:
            text, note = decode_text(side.read_bytes(), side)
            if note or not is_unicode(text):
                raise ConfigError(NOT_UTF8, str(side))
            text = text.strip()
            if side.suffix != ".json" and _are_labels(text):
                continue
            fields = _side_fields(text) if side.suffix == ".json" else {"text": text}
        except ConfigError:
            return BadSample(str(side), name, "is not UTF-8: convert it", "text encoding")
        except (OSError, ValueError) as error:
            return bad_row(str(side), name, f"cannot be read ({error})")
        return recorded_sample(request, str(path), fields.pop("id", "") or name, fields, str(path.resolve()))
    reason = (
        "holds HTS's labels (phones with times), and no text: give the text in a .txt beside the recording"
    )
    return bad_row(str(sides[0]), name, reason)


def _are_labels(text: str) -> bool:
    """Return whether a text is HTS's labels: phones in their context, or times that go on from line to line."""
    lines = text.splitlines()
    if lines and all(_CONTEXT_LABEL.search(line) for line in lines):
        return True
    matches = [_TIMED_LABEL.fullmatch(line) for line in lines]
    spans = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    if not spans or len(spans) != len(lines) or any(end <= start for start, end in spans):
        return False
    return all(end == start for (_, end), (start, _) in pairwise(spans)) and (
        len(spans) > 1 or spans[0][1] >= _MIN_LABEL_UNITS
    )


def _side_fields(text: str) -> dict[str, str]:
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError("an object with a text is expected")
    return {str(key): str(value) for key, value in record.items() if isinstance(value, str | int | float)}
