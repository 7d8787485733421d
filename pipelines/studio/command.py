"""The command `studio`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.hub_models.options import Download, folder_option, source_option


def open_studio(
    model: Annotated[
        Path | None,
        folder_option(
            "A train_flow stage's folder, or its run's folder: makes and edits sounds.",
            show_default="none: all but that works",
        ),
    ] = None,
    autoencoder: Annotated[
        str | None,
        source_option("The autoencoder's folder or import path; by default the run's own."),
    ] = None,
    writer: Annotated[
        str | None,
        source_option(
            "Who writes chains of thought: the folder of a model, or endpoint=MODEL@URL.",
            show_default="measured",
        ),
    ] = None,
    tagger: Annotated[
        str | None,
        source_option("A tagger of sounds that names what is measured: auto (YAMNet), or a path."),
    ] = None,
    tracker: Annotated[
        Path | None,
        folder_option("Folder of a SAM 2, which follows objects.", show_default="correlation"),
    ] = None,
    live: Annotated[
        Path | None, folder_option("A model trained on streams (recipes/interpret): interprets talks.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of runs, whose reports and curves are shown.")] = Path(
        "runs"
    ),
    data: Annotated[
        list[Path] | None, typer.Option(help="Output folder of `annotate` or `audiocot`; may be given again.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where projects are kept.")] = Path("studio"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 7860,
    upload_mb: Annotated[float, typer.Option(min=1, help="Megabytes of the largest file.")] = 2000.0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of the longest recording.")] = 120.0,
    download: Download = False,
) -> None:
    """Open the studio in a browser: make sound for a video or recording, edit it, look through runs.

    It answers on this machine alone, and sends nothing anywhere. Ctrl-C ends it; projects stay in --folder.

    Example: audiollm studio --model runs/thinksound-tiny
    """
    if importlib.util.find_spec("gradio") is None:
        raise ConfigError("the studio needs gradio", "", "pip install 'audiollm[studio]'")
    from pipelines.studio.limits import StudioLimits
    from pipelines.studio.server import (
        ADDRESS,
        bound_socket,
        load_editor,
        lock_folder,
        run_server,
        studio_app,
    )

    console = Console()
    for path in data or ():
        if not path.is_dir():
            raise ConfigError(
                f"{path}: no such folder", "--data", "give the output of `annotate` or `audiocot`"
            )
    limits = StudioLimits(upload_mb=upload_mb, duration_s=60 * minutes)
    listening = bound_socket(port)
    with lock_folder(folder):
        with console.status("loading models"):
            editor = load_editor(folder, limits, model, autoencoder, writer, tagger, tracker)
            app = studio_app(editor, runs, tuple(data or ()), live)
        address = f"http://{ADDRESS}:{listening.getsockname()[1]}"
        console.print(address, style="bold")
        console.print(
            "projects of another browser, or from before its cookies were cleared: "
            f"{address}/?recover={editor.recovery_key}",
            soft_wrap=True,
            highlight=False,
        )
        if not editor.service.has_model:
            console.print(
                "no model: `audiollm run recipes/thinksound/tiny.yaml` makes one; then give --model RUN",
                style="yellow",
                highlight=False,
            )
        try:
            run_server(app, listening)
        finally:
            editor.close()
