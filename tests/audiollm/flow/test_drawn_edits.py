"""Edits that are made of scenes: words, chain of thought, region, and the sums of tracks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from audiollm.audio import load, save
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, VideoPart
from audiollm.flow.conditions.edit_texts import EDITS
from audiollm.flow.conditions.edits import SceneEdit, draw_edits
from tests.audiollm.flow.toy import RATE, tone

HERTZ = {"bell": 200.0, "drum": 60.0, "rain": 20.0}
BOXES: dict[str, dict[str, Any]] = {
    "bell": {"x": 4, "y": 5, "width": 16, "height": 8},
    "drum": {"x": 30, "y": 2, "width": 9, "height": 9},
}


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[SceneEdit, dict[str, torch.Tensor]]]:
    """All edits of some scenes of a bell and a drum over rain, and the tracks as they are read."""
    folder = tmp_path_factory.mktemp("scenes")
    for name, hz in HERTZ.items():
        save(folder / f"{name}.wav", tone(hz, 0.5), RATE)
    tracks = {name: load(folder / f"{name}.wav").samples_CN for name in HERTZ}
    times = {"bell": (0.1, 0.34), "drum": (0.2, 0.44)}
    events = [
        {"path": f"{name}.wav", "name": f"a {name}", "start_s": start_s, "end_s": end_s, "region": [BOXES[name]]}
        for name, (start_s, end_s) in times.items()
    ]  # fmt: skip
    found: list[tuple[SceneEdit, dict[str, torch.Tensor]]] = []
    for number in range(6):
        asked = Message(role="user", content=[VideoPart(path="v.mp4"), TextPart(text="both")])
        scene = Sample(
            id=f"s{number}", task="sound",
            messages=[asked, Message(role="assistant", content=[AudioPart(path="m.wav")])],
            metadata={"events": events, "backdrop": {"path": "rain.wav"}, "split": "test", "thought": "of all"},
        )  # fmt: skip
        found += [(each, tracks) for each in draw_edits(scene, folder, RATE, 1, 8, "here")]
    return found


def test_an_edit_has_the_region_of_its_object_its_words_and_its_times(
    edits: list[tuple[SceneEdit, dict[str, torch.Tensor]]],
) -> None:
    assert len(edits) == 6 * 2 * len(EDITS)
    pointed = 0
    times = {"bell": "from 0.1 to 0.3 s", "drum": "from 0.2 to 0.4 s"}
    for (sample, _, _), _ in edits:
        name, operation = sample.metadata["event"]["name"].removeprefix("a "), sample.metadata["operation"]
        (video,), (words,) = sample.video_parts(), sample.texts("user")
        assert [box.model_dump(exclude={"at_s"}) for box in video.region] == [BOXES[name]]
        assert sample.is_held_out
        if words == f"{operation} this":
            pointed += 1
            assert "thought" not in sample.metadata, "the region alone says which sound it is"
            continue
        other = ", without a drum" if name == "bell" else ", without a bell"
        assert words == f"{operation} a {name}" + (other if operation == "extract" else "")
        assert sample.metadata["thought"] == f"{words} {times[name]}"
    assert 6 <= pointed <= 26, "a third of 48"


def test_an_edit_hears_and_wants_sums_of_tracks(
    edits: list[tuple[SceneEdit, dict[str, torch.Tensor]]],
) -> None:
    seen = set()
    for (sample, input_CN, wanted_CN), tracks in edits:
        name, operation = sample.metadata["event"]["name"].removeprefix("a "), sample.metadata["operation"]
        whole_CN, own_CN = sum(tracks.values()), tracks[name]
        rest_CN = whole_CN - own_CN
        given, wanted = {
            "add": (rest_CN, whole_CN),
            "overlay": (rest_CN, own_CN),
            "remove": (whole_CN, rest_CN),
            "extract": (whole_CN, own_CN),
        }[operation]
        torch.testing.assert_close(input_CN, given, atol=1e-6, rtol=0)
        torch.testing.assert_close(wanted_CN, wanted, atol=1e-6, rtol=0)
        seen.add((name, operation))
    assert len(seen) == 8
