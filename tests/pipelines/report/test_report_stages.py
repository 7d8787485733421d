"""The report of runs with several stages of a kind, with answers to listen to, and with few kinds of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiollm.evaluate.listening.asr import TranscribedRecording, evaluate_asr
from audiollm.evaluate.listening.audio_qa import Question, evaluate_audio_qa
from audiollm.evaluate.listening.replies import Reply
from audiollm.evaluate.listening.report_section import answers_section
from audiollm.evaluate.listening.stage import listening_figures
from audiollm.files.atomic import write_json, write_jsonl
from audiollm.pages.clips import Gallery, shares
from audiollm.pages.run_record import RunRecord
from audiollm.pages.sections import ReportContext
from audiollm.synthesis.report_section import samples_section
from pipelines.compose.report_section import recordings_section
from tests.pipelines.report.report_run import (
    HOSTILE,
    Page,
    Run,
    beep,
    judged,
    model_trained,
    section_of,
    spoken,
    tokenizer_trained,
    tree,
)

SPEAKING = """
name: seeds
stages:
  - compose: {segments: AUDIO}
  - name: language
    train: {samples: "${compose.samples}"}
  - name: speech
    train: {samples: "${compose.samples}", start: "${language.checkpoint}", trained: audio_ffn}
  - name: say_first
    generate: {model: "${language.checkpoint}", codec: AUDIO, samples: "${compose.samples}"}
  - name: judge_first
    evaluate: {audio: "${say_first.audio}", samples: "${compose.samples}"}
  - name: say_second
    generate: {model: "${speech.checkpoint}", codec: AUDIO, samples: "${compose.samples}"}
  - name: judge_second
    evaluate: {audio: "${say_second.audio}", samples: "${compose.samples}"}
  - report: {}
"""
TOKENIZERS = """
name: codecs
stages:
  - compose: {segments: AUDIO}
  - name: coarse
    train_tokenizer: {audio: "${compose.samples}"}
  - name: fine
    train_tokenizer: {audio: "${compose.samples}"}
  - report: {}
"""
LISTENING = """
name: listening
stages:
  - compose: {segments: AUDIO}
  - train: {samples: "${compose.samples}"}
  - name: before
    evaluate_listening: {model: "${train.checkpoint}", samples: "${compose.samples}"}
  - name: after
    evaluate_listening: {model: "${train.checkpoint}", samples: "${compose.samples}"}
  - report: {}
