"""The console script `audiollm`. Commands are found through the entry-point group `audiollm.commands`."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points

# Threads of a parallel region that wait for the others spin only briefly before they sleep: with libgomp's own
# default, training on a CPU that is busy with anything else is several times slower. Set before torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import typer
from rich.console import Console

from audiollm.config import ConfigError
from audiollm.runner import StageError


def build_app() -> typer.Typer:
    """The app with every installed command."""
    app = typer.Typer(
        name="audiollm",
        help="Train, annotate for, and evaluate audio LLMs, from recipes.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    for entry in sorted(entry_points(group="audiollm.commands"), key=lambda entry: entry.name):
        try:
            app.command(name=entry.name)(entry.load())
        except Exception as error:  # one broken plug-in must not take the others down
            print(
                f"audiollm: the command {entry.name!r} does not load ({error}); see `audiollm doctor`",
                file=sys.stderr,
            )
    app.callback()(_app)
    return app


def main() -> None:
    """Run a command; an error that a person can mend is one message, with exit code 2 (or a stage's own)."""
    errors = Console(stderr=True, soft_wrap=True)
    try:
        build_app()()
    except ConfigError as error:
        errors.print(str(error), style="red", highlight=False, markup=False)
        sys.exit(2)
    except StageError as error:
        errors.print(str(error), style="red", highlight=False, markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        errors.print("stopped; the same command goes on from here", highlight=False)
        sys.exit(130)


def _app() -> None:
    pass


if __name__ == "__main__":
    main()
