"""Stage 2's objects: found by tiny models, described by a server; the answers are checked, kept and used in pairs."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiollm.audio.samples import Waveform
from audiollm.data.records.manifest import read_samples
from audiollm.video.writing import write_video
from pipelines.audiocot.settings import AudioCotConfig
from pipelines.audiocot.steps.answered import RegionAnswer
from pipelines.audiocot.steps.objects import Objects
from tests.pipelines.audiocot.cot_run import RATE, ChatServer, compose, made, rows, texts_of, think, tone
from tests.pipelines.audiocot.test_tracking import detector, tracker

LENGTH_S, SIDE = 1.5, 64
HEARD: dict[str, dict[str, Any]] = {
    "red.mkv": {"events": [{"sound": "red bell", "start_s": 0.1, "end_s": 0.4}], "background": ["rain"]},
    "dog.mkv": {"events": [{"sound": "dog", "start_s": 0.5, "end_s": 0.9}], "background": []},
}
"""Records of the sounds of each video, as the server answers them."""
HERTZ = {"red.mkv": 300, "dog.mkv": 500}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    found = {"detector": detector(folder / "detector"), "tracker": tracker(folder / "tracker")}
    return {"by": "transformers", "min_score": 0.0, "max_objects": 1, **{n: str(p) for n, p in found.items()}}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    dice = np.random.default_rng(0)
    for name, hertz in HERTZ.items():
        frames = list(dice.integers(0, 255, (12, SIDE, SIDE, 3), dtype=np.uint8))
        write_video(made(folder / name), frames, 8, Waveform(tone(LENGTH_S, hertz), RATE))
    return folder


class Replies:
    """The server's replies: the record that belongs to the frequency of the tone, or a description of an object."""

    def __init__(self) -> None:
        self.describe: Callable[[str], Any] = lambda text: {"sound": first_sound(text), "manner": "far away"}

    def __call__(self, request: dict[str, Any]) -> str:
        if "These pictures show" in texts_of(request):
            return json.dumps(self.describe(texts_of(request)))
        return json.dumps(HEARD[min(HERTZ, key=lambda name: abs(HERTZ[name] - height_of(request)))])


def height_of(request: dict[str, Any]) -> float:
    """The strongest frequency of the sound that is sent, in Hz."""
    sent = request["messages"][0]["content"][0]["input_audio"]["data"]
    samples_N, rate = soundfile.read(io.BytesIO(base64.b64decode(sent)))
    return float(np.abs(np.fft.rfft(samples_N)).argmax() * rate / len(samples_N))


def first_sound(text: str) -> str:
    """The first of the sounds that a question about a region lists."""
    listed, _ = json.JSONDecoder().raw_decode(text.partition("is heard: ")[2])
    return str(listed[0])


@pytest.fixture
def replies() -> Replies:
    return Replies()


@pytest.fixture
def server(replies: Replies) -> Iterator[ChatServer]:
    started = ChatServer(replies)
    yield started
    started.close()


def describe(
    out: Path, videos: Path, server: ChatServer, models: dict[str, Any], **more: Any
) -> dict[str, Any]:
    steps = {"objects": models, "listen": server.step(), "describe": server.step(**more)}
    form = {"edits": [], "sample_rate": RATE, "channels": 1}
    return think(out, videos, steps=steps, shards=False, made=form)


def test_objects_are_found_followed_and_described(
    server: ChatServer, replies: Replies, models: dict[str, Any], videos: Path, tmp_path: Path
) -> None:
    """Asked with the pictures of the region, checked by schema and record, and told by the pair of the object."""
    described = list[str]()

    def answer(text: str) -> Any:
        described.append(text)
        if "cannot be used" in text:
            return {"sound": first_sound(text).upper(), "manner": "far away"}
        return {"sound": "trumpet"} if len(described) == 1 else {"sound": first_sound(text), "loud": True}

    replies.describe = answer
    funnel = describe(tmp_path, videos, server, models)
    clips = {clip["file"]: clip for clip in rows(tmp_path, "clips.jsonl")}
    assert set(clips) == set(HEARD) and funnel["made"] == {"extract": 2}
    assert len(described) == 4 and "'trumpet' is none of the sounds that are heard" in described[1]
    assert "loud: Extra inputs" in described[3]
    for name, clip in clips.items():
        (found,), (region,) = (
            clip["measured"][step][key] for step, key in (("objects", "objects"), ("describe", "regions"))
        )
        (event,) = HEARD[name]["events"]
        assert found["name"] == event["sound"] and 0 <= found["score"] <= 1
        boxes = found["region"]
        assert boxes and all(
            0 <= box["at_s"] <= LENGTH_S and box["x"] + box["width"] <= SIDE + 0.01 for box in boxes
        )
        assert region == {"sound": event["sound"], "manner": "far away", "event": 0, "asks": 2}
    samples = {sample.metadata["clip"]: sample for sample in read_samples(tmp_path / "cot.jsonl")[0]
               if sample.metadata.get("operation") == "extract"}  # fmt: skip
    about = samples[clips["dog.mkv"]["id"]].metadata["about"]
    assert (about["events"][0]["sound"], about["events"][0]["manner"]) == ("dog", "far away")
    questions = [request for request in server.requests if "These pictures show" in texts_of(request)]
    kinds = [part["type"] for part in questions[0]["messages"][0]["content"]]
    assert kinds == ["text", "image_url"] * 3 + ["text"]
    assert sum('show "dog"' in texts_of(request) for request in questions) == 2
    page = (tmp_path / "report.html").read_text()
    assert '<th scope="row">describe</th><td>2</td><td>2</td>' in page


