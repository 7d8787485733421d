"""The stage `generate`: what of a sample it asks for, and what it makes of the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from audiollm.audio import load, save
from audiollm.data.records.sample import AudioPart, ContentPart, Message, Sample, TextPart, write_samples
from audiollm.files.atomic import read_jsonl
from audiollm.generation.engine.request import Request
from audiollm.generation.speaking.generator import Generator
from audiollm.recipe.runner import Context
from audiollm.synthesis.run import generate_prompts
from audiollm.synthesis.settings import GenerateConfig
from tests.audiollm.generation.toy_speech import a_voice, requests_of, toy_generator


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that reach the engine."""
    return requests_of(monkeypatch, toy_generator())


def spoken(folder: Path, name: str, *answer: ContentPart) -> Sample:
    messages = [
        Message(role="user", content=[TextPart(text=f"one two {name}")]),
        Message(role="assistant", content=list(answer)),
    ]
    return Sample(id=name, messages=messages, task="tts", metadata={"split": "test", "text": name})


def test_words_and_speech_in_turn_are_asked_for_where_samples_have_them(
    asked: list[Request], tmp_path: Path
) -> None:
    voice = a_voice(4.0)
    save(tmp_path / "a.wav", voice.samples_CN, voice.sample_rate)
    parts = [AudioPart(path=str(tmp_path / "a.wav"), start_s=i, end_s=i + 1.0) for i in range(3)]
    samples = [
        spoken(tmp_path, "plain", parts[0]),
        spoken(tmp_path, "turns", TextPart(text="one"), parts[0], TextPart(text="two"), parts[1], parts[2]),
    ]
    write_samples(tmp_path / "samples.jsonl", samples)
    config = GenerateConfig(model=tmp_path, codec=tmp_path, samples=tmp_path / "samples.jsonl", takes=1)
    figures = generate_prompts(config, Context(tmp_path / "stage", None, Console(quiet=True), {}))  # type: ignore[arg-type]
    assert figures["clips"] == figures["prompts"] == 2
    assert [request.answer for request in asked] == ["audio", "any"]
    # 1.2 times the longest that one message says
    assert {request.limits.max_frames for request in asked} == {round(1.2 * 3.0 * 25)}
    for row in read_jsonl(tmp_path / "stage" / "generated.jsonl"):
        clip = load(tmp_path / "stage" / row["path"])
        assert clip.samples_CN.shape[1] == round(row["duration_s"] * clip.sample_rate) > 0


def test_an_answer_without_speech_is_a_frame_of_silence(
    asked: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice = a_voice(1.0)
    save(tmp_path / "a.wav", voice.samples_CN, voice.sample_rate)
    part = AudioPart(path=str(tmp_path / "a.wav"), start_s=0.0, end_s=1.0)
    write_samples(tmp_path / "samples.jsonl", [spoken(tmp_path, "turns", TextPart(text="one"), part)])
    listened = Generator.answer_all

    def in_words(self: Generator, requests: list[Request], *rest: Any) -> Any:
        return [
            replace(each, parts=("one",), codes_KT=torch.zeros(3, 0)) for each in listened(self, requests)
        ]

    monkeypatch.setattr(Generator, "answer_all", in_words)
    config = GenerateConfig(model=tmp_path, codec=tmp_path, samples=tmp_path / "samples.jsonl", takes=1)
    generate_prompts(config, Context(tmp_path / "stage", None, Console(quiet=True), {}))  # type: ignore[arg-type]
    clip = load(tmp_path / "stage" / "audio" / "turns_0.wav")
    assert clip.samples_CN.shape == (1, 320) and not clip.samples_CN.any()
