"""Edits of tracks and of scenes: what is outside the span, seams, windows, what is refused and set aside."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from audiollm.audio import Waveform, save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import (
    Region,
    VideoPart,
    write_samples,
)
from audiollm.errors import ConfigError
from audiollm.evaluate.report.statistics import share
from audiollm.evaluate.sound.edited_sounds import (
    ANOTHER,
    BEGINS,
    BORDERS,
    BORDERS_PERFECT,
    DONE,
    DONE_PERFECTLY,
    NEARER,
    UNTOUCHED,
    judge_edits,
    read_edited,
)
from audiollm.files.atomic import read_jsonl, write_jsonl
from audiollm.flow.editing.operations import (
    OPERATIONS,
    EditSpan,
    Operation,
    edit_track,
    find_operation,
    find_span,
    heard_from_s,
)
from audiollm.flow.editing.requests import EditRequest, edit_conditions
from audiollm.flow.editing.seams import best_lag, continued, with_seams
from audiollm.flow.editing.tracks import Track, read_track
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.settings import EditSoundsConfig, SoundSamplingConfig
from audiollm.flow.stages import EDIT_SOUNDS
from tests.audiollm.flow.toy import (
    AUTOENCODER,
    RATE,
    ToyAutoencoder,
    context_of,
    tone,
    write_scenes,
)


def random_track(dice: np.random.Generator, seconds: float) -> Track:
    """A noisy chord in a random format."""
    rate = int(dice.choice([8000, 16_000, 22_050, 44_100, 48_000]))
    channels = int(dice.integers(1, 3))
    subtype = str(dice.choice(["PCM_16", "PCM_24", "FLOAT"]))
    time_N = np.arange(round(seconds * rate)) / rate
    chord_N = sum(np.sin(2 * np.pi * f * time_N) for f in dice.uniform(60, 220, 3)) * 0.15
    wave_NC = np.stack([chord_N + dice.normal(0, 0.01, len(time_N)) for _ in range(channels)], axis=1)
    empty = np.zeros((0, channels), np.int32 if subtype.startswith("PCM") else np.float64)
    return Track(empty, rate, "WAV", subtype).replaced(0, torch.from_numpy(wave_NC.T).float())


def check_edit(generator: SoundGenerator, seed: int, folder: Path) -> None:
    """A random track, operation and span: all outside the span is the file's own, and the input comes back."""
    dice = np.random.default_rng(seed)
    track = random_track(dice, float(dice.uniform(0.5, 1.5)))
    path = folder / f"{seed}.wav"
    track.save(path)
    before = read_track(path)
    assert np.array_equal(before.samples_NC, track.samples_NC) and before.subtype == track.subtype
    operation = find_operation(OPERATIONS[seed % 4])
    first, last = sorted(dice.uniform(0, before.duration_s, 2))
    times = (
        (None, before.duration_s + float(dice.uniform(0.05, 0.8)))
        if operation == "extend"
        else (first, last + 0.01)
    )
    span = find_span(
        before, operation, times[0], min(times[1], before.duration_s) if operation != "extend" else times[1]
    )
    settings = SamplerSettings(steps=1, guidance=2.0)
    request = EditRequest(
        operation, "a low tone", span.start / track.sample_rate, span.end / track.sample_rate
    )
    conditions_at = edit_conditions(generator, request, "x")
    result = edit_track(generator, before, operation, span, conditions_at, settings, "seed")
    again = edit_track(generator, before, operation, span, conditions_at, settings, "seed")
    assert np.array_equal(result.track.samples_NC, again.track.samples_NC)
    result.track.save(folder / f"{seed}-out.wav")
    with soundfile.SoundFile(folder / f"{seed}-out.wav") as file:
        assert (file.subtype, file.samplerate, file.channels) == (
            track.subtype,
            track.sample_rate,
            track.samples_NC.shape[1],
        )
    after = read_track(folder / f"{seed}-out.wav")
    assert np.array_equal(after.samples_NC[: span.start], before.samples_NC[: span.start])
    assert np.array_equal(after.samples_NC[span.end :], before.samples_NC[span.end :])
    assert after.num_samples == max(before.num_samples, span.end)
    assert not np.array_equal(
        after.samples_NC[span.start : span.end], before.samples_NC[span.start : span.end]
    )
    result.layer.save(folder / f"{seed}-layer.wav")
    restored = after.without(read_track(folder / f"{seed}-layer.wav"))
    assert np.array_equal(restored.samples_NC[: before.num_samples], before.samples_NC)


