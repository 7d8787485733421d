"""The benchmark learn-audiocot: its recipes are typed, its writer of captions sees nothing else, edits take turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart
from audiollm.recipe.stages import load_recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import learn_audiocot as bench


@pytest.mark.parametrize("smoke", [True, False])
def test_all_stages_are_typed(tmp_path: Path, smoke: bool) -> None:
    for folder in ("fsdd/recordings", "esc10", "flow/autoencoder", "flow/flow_1"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("captions.jsonl", *bench.CAPTIONS.values(), "written_1.jsonl", "written_2.jsonl"):
        (tmp_path / name).touch()
    seeds = [1] if smoke else [1, 2]
    stages = bench.data_stages(None if smoke else tmp_path)
    stages += [stage for seed in seeds for stage in bench.writer_stages(seed, tmp_path, smoke)]
    stages += [
        stage for seed in seeds for stage in bench.sound_stages(seed, tmp_path, tmp_path / "flow", smoke)
    ]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "size": "tiny", "seed": 0, "stages": stages}))
    loaded = load_recipe(path)
    of_seed = 2 * 3 + len(bench.CONTROLS) + len(bench.WAYS)
    assert len(loaded.stages) == 2 + len(seeds) * of_seed + (3 if smoke else 0)


def test_captions_replace_pictures_and_sound() -> None:
    content = [VideoPart(path="a.mp4"), AudioPart(path="a.flac"), TextPart(text="What is heard?")]
    answer = Message(role="assistant", content=[TextPart(text="{}")])
    sample = Sample(
        id="q",
        messages=[Message(role="user", content=content), answer],
        task="think",
        metadata={"clip": "a"},
    )
    (found,) = bench.captions_alone([sample], {"a": "bell and rain"})
    assert found.messages[1] == answer
    assert found.messages[0].content == [TextPart(text="The sounds: bell and rain. What is heard?")]


def test_instructions_about_named_sounds_take_turns() -> None:
    def row(operation: str, events: list[str]) -> dict[str, object]:
        truth = {"operation": operation, "record": {"events": events}}
        return {"question": "instruction", "truth": truth}

    rows = [row("add", ["bell"])] * 30 + [row("extend", [])] + [row("remove", ["dog"])] * 30
    found = bench.plain_instructions([*rows, {"question": "clip", "truth": {}}])
    assert [each["truth"]["operation"] for each in found] == ["add", "remove"] * 10


def test_lines_have_an_interval_and_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    bench._print_audiocot_line("a", [0.4, 0.6], 0.8)
    bench._print_audiocot_line("b", [], 0.8)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["ours"], first["peer"], first["ratio"]) == (0.5, 0.8, 0.625) and first["low"] < 0.4
    assert second["ours"] is None
