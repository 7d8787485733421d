"""Models under test from a folder, ours or of transformers, by an import path (`package.module:factory`), or behind an
endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from audiollm.errors import ConfigError
from audiollm.evaluate.subjects.protocols import Answerer, DialogueSpeaker, Speaker, Subject
from audiollm.hub_models.names import snapshot_name
from audiollm.recipe.plug_ins import import_named, is_import_path

if TYPE_CHECKING:
    from audiollm.evaluate.subjects.chat import Chat, EndpointChat
    from audiollm.evaluate.subjects.protocols import Subject

PlugIn = TypeVar("PlugIn")


def load_speaker(model: str, codec: Path | None, max_duration_s: float | None) -> Subject:
    """A `Speaker` (or one that is a `DialogueSpeaker`, too) from a model's folder or an import path.

    Args:
        codec: the folder of the codec; by default the run's own `train_tokenizer`.
        max_duration_s: the longest that a model of ours may speak for one text; None: by its length.

    Raises:
        ConfigError: nothing there, or what the import path gives cannot speak.
    """
    if is_import_path(model):
        return _plug_in_subject(
            model, (Speaker, DialogueSpeaker), "speak(text, reference, reference_text, seed)"
        )
    from audiollm.evaluate.subjects.folder_model import FolderSpeaker

    speaker = FolderSpeaker.load(Path(model), codec, max_duration_s)
    return Subject(model, speaker.fingerprint, speaker)


def load_answerer(model: str, codec: Path | None, max_tokens: int) -> Subject:
    """An `Answerer` from a model's folder, of any family, or an import path.

    Raises:
        ConfigError: nothing there, or what the import path gives cannot answer.
    """
    if is_import_path(model):
        return _plug_in_subject(model, (Answerer,), "answer(audio, question)")
    from audiollm.evaluate.subjects.folder_model import FolderAnswerer
    from audiollm.families.registry import open_model_folder

    answering = open_model_folder(Path(model)).answering_model(codec)
    name = snapshot_name(model) or model
    return Subject(name, f"{answering.fingerprint} {max_tokens}", FolderAnswerer(answering, max_tokens))


def plug_in(path: str, protocols: tuple[type[PlugIn], ...], needs: str) -> PlugIn:
    """The object that `package.module:factory` returns; modules in the working directory are found, too.

    Raises:
        ConfigError: it cannot be imported, fails, or lacks what is needed.
    """
    remedy = f"give a factory without arguments: {needs}"
    factory = import_named(path, remedy)
    try:
        instance = factory()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot be made: {reason}", path, remedy) from error
    if not isinstance(instance, protocols):
        raise ConfigError(f"{type(instance).__name__} has no {needs}", path, f"give it a method {needs}")
    return instance


def _plug_in_subject(path: str, protocols: tuple[type[Any], ...], needs: str) -> Subject:
    instance = plug_in(path, protocols, needs)
    return Subject(path, f"{path} {getattr(instance, 'fingerprint', '')}", instance)


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
