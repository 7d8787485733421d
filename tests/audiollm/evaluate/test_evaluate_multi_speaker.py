"""`evaluate multi-speaker`: voices in closed form (angles), words turn by turn or as a whole, models that speak."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from audiollm.audio import Waveform, save
from audiollm.commands.cli import build_app
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.judging import SpeechJudges
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.report.text_errors import choose_form
from audiollm.evaluate.speech.dialogues import (
    Dialogue,
    ReferenceRecording,
    ScriptedTurn,
    read_dialogues,
    speak_dialogues,
)
from audiollm.evaluate.speech.multi_speaker import evaluate_dialogues, voice_scores
from audiollm.evaluate.speech.scoring import Bench
from audiollm.evaluate.subjects.protocols import Subject, TurnByTurn, VoicePrompt
from tests.audiollm.evaluate.marked_clips import RATE, Book, Compass, Reader


def direction(degrees: float) -> torch.Tensor:
    return torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])


def cos(degrees: float) -> float:
    return math.cos(math.radians(degrees))


@pytest.fixture
def book() -> Book:
    return Book()


def bench(book: Book, store: Path | None = None) -> Bench:
    return Bench(choose_form("seed-tts", "en"), SpeechJudges(Reader(book), Compass()), "x", RowStore(store))


def dialogue(
    book: Book, folder: Path, spoken: Sequence[tuple[str, str, str, float]], **rest: Any
) -> Dialogue:
    """Write a file for each turn (speaker, text, what is said, voice)."""
    turns = []
    for place, (speaker, text, said, degrees) in enumerate(spoken):
        path = book.write(folder / f"{rest.get('id', 'd')}-{place}.wav", said, degrees)
        turns.append(ScriptedTurn(speaker=speaker, text=text, audio=path))
    return Dialogue(**{"id": "d", "turns": tuple(turns), **rest})


def test_within_between_and_their_geometric_mean() -> None:
    scores = voice_scores([direction(d) for d in (0, 90, 10, 80)], ["a", "b", "a", "b"])
    within = cos(10)  # 0 with 10, 90 with 80
    between = 1 - (cos(90) + cos(80) + cos(80) + cos(70)) / 4
    assert scores["within"] == pytest.approx(within)
    assert scores["between"] == pytest.approx(between)
    assert scores["score"] == pytest.approx(math.sqrt(within * between))


def test_one_voice_for_all_scores_nothing_and_opposite_voices_do_not_break() -> None:
    same = voice_scores([direction(30)] * 4, ["a", "b", "a", "b"])
    assert (same["within"], same["between"], same["score"]) == (
        pytest.approx(1),
        pytest.approx(0, abs=1e-7),
        pytest.approx(0, abs=1e-3),
    )
    assert voice_scores([direction(d) for d in (0, 90, 180)], ["a", "b", "a"])["score"] == 0


def test_what_cannot_be_compared_has_its_reason() -> None:
    alone = voice_scores([direction(0), direction(5)], ["a", "a"])
    assert (alone["between"], alone["score"]) == ("only one speaker", "within or between has no value")
    assert alone["within"] == pytest.approx(cos(5))
    assert voice_scores([direction(0), direction(5)], ["a", "b"])["within"] == "no speaker with two turns"
    unheard = voice_scores([direction(0), None, direction(40), direction(90)], ["a", "b", "a", "b"])
    assert unheard["within"] == pytest.approx(cos(40))


@given(st.lists(st.tuples(st.floats(0, 360), st.sampled_from("abc")), min_size=2, max_size=7), st.randoms())
@settings(max_examples=40)
def test_the_order_of_turns_has_no_effect(turns: list[tuple[float, str]], random: Any) -> None:
    shuffled = list(turns)
    random.shuffle(shuffled)
    first, second = (
        voice_scores([direction(d) for d, _ in each], [name for _, name in each])
        for each in (turns, shuffled)
    )
    assert first == {k: pytest.approx(v, abs=1e-6) if isinstance(v, float) else v for k, v in second.items()}


def test_a_dialogue_of_turns_and_its_references(book: Book, tmp_path: Path) -> None:
    references = {
        name: ReferenceRecording(audio=book.write(tmp_path / f"{name}.wav", "hello", degrees))
        for name, degrees in (("a", 0), ("b", 90))
    }
    spoken = [
        ("a", "One two.", "one two", 10),
        ("b", "three", "tree", 80),
        ("a", "four five", "four five", 60),
    ]
    made = dialogue(book, tmp_path, spoken, references=references)
    result = evaluate_dialogues([made], bench(book)).result
    assert (result["words"]["rate"], result["words"]["substitutions"]) == (pytest.approx(1 / 5), 1)
    assert result["within"]["mean"] == pytest.approx(cos(50), abs=1e-4)
    assert result["between"]["mean"] == pytest.approx(1 - (cos(70) + cos(20)) / 2, abs=1e-4)
    assert result["reference_similarity"]["mean"] == pytest.approx(
        (cos(10) + cos(10) + cos(60)) / 3, abs=1e-4
    )
    assert (result["nearest_reference"]["accuracy"], result["nearest_reference"]["n"]) == (
        pytest.approx(2 / 3),
        3,
    )


def test_turns_as_spans_of_one_recording_equal_turns_in_files(book: Book, tmp_path: Path) -> None:
    spoken = [("a", "one", "one", 10), ("b", "two", "two", 80), ("a", "three", "three", 20)]
    parts = [book.sound(said, degrees).samples_CN for _, _, said, degrees in spoken]
    save(tmp_path / "whole.wav", torch.cat(parts, dim=1), RATE)
    edges = [0.0]
    for part in parts:
        edges.append(edges[-1] + part.shape[1] / RATE)
    turns = tuple(
        ScriptedTurn(speaker=speaker, text=text, start_s=edges[place], end_s=edges[place + 1])
        for place, (speaker, text, _, _) in enumerate(spoken)
    )
    spans = Dialogue(id="d", turns=turns, audio=tmp_path / "whole.wav")
    files = dialogue(book, tmp_path, spoken)
    assert evaluate_dialogues([spans], bench(book)).result == evaluate_dialogues([files], bench(book)).result


def test_a_whole_without_times_has_words_but_no_voices(book: Book, tmp_path: Path) -> None:
    path = book.write(tmp_path / "whole.wav", "one two three", 0)
    turns = (ScriptedTurn(speaker="a", text="one"), ScriptedTurn(speaker="b", text="two four"))
    result = evaluate_dialogues([Dialogue(id="d", turns=turns, audio=path)], bench(book)).result
    assert result["words"]["rate"] == pytest.approx(1 / 3)
    assert result["within"]["reasons"] == {"no times of the turns": 1}
    silent = evaluate_dialogues([Dialogue(id="d", turns=turns)], bench(book)).result
    assert silent["words"]["reasons"] == {"no sound": 1}
    assert silent["words"]["rate_with_missing"] == 1.0


def test_rows_are_kept(book: Book, tmp_path: Path) -> None:
    made = dialogue(book, tmp_path, [("a", "one", "one", 0), ("b", "two", "two", 90)])
    first, second = bench(book, tmp_path / "kept.jsonl"), bench(book, tmp_path / "kept.jsonl")
    result = evaluate_dialogues([made], first).result
    second = bench(book, tmp_path / "kept.jsonl")
    assert evaluate_dialogues([made], second).result == result
    assert isinstance(second.judges.recognizer, Reader) and second.judges.recognizer.asked == 0


class Cast:
    """Speaks each text in the direction of its reference; without one, in that of its seed."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.heard: list[tuple[str, str | None, str | None]] = []

    def speak(self, text: str, reference: Path | None, reference_text: str | None, seed: int) -> Waveform:
        self.heard.append((text, reference.name if reference else None, reference_text))
        if text == "impossible":
            raise ValueError("cannot say that")
        return self.book.sound(text, 90 * seed)


