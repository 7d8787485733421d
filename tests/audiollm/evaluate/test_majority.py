"""`evaluate audio-qa` with samples and batches: majority, rows that are kept, refusals, the form of replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from audiollm.audio import Waveform, save
from audiollm.commands.cli import build_app
from audiollm.errors import ConfigError
from audiollm.evaluate.listening.audio_qa import Question, evaluate_audio_qa
from audiollm.evaluate.listening.majority import ReplySampling, check_sampling, majority_replies, sample_all
from audiollm.evaluate.listening.replies import Reply
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.subjects.folder_model import FolderAnswerer
from audiollm.evaluate.subjects.protocols import Subject
from audiollm.families.dual_ffn.answering import DualFFNAnswers
from tests.audiollm.generation.toy_speech import a_voice, toy_generator

VOICES = ("Man", "Woman", "Child")


class Drawer:
    """Draws an option by its seed."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def answer(self, audio: Waveform, question: str) -> str:
        return "Man"

    def answer_many(
        self,
        recordings: Sequence[Waveform],
        questions: Sequence[str],
        seeds: Sequence[int],
        temperature: float,
    ) -> list[str]:
        self.calls.append(len(seeds))
        return [f"<think>well</think><answer>{VOICES[seed % 3]}</answer>" for seed in seeds]


def questions_in(folder: Path, count: int = 3) -> list[Question]:
    for n in range(count):
        save(folder / f"{n}.wav", torch.full((1, 1600), 0.1 * n), 16_000)
    return [
        Question(
            id=f"q{n}", audio_id=f"{n}.wav", question="Who?", choices=VOICES, answer="Man", task="speech"
        )
        for n in range(count)
    ]


def test_the_option_that_most_samples_name_counts() -> None:
    question = Question(id="q", audio_id="a", question="Who?", choices=VOICES, answer="Man")

    def chosen(*texts: str) -> str:
        replies = [Reply(problem="failed") if text == "-" else Reply(text) for text in texts]
        return majority_replies([question], {"q": replies})["q"].text

    assert chosen("Man", "(B)", "Woman") == "(B)"
    assert chosen("Woman", "Man") == "Woman", "named first"
    assert chosen("?", "?", "Man", "-") == "Man"
    assert chosen("?", "-") == "?"


def test_samples_depend_on_neither_batches_nor_order_and_are_kept(tmp_path: Path) -> None:
    questions = questions_in(tmp_path)
    inquiries = [question.inquiry(tmp_path) for question in questions]
    model, store = Drawer(), RowStore(tmp_path / "kept.jsonl")
    found = sample_all(
        Subject("m", "1", model), inquiries, ReplySampling(5, 1.0, 2), store, lambda what: None
    )
    assert model.calls == [10, 5]
    again = sample_all(
        Subject("m", "1", model), inquiries, ReplySampling(5, 1.0, 1), store, lambda what: None
    )
    assert again == found and model.calls == [10, 5]
    other = Drawer()
    alone = sample_all(
        Subject("m", "1", other), inquiries[::-1], ReplySampling(5, 1.0, 1), RowStore(None), lambda what: None
    )
    assert alone == found and other.calls == [5, 5, 5]


def test_a_recording_that_is_gone_is_a_problem_of_its_question(tmp_path: Path) -> None:
    questions = questions_in(tmp_path)
    (tmp_path / "1.wav").unlink()
    inquiries = [question.inquiry(tmp_path) for question in questions]
    sampled = sample_all(
        Subject("m", "1", Drawer()), inquiries, ReplySampling(2, 1.0, 3), RowStore(None), lambda what: None
    )
    result = evaluate_audio_qa(questions, majority_replies(questions, sampled), tmp_path).result
    assert (result["questions"], result["left_out"]) == (3, 1)


