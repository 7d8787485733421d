"""Folders of small DualFFNs that hear features or codes, and prompts with answers in text and speech."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from audiollm.data.hearing.features import PartAudio, mel_features
from audiollm.data.records.sample import AudioPart, ContentPart, Message, TextPart
from audiollm.data.text.tokenizer import SPEAKERS_FILE, TRAINED_FILE
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.prompts import AnswerContent, PromptedContents
from audiollm.files.atomic import write_json
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from audiollm.train.settings import LoRASettings, Trained
from tests.audiollm.supervised.heard_samples import BOOKS, CODES, SHAPE, small_model, small_template, sound

TRAINED = {"longest_positions": 99, "text_dropout": 0.3, "speaker_dropout": 0.2, "codec_digest": "abc"}
LORA = LoRASettings(
    rank=2, alpha=4, dropout=0.2, target_modules=("q_proj", "v_proj", "text_lm_head", "audio_lm_head")
)


def save_model(folder: Path, hears: str) -> Path:
    """A model that hears `features` or `codes`, saved with dropout, and what a training says of it."""
    template = small_template()
    random = small_model(template)
    encoder = replace(random.config.audio_encoder, dropout=0.1) if random.config.audio_encoder else None
    config = replace(random.config, dropout=0.1, audio_encoder=encoder if hears == "features" else None)
    model = DualFFN(config)
    model.load_state_dict(
        {key: value for key, value in random.state_dict().items() if key in model.state_dict()}
    )
    generation = {"temperature": 0.4, "top_p": 0.7}
    save_pretrained(model, folder / "model", template.tokenizer, generation=generation)
    write_json(folder / "model" / SPEAKERS_FILE, ["theo"])
    write_json(folder / "model" / TRAINED_FILE, TRAINED)
    return folder


def load(folder: Path, trained: Trained = "all", dtype: torch.dtype = torch.float64) -> DualFFNPolicy:
    """A policy whose parameters, those of an adapter too, differ from the reference's."""
    torch.manual_seed(0)
    policy = DualFFNPolicy.load(folder, trained, LORA, dtype, rows_multiple=1)
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.root.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += 0.05 * noise.to(dtype)
    policy.root.train()
    return policy


def heard(hears: str, seconds: float, seed: int) -> PartAudio:
    """A recording as the model takes it."""
    if hears == "features":
        return mel_features(sound(seconds, seed), SHAPE)
    return codes(round(20 * seconds), seed)


def codes(frames: int, seed: int) -> Tensor:
    return torch.randint(CODES, (BOOKS, frames), generator=torch.Generator().manual_seed(seed))


def text(words: str) -> AnswerContent:
    return AnswerContent([TextPart(text=words)])


def speech(frames: int, seed: int, words: str = "") -> AnswerContent:
    """Speech, after some words or none."""
    before: list[ContentPart] = [TextPart(text=words)] if words else []
    return AnswerContent([*before, AudioPart(path=f"{seed}.wav")], [codes(frames, seed)])


def prompted(
    name: str, audio: list[PartAudio], answers: list[AnswerContent], question: str = "what is it?"
) -> PromptedContents:
    recordings = [AudioPart(path=f"{name}{number}.wav") for number in range(len(audio))]
    turn = Message(role="user", content=[*recordings, TextPart(text=question)])
    return PromptedContents(name, [turn], audio, answers, "list.jsonl")


def samples(hears: str) -> list[PromptedContents]:
    """Two recordings in one prompt, one long recording, none; answers in text, in speech, and in both."""
    two = [heard(hears, 0.3, 1), heard(hears, 0.5, 2)]
    return [
        prompted("two", two, [text("a dog"), text("a cat or a dog")]),
        prompted("long", [heard(hears, 1.4, 3)], [speech(4, 4), speech(7, 5, "high")]),
        prompted("none", [], [text("low"), speech(3, 6)], "the question is: which tone"),
    ]
