"""Where a long text is cut, and that its pieces join without clicks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from audiollm.generation.speaking.long_text import (
    CLAUSE_PAUSE_S,
    PARAGRAPH_PAUSE_S,
    SENTENCE_PAUSE_S,
    join_pieces,
    split_text,
    spoken_seconds,
    trim,
)

RATE = 8000


@pytest.mark.parametrize(
    ("text", "chunk_s", "chunks"),
    [
        (
            "Dr. Smith went home. He rested at 3.5 km.",
            2.0,
            [("Dr. Smith went home.", SENTENCE_PAUSE_S), ("He rested at 3.5 km.", 0)],
        ),
        ("One. Two. Three.", 9.0, [("One. Two. Three.", 0)]),
        ("One.\n\nTwo.\nThree.", 9.0, [("One.", PARAGRAPH_PAUSE_S), ("Two. Three.", 0)]),
        (
            "as he came here, he saw the sea",
            1.5,
            [("as he came here,", CLAUSE_PAUSE_S), ("he saw the sea", 0)],
        ),
        ("one two three four", 1.0, [("one two three", 0), ("four", 0)]),
        ('He said "No!" Then he left.', 1.5, [('He said "No!"', SENTENCE_PAUSE_S), ("Then he left.", 0)]),
        ("今天天气很好。我们去公园吧！", 2.0, [("今天天气很好。", SENTENCE_PAUSE_S), ("我们去公园吧！", 0)]),
        ("今天天气很好我们去", 1.0, [("今天天气", 0), ("很好我们", 0), ("去", 0)]),
        ("go [laugh start] on", 0.2, [("go", 0), ("[laugh start]", 0), ("on", 0)]),
        (" \n\n ", 1.0, []),
    ],
)
def test_where_a_text_is_cut(text: str, chunk_s: float, chunks: list[tuple[str, float]]) -> None:
    assert [(chunk.text, chunk.pause_s) for chunk in split_text(text, chunk_s)] == chunks


@given(st.text(alphabet="ab .,!?。，你\n"), st.floats(0.2, 5))
def test_nothing_but_white_space_is_lost_and_no_chunk_is_too_long(text: str, chunk_s: float) -> None:
    chunks = split_text(text, chunk_s)
    assert "".join("".join(chunk.text.split()) for chunk in chunks) == "".join(text.split())
    assert all(spoken_seconds(chunk.text) <= max(chunk_s, 0.25) for chunk in chunks)


def tone(seconds: float, silence_s: float = 0.0) -> torch.Tensor:
    sound_N = 0.5 * torch.cos(2 * math.pi * 200 / RATE * torch.arange(round(seconds * RATE)))
    return torch.nn.functional.pad(sound_N[None], (round(silence_s * RATE),) * 2)


def test_silence_at_the_ends_is_cut_down_and_the_rest_is_kept() -> None:
    trimmed = trim(tone(1.0, silence_s=0.5), RATE, kept_s=0.05)
    assert trimmed.shape[1] == pytest.approx(1.1 * RATE, abs=RATE // 50)
    silence = torch.zeros(1, 100)
    assert torch.equal(trim(silence, RATE), silence)


def test_pieces_join_with_their_pauses_and_without_clicks() -> None:
    joined = join_pieces([tone(0.5), tone(0.3), tone(0.2)], [0.3, 0.0, 0.1], RATE)
    overlap_s = 0.01
    assert joined.shape[1] == pytest.approx((0.5 + 0.3 + 0.3 - overlap_s + 0.2 + 0.1) * RATE, abs=2)
    slope = 0.5 * 2 * math.pi * 200 / RATE
    assert joined.diff().abs().max() < 1.3 * slope  # a cut tone would jump by 0.5
    assert joined[0, 0].abs() < 0.01 and joined[0, -1] == 0
    assert joined[0, round(0.55 * RATE) : round(0.75 * RATE)].abs().max() == 0
