"""Texts and transcripts of an evaluation are brought to one form by the rules of their language."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.evaluate.codec.measures import CodecJudges, ReferenceClip, score_clip
from audiollm.evaluate.report.text_errors import FORMS, choose_form, count_errors
from audiollm.evaluate.speech.run import read_generated_clips, read_takes
from audiollm.recipe.runner import Context


class GermanEar:
    name = "german"

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        return "es sind fünfundzwanzig"


@pytest.mark.parametrize(("language", "rate"), [("de", 0.0), ("en", 2 / 4)])
def test_a_codec_is_scored_in_the_language_of_the_clip(language: str, rate: float) -> None:
    wave = Waveform(torch.zeros(1, 24_000), 24_000)
    clip = ReferenceClip(wave, "speech", "Es sind 25.", CodecJudges(GermanEar()), language)
    assert score_clip(clip, wave.samples_CN, ["word_error_rate"])["word_error_rate"] == pytest.approx(rate)


@pytest.mark.parametrize("language", ["de", "de-AT", "German", "deu"])
def test_one_language_for_both_sides(language: str) -> None:
    form = choose_form("spoken", language)
    assert form.language == "de"
    assert count_errors(form.apply("Es sind 25."), form.apply("es sind fünfundzwanzig")).total == 0
    assert {choose_form(name, "zh-CN").unit for name in FORMS} == {"character"}


def test_generated_and_real_clips_of_a_sample(tmp_path: Path) -> None:
    def sample(split: str) -> Sample:
        messages = [
            Message(role="user", content=[TextPart(text="x")]),
            Message(role="assistant", content=[AudioPart(path="/a.wav", start_s=0.0, end_s=1.0)]),
        ]
        metadata = {"split": split, "text": "25 Euro", "speaker": "ann", "language": "de"}
        return Sample(id=split, messages=messages, task="tts", metadata=metadata)

    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(sample(split).model_dump_json() + "\n" for split in ("train", "test")))
    rows = [
        {"id": "a", "path": "a.wav", "text": "25 Euro", "language": "de"},
        {"id": "b", "path": "b.wav", "text": "25"},
    ]
    (tmp_path / "generated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, test = read_takes(samples, Context.__new__(Context))
    generated = read_generated_clips(tmp_path / "generated.jsonl")
    assert [clip.text for clip in (*train, *test, *generated)] == ["fünfundzwanzig euro"] * 3 + [
        "twenty five"
    ]


def test_the_recording_of_a_text_stands_behind_its_references(tmp_path: Path) -> None:
    """`clone_by_turn`: the text is that of the last turn, and so is its sound."""
    turns = [("seven", "/reference.wav"), ("eight", "/said.wav")]
    messages = [
        message
        for text, path in turns
        for message in (
            Message(role="user", content=[TextPart(text=text)]),
            Message(role="assistant", content=[AudioPart(path=path, start_s=0.0, end_s=1.0)]),
        )
    ]
    rows = [
        Sample(id=split, messages=messages, task="clone_by_turn", metadata={"split": split, "text": "eight"})
        for split in ("train", "test")
    ]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    for (clip,) in read_takes(samples, Context.__new__(Context)):
        assert (clip.text, clip.path) == ("eight", Path("/said.wav"))