class Refuses(Drawer):
    """Fails where the recording of question 1 is in the batch."""

    def answer_many(
        self,
        recordings: Sequence[Waveform],
        questions: Sequence[str],
        seeds: Sequence[int],
        temperature: float,
    ) -> list[str]:
        if any(0.05 < float(wave.samples_CN.max()) < 0.15 for wave in recordings):
            raise RuntimeError("too long")
        return super().answer_many(recordings, questions, seeds, temperature)


def test_a_failure_is_that_of_its_question_whatever_the_batch(tmp_path: Path) -> None:
    inquiries = [question.inquiry(tmp_path) for question in questions_in(tmp_path)]
    found = [
        sample_all(
            Subject("m", "1", Refuses()),
            inquiries,
            ReplySampling(2, 1.0, together),
            RowStore(None),
            lambda _: None,
        )
        for together in (1, 3)
    ]
    assert found[0] == found[1]
    assert {reply.problem for reply in found[1]["q1"]} == {"the model failed: RuntimeError: too long"}
    assert all(reply.text and not reply.problem for id in ("q0", "q2") for reply in found[1][id])


def test_samplings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="temperature 0"):
        check_sampling(ReplySampling(samples=2), Drawer())
    with pytest.raises(ConfigError, match="object answers one question at a time"):
        check_sampling(ReplySampling(together=2), object())


def test_form_and_words_of_thoughts_by_domain(tmp_path: Path) -> None:
    questions = questions_in(tmp_path)
    long_thought = "word " * 51
    replies = {
        "q0": Reply("<think>a b</think><answer>Man</answer>"),
        "q1": Reply(f"<think>{long_thought}</think><answer>Man</answer>"),
        "q2": Reply("Man"),
    }
    outcome = evaluate_audio_qa(questions, replies, tmp_path)
    for table in (outcome.result, outcome.result["by_task"]["speech"]):
        assert table["accuracy"] == 1.0
        assert table["well_formed"]["accuracy"] == pytest.approx(2 / 3)
        assert table["short_thoughts"]["accuracy"] == 0.5
        assert (table["thought_words"]["mean"], table["well_formed"]["n"]) == (26.5, 3)
    assert outcome.tables[-1].title == "form of the replies"
    poor = {"q0": Reply("<think></think><answer>Man</answer>"), "q1": Reply("<think>a b"), "q2": Reply("Man")}
    unthought = evaluate_audio_qa(questions, poor, tmp_path).result
    assert unthought["short_thoughts"]["accuracy"] == unthought["well_formed"]["accuracy"] == 0.0
    plain = evaluate_audio_qa(questions, dict.fromkeys(replies, Reply("Man")), tmp_path)
    assert "well_formed" not in plain.result


def test_the_command_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = questions_in(tmp_path)
    (tmp_path / "list.json").write_text(json.dumps([question.model_dump() for question in questions]))
    (tmp_path / "drawing.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path.cwd())!r})\n"
        "from tests.audiollm.evaluate.test_majority import Drawer\n"
    )
    monkeypatch.chdir(tmp_path)
    given = ["evaluate", "audio-qa", "--list", "list.json", "--model", "drawing:Drawer", "--out", "scores"]
    done = CliRunner().invoke(build_app(), [*given, "--samples", "4", "--temperature", "1", "--batch", "2"])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "scores" / "results.json").read_text())
    assert result["well_formed"]["accuracy"] == 1.0
    refused = CliRunner().invoke(build_app(), [*given, "--samples", "4"])
    assert refused.exit_code != 0


def test_our_model_samples_each_answer_by_its_own_seed() -> None:
    own = FolderAnswerer(DualFFNAnswers(toy_generator(), Path("toy"), ""), max_tokens=6)
    waves, questions = [a_voice(0.6)] * 4, ["what", "what", "what", "who"]
    together = own.answer_many(waves, questions, [1, 2, 1, 3], temperature=2.0)
    assert together[0] == together[2] != together[1]
    assert own.answer_many(waves[:1], questions[:1], [2], temperature=2.0) == [together[1]]
    assert own.answer_many(waves[:1], questions[:1], [2], temperature=0.0) == [own.answer(waves[0], "what")]
