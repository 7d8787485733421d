"""Options of commands that take models: `--download`, and parsers that turn names of the hub into folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from audiollm.errors import ConfigError
from audiollm.hub_models.downloads import HubError
from audiollm.hub_models.folders import OPTION, allow_downloads, hub_folder, hub_source

PLACE, SOURCE = "FOLDER|HUB_NAME", "TEXT"
Download = Annotated[
    bool,
    typer.Option(
        OPTION,
        help="Fetch models that are named as on the hub (openai/whisper-base, or NAME@REVISION) and that its cache "
        "lacks: safetensors, JSON and tokenizers. Size and licence are shown first.",
        is_eager=True,  # before the options that name models are read
        callback=allow_downloads,
    ),
]
"""The option of every command that takes a model; its callback does all."""


def folder_option(text: str) -> Path:
    """Parse an option that takes a model's folder.

    Raises:
        ConfigError: see `hub_folder`.
    """
    try:
        return hub_folder(text)
    except HubError as error:  # a ValueError, too, of which typer would show the first half
        raise ConfigError(error.message, error.where, error.remedy) from error


def source_option(text: str) -> str:
    """Parse an option that takes a model's folder, `KIND=FOLDER`, a file or an import path.

    Raises:
        ConfigError: see `hub_folder`.
    """
    try:
        return hub_source(text, "recognizer")
    except HubError as error:
        raise ConfigError(error.message, error.where, error.remedy) from error