class Ensemble:
    """Speaks a dialogue as a whole."""

    def __init__(self, book: Book, turns: int | None = None) -> None:
        self.book, self.turns, self.called = book, turns, 0

    def converse(
        self, turns: Sequence[tuple[str, str]], references: Mapping[str, VoicePrompt], seed: int
    ) -> list[Waveform]:
        self.called += 1
        return [self.book.sound(text, 90 * (name == "b")) for name, text in turns][: self.turns]


def test_models_speak_dialogues_and_what_fails_is_named(book: Book, tmp_path: Path) -> None:
    turns = (
        ScriptedTurn(speaker="a", text="one"),
        ScriptedTurn(speaker="b", text="two"),
        ScriptedTurn(speaker="a", text="three"),
    )
    asked = [
        Dialogue(id="d/1", turns=turns),
        Dialogue(id="d2", turns=(ScriptedTurn(speaker="a", text="impossible"),)),
    ]
    cast = Cast(book)
    spoken, problems = speak_dialogues(
        Subject("cast", "c", cast), asked, tmp_path / "audio", 1, lambda _: None
    )
    assert problems == {"d2": "the model failed: ValueError: cannot say that"}
    first_turn = cast.heard[2][1]
    assert cast.heard[:2] == [("one", None, None), ("two", None, None)]
    assert cast.heard[2] == ("three", first_turn, "one") and first_turn is not None
    result = evaluate_dialogues(spoken, bench(book), "", problems).result
    assert (result["words"]["rate"], result["words"]["missing"]) == (0.0, 1)

    ensemble = Ensemble(book)
    for _ in range(2):
        spoken, problems = speak_dialogues(
            Subject("e", "e", ensemble), asked[:1], tmp_path / "other", 0, lambda _: None
        )
    assert (ensemble.called, problems) == (1, {}), "kept"
    result = evaluate_dialogues(spoken, bench(book)).result
    assert result["score"]["mean"] == pytest.approx(1.0, abs=1e-3)
    too_few = Subject("few", "few", Ensemble(book, turns=2))
    _, problems = speak_dialogues(too_few, asked[:1], tmp_path / "few", 0, lambda _: None)
    assert problems["d/1"].endswith("2 sounds for 3 turns")


