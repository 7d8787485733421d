"""Where a listening model comes from, as the commands' options say: a folder, an import path, or an endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from audiollm.errors import ConfigError

if TYPE_CHECKING:
    from audiollm.evaluate.subjects.chat import Chat, EndpointChat
    from audiollm.evaluate.subjects.protocols import Subject


@dataclass(frozen=True)
class ListenerSource:
    """The source of a listening model."""

    model: str | None
    """A folder or an import path; None: the endpoint."""
    codec: Path | None
    endpoint: str | None
    endpoint_model: str | None
    key_variable: str
    max_tokens: int

    def listener(self) -> Subject:
        """An `Answerer`.

        Raises:
            ConfigError: there is no such model, or the endpoint's is not named.
        """
        from audiollm.evaluate.subjects.chat import ChatAnswerer
        from audiollm.evaluate.subjects.loading import load_answerer
        from audiollm.evaluate.subjects.protocols import Subject

        if self.model is not None:
            return load_answerer(self.model, self.codec, self.max_tokens)
        chat, fingerprint = self._endpoint_chat()
        return Subject(chat.name, fingerprint, ChatAnswerer(chat))

    def chat(self) -> tuple[Chat, str]:
        """A chat, and its fingerprint. A model by an import path hears one recording: several are joined.

        Raises:
            ConfigError: there is no such model, or the endpoint's is not named.
        """
        from audiollm.evaluate.subjects.chat import FolderChat, OneClipChat
        from audiollm.evaluate.subjects.folder_model import FolderAnswerer

        if self.model is None:
            return self._endpoint_chat()
        subject = self.listener()
        if isinstance(subject.model, FolderAnswerer):
            return FolderChat(subject.model.model, self.max_tokens), subject.fingerprint
        return OneClipChat(subject.model, subject.name), subject.fingerprint

    def _endpoint_chat(self) -> tuple[EndpointChat, str]:
        from audiollm.evaluate.subjects.chat import EndpointChat

        if self.endpoint is None or self.endpoint_model is None:
            reason, remedy = "no model named", "give the name that the endpoint knows it by"
            raise ConfigError(reason, "--endpoint-model", remedy)
        chat = EndpointChat(self.endpoint, self.endpoint_model, self.key_variable, self.max_tokens)
        return chat, f"{self.endpoint} {self.endpoint_model} {self.max_tokens}"
