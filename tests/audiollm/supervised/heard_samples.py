"""Recordings, conversations about them, a vocabulary and a small model that hears features, for tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.audio import save
from audiollm.data.chat.template import Template, TokenStream
from audiollm.data.hearing.features import ClipFeatures, mel_features
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from tests.audiollm.supervised.train_samples import SMALL

ENCODER = AudioEncoderConfig(16, 2, 2, 24, num_mel_bins=20, max_source_positions=60)
SHAPE = ENCODER.features
BOOKS, CODES = 3, 32
HEARING = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_mel_bins": 20}
"""Settings of an audio encoder from scratch."""


def sound(seconds: float, seed: int = 0, hz: float = 0.0) -> Tensor:
    """Noise, or a tone with a little of it."""
    samples = round(seconds * 16_000)
    noise = torch.randn(1, samples, generator=torch.Generator().manual_seed(seed))
    if not hz:
        return 0.1 * noise
    return 0.3 * torch.sin(2 * math.pi * hz * torch.arange(samples) / 16_000)[None] + 0.003 * noise


def heard(seconds: float, seed: int = 0) -> ClipFeatures:
    return mel_features(sound(seconds, seed), SHAPE)


def asked(question: str = "what is it?", answer: str = "a dog", clips: int = 1) -> list[Message]:
    audio = [AudioPart(path=f"{n}.wav") for n in range(clips)]
    return [
        Message(role="user", content=[*audio, TextPart(text=question)]),
        Message(role="assistant", content=[TextPart(text=answer)]),
    ]


def small_template() -> Template:
    texts = ["system user assistant what is it? a dog or a cat high low", "the question is: which tone"] * 3
    return Template(train_text_tokenizer(texts, 300), BOOKS, CODES)


def small_model(template: Template) -> DualFFN:
    """In float64, no weight of which is 0."""
    torch.manual_seed(0)
    config = DualFFNConfig(
        template.tokenizer.get_vocab_size(), num_codebooks=BOOKS, codebook_size=CODES + 2, hidden_size=32,
        num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48, audio_encoder=ENCODER,
    )  # fmt: skip
    made = DualFFN(config).double()
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made


def streams(template: Template) -> list[TokenStream]:
    """Heard once, long and in two windows, twice with codes said, and text alone."""
    spoken = torch.randint(CODES, (BOOKS, 5), generator=torch.Generator().manual_seed(0))
    said = [*asked(clips=2)[:1], Message(role="assistant", content=[AudioPart(path="2.wav")])]
    return [
        template.compile(asked(), [heard(0.3)]),
        template.compile(asked(answer="a cat or a dog"), [heard(1.5, 1)]),
        template.compile(said, [heard(0.2, 2), heard(0.11, 3), spoken]),
        template.compile(asked(clips=0), []),
    ]


def write_manifest(folder: Path, samples: int) -> Path:
    """High and low tones in files of two formats and rates; the last two are held out."""
    rows = []
    for number in range(samples):
        name, rate = (f"{number}.wav", 16_000) if number % 3 else (f"{number}.flac", 44_100)
        high = number % 2 == 0
        save(folder / name, sound(0.2 + 0.05 * (number % 4), number, 2500.0 if high else 300.0), rate)
        messages = asked("which tone?", "high" if high else "low")
        part = AudioPart(path=name, end_s=None if number % 4 else 0.11)
        user = messages[0].model_copy(update={"content": [part, *messages[0].content[1:]]})
        split = "test" if number >= samples - 2 else "train"
        rows.append(
            Sample(id=f"s{number}", messages=[user, messages[1]], task="tone", metadata={"split": split})
        )
    write_samples(folder / "samples.jsonl", rows)
    return folder / "samples.jsonl"


def understanding(**values: Any) -> dict[str, Any]:
    """Settings of a stage that trains on what is heard."""
    model = {**SMALL, "dropout": 0.0, "audio_encoder": HEARING}
    return {
        "audio_in": "features",
        "shape": model,
        "ema_decay": 0,
        "text_weight": 1.0,
        "learning_rate": 1e-2,
    } | values
