"""`audiollm doctor` finds what is broken, says how to mend it, and never crashes itself."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from audiollm.commands import doctor as module
from audiollm.commands.doctor import PACKAGES, TORCH_REMEDY, Check, Package, doctor

LIGHT = ("torch", "torchaudio", "soundfile", "av", "espeakng-loader", "flash-attn")
"""Packages that import fast, or that other tests have imported."""


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A package that is installed and fails when it is imported, as a library that is not found makes it."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name, self.error = name, error

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name == self.name else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise self.error


@pytest.fixture
def few_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", [one for one in PACKAGES if one.name in LIGHT])


@pytest.fixture
def kept_modules() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    sys.modules.update(before)


def run(width: int = 400) -> tuple[int, str]:
    """Exit code and output; the console is wide, so that no phrase is broken over lines."""
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, [], env={"COLUMNS": str(width)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def line_of(name: str, output: str) -> str:
    return next(line for line in output.splitlines() if name in line.split()[:1])


@pytest.mark.usefixtures("few_packages")
def test_the_table_says_what_is_here() -> None:
    exit_code, output = run()
    assert exit_code == 0, output
    assert importlib.metadata.version("torch") in line_of("torch", output)
    assert "MP3" in line_of("soundfile", output)
    assert "cores" in line_of("CPU", output)
    assert "GB" in line_of("memory", output)
    assert "free" in line_of("disk", output)
    assert "GPU" in output
    assert "audiollm.stages" in output and "train_tokenizer" in output
    assert "doctor" in line_of("audiollm.commands", output)


@pytest.mark.usefixtures("few_packages", "kept_modules")
def test_remedies_follow_the_table_for_those_alone_that_need_one() -> None:
    """At 60 columns the remedies once stood beside a column of "ok", and then beside the names of all packages."""
    _, output = run(60)
    checks, _, remedies = output.partition("how to mend it")
    tables = re.findall(r"^ what.*$", checks, re.MULTILINE)
    assert all(checks.count(f" {name} ") >= len(tables) for name in ("torchaudio", "av"))
    assert " av " not in remedies and " torchaudio " not in remedies and "remedy" not in checks


def test_every_package_of_the_card_and_every_extra_is_looked_at() -> None:
    names = {package.name for package in PACKAGES}
    card = {"torch", "torchaudio", "transformers", "encodec", "librosa", "webdataset"}
    annotators = {"silero-vad", "pocketsphinx", "speechmos", "onnxruntime", "espeakng-loader"}
    assert card | annotators | {"soundfile", "av"} <= {p.name for p in PACKAGES if p.needed}
    assert {"deepspeed", "flash-attn", "ray", "gradio", "liger-kernel", "ai-edge-litert", "pesq"} <= names


@pytest.mark.usefixtures("few_packages", "kept_modules")
def test_a_torchaudio_that_does_not_load_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError("libcudart.so.13: cannot open shared object file: No such file or directory")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken("torchaudio", error), *sys.meta_path])
    exit_code, output = run()
    assert exit_code == 1
    line = line_of("torchaudio", output)
    assert line.split()[1] == "missing"
    assert "libcudart.so.13" in line
    assert TORCH_REMEDY in line_of("torchaudio", output.partition("how to mend it")[2])
    assert "needed, and missing or not loading: torchaudio" in output


def test_what_breaks_with_torchaudio_is_sent_to_it() -> None:
    check = module._package(Package("peft", "no_such_module_of_peft"), torchaudio_loads=False)
    assert (check.state, check.remedy) == ("missing", "mend torchaudio first")


@pytest.mark.parametrize(
    "error", [ImportError("a\nb"), SystemExit(3), RuntimeError(), RecursionError("deep")]
)
def test_no_import_ends_the_command(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [Broken("hostile_package", error), *sys.meta_path])
    needed = module._package(Package("hostile-package", "hostile_package"), torchaudio_loads=True)
    optional = module._package(Package("hostile-package", "hostile_package", "sport", False, "run"), True)
    assert needed.state == "missing" and type(error).__name__ in needed.finding and "\n" not in needed.finding
    assert optional.state == "optional" and "sport" in optional.finding and optional.remedy == "run"


def test_an_absent_package_is_asked_for_by_its_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["unheard-of<3,>=2; python_version > '3'"]
    )
    check = module._package(Package("unheard-of", "unheard_of"), torchaudio_loads=True)
    assert check == Check("unheard-of", "missing", "not installed", "pip install 'unheard-of<3,>=2'")


def test_a_version_outside_the_requirement_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["rich<2"])
    check = module._package(Package("rich", "rich"), torchaudio_loads=True)
    assert check.state == "warning" and "<2" in check.finding


@pytest.mark.usefixtures("few_packages")
def test_an_entry_point_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = importlib.metadata.EntryPoint("mine", "no_such_module:STAGE", "audiollm.stages")
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [*real(group=group), *[bad] * (group == bad.group)]
    )
    exit_code, output = run()
    assert exit_code == 1
    assert "no_such_module:STAGE does not load: ModuleNotFoundError" in output
    assert "audiollm.stages" in output and "train_tokenizer" in output


@pytest.mark.usefixtures("few_packages")
def test_a_look_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise PermissionError("no")

    monkeypatch.setattr(module, "MACHINE", {"disk": broken})
    exit_code, output = run()
    assert exit_code == 0
    assert "cannot be found out (PermissionError: no)" in output


def test_the_weights_that_tell_speakers_apart_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str, name: str) -> Path:
        raise FileNotFoundError(name)

    monkeypatch.setattr("audiollm.onnx_models.package_file", absent)
    check = module._resemblyzer()
    assert check.state == "optional" and check.remedy == "pip install --no-deps resemblyzer"
