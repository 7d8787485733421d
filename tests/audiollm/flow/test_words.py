"""Words of captions and chains of thought as rows: numbers, their values, and the times that they name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from audiollm.flow.conditions.own import NO_VALUE, WordEncoder, Words
from audiollm.flow.model.mmdit import MMDiT, MMDiTConfig
from audiollm.flow.model.packed import Conditions, Features, pack_conditions
from audiollm.flow.model.rows import rows_of

TEXT = "First, at 2.5 seconds, two dogs of 3 bark. Then, at 12 s, rain."
WORDS = Words.of([TEXT, TEXT])


def test_numbers_have_values() -> None:
    rows = WORDS.rows(TEXT)
    assert [row.value for row in rows if row.value != NO_VALUE] == [2.5, 2.5, 2.5, 3.0, 12.0, 12.0]
    assert WORDS.rows("") == [(WORDS.rows("?!~")[-1].word, NO_VALUE, 0.0)]


@pytest.mark.parametrize(
    ("text", "times_s"),
    [
        ("Rain. At 2.5 s, a dog. Then wind!", {"rain": 0.0, "at": 2.5, "dog": 2.5, "then": 0.0, "wind": 0.0}),
        ("a dog at 2 s, then a cat at 3.5 s", {"dog": 2.0, "then": 2.0, "cat": 3.5}),
        ("at 1 s a dog, at 2.5 s a cat and at 3 s a bird", {"dog": 1.0, "cat": 2.5, "bird": 3.0}),
        ("a dog from 0.5 to 1.5 s; rain", {"dog": 0.5, "from": 0.5, "s": 1.5, "rain": 0.0}),
        ("a dog\nat 2 s a cat", {"dog": 0.0, "cat": 2.0}),
        ("3 dogs at 2 s", {"3": 2.0, "dogs": 2.0}),
    ],
)
def test_words_stand_at_the_seconds_nearest_to_them_in_their_sentence(
    text: str, times_s: dict[str, float]
) -> None:
    words = Words.of([text, text])
    found = {words.vocabulary[row.word]: row.at_s for row in words.rows(text)}
    assert {word: found[word] for word in times_s} == times_s


@pytest.mark.parametrize(
    ("text", "times_s"),
    [
        ("at 1.5s", 1.5),
        ("at 1.5 Sec", 1.5),
        ("2 second beep", 2.0),
        ("2 sounds", 0.0),
        ("2 seagulls", 0.0),
        ("7", 0.0),
    ],
)
def test_units_of_time(text: str, times_s: float) -> None:
    assert max(row.at_s for row in WORDS.rows(text)) == times_s


def test_rows_at_no_time_are_those_of_an_encoder_without_times() -> None:
    """Rows of pretrained encoders have no times; other times change the velocity."""
    torch.manual_seed(0)
    encoder = WordEncoder(len(WORDS.vocabulary), 32)
    values_RC = torch.tensor(WORDS.rows(TEXT))
    config = MMDiTConfig(latent_dim=4, latent_rate=20.0, hidden_size=32, num_heads=2, multi_stream_blocks=1,
        single_stream_blocks=1, frames_dim=0, sync_dim=0, caption_dim=0, cot_dim=32)  # fmt: skip
    model = MMDiT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)

    def velocity(scale: float, has_times: bool = True) -> torch.Tensor:
        rows_RC = values_RC.clone()
        rows_RC[:, 2] *= scale
        conditions: Conditions = {"cot": Features(rows_RC)}
        packed = pack_conditions([conditions], torch.device("cpu"))
        words = packed.features["cot"]
        there = words._replace(values_RC=encoder(words))
        if has_times:
            there = there._replace(times_R=encoder.times_of(words))
        packed = replace(packed, features={"cot": there})
        latents = rows_of([40], torch.device("cpu"))
        noise_LD = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            made_LD: torch.Tensor = model(noise_LD, torch.tensor([0.5]), packed, latents)
            return made_LD

    without = velocity(1.0, has_times=False)
    assert torch.equal(velocity(0.0), without)
    assert float((velocity(1.0) - without).abs().max()) > 1e-4
