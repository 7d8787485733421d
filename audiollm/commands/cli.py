"""The console script `audiollm`. Commands are found through the entry-point group `audiollm.commands`.

An entry named `GROUP.COMMAND` becomes `audiollm GROUP COMMAND`, whichever package brings it. Nothing heavy is imported
with this module: Ctrl-C has to end the script quietly from its first moment on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading

    import typer
    from rich.console import Console

GROUPS = {
    "evaluate": "Score codecs and what models make: against references, and with independent judges.",
    "sound": "Make sounds from video and words, and edit them.",
}
"""Help text of each command group; a group of another package needs no entry here."""
INTERRUPTED = 130
"""Exit code at Ctrl-C."""
STOPPED = "stopped; the same command goes on from here"
COMPLETION = "_AUDIOLLM_COMPLETE"
"""Environment variable by which a shell asks for completions."""


def build_app(only_command: str = "", own_command: str = "") -> typer.Typer:
    """The app with every installed command.

    Args:
        only_command: a command or a group. Where it is installed the app has it alone: importing all commands and
            reading their options takes 0.7 CPU-seconds.
        own_command: `package.module:function` of a user's own, for the group `only_command`.
    """
    from importlib.metadata import entry_points

    import typer

    from audiollm.commands.help_text import help_text
    from audiollm.failures import watched_failures

    # without rich's frames, which cut long words and break examples
    app = typer.Typer(
        name="audiollm",
        help="Train, annotate for, and evaluate audio LLMs, from recipes.",
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    groups: dict[str, typer.Typer] = {}

    def add(parent: typer.Typer, name: str, title: str, command: Callable[..., Any]) -> None:
        text = help_text(command.__doc__ or "")
        summary = " ".join(text.partition("\n\n")[0].split())  # whole in the list of commands
        parent.command(name=name, help=text, short_help=summary)(watched_failures(title)(command))

    entries = sorted(entry_points(group="audiollm.commands"), key=lambda entry: entry.name)
    for entry in [entry for entry in entries if entry.name.partition(".")[0] == only_command] or entries:
        try:
            command = entry.load()
            group, _, name = entry.name.rpartition(".")
            if group and group not in groups:
                summary = GROUPS.get(group, "")
                groups[group] = typer.Typer(
                    help=summary, short_help=summary, no_args_is_help=True, rich_markup_mode=None
                )
                groups[group].callback()(_hold_group)  # else a single command would take the group's place
                app.add_typer(groups[group], name=group)
            add(groups[group] if group else app, name, entry.name.replace(".", " "), command)
        except Exception as error:  # one broken plug-in must not take the others down
            print(
                f"audiollm: the command {entry.name!r} does not load ({error}); see `audiollm doctor`",
                file=sys.stderr,
            )
    if own_command and only_command in groups:
        from audiollm.recipe.plug_ins import import_named

        function = import_named(own_command, "give package.module:function, with Typer's options")
        add(groups[only_command], own_command, f"{only_command} {own_command}", function)
    app.callback()(_top_level(typer))
    return app


def main() -> None:
    """Run a command; an error that a person can mend is one message, with exit code 2 (or a stage's own)."""
    _plain_without_terminal()
    with _quiet_interrupts():
        _refuse_undecodable(sys.argv[1:])
        import threading
        from functools import partial

        from rich.console import Console

        errors = Console(stderr=True, soft_wrap=True)
        threading.excepthook = partial(_thread_error, errors, threading.excepthook)
        from audiollm.errors import ConfigError

        try:
            app = build_app(_command_of(sys.argv[1:]), _own_command_of(sys.argv[1:]))
        except ConfigError as error:
            errors.print(str(error), style="red", highlight=False, markup=False)
            sys.exit(2)
    _run_app(app, errors)


def _plain_without_terminal() -> None:
    """Write lines, not bars, where no terminal reads them: Jupyter and CI set FORCE_COLOR, by which rich draws a bar
    ten times per second into their logs. `TTY_COMPATIBLE=1` has it draw all the same."""
    if "FORCE_COLOR" in os.environ and not (sys.stdout.isatty() or sys.stderr.isatty()):
        os.environ.setdefault("TTY_COMPATIBLE", "0")


def _run_app(app: typer.Typer, errors: Console) -> None:
    from audiollm.audio.discovery import AudioError
    from audiollm.errors import BadSample, ConfigError, StageError
    from audiollm.files.atomic import DamagedFile
    from audiollm.files.disk_errors import disk_error

    try:
        app(prog_name="audiollm")
    except ConfigError as error:
        errors.print(str(error), style="red", highlight=False, markup=False)
        sys.exit(2)
    except StageError as error:
        errors.print(str(error), style="red", highlight=False, markup=False)
        sys.exit(error.exit_code)
    except BadSample as error:
        errors.print(f"{error}\n  mend or remove it", style="red", highlight=False, markup=False)
        sys.exit(2)
    except (DamagedFile, AudioError) as error:
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
        lines = disk_error(error)
        if lines is None:
            raise
        errors.print("\n  ".join(lines), style="red", highlight=False, markup=False)
        sys.exit(1)


def _command_of(arguments: Sequence[str]) -> str:
    """The first word of the command line, also where a shell asks how it may go on."""
    if COMPLETION in os.environ:
        os.environ.setdefault("TERMINAL_WIDTH", "1000")  # typer wraps help, and a shell proposes each line
        words = os.environ.get("_TYPER_COMPLETE_ARGS", os.environ.get("COMP_WORDS", "")).split()
        return words[1] if len(words) > 2 else ""
    return arguments[0] if arguments else ""


def _own_command_of(arguments: Sequence[str]) -> str:
    """The second word, if it is `package.module:function`: a user's own command of the group before it."""
    from audiollm.recipe.plug_ins import is_import_path

    return arguments[1] if len(arguments) > 1 and is_import_path(arguments[1]) else ""


@contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """While modules are loaded Ctrl-C ends the process at once: an exception would become another in their midst."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or the caller's own
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: Any) -> None:
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def _refuse_undecodable(arguments: Sequence[str]) -> None:
    """End the process where an argument cannot be written into a manifest, a report or a message."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            printable = os.fsencode(argument).decode("utf-8", "backslashreplace")
            print(
                f"{printable}: this argument is not UTF-8\n  rename the file, or set the terminal to UTF-8",
                file=sys.stderr,
            )
            sys.exit(2)


def _thread_error(
    errors: Console,
    otherwise: Callable[[threading.ExceptHookArgs], Any],
    arguments: threading.ExceptHookArgs,
) -> None:
    """A full disk ends threads of libraries as well (TensorBoard's); no traceback is needed to say so."""
    from audiollm.files.disk_errors import disk_error

    lines = disk_error(arguments.exc_value) if arguments.exc_value is not None else None
    if lines is None:
        otherwise(arguments)
    else:
        errors.print(lines[0], style="red", highlight=False, markup=False)


def _hold_group() -> None:
    pass


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from audiollm import __version__

        print(f"audiollm {__version__}")
        sys.exit()


def _top_level(typer: Any) -> Callable[..., None]:
    """The options of the script itself."""
    option = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    )

    def app(version: bool = option) -> None:
        pass

    return app


if __name__ == "__main__":
    main()
