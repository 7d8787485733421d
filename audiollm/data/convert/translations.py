"""Recordings with translations, for `compose_streams`: RealSI's files, stereo duplex recordings, tables of pairs.

Each row becomes an `AlignedRecording`: aligned by segments, by words, or not at all (for wait-k and aligners).

Sources: RealSI (github.com/byteresearchcla/RealSI, arXiv 2407.21646); moshi-finetune (github.com/kyutai-labs).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from audiollm.audio import AudioError, load, probe, save
from audiollm.data.convert.questions import SOUNDS
from audiollm.data.convert.request import ConversionRequest, SourceRows, bad_row, bad_rows_sample, known_split
from audiollm.data.records.aligned_recording import AlignedRecording
from audiollm.data.records.sample import problem_with_remedy
from audiollm.data.tables.columns import NAME_FIELDS, ColumnFinder, is_missing
from audiollm.data.tables.rows import read_json_rows, read_rows
from audiollm.data.tables.table import BadRow
from audiollm.errors import BadSample, ConfigError
from audiollm.files.atomic import safe_name

COLUMNS = {
    "audio": ("audio", "path", "file", "file_name", "wav"),
    "target": ("target", "translation", "tgt_text", "trg_text", "translated_text"),
    "text": ("text", "sentence", "transcript", "src_text"),
    "target_audio": ("target_audio", "tgt_audio", "translation_audio"),
    "speaker": ("speaker", "speaker_id", "client_id"),
    "id": ("id", "key", "uid"),
}
"""Fields of a pair, and the columns that are taken for them, the first that is there."""
MAX_OVERRUN_S = 2.0
"""RealSI's last segments end up to 1.2 s after their recording: such an end is the recording's."""
ENDLESS_GAP_S = 0.3
"""A word of a duplex recording that another follows within this time lasts until it: speech stays whole."""
SHORTEST_WORD_S = 0.02
MAIN_SPEAKER = "SPEAKER_MAIN"
"""Name of the left channel's speaker in moshi-finetune's files."""

Row = AlignedRecording | BadSample


def translations(request: ConversionRequest) -> SourceRows:
    """Pairs of a recording and its translation: CSV, TSV, or JSON, also with `words`, `segments`, `target_words`."""
    listed = read_rows(request.source, [name for names in COLUMNS.values() for name in names])
    finder = ColumnFinder(listed.columns, request.columns, str(request.source), COLUMNS)
    rows = [
        (
            place,
            bad_rows_sample(place, row)
            if isinstance(row, BadRow)
            else _read_named_columns(row, finder.of_row(row)),
        )
        for place, row in listed.rows
    ]
    notes = (*listed.notes, finder.note())
    return SourceRows(
        len(rows),
        (_convert_translation(request, place, row) for place, row in rows),
        notes,
        makes_samples=False,
    )


def realsi(request: ConversionRequest) -> SourceRows:
    """RealSI's annotations: its folder, the folder of a direction, or a file; recordings in `audio` beside `json`."""
    source = request.source
    paths = [source] if source.is_file() else sorted(source.rglob("*.json"))
    if not paths:
        raise ConfigError("holds no .json", str(source), "give RealSI's folder, or one of its files")
    return SourceRows(len(paths), (_convert_talk(request, path) for path in paths), makes_samples=False)


def duplex(request: ConversionRequest) -> SourceRows:
    """Stereo recordings in moshi-finetune's layout: JSON lines of `path`, left the interpreter, right the speaker.

    Beside each `a.wav` lies `a.json` with `alignments`: `[word, [start, end], speaker]`. The channels are written as
    files of their own beside the manifest; each word is due when it begins, and is said by the left channel.
    """
    rows = [
        (place, bad_rows_sample(place, row) if isinstance(row, BadRow) else row)
        for place, row in read_json_rows(request.source).rows
    ]
    return SourceRows(
        len(rows), (_convert_conversation(request, place, row) for place, row in rows), makes_samples=False
    )


# Private


def _read_named_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    values = {field: row.get(column) for field, column in columns.items()}
    return {
        field: value for field, value in values.items() if not is_missing(value, is_name=field in NAME_FIELDS)
    }


def _build_record(place: str, id: str, make: Callable[[], Row]) -> Row:
    """The record, or the reason why there is none."""
    try:
        return make()
    except KeyError as error:
        return bad_row(place, id, f"has no {error}")
    except ValidationError as error:
        return bad_row(place, id, problem_with_remedy(error))
    except (TypeError, AttributeError, IndexError) as error:
        return bad_row(place, id, f"has another form than such rows have ({error})")
    except AudioError as error:
        return bad_row(place, id, error.reason)
    except (OSError, ValueError) as error:
        return bad_row(place, id, str(error))


def _convert_translation(request: ConversionRequest, place: str, row: dict[str, Any] | BadSample) -> Row:
    if isinstance(row, BadSample):
        return row

    def make() -> Row:
        values = {**row, "audio": request.audio_part(str(row["audio"])).path}
        values.setdefault("id", Path(str(row["audio"])).with_suffix("").as_posix())
        values |= _read_row_split(place, row)
        if "target_audio" in row:
            values["target_audio"] = request.audio_part(str(row["target_audio"])).path
        for segment in values.get("segments") or ():
            if segment.get("said"):
                segment["said"]["path"] = request.audio_part(str(segment["said"]["path"])).path
        if not values.get("segments") and not str(values.get("target") or "").strip():
            return bad_row(place, str(values["id"]), "has no translation: neither target nor segments")
        return AlignedRecording.model_validate(values)

    return _build_record(place, str(row.get("id") or row.get("audio") or ""), make)


