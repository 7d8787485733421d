"""Phrases: words are cut evenly, codes stand behind the words that they say, and words alone are hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from audiollm.data.chat.conditions import hide_conditions
from audiollm.data.chat.delay import IGNORE, delay
from audiollm.data.chat.fitting import fit_stream
from audiollm.data.chat.template import Kind, Template, phrase_frames
from audiollm.data.records.sample import AudioPart, Message, RecordedPhrase, Sample, TextPart
from audiollm.data.text import tokenizer as tokens
from audiollm.data.text.phrases import split_phrases

BOOKS, SIZE = 3, 16
CODES_KT = torch.arange(30).view(3, 10) % SIZE
PHRASES = [RecordedPhrase(text="one two", end_s=0.8), RecordedPhrase(text="three", end_s=2.0)]
MESSAGES = [
    Message(role="user", content=[TextPart(text="one two three")]),
    Message(role="assistant", content=[AudioPart(path="a.wav")], phrases=PHRASES),
]


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(
        tokens.train_text_tokenizer(["system user assistant one two three"] * 3, 280), BOOKS, SIZE
    )


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("a b c d e", ["a b", "c d e"]),
        ("a b c d, e f", ["a b", "c d,", "e f"]),
        ("No. Yes", ["No.", "Yes"]),
        ("a", ["a"]),
    ],
)
def test_texts_are_cut_evenly_and_behind_punctuation(text: str, phrases: list[str]) -> None:
    assert split_phrases(text, 3) == phrases
    assert " ".join(split_phrases(text, 1)) == text


def test_codes_stand_behind_the_words_that_they_say(template: Template) -> None:
    """Each phrase's words as within a sentence, its own codes in the delay pattern, and nothing learned but codes."""
    stream = template.compile(MESSAGES, [CODES_KT])
    pieces = [CODES_KT[:, :4], CODES_KT[:, 4:]]
    codes_FK = torch.cat([delay(piece, template.audio_bos, template.audio_eos) for piece in pieces])
    assert torch.equal(stream.codes_SK[stream.kinds_S == Kind.AUDIO_OUT], codes_FK)
    targets = stream.audio_targets_SK[stream.audio_targets_SK != IGNORE]
    assert len(targets) == CODES_KT.numel() + 2 * BOOKS  # every code, and the end of each phrase
    assert (stream.text_targets_S == IGNORE).all()
    text = template.tokenizer.decode(
        stream.text_ids_S[stream.kinds_S == Kind.TEXT].tolist(), skip_special_tokens=False
    )
    spoken = text.partition("assistant")[2]
    mark = tokens.AUDIO_OUT_BOS + tokens.AUDIO_EOS
    assert spoken.endswith(f" one two{mark} three{mark}{tokens.END_OF_TURN}")
    assert len(stream) == template.length(MESSAGES, [10])


def test_ends_are_shares_of_the_recording() -> None:
    assert phrase_frames(PHRASES, 10) == [(0, 4), (4, 10)]
    assert phrase_frames(PHRASES, 20) == [(0, 8), (8, 20)]
    with pytest.raises(ValueError, match="2 phrases in 1 frames"):
        phrase_frames(PHRASES, 1)


def test_hidden_words_leave_their_phrases(template: Template) -> None:
    messages, audio = hide_conditions(MESSAGES, [CODES_KT], no_text=True, no_speaker=False)
    shown, hidden = template.compile(MESSAGES, [CODES_KT]), template.compile(messages, audio)
    assert [phrase.text for phrase in messages[1].phrases] == ["", ""]
    spoken = [stream.codes_SK[stream.kinds_S == Kind.AUDIO_OUT] for stream in (shown, hidden)]
    assert torch.equal(*spoken)
    text = template.tokenizer.decode(hidden.text_ids_S.tolist())
    assert "one" not in text and "three" not in text


def test_a_sample_that_is_cut_within_a_phrase_teaches_no_end_of_it(template: Template) -> None:
    stream, _ = fit_stream(template, MESSAGES, [CODES_KT], template.length(MESSAGES, [10]) - 8, "cut")
    assert stream is not None
    ends = (stream.audio_targets_SK == template.audio_eos).sum(0)
    assert ends.tolist() == [1, 1, 1]  # those of the first phrase


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"role": "user"}, "phrases are of a recording that the assistant says"),
        ({"content": [{"type": "text", "text": "one"}]}, "holds one recording and nothing else"),
        ({"phrases": [{"text": "one", "end_s": 1}, {"text": "two", "end_s": 1}]}, "must rise"),
    ],
)
def test_what_cannot_have_phrases_is_refused(changes: dict[str, Any], problem: str) -> None:
    message = {**MESSAGES[1].model_dump(), **changes}
    with pytest.raises(ValidationError, match=problem):
        Message.model_validate(message)


def test_a_sample_without_phrases_is_written_as_before() -> None:
    sample = Sample(id="a", messages=[MESSAGES[0]], task="tts")
    assert "phrases" not in sample.model_dump()["messages"][0]
    with_phrases = Sample(id="a", messages=MESSAGES, task="tts")
    assert Sample.model_validate(with_phrases.model_dump()) == with_phrases
