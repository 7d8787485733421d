"""The studio's server: one app of the gate, the addresses below /studio, and Gradio's page with its tabs."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path
from typing import IO, Any

from audiollm.errors import ConfigError
from audiollm.evaluate.judges.yamnet import checked_tagger
from audiollm.flow.service import SoundService, load_generator
from audiollm.generation.service.service import GenerationService
from pipelines.audiocot.thinking import MeasuredThinker, model_thinker
from pipelines.studio.editor import SoundEditor, Thinker
from pipelines.studio.limits import StudioLimits
from pipelines.studio.regions import RegionFinder, Sam2Tracker
from pipelines.studio.store import ProjectStore

ADDRESS = "127.0.0.1"


def load_editor(
    folder: Path,
    limits: StudioLimits,
    model: Path | None = None,
    autoencoder: str | None = None,
    writer: str | None = None,
    tagger: str | None = None,
    tracker: Path | None = None,
) -> SoundEditor:
    """Load the models once, and open the folder of projects.

    Args:
        model: a `train_flow` stage or its run; None: nothing can be made, all else works.
        writer: a model that writes chains of thought; None: they are measured.
        tagger: names sounds for measured chains of thought: `auto` (YAMNet), or a path.
        tracker: folder of a SAM 2; None: objects are followed by correlation.

    Raises:
        ConfigError: a model that cannot be loaded.
    """
    tagger_path = None if tagger is None else checked_tagger(tagger)
    generator = load_generator(model, autoencoder) if model is not None else None
    answers = None if writer is None else GenerationService()
    thinker: Thinker = MeasuredThinker(tagger_path) if writer is None else model_thinker(writer, 3, answers)
    regions = RegionFinder(Sam2Tracker(tracker) if tracker is not None else None)
    store = ProjectStore(folder, limits)
    service = SoundService(generator)
    return SoundEditor(service, store, regions, thinker, writer is not None, limits, answers)


def studio_app(editor: SoundEditor, runs: Path, data: tuple[Path, ...] = (), live: Path | None = None) -> Any:
    """The whole app.

    Args:
        runs: folder of runs to show.
        data: output folders of `annotate` and `audiocot`.
        live: a model that interprets talks.

    Raises:
        ConfigError: that model cannot be loaded.
    """
    from fastapi import FastAPI

    from audiollm.interpret.live.live_model import LiveModel
    from pipelines.review.routes import add_review_routes
    from pipelines.review.table import ReviewTable
    from pipelines.studio.browse.clips import is_annotation, review_prefix
    from pipelines.studio.browse.files import ShownFiles
    from pipelines.studio.browse.routes import add_shown_routes
    from pipelines.studio.gate import StudioGate
    from pipelines.studio.live import LiveDesk
    from pipelines.studio.routes import add_routes
    from pipelines.studio.tabs import (
        HEAD,
        STYLE,
        StudioFolders,
        import_gradio,
        studio_page,
        studio_theme,
    )

    gradio = import_gradio()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_routes(app, editor)
    shown_files = ShownFiles()
    add_shown_routes(app, shown_files, LiveDesk(LiveModel.load(live)) if live is not None else None)
    for place, folder in enumerate(data):
        if is_annotation(folder):
            add_review_routes(app, review_prefix(place), ReviewTable(folder))
    tabs = studio_page(StudioFolders(runs, data, live is not None), shown_files)
    app = gradio.mount_gradio_app(
        app,
        tabs,
        path="/",
        server_name=ADDRESS,
        footer_links=[],
        ssr_mode=False,
        show_error=True,
        enable_monitoring=False,
        theme=studio_theme(),
        css=STYLE,
        head=HEAD,
    )
    app.add_middleware(StudioGate)
    return app


def lock_folder(folder: Path) -> IO[str]:
    """Keep other servers off a folder for as long as the returned file is open.

    Raises:
        ConfigError: another server uses it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"{folder}: another studio uses it", "--folder", "end that one, or give another folder"
        ) from None
    return lock


def bound_socket(port: int) -> socket.socket:
    """A socket on the local address.

    Raises:
        ConfigError: the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port {port} cannot be used ({error.strerror})", "--port", "give another, or 0 for any"
        ) from None
    return listener


def run_server(app: Any, listening: socket.socket) -> None:
    """Answer requests until Ctrl-C."""
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, server_header=False)
    uvicorn.Server(config).run(sockets=[listening])
