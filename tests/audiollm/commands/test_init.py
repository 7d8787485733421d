"""`audiollm init`: a project with a recipe that reads nothing outside, and a stage and a reward that run."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from audiollm.audio.samples import Waveform
from audiollm.commands.cli import build_app
from audiollm.commands.init import read_places, required_keys
from audiollm.commands.project.my_parts import concise
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.rl.rewards.batch import RewardBatch, SampledAnswer

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
    (first,) = re.findall(
        r"^\$ audiollm run (\S+)(?: \w+=\.\.\.)*$", (tmp_path / "mine" / "README.md").read_text(), re.M
    )
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


def test_what_a_recipe_asks_for_is_named_with_the_commands(tmp_path: Path) -> None:
    output = run("init", tmp_path / "mine", "--recipe", "voice")
    assert "the recipe asks for judge: another Whisper" in output
    assert "audiollm plan recipes/voice/small.yaml judge=..." in output
    readme = (tmp_path / "mine" / "README.md").read_text()
    assert (
        "- `judge`: another Whisper" in readme
        and "$ audiollm run recipes/voice/small.yaml judge=...\n" in readme
    )
    assert "asks for" not in run("init", tmp_path / "questions", "--recipe", "audio_reasoner")
    assert "asks for" not in (tmp_path / "questions" / "README.md").read_text()


def test_a_key_that_the_base_asks_for_is_asked_for_where_it_stays_open(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "model: ???     # a folder\naudio: ???     # recordings\nstages: []\n"
    )
    (tmp_path / "child.yaml").write_text("base: base.yaml\nmodel: here\njudge: ???\n")
    assert required_keys(tmp_path / "child.yaml") == {"audio": "recordings", "judge": ""}


def test_the_reward_of_ones_own_tells_long_answers_from_short_ones_in_words_and_in_speech() -> None:
    sample = Sample(id="s", messages=[Message(role="user", content=[TextPart(text="why?")])], task="asr")
    words = [SampledAnswer(sample, text, 0) for text in ("no", "a b c d e", "a b c d e f g h i j", "")]
    assert concise(RewardBatch(words)) == [5 / 6, 0.5, 1 / 3, 1.0]
    speech = [
        SampledAnswer(sample, "", 0, recording=Waveform(torch.zeros(1, 16_000 * seconds), 16_000))
        for seconds in (0, 2, 8)
    ]
    assert concise(RewardBatch(speech)) == [1.0, 0.5, 0.2]