@pytest.mark.parametrize("seed", range(12))
def test_edits_keep_everything_outside_of_the_span(
    generator: SoundGenerator, seed: int, tmp_path: Path
) -> None:
    check_edit(generator, seed, tmp_path)


@pytest.mark.slow
def test_two_hundred_edits(generator: SoundGenerator, tmp_path: Path) -> None:
    for seed in range(12, 212):
        check_edit(generator, seed, tmp_path)


@pytest.mark.parametrize(
    ("begin_s", "end_s", "from_s"),
    [(4.0, 4.5, 3.0), (0.2, 0.4, 0.0), (7.6, 7.8, 5.8), (8.0, 8.5, 6.0), (2.0, 7.0, 1.0)],
)
def test_what_a_track_lacks_on_one_side_of_a_span_is_heard_on_the_other(
    generator: SoundGenerator, begin_s: float, end_s: float, from_s: float
) -> None:
    """A second on each side in the middle of 8 s; before its end, and after it, two seconds in all."""
    track = Track(np.zeros((8 * RATE, 1), np.int32), RATE, "WAV", "PCM_16")
    span = EditSpan(round(begin_s * RATE), round(end_s * RATE))
    assert heard_from_s(generator, track, span) == pytest.approx(from_s, abs=1 / RATE)


def test_an_edit_is_asked_for_as_it_was_trained() -> None:
    asked = EditRequest("add", "a bell", 2.0, 3.5).sample(1.5, 1.0)
    assert asked.texts("user") == ["overlay a bell"]
    assert asked.metadata["thought"] == "overlay a bell from 0.5 to 1.0 s", "told from the window's beginning"
    region = [Region(x=1, y=2, width=3, height=4)]
    video = VideoPart(path="v.mp4", start_s=1.0, end_s=9.0, region=region)
    clicked = EditRequest("remove", "", 0.0, 1.0, video=video).sample(0.5, 1.0)
    assert clicked.texts("user") == ["remove this"] and "thought" not in clicked.metadata
    assert clicked.video_parts()[0].start_s == 1.5 and clicked.video_parts()[0].region == region
    gap = EditRequest("inpaint", "a hum", 0.0, 1.0, cot="a hum at 0.0 s")
    assert gap.sample(0.0, 1.0).metadata["thought"] == "a hum at 0.0 s"
    assert gap.sample(0.5, 1.0).texts("user") == ["a hum"] and "thought" not in gap.sample(0.5, 1.0).metadata


class Pitches:
    """A judge of classes: the energy at the two tones' frequencies."""

    def __init__(self) -> None:
        self.labels = ["high", "low"]

    def logits(self, sound: Waveform) -> Any:
        samples_N = sound.samples_CN[0].double()
        time_N = torch.arange(len(samples_N), dtype=torch.float64) / sound.sample_rate
        waves = [torch.exp(-2j * torch.pi * hz * time_N) for hz in (200.0, 60.0)]
        return np.array([float((samples_N * wave).sum().abs()) for wave in waves])


def test_scenes_are_edited_and_judged(trained: Path, encoded: Path, tmp_path: Path) -> None:
    config = EditSoundsConfig(
        model=trained, autoencoder=AUTOENCODER, samples=encoded / "scenes.jsonl", by=["words", "object"],
        sampling=SoundSamplingConfig(steps=1), margin_s=0.05,
    )  # fmt: skip
    assert EDIT_SOUNDS.run(config, context_of(tmp_path)) == {"edits": 12, "set_aside": 0}
    rows = read_jsonl(tmp_path / "edited.jsonl")
    kinds = ["extend words", "inpaint words", "add words", "add object", "remove words", "remove object"]
    assert [f"{row['operation']} {row['by']}" for row in rows] == 2 * kinds
    assert rows[2]["span"] == [0.55, 0.9] and rows[2]["caption"] == "a high tone" and rows[3]["caption"] == ""
    again = tmp_path / rows[7]["audio"]
    kept = again.read_bytes()
    again.unlink()
    EDIT_SOUNDS.run(config, context_of(tmp_path))
    assert again.read_bytes() == kept
    outcome = judge_edits(read_edited(tmp_path / "edited.jsonl"), Pitches())
    assert set(outcome.result) == {" by ".join(kind.split()) for kind in kinds}
    for case, table in outcome.result.items():
        assert table[UNTOUCHED] == share([True, True]), case
        assert table[DONE_PERFECTLY]["accuracy"] == 1.0, "the truth passes"
        assert table[BORDERS]["n"] == table[BORDERS_PERFECT]["n"] == 2
    for row, sample in ((rows[0], 3), (rows[2], -3)):  # before the span, and behind it
        spoiled = read_track(tmp_path / row["audio"])
        spoiled.samples_NC[sample] += 1 << 16
        spoiled.save(tmp_path / row["audio"])
    outcome = judge_edits(read_edited(tmp_path / "edited.jsonl"), None)
    assert outcome.result["extend by words"][UNTOUCHED]["accuracy"] == 0.5
    assert outcome.result["add by words"][UNTOUCHED]["accuracy"] == 0.5
    assert outcome.result["remove by words"][UNTOUCHED]["accuracy"] == 1.0
    assert outcome.result["extend by words"][DONE]["n"] == 0, "nobody judges"


