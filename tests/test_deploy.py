"""The image of the server, read as Docker would: its files are there, its command is ours, its key is asked for."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml

from audiollm.commands.cli import build_app

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def instructions(name: str) -> list[str]:
    joined = re.sub(r"\\\n", " ", DOCKERFILE)
    return [line.split(maxsplit=1)[1] for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_everything_that_is_copied_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for line in instructions("COPY") for source in line.split()[:-1]}
    assert copied == kept and all((ROOT / source).exists() for source in copied)


def test_the_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    includes = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {line.split()[0] for line in instructions("COPY") if (ROOT / line.split()[0]).is_dir()}
    assert folders == {pattern.rstrip("*") for pattern in includes}
    extras = set(re.findall(r"'\.\[(\w+)\]'", DOCKERFILE))
    assert extras == {"serve"} and extras <= project["project"]["optional-dependencies"].keys()


def test_the_command_is_one_of_ours() -> None:
    program, command, *arguments = json.loads(instructions("ENTRYPOINT")[0])
    assert (program, command) == ("audiollm", "serve")
    serve: Any = typer.main.get_command(build_app()).commands["serve"]  # type: ignore[attr-defined]
    options = {option for parameter in serve.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= options
    assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    assert "--key-file" in arguments, "what others reach has a key"


def test_compose_gives_the_key_and_is_bound_to_this_machine() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    service = compose["services"]["audiollm"]
    assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    variables = set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.M))
    assert service["build"]["args"].keys() == variables == {"BASE", "TORCH_INDEX"}
    arguments = json.loads(instructions("ENTRYPOINT")[0])
    assert arguments[arguments.index("--key-file") + 1] == f"/run/secrets/{service['secrets'][0]}"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert {volume.split(":")[1] for volume in service["volumes"]} == {"/models", "/voices"}
    assert arguments[arguments.index("--voices") + 1] == "/voices"
