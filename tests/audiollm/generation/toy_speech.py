"""A small model with random weights and a codec of tones, for what is around the model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.data.chat.template import Template
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.families import registry
from audiollm.generation.engine.request import Request
from audiollm.generation.speaking.generator import Generator
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN

RATE = 8000
HOP = 320


class ToyCodec:
    """25 frames a second; a frame's first code says how loud its tone is."""

    frame_rate, num_codebooks, codebook_size, sample_rate = 25.0, 3, 16, RATE
    codebook_vectors_KVD = torch.zeros(3, 16, 1)

    def encode(self, samples_CN: Tensor) -> Tensor:
        padded_N = torch.nn.functional.pad(samples_CN[0], (0, -samples_CN.shape[1] % HOP))
        loudness_T = padded_N.unflatten(0, (-1, HOP)).abs().amax(dim=1).clamp(0, 0.999)
        return (loudness_T * 16).long().expand(3, -1).contiguous()

    def decode(self, codes_KT: Tensor) -> Tensor:
        loudness_N = ((codes_KT[0].float() + 0.5) / 16).repeat_interleave(HOP)
        return (loudness_N * tone(len(loudness_N)))[None]


def tone(samples: int) -> Tensor:
    return torch.sin(2 * math.pi * 200 / RATE * torch.arange(samples))


def a_voice(seconds: float, level: float = 0.3) -> Waveform:
    return Waveform((level * tone(round(seconds * RATE)))[None], RATE)


def toy_generator(
    speakers: tuple[str, ...] = ("anna", "bruno"), longest_positions: int | None = None
) -> Generator:
    """Says noise, and hardly ever stops by itself."""
    words = "system user assistant Generate audio following instruction Speaker one two three hello"
    template = Template(train_text_tokenizer([words] * 3, 400), 3, 16)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    config = DualFFNConfig(
        template.tokenizer.get_vocab_size(), num_codebooks=3, codebook_size=18, intermediate_size=64, **shape
    )
    model = DualFFN(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return Generator(model, ToyCodec(), template, speakers, longest_positions)


def talkative_generator() -> Generator:
    """Says noise for seconds: with the seeds 1 and 4 and no speaker it does not stop by itself."""
    toy = toy_generator()
    with torch.no_grad():
        toy.model.audio_lm_head.weight.view(3, 18, -1)[0, -1] = 0.0
    toy.model.weights_changed()
    return toy


def requests_of(monkeypatch: pytest.MonkeyPatch, toy: Generator) -> list[Request]:
    """Record the requests that reach the engine from now on; every loaded model is this one."""
    seen: list[Request] = []
    answer_all = Generator.answer_all

    def listen(self: Generator, requests: list[Request], *rest: Any) -> Any:
        seen.extend(requests)
        return answer_all(self, requests, *rest)

    monkeypatch.setattr(Generator, "answer_all", listen)
    monkeypatch.setattr(registry, "load_speech_generator", lambda model, codec=None, dtype="fp32": toy)
    return seen
