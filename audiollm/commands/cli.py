"""The console script `audiollm`. Commands are found through the entry-point group `audiollm.commands`.

An entry named `GROUP.COMMAND` becomes `audiollm GROUP COMMAND`, whichever package brings it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import typer
from rich.console import Console

from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.failures import watched_failures
from audiollm.files.atomic import DamagedFile
from audiollm.files.disk_errors import disk_error

GROUPS = {
    "evaluate": "Score codecs and what models make: against references, and with independent judges.",
    "sound": "Make sounds from video and words, and edit them.",
}
"""Help text of each command group; a group of another package needs no entry here."""
INTERRUPTED = 130
"""Exit code at Ctrl-C."""
STOPPED = "stopped; the same command goes on from here"


def build_app(wanted: str = "") -> typer.Typer:
    """The app with every installed command.

    Args:
        wanted: a command or a group. Where it is installed the app has it alone: importing all commands and reading
            their options takes 0.7 CPU-seconds.
    """
    app = typer.Typer(
        name="audiollm",
        help="Train, annotate for, and evaluate audio LLMs, from recipes.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    groups: dict[str, typer.Typer] = {}
    entries = sorted(entry_points(group="audiollm.commands"), key=lambda entry: entry.name)
    for entry in [entry for entry in entries if entry.name.partition(".")[0] == wanted] or entries:
        try:
            command = entry.load()
            group, _, name = entry.name.rpartition(".")
            if group and group not in groups:
                groups[group] = typer.Typer(help=GROUPS.get(group, ""), no_args_is_help=True)
                groups[group].callback()(_app)  # else a single command would take the group's place
                app.add_typer(groups[group], name=group)
            watched = watched_failures(entry.name.replace(".", " "))(command)
            (groups[group] if group else app).command(name=name)(watched)
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
    threading.excepthook = partial(_thread_error, errors, threading.excepthook)
    try:
        build_app(sys.argv[1] if len(sys.argv) > 1 else "")()
    except ConfigError as error:
        errors.print(str(error), style="red", highlight=False, markup=False)
        sys.exit(2)
    except StageError as error:
        errors.print(str(error), style="red", highlight=False, markup=False)
        sys.exit(error.exit_code)
    except BadSample as error:
        errors.print(f"{error}\n  mend or remove it", style="red", highlight=False, markup=False)
        sys.exit(2)
    except DamagedFile as error:
        errors.print(str(error), style="red", highlight=False, markup=False)
        sys.exit(1)
    except SystemExit as end:  # typer ends with this code at Ctrl-C
        if end.code == INTERRUPTED:
            errors.print(STOPPED, highlight=False)
        raise
    except KeyboardInterrupt:
        errors.print(STOPPED, highlight=False)
        sys.exit(INTERRUPTED)
    except Exception as error:
        told = disk_error(error)
        if told is None:
            raise
        errors.print("\n  ".join(told), style="red", highlight=False, markup=False)
        sys.exit(1)


def _thread_error(
    errors: Console, otherwise: Callable[[threading.ExceptHookArgs], Any], given: threading.ExceptHookArgs
) -> None:
    """A full disk ends threads of libraries as well (TensorBoard's); no traceback is needed to say so."""
    told = disk_error(given.exc_value) if given.exc_value is not None else None
    if told is None:
        otherwise(given)
    else:
        errors.print(told[0], style="red", highlight=False, markup=False)


def _app() -> None:
    pass


if __name__ == "__main__":
    main()
