"""Audio LLMs that are asked in words and sound: an OpenAI-compatible endpoint, a local model of transformers, and
any `Answerer` through one clip."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from audiollm.audio import Waveform, encode_bytes
from audiollm.data.records.sample import Message
from audiollm.endpoints import EndpointClient, EndpointError, EndpointUnavailable, check_address
from audiollm.errors import ConfigError, TransientError
from audiollm.evaluate.subjects.protocols import Answerer
from audiollm.families.answering import AnswerError, AnsweringModel, AnswerRequest
from audiollm.families.registry import open_model_folder
from audiollm.models.audio_llms.inputs import (
    Parts,
    Pictures,
    Turn,
    TurnPart,
    turns_of,
)

SENT_RATE = 24_000
PAUSE_S = 1.0
_MAX_TOKENS_TOLD = 2**31
"""Largest token count that is believed; an endpoint's higher one is dropped."""


class ChatError(Exception):
    """There is no answer; the message is the reason that a table shows."""


class ChatUnavailable(ChatError, TransientError):
    """There is no answer now, and there may be one later."""


class EmptyReply(ChatError):
    """The model replied, which may have to be paid for, and there is no answer in its reply."""


class ChatReply(NamedTuple):
    """A reply, and the tokens that the request and the reply took; None: the endpoint does not tell."""

    text: str
    tokens: int | None


class Chat(Protocol):
    """One turn with a model: texts and recordings in, words out."""

    @property
    def name(self) -> str: ...

    def ask(self, parts: Parts) -> str:
        """
        Raises:
            ChatError: there is no answer.
        """


class TurnChat(Chat, Protocol):
    """A chat of any number of turns."""

    def go_on(self, turns: Sequence[Turn]) -> str:
        """The assistant's next turn.

        Raises:
            ChatError: there is no answer.
        """


@dataclass(frozen=True)
class ChatAnswerer:
    """A chat as an `Answerer` (the recording, then the question) and as a `Conversant`."""

    chat: TurnChat

    def answer(self, audio: Waveform, question: str) -> str:
        return self.chat.ask([audio, question])

    def reply(self, messages: Sequence[Message], audio: Waveform) -> str:
        return self.chat.go_on(turns_of(messages, [audio]))


@dataclass(frozen=True)
class OneClipChat:
    """A chat with an `Answerer`, which hears one recording: several are joined, with a second of silence between."""

    answerer: Answerer
    name: str

    def ask(self, parts: Parts) -> str:
        clips = [
            content_part.resample(SENT_RATE).samples_CN
            for content_part in parts
            if isinstance(content_part, Waveform)
        ]
        if not clips:
            raise ChatError(f"{self.name} answers about a recording, and there is none")
        pause_1N = torch.zeros(1, int(PAUSE_S * SENT_RATE))
        joined = [piece for clip in clips for piece in (clip, pause_1N)][:-1]
        question = "\n".join(content_part for content_part in parts if isinstance(content_part, str))
        if len(clips) > 1:
            question = f"The recordings follow each other with a pause of {PAUSE_S:g} s between.\n{question}"
        try:
            return self.answerer.answer(Waveform(torch.cat(joined, dim=1), SENT_RATE), question)
        except Exception as error:
            raise ChatError(f"{self.name} failed: {type(error).__name__}: {error}") from error


# ----------------------------------------------------------------------------------------------- endpoint


