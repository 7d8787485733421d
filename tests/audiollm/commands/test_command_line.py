"""The console script: all commands, or the wanted one alone."""

from __future__ import annotations

import errno
import inspect
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from audiollm.audio import AudioError, save
from audiollm.commands import cli
from audiollm.commands.cli import build_app
from audiollm.commands.help_text import command_lines, help_text
from audiollm.errors import ConfigError
from audiollm.recipe.stages import find_stage, load_recipe

COMMANDS = sorted(entry.name for entry in entry_points(group="audiollm.commands"))


@pytest.mark.parametrize(("wanted", "others"), [("inspect", "convert"), ("evaluate", "inspect")])
def test_a_command_or_a_group_is_loaded_alone(wanted: str, others: str) -> None:
    shown = CliRunner().invoke(build_app(wanted), ["--help"]).output
    assert f" {wanted} " in shown and f" {others} " not in shown
    assert CliRunner().invoke(build_app(wanted), [wanted, "--help"]).exit_code == 0


def test_help_does_not_wait_for_torch() -> None:
    """Importing it takes two CPU-seconds, all commands together half of one."""
    heavy = "torch", "transformers", "scipy", "sklearn", "librosa", "matplotlib", "av"
    code = f"import sys; from audiollm.commands.cli import build_app as b; b(); print(*sys.modules.keys() & {heavy})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stdout.strip(), result.stdout + result.stderr


@pytest.mark.parametrize(("variables", "is_drawn"), [({}, False), ({"TTY_COMPATIBLE": "1"}, True)])
def test_a_notebook_gets_lines_and_no_bars(variables: dict[str, str], is_drawn: bool) -> None:
    """Its kernel sets FORCE_COLOR for what its cells run."""
    code = (
        "import sys; from audiollm.commands import cli; sys.argv = ['audiollm', '--version']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "from rich.console import Console; print(Console().is_terminal)"
    )
    environment = {**os.environ, "FORCE_COLOR": "1", **variables}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.splitlines()[-1] == str(is_drawn), result.stderr


def test_a_command_that_trains_nothing_does_not_import_the_compiler() -> None:
    """`torch._dynamo` takes longer to import than all else that `generate` needs."""
    code = "import sys, audiollm.synthesis.run; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_unknown_command_is_answered_with_all_of_them() -> None:
    result = CliRunner().invoke(build_app("insect"), ["insect"])
    assert result.exit_code == 2 and "inspect" in result.output
    assert " convert " in CliRunner().invoke(build_app("--help"), ["--help"]).output


