"""Patterns, transcript files and conditions: what they accept, and that errors name the place."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from audiollm.errors import ConfigError
from audiollm.recipe.stages import StagePlan
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.plan import plan_annotation
from pipelines.annotate.input.sources import (
    Sources,
    collect_recordings,
    match_sources,
    pattern_hint,
    speaker_warning,
)
from pipelines.annotate.input.transcripts import (
    Transcript,
    TranscriptError,
    compile_pattern,
    match_pattern,
    parse_condition,
    read_transcripts,
)

_field = st.text("abcXYZ019 .é", min_size=1, max_size=8)


def _match(pattern: str, name: str) -> dict[str, str] | None:
    transcript = match_pattern(pattern, compile_pattern(pattern), name)
    return {**transcript.fields, "text": transcript.text} if transcript else None


@given(
    words=st.lists(st.text("abcXYZ019é'", min_size=1, max_size=6), min_size=1, max_size=4),
    speaker=_field,
    take=_field,
)
def test_a_pattern_reads_back_what_it_wrote(words: list[str], speaker: str, take: str) -> None:
    pattern = "{text}_{speaker}_{take}.wav"
    name = pattern.format(text="_".join(words), speaker=speaker, take=take)
    assert _match(pattern, name) == {"text": " ".join(words), "speaker": speaker, "take": take}


@pytest.mark.parametrize(
    ("pattern", "name", "fields"),
    [
        ("{text}_{speaker}_{take}.wav", "0_theo_12.WAV", {"text": "0", "speaker": "theo", "take": "12"}),
        ("{text}_{speaker}_{take}.wav", "0_theo_12.flac", None),
        ("{text}_{speaker}_{take}.wav", "0_theo.wav", None),
        ("{text}_{speaker}_{take}.wav", "sub/0_theo_1.wav", {"text": "0", "speaker": "theo", "take": "1"}),
        ("{text}_{take}", "hello_3.mp3", {"text": "hello", "take": "3"}),
        ("{speaker}/{text}", "deep/ann/good_day.wav", {"text": "good day", "speaker": "ann"}),
        ("{speaker}/{text}", "good_day.wav", None),
        ("{speaker}-{text}-{take}", "ann-a-b-c-2.wav", {"text": "a-b-c", "speaker": "ann", "take": "2"}),
        ("x({text})[1]+", "x(hi)[1]+.wav", {"text": "hi"}),
        ("{text}_{take}.wav", "___1.wav", None),
    ],
)
def test_patterns(pattern: str, name: str, fields: dict[str, str] | None) -> None:
    assert _match(pattern, name) == fields


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("{speaker}_{take}.wav", "needs a field {text}"),
        ("{text}_{take}_{take}", "{take} occurs twice"),
        ("{text}{take}", "touch"),
        ("{}_{text}", "a field is a name"),
        ("{text}_{a b}", "a field is a name"),
        ("{text", "a field is a name"),
    ],
)
def test_bad_patterns_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(TranscriptError, match=reason.replace("{", r"\{").replace("}", r"\}")):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("take<5", True),
        ("take<4", False),
        ("take<=4.0", True),
        ("take>10", False),
        ("take>=4", True),
        ("take==4", True),
        ("take==04", True),
        ("take!=4", False),
        ("speaker==theo", True),
        ("speaker == 'theo'", True),
        ("speaker!=theo", False),
        ("speaker==theo, take<3", False),
        ("speaker==theo,take<5", True),
    ],
)
def test_conditions(condition: str, holds: bool) -> None:
    transcript = Transcript("hi", "theo", None, {"take": "4", "speaker": "theo"}, "here")
    assert parse_condition(condition).holds(transcript) is holds


@pytest.mark.parametrize(
    "condition", ["", "take", "take<", "<5", "take=5", "take<5,", "take<>5", "__import__('os')"]
)
def test_what_is_no_condition_is_refused(condition: str) -> None:
    with pytest.raises(TranscriptError, match="is not a comparison"):
        parse_condition(condition)


def test_a_condition_names_what_it_cannot_compare() -> None:
    transcript = Transcript("hi", None, None, {"take": "4", "room": "a"}, "list.csv:3")
    with pytest.raises(TranscriptError, match=r"list\.csv:3 has no field 'tske'; did you mean 'take'"):
        parse_condition("tske<5").holds(transcript)
    with pytest.raises(TranscriptError, match=r"'a' is not a number \(list\.csv:3\)"):
        parse_condition("room<5").holds(transcript)


def test_csv_and_jsonl_say_the_same(tmp_path: Path) -> None:
    rows = [
        {"path": "a.wav", "text": 'He said "no, 7"', "speaker": "ann", "split": "test", "take": "1"},
        {"path": "b/c.wav", "text": "two\nlines", "speaker": "", "split": "", "take": "2"},
    ]
    (tmp_path / "a.csv").write_text(
        '\ufeffpath,text,speaker,split,take\na.wav,"He said ""no, 7""",ann,test,1\n\nb/c.wav,"two\nlines",,,2\n'
    )
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({**row, "take": int(row["take"])}) + "\n" for row in rows)
    )
    results = [read_transcripts(tmp_path / name).rows for name in ("a.csv", "a.jsonl")]
    for result in results:
        assert [path for path, _ in result] == ["a.wav", "b/c.wav"]
        assert [(t.text, t.speaker, t.split, t.fields["take"]) for _, t in result] == [
            ('He said "no, 7"', "ann", "test", "1"),
            ("two\nlines", None, None, "2"),
        ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "a.csv",
            "path,words\na.wav,hi\n",
            r"a\.csv  no column 'text' in 'path,words'; usual names are text",
        ),
        ("a.csv", "path,text\na.wav,hi,there\n", r"a\.csv:2  3 fields for 2 columns"),
        ("a.csv", "path,text\na.wav,hi\nb.wav,\n", r"a\.csv:3  has no text"),
        ("a.csv", "path,text\na.wav,hi\na.wav,ho\n", r"a\.csv:3  'a\.wav' stands at .*a\.csv:2 already"),
        ("a.csv", 'path,text\na.wav,"hi, there\n', r"a\.csv:2  3 fields for 2 columns"),
        ("a.csv", "path,text\na.wav,nan\n", r"a\.csv:2  has no text"),
        ("a.csv", "path,text\n", "holds no rows"),
        ("a.jsonl", '{"path": "a.wav", "text": "hi"}\n{"path"\n', r"a\.jsonl:2  wrong JSON"),
        ("a.jsonl", '{"path": "a.wav", "text": 7}\n', r"a\.jsonl:1  has no text"),
        ("a.jsonl", "7\n", r"a\.jsonl:1  no object"),
        ("a.jsonl", "[]\n", "holds no rows"),
    ],
)
def test_malformed_transcripts_name_file_and_line(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(TranscriptError, match=reason):
        read_transcripts(path)


def _sources(folder: Path, table: Path, test: str | None, recognize: bool = False) -> Sources:
    inputs = collect_recordings([str(folder)], folder.parent / "fetched", lambda name: None)
    digests = {item.path: "digest" for item in inputs.files}
    return match_sources(inputs, digests, str(table), test, recognize_untranscribed=recognize)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("in/a.wav", "in/ann/b.wav", "in/c.wav", "in/notes.txt", "other.wav"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"RIFF")
    return tmp_path


def test_every_file_and_every_row_is_accounted_for(folder: Path) -> None:
    table = (
        folder / "table.csv"
    )  # a.wav by the input folder, in/ann/b.wav by the table's, two without a recording
    table.write_text("path,text,split\na.wav,A,test\nin/ann/b.wav,B,\ngone.wav,D,\nother.wav,E,\n")
    sources = _sources(folder / "in", table, None)
    assert [(s.name, s.metadata.speaker, s.folder, s.metadata.text, s.split) for s in sources.recordings] == [
        ("a.wav", None, "speaker", "A", "test"),
        ("ann/b.wav", None, "ann", "B", None),
    ]
    assert [(Path(row["place"]).name, row["kind"]) for row in sources.rejected] == [
        ("c.wav", "no transcript")
    ]
    assert [(Path(row["place"]).name, row["reason"]) for row in sources.orphans] == [
        ("gone.wav", f"{table}:4 (no such file)"),
        ("other.wav", f"{table}:5 (not audio, or not below the input)"),
    ]
    assert (sources.num_audio, sources.not_audio) == (3, 1)


def test_recordings_without_a_transcript_are_recognized_where_the_settings_say_so(folder: Path) -> None:
    table = folder / "table.csv"
    table.write_text("path,text,speaker\na.wav,A,ann\nc.wav,,cid\n")
    sources = _sources(folder / "in", table, None, recognize=True)
    assert [(s.name, s.metadata.text, s.metadata.speaker) for s in sources.recordings] == [
        ("a.wav", "A", "ann"),
        ("ann/b.wav", None, None),
        ("c.wav", None, "cid"),
    ]
    assert not sources.rejected and not any("set aside" in note for note in sources.notes)
    table.write_text("path,text,speaker\na.wav,A,ann\n")
    notes = _sources(folder / "in", table, None).notes
    assert any(note.startswith("2 of 3 recordings have no transcript and are set aside") for note in notes)
    with pytest.raises(ValidationError, match="untranscribed=recognize needs `transcripts` and a recognizer"):
        AnnotationConfig.model_validate({"input": str(folder / "in"), "untranscribed": "recognize"})


def test_a_path_of_windows_is_matched_and_a_namesake_is_named(folder: Path) -> None:
    table = folder / "table.csv"
    table.write_text("path,text\nann\\b.wav,B\n")
    assert [source.name for source in _sources(folder / "in", table, None).recordings] == ["ann/b.wav"]
    table.write_text("path,text\nb.wav,B\n")
    with pytest.raises(TranscriptError, match=r"table\.csv:2 .*of this name is 'ann/b\.wav': write its path"):
        _sources(folder / "in", table, None)


@pytest.mark.parametrize(
    ("content", "test", "reason"),
    [
        ("path,text\nx.wav,A\n", None, "not one of the 3 recordings has a transcript"),
        ("path,text,split\na.wav,A,tset\n", None, r"split 'tset' .*known: train, .*test='split==tset'"),
        ("path,text\na.wav,A\n./a.wav,B\n", None, "again"),
        ("path,text,take\na.wav,A,3\n", "take<3", "holds for none"),
        ("path,text,take\na.wav,A,3\n", "tike<3", "did you mean 'take'"),
    ],
)
def test_transcripts_that_do_not_fit_are_refused(
    folder: Path, content: str, test: str | None, reason: str
) -> None:
    table = folder / "table.csv"
    table.write_text(content)
    with pytest.raises(TranscriptError, match=reason):
        _sources(folder / "in", table, test)


def test_a_condition_marks_the_test_set_and_the_rest_is_for_training(folder: Path) -> None:
    table = folder / "table.csv"
    table.write_text("path,text,split\na.wav,A,dev\nann/b.wav,B,train\nc.wav,C,\n")
    sources = _sources(folder / "in", table, "split==dev")
    assert [source.split for source in sources.recordings] == ["test", "train", "train"]


def test_every_name_of_a_held_out_split_is_held_out(folder: Path) -> None:
    table = folder / "table.csv"
    table.write_text("Path,Sentence,Split\na.wav,A,evaluation\nann/b.wav,B,training\nc.wav,C,hold-out\n")
    sources = _sources(folder / "in", table, None)
    assert [source.split for source in sources.recordings] == ["test", "train", "test"]
    assert [source.metadata.text for source in sources.recordings] == ["A", "B", "C"]
    assert sources.notes == ["table.csv: columns read: Path as audio, Sentence as text, Split as split"]


def test_an_output_within_the_input_is_not_read(folder: Path) -> None:
    (folder / "in/out/report").mkdir(parents=True)
    for name in ("clip.wav", "notes.txt"):
        (folder / "in/out/report" / name).write_bytes(b"RIFF")
    inputs = collect_recordings([str(folder / "in")], folder / "in/out/fetched", lambda name: None)
    assert [each.name for each in inputs.files] == [
        "a.wav",
        "ann/b.wav",
        "c.wav",
    ] and inputs.num_other_files == 1


def _voices(folder: Path, *inputs: object) -> list[tuple[str, str | None, str, str | None, str | None]]:
    """File, text, speaker, language and split of each recording."""
    found = collect_recordings([str(text) for text in inputs], folder / "fetched", lambda name: None)
    sources = match_sources(found, {item.path: "digest" for item in found.files}, None, None)
    return [
        (Path(s.name).name, s.metadata.text, s.metadata.speaker or s.folder, s.metadata.language, s.split)
        for s in sources.recordings
    ]


def test_a_list_tells_speakers_and_splits_without_texts(folder: Path) -> None:
    table = folder / "list.csv"
    table.write_text("path,speaker,split,language\nin/a.wav,bob,test,de\nin/ann/b.wav,,,\n")
    assert _voices(folder, table) == [
        ("a.wav", None, "bob", "de", "test"),
        ("b.wav", None, "in", None, None),
    ]
    table.write_text("path,text,speaker\nin/a.wav,,bob\nin/c.wav,C,bob\n")
    assert [row[:3] for row in _voices(folder, table)] == [("a.wav", None, "bob"), ("c.wav", "C", "bob")]


def test_a_list_tells_of_files_that_another_input_has_named(folder: Path) -> None:
    table = folder / "list.csv"
    table.write_text("path,text,speaker\nin/a.wav,A,bob\n")
    told = ("a.wav", "A", "bob", None, None)
    assert told in _voices(folder, folder / "in", table)
    assert told in _voices(folder, table, folder / "in")


def test_the_speaker_is_a_folder_of_the_input_where_nothing_tells(folder: Path) -> None:
    """Never an empty name, which no stage takes, nor what all files of an address or an archive have in common."""
    speakers = {"a.wav": "speaker", "b.wav": "ann", "c.wav": "speaker"}

    def found(*inputs: object) -> dict[str, str]:
        return {name: speaker for name, _, speaker, _, _ in _voices(folder, *inputs)}

    assert found(folder / "in") == speakers
    assert found(f"file://{folder}/in") == speakers
    assert found(f"file://{folder}/in/**/*.wav") == found(folder / "in/**/*.wav") == speakers
    with tarfile.open(folder / "all.tar", "w") as archive:
        archive.add(folder / "in", "./")
    assert found(folder / "all.tar") == {"a.wav": "all.tar", "b.wav": "ann", "c.wav": "all.tar"}
    assert found(folder / "in", folder / "other.wav") == {
        "a.wav": "0-in", "b.wav": "0-in/ann", "c.wav": "0-in", "other.wav": "1-other_wav",
    }  # fmt: skip
    table = folder / "lists" / "list.csv"
    table.parent.mkdir()
    table.write_text(f"path\n{folder}/in/ann/b.wav\n../in/c.wav\n")
    assert found(table) == {"b.wav": "ann", "c.wav": "in"}


@pytest.mark.parametrize("odd", ["\u2028", "\x85", "\x0b", "\x1c"])
def test_a_line_of_a_table_ends_with_a_newline_alone(tmp_path: Path, odd: str) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"path,text\na.wav,one{odd}two\nb.wav,three\n", encoding="utf-8")
    assert [(path, t.text) for path, t in read_transcripts(table).rows] == [
        ("a.wav", f"one{odd}two"),
        ("b.wav", "three"),
    ]


