"""`audiollm think`: records of clips, regions and instructions by a model that is asked, or by measurements."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from audiollm.audio.files import save
from audiollm.audio.samples import Waveform
from audiollm.data.records.video_clips import PictureSettings
from audiollm.endpoints import EndpointClient
from audiollm.errors import ConfigError, StageError
from audiollm.evaluate.subjects.chat import FolderChat
from audiollm.models.audio_llms.new_thinker import NewThinkerConfig, write_thinker
from audiollm.video.writing import write_video
from pipelines.audiocot.output import WHAT_IS_HEARD, WHAT_THE_OBJECT_SOUNDS, WHAT_TO_DO
from pipelines.audiocot.think_command import read_region, think_about
from pipelines.audiocot.thinking import MeasuredThinker, ModelThinker, ThoughtRequest, model_thinker
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.pipelines.audiocot.cot_run import RATE, ChatServer, texts_of, tone

RECORD = {"events": [{"sound": "bell", "start_s": 0.1, "end_s": 0.4}], "background": []}


class Script:
    """Replies in turn."""

    def __init__(self) -> None:
        self.replies: list[str] = []

    def __call__(self, request: dict[str, Any]) -> str:
        return self.replies.pop(0)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[ChatServer]:
    started = ChatServer(script)
    yield started
    started.close()


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "clip.mkv"
    frames = [np.full((64, 64, 3), 20 * n, np.uint8) for n in range(8)]
    write_video(path, frames, 8, Waveform(tone(1.0, 400), RATE))
    return path


def test_a_clip_and_a_region_are_asked_for_as_they_were_trained(
    server: ChatServer, script: Script, clip: Path
) -> None:
    script.replies = [json.dumps(RECORD)] * 3
    thinker = model_thinker(f"endpoint=m@{server.url}", 1)
    assert thinker.think(ThoughtRequest(clip)).record.sounds() == ["bell"]
    thinker.think(ThoughtRequest(clip, region=read_region("8,8,32,16")))
    whole, _, cut = server.requests
    assert f"The clip: {json.dumps(RECORD)[:-1]}" in texts_of(cut)  # the region beside its clip
    assert WHAT_IS_HEARD in texts_of(whole) and WHAT_THE_OBJECT_SOUNDS in texts_of(cut)
    pictures = [
        [
            part["image_url"]["url"]
            for part in request["messages"][0]["content"]
            if part["type"] == "image_url"
        ]
        for request in (whole, cut)
    ]
    assert len(pictures[0]) == len(pictures[1]) == 2 and pictures[0] != pictures[1]


def test_an_instruction_becomes_an_operation_and_wrong_spans_are_asked_again(
    server: ChatServer, script: Script, clip: Path
) -> None:
    late = {"operation": "inpaint", "span": [0.5, 4.0], "record": {}}
    right = {"operation": "extend", "span": [1.0, 4.0], "record": {}}
    early = {"operation": "extend", "span": [0.2, 0.9], "record": {}}
    script.replies = [json.dumps(each) for each in ({**late, "operation": "explode"}, late, early, right)]
    asked = ThoughtRequest(clip, instruction="let it go on for three seconds")
    answer = model_thinker(f"endpoint=m@{server.url}", 4).think(asked)
    assert (answer.operation, answer.span) == ("extend", (1.0, 4.0))
    assert f"{WHAT_TO_DO}let it go on" in texts_of(server.requests[0])
    assert "does not lie in the clip of 1.00 s" in texts_of(server.requests[2])
    assert "must end after 1.00 s" in texts_of(server.requests[3])


def test_a_long_film_is_shown_in_as_many_pictures_as_a_model_takes(
    server: ChatServer, script: Script, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.audiocot.thinking.MAX_PICTURES", 3)
    script.replies = [json.dumps(RECORD)]
    asked = ThoughtRequest(clip, pictures=PictureSettings(per_second=8, side=32))
    model_thinker(f"endpoint=m@{server.url}", 1).think(asked)
    kinds = [part["type"] for part in server.requests[0]["messages"][0]["content"]]
    assert kinds.count("image_url") == 3
    (first, *_) = [
        part for part in server.requests[0]["messages"][0]["content"] if part["type"] == "image_url"
    ]
    picture = Image.open(io.BytesIO(base64.b64decode(first["image_url"]["url"].partition(",")[2])))
    assert picture.size == (32, 32)


def test_an_endpoint_is_shown_small_pictures(server: ChatServer, script: Script, clip: Path) -> None:
    script.replies = [json.dumps(RECORD)]
    model_thinker(f"endpoint=m@{server.url}", 1).think(ThoughtRequest(clip))
    (first, *_) = [
        part for part in server.requests[0]["messages"][0]["content"] if part["type"] == "image_url"
    ]
    picture = Image.open(io.BytesIO(base64.b64decode(first["image_url"]["url"].partition(",")[2])))
    assert picture.size == (448, 448)


def test_an_endpoint_that_is_down_is_not_told_to_be_trained(
    clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndpointClient, "_pause", lambda *_: None)
    with pytest.raises(StageError, match="look after the endpoint"):
        model_thinker("endpoint=m@http://127.0.0.1:9/v1", 1).think(ThoughtRequest(clip))


def test_a_sound_is_heard_beside_the_pictures_of_another_file(
    server: ChatServer, script: Script, clip: Path, tmp_path: Path
) -> None:
    """The sound goes on after the pictures, which are shown as far as there are any."""
    save(tmp_path / "longer.wav", tone(3.0, 400), RATE)
    script.replies = [json.dumps({"operation": "inpaint", "span": [2.0, 2.5], "record": {}})]
    asked = ThoughtRequest(tmp_path / "longer.wav", instruction="fill 2 to 2.5 s", video=clip)
    assert model_thinker(f"endpoint=m@{server.url}", 1).think(asked).span == (2.0, 2.5)
    kinds = [part["type"] for part in server.requests[0]["messages"][0]["content"]]
    assert kinds.count("image_url") == 2 and kinds.count("input_audio") == 1


def test_answers_that_are_no_record_are_a_sentence(server: ChatServer, script: Script, clip: Path) -> None:
    script.replies = ["no idea"] * 2
    with pytest.raises(StageError, match="2 answers could not be used"):
        model_thinker(f"endpoint=m@{server.url}", 2).think(ThoughtRequest(clip))


class Stopped(BaseException):
    """The work is not wanted any more."""


def test_a_model_in_a_folder_is_stopped_between_two_tokens(tmp_path: Path) -> None:
    small = {"vocabulary": 320, "width": 32, "layers": 1, "encoder_width": 32, "audio_layers": 1, "vision_layers": 1,
             "mel_bins": 16, "window_s": 1, "min_pixels": 784, "max_pixels": 3136}  # fmt: skip
    (tmp_path / "texts.jsonl").touch()
    config = NewThinkerConfig.model_validate({"samples": tmp_path / "texts.jsonl", **small})
    write_thinker(tmp_path / "model", config, ["a bell and a dog"])
    chat, checked = FolderChat.load(tmp_path / "model", 40), []

    def stop_after_three() -> None:
        checked.append(None)
        if len(checked) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        chat.go_on([("user", ["what is heard?"])], stop_after_three)
    assert len(checked) == 3
    said = chat.go_on([("user", ["what is heard?"])])
    assert chat.go_on([("user", ["what is heard?"])], lambda: checked.append(None)) == said


def test_a_model_that_sees_alone_is_shown_the_pictures(clip: Path, tmp_path: Path) -> None:
    """VideoLLaMA 3 takes no recordings. Its weights are random: it answers, and what it says is no record."""
    save_tiny("video_llama3", tmp_path / "model")
    chat = FolderChat.load(tmp_path / "model", 4)
    thinker = ModelThinker(chat, 1, PictureSettings(per_second=2.0, side=56), chat.hears)
    with pytest.raises(StageError, match="1 answer could not be used"):
        thinker.think(ThoughtRequest(clip))
    save(tmp_path / "a.wav", tone(1.0, 400), RATE)
    with pytest.raises(ConfigError, match="takes no recordings"):
        thinker.think(ThoughtRequest(tmp_path / "a.wav", instruction="let it go on"))


def test_measurements_find_the_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    path = tmp_path / "late.wav"
    save(path, torch.cat([torch.zeros(1, RATE // 2), tone(0.5, 500)], dim=1), RATE)
    answer = MeasuredThinker(None).think(ThoughtRequest(path))
    (event,) = answer.record.events
    assert event.sound == "a sound" and event.start_s == pytest.approx(0.5, abs=0.05)
    think_about(path)
    record, _, prose = capsys.readouterr().out.rpartition("}\n")
    assert json.loads(record + "}")["events"][0]["start_s"] == event.start_s and prose.startswith(
        "First, at 0.5"
    )
    think_about(path, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"record": json.loads(record + "}"), "prose": prose.strip()}


def test_an_instruction_is_read_by_its_words_as_the_studio_reads_it(
    clip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    think_about(clip, instruction="mute the first 500 ms, then extend it by 2 s", as_json=True)
    reading = json.loads(capsys.readouterr().out)
    assert reading["edits"] == [
        {"operation": "mute", "sound": "", "span": [0.0, 0.5]},
        {"operation": "extend", "sound": reading["edits"][1]["sound"], "span": [1.0, 3.0]},
    ]
    assert set(reading) == {"edits", "record", "prose"}
    think_about(clip, instruction="cut the last 0.5 s", as_json=True)
    reading = json.loads(capsys.readouterr().out)
    assert reading["edits"] == [] and "does not shorten" in reading["question"]
    assert reading["choices"] == ["mute 0.5 to 1 s", "fill 0.5 to 1 s"]
    think_about(clip, instruction="mute 0.2 to 0.4 s")
    assert capsys.readouterr().out.endswith("mute from 0.2 to 0.4 s\n")


def test_a_model_is_asked_what_an_instruction_leaves_open(
    server: ChatServer, script: Script, clip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"endpoint=m@{server.url}"
    edit = {"operation": "add", "span": [0.2, 0.6], "record": RECORD}
    script.replies = [json.dumps(RECORD), json.dumps(RECORD), json.dumps(edit), json.dumps(RECORD)]
    think_about(clip, model=model, instruction="remove the bell", as_json=True)
    reading = json.loads(capsys.readouterr().out)
    assert reading["edits"] == [{"operation": "remove", "sound": "bell", "span": [0.1, 0.4]}]
    assert len(server.requests) == 1, "the words say all: only the record is asked for"
    think_about(clip, model=model, instruction="add a bell", as_json=True)
    reading = json.loads(capsys.readouterr().out)
    assert reading["edits"] == [{"operation": "add", "sound": "bell", "span": [0.2, 0.6]}]
    think_about(clip, model=model, instruction="do not remove the bell", as_json=True)
    assert "not to be done" in json.loads(capsys.readouterr().out)["question"] and len(server.requests) == 4


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"region": "1,2,3"}, "is no box"),
        ({"region": "1,2,3,4"}, "needs a model"),
        ({"start": 2.0}, "does not lie in"),
        ({"tagger": Path("nothing.tflite")}, "nothing.tflite"),
        ({"tagger": Path("nothing.tflite"), "model": "writer"}, "a model measures nothing"),
        ({"asks": 2}, "give --model"),
        (
            {"region": "1,2,3,4", "instruction": "louder", "model": "endpoint=m@http://127.0.0.1:9/v1"},
            "whole clip",
        ),
        ({"model": "endpoint=http://127.0.0.1:9/v1"}, "names no endpoint"),
        ({"frame_rate": 2.0}, "give --model"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(clip: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        think_about(clip, **more)