"""
ONE_LISTENING = "\n".join([*LISTENING.splitlines()[:-3], "  - report: {}"])
WHO = f"Who speaks? {HOSTILE}"


def answered(run: Run, stage: str, replies: dict[str, str]) -> None:
    """`who0` to `who3` are asked who speaks, `said0` and `said1` what is said; results by the suites themselves."""
    choices = ("ann", "bob", HOSTILE)
    wanted = {
        "who0": "ann",
        "who1": "ann",
        "who2": "bob",
        "who3": HOSTILE,
        "said0": "one two",
        "said1": "three",
    }
    samples = []
    for id, answer in wanted.items():
        beep(run.audio / f"{id}.wav", duration_s=0.4)
        heard = {"type": "audio", "path": str(run.audio / f"{id}.wav"), "start_s": 0.1, "end_s": 0.3}
        question = {"type": "text", "text": WHO if id.startswith("who") else "What is said?"}
        user = {"role": "user", "content": [heard, question]}
        told = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        samples.append({"id": id, "task": "t", "messages": [user, told], "metadata": {}})
    write_jsonl(run.folder("compose") / "samples.jsonl", samples)
    run.done("compose", {"train_samples": 0, "test_samples": len(samples)})
    told = {id: Reply(text) for id, text in replies.items()}
    said = [
        TranscribedRecording(id, Path(), text, "en") for id, text in wanted.items() if id.startswith("said")
    ]
    asked = [
        Question(id=id, audio_id="a", question=WHO, choices=choices, answer=answer)
        for id, answer in wanted.items()
        if id.startswith("who")
    ]
    outcomes = {
        "asr": evaluate_asr(said, told, "spoken"),
        "audio-qa": evaluate_audio_qa(asked, told, Path()),
    }
    for name, outcome in outcomes.items():
        write_json(run.folder(stage) / name / "results.json", outcome.result)
    write_jsonl(run.folder(stage) / "asr" / "rows.jsonl", outcomes["asr"].rows)
    rows = [
        {
            "id": question.id, "question": WHO, "answer": question.answer, "choices": 3,
            "reply": replies[question.id], "right": replies[question.id] == question.answer,
            "named": replies[question.id] if replies[question.id] in choices else None,
            "problem": "", "left_out": False,
        }
        for question in asked
    ]  # fmt: skip
    write_jsonl(run.folder(stage) / "audio-qa" / "rows.jsonl", rows)
    run.done(stage, listening_figures({name: outcome.result for name, outcome in outcomes.items()}))


REPLIES = {
    "who0": "ann",
    "who1": "bob",
    "who2": "bob",
    "who3": "nobody",
    "said0": "one too",
    "said1": "three",
}


# -------------------------------------------------------------------------------------- several trainings


def test_every_training_is_shown_in_the_order_of_the_recipe(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=SPEAKING)
    model_trained(run, "language", audio_loss=3.25)
    model_trained(run, "speech", audio_loss=2.5)
    write_jsonl(run.folder("language") / "alarms.jsonl", [{"step": 3, "kind": "spike", "text": "loss of 9"}])
    html, summary = run.report()
    page = Page(html)
    assert [each for each in page.details if each[0] in ("language", "speech")] == [
        ("language", False), ("speech", True), ("language", False), ("speech", False),
    ]  # fmt: skip  # the last one of the section open; then the settings of the configuration
    assert page.tags["svg"] == 2 * 5
    places = [page.text.index(text) for text in ("3.250", "loss of 9", "2.500")]
    assert places == sorted(places)
    assert "begins from" in page.text and "audio_ffn" in page.text
    # six prompts in all, of which each stage said the first at four evaluations, and the second at one
    assert page.tags["audio"] == 2 * (4 + 1)
    assert summary["train"]["language"]["audio_loss"] == 3.25
    assert summary["train"]["speech"]["audio_loss"] == 2.5


def test_a_training_that_has_not_run_says_so_and_the_last_that_has_is_open(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=SPEAKING)
    model_trained(run, "language")
    page = Page(run.report(players=False)[0])
    assert page.details[:2] == [("language", True), ("speech", False)]
    assert page.text.count("The stage speech has not run.") == 2  # beside its name, and below


def test_every_tokenizer_is_shown_in_the_order_of_the_recipe(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=TOKENIZERS)
    tokenizer_trained(run, "coarse", mel=1.25, examples=3)
    html, summary = run.report()
    page = Page(html)
    assert page.details[:2] == [("coarse", True), ("fine", False)]
    assert page.text.count("The stage fine has not run.") == 2 and page.tags["audio"] == 3 * 3
    assert summary["tokenizer"]["fine"] is None and summary["tokenizer"]["coarse"]["mel"] == 1.25
    tokenizer_trained(run, "fine", mel=0.75, examples=3)
    page = Page(run.report()[0])
    assert page.details[:2] == [("coarse", False), ("fine", True)]
    assert page.tags["audio"] == 4 * 3, "four clips in all, before and after"
    places = [page.text.index(text) for text in ("1.250", "0.750")]
    assert places == sorted(places) and page.text.count("codebook collapse") == 2


# ------------------------------------------------------------------------------------- several evaluations


@pytest.fixture(scope="module")
def two_voices(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str, dict[str, Any]]:
    run = Run(tmp_path_factory.mktemp("run"), recipe=SPEAKING)
    judged(run, spoken(run, stage="say_first"), stage="judge_first", generate="say_first")
    texts = ("one", "two", "three")
    judged(run, spoken(run, texts, stage="say_second"), stage="judge_second", generate="say_second")
    return run, *run.report(samples=5)


def test_every_evaluation_has_its_tables_samples_and_headline(
    two_voices: tuple[Run, str, dict[str, Any]],
) -> None:
    page = Page(two_voices[1])
    assert page.tags["audio"] == 5  # of both together, the last with what is left over
    assert "2 of 4 clips" in page.text and "3 of 6 clips" in page.text
    assert [each for each in page.details if each[0].startswith("say_")][:2] == [
        ("say_first", False), ("say_second", True),
    ]  # fmt: skip
    assert [each for each in page.details if each[0].startswith("judge_")][:2] == [
        ("judge_first", False), ("judge_second", True),
    ]  # fmt: skip
    assert page.text.count("n = 4") and page.text.count("n = 6")
    for name in ("judge_first", "judge_second"):
        assert f"{name}: right text, relative to real" in page.text
    assert page.text.count("Other measures") == 2


def test_the_summary_of_several_stages_of_a_kind_is_by_their_names(
    two_voices: tuple[Run, str, dict[str, Any]],
) -> None:
    summary = two_voices[2]
    assert {name: found["n_generated"] for name, found in summary["evaluate"].items()} == {
        "judge_first": 4, "judge_second": 6,
    }  # fmt: skip
    assert summary["generate"]["say_second"]["clips"] == 6
    assert summary["train"] == {"language": None, "speech": None}
    assert summary["relative_accuracy"] is None and summary["judge"] is None  # there is not one of it
    assert summary["tokenizer"] is None and summary["evaluate_listening"] is None


def test_what_no_judge_has_heard_is_shown_beside_what_one_has(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=SPEAKING)
    judged(run, spoken(run, stage="say_first"), stage="judge_first", generate="say_first")
    spoken(run, stage="say_second")
    page = Page(run.report(players=False)[0])
    assert "No judge has heard them. The stage judge_second has not run." in page.text
    assert page.tags["img"] == 8


def test_where_the_page_has_its_fill_of_sound_the_last_stage_is_heard(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=SPEAKING)
    for stage in ("say_first", "say_second"):
        spoken(run, stage=stage)

    def heard(gallery: Gallery) -> list[list[int]]:
        section = samples_section(ReportContext(RunRecord(run.recipe, run.results), gallery, 4))
        assert section is not None
        stages = tree(str(section.content)).all("details", "stage")
        cards = [stage.all("article") for stage in stages]
        return [
            [sum(len(audio.attributes["src"]) for audio in card.all("audio")) for card in of] for of in cards
        ]

    _, last = heard(Gallery())
    assert heard(Gallery(most_bytes=sum(last))) == [[0, 0], last]


# ------------------------------------------------------------------------------------------------ answers


def test_answers_are_scored_by_word_by_question_and_by_answer(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=ONE_LISTENING)
    answered(run, "before", REPLIES)
    html, summary = run.report()
    page = Page(html)
    assert HOSTILE not in html and WHO in page.text
    assert summary["evaluate_listening"]["accuracy"] == 0.5
    # one of three words; two of four answers of three, Wilson's interval
    for text in (
        "33.3 %",
        "3 words",
        "50.0 %",
        "15.0 % to 85.0 %, n = 4",
        "chance 33.3 %",
        "right answers",
    ):
        assert text in page.text, text
    assert "25.0 % of the answers name no option" in " ".join(page.text.split())
    assert "none or several" in page.text
    assert [alt for tag, key, alt in page.attributes if tag == "img" and key == "alt"] == [
        f"spectrogram of {asked}, {id}"
        for asked, id in (
            ("one two", "said0"), ("ann", "who1"), (HOSTILE, "who3"),
            ("three", "said1"), ("bob", "who2"), ("ann", "who0"),
        )
    ]  # fmt: skip
    assert page.tags["audio"] == 6 and page.text.count("✗ wrong") == 3
    assert page.text.count("0.20 s") == 6  # the span of each recording, not all of it


def test_counts_of_what_was_answered_in_place_of_what(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=ONE_LISTENING)
    answered(run, "before", REPLIES)
    (matrix,) = section_of(run, answers_section).all("table", "heat")
    assert [heading.text for heading in matrix.all("th")[1:5]] == [HOSTILE, "ann", "bob", "(none or several)"]
    assert {row[0]: row[1:] for row in matrix.rows()} == {
        "ann": ["", "1", "1", ""], "bob": ["", "", "1", ""], HOSTILE: ["", "", "", "1"],
    }  # fmt: skip


def test_several_listening_stages_each_have_a_place(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=LISTENING)
    answered(run, "before", REPLIES)
    html, summary = run.report()
    page = Page(html)
    assert [each for each in page.details if each[0] in ("before", "after")][:2] == [
        ("before", True), ("after", False),
    ]  # fmt: skip
    assert "The stage after has not run." in page.text
    assert summary["evaluate_listening"]["after"] is None
    answered(run, "after", dict.fromkeys(REPLIES, "bob"))
    html, summary = run.report()
    page = Page(html)
    assert page.tags["audio"] == 12  # six of each
    assert "before: right answers" in page.text and "after: word error rate" in page.text
    assert summary["evaluate_listening"]["after"]["accuracy"] == 0.25


def test_many_answers_are_a_list_in_place_of_a_table(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=ONE_LISTENING)
    answered(run, "before", REPLIES)
    path = run.folder("before") / "audio-qa" / "rows.jsonl"
    row = {"question": WHO, "choices": 20, "reply": "x", "named": "x", "right": False, "problem": ""}
    write_jsonl(path, [{**row, "id": str(n), "answer": f"answer {n}"} for n in range(20)])
    page = Page(run.report(players=False)[0])
    assert "answer asked for" in page.text and "answered →" not in page.text
    assert "its sample is no longer there" in page.text


def test_answers_that_name_no_option_are_a_list_below_the_question_of_the_sample(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=ONE_LISTENING)
    answered(run, "before", REPLIES)
    row = {"answer": "ann", "choices": 3, "reply": "a wall of text", "right": False, "problem": ""}
    write_jsonl(run.folder("before") / "audio-qa" / "rows.jsonl", [{**row, "id": "who0"}])
    (listed,) = section_of(run, answers_section).all("details")
    assert listed.all("summary")[0].text == f"By answer: {WHO}" and not listed.all("table", "heat")
    ((name, score),) = listed.all("table", "scores")[0].rows()
    assert name == "ann" and score.startswith("0.0 %") and score.endswith("n = 1")


def test_answers_without_samples_or_cases_leave_gaps(tmp_path: Path) -> None:
    run = Run(tmp_path, recipe=ONE_LISTENING)
    answered(run, "before", REPLIES)
    (run.folder("compose") / "samples.jsonl").unlink()
    assert Page(run.report()[0]).text.count("its sample is no longer there") == 6
    (run.folder("before") / "audio-qa" / "rows.jsonl").unlink()
    assert "audio-qa/rows.jsonl has none" in Page(run.report()[0]).text


# ------------------------------------------------------------------------------------------------ the page


def test_a_section_has_a_place_where_the_recipe_has_its_stage(tmp_path: Path) -> None:
    texts = {}
    for name, recipe in (("listening", ONE_LISTENING), ("speaking", SPEAKING)):
        texts[name] = Page(Run(tmp_path / name, recipe=recipe).report()[0])
    links = {
        name: [value for tag, key, value in page.attributes if (tag, key) == ("a", "href")]
        for name, page in texts.items()
    }
    assert links["listening"] == ["#recordings", "#training", "#answers", "#run"]
    assert links["speaking"] == ["#recordings", "#training", "#samples", "#scores", "#run"]
    assert not any("This recipe has no stage" in page.text for page in texts.values())
    assert "right answers" not in texts["speaking"].text
    assert "The stage before has not run." in texts["listening"].text


@given(st.integers(0, 60), st.integers(0, 60))
def test_shares_of_clips_add_up_and_favour_the_last(total: int, count: int) -> None:
    found = shares(total, count)
    assert len(found) == count and sum(found) == (total if count else 0)
    assert found == sorted(found) and (not found or found[-1] - found[0] <= 1)


TWO_SOURCES = """
name: sources
stages:
  - name: people
    annotate: {input: AUDIO}
  - name: spoken
    annotate: {}
  - name: people_samples
    compose: {segments: "${people.segments}"}
  - name: spoken_samples
    compose: {segments: "${spoken.segments}"}
  - report: {}
"""


def test_samples_are_shown_below_the_annotation_that_they_were_made_of(tmp_path: Path) -> None:
    """A bar of samples is a share of the segments that they come from, and each annotation has its own bars."""
    run = Run(tmp_path, recipe=TWO_SOURCES)
    for name, segments, samples in (("people", 8, 4), ("spoken", 200, 200)):
        run.done(
            name,
            {"files_seen": segments, "audio_files": segments, "files_kept": segments, "segments": segments},
        )
        run.done(f"{name}_samples", {"train_samples": samples, "test_samples": 0, "train_seconds": 60.0})
    section = section_of(run, recordings_section)
    assert [heading.text for heading in section.all("h3")] == ["people", "spoken"]
    people, spoken_funnel = section.all("div", "funnel")
    assert "files seen 8" in people.text and "4 to train on" in people.text and "200" not in people.text
    assert "files seen 200" in spoken_funnel.text and "200 to train on" in spoken_funnel.text
    assert people.all("i")[-1].attributes["style"] == "width:50.00%", "4 of its 8 segments"