def test_the_hint_follows_the_names() -> None:
    assert pattern_hint(["0_theo_1.wav", "1_ann_2.wav"]) == "{text}_{speaker}_{take}"
    assert pattern_hint(["a-1.wav", "b-2.wav"]) == "{text}-{speaker}"
    assert pattern_hint(["one.wav", "x_y.wav"]) is None
    assert pattern_hint([]) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"input": "in", "transcripts": "broken.csv"}, r"broken\.csv:2  3 fields for 2 columns"),
        ({"input": "in", "transcripts": "other.csv"}, "not one of the 3 recordings has a transcript"),
        ({"input": "in", "transcripts": "splits.csv"}, r"splits\.csv:2  split 'x'"),
        (
            {"input": "in", "transcripts": "good.csv", "test": "tske<5"},
            "has no field 'tske'; did you mean 'take'",
        ),
        ({"input": "in", "transcripts": "{speaker}_{text}"}, "does not match"),
        ({"input": "broken.csv"}, r"broken\.csv:2  3 fields for 2 columns"),
    ],
)
def test_the_plan_opens_the_transcripts_and_lists(
    folder: Path, settings: dict[str, str], reason: str
) -> None:
    def plan(**settings: str) -> StagePlan:
        paths = {key: str(folder / value) for key, value in settings.items() if not {"{", "<"} & set(value)}
        return plan_annotation(AnnotationConfig.model_validate(settings | paths), {})

    (folder / "broken.csv").write_text("path,text\na.wav,one, two\n")
    (folder / "other.csv").write_text("path,text\nnone.wav,one\n")
    (folder / "splits.csv").write_text("path,text,split\na.wav,one,x\n")
    (folder / "good.csv").write_text("Path,Text,take\na.wav,one,1\nann/b.wav,two,2\ngone.wav,three,3\n")
    with pytest.raises(ConfigError, match=reason):
        plan(**settings)
    note = plan(input="in", transcripts="good.csv").note
    assert "Path as audio" in note and "transcripts of 2 recordings, 1 without" in note and "1 rows" in note


@pytest.mark.parametrize(
    "files, problem",
    [
        (["a_ann.wav", "b_bob.wav"], "all 2 recordings count as one speaker, 'speaker'"),
        (["wavs/a.wav", "wavs/b.wav"], "all 2 recordings count as one speaker, 'wavs'"),
        (["train/a.wav", "test/b.wav"], "'test', 'train' count as the speakers"),
        (["ann/a.wav", "bob/b.wav"], ""),
        (["a.wav"], ""),
    ],
)
def test_folders_that_name_no_speakers_are_warned_of(tmp_path: Path, files: list[str], problem: str) -> None:
    for file in files:
        (tmp_path / "in" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / file).write_bytes(b"RIFF....WAVEfmt ")
    inputs = collect_recordings([str(tmp_path / "in")], tmp_path / "fetched", lambda name: None)
    digests = {item.path: "0" for item in inputs.files}
    warning = speaker_warning(match_sources(inputs, digests, None, None).recordings)
    assert (problem in warning and "steps.speakers" in warning) if problem else warning == ""
    named = match_sources(inputs, digests, "{text}_{speaker}.wav", None) if "_" in files[0] else None
    assert named is None or speaker_warning(named.recordings) == ""
