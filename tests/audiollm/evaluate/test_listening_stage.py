"""The stage `evaluate_listening`: answers to held-out samples, and a model that hears without a codec."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from audiollm.audio import Waveform, load_bytes, save
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart, write_samples
from audiollm.errors import ConfigError, StageError
from audiollm.evaluate.listening.stage import (
    SECONDS_PER_QUESTION,
    TINY_PARAMETERS,
    ListeningConfig,
    choices_of,
    plan_listening,
    run_listening,
)
from audiollm.evaluate.subjects import loading as subjects
from audiollm.evaluate.subjects.folder_model import FolderSpeaker
from audiollm.evaluate.subjects.loading import load_answerer
from audiollm.evaluate.subjects.protocols import Conversant, Subject
from audiollm.families.answering import AnswerError
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe, StagePlan
from tests.audiollm.supervised.heard_samples import small_model, small_template, sound


class Ear:
    """Tells high from low, and hears `hello there` in everything."""

    def answer(self, audio: Waveform, question: str) -> str:
        crossings = (audio.samples_CN[0, 1:] * audio.samples_CN[0, :-1] < 0).sum() / audio.duration_s
        return "hello there" if "said" in question else "It is high." if crossings > 1000 else "Low!"


def sample(id: str, path: Path, question: str, answer: str, split: str = "test") -> Sample:
    user = Message(role="user", content=[AudioPart(path=str(path)), TextPart(text=question)])
    told = Message(role="assistant", content=[TextPart(text=answer)])
    task = "asr" if "said" in question else "tone"
    return Sample(id=id, messages=[user, told], task=task, metadata={"split": split, "speaker": "ann"})


def context(folder: Path) -> Context:
    folder.mkdir(exist_ok=True)
    return Context(folder, Recipe("test", folder, "tiny", 0, folder, (), {}), Console(quiet=True), {})


def scored(tmp_path: Path, samples: list[Sample], **settings: Any) -> dict[str, Any]:
    write_samples(tmp_path / "samples.jsonl", samples)
    config = ListeningConfig.model_validate(
        {"model": str(tmp_path), "samples": str(tmp_path / "samples.jsonl"), **settings}
    )
    return run_listening(config, context(tmp_path / "stage"))


def test_transcripts_are_scored_by_words_and_answers_by_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "load_answerer", lambda *given: Subject("ear", "1", Ear()))
    high, low = tmp_path / "high.wav", tmp_path / "low.wav"
    save(high, sound(0.3, 0, 2500.0), 16_000)
    save(low, sound(0.3, 0, 300.0), 16_000)
    samples = [
        sample("a", high, "What is said?", "hello there"),
        sample("b", low, "What is said?", "hello my friend"),
        sample("c", high, "Which tone?", "high"),
        sample("d", low, "Which tone?", "high"),
        sample("e", low, "Which tone?", "low", "train"),  # gives a choice, and is not asked
        sample("f", low, "Why?", "no one knows"),  # a question with one answer has no choice
    ]
    shown = samples[3].messages[0].content
    samples[3].messages[0] = Message(role="user", content=[VideoPart(path="d.mp4"), *shown])
    found = scored(tmp_path, samples)
    assert found["with_video"] == 1
    # two wrong of the five words that are said; one of two right, and two to choose from
    assert found["error_rate"]["en"] == pytest.approx(2 / 5)
    assert (found["questions"], found["accuracy"], found["chance"]) == (2, 0.5, 0.5)
    assert found == read_json(tmp_path / "stage" / "results.json")
    assert (tmp_path / "stage" / "audio-qa" / "report.html").exists()
    rows = read_jsonl(tmp_path / "stage" / "audio-qa" / "rows.jsonl")
    assert [(row["id"], row["question"], row["answer"], row["named"], row["right"]) for row in rows] == [
        ("c", "Which tone?", "high", "high", True),
        ("d", "Which tone?", "high", "low", False),
    ]


class Scribe:
    """Writes down how it is asked: the turns before its own, with * for the recording."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def answer(self, audio: Waveform, question: str) -> str:
        raise AssertionError("there is a chat to answer")

    def reply(self, messages: Sequence[Message], audio: Waveform) -> str:
        shown = [
            [m.role, *("*" if isinstance(part, AudioPart) else part.text for part in m.content)]
            for m in messages
        ]
        self.asked.append(f"{audio.duration_s:.2f} s, {shown}")
        return "high"


