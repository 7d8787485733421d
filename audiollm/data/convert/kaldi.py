"""Kaldi's data folders: `wav.scp`, `text`, and where they are there `segments`, `utt2spk`, `utt2lang`, `spk2gender`.

No command of a `wav.scp` is ever run; those that only decode a file (`flac -c -d -s a.flac |`) are read as that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from audiollm.data.convert.request import ConversionRequest, SourceRows, bad_row, known_split
from audiollm.data.convert.tables import recorded_sample
from audiollm.data.records.sample import Sample
from audiollm.data.tables.splits import is_split
from audiollm.data.tables.text_lines import read_lines
from audiollm.errors import BadSample, ConfigError

_DECODING = re.compile(r"(?:flac(?:\s+-(?:c|d|s|cd|dc|cds|dcs))+|cat)\s+(?P<file>\S+)\s*\|")
"""Commands that give a file's sound unchanged."""
_IN_ARCHIVE = re.compile(r"\.ark:\d+$")


class _Entry(NamedTuple):
    """A line of one of the folder's files: the words after the id, and where it stands."""

    words: str
    place: str


def kaldi(request: ConversionRequest) -> SourceRows:
    """The utterances of a folder, in the order of `text`; a folder that is named after a held-out split is held out."""
    folder = request.source
    tables = {
        name: _read_kaldi_table(folder / name)
        for name in ("wav.scp", "text", "segments", "utt2spk", "utt2lang")
    }
    genders = _read_kaldi_table(folder / "spk2gender")
    for name in ("wav.scp", "text"):
        if not tables[name]:
            raise ConfigError(
                f"has no {name}", str(folder), "give a data folder of Kaldi: wav.scp, text, ..."
            )
    untold = [id for id in (tables["segments"] or tables["wav.scp"]) if id not in tables["text"]]

    def results() -> Iterator[Sample | BadSample]:
        for id in tables["text"]:
            yield _utterance(request, id, tables, genders)
        for id in untold:
            place = (tables["segments"] or tables["wav.scp"])[id].place
            yield bad_row(place, id, "has no text")

    files = ", ".join([name for name, entries in tables.items() if entries] + ["spk2gender"] * bool(genders))
    return SourceRows(len(tables["text"]) + len(untold), results(), (f"files read: {files}",))


# Private


def _read_kaldi_table(path: Path) -> dict[str, _Entry]:
    """The lines of a file by their first word; none where there is no file.

    Raises:
        ConfigError: an id stands on two lines.
    """
    if not path.is_file():
        return {}
    entries: dict[str, _Entry] = {}
    for number, line in enumerate(read_lines(path).lines, start=1):
        id, *words = line.split(maxsplit=1)[:2] or [""]
        if not id:
            continue
        if id in entries:
            raise ConfigError(
                f"the id {id} stands on two lines", f"{path}:{number}", "utils/fix_data_dir.sh mends it"
            )
        entries[id] = _Entry(words[0].strip() if words else "", f"{path}:{number}")
    return entries


def _utterance(
    request: ConversionRequest,
    id: str,
    tables: Mapping[str, Mapping[str, _Entry]],
    genders: Mapping[str, _Entry],
) -> Sample | BadSample:
    words, place = tables["text"][id]
    fields = {"text": words}
    if not words:
        return bad_row(place, id, "has no words in text")
    recording = id
    if tables["segments"]:
        if id not in tables["segments"]:
            return bad_row(place, id, "has no line in segments")
        cells, place = tables["segments"][id]
        parts = cells.split()
        try:
            recording, start_s, end_s = parts[0], float(parts[1]), float(parts[2])
        except (IndexError, ValueError):
            return bad_row(place, id, "segments: a recording, a beginning and an end in seconds are expected")
        fields |= {"start_s": str(start_s)} | ({"end_s": str(end_s)} if end_s >= 0 else {})
    if recording not in tables["wav.scp"]:
        return bad_row(place, id, f"the recording {recording} has no line in wav.scp")
    for name, table in (("speaker", "utt2spk"), ("language", "utt2lang")):
        if id in tables[table]:
            fields[name] = tables[table][id].words
    if fields.get("speaker") in genders:
        fields["gender"] = genders[fields["speaker"]].words
    if is_split(request.source.name):
        fields["split"] = known_split(place, request.source.name)
    try:
        path = _read_wav_entry(tables["wav.scp"][recording].words)
    except ValueError as error:
        return bad_row(tables["wav.scp"][recording].place, id, str(error))
    return recorded_sample(request, place, id, fields, path)


def _read_wav_entry(entry: str) -> str:
    """
    Raises:
        ValueError: the entry is a command that does more than decode a file, or a place in an archive.
    """
    if match := _DECODING.fullmatch(entry):
        return match["file"]
    if entry.endswith("|"):
        raise ValueError(
            f"wav.scp has a command, and none is run ({entry:.60}): write its sound to a file first"
        )
    if _IN_ARCHIVE.search(entry):
        raise ValueError(
            f"wav.scp names a place in an archive ({entry:.60}): write its sound to a file first"
        )
    return entry
