"""The console script: all commands, or the wanted one alone."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from audiollm.commands import cli
from audiollm.commands.cli import build_app


@pytest.mark.parametrize(("wanted", "others"), [("inspect", "convert"), ("evaluate", "inspect")])
def test_a_command_or_a_group_is_loaded_alone(wanted: str, others: str) -> None:
    shown = CliRunner().invoke(build_app(wanted), ["--help"]).output
    assert f" {wanted} " in shown and f" {others} " not in shown
    assert CliRunner().invoke(build_app(wanted), [wanted, "--help"]).exit_code == 0


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
    monkeypatch.setattr(cli, "build_app", lambda wanted: app)
    monkeypatch.setattr("sys.argv", ["audiollm"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130 and "the same command goes on from here" in capsys.readouterr().err