def test_a_sample_is_asked_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its system message, its order, its span: in what is asked, in what is kept, and in the page."""
    scribe = Scribe()
    monkeypatch.setattr(subjects, "load_answerer", lambda *given: Subject("scribe", "1", scribe))
    tones = torch.cat([sound(0.5, 0, 300.0), sound(0.25, 0, 2500.0)], dim=1)
    save(tmp_path / "tones.wav", tones, 16_000)
    part = AudioPart(path=str(tmp_path / "tones.wav"), start_s=0.5, end_s=0.75)
    words, told = TextPart(text="Which  tone?"), Message(role="assistant", content=[TextPart(text="high")])
    system = Message(role="system", content=[TextPart(text="Be brief.")])
    after, before = Message(role="user", content=[words, part]), Message(role="user", content=[part, words])
    chats = {"a": [after, told], "b": [system, before, told], "c": [before, told]}
    samples = [
        Sample(id=id, messages=chat, task="tone", metadata={"split": "test"}) for id, chat in chats.items()
    ]
    low = sample("low", tmp_path / "tones.wav", "Which tone?", "low", "train")  # the other choice
    with_another = Message(role="system", content=[AudioPart(path="x.wav")])  # two recordings: not asked
    samples.append(low.model_copy(update={"id": "two", "messages": [with_another, *low.messages]}))
    found = scored(tmp_path, [*samples, low])
    assert found["questions"] == 3 and found["accuracy"] == 1.0
    assert scribe.asked == [
        "0.25 s, [['user', 'Which  tone?', '*']]",
        "0.25 s, [['system', 'Be brief.'], ['user', '*', 'Which  tone?']]",
        "0.25 s, [['user', '*', 'Which  tone?']]",
    ]
    page = (tmp_path / "stage" / "audio-qa" / "report.html").read_text()
    heard = [load_bytes(b64decode(data)) for data in re.findall(r"data:audio/[\w-]+;base64,([\w+/=]+)", page)]
    assert [round(wave.duration_s, 2) for wave in heard] == [0.25] * 3
    scored(tmp_path, [*samples, low])
    assert len(scribe.asked) == 3, "each is kept by its own wording"


def test_a_model_of_ours_is_given_the_chat_of_the_sample(tmp_path: Path) -> None:
    """Either order gets an answer of its own; `answer` knows one of them alone."""
    template = small_template()
    small_model(template).float().save_pretrained(tmp_path / "stage" / "model", template.tokenizer)
    own = load_answerer(str(tmp_path / "stage"), None, 4).model
    wave, part, words = Waveform(sound(0.3), 16_000), AudioPart(path="x.wav"), TextPart(text="what is it?")
    after, before = ([Message(role="user", content=parts)] for parts in ([words, part], [part, words]))
    replies = {own.reply(after, wave), own.reply(before, wave)}
    assert isinstance(own, Conversant) and len(replies) == 2 and own.answer(wave, "what is it?") in replies
    with pytest.raises(AnswerError, match="AUDIO"):
        own.reply([Message(role="user", content=[part, TextPart(text="what is <|AUDIO|>?")])], wave)


def test_the_control_asks_without_the_recordings(tmp_path: Path) -> None:
    """Two recordings get one answer, and transcripts are left out."""
    template = small_template()
    small_model(template).float().save_pretrained(tmp_path / "model", template.tokenizer)
    for name, hertz in (("high", 2500.0), ("low", 300.0)):
        save(tmp_path / f"{name}.wav", sound(0.3, 0, hertz), 16_000)
    samples = [sample(name, tmp_path / f"{name}.wav", "Which tone?", name) for name in ("high", "low")]
    samples.append(sample("words", tmp_path / "low.wav", "What is said?", "one"))
    assert scored(tmp_path, samples)["recordings"] == 1
    figures = scored(tmp_path, samples, without_audio=True)
    assert figures["questions"] == 2 and "recordings" not in figures
    replies = [row["reply"] for row in read_jsonl(tmp_path / "stage" / "audio-qa" / "rows.jsonl")]
    assert replies[0] == replies[1]


def test_questions_in_batches_get_the_replies_that_they_get_alone(tmp_path: Path) -> None:
    """A recording that is not there is its own question's problem, and what is answered is not asked again."""
    template = small_template()
    small_model(template).float().save_pretrained(tmp_path / "model", template.tokenizer)
    for number in range(5):
        save(tmp_path / f"{number}.wav", sound(0.2 + 0.1 * number, 0, 300.0 * (number + 1)), 16_000)
    samples = [sample(f"q{n}", tmp_path / f"{n}.wav", "Which tone?", f"tone {n % 2}") for n in range(6)]
    rows = tmp_path / "stage" / "audio-qa" / "rows.jsonl"
    scored(tmp_path, samples)
    alone = {row["id"]: (row["reply"], row["left_out"]) for row in read_jsonl(rows)}
    (tmp_path / "stage" / "kept.jsonl").unlink()
    scored(tmp_path, samples[:2], batch_size=4)
    scored(tmp_path, samples, batch_size=4)
    assert {row["id"]: (row["reply"], row["left_out"]) for row in read_jsonl(rows)} == alone
    assert alone["q5"][1] and len(read_jsonl(tmp_path / "stage" / "kept.jsonl")) == 5


