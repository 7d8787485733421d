"""The benchmark learn-audiocot: its controls ask the writer, captions are all that their writer sees."""

from __future__ import annotations

import sys
from pathlib import Path

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import learn_audiocot as bench
import proof


def test_the_writer_of_captions_is_asked_without_pictures_and_controls_ask_the_writer(tmp_path: Path) -> None:
    run = proof.Proof(tmp_path / "run", (1,), bench.SMOKE, bench.CHAINS)
    stages = {
        s.name: s.config.model_dump() for s in run.load(bench.NAME, absent=[], events=[], backdrops=[]).stages
    }
    assert {name: stages[f"asked_{name}_1"]["pictures"] is None for name in ("writer", "captions")} == {
        "writer": False, "captions": True
    }  # fmt: skip
    systems = {f"{stage}_1" for stage in bench.SYSTEMS.values()}
    assert systems <= stages.keys()
    models = {stages[name]["model"] for name in systems if name.startswith("control")}
    assert models == {stages["asked_writer_1"]["model"]}
    assert {stages[f"train_{name}_1"]["steps"] for name in ("writer", "captions")} == {10}


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