@dataclass(frozen=True)
class EndpointChat:
    """A model behind an OpenAI-compatible `chat/completions`; recordings are sent as 16-bit WAV in `input_audio` parts,
    pictures as PNG in `image_url` parts, each after its time.

    Args:
        base_url, key_variable, timeout_s, attempts, pause_s: as those of `EndpointClient`.
        model: the model's name at the endpoint.
        max_tokens: the longest reply.

    Raises:
        ConfigError: the address is no http(s) address, or holds a password.
    """

    base_url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    max_tokens: int = 2048
    timeout_s: float = 120.0
    attempts: int = 4
    pause_s: float = 2.0

    def __post_init__(self) -> None:
        try:
            check_address(self.base_url)
        except ValueError as error:
            raise ConfigError(str(error), "--endpoint", "give the address alone") from None

    @property
    def name(self) -> str:
        return self.model

    def ask(self, parts: Parts) -> str:
        return self.go_on([("user", parts)])

    def go_on(self, turns: Sequence[Turn], check_stop: Callable[[], None] | None = None) -> str:
        return self.reply_counted(turns, check_stop).text

    def reply_counted(self, turns: Sequence[Turn], check_stop: Callable[[], None] | None = None) -> ChatReply:
        """The assistant's next turn, and its cost.

        Args:
            check_stop: see `EndpointClient.post`.

        Raises:
            ChatUnavailable: there is no answer now.
            EmptyReply: there is no answer in the reply.
            ChatError: there is no answer.
        """
        body = {
            "model": self.model,
            "messages": [
                {
                    "role": role,
                    "content": [item for content_part in parts for item in _message_content(content_part)],
                }
                for role, parts in turns
            ],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        client = EndpointClient(self.base_url, self.key_variable, self.timeout_s, self.attempts, self.pause_s)
        try:
            reply = client.post_json("chat/completions", body, check_stop)
        except EndpointUnavailable as error:
            raise ChatUnavailable(f"{self.model}: {error}") from None
        except EndpointError as error:
            raise ChatError(f"{self.model}: {error}") from None
        try:
            return _read_reply(reply, client)
        except EndpointError as error:
            raise EmptyReply(f"{self.model}: {error}") from None


def _message_content(content_part: TurnPart) -> list[dict[str, Any]]:
    if isinstance(content_part, str):
        return [{"type": "text", "text": content_part}]
    if isinstance(content_part, Pictures):
        sent: list[dict[str, Any]] = []
        for time_s, picture_HWC in zip(content_part.times_s, content_part.frames, strict=True):
            sent += [{"type": "text", "text": f"{time_s:.2f} s:"}, _image_part(picture_HWC)]
        return sent
    wave = content_part.resample(SENT_RATE)
    data = base64.b64encode(encode_bytes(wave.samples_CN, SENT_RATE, "wav")).decode()
    return [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]


def _image_part(picture_HWC: NDArray[np.uint8]) -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture_HWC).save(buffer, format="PNG")
    address = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": address}}


def _read_reply(reply: bytes, client: EndpointClient) -> ChatReply:
    try:
        content = json.loads(reply)
        text = content["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise EndpointError(f"no answer in the reply: {client.excerpt(reply)}") from None
    if not isinstance(text, str):
        raise EndpointError("the reply holds no text")
    usage = content.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    is_count = isinstance(tokens, int) and 0 <= tokens <= _MAX_TOKENS_TOLD
    # half of an emoji, at which an answer was cut, is no text that a file can hold
    return ChatReply(text.encode(errors="replace").decode(), tokens if is_count else None)


# ------------------------------------------------------------------------------------------ local models


class FolderChat:
    """A model of any family that answers in words, greedy.

    Attributes:
        hears: whether it takes recordings; VideoLLaMA 3 takes pictures alone.
    """

    def __init__(self, model: AnsweringModel, max_tokens: int) -> None:
        self.model, self._max_tokens = model, max_tokens
        self.name, self.hears = model.name, model.hears

    @classmethod
    def load(cls, folder: Path, max_tokens: int, codec: Path | None = None) -> FolderChat:
        """Load the model of a local folder; nothing is downloaded, nothing of the folder is run.

        Raises:
            ConfigError: the folder holds no model that answers in words, or holds pickled weights only.
        """
        return cls(open_model_folder(folder).answering_model(codec), max_tokens)

    def ask(self, parts: Parts) -> str:
        """See `Chat.ask`."""
        return self.go_on([("user", parts)])

    def go_on(self, turns: Sequence[Turn], check_stop: Callable[[], None] | None = None) -> str:
        """See `TurnChat.go_on`."""
        return self.reply_counted(turns, check_stop).text

    def reply_counted(self, turns: Sequence[Turn], check_stop: Callable[[], None] | None = None) -> ChatReply:
        """The assistant's next turn, and the tokens of the conversation with it.

        Args:
            check_stop: called after every token; what it raises ends the answer, where it is no `Exception`.

        Raises:
            ChatError: there is no answer.
        """
        try:
            (answer,) = self.model.answer([AnswerRequest(turns, max_tokens=self._max_tokens)], check_stop)
        except AnswerError as error:
            raise ChatError(f"{self.name}: {error}") from error
        return ChatReply(answer.text, answer.tokens)
