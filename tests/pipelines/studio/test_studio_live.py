"""Talks in the studio: pieces from the page say what the live loop says, and belong to one person."""

from __future__ import annotations

import base64
import gc
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from audiollm.generation.engine.defaults import Trained
from audiollm.interpret.live.live_model import LiveModel
from audiollm.interpret.live.live_session import LiveOptions, LiveSession
from pipelines.studio.limits import StudioRefusal
from pipelines.studio.live import LiveDesk
from tests.audiollm.interpret.test_live import CHUNK, noise, run_folder  # noqa: F401


def test_the_model_is_told_what_its_training_told_it(
    run_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = Trained(chunk_frames=CHUNK, stream_prompt="one two")
    monkeypatch.setattr("audiollm.interpret.live.live_model.read_trained", lambda folder: trained)
    desk = LiveDesk(LiveModel.load(run_folder / "train"))
    name = desk.begin("alice")
    (message,) = desk._talks[name].session._options.messages
    assert (message.role, message.content[0].text) == ("system", "one two")


def test_a_talk_in_pieces(run_folder: Path) -> None:  # noqa: F811
    now_s = [0.0]
    desk = LiveDesk(LiveModel.load(run_folder / "train"), lambda: now_s[0])
    talk_1N = noise(2.0, 3, desk.sample_rate)
    session = LiveSession(desk._model.model, LiveOptions(CHUNK))
    wanted = [action.text for action in [*session.hear(talk_1N), *session.finish()] if action.text.strip()]
    name = desk.begin("alice")
    said = []
    for piece_1N in talk_1N.split(9000, dim=1):
        said += desk.hear("alice", name, piece_1N.numpy().tobytes())
    with pytest.raises(StudioRefusal, match="has ended"):
        desk.hear("bob", name, bytes(400))
    said += desk.finish("alice", name)
    assert [each["text"] for each in said] == wanted and wanted
    with pytest.raises(StudioRefusal, match="has ended"):
        desk.hear("alice", name, bytes(400))
    again = desk.begin("alice")
    for damaged in (b"", b"123", torch.tensor([float("nan")]).numpy().tobytes()):
        with pytest.raises(StudioRefusal, match="damaged"):
            desk.hear("alice", again, damaged)
    with pytest.raises(StudioRefusal, match="too long"):
        desk.hear("alice", again, bytes(4 * 6 * desk.sample_rate))
    for person in ("bob", "carol", "dan"):
        desk.begin(person)
    with pytest.raises(StudioRefusal, match="wait until one ends"):
        desk.begin("eve")
    now_s[0] = 45.0
    desk.hear("alice", again, bytes(400))
    now_s[0] = 90.0
    desk.begin("eve")  # the others have closed their windows
    desk.hear("alice", again, bytes(400))
    with pytest.raises(StudioRefusal, match="has ended"):
        desk.hear("bob", again, bytes(400))


def test_a_model_that_was_trained_to_speak_is_heard(
    run_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = Trained(chunk_frames=CHUNK, stream_speaks=True)
    monkeypatch.setattr("audiollm.interpret.live.live_model.read_trained", lambda folder: trained)
    desk = LiveDesk(LiveModel.load(run_folder / "train"))
    talk_1N = noise(4.0, 3, desk.sample_rate)
    session = LiveSession(desk._model.model, LiveOptions(CHUNK, answer="any"))
    wanted = [each for each in [*session.hear(talk_1N), *session.finish()] if each.speaks]
    name = desk.begin("alice")
    said = [*desk.hear("alice", name, talk_1N.numpy().tobytes()), *desk.finish("alice", name)]
    assert [each["text"] for each in said] == [each.text.strip() or "(speech)" for each in wanted]
    spoken = 0
    for row, action in zip(said, wanted, strict=True):
        heard = np.frombuffer(base64.b64decode(row["speech"]), "<i2") / 32767
        np.testing.assert_allclose(heard, action.samples_1N[0].clamp(-1, 1).numpy(), atol=2e-5)
        spoken += len(heard)
    assert spoken > 0, "a model of text alone would have none"


def test_a_closed_window_is_forgotten_though_nobody_else_talks(run_folder: Path) -> None:  # noqa: F811
    now_s = [0.0]
    desk = LiveDesk(LiveModel.load(run_folder / "train"), lambda: now_s[0], quiet_s=0.05)
    name = desk.begin("alice")
    session = weakref.ref(desk._talks[name].session)
    time.sleep(0.3)
    assert session() is not None  # on the desk's clock no time has passed: its window is open
    now_s[0] = 1.0
    for _ in range(200):
        gc.collect()
        if session() is None and desk._timer is None:
            break
        time.sleep(0.05)
    assert session() is None and desk._timer is None
