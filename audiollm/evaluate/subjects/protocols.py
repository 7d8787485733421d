"""Whom the suites judge, behind small protocols: our own model folders, and models of others by an import path.

`package.module:factory` names a function without arguments (or a class) that makes one. It may have an attribute
`fingerprint`, a text that changes when what it says may change; without one the import path stands for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from audiollm.audio import Waveform
from audiollm.data.records.sample import Message
from audiollm.files.atomic import folder_digest
from audiollm.files.json_files import read_json_file
from audiollm.recipe.config import ConfigError

OWN_MODELS = ("audiollm_dual_ffn", "higgs_audio_v2", "higgs_audio")
"""`model_type` of the folders that `Generator` loads."""


@runtime_checkable
class Speaker(Protocol):
    """Says a text."""

    def speak(self, text: str, reference: Path | None, reference_text: str | None, seed: int) -> Waveform:
        """The text in the voice of a recording, whose words are known or not; without one, in any voice."""


@dataclass(frozen=True)
class Voice:
    """A recording of a voice and, where known, what it says."""

    path: Path
    text: str | None = None


@runtime_checkable
class DialogueSpeaker(Protocol):
    """Says a dialogue."""

    def converse(
        self, turns: Sequence[tuple[str, str]], references: Mapping[str, Voice], seed: int
    ) -> list[Waveform]:
        """The sound of each (speaker, text) turn, by speakers with a reference or of the model's own choice."""


@runtime_checkable
class Answerer(Protocol):
    """Answers a question about a recording in words."""

    def answer(self, audio: Waveform, question: str) -> str: ...


@runtime_checkable
class Conversant(Protocol):
    """An `Answerer` that is asked in a chat as it is written, with its system message and in its order."""

    def reply(self, messages: Sequence[Message], audio: Waveform) -> str:
        """The assistant's next turn in words; `audio` is the one recording in the messages."""


@dataclass(frozen=True)
class TurnByTurn:
    """A `DialogueSpeaker` out of any `Speaker`: each turn alone, in the voice of its speaker's reference.

    A speaker without a reference speaks the first turn in the model's own voice and the others in that of the first.
    """

    speaker: Speaker
    folder: Path
    """Where first turns are kept, to be references."""

    def converse(
        self, turns: Sequence[tuple[str, str]], references: Mapping[str, Voice], seed: int
    ) -> list[Waveform]:
        from audiollm.audio import save
        from audiollm.evaluate.report.store import key_of

        known = dict(references)
        spoken: list[Waveform] = []
        for number, (name, text) in enumerate(turns):
            voice = known.get(name)
            path, words = (voice.path, voice.text) if voice else (None, None)
            wave = self.speaker.speak(text, path, words, seed + number)
            spoken.append(wave)
            if voice is None:
                first = self.folder / f"{key_of(list(turns), name, seed)[:16]}.wav"
                save(first, wave.samples_CN, wave.sample_rate)
                known[name] = Voice(first, text)
        return spoken


@dataclass(frozen=True)
class Subject:
    """A model under test, and what stands for it in the rows."""

    name: str
    fingerprint: str
    model: Any


Made = TypeVar("Made")


def load_speaker(model: str, codec: Path | None, max_duration_s: float | None) -> Subject:
    """A `Speaker` (or one that is a `DialogueSpeaker`, too) from a model's folder or an import path.

    Args:
        codec: the folder of the codec; by default the run's own `train_tokenizer`.
        max_duration_s: the longest that a model of ours may speak for one text; None: by its length.

    Raises:
        ConfigError: nothing there, or what the import path gives cannot speak.
    """
    if is_import_path(model):
        return _plugged(model, (Speaker, DialogueSpeaker), "speak(text, reference, reference_text, seed)")
    from audiollm.evaluate.subjects.own_model import OwnModel

    own = OwnModel.load(Path(model), codec, max_duration_s)
    return Subject(model, own.fingerprint, own)


def load_answerer(model: str, codec: Path | None, max_tokens: int) -> Subject:
    """An `Answerer` from a model's folder, ours or an audio LLM of transformers, or an import path.

    Raises:
        ConfigError: nothing there, or what the import path gives cannot answer.
    """
    if is_import_path(model):
        return _plugged(model, (Answerer,), "answer(audio, question)")
    from audiollm.models.pretrained import model_folder

    folder = model_folder(Path(model))
    if read_json_file(folder / "config.json", dict).get("model_type") in OWN_MODELS:
        from audiollm.evaluate.subjects.own_model import OwnModel

        own = OwnModel.load(Path(model), codec, max_tokens=max_tokens)
        return Subject(model, own.fingerprint, own)
    from audiollm.evaluate.subjects.chat import ChatAnswerer, PretrainedChat

    return Subject(model, folder_digest(folder), ChatAnswerer(PretrainedChat(folder, max_tokens)))


def is_import_path(given: str) -> bool:
    """Whether it is `package.module:factory` and no file or folder."""
    module, colon, name = given.partition(":")
    dotted = all(part.isidentifier() for part in module.split("."))
    return bool(colon) and dotted and name.isidentifier() and not Path(given).exists()


def plug_in(path: str, protocols: tuple[type[Made], ...], needs: str) -> Made:
    """What `package.module:factory` makes; modules beside the working directory are found, too.

    Raises:
        ConfigError: it cannot be imported, fails, or lacks what is needed.
    """
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        made = getattr(import_module(module), name)()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"cannot be made: {reason}", path, f"give a factory without arguments: {needs}"
        ) from error
    finally:
        sys.path.remove(here)
    if not isinstance(made, protocols):
        raise ConfigError(f"{type(made).__name__} has no {needs}", path, f"give it a method {needs}")
    return made


def _plugged(path: str, protocols: tuple[type[Any], ...], needs: str) -> Subject:
    made = plug_in(path, protocols, needs)
    return Subject(path, f"{path} {getattr(made, 'fingerprint', '')}", made)
