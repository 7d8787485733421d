"""Items of a realtime conversation, and the answer that is being given.

Shapes: N samples.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.models.audio_llms.inputs import TurnPart
from audiollm.serve.errors import ApiError, as_validation_error
from audiollm.serve.realtime_bodies import SessionSettings

Body = TypeVar("Body", bound=BaseModel)


@dataclass
class Item:
    """A message of the conversation: what the model reads of it, and what clients are told."""

    id: str
    role: str
    parts: list[TurnPart]
    content: list[dict[str, Any]]
    status: str = "completed"

    def row(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "realtime.item", "type": "message", "status": self.status, "role": self.role,
            "content": self.content,
        }  # fmt: skip


@dataclass
class Response:
    """An answer that is being given."""

    settings: SessionSettings
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    item: Item = field(default_factory=lambda: Item(new_item_id(), "assistant", [], [], "in_progress"))
    text: str = ""
    samples: list[Tensor] = field(default_factory=list)
    """Pieces of speech `[1, N]` at the codec's rate."""
    cancel_reason: str = ""
    """Why it is ended: `turn_detected` or `client_cancelled`; empty: it is not."""

    @property
    def is_spoken(self) -> bool:
        return "audio" in self.settings.output_modalities

    @property
    def place(self) -> dict[str, Any]:
        """What all events of its content have in common."""
        return {"response_id": self.id, "item_id": self.item.id, "output_index": 0, "content_index": 0}

    def part(self) -> dict[str, Any]:
        """Its content as clients are told."""
        if self.is_spoken:
            return {"type": "output_audio", "transcript": self.text}
        return {"type": "output_text", "text": self.text}


def new_item_id() -> str:
    """An id that no other item has."""
    return f"item_{uuid.uuid4().hex}"


def validated(kind: type[Body], value: object, name: str) -> Body:
    """The settings or item of an event. Raises: ApiError: it is none; `name` is the field."""
    if not isinstance(value, dict):
        raise ApiError(400, f"there is no {name}: give an object", name)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = [{**row, "loc": (name, *row["loc"])} for row in error.errors(include_url=False)]
        raise as_validation_error(problems) from error


def decode_pcm(text: object, name: str) -> Tensor:
    """Samples `[1, N]` in [-1, 1] of base64 with 16 bits each. Raises: ApiError: it is none; `name` is the field."""
    try:
        content = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, "is not base64: encode the samples", name) from error
    if not content or len(content) % 2:
        raise ApiError(
            400, "has no whole samples of 16 bits: send PCM in base64", name, "unreadable_recording"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.int16).float()[None] / 2**15


def cut_sound(sound: Waveform, end_ms: int) -> Waveform:
    """The beginning of a sound."""
    return Waveform(sound.samples_CN[:, : end_ms * sound.sample_rate // 1000], sound.sample_rate)
