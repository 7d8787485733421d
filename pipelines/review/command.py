"""The command `review`."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from audiollm.errors import ConfigError


def review(
    folder: Annotated[
        Path,
        typer.Argument(help="Output folder of `audiollm annotate`.", metavar="FOLDER", show_default=False),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 7870,
) -> None:
    """Correct an annotation in a browser: hear each segment, mend text, speaker and span, keep or drop it.

    The keys N, P, A, R, space, S and U do all of it: next, previous, accept, reject, play, play slower, undo; the page
    lists the others. Each correction is on the disk, in FOLDER/corrections.jsonl, before the page says so.

    Corrections stand above every recognizer and rule. The next run of `audiollm annotate` with the same OUT measures
    the corrected segments anew and counts them in report.html; `compose` uses them at once.

    It answers on this machine alone, and sends nothing anywhere. Several windows may be open; a colleague reaches it
    through `ssh -L 7870:127.0.0.1:7870 HOST`. Ctrl-C ends it.

    Example: audiollm review corpus
    """
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError("review needs fastapi and uvicorn", "", "pip install 'audiollm[serve]'")
    from audiollm.serve.server import bound_listener
    from pipelines.review.server import ADDRESS, review_app, run_review_server
    from pipelines.review.sounds import load_libraries
    from pipelines.review.table import ReviewTable

    console = Console()
    table = ReviewTable(folder)
    with bound_listener(ADDRESS, port) as listener:
        app = review_app(table)
        threading.Thread(target=load_libraries, daemon=True).start()
        console.print(f"http://{ADDRESS}:{listener.getsockname()[1]}", style="bold")
        run_review_server(app, listener)
    console.print(f"corrections are in {folder / 'corrections.jsonl'}", soft_wrap=True, highlight=False)