def test_what_is_added_is_judged_by_itself(tmp_path: Path) -> None:
    """Whatever the track has there: the edit minus the track is what was added."""
    loud_CN = 0.5 * tone(60.0, 2.0)
    high_CN = tone(200.0, 0.4, 0.1)
    save(tmp_path / "before.wav", loud_CN, RATE)
    rows = []
    for number, (added_CN, start_s) in enumerate(
        ((high_CN, 1.0), (high_CN, 0.5), (tone(60.0, 0.4, 0.1), 1.0))
    ):
        after_CN = loud_CN.clone()
        first = round(start_s * RATE)
        after_CN[:, first : first + added_CN.shape[1]] += added_CN
        save(tmp_path / f"{number}.wav", after_CN, RATE)
        rows.append(
            {
                "id": str(number), "operation": "add", "by": "object", "before": "before.wav",
                "audio": f"{number}.wav", "span": [0.4, 1.6],
                "event": {"label": "high", "start_s": 1.0, "end_s": 1.4},
                "others": [{"label": "low", "start_s": 0.0, "end_s": 0.3}],
            }
        )  # fmt: skip
    write_jsonl(tmp_path / "edited.jsonl", rows)
    found = judge_edits(read_edited(tmp_path / "edited.jsonl"), Pitches()).rows
    assert [row[BEGINS] for row in found] == [True, False, True]
    assert [row[ANOTHER] for row in found][::2] == [False, True]
    assert [row[DONE] for row in found] == [False, False, False], "the track drowns it"


def test_a_removal_that_takes_everything_is_no_nearer_to_a_perfect_one(tmp_path: Path) -> None:
    """An empty span holds nothing of the sound either: what else was there must stay."""
    rain_CN = 0.02 * torch.randn(1, 2 * RATE, generator=torch.Generator().manual_seed(0))
    rest_CN, taken_CN = tone(60.0, 2.0, 0.2) + rain_CN, tone(200.0, 1.0, 0.4)
    before_CN = rest_CN.clone()
    before_CN[:, : taken_CN.shape[1]] += taken_CN
    empty_CN = rest_CN.clone()
    empty_CN[:, : taken_CN.shape[1]] *= 1e-3
    tracks = {
        "before": before_CN,
        "real": rest_CN,
        "well": 1.02 * rest_CN,
        "empty": empty_CN,
        "not": before_CN,
    }
    for name, samples_CN in tracks.items():
        save(tmp_path / f"{name}.wav", samples_CN, RATE)
    write_jsonl(
        tmp_path / "edited.jsonl",
        [
            {
                "id": name, "operation": "remove", "by": "words", "before": "before.wav", "reference": "real.wav",
                "audio": f"{name}.wav", "span": [0.0, 1.0], "event": {"label": "high", "start_s": 0.0, "end_s": 1.0},
            }
            for name in ("well", "empty", "not")
        ],
    )  # fmt: skip
    outcome = judge_edits(read_edited(tmp_path / "edited.jsonl"), Pitches())
    assert [row[DONE] for row in outcome.rows] == [True, True, False]
    assert [row[NEARER] for row in outcome.rows] == [True, False, False]
    assert outcome.result["remove by words"][NEARER]["accuracy"] == pytest.approx(1 / 3, abs=1e-3)


