"""`evaluate audio-qa`: answers read by hand-worked cases, MMAU's match, its published list, scores by group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.errors import ConfigError
from audiollm.evaluate.listening.audio_qa import (
    LETTERS,
    Question,
    evaluate_audio_qa,
    mmau_match,
    read_questions,
    unread_key,
)
from audiollm.evaluate.listening.choices import read_choice
from audiollm.evaluate.listening.replies import Reply
from audiollm.evaluate.listening.trained_questions import trained_questions
from tests.audiollm.evaluate.marked_clips import Book

VOICES = ["Man", "Woman", "Child", "Robot"]


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("Woman", 1),
        ("  woman. ", 1),
        ("B", 1),
        ("b)", 1),
        ("(B)", 1),
        ("(B) Woman", 1),
        ("B. Woman", 1),
        ("The answer is B.", 1),
        ("Answer: (C)", 2),
        ("The correct option is (D), since it beeps.", 3),
        ("I would choose (A).", 0),
        ("It is the voice of a man.", 0),
        ("This is a woman speaking", 1),
        ("<think>Man? No: (A) is wrong.</think>Woman", 1),
        ("either a man or a woman", None),
        ("(A) or (B)", None),
        ("The answer is A. No, the answer is B.", None),
        ("A dog", None),
        ("A wonderful sound", None),
        ("E", None),
        ("", None),
        ("I cannot tell.", None),
    ],
)
def test_what_a_reply_names(reply: str, choice: int | None) -> None:
    assert read_choice(reply, VOICES) == choice


def test_options_within_options_and_options_that_are_letters() -> None:
    nested = ["An adult man", "man", "A woman", "A child"]
    assert read_choice("I hear an adult man here", nested) == 0
    assert read_choice("I hear a man here", nested) == 1
    assert read_choice("D", ["D", "A", "G", "E"]) == 0, "the text was asked for"
    assert read_choice("same", ["same", "same", "x"]) == read_choice("(B)", ["same", "same", "x"]) == 0


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("F# major", 2),
        ("f major.", 0),
        ("<think>F major?</think><answer>F♯ major</answer>", 2),
        ("The key is F# major, I think.", 2),
        ("It is in F major", 0),
        ("F major or F# major", None),
        ("C", 2),
    ],
)
def test_options_that_a_sign_alone_tells_apart(reply: str, choice: int | None) -> None:
    assert read_choice(reply, ["F major", "D major", "F# major", "A major"]) == choice


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("The answer is A major.", 2),
        ("The answer is A major, not C major", 2),
        ("The answer is A.", 0),
        ("The answer is A because of the third", 0),
        ("Answer: C A major", 2),
        ("The answer is (A) C major", 0),
        ("The answer is B minor", 1),
        ("The answer is B flat", 1),
    ],
)
def test_a_letter_that_begins_an_option_is_no_mark(reply: str, choice: int) -> None:
    assert read_choice(reply, ["C major", "D major", "A major", "B minor"][:3]) == choice


def test_an_article_is_no_letter() -> None:
    assert read_choice("The answer is A woman.", VOICES) == 1
    assert read_choice("The right choice is A dog", ["Dog", "Cat"][::-1]) == 1


def test_numbers_with_and_without_a_minus_are_two_options() -> None:
    levels = ["5 dB", "-5 dB", "10 dB"]
    assert [read_choice(reply, levels) for reply in ("-5 dB", "5 dB", "by \u22125 dB")] == [1, 0, 1]
    assert read_choice("+", ["+", "-"]) == 0 and read_choice("-", ["+", "-"]) == 1


@given(
    st.lists(st.sampled_from(["cat", "dog", "a red car", "rain", "two bells"]), min_size=2, unique=True),
    st.data(),
)
@settings(max_examples=50)
def test_every_option_is_read_back_by_text_and_by_letter(choices: list[str], data: Any) -> None:
    place = data.draw(st.integers(0, len(choices) - 1))
    for form in (
        choices[place],
        LETTERS[place],
        f"({LETTERS[place]}) {choices[place]}",
        f"It is {choices[place]}!",
    ):
        assert read_choice(form, choices) == place


@pytest.mark.parametrize(
    ("reply", "matched"),
    [
        ("Woman", True),
        ("it is a WOMAN.", True),
        ("a woman, not a man", False),  # a word of another option
        ("B", False),
        ("", False),
        ("womanly", False),
    ],
)
def test_the_published_match(reply: str, matched: bool) -> None:
    """Worked by hand from `string_match` of MMAU's evaluation.py."""
    assert mmau_match(reply, "Woman", VOICES) is matched


def test_the_published_match_forgives_words_that_options_share() -> None:
    choices = ["A fast car", "A slow car"]
    assert mmau_match("a fast car", "A fast car", choices)
    assert not mmau_match("(B) a fast car", "A fast car", ["A fast car", "b"])


def question(id: str, **changes: Any) -> dict[str, Any]:
    base = {
        "id": id,
        "audio_id": f"{id}.wav",
        "question": "Who speaks?",
        "choices": VOICES,
        "answer": "Woman",
    }
    groups = {"task": "speech", "difficulty": "easy", "category": "Reasoning", "sub-category": "Source"}
    return {**base, **groups, "dataset": "x", **changes}


