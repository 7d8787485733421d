"""`compose_scenes`: sounds at strikes, tracks that add up, texts that tell the truth, splits that never meet."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from audiollm.audio.files import load, save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.errors import ConfigError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.video.frames import probe_video, read_frames
from pipelines.scenes.settings import ComposeScenesConfig, SoundSource
from pipelines.scenes.sounds import find_sounds, load_event
from pipelines.scenes.stage import run_compose_scenes

RATE = 16_000


def tone(seconds: float, hertz: float, before_s: float = 0.0) -> torch.Tensor:
    time = torch.arange(round(seconds * RATE)) / RATE
    sound = 0.4 * torch.sin(2 * torch.pi * hertz * time) * torch.exp(-4 * time)
    return torch.cat([torch.zeros(round(before_s * RATE)), sound])[None]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounds")
    for number, (label, take) in enumerate(
        itertools.product(["001 - Bell", "002 - Horn", "003 - Drum"], "abc")
    ):
        (folder / "events" / label).mkdir(parents=True, exist_ok=True)
        sound = tone(0.4, 300 + 100 * number, before_s=0.2 * (number % 3))
        save(folder / "events" / label / f"{take}.wav", sound, RATE)
    noise = torch.randn(1, RATE, generator=torch.Generator().manual_seed(0)) * 0.1
    for take in "ab":
        (folder / "behind/rain").mkdir(parents=True, exist_ok=True)
        save(folder / "behind/rain" / f"{take}.wav", noise, RATE)
    return folder


def config(sounds: Path, **changes: object) -> ComposeScenesConfig:
    settings: dict[str, object] = {
        "events": [{"folder": sounds / "events", "held_out": "a.*"}],
        "backdrops": [{"folder": sounds / "behind", "held_out": "a.*"}],
        "scenes": 6,
        "held_out_scenes": 3,
        "side": 48,
        "frame_rate": 12,
    }
    return ComposeScenesConfig.model_validate({**settings, **changes})


def compose(settings: ComposeScenesConfig, folder: Path) -> list[Sample]:
    folder.mkdir(exist_ok=True)
    recipe = Recipe("test", folder, "tiny", 0, folder, (), {})
    run_compose_scenes(settings, Context(folder, recipe, Console(quiet=True), {}))
    samples, bad = read_samples(folder / "scenes.jsonl")
    assert not bad
    return samples


@pytest.fixture(scope="module")
def scenes(sounds: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Sample]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, compose(config(sounds, channels=2), folder)


def test_a_mixture_is_the_sum_of_its_tracks_sample_for_sample(scenes: tuple[Path, list[Sample]]) -> None:
    folder, samples = scenes
    for sample in samples:
        facts = sample.metadata
        names = [event["path"] for event in facts["events"]]
        names += [facts["backdrop"]["path"]] if facts["backdrop"] else []
        tracks = [load(folder / name).samples_CN for name in names]
        mixture_CN = load(folder / sample.id / "mixture.flac").samples_CN
        assert mixture_CN.shape == (2, 3 * RATE)
        assert torch.equal(torch.stack(tracks).sum(0), mixture_CN)


def test_a_sound_begins_when_its_object_strikes(scenes: tuple[Path, list[Sample]]) -> None:
    folder, samples = scenes
    for sample in samples:
        assert probe_video(folder / sample.id / "video.mp4").has_audio
        for event in sample.metadata["events"]:
            sound_N = load(folder / event["path"]).samples_CN.abs().amax(0)
            first_s = float((sound_N > 1e-3).nonzero()[0]) / RATE
            assert abs(first_s - event["start_s"]) < 0.02
            lows = [box["y"] + box["height"] for box in event["region"]]
            times = [box["at_s"] for box in event["region"]]
            assert abs(times[int(np.argmax(lows))] - event["start_s"]) <= 0.15
            before, strike = read_frames(
                folder / sample.id / "video.mp4", [max(0.0, event["start_s"] - 0.5), event["start_s"] + 0.04]
            )
            box = event["region"][int(np.argmax(lows))]
            middle = int(box["x"] + box["width"] / 2)
            rows = slice(int(box["y"]) + 2, int(box["y"] + box["height"]) - 2)
            changed = np.abs(strike[rows, middle].astype(int) - before[rows, middle].astype(int)).mean()
            assert changed > 25, "the object is where its box says"


def test_a_sound_comes_from_the_side_of_its_object_and_ends_when_it_is_silent(
    scenes: tuple[Path, list[Sample]],
) -> None:
    folder, samples = scenes
    sides = set()
    for sample in samples:
        for event in sample.metadata["events"]:
            track_CN = load(folder / event["path"]).samples_CN
            box = event["region"][0]
            middle = (box["x"] + box["width"] / 2) / 48 - 0.5
            left, right = track_CN.square().sum(dim=1).tolist()
            if abs(middle) > 0.1:
                sides.add(middle > 0)
                assert (right > 1.5 * left) if middle > 0 else (left > 1.5 * right), event["where"]
            assert ("right" in event["where"]) <= (middle > 0.05), "left and right are the viewer's"
            assert ("left" in event["where"]) <= (middle < -0.05)
            last_s = float((track_CN.abs().amax(0) > 0).nonzero()[-1] + 1) / RATE
            assert event["end_s"] == pytest.approx(last_s, abs=0.01), "the sound of 0.4 s decays to its end"
            assert 0.05 < event["end_s"] - event["start_s"] <= 0.45
    assert sides == {True, False}


def test_texts_tell_what_when_where_and_the_order(scenes: tuple[Path, list[Sample]]) -> None:
    _, samples = scenes
    orders = set()
    for sample in samples:
        facts, thought = sample.metadata, sample.metadata["thought"]
        names = [event["name"] for event in facts["events"]]
        assert all(name in facts["caption"] for name in names)
        places = [thought.index(name) for name in names]
        assert places == sorted(places)
        for event in facts["events"]:
            assert f"at {event['start_s']:.1f} seconds, {event['name']} {event['where']}" in thought
        assert ("rain" in thought) == (facts["backdrop"] is not None)
        in_caption = sorted(names, key=facts["caption"].index)
        if len(names) > 1:
            orders.add(in_caption == names)
    assert orders == {True, False}, "the caption's order says nothing of time"


def test_recordings_of_test_scenes_are_never_trained_on(scenes: tuple[Path, list[Sample]]) -> None:
    _, samples = scenes
    assert [sample.metadata["split"] for sample in samples] == ["train"] * 6 + ["test"] * 3
    for sample in samples:
        used = [event["recording"] for event in sample.metadata["events"]]
        used += [sample.metadata["backdrop"]["recording"]] if sample.metadata["backdrop"] else []
        assert all((name == "a.wav") == (sample.metadata["split"] == "test") for name in used)


def test_a_second_run_gives_the_same_and_a_killed_one_goes_on(sounds: Path, tmp_path: Path) -> None:
    settings = config(sounds, scenes=3, held_out_scenes=1)
    first = compose(settings, tmp_path / "a")
    (tmp_path / "a/scenes.jsonl").unlink()
    (tmp_path / "a/train-000001/scene.json").unlink()
    again, other = compose(settings, tmp_path / "a"), compose(settings, tmp_path / "b")
    assert first == again and [s.metadata for s in other] == [s.metadata for s in first]
    for sample in first:
        pair = [(tmp_path / run / sample.id / "mixture.flac").read_bytes() for run in "ab"]
        assert pair[0] == pair[1]


def test_events_are_cut_to_their_loudest_part(tmp_path: Path) -> None:
    save(tmp_path / "a.wav", torch.cat([0.01 * tone(1.0, 200), tone(0.3, 500, before_s=0.4)], dim=1), RATE)
    part_N = load_event(tmp_path / "a.wav", RATE, 1.0)
    assert 0.2 < len(part_N) / RATE <= 0.35 and np.sqrt((part_N**2).mean()) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": ["bel"]}, "did you mean 'bell'"),
        ({"held_out": "x*"}, "no held-out recordings"),
        ({"label": r"/(z)"}, "no held-out recordings"),
    ],
)
def test_settings_that_fit_no_recording_are_named(
    sounds: Path, change: dict[str, object], reason: str
) -> None:
    source = SoundSource.model_validate({"folder": sounds / "events", "held_out": "a.*", **change})
    with pytest.raises(ConfigError, match=reason):
        find_sounds([source], "events")


def test_without_test_scenes_no_recording_is_held_out(sounds: Path) -> None:
    source = SoundSource(folder=sounds, held_out="none-*")
    with pytest.raises(ConfigError, match="has no held-out recordings"):
        find_sounds([source], "events")
    assert not any(sound.held_out for sound in find_sounds([source], "events", needs_held_out=False))


def test_a_silent_recording_is_set_aside(sounds: Path, tmp_path: Path) -> None:
    (tmp_path / "bell").mkdir()
    save(tmp_path / "bell/b.wav", torch.zeros(1, RATE), RATE)
    for name in ("a", "c"):
        save(tmp_path / f"bell/{name}.wav", tone(0.4, 400), RATE)
    settings = config(sounds, events=[{"folder": tmp_path, "held_out": "a.*"}], backdrops=[], scenes=8)
    samples = compose(settings, tmp_path / "run")
    row = (tmp_path / "run/set_aside.jsonl").read_text()
    assert "is silent" in row and "b.wav" in row and 0 < len(samples) < 11


def test_without_folders_the_sounds_are_made(tmp_path: Path) -> None:
    samples = compose(ComposeScenesConfig(scenes=5, held_out_scenes=2, frame_rate=8), tmp_path / "run")
    recordings = {
        (sample.metadata["split"], event["recording"].partition("-")[0])
        for sample in samples
        for event in sample.metadata["events"]
    }
    assert recordings == {("train", "train"), ("test", "test")}
    sounds = [load(path).samples_CN for path in (tmp_path / "run/made/events").rglob("train-00.wav")]
    assert len(sounds) == 6 and all(torch.isfinite(s).all() and s.abs().max() > 0.4 for s in sounds)