def test_the_span_of_an_edit_is_told_to_the_sample(trained: Path, tmp_path: Path) -> None:
    samples, _ = read_samples(write_scenes(tmp_path, 4, with_video=False))
    (scene,) = (each for each in samples if each.metadata["split"] == "test")
    scene.metadata["events"][0]["start_s"] = 0.60006125  # 4400.49 samples with the margin before it
    write_samples(tmp_path / "scenes.jsonl", [scene])
    config = EditSoundsConfig(
        model=trained, autoencoder=AUTOENCODER, samples=tmp_path / "scenes.jsonl", operations=["extend"],
        sampling=SoundSamplingConfig(steps=1), margin_s=0.05,
    )  # fmt: skip
    EDIT_SOUNDS.run(config, context_of(tmp_path / "edits"))
    outcome = judge_edits(read_edited(tmp_path / "edits" / "edited.jsonl"), None)
    assert outcome.result["extend by words"][UNTOUCHED] == share([True])


def test_a_scene_whose_sound_lies_outside_of_it_is_set_aside(trained: Path, tmp_path: Path) -> None:
    samples, _ = read_samples(write_scenes(tmp_path, 2, with_video=False))
    samples[0].metadata["events"][0].update(start_s=5.0, end_s=6.0)
    write_samples(tmp_path / "scenes.jsonl", samples)
    config = EditSoundsConfig(
        model=trained, autoencoder=AUTOENCODER, samples=tmp_path / "scenes.jsonl", split="all",
        sampling=SoundSamplingConfig(steps=1),
    )  # fmt: skip
    assert EDIT_SOUNDS.run(config, context_of(tmp_path / "edits")) == {"edits": 3, "set_aside": 1}
    (row,) = read_jsonl(tmp_path / "edits" / "set_aside.jsonl")
    assert row["id"] == "scene-0" and "the track at 1.000 s" in row["reason"]
    both = config.model_copy(update={"by": ["words", "object"]})
    assert EDIT_SOUNDS.plan(both, {}).note == "at most 120 edits"  # type: ignore[misc]


def test_times_of_a_sound_may_be_text_and_must_be_numbers(trained: Path, tmp_path: Path) -> None:
    samples, _ = read_samples(write_scenes(tmp_path, 2, with_video=False))
    for sample, time in zip(samples, ("0.6", "nan"), strict=True):
        sample.metadata["events"][0]["start_s"] = time
    write_samples(tmp_path / "scenes.jsonl", samples)
    config = EditSoundsConfig(
        model=trained, autoencoder=AUTOENCODER, samples=tmp_path / "scenes.jsonl", split="all",
        operations=["inpaint"], sampling=SoundSamplingConfig(steps=1),
    )  # fmt: skip
    assert EDIT_SOUNDS.run(config, context_of(tmp_path / "edits")) == {"edits": 1, "set_aside": 1}
    (edit,) = read_jsonl(tmp_path / "edits" / "edited.jsonl")
    assert edit["id"] == samples[0].id and edit["event"]["start_s"] == 0.6
    (row,) = read_jsonl(tmp_path / "edits" / "set_aside.jsonl")
    assert row["id"] == samples[1].id and "nan" in row["reason"]


class StereoToy(ToyAutoencoder):
    """The toy of two channels, both of them the same."""

    channels = 2

    def encode_distribution(self, samples_CN: torch.Tensor) -> Any:
        return super().encode_distribution(samples_CN.mean(dim=0, keepdim=True))

    def decode(self, latent_DT: torch.Tensor, num_samples: int | None = None) -> torch.Tensor:
        return super().decode(latent_DT, num_samples).repeat(2, 1)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_a_stereo_model_edits_tracks_of_any_channels(generator: SoundGenerator, channels: int) -> None:
    track = Track(np.zeros((0, channels), np.int32), RATE, "WAV", "PCM_16").replaced(
        0, tone(60, 1.0).repeat(channels, 1)
    )
    stereo = replace(generator, autoencoder=StereoToy())
    span = find_span(track, "inpaint", 0.4, 0.6)
    settings = SamplerSettings(steps=1, guidance=1.0)
    edited = edit_track(stereo, track, "inpaint", span, lambda *_: {}, settings, "0").track
    assert edited.samples_NC.shape == track.samples_NC.shape
    assert np.any(edited.samples_NC[span.start : span.end] != track.samples_NC[span.start : span.end])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("count", [1, 2, 39, 400, RATE])