def _convert_talk(request: ConversionRequest, path: Path) -> Row:
    def make() -> Row:
        talk = json.loads(path.read_text(encoding="utf-8"))
        name = str(talk["vid"])
        folder = (path.parent.parent / "audio").resolve()
        names = [f"{start}{name}{end}" for end in SOUNDS for start in (f"{folder.as_posix()}/", "")]
        audio = request.first_audio_part([*names]).path
        audio_path = Path(audio)
        duration_s = probe(
            audio_path if audio_path.is_absolute() else request.out.parent / audio_path
        ).duration_s
        segments = [
            {
                "start_s": start / 1000, "end_s": _limit_end_s(start / 1000, end / 1000, duration_s), "text": text,
                "target": target,
            }
            for start, end, text, target in _utterances(talk["segment"])
        ]  # fmt: skip
        values = {"id": name, "audio": audio, "segments": segments, "split": "test"}
        return AlignedRecording.model_validate(values | {"direction": name.partition("-")[0]})

    return _build_record(str(path), path.stem, make)


def _utterances(segments: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float, str, str]]:
    """Start and end in ms, source and translation of each utterance; of a segment where it has none."""
    for segment in segments:
        inner = segment.get("utterance") or ()
        for utterance in inner:
            yield (
                utterance["sub_start_time"],
                utterance["sub_end_time"],
                utterance["sub_src_text"],
                utterance["sub_trg_text"],
            )
        if not inner:
            yield segment["start_time"], segment["end_time"], segment["src_text"], segment["trg_text"]


def _limit_end_s(start_s: float, end_s: float, duration_s: float | None) -> float:
    """Return the end of a segment; that of its recording where it lies a little beyond."""
    if duration_s is None:  # the header does not tell it
        return end_s
    beyond = duration_s < end_s <= duration_s + MAX_OVERRUN_S and start_s < duration_s
    return duration_s if beyond else end_s


def _convert_conversation(request: ConversionRequest, place: str, row: dict[str, Any] | BadSample) -> Row:
    if isinstance(row, BadSample):
        return row

    def make() -> Row:
        name = str(row["path"])
        audio_path = Path(request.audio_part(name).path)
        path = audio_path if audio_path.is_absolute() else request.out.parent / audio_path
        words = _read_word_alignments(path.with_suffix(".json"))
        sound = load(path)
        if sound.num_channels != 2:
            raise ValueError(f"{sound.num_channels} channel(s): left the interpreter, right the speaker")
        id = Path(name).with_suffix("").as_posix()
        stem = f"{request.out.stem}_audio/{safe_name(id)}"
        for channel, end in enumerate(("said", "heard")):
            save(
                request.out.parent / f"{stem}.{end}.wav",
                sound.samples_CN[channel : channel + 1],
                sound.sample_rate,
            )
        main_words = [word for word in words if word[3] == MAIN_SPEAKER]
        if not main_words:
            raise ValueError(f"no word of {MAIN_SPEAKER} in {path.with_suffix('.json').name}")
        segments = [
            {
                "start_s": start_s, "end_s": end_s, "text": word, "target": word, "due_s": start_s,
                "said": {"path": f"{stem}.said.wav", "start_s": start_s, "end_s": end_s},
            }
            for word, start_s, end_s in _whole_words(main_words, sound.duration_s)
        ]  # fmt: skip
        source_words = [
            {"text": word, "start_s": start_s, "end_s": end_s}
            for word, start_s, end_s, speaker in words
            if speaker != MAIN_SPEAKER
        ]
        values = {"id": id, "audio": f"{stem}.heard.wav", "segments": segments, "words": source_words}
        return AlignedRecording.model_validate(values | _read_row_split(place, row))

    return _build_record(place, str(row.get("path") or ""), make)


def _read_row_split(place: str, row: Mapping[str, Any]) -> dict[str, str]:
    name = row.get("split")
    return {} if is_missing(name, is_name=True) else {"split": known_split(place, str(name))}


def _read_word_alignments(path: Path) -> list[tuple[str, float, float, str]]:
    """Word, start, end and speaker of each entry of a side file."""
    if not path.is_file():
        raise ValueError(f"{path.name}: no such file beside it; moshi-finetune's annotate.py writes it")
    read = json.loads(path.read_text(encoding="utf-8"))
    return [
        (str(word).strip(), float(start_s), float(end_s), str(speaker))
        for word, (start_s, end_s), speaker in read["alignments"]
        if str(word).strip()
    ]


def _whole_words(
    words: Sequence[tuple[str, float, float, str]], duration_s: float
) -> Iterator[tuple[str, float, float]]:
    """Word, start and end; a word ends where the next one begins, if that is soon."""
    for place, (word, start_s, end_s, _) in enumerate(words):
        end_s = max(end_s, start_s + SHORTEST_WORD_S)
        if place + 1 < len(words) and start_s < words[place + 1][1] <= end_s + ENDLESS_GAP_S:
            end_s = max(start_s + SHORTEST_WORD_S, words[place + 1][1])
        yield word, start_s, min(end_s, duration_s)
