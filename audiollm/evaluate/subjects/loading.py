"""Models under test from a folder, ours or of transformers, or by an import path (`package.module:factory`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from audiollm.errors import ConfigError
from audiollm.evaluate.subjects.protocols import Answerer, DialogueSpeaker, Speaker, Subject
from audiollm.recipe.plug_ins import import_named, is_import_path

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
    return Subject(model, f"{answering.fingerprint} {max_tokens}", FolderAnswerer(answering, max_tokens))


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
