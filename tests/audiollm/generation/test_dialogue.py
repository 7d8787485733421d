"""Scripts as turns, whose voice each turn has, and what is done where a reference is missing."""

from __future__ import annotations

import pytest
import torch

from audiollm.errors import ConfigError
from audiollm.generation.engine.request import Request
from audiollm.generation.speaking import dialogue
from audiollm.generation.speaking.dialogue import Turn, match_references, parse_script
from audiollm.generation.speaking.generator import Generator
from audiollm.generation.speaking.voice import read_voice
from tests.audiollm.generation.toy_speech import RATE, a_voice, toy_generator


@pytest.fixture(scope="module")
def generator() -> Generator:
    return toy_generator()


@pytest.mark.parametrize(
    ("script", "turns"),
    [
        ("[SPEAKER0] Hello.\n[SPEAKER1] Hi!", [("SPEAKER0", "Hello."), ("SPEAKER1", "Hi!")]),
        ("[speaker1] Hi [SPEAKER0] Well:\nyes.\n\n", [("SPEAKER1", "Hi"), ("SPEAKER0", "Well: yes.")]),
        (
            "Ann: one\nBob Lee : two\n three\nAnn:four",
            [("Ann", "one"), ("Bob Lee", "two three"), ("Ann", "four")],
        ),
        ("小明：你好\n小红：3点", [("小明", "你好"), ("小红", "3点")]),
        ("Ann: at http://x.org: ok\nhttps://y.org", [("Ann", "at http://x.org: ok https://y.org")]),
        ("Ann:\n one", [("Ann", "one")]),
    ],
)
def test_scripts(script: str, turns: list[tuple[str, str]]) -> None:
    assert parse_script(script) == [Turn(*turn) for turn in turns]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("Ann: one\nBob: \nAnn: two", "line 2: the turn of Bob is empty"),
        ("[SPEAKER0]\n[SPEAKER1] hi", "line 1: the turn of SPEAKER0 is empty"),
        ("once upon a time", "no speaker"),
        (" \n", "has no turn"),
    ],
)
def test_scripts_that_cannot_be_said(script: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_script(script)


def test_references_by_name_tag_and_number(generator: Generator) -> None:
    voice = read_voice(a_voice(1.0), None, generator.codec)
    assert match_references(["Ann", "Bob"], {"Bob": voice}) == {"Bob": voice}
    assert match_references(["Ann", "Bob"], {"1": voice}) == {"Bob": voice}
    assert match_references(["SPEAKER3", "SPEAKER0"], {"0": voice, "SPEAKER3": voice}).keys() == {
        "SPEAKER0",
        "SPEAKER3",
    }
    for speakers, key in ((["Ann"], "Bob"), (["Ann"], "1"), (["SPEAKER1"], "0")):
        with pytest.raises(ConfigError, match=f"{key}: no such speaker"):
            match_references(speakers, {key: voice})


@pytest.fixture()
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that reach the engine."""
    seen: list[Request] = []
    answer_all = Generator.answer_all

    def listen(self: Generator, requests: list[Request], *rest: object) -> object:
        seen.extend(requests)
        return answer_all(self, requests, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Generator, "answer_all", listen)
    return seen


def test_each_turn_is_in_its_own_voice_and_remembers_it_alone(
    generator: Generator, asked: list[Request]
) -> None:
    voice = read_voice(a_voice(1.0), None, generator.codec)
    speech = generator.dialogue(
        [("Ann", "one"), ("anna", "two"), ("Bob", "three"), ("Ann", "two 3"), ("Bob", "one")],
        references={"Bob": voice},
        max_duration_s=60,
    )
    ann, anna, bob, ann_again, bob_again = asked
    assert (
        speech.text
        == "[SPEAKER0] one\n[SPEAKER1] two\n[SPEAKER2] three\n[SPEAKER0] two three\n[SPEAKER2] one"
    )
    assert [len(each.audio) for each in asked] == [0, 0, 1, 1, 2]
    assert "Speaker: anna" in str(anna.messages) and "Speaker" not in str(ann.messages)
    assert torch.equal(bob.audio[0], voice.codes_KT) and torch.equal(bob_again.audio[0], voice.codes_KT)
    assert ann_again.messages[1].content[0].text == "one"  # type: ignore[union-attr]
    assert speech.notes == ("no reference for Ann: the model chooses the voice",)


@pytest.mark.parametrize("limit_s", [None, 2.5])
def test_a_streamed_dialogue_asks_for_the_same(
    generator: Generator, asked: list[Request], monkeypatch: pytest.MonkeyPatch, limit_s: float | None
) -> None:
    """Each request shows what its speaker said before, as in the whole dialogue."""
    streamed_requests: list[Request] = []
    engine = Generator.engine

    def listen(self: Generator, requests: list[Request]) -> object:
        streamed_requests.extend(requests)
        return engine(self, requests)

    voice = read_voice(a_voice(1.0), None, generator.codec)
    turns = [Turn("Ann", "one"), Turn("anna", "two"), Turn("Bob", "three"), Turn("Ann", "two 3")]
    manner = generator.manner(seed=2, max_duration_s=limit_s)
    whole = dialogue.converse(generator, turns, {"Bob": voice}, manner)
    monkeypatch.setattr(Generator, "engine", listen)
    stream = dialogue.dialogue_stream(generator, turns, {"Bob": voice}, manner)
    pieces = [piece.samples_CN for piece in stream]
    assert (stream.text, stream.stopped) == (whole.text, whole.stopped)
    assert len(streamed_requests) == len(asked) > 1 and (len(asked) < 4) == (limit_s is not None)
    for first, second in zip(streamed_requests, asked, strict=True):
        assert (first.messages, first.seed, first.limits) == (second.messages, second.seed, second.limits)
        assert all(map(torch.equal, first.audio, second.audio))
    # the whole one is trimmed at the ends of its turns
    assert stream.duration_s == pytest.approx(sum(piece.shape[1] for piece in pieces) / RATE)
    assert whole.duration_s <= stream.duration_s + 1e-6


def test_together_needs_all_references_or_takes_none(generator: Generator, asked: list[Request]) -> None:
    voice = read_voice(a_voice(1.0), None, generator.codec)
    turns = [("Ann", "one"), ("Bob", "two"), ("Ann", "three")]
    both = generator.dialogue(turns, references={"Ann": voice, "Bob": voice}, together=True, max_duration_s=1)
    some = generator.dialogue(turns, references={"Ann": voice}, together=True, max_duration_s=1)
    assert [len(each.audio) for each in asked] == [2, 0]
    assert asked[0].messages[-1].content[0].text == "[SPEAKER0] one\n[SPEAKER1] two\n[SPEAKER0] three"  # type: ignore[union-attr]
    assert both.notes == () and "Ann, Bob" in some.notes[0]


def test_an_empty_turn_is_named(generator: Generator) -> None:
    for together in (False, True):
        with pytest.raises(ConfigError, match="turn 2, of Bob, is empty"):
            generator.dialogue([("Ann", "one"), ("Bob", " ")], together=together)
    with pytest.raises(ConfigError, match="has no turn"):
        generator.dialogue([])


def test_the_limit_leaves_turns_out_and_says_so(generator: Generator) -> None:
    turns = [dialogue.Turn("Ann", "one two three hello")] * 30
    speech = dialogue.converse(generator, turns, {}, generator.manner(max_duration_s=1.5))
    assert not speech.stopped and "left out" in speech.notes[-1]
    assert speech.duration_s < 1.5 + 30 * dialogue.TURN_PAUSE_S
