"""Video parts of samples, and the code that cannot take them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from audiollm.data.chat.conditions import without_conditions
from audiollm.data.chat.template import Template
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import (
    AudioPart,
    ContentPart,
    Message,
    Region,
    Sample,
    TextPart,
    VideoPart,
    write_samples,
)
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import BadSample
from audiollm.models.audio_llms.inputs import turns_of
from audiollm.rl.online.prompts import check_question
from audiollm.rl.preference.records import Grouping

CLIP = VideoPart(path="a.mp4", start_s=1.0, end_s=4.0, region=[Region(x=3, y=4, width=10, height=8)])


def sample(*parts: ContentPart) -> Sample:
    question = Message(role="user", content=list(parts))
    return Sample(
        id="v", messages=[question, Message(role="assistant", content=[TextPart(text="rain")])], task="qa"
    )


def test_a_video_part_goes_through_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    written = sample(CLIP, AudioPart(path="a.mp4"), TextPart(text="What is it?"))
    write_samples(tmp_path / "s.jsonl", [written])
    (read,), bad = read_samples(tmp_path / "s.jsonl")
    (part,) = read.video_parts()
    assert not bad and part == CLIP.model_copy(update={"path": str(tmp_path / "a.mp4")})
    assert len(read.audio_parts()) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"end_s": 1.0, "start_s": 1.0}, "not after its start"),
        ({"region": [{"at_s": 1, "x": 0, "y": 0, "width": 0, "height": 2}]}, "greater than 0"),
        ({"region": [{"at_s": t, "x": 0, "y": 0, "width": 1, "height": 2} for t in (2, 1)]}, "must rise"),
    ],
)
def test_wrong_video_parts_are_named(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        VideoPart.model_validate({"type": "video", "path": "a.mp4", **change})


def test_what_reads_text_and_sound_alone_says_so() -> None:
    seen = sample(CLIP, TextPart(text="What is it?"))
    template = Template(
        train_text_tokenizer(["What is it? rain"] * 3, 300), num_codebooks=3, codebook_size=32
    )
    with pytest.raises(ValueError, match="video part"):
        template.layout(seen.messages, [])
    with pytest.raises(ValueError, match="video part"):
        turns_of(seen.messages, [])
    with pytest.raises(BadSample, match="video part") as told:
        check_question(seen, "s.jsonl:1")
    assert told.value.kind == "video part"
    with pytest.raises(BadSample, match="video part"):
        Grouping("singles", frozenset()).groups(seen, "s.jsonl:1")


def test_hidden_texts_leave_the_video() -> None:
    kept, _ = without_conditions(
        sample(CLIP, TextPart(text="words")).messages, [], no_text=True, no_speaker=True
    )
    assert kept[0].content == [CLIP]