def test_a_region_is_cut_out_of_the_pictures(
    server: ChatServer, replies: Replies, models: dict[str, Any], videos: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sent = list[Any]()
    for left in (0.0, 24.0):
        box = {"at_s": 0.0, "x": left, "y": 8.0, "width": 16.0, "height": 16.0}
        found = {"objects": [{"name": "dog", "region": [box], "score": 1.0, "event": 0}]}
        monkeypatch.setattr(Objects, "process", lambda self, item, found=found: found)
        server.requests.clear()
        describe(tmp_path / f"{left}", videos, server, models)
        asked = [r for r in server.requests if "These pictures show" in texts_of(r)]
        sent.append([part for part in asked[0]["messages"][0]["content"] if part["type"] == "image_url"])
    assert len(sent[0]) == len(sent[1]) == 3 and all(a != b for a, b in zip(*sent, strict=True))


def test_descriptions_that_are_never_right_set_the_clip_aside(
    server: ChatServer, replies: Replies, models: dict[str, Any], videos: Path, tmp_path: Path
) -> None:
    replies.describe = lambda text: {"sound": "trumpet"} if '"dog"' in text else {"sound": "rain"}
    funnel = describe(tmp_path, videos, server, models, asks=2)
    assert (funnel["segments"], funnel["reasons"]) == (1, {"answers refused": 1})
    (clip,) = rows(tmp_path, "clips.jsonl")
    (row,) = [row for row in rows(tmp_path, "set_aside.jsonl") if row["id"]]
    assert "trumpet" in row["reason"] and clip["file"] == "red.mkv"
    # a sound of the background is that of no event: there is no pair about it
    assert clip["measured"]["describe"]["regions"] == [{"sound": "rain", "asks": 1, "event": None}]
    assert funnel["made"] == {}


def test_a_changed_question_about_regions_finds_no_object_again(
    server: ChatServer, replies: Replies, models: dict[str, Any], videos: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    describe(tmp_path, videos, server, models)
    asked = len(server.requests)

    def fails(*_: Any) -> Any:
        raise AssertionError("found again")

    monkeypatch.setattr(Objects, "process", fails)
    describe(tmp_path, videos, server, models)
    assert len(server.requests) == asked == 4
    other = "These pictures show {name}. What is it? What is heard: {heard}"
    describe(tmp_path, videos, server, models, prompt=other)
    assert len(server.requests) == 6 and "What is it?" in texts_of(server.requests[-1])


def test_who_measures_says_the_sound_of_the_event(tmp_path: Path) -> None:
    scenes = compose(tmp_path)
    form = {"edits": [], "sample_rate": RATE, "channels": 1}
    for name, steps in (("plain", {"objects": {}}), ("described", {"objects": {}, "describe": {}})):
        think(tmp_path / name, scenes, steps=steps, shards=False, made=form)
    for clip in rows(tmp_path / "described", "clips.jsonl"):
        regions, objects = (
            clip["measured"][step][key] for step, key in (("describe", "regions"), ("objects", "objects"))
        )
        assert [(each["sound"], each["event"]) for each in regions] == [
            (each["name"], each["event"]) for each in objects
        ]
    plain, described = ((tmp_path / name / "cot.jsonl").read_text() for name in ("plain", "described"))
    assert plain.replace(f"{tmp_path}/plain", "") == described.replace(f"{tmp_path}/described", "")


def test_descriptions_need_objects(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="describe needs the step objects"):
        AudioCotConfig.model_validate({"input": str(tmp_path), "steps": {"describe": {}}})


@pytest.mark.parametrize("wrong", [{}, {"sound": ""}, {"sound": 3}, {"sound": "dog", "manner": ["far"]}])
def test_a_region_answer_is_a_sound_and_its_manner(wrong: dict[str, Any]) -> None:
    assert RegionAnswer.model_validate({"sound": "dog", "manner": "far away"}).manner == "far away"
    with pytest.raises(ValueError):
        RegionAnswer.model_validate(wrong)