def test_turn_by_turn_uses_the_references_that_are_there(book: Book, tmp_path: Path) -> None:
    cast = Cast(book)
    known = {"b": VoicePrompt(tmp_path / "b.wav", "the words")}
    TurnByTurn(cast, tmp_path).converse([("a", "one"), ("b", "two"), ("b", "three")], known, 0)
    assert cast.heard == [("one", None, None), ("two", "b.wav", "the words"), ("three", "b.wav", "the words")]


def test_the_list_and_its_mistakes(book: Book, tmp_path: Path) -> None:
    whole = {
        "id": "d",
        "turns": [{"speaker": "a", "text": "one", "audio": "a.wav"}],
        "references": {"a": {"audio": "r.wav", "text": "hello"}},
    }
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps(whole) + "\n")
    (made,) = read_dialogues(path)
    assert made.turns[0].audio == tmp_path / "a.wav"
    assert made.references["a"] == ReferenceRecording(audio=tmp_path / "r.wav", text="hello")
    for change, problem in (
        ({"turns": []}, r"list\.jsonl:1  turns: List should have|turns"),
        ({"turn": 1}, "Extra inputs"),
        ({"turns": [{"speaker": "a", "text": ""}]}, r"turns\.0\.text"),
    ):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(ConfigError, match=problem):
            read_dialogues(path)
    path.write_text(json.dumps(whole) + "\n" + json.dumps(whole))
    with pytest.raises(ConfigError, match="used twice"):
        read_dialogues(path)
    path.write_text("{not json")
    with pytest.raises(ConfigError, match=r"list\.jsonl:1  wrong JSON|wrong JSON"):
        read_dialogues(path)


def test_the_command(book: Book, tmp_path: Path) -> None:
    book.write(tmp_path / "a.wav", "one", 0)
    line = {"id": "d", "turns": [{"speaker": "a", "text": "one", "audio": "a.wav"}]}
    (tmp_path / "list.jsonl").write_text(json.dumps(line))
    command = [
        "evaluate",
        "multi-speaker",
        "--list",
        str(tmp_path / "list.jsonl"),
        "-o",
        str(tmp_path / "out"),
    ]
    answer = CliRunner().invoke(build_app(), command, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["words"]["reasons"] == {"no judge given": 1}
    assert (tmp_path / "out" / "report.html").exists()
