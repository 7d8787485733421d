"""Recordings with texts beside them: LJSpeech's table, other CSV and TSV, a folder with side files, lhotse's cuts."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from audiollm.audio import AudioError, find_audio
from audiollm.data.chat.tasks import FieldValue
from audiollm.data.convert.request import USUAL_COLUMNS, ConversionRequest, SourceRows, bad_row, find_columns
from audiollm.data.records.sample import Sample
from audiollm.errors import BadSample, ConfigError
from audiollm.files.atomic import is_unicode
from audiollm.files.set_aside import NAME_IS_NOT_UTF8

SIDE_FILES = (".txt", ".lab", ".json")
"""Extensions of files with the text of `a.wav`, in order of search: `a.txt`, `a.lab`, `a.json`."""


def ljspeech(request: ConversionRequest) -> SourceRows:
    """LJSpeech's `metadata.csv` (`id|text|normalized text`), or a table with a header that names its columns."""
    source = request.source / "metadata.csv" if request.source.is_dir() else request.source
    lines = _lines(source)
    head = lines[0] if lines else ""
    if "\t" in head or source.suffix == ".tsv":
        return _table(request, source, lines, "\t")
    if "|" in head and not request.columns and not _is_header(head.split("|")):
        return _ljspeech(request, source, lines)
    return _table(request, source, lines, "|" if "|" in head else ",")


def read_table(source: Path) -> tuple[list[str], list[tuple[int, dict[str, str] | BadSample]]]:
    """Read a CSV or TSV file with a header: the names of its columns, and its rows by number.

    A row with other numbers of cells, or with text that is not UTF-8, is a BadSample.

    Raises:
        ConfigError: the file cannot be read.
    """
    names, rows = _cells(source, _lines(source), "\t" if source.suffix == ".tsv" else ",")
    return names, [(number, _in_utf8(row, f"{source}: row {number}")) for number, row in rows]


def folder(request: ConversionRequest) -> SourceRows:
    """Every sound file of a folder with the text beside it; a `.json` may hold more fields than `text`."""
    try:
        paths, _ = find_audio(request.source)
    except AudioError as error:
        raise ConfigError(error.reason, str(request.source), "give a folder of sound files") from error
    return SourceRows(len(paths), (_side_sample(request, path) for path in paths))


def lhotse(request: ConversionRequest) -> SourceRows:
    """The supervisions of lhotse's cuts (JSONL, also gzipped), a sample each."""
    opened = gzip.open if request.source.suffix == ".gz" else open
    try:
        with opened(request.source, "rb") as file:
            lines = [line for line in file if line.strip()]
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot be read ({error})", str(request.source), "give cuts.jsonl(.gz)") from error
    return SourceRows(len(lines), _cuts(request, lines))


# Private: tables


