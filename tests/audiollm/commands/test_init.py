"""`audiollm init`: a project with a recipe that reads nothing outside, and a stage and a reward that run."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from audiollm.commands.cli import build_app
from audiollm.commands.init import read_places
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples

ROOT = Path(str(files("recipes")))
RECIPES = sorted(path.name for path in ROOT.iterdir() if any(path.glob("*.yaml")))


def run(*arguments: object) -> str:
    result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_project_has_all_that_its_recipe_reads(tmp_path: Path, recipe: str) -> None:
    run("init", tmp_path / "mine", "--recipe", recipe)
    folder = tmp_path / "mine" / "recipes"
    assert {path.name for path in ROOT.joinpath(recipe).glob("*.yaml")} <= {
        path.name for path in folder.joinpath(recipe).iterdir()
    }
    for path in folder.rglob("*.yaml"):
        place = path.relative_to(folder).as_posix()
        missing = [
            name for name in read_places(place, path.read_text())
            if (ROOT / name).exists() and not (folder / name).exists()
        ]  # fmt: skip
        assert not missing, place
    for path in folder.rglob("*.md"):
        assert not re.search(r"\]\(\.\.", path.read_text()), "links to what is not there"
    (first,) = re.findall(r"^\$ audiollm run (\S+)$", (tmp_path / "mine" / "README.md").read_text(), re.M)
    assert (tmp_path / "mine" / first).is_file()


def test_what_cannot_be_begun(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    for arguments, problem in (
        ((tmp_path / "full",), "is not empty"),
        ((tmp_path / "new", "--recipe", "voices"), "no such recipe: 'voices'"),
    ):
        result = CliRunner().invoke(build_app(), ["init", *map(str, arguments)])
        assert problem in str(result.exception)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a recipe of its own stage alone."""
    run("init", tmp_path / "mine", "--recipe", "voice")
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    texts = ("one two", "one two three four")
    samples = [
        Sample(
            id=f"s{number}",
            messages=[
                Message(role="user", content=[TextPart(text=text)]),
                Message(role="assistant", content=[AudioPart(path="a.wav")]),
            ],
            task="tts",
        )
        for number, text in enumerate(texts)
    ]
    write_samples(Path("samples.jsonl"), samples)
    Path("mine.yaml").write_text(
        "stages:\n  - my_parts:short_texts: {samples: samples.jsonl, most_words: 3}\n"
        '  - name: again\n    my_parts:short_texts: {samples: "${short_texts.samples}"}\n'
    )
    return tmp_path / "mine"


def test_a_stage_of_ones_own_runs_and_runs_again_where_its_source_changes(project: Path) -> None:
    first = run("run", "mine.yaml")
    assert "1 of 2 samples have at most 3 words" in first and "1 of 1 samples" in first
    made = read_samples(project / "runs/mine/again/samples.jsonl")[0]
    assert [sample.id for sample in made] == ["s0"]
    assert "samples have at most" not in run("run", "mine.yaml"), "what is done is skipped"
    assert "0 of 2 samples have at most 1" in run("run", "mine.yaml", "short_texts.most_words=1")
    source = project / "my_parts.py"
    source.write_text(source.read_text() + "\n# another line\n")
    assert "1 of 2 samples have at most 3 words" in run("run", "mine.yaml")
    assert "most_words" in run("run", "--help-stage", "my_parts:short_texts")


def test_a_stage_that_is_not_there_is_told_before_any_work(project: Path) -> None:
    Path("bad.yaml").write_text("stages:\n  - my_parts:long_texts: {samples: samples.jsonl}\n")
    result = CliRunner().invoke(build_app(), ["run", "bad.yaml"])
    assert result.exit_code and "long_texts" in str(result.exception) and not Path("runs/bad").exists()