def test_a_model_that_never_answers_ends_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def answer(self, audio: Waveform, question: str) -> str:
            raise RuntimeError("out of order")

    monkeypatch.setattr(subjects, "load_answerer", lambda *given: Subject("broken", "1", Broken()))
    save(tmp_path / "a.wav", sound(0.2), 16_000)
    with pytest.raises(StageError, match="not one answer: .*out of order"):
        scored(tmp_path, [sample("a", tmp_path / "a.wav", "What is said?", "one")])
    with pytest.raises(StageError, match="no recording with a question"):
        scored(tmp_path, [sample("a", tmp_path / "a.wav", "Why?", "so")])


def test_choices_are_the_answers_to_the_same_question(tmp_path: Path) -> None:
    asked = [sample(str(n), tmp_path, "Which tone?", each) for n, each in enumerate(("low", "high", "low"))]
    many = [sample(f"m{n}", tmp_path, "How many?", str(n)) for n in range(27)]
    assert choices_of([*asked, *many]) == {"Which tone?": ("high", "low")}


def test_a_model_with_an_encoder_of_its_own_answers_without_a_codec(tmp_path: Path) -> None:
    template = small_template()
    model = small_model(template).float()
    model.save_pretrained(tmp_path / "stage" / "model", template.tokenizer)
    own = load_answerer(str(tmp_path / "stage"), None, 4).model
    heard = Waveform(torch.zeros(1, 8_000), 16_000)
    assert isinstance(own.answer(heard, "what is it?"), str)
    with pytest.raises(ConfigError, match="without a codec"):
        FolderSpeaker.load(tmp_path / "stage", None).speak("one", None, None, 0)


def test_questions_with_options_of_their_own_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "load_answerer", lambda *given: Subject("ear", "1", Ear()))
    save(tmp_path / "high.wav", sound(0.3, 0, 2500.0), 16_000)
    asked = [
        sample(f"q{n}", tmp_path / "high.wav", f"Which tone, {options}?", f"<answer>{answer}</answer>")
        for n, (options, answer) in enumerate(((["high", "low"], "high"), (["flat", "high", "odd"], "odd")))
    ]
    about = {"domain": "music", "difficulty": "hard"}
    told = [
        each.model_copy(update={"metadata": {**each.metadata, **about, "choices": options}})
        for each, options in zip(asked, (["high", "low"], ["flat", "high", "odd"]), strict=True)
    ]
    found = scored(tmp_path, told)
    assert (found["questions"], found["accuracy"], found["chance"]) == (
        2,
        0.5,
        pytest.approx((1 / 2 + 1 / 3) / 2),
    )
    results = read_json(tmp_path / "stage" / "audio-qa" / "results.json")
    assert results["by_task"].keys() == {"music"} and results["by_difficulty"].keys() == {"hard"}
    assert [row["answer"] for row in read_jsonl(tmp_path / "stage" / "audio-qa" / "rows.jsonl")] == [
        "high",
        "odd",
    ]


def test_the_plan_of_a_larger_model_takes_longer(tmp_path: Path) -> None:
    model, samples = tmp_path / "model", tmp_path / "samples.jsonl"
    model.mkdir()
    samples.touch()
    plan_by_size = {
        size: StagePlan(
            parameters=int(size), facts={"samples": 600}, artifacts={"model": model, "samples": samples}
        )
        for size in (TINY_PARAMETERS / 2, TINY_PARAMETERS, 20 * TINY_PARAMETERS)
    }
    config = ListeningConfig(model=model, samples=samples)
    half, tiny, large = (
        plan_listening(config, {"train": plan}).core_seconds for plan in plan_by_size.values()
    )
    assert half == tiny == pytest.approx(4 + 100 * SECONDS_PER_QUESTION)
    assert large == pytest.approx(4 + 20 * 100 * SECONDS_PER_QUESTION)
