"""From folders to the state of a server: models by their names, with one service for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audiollm.errors import ConfigError
from audiollm.generation.service.service import GenerationService
from audiollm.hub_models.options import read_folder
from audiollm.serve.app_state import AppState
from audiollm.serve.gate import ServerState
from audiollm.serve.limits import MB, ServeLimits
from audiollm.serve.model import ServerModel, load_served_model
from audiollm.serve.voices import VoiceStore
from audiollm.serve.word_placer import WordPlacer


def load_state(
    folders: Sequence[str],
    limits: ServeLimits,
    *,
    codec: Path | None = None,
    voices: Path | None = None,
    aligner: Path | None = None,
    host: str = "127.0.0.1",
    key: str | None = None,
    hostnames: Sequence[str] | None = None,
) -> AppState:
    """Load models.

    Args:
        folders: `FOLDER`, or `NAME=FOLDER`.
        aligner: a CTC model that places the words of transcripts; None: Pocketsphinx, for English.

    Raises:
        ConfigError: one does not load, or two have the same name.
    """
    service = GenerationService(limits.queue)
    models: dict[str, ServerModel] = {}
    for text in folders:
        name, folder = split_model_name(text)
        model = load_served_model(folder, service, limits, name, codec)
        if model.name in models:
            raise ConfigError(f"two models are called {model.name}", text, "give names: NAME=FOLDER")
        models[model.name] = model
    server = ServerState(host, key, tuple(hostnames or ()), round(limits.upload_mb * MB))
    word_placer = WordPlacer(aligner)
    if aligner is not None:
        word_placer.open()
    return AppState(service, models, VoiceStore(voices, limits.voices), limits, server, word_placer)


def split_model_name(text: str) -> tuple[str, Path]:
    """Split `NAME=FOLDER`; a folder whose own name has the sign stays whole."""
    name, mark, folder = text.partition("=")
    if not mark or Path(text).exists():
        return "", read_folder(text)
    if not name.strip():
        raise ConfigError("there is no name before =", text, "give NAME=FOLDER, or FOLDER alone")
    return name, read_folder(folder)
