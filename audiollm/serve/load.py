"""From folders to the state of a server: models by their names, with one service for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from audiollm.errors import ConfigError
from audiollm.generation.engine.defaults import read_trained
from audiollm.generation.service.service import GenerationService
from audiollm.hub_models.options import read_folder
from audiollm.interpret.live.live_model import LiveModel
from audiollm.models.frozen.formats import GenerationFormat
from audiollm.models.pretrained import model_folder
from audiollm.serve.app_state import AppState
from audiollm.serve.gate import ServerState
from audiollm.serve.interpreters import ServedInterpreter
from audiollm.serve.limits import MB, ServeLimits
from audiollm.serve.model import ServerModel, load_served_model, served_name
from audiollm.serve.voices import VoiceStore
from audiollm.serve.word_placer import WordPlacer


def load_state(
    folders: Sequence[str],
    limits: ServeLimits,
    *,
    codec: Path | None = None,
    dtype: GenerationFormat = "fp32",
    voices: Path | None = None,
    aligner: Path | None = None,
    server: ServerState | None = None,
) -> AppState:
    """Load models.

    Args:
        folders: `FOLDER`, or `NAME=FOLDER`.
        dtype: how the linear layers of models that speak are held in memory.
        aligner: a CTC model that places the words of transcripts; None: Pocketsphinx, for English.
        server: who may ask, by which names; None: everybody on this machine.

    Raises:
        ConfigError: one does not load, or two have the same name.
    """
    service = GenerationService(limits.queue)
    models: dict[str, ServerModel] = {}
    interpreters: dict[str, ServedInterpreter] = {}
    for text in folders:
        name, folder = split_model_name(text)
        name = name or served_name(model_folder(folder))
        if name in models or name in interpreters:
            raise ConfigError(f"two models are called {name}", text, "give names: NAME=FOLDER")
        if read_trained(model_folder(folder)).chunk_frames is not None:
            interpreters[name] = ServedInterpreter(name, LiveModel.load(folder, codec), int(time.time()))
        else:
            models[name] = load_served_model(folder, service, limits, name, codec, dtype)
    if dtype != "fp32" and not any(model.speaks for model in models.values()):
        raise ConfigError(
            "no model here speaks, and others are held in float32 alone", "--dtype", "leave it out"
        )
    server = replace(server or ServerState(), max_body_bytes=round(limits.upload_mb * MB))
    word_placer = WordPlacer(aligner)
    if aligner is not None:
        word_placer.open()
    store = VoiceStore(voices, limits.voices)
    return AppState(service, models, store, limits, server, word_placer, interpreters)


def split_model_name(text: str) -> tuple[str, Path]:
    """Split `NAME=FOLDER`; a folder whose own name has the sign stays whole."""
    name, mark, folder = text.partition("=")
    if not mark or Path(text).exists():
        return "", read_folder(text)
    if not name.strip():
        raise ConfigError("there is no name before =", text, "give NAME=FOLDER, or FOLDER alone")
    return name, read_folder(folder)
