"""Samples survive the way to disk and back, and a bad line is named with its file, number and reason."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, parse_sample, write_samples
from audiollm.errors import BadSample, ConfigError

_text = st.builds(TextPart, text=st.text())
_audio = st.builds(
    AudioPart,
    path=st.text(min_size=1),
    start_s=st.floats(0, 10),
    end_s=st.none() | st.floats(11, 100),
    speaker=st.none() | st.text(),
)
_message = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant"]),
    content=st.lists(_text | _audio, min_size=1, max_size=3),
)
_sample = st.builds(
    Sample,
    id=st.text(min_size=1),
    messages=st.lists(_message, min_size=1, max_size=3),
    task=st.text(min_size=1),
    metadata=st.dictionaries(st.text(), st.text() | st.integers() | st.none() | st.booleans(), max_size=3),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(_sample, max_size=4, unique_by=lambda sample: sample.id))
def test_round_trip(tmp_path: Path, samples: list[Sample]) -> None:
    path = tmp_path / "samples.jsonl"
    write_samples(path, samples)
    assert read_samples(path) == (samples, [])


def _row(**changes: object) -> str:
    row: dict[str, object] = {
        "id": "a",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "task": "tts",
    }
    return json.dumps({**row, **changes})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "dictionary"),
        (_row(id=""), "id: String should have at least 1"),
        (_row(messages=[]), "messages: List should have at least 1"),
        (_row(tusk="tts"), "tusk: Extra inputs"),
        (_row(messages=[{"role": "robot", "content": [{"type": "text", "text": ""}]}]), "messages.0.role"),
        (_row(messages=[{"role": "user", "content": [{"type": "video", "path": "x"}]}]), "'video'"),
        (
            _row(
                messages=[
                    {"role": "user", "content": [{"type": "audio", "path": "x", "start_s": 2, "end_s": 1}]}
                ]
            ),
            "not after its start",
        ),
        (_row(id="first"), "id 'first' was used on line 1"),
        (b"\xff\xfe", "utf-8"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path: Path, line: str | bytes, reason: str) -> None:
    path = tmp_path / "samples.jsonl"
    middle = line.encode() if isinstance(line, str) else line
    path.write_bytes(b"\n".join([_row(id="first").encode(), middle, b"", _row(id="last").encode(), b""]))
    samples, bad = read_samples(path)
    assert [sample.id for sample in samples] == ["first", "last"]
    assert [row.place for row in bad] == [f"{path}:2"]
    assert reason in bad[0].reason
    assert str(bad[0]).startswith(f"{path}:2: ")


def test_audio_is_found_beside_the_file_and_else_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch()
    paths = ["a.wav", "none.wav", str(tmp_path / "a.wav"), ".", "s3://bucket/a.wav", "x" * 1000]
    parts = [AudioPart(path=path) for path in paths]
    write_samples(
        tmp_path / "samples.jsonl", [Sample(id="a", messages=[Message(role="user", content=parts)], task="t")]
    )
    (sample,), _ = read_samples(tmp_path / "samples.jsonl")
    beside = str(tmp_path / "a.wav")
    assert [part.path for part in sample.audio_parts()] == [beside, "none.wav", beside, *paths[3:]]


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_samples(Path("no/such/samples.jsonl"))


def test_a_span_of_no_length_is_refused() -> None:
    with pytest.raises(ValidationError, match="not after its start"):
        AudioPart(path="a.wav", start_s=1.0, end_s=1.0)


@given(_sample)
def test_one_record_is_parsed_as_it_was_written(sample: Sample) -> None:
    assert parse_sample(json.dumps(sample.model_dump(mode="json")).encode(), "here") == sample
    assert len(sample.audio_parts()) == sum(
        len(sample.audio(role)) for role in ("system", "user", "assistant")
    )


@pytest.mark.parametrize(
    ("content", "kind", "id"),
    [
        (b"{", "wrong JSON", ""),
        (b"", "wrong JSON", ""),
        (b"[" * 100_000, "wrong JSON", ""),
        (_row().encode("utf-16"), "text encoding", ""),
        (_row(id="ü").encode("latin-1").replace(b"\\u00fc", b"\xfc"), "text encoding", ""),
        (_row(task="").encode(), "invalid record", "a"),
        (b"7", "invalid record", ""),
    ],
)
def test_a_bad_record_says_where_what_and_of_which_kind(content: bytes, kind: str, id: str) -> None:
    with pytest.raises(BadSample, match=r"a\.tar/1\.json: ") as caught:
        parse_sample(content, "a.tar/1.json")
    bad = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (bad.place, bad.kind, bad.id) == ("a.tar/1.json", kind, id)
    assert bad.row() == caught.value.row() and str(bad) == str(caught.value)
