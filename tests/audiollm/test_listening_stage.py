"""The stage `evaluate_listening`: answers to held-out samples, and a model that hears without a codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from audiollm.audio import Waveform, save
from audiollm.config import ConfigError
from audiollm.data.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.evaluate import subjects
from audiollm.evaluate.listening_stage import Config, choices_of, run
from audiollm.evaluate.own_model import OwnModel
from audiollm.evaluate.subjects import Subject
from audiollm.files import read_json, read_jsonl
from audiollm.recipe import Recipe
from audiollm.runner import Context, StageError
from tests.audiollm.heard_samples import small_model, small_template, sound


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


def scored(tmp_path: Path, samples: list[Sample]) -> dict[str, Any]:
    write_samples(tmp_path / "samples.jsonl", samples)
    config = Config.model_validate({"model": str(tmp_path), "samples": str(tmp_path / "samples.jsonl")})
    return run(config, context(tmp_path / "stage"))


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
    found = scored(tmp_path, samples)
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
    own = OwnModel.load(tmp_path / "stage", None, max_tokens=4)
    heard = Waveform(torch.zeros(1, 8_000), 16_000)
    assert isinstance(own.answer(heard, "what is it?"), str)
    with pytest.raises(ConfigError, match="without a codec"):
        own.speak("one", None, None, 0)