def _lines(path: Path) -> list[str]:
    """Read lines; bytes that are not UTF-8 become lone surrogates, so that a bad row does not spoil the others."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror})", str(path), "give a CSV or TSV file"
        ) from error
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError("is UTF-16", str(path), "convert it: iconv -f UTF-16 -t UTF-8")
    return list(io.StringIO(content.decode("utf-8-sig", errors="surrogateescape"), newline=""))


def _is_header(cells: Sequence[str]) -> bool:
    known = {name for names in USUAL_COLUMNS.values() for name in names} - {"id", "key"}
    return any(cell.strip() in known for cell in cells)


def _ljspeech(request: ConversionRequest, source: Path, lines: Sequence[str]) -> SourceRows:
    def results() -> Iterator[Sample | BadSample]:
        for number, line in enumerate(lines, start=1):
            cells = line.rstrip("\r\n").split("|")
            if len(cells) == 1 and not cells[0].strip():
                continue
            place, name = f"{source}:{number}", cells[0].strip()
            if len(cells) < 2:
                yield bad_row(place, name, "has no text: id|text|normalized text is expected")
                continue
            found = [p for p in (f"wavs/{name}.wav", f"wavs/{name}.flac") if (request.audio / p).exists()]
            text = next((cell.strip() for cell in reversed(cells[1:3]) if cell.strip()), "")
            yield _sample(request, place, name, {"text": text}, found[0] if found else f"wavs/{name}.wav")

    return SourceRows(len(lines), results())


def _cells(
    source: Path, lines: Sequence[str], delimiter: str
) -> tuple[list[str], list[tuple[int, dict[str, str] | BadSample]]]:
    """The names of a table's columns, and its rows by number; empty ones are left out.

    Raises:
        ConfigError: it is no table.
    """
    table = _records(lines, delimiter)
    head = next(table, [])
    if isinstance(head, csv.Error):
        raise ConfigError(f"its first line cannot be read: {head}", str(source), "give a CSV file")
    names = [name.strip() for name in head]
    rows: list[tuple[int, dict[str, str] | BadSample]] = []
    for number, cells in enumerate(table, start=2):
        if isinstance(cells, csv.Error):
            reason = f"{cells}; quote a text that begins with a quotation mark, and double those in it"
            rows.append((number, bad_row(f"{source}: row {number}", "", reason)))
            continue
        if not any(cells):
            continue
        if len(cells) != len(names):
            reason = f"{len(cells)} fields for {len(names)} columns; quote texts with {delimiter!r}"
            rows.append((number, bad_row(f"{source}: row {number}", "", reason)))
            continue
        rows.append((number, dict(zip(names, cells, strict=True))))
    return names, rows


def _records(lines: Sequence[str], delimiter: str) -> Iterator[list[str] | csv.Error]:
    """The cells of each record, or why its first line is none: reading goes on with the next line.

    Not in the way of `csv` that is not strict: there, a text that begins with a quotation mark and does not end with
    one swallows the rows behind it.
    """
    start = 0
    while start < len(lines):
        reader = csv.reader(
            map(lines.__getitem__, range(start, len(lines))), delimiter=delimiter, strict=True
        )
        read = 0
        try:
            for cells in reader:
                read = reader.line_num
                yield cells
            return
        except csv.Error as error:
            yield error
        start += read + 1


def _table(request: ConversionRequest, source: Path, lines: Sequence[str], delimiter: str) -> SourceRows:
    names, rows = _cells(source, lines, delimiter)
    columns = find_columns(names, request.columns, str(source))
    if "audio" not in columns:
        remedy = "add a header with path and text, or name the column: --columns audio=NAME"
        raise ConfigError("no column of audio files", str(source), remedy)

    def results() -> Iterator[Sample | BadSample]:
        for number, row in rows:
            if isinstance(row, BadSample):
                yield row
                continue
            fields = {field: row[column].strip() for field, column in columns.items()}
            path = fields.pop("audio")
            place = f"{source}: row {number}"
            yield _sample(request, place, fields.pop("id", "") or _name(path), fields, path)

    return SourceRows(len(rows), results())


def _sample(
    request: ConversionRequest, place: str, id: str, fields: Mapping[str, str], path: str
) -> Sample | BadSample:
    """A row's sample; `start_s` and `end_s` among the fields are the span of its recording."""
    if wrong := [name for name, value in {"id": id, "path": path, **fields}.items() if not is_unicode(value)]:
        return BadSample(place, "", f"{wrong[0]} is not UTF-8: convert the file", "text encoding")
    others: dict[str, FieldValue] = dict(fields)
    try:
        start_s, end_s = float(fields.get("start_s") or 0.0), fields.get("end_s")
        others["audio"] = request.audio_part(
            path, start_s, float(end_s) if end_s else None, fields.get("speaker") or None
        )
    except ValueError as error:
        return bad_row(place, id, _first_line(error))
    return request.sample(place, id, others)


def _in_utf8(row: dict[str, str] | BadSample, place: str) -> dict[str, str] | BadSample:
    if isinstance(row, BadSample):
        return row
    wrong = next((name for name, cell in row.items() if not is_unicode(cell)), None)
    if wrong is None:
        return row
    return BadSample(place, "", f"{wrong} is not UTF-8: convert the file", "text encoding")


def _name(path: str) -> str:
    """An id from a path: without its extension, and for one from elsewhere without its folders."""
    given = Path(path)
    return given.stem if given.is_absolute() or ".." in given.parts else given.with_suffix("").as_posix()