def test_scores_by_group_with_chance_and_unusable_answers() -> None:
    listed = [
        question("a"),
        question("b", task="music"),
        question("c", task="music", choices=["Man", "Woman"], difficulty="hard"),
        question("d"),
        question("e"),
    ]
    questions = [Question.model_validate(each) for each in listed]
    replies = {
        "a": Reply("(B)"),
        "b": Reply("Woman"),
        "c": Reply("who knows"),
        "d": Reply(problem="the model failed: E: x"),
        "e": Reply(problem="cannot be heard: no such file"),
    }
    outcome = evaluate_audio_qa(questions, replies, Path())
    result = outcome.result
    assert (result["accuracy"], result["n"], result["left_out"]) == (2 / 4, 4, 1)
    assert result["mmau_string_match"]["accuracy"] == 1 / 4, "a letter is no match there"
    assert result["chance"] == pytest.approx((3 / 4 + 1 / 2) / 4)
    assert result["no_usable_answer"] == 2 / 4
    assert result["by_task"]["music"]["accuracy"] == 1 / 2
    assert set(result["by_difficulty"]) == {"easy", "hard"}
    assert result["by_sub_category"]["Source"]["n"] == 4
    assert {example.title.split()[0] for example in outcome.examples[:3]} == {"c", "d", "e"}


def test_a_right_answer_that_is_not_read_as_itself_leaves_its_question_out_and_is_named(
    tmp_path: Path,
) -> None:
    Book().write(tmp_path / "a.wav", "x", 0)
    listed = [question("a"), question("b", choices=["?", "Man"], answer="?", audio_id="a.wav")]
    questions = [Question.model_validate(each) for each in listed]
    assert [unread_key(each) for each in questions] == [
        "",
        "the right answer is not read as itself: '?' names no option",
    ]
    result = evaluate_audio_qa(questions, {"a": Reply("Woman"), "b": Reply("?")}, tmp_path).result
    assert (result["accuracy"], result["n"], result["left_out"]) == (1.0, 1, 1)
    rows = [{**each, "model_output": each["answer"]} for each in listed]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    command = ["evaluate", "audio-qa", "--list", str(tmp_path / "list.json"), "-o", str(tmp_path / "out")]
    answer = CliRunner().invoke(build_app(), [*command, "--replies", str(tmp_path / "list.json")])
    assert answer.exit_code == 0, answer.output
    assert "question 'b' is left out: the right answer is not read as itself" in " ".join(
        answer.output.split()
    )


def asking(id: str, text: str, path: str, start_s: float = 0.0, split: str = "train") -> Sample:
    """A sample that asks a question about a recording."""
    heard = AudioPart(path=path, start_s=start_s)
    messages = [
        Message(role="user", content=[heard, TextPart(text=f"{text} Choose one: Man, Woman.")]),
        Message(role="assistant", content=[TextPart(text="Man")]),
    ]
    return Sample(id=id, messages=messages, task="question", metadata={"split": split})


def write_stage(folder: Path, **settings: Any) -> Path:
    """A stage's folder as a run leaves it, with a model."""
    (folder / "model").mkdir(parents=True)
    record = {
        "name": folder.name,
        "kind": "train",
        "fingerprint": "0",
        "state": "done",
        "settings": settings,
    }
    (folder / "stage.json").write_text(json.dumps(record))
    return folder


