"""The two guards against what public training code got wrong: leaked labels, and a stop that is never taught."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from audiollm.data.chat.template import Template
from audiollm.data.packing import PackedBatch, pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.families.dual_ffn.losses import token_losses
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN

SIZE, BOOKS, FRAMES = 16, 2, 12


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(train_text_tokenizer(["system user assistant say it"] * 3, 280), BOOKS, SIZE)


def small_model(template: Template) -> DualFFN:
    torch.manual_seed(0)
    return DualFFN(
        DualFFNConfig(
            vocab_size=template.tokenizer.get_vocab_size(),
            num_codebooks=BOOKS,
            codebook_size=SIZE + 2,
            hidden_size=64,
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            head_dim=32,
            intermediate_size=128,
        )
    )


def chat(codes: int = 1) -> list[Message]:
    parts = [AudioPart(path="clip.wav") for _ in range(codes)]
    return [
        Message(role="user", content=[TextPart(text="say it")]),
        Message(role="assistant", content=list(parts)),
    ]


def unshifted(model: DualFFN, batch: PackedBatch, hidden: torch.Tensor) -> torch.Tensor:
    """The mistake: row p is asked for the code that it has just been given (targets one row too early)."""
    position_of = batch.row_of_S.argsort()
    next_row = batch.row_of_S[position_of[batch.audio_target_index] + 1]
    logits = model.audio_logits(hidden[next_row])
    each = functional.cross_entropy(logits.transpose(1, 2), batch.audio_targets_XK, reduction="none")
    return (each * batch.audio_weights_XK).sum()


@pytest.mark.parametrize("leak", [False, True])
def test_random_codes_cannot_be_learned_unless_labels_leak(template: Template, leak: bool) -> None:
    """Codes drawn afresh at every step: cross entropy stays at their entropy, or falls below it by leaking."""
    model = small_model(template)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(150):
        clips = [torch.randint(SIZE, (BOOKS, FRAMES), generator=generator) for _ in range(16)]
        batch = pack([template.compile(chat(), [clip]) for clip in clips])
        hidden = model(batch)
        total = unshifted(model, batch, hidden) if leak else token_losses(model, hidden, batch)["audio"]
        loss = total / batch.counts["audio"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    # of FRAMES + 1 targets a codebook all but the EOS are uniform over SIZE codes
    entropy = math.log(SIZE) * FRAMES / (FRAMES + 1)
    last = sum(losses[-30:]) / 30
    if leak:
        assert last < 0.6 * entropy
    else:
        assert entropy - 0.03 < last < entropy + 0.25


def test_overfit_on_one_clip_stops_where_the_clip_stops(template: Template) -> None:
    model = small_model(template)
    clip = torch.randint(SIZE, (BOOKS, 15), generator=torch.Generator().manual_seed(2))
    batch = pack([template.compile(chat(), [clip])])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss = token_losses(model, model(batch), batch)["audio"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    greedy = SamplingConfig(temperature=0, text_guidance=1, speaker_guidance=1)
    request = Request(chat()[:1], sampling=greedy, limits=Limits(max_frames=60))
    spoken = Engine.sized_for(model.eval(), template, [request]).run([request])[0]
    assert spoken.stopped
    assert torch.equal(spoken.codes_KT, clip)