def _first_line(error: ValueError) -> str:
    return str(error).split("\n")[0]


# Private: side files


def _side_sample(request: ConversionRequest, path: Path) -> Sample | BadSample:
    if not is_unicode(str(path)):
        return BadSample(str(path), "", NAME_IS_NOT_UTF8, "text encoding")
    relative = path.relative_to(request.source)
    side = next((s for s in map(path.with_suffix, SIDE_FILES) if s.is_file()), None)
    if side is None:
        return bad_row(str(path), _name(str(relative)), f"has no text beside it ({', '.join(SIDE_FILES)})")
    try:
        text = side.read_bytes().decode("utf-8-sig").strip()
        fields = _side_fields(text) if side.suffix == ".json" else {"text": text}
    except UnicodeDecodeError:
        return BadSample(str(side), _name(str(relative)), "is not UTF-8: convert it", "text encoding")
    except (OSError, ValueError) as error:
        return bad_row(str(side), _name(str(relative)), f"cannot be read ({error})")
    return _sample(
        request, str(path), fields.pop("id", "") or _name(str(relative)), fields, str(path.resolve())
    )


def _side_fields(text: str) -> dict[str, str]:
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError("an object with a text is expected")
    return {str(key): str(value) for key, value in record.items() if isinstance(value, str | int | float)}


# Private: lhotse


def _cuts(request: ConversionRequest, lines: Sequence[bytes]) -> Iterator[Sample | BadSample]:
    for number, line in enumerate(lines, start=1):
        place, known = f"{request.source}:{number}", ""
        try:
            cut = json.loads(line.decode("utf-8"))
            known = str(cut["id"])
            yield from _cut(request, place, cut)
        except UnicodeDecodeError:
            yield BadSample(place, known, "is not UTF-8", "text encoding")
        except json.JSONDecodeError as error:
            yield BadSample(place, known, f"wrong JSON: {error}", "wrong JSON")
        except KeyError as error:
            yield bad_row(place, known, f"no cut of lhotse: it has no {error}")
        except (TypeError, AttributeError) as error:
            yield bad_row(place, known, f"no cut of lhotse ({error})")
        except ValueError as error:
            yield bad_row(place, known, _first_line(error))


def _cut(request: ConversionRequest, place: str, cut: Mapping[str, Any]) -> Iterator[Sample | BadSample]:
    kind = cut.get("type", "MonoCut")
    if kind != "MonoCut":
        raise ValueError(f"a {kind}: save its audio first (cut.save_audio)")
    recording, spoken = cut["recording"], cut.get("supervisions") or []
    path = _recording_file(recording, int(cut.get("channel", 0)))
    if not spoken:
        raise ValueError("has no supervision, so no text")
    for supervision in spoken:
        id = cut["id"] if len(spoken) == 1 else f"{cut['id']}/{supervision['id']}"
        start_s = float(cut["start"]) + (float(supervision["start"]) if len(spoken) > 1 else 0.0)
        length_s = float(supervision["duration"] if len(spoken) > 1 else cut["duration"])
        is_whole = start_s == 0 and abs(length_s - float(recording["duration"])) < 1e-3
        named = {key: supervision.get(key) for key in ("text", "speaker", "language", "gender")}
        fields: dict[str, FieldValue] = {
            key: str(value) for key, value in {**(supervision.get("custom") or {}), **named}.items() if value
        }
        fields["audio"] = request.audio_part(
            path, max(0.0, start_s), None if is_whole else start_s + length_s, supervision.get("speaker")
        )
        yield request.sample(place, id, fields)


def _recording_file(recording: Mapping[str, Any], channel: int) -> str:
    if recording.get("transforms"):
        raise ValueError("its recording is transformed: save its audio first (cut.save_audio)")
    sources = recording["sources"]
    if len(sources) != 1 or sources[0]["type"] != "file":
        kinds = ", ".join(str(source["type"]) for source in sources)
        raise ValueError(f"its recording comes from {kinds}, and not from one file: save its audio first")
    if len(sources[0].get("channels", [0])) > 1:
        raise ValueError(
            f"is channel {channel} of several, and a sample knows no channels: split the file first"
        )
    return str(sources[0]["source"])