def test_an_interrupted_command_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    app = typer.Typer()
    app.command()(interrupted)
    monkeypatch.setattr(cli, "build_app", lambda *names: app)
    monkeypatch.setattr("sys.argv", ["audiollm"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130 and "the same command goes on from here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [AudioError("a.wav", "cannot be written"), IsADirectoryError(errno.EISDIR, "Is a directory", "a.wav")],
)
def test_a_sound_file_that_is_refused_ends_a_command_with_a_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise error

    app = typer.Typer()
    app.command()(refused)
    monkeypatch.setattr(cli, "build_app", lambda *names: app)
    monkeypatch.setattr("sys.argv", ["audiollm"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1 and capsys.readouterr().err.startswith("a.wav: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["annotate", ".", "-o", "x", "--set", "steps.foo=1"], "steps: no step 'foo'"),
        (["annotate", ".", "-o", "x", "--set", "steps.events=1"], "steps.events: input should be a group of settings"),
        (["annotate", "none", "-o", "x"], "INPUT  input: no such file or folder: none\n  check the path"),
        (["annotate", ".", "-o", "x", "--tagger", "none"], "--tagger  steps.events.model: no such file or folder"),
        (["annotate", ".", "-o", "x", "--recognizer", "whisper"], "--recognizer  recognizers[0]: 'whisper' is none of"),
        (["audiocot", ".", "-o", "x", "--set", "steps.tag={}"], "steps: no step 'tag': did you mean 'tags'?"),
        (["audiocot", ".", "-o", "x", "--set", "steps.tags.modl=1"], "steps.tags.modl: no such setting"),
        (["audiocot", ".", "-o", "x", "--tagger", "none"], "--tagger  steps.tags.model: no such file or folder: none"),
        (["audiocot", ".", "-o", "x", "--writer", "transformers=none"], "--writer  steps.think.model: no such file"),
        (["run", "RECIPE", "annotate.steps.events.model=none"], "or give another: annotate.steps.events.model=PATH"),
        (["run", "RECIPE", "annotate.steps.events.tops=1"], "steps.events.tops: no such setting\n  settings of this"),
        (["run", "."], ".  is a folder"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_its_option(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(Path(__file__).parents[3] / "recipes" / "quickstart.yaml")
    words = [recipe if word == "RECIPE" else word for word in arguments]
    monkeypatch.setattr("sys.argv", ["audiollm", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["annotate", "in", "-o", "x", "--recognizer", "none"],
        ["audiocot", "in", "-o", "x", "--missing-scorer", "skip"],
        ["convert", "folder", "in", "-o", "x.jsonl"],
        ["evaluate", "codec", "none", "--audio", "in", "-o", "x"],
        ["run", "r.yaml", "scenes.events=[{folder: in}]"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_folder_of_links_that_lead_out_is_not_called_empty(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "a.wav", torch.zeros(1, 8000), 8000)
    (tmp_path / "in" / "bark").mkdir(parents=True)
    (tmp_path / "in" / "bark" / "a.wav").symlink_to(tmp_path / "a.wav")
    (tmp_path / "r.yaml").write_text(
        "name: r\nsize: tiny\nseed: 0\nstages: [{name: scenes, compose_scenes: {}}]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["audiollm", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    message = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2 and "links that lead out of it: 1, not followed" in message, message


def _help(name: str) -> str:
    arguments = [*name.split("."), "-h"]
    return CliRunner().invoke(build_app(arguments[0]), arguments, env={"COLUMNS": "80"}).output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole_at_80_columns_and_its_examples_are_commands(name: str) -> None:
    text = _help(name)
    wide = [line for line in text.splitlines() if len(line) > 80]
    assert "…" not in text and all(
        re.match(r"  [-\w].*<\S*>$", line) for line in wide
    )  # the choices of an option
    command = next(entry for entry in entry_points(group="audiollm.commands") if entry.name == name).load()
    examples = re.findall(r"(?m)^    audiollm .*|(?<=Example: )audiollm .*", command.__doc__)
    commands = [
        shlex.split(line) for line in re.sub(r"\\\n", " ", text).splitlines() if " audiollm " in line[:12]
    ]
    assert len(commands) == len(examples)
    names = set(re.findall(r"(?<![\w-])--?[\w-]+", text[text.index("\nOptions:") :]))
    for words in commands:
        assert words[1 : 1 + len(name.split("."))] == name.split(".")
        options = {word for word in words[: words.index("|") if "|" in words else None] if word[0] == "-"}
        assert options - {"-"} <= names


def test_the_list_of_commands_is_whole() -> None:
    text = CliRunner().invoke(build_app(), ["-h"], env={"COLUMNS": "80"}).output
    joined = " ".join(text.split())
    for entry in entry_points(group="audiollm.commands"):
        if "." not in entry.name:
            summary = inspect.cleandoc(entry.load().__doc__).partition("\n\n")[0]
            assert " ".join(summary.split()) in joined


def test_long_examples_go_on_after_a_backslash() -> None:
    command = "audiollm say --text 'two words' " + "--reference me.wav " * 6 + "-o - | player   # loud"
    lines = command_lines(command)
    assert lines[0] == "# loud" and all(len(line) <= 76 for line in lines)
    assert all(line.endswith(" \\") for line in lines[1:-1]) and len(lines) > 2
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines[1:])) == shlex.split(command)[:-2]
    assert (
        help_text("Say.\n\n    Example: audiollm say\n    --loud")
        == "Say.\n\nExample:\n\n\b\naudiollm say --loud"
    )


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["audiollm", "--version"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and re.fullmatch(r"audiollm \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "completions"),
    [("audiollm gen", ["generate"]), ("audiollm sound e", ["edit"]), ("audiollm plan --tf", ["--tflops"])],
)
def test_a_shell_completes(words: str, completions: list[str]) -> None:
    environment = {"_AUDIOLLM_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split()) - 1)
    result = _script([], environment)
    assert result.stdout.split() == completions and not result.stderr


def test_a_completion_is_one_line_however_long_its_description() -> None:
    environment = {"_AUDIOLLM_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = _script([], {**environment, "_TYPER_COMPLETE_ARGS": "audiollm sound e"})
    (line,) = result.stdout.splitlines()
    assert line.startswith("edit\tExtend a track") and line.endswith("stay as they are.")


@pytest.mark.parametrize(
    "arguments", [["inspect", b"caf\xe9.jsonl"], [b"\xff"], ["run", b"r.yaml", b"audio=\xe9"]]
)
def test_an_argument_that_is_not_utf_8_is_named(arguments: list[str | bytes]) -> None:
    result = _script(arguments)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "not UTF-8" in result.stderr and r"\x" in result.stderr


@pytest.mark.parametrize(
    "module", ["rich.console", "typer", "audiollm.commands.run", "audiollm.recipe.stages"]
)
def test_an_interrupt_while_modules_are_loaded_leaves_no_traceback(module: str) -> None:
    """Also where the import of a library would turn the exception into one of its own."""
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000): pass
            except BaseException as error:
                raise ImportError("not so") from error
sys.meta_path.insert(0, Interrupt())
from audiollm.commands.cli import main
sys.argv = ["audiollm", "run", "x.yaml"]
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "stopped; the same command goes on from here\n"


def _script(
    arguments: list[str | bytes] | list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "audiollm.commands.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        cwd=Path(__file__).parents[3],
    )


@pytest.mark.parametrize("kind", ["train", "annotate", "tokenize", "train_policy"])
def test_the_settings_of_a_stage_are_whole(kind: str) -> None:
    arguments = ["run", "--help-stage", kind]
    text = CliRunner().invoke(build_app("run"), arguments, env={"COLUMNS": "80"}).output
    assert "…" not in text and " at 0x" not in text
    joined = " ".join(text.split())
    for key, field in find_stage(kind).config.model_fields.items():
        assert re.search(rf"(?m)^{key}  \S.*  (required|default .*)$", text)
        assert " ".join((field.description or "").split()) in joined
    assert "default {rank: 16" in text or kind != "train"
    assert re.search(r"(?m)^samples  Path  required$", text) or kind != "tokenize"


@pytest.mark.parametrize("name", ["", " ", "a/b", ".", ".hidden"])
def test_a_name_that_is_no_folder_is_refused(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("stages:\n  - annotate: {}\n")
    with pytest.raises(ConfigError, match=r"--name  name: .* is not a folder name"):
        load_recipe(recipe, name=name, runs=tmp_path / "runs")