def test_tracks_of_a_latent_and_less_and_silence_are_edited(
    generator: SoundGenerator, operation: Operation, count: int
) -> None:
    sound_CN = torch.zeros(1, count) if count == RATE else tone(60, 0.1)[:, 20 : 20 + count]
    track = Track(np.zeros((0, 1), np.int32), RATE, "WAV", "PCM_16").replaced(0, sound_CN)
    start, end = (None, count + 300) if operation == "extend" else (count // 4, max(1, count // 2))
    span = find_span(track, operation, None if start is None else start / RATE, end / RATE)
    settings = SamplerSettings(steps=1, guidance=1.0)
    result = edit_track(generator, track, operation, span, lambda *_: {}, settings, "0")
    after = result.track.samples_NC
    assert len(after) == max(count, span.end)
    # two samples hold nothing but their mean, and from silence nothing can be removed
    assert count <= 2 or (operation, count) == ("remove", RATE) or np.any(after[span.start : span.end])
    assert np.array_equal(after[: span.start], track.samples_NC[: span.start])
    assert np.array_equal(after[span.end :], track.samples_NC[span.end :])
    assert np.array_equal(result.track.without(result.layer).samples_NC[:count], track.samples_NC)


def test_a_made_sound_fits_a_track_of_any_channels() -> None:
    for channels in (1, 2, 6):
        track = Track(np.zeros((4, channels), np.int32), RATE, "WAV", "PCM_16")
        fitted_CN = track.fitted(torch.tensor([[0.0] * 8, [0.5] * 8]), RATE)
        assert fitted_CN.shape == (channels, 8) and float(fitted_CN.mean()) == 0.25
        assert channels == 2 or torch.all(fitted_CN == 0.25)
    halved_CN = track.fitted(torch.zeros(1, 8), 2 * RATE)
    assert halved_CN.shape == (6, 4)


def test_a_sound_longer_than_the_training_is_made_in_windows(generator: SoundGenerator) -> None:
    track = Track(np.zeros((0, 1), np.int32), RATE, "WAV", "PCM_16").replaced(0, tone(60, 1.0))
    span = find_span(track, "extend", None, 4.3)
    calls: list[tuple[float, float]] = []

    def conditions_at(start_s: float, length_s: float) -> Any:
        calls.append((start_s, length_s))
        return {}

    result = edit_track(
        generator, track, "extend", span, conditions_at, SamplerSettings(steps=1, guidance=1.0), "0"
    )
    assert result.track.num_samples == round(4.3 * RATE)
    assert len(calls) >= 4 and all(length_s <= 1.0 + 1e-6 for _, length_s in calls)
    assert all(later[0] > earlier[0] for earlier, later in itertools.pairwise(calls))


def test_spans_and_operations_that_are_refused(encoded: Path) -> None:
    track = read_track(encoded / "0-mix.wav")
    with pytest.raises(ConfigError, match="no operation 'delete'.*"):
        find_operation("delete")
    for operation, start, end, why in (
        ("inpaint", 0.5, 0.5, "does not lie in the track"),
        ("inpaint", -0.1, 0.5, "does not lie in the track"),
        ("remove", 0.5, 1.5, "does not lie in the track"),
        ("extend", None, None, "needs an end"),
        ("extend", None, 0.9, "ends at 0.9 s"),
        ("extend", 0.5, 2.0, "begins at the track's end"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_span(track, operation, start, end)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="end the name in .wav"):
        track.save(encoded / "x.flac")


def test_a_lag_is_found_and_a_tone_goes_on() -> None:
    sound_CN = tone(130, 1.0) + tone(77, 1.0)
    assert best_lag(sound_CN[:, 4000:4320], sound_CN[:, 4000 - 80 + 31 : 4320 + 80 + 31], 80) == -31
    on_CN = continued(sound_CN[:, :4000], 160)
    torch.testing.assert_close(on_CN, sound_CN[:, 4000:4160], atol=0.12, rtol=0)
    assert float(continued(torch.zeros(1, 500), 50).abs().max()) == 0.0
    span_CN = with_seams(torch.zeros(1, 800), sound_CN[:, :4000], sound_CN[:, 4800:5200], None, RATE)
    steps_N = torch.cat([sound_CN[:, 3990:4000], span_CN, sound_CN[:, 4800:4810]], dim=1).diff().abs()
    assert float(steps_N.max()) < 1.5 * float(sound_CN.diff().abs().max())  # no click
