"""Options of commands that take models: `--download`, and parsers that turn names of the hub into folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from audiollm.errors import ConfigError
from audiollm.hub_models.downloads import HubError
from audiollm.hub_models.folders import OPTION, allow_downloads, hub_folder, hub_source
from audiollm.hub_models.needed_files import Contents

Download = Annotated[
    bool,
    typer.Option(
        OPTION,
        help="Whatever takes a model's folder also takes its name on the hub (openai/whisper-base, NAME@REVISION). "
        "With this option, what the hub's cache lacks of it is fetched (safetensors, JSON, tokenizers); size and "
        "licence are shown first.",
        is_eager=True,  # before the options that name models are read
        callback=allow_downloads,
    ),
]
"""The option of every command that takes a model; its callback does all."""


def folder_option(help: str, contents: Contents = "model", **options: Any) -> Any:
    """An option of a command that takes a model's folder or its name on the hub; use `Download` beside it.

    Args:
        help: its help text.
        contents: what the folder is read for.
        options: other arguments of `typer.Option`; `name` is the option's own, where the parameter has another.
    """
    return _option(lambda text: hub_folder(text, contents), help, metavar="FOLDER", **options)


def source_option(help: str, **options: Any) -> Any:
    """As `folder_option`, of an option that also takes `KIND=FOLDER`, a file, an import path or words of its own."""
    return _option(lambda text: hub_source(text, "recognizer"), help, metavar="MODEL", **options)


def read_folder(text: str) -> Path:
    """Parse an argument that is a model's folder or its name on the hub.

    Raises:
        ConfigError: see `hub_folder`.
    """
    return Path(_plain(lambda: hub_folder(text)))


def read_source(text: str) -> str:
    """Parse an argument as `source_option` has it.

    Raises:
        ConfigError: see `hub_folder`.
    """
    return str(_plain(lambda: hub_source(text, "recognizer")))


def _option(read: Callable[[str], Path | str], help: str, name: str = "", **options: Any) -> Any:
    names = (name,) if name else ()
    return typer.Option(*names, parser=lambda text: _plain(lambda: read(text)), help=help, **options)


def _plain(read: Callable[[], Path | str]) -> Path | str:
    """A `HubError` is a `ValueError`, too, of which typer would show the first half."""
    try:
        return read()
    except HubError as error:
        raise ConfigError(error.message, error.where, error.remedy) from error
