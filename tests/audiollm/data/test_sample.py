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
from audiollm.data.records.sample import (
    AudioPart,
    Message,
    RatedAnswer,
    Sample,
    TextPart,
    find_equal,
    parse_sample,
    write_samples,
)
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
_asked = st.builds(
    Message,
    role=st.sampled_from(["system", "user"]),
    content=st.lists(_text | _audio, min_size=1, max_size=2),
)


@st.composite
def _answers(draw: st.DrawFn) -> RatedAnswer:
    content = [*draw(st.lists(_text | _audio, max_size=2)), draw(_audio | st.just(TextPart(text="yes")))]
    scores = st.floats(allow_nan=False, allow_infinity=False)
    steps = [*(draw(st.none() | scores) for _ in content[1:]), draw(scores)]
    return RatedAnswer(
        content=content,
        score=draw(st.none() | scores),
        rank=draw(st.none() | st.integers(1, 9)),
        verdict=draw(st.sampled_from([None, "desirable", "undesirable"])),
        steps=draw(st.sampled_from([None, steps])),
        origin=draw(st.none() | st.text()),
        metadata=draw(st.dictionaries(st.text(), st.integers(), max_size=2)),
    )


_preference = st.builds(
    Sample,
    id=st.text(min_size=1),
    messages=st.lists(_asked, min_size=1, max_size=2),
    task=st.text(min_size=1),
    answers=st.lists(_answers(), min_size=1, max_size=3),
)
_sample = st.builds(
    Sample,
    id=st.text(min_size=1),
    messages=st.lists(_message, min_size=1, max_size=3),
    task=st.text(min_size=1),
    metadata=st.dictionaries(st.text(), st.text() | st.integers() | st.none() | st.booleans(), max_size=3),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
@given(st.lists(_sample | _preference, max_size=4, unique_by=lambda sample: sample.id))
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
        (_row(messages=[{"role": "user", "content": [{"type": "picture", "path": "x"}]}]), "'picture'"),
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


@given(_preference)
def test_a_preference_is_parsed_as_it_was_written(sample: Sample) -> None:
    assert parse_sample(sample.model_dump_json().encode(), "here") == sample
    for index, answer in enumerate(sample.answers):
        answered = sample.answered(index)
        assert answered.messages[:-1] == sample.messages and answered.messages[-1].content == answer.content
        assert not answered.answers and answered.messages[-1].role == "assistant"
    spoken = [
        part for index in range(len(sample.answers)) for part in sample.answered(index).audio("assistant")
    ]
    asked = sample.model_copy(update={"answers": []}).audio_parts()
    assert sample.audio_parts() == asked + spoken
    assert sample.with_parts(lambda part: part) == sample


def test_what_was_not_judged_is_not_written() -> None:
    """Ordinary samples are written as they were before there were answers, byte for byte."""
    record = json.loads(_row(metadata={"speaker": "a"}))
    line = '{"id":"a","messages":[{"role":"user","content":[{"type":"text","text":"hello"}]}],"task":"tts",'
    written = Sample.model_validate(record).model_dump_json()
    assert written == line + '"metadata":{"speaker":"a"}}'
    record["answers"] = [{"content": [{"type": "text", "text": "x"}], "rank": 1}]
    assert Sample.model_validate(record).model_dump(mode="json") == record


def _answer(text: str = "x", **changes: object) -> dict[str, object]:
    return {"content": [{"type": "text", "text": text}], **changes}


@pytest.mark.parametrize(
    ("answers", "kind", "reason"),
    [
        ([_answer(), _answer(" \n")], "empty answer", "answers.1: the answer is empty: leave it out"),
        (
            [_answer(score=float("nan"))],
            "no finite score",
            "answers.0.score: Input should be a finite number; leave",
        ),
        ([_answer(score=float("inf"))], "no finite score", "answers.0.score"),
        ([_answer(steps=[float("nan")])], "no finite score", "answers.0.steps.0"),
        ([_answer(steps=[1, 0])], "wrong scores of steps", "2 scores of steps for 1 parts"),
        ([_answer(steps=[None])], "wrong scores of steps", "the last step has no score"),
        ([_answer(content=[])], "invalid record", "answers.0.content"),
        ([_answer(rank=0)], "invalid record", "answers.0.rank"),
        ([_answer(verdict="good")], "invalid record", "'desirable' or 'undesirable'"),
        ([_answer(scores=1)], "invalid record", "answers.0.scores: Extra inputs"),
        ("x", "invalid record", "answers"),
    ],
)
def test_a_bad_answer_is_named_and_counted(answers: object, kind: str, reason: str) -> None:
    with pytest.raises(BadSample) as caught:
        parse_sample(_row(answers=answers).encode(), "p.jsonl:1")
    assert (caught.value.id, caught.value.kind) == ("a", kind) and reason in caught.value.reason


def test_answers_follow_a_question() -> None:
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "hello"}]}]
    with pytest.raises(BadSample, match="move it to the answers"):
        parse_sample(_row(messages=chat, answers=[_answer()]).encode(), "p.jsonl:1")


def test_answers_that_say_the_same() -> None:
    text, clip = TextPart(text="a "), AudioPart(path="a.wav", speaker="x")
    answers = [
        RatedAnswer(content=[text, TextPart(text="b")]),
        RatedAnswer(content=[clip]),
        RatedAnswer(content=[AudioPart(path="a.wav", end_s=1.0)]),
        RatedAnswer(content=[TextPart(text=" a b\n")], score=1),
    ]
    assert find_equal(answers[:3]) is None and find_equal(answers) == (0, 3)
    assert find_equal([*answers[1:3], RatedAnswer(content=[AudioPart(path="a.wav")])]) == (0, 2)


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