def test_questions_that_the_model_was_trained_on_are_scored_apart(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.wav").write_bytes(b"")
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    write_samples(first, [asking("1", "Who speaks?", "a.wav"), asking("2", "Who sings?", "a.wav")])
    write_samples(
        second,
        [asking("3", "Who speaks?", "b.wav", split="test"), asking("4", "Who speaks?", "c.wav", start_s=2.0)],
    )
    start = write_stage(tmp_path / "sft", samples=[{"path": str(first), "weight": None}])
    run = write_stage(tmp_path / "grpo", samples=str(second), start=str(start / "model"))
    listed = [
        question(str(number), question=text, audio_id=audio)
        for number, (text, audio) in enumerate(
            [
                ("Who speaks?", "a.wav"),
                ("Who laughs?", "a.wav"),
                ("Who speaks?", "b.wav"),
                ("Who speaks?", "c.wav"),
            ]
        )
    ]
    listed.append({**question("4", question="Who speaks?", audio_id="c.wav"), "start_s": 2.0})
    questions = [Question.model_validate(record) for record in listed]
    trained = trained_questions(run, questions, tmp_path)
    assert trained == {"0", "4"} == trained_questions(run / "model", questions, tmp_path)
    assert not trained_questions(tmp_path / "elsewhere", questions, tmp_path)
    replies = {asked.id: Reply(asked.answer if asked.id in trained else "?") for asked in questions}
    outcome = evaluate_audio_qa(questions, replies, tmp_path, trained=trained)
    shares = {name: table["accuracy"] for name, table in outcome.result["by_training"].items()}
    assert shares == {"trained on": 1.0, "not trained on": 0.0}
    assert "2 of 5 questions are among those that the model was trained on" in " ".join(outcome.about)
    assert "by_training" not in evaluate_audio_qa(questions, replies, tmp_path).result


def test_the_thirteen_answers_of_the_case_are_read() -> None:
    choices = ["rain", "a dog barking", "a siren"]
    replies = (
        "**B**", "The answer is **B**.", r"\boxed{B}", '"B"', "[B]", "(b) because of the noise",
        "the answer is option b", "Ｂ", "（B）", "答案是B。", '{"answer": "B"}', "B<|im_end|>",
        "<thinking>maybe rain</thinking>B",
    )  # fmt: skip
    assert [read_choice(reply, choices) for reply in replies] == [1] * 13


WORDINGS = (
    "{text}", "({letter}) {text}", "{letter}", "**{letter}. {text}**", "The correct answer is ({letter}).",
    "答案是{letter}。", '{{"answer": "{letter}"}}', r"\boxed{{{letter}}}", "The answer is '{text}', not '{wrong}'.",
    "Final answer: {text}",
    "<think>maybe {wrong}</think>{text}", "{text}<|im_end|>", "I would choose {letter}.",
)  # fmt: skip
DENIALS = ("It is not {text}.", "The answer is not {letter}.", "{text} or {wrong}", "<think>It is {text}, as")


def test_the_options_of_the_published_list_are_read_in_every_wording(shared_data: Path) -> None:
    path = shared_data / "text_benchmarks" / "MMAU" / "mmau-test-mini.json"
    if not path.exists():
        pytest.skip(f"no list at {path}")
    count, wrong = 0, []
    for asked in read_questions(path)[::16]:
        for place, text in enumerate(asked.choices):
            other = asked.choices[(place + 1) % len(asked.choices)]
            values = {"text": text, "wrong": other, "letter": LETTERS[place]}
            for wording in (*WORDINGS, *DENIALS) if other != text else ():
                choice = read_choice(wording.format(**values), asked.choices)
                count += 1
                if (choice is not None and asked.choices[choice] == text) is (wording in DENIALS):
                    wrong.append(wording.format(**values))
    assert count > 3000 and len(wrong) <= 0.002 * count, wrong


def test_the_published_list(shared_data: Path) -> None:
    path = shared_data / "text_benchmarks" / "MMAU" / "mmau-test-mini.json"
    if not path.exists():
        pytest.skip(f"no list at {path}")
    questions = read_questions(path)
    assert len(questions) == 1000
    places = {q.id: q.choices.index(q.answer) for q in questions}
    ideal = evaluate_audio_qa(questions, {q.id: Reply(q.answer) for q in questions}, path.parent).result
    letters = {q.id: Reply(f"({LETTERS[places[q.id]]})") for q in questions}
    by_letter = evaluate_audio_qa(questions, letters, path.parent).result
    wrong = {q.id: Reply(q.choices[(places[q.id] + 1) % len(q.choices)]) for q in questions}
    astray = evaluate_audio_qa(questions, wrong, path.parent).result
    assert ideal["mmau_string_match"]["accuracy"] == 1.0
    assert set(ideal["by_task"]) == {"sound", "music", "speech"}
    assert ideal["accuracy"] == 1.0
    assert by_letter["accuracy"] >= 0.998, "two questions have letters (notes) as options"
    twice = sum(q.choices[(places[q.id] + 1) % len(q.choices)] == q.answer for q in questions) / 1000
    assert astray["accuracy"] == twice, "the list has options that are there twice"
    assert 0.2 < ideal["chance"] < 0.35


def test_the_list_the_replies_and_the_command(tmp_path: Path) -> None:
    Book().write(tmp_path / "a.wav", "x", 0)
    listed = [{**question("a"), "model_output": "Woman"}, {**question("b"), "model_output": "Man"}]
    (tmp_path / "list.json").write_text(json.dumps(listed))
    command = ["evaluate", "audio-qa", "--list", str(tmp_path / "list.json"), "-o", str(tmp_path / "out")]
    answer = CliRunner().invoke(
        build_app(), [*command, "--replies", str(tmp_path / "list.json")], catch_exceptions=False
    )
    assert answer.exit_code == 0, answer.output
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (result["accuracy"], result["mmau_string_match"]["accuracy"]) == (0.5, 0.5)
    assert "No sound" in (tmp_path / "out" / "report.html").read_text(), "b.wav is not there"
    for change, problem in (
        ({"answer": "Dog"}, "none of the choices"),
        ({"choices": ["Woman"]}, "choices"),
        ({"audio_id": ""}, "audio_id"),
    ):
        (tmp_path / "list.json").write_text(json.dumps([question("a", **change)]))
        with pytest.raises(ConfigError, match=rf"list\.json\[0\].*{problem}"):
            read_questions(tmp_path / "list.json")
    (tmp_path / "list.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"list\.json:1  audio_id: Field required"):
        read_questions(tmp_path / "list.json")
