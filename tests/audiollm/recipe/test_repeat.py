"""Blocks that repeat stages: their expansion, overrides, inheritance, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiollm.errors import ConfigError
from audiollm.recipe.stages import Recipe, load_recipe

ROUNDS = """\
name: demo
audio: null
stages:
  - annotate: {input: "${audio}"}
  - repeat:
      times: 3
      start: {segments: "${annotate.segments}"}
      stages:
        - compose: {segments: "${segments}", tasks: {tts: 1.0}, seed: "${round}"}
        - name: again
          compose: {segments: "${compose.samples}", tasks: {tts: 1.0}}
      next: {segments: "${again.samples}"}
  - name: last
    compose: {segments: "${again.samples}", tasks: {tts: 1.0}}
  - name: carried
    compose: {segments: "${segments}", tasks: {tts: 1.0}}
"""
EACH = """\
name: demo
audio: null
stages:
  - annotate: {input: "${audio}"}
  - repeat:
      each:
        file: {tasks: {tts: 1.0}}
        speaker: {tasks: {tts: 1.0, asr: 2.0}}
      stages:
        - compose: {segments: "${annotate.segments}", tasks: "${tasks}"}
        - name: of
          compose: {segments: "${compose.samples}", tasks: {tts: 1.0}, split: "${key}"}
"""


def write(folder: Path, text: str, name: str = "demo.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    return load_recipe(write(folder, text), overrides, runs=Path("runs"))


def error_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


def settings(recipe: Recipe, name: str) -> dict[str, object]:
    return next(stage for stage in recipe.stages if stage.name == name).settings()


def test_rounds_hand_on_what_they_made(tmp_path: Path) -> None:
    recipe = load(tmp_path, ROUNDS)
    names = ["compose_1", "again_1", "compose_2", "again_2", "compose_3", "again_3"]
    assert [stage.name for stage in recipe.stages] == ["annotate", *names, "last", "carried"]
    made = "runs/demo/{}/samples.jsonl"
    assert settings(recipe, "compose_1")["segments"] == "runs/demo/annotate/segments.jsonl"
    assert settings(recipe, "again_2")["segments"] == made.format("compose_2")
    assert settings(recipe, "compose_3")["segments"] == made.format("again_2")
    assert [settings(recipe, f"compose_{n}")["seed"] for n in (1, 2, 3)] == [1, 2, 3]
    assert {settings(recipe, name)["segments"] for name in ("last", "carried")} == {made.format("again_3")}
    assert recipe.stages[3].upstream == ("again_1",)


def test_a_block_is_the_same_as_its_stages_written_out(tmp_path: Path) -> None:
    written = """\
name: demo
audio: null
stages:
  - annotate: {input: "${audio}"}
  - name: compose_1
    compose: {segments: "${annotate.segments}", tasks: {tts: 1.0}, seed: 1}
  - name: again_1
    compose: {segments: "${compose_1.samples}", tasks: {tts: 1.0}}
"""
    both = [load(tmp_path, text).stages for text in (written, ROUNDS)]
    prints: list[list[str]] = [[], []]
    for place, stages in enumerate(both):
        known: dict[str, str] = {}
        for stage in stages[:3]:
            known[stage.name] = stage.fingerprint(known)
            prints[place].append(known[stage.name])
    assert prints[0] == prints[1]


def test_a_table_of_values_gives_a_pass_a_key(tmp_path: Path) -> None:
    recipe = load(tmp_path, EACH)
    names = ["compose_file", "of_file", "compose_speaker", "of_speaker"]
    assert [stage.name for stage in recipe.stages[1:]] == names
    assert settings(recipe, "compose_speaker")["tasks"] == {"tts": 1.0, "asr": 2.0}
    assert settings(recipe, "of_speaker")["segments"] == "runs/demo/compose_speaker/samples.jsonl"
    assert [settings(recipe, f"of_{key}")["split"] for key in ("file", "speaker")] == ["file", "speaker"]


def test_overrides_name_a_block_a_stage_or_a_round(tmp_path: Path) -> None:
    recipe = load(
        tmp_path, ROUNDS, "repeat.times=2", "again.split=file", "again_2.split=speaker", "compose_1.seed=9"
    )
    assert len(recipe.stages) == 7
    assert [settings(recipe, f"again_{n}")["split"] for n in (1, 2)] == ["file", "speaker"]
    assert [settings(recipe, f"compose_{n}")["seed"] for n in (1, 2)] == [9, 2]
    assert "did you mean 'again_3.'" in error_of(tmp_path, ROUNDS, "again_4.split=file")


def test_a_child_changes_a_block_by_the_names_of_its_stages(tmp_path: Path) -> None:
    write(tmp_path, ROUNDS, "base.yaml")
    child = """\
base: base.yaml
stages:
  - repeat:
      times: 2
      stages:
        - name: again
          compose: {split: file, tasks: {tts: 2.0}}
        - name: third
          compose: {segments: "${again.samples}", tasks: {tts: 1.0}, nonsense: 1}
"""
    message = error_of(tmp_path, child)
    assert "nonsense: no such setting" in message and "demo.yaml:9" in message
    recipe = load(tmp_path, child.replace(", nonsense: 1", ""))
    assert [stage.name for stage in recipe.stages[1:4]] == ["compose_1", "again_1", "third_1"]
    assert settings(recipe, "again_2")["split"] == "file"
    assert settings(recipe, "again_2")["segments"] == "runs/demo/compose_2/samples.jsonl"


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        ("times: 3", "time: 3", "stages[1].repeat.time: no such setting", 6),
        ("times: 3", "times: 0", "stages[1].repeat.times: must be a whole number from 1, not 0", 6),
        ("times: 3", "times: 3\n      each: {a: {}}", "takes `times` or `each`, one of them", 5),
        ("next: {segments", "next: {other", "must give what `start` gives, and nothing else", 12),
        ("start: {segments:", "start: {audio:", "must give what `start` gives", 12),
        ("- compose: {segments: \"${segments}\"", "- 7: {segments: \"${segments}\"", "not a stage", 9),
        ("name: again", "name: annotate", "a second stage named 'annotate'", 10),
        ("name: again", "name: compose", "a second stage named 'compose'", 10),
        ("segments: \"${segments}\"", "segments: \"${round.x}\"", "refers to nothing above", 9),
    ],
)  # fmt: skip
def test_malformed_blocks_are_told_with_their_line(
    tmp_path: Path, old: str, new: str, message: str, line: int
) -> None:
    told = error_of(tmp_path, ROUNDS.replace(old, new, 1))
    assert message in told and f"demo.yaml:{line}" in told


def test_a_carried_name_hides_no_key(tmp_path: Path) -> None:
    told = error_of(tmp_path, ROUNDS.replace("{segments:", "{audio:"))
    assert "'audio' is a key of the recipe or a stage" in told
