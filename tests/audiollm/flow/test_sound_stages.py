"""The stages end to end on a linear autoencoder: encoded, trained, generated; bad input; ranks; edits of tracks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from pydantic import ValidationError

from audiollm.audio import Waveform, load, save
from audiollm.data.records.arrays import array_bytes
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import (
    AudioPart,
    Message,
    Region,
    Sample,
    TextPart,
    VideoPart,
    write_samples,
)
from audiollm.data.records.shards import ShardWriter
from audiollm.errors import ConfigError, StageError
from audiollm.evaluate.report.statistics import share
from audiollm.evaluate.sound.edited_sounds import (
    BORDERS,
    BORDERS_PERFECT,
    DONE,
    DONE_PERFECTLY,
    UNTOUCHED,
    judge_edits,
    read_edited,
)
from audiollm.evaluate.sound.generated_sounds import read_generated
from audiollm.files.atomic import read_jsonl
from audiollm.flow.corpus import CorpusFacts, UsableSounds, open_corpus, read_sound, survey_sounds
from audiollm.flow.editing.operations import OPERATIONS, edit_track, find_operation, find_span
from audiollm.flow.editing.requests import EditRequest, edit_conditions
from audiollm.flow.editing.seams import best_lag, continued, with_seams
from audiollm.flow.editing.tracks import Track, read_track
from audiollm.flow.encoding import FACTS
from audiollm.flow.generate import chosen_samples
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.settings import EditSoundsConfig, GenerateSoundConfig, LatentsConfig, SoundSamplingConfig
from audiollm.flow.sound_model import SoundModel
from audiollm.flow.stages import EDIT_SOUNDS, ENCODE_LATENTS, GENERATE_SOUND, TRAIN_FLOW
from audiollm.flow.task import FlowTask, FlowTaskConfig
from audiollm.flow.training import build_sound_model, sound_model_config
from audiollm.recipe.stages import StagePlan
from audiollm.video.writing import write_video
from tests.audiollm.flow.toy import (
    AUTOENCODER,
    DIM,
    HOP,
    RATE,
    ToyAutoencoder,
    context_of,
    encode_config,
    tone,
    train_config,
    write_scenes,
)


def test_what_is_encoded(encoded: Path) -> None:
    sources, facts = open_corpus([encoded / "encode" / "shards"])
    usable = survey_sounds(sources, facts)
    assert usable.bad == [] and len(usable.test) == 4 and usable.longest == RATE // HOP and usable.has_pairs
    sound = read_sound(sources[0][0], facts, None)
    assert set(sound.conditions) == {"frames", "sync", "caption", "cot"}
    assert sound.conditions["frames"].values_RC.shape == (8, 3 * 16 * 16)
    assert sound.conditions["sync"].values_RC.shape == (16, 3 * 16 * 16)
    assert float(sound.conditions["frames"].times_R[0]) == pytest.approx(1 / 16)  # type: ignore[index]
    wanted_CN = load(encoded / "0-mix.wav").samples_CN
    codec = SoundGenerator.load.__globals__["load_autoencoder"](AUTOENCODER)
    expected_DT = codec.normalize(codec.encode_distribution(wanted_CN).mean)
    torch.testing.assert_close(sound.mean_TD, expected_DT.T)
    edit = sources[0][1]
    assert edit.sample.metadata["operation"] in ("add", "overlay", "remove", "extract")
    pair = read_sound(edit, facts, None)
    assert pair.input_mean_TD is not None and not torch.equal(pair.input_mean_TD, pair.mean_TD)


def test_encoding_again_gives_the_same_bytes(encoded: Path, tmp_path: Path) -> None:
    ENCODE_LATENTS.run(encode_config(encoded / "scenes.jsonl", edits_per_sample=1), context_of(tmp_path))
    before = sorted((encoded / "encode" / "shards").glob("*.tar"))
    assert len(before) == 6
    for path in before:
        assert path.read_bytes() == (tmp_path / "shards" / path.name).read_bytes()
    before[2].rename(tmp_path / "away.tar")  # as a kill leaves it
    (tmp_path / "shards" / before[2].name).unlink()
    (tmp_path / "away.tar").rename(before[2])
    ENCODE_LATENTS.run(encode_config(encoded / "scenes.jsonl", edits_per_sample=1), context_of(tmp_path))
    assert before[2].read_bytes() == (tmp_path / "shards" / before[2].name).read_bytes()


def test_the_saved_model_is_the_trained_one(trained: Path) -> None:
    model = SoundModel.from_pretrained(trained)
    config = model.config
    assert config.autoencoder == "toy" and config.longest_s == pytest.approx(1.0) and config.context_trained
    assert set(config.conditions) == {"frames", "sync", "caption", "cot"} and "tone" in config.words
    assert float(model.transformer.final_layer.conv.weight.abs().max()) > 0


def test_generated(trained: Path, encoded: Path, tmp_path: Path) -> None:
    config = GenerateSoundConfig(
        model=trained, autoencoder=AUTOENCODER, samples=encoded / "scenes.jsonl",
        sampling=SoundSamplingConfig(steps=2), takes=2,
    )  # fmt: skip
    assert GENERATE_SOUND.run(config, context_of(tmp_path)) == {"sounds": 4, "set_aside": 0}
    rows = read_jsonl(tmp_path / "generated.jsonl")
    assert [(row["id"], row["take"]) for row in rows] == [
        ("scene-3", 0),
        ("scene-3", 1),
        ("scene-7", 0),
        ("scene-7", 1),
    ]
    sounds = [load(tmp_path / row["audio"]).samples_CN for row in rows]
    assert all(sound.shape == (1, RATE) for sound in sounds) and not torch.equal(sounds[0], sounds[1])
    again = tmp_path / rows[2]["audio"]
    kept = again.read_bytes()
    again.unlink()
    GENERATE_SOUND.run(config, context_of(tmp_path))
    assert again.read_bytes() == kept


def test_bad_samples_are_set_aside_and_the_rest_is_encoded(tmp_path: Path) -> None:
    samples, _ = read_samples(write_scenes(tmp_path, 2, with_video=False))
    save(tmp_path / "silent.wav", torch.zeros(1, RATE), RATE)
    save(tmp_path / "short.wav", tone(50, 0.01), RATE)
    (tmp_path / "text.wav").write_text("no sound")

    def bad(name: str, content: list[Any], answer: list[Any], **metadata: Any) -> Sample:
        messages = [Message(role="user", content=content or [TextPart(text="a")])]
        messages += [Message(role="assistant", content=answer)] if answer else []
        return Sample(id=name, task="sound", messages=messages, metadata=metadata)

    def sound(path: str) -> AudioPart:
        return AudioPart(path=str(tmp_path / path))

    wrong_events = samples[0].model_copy(update={"id": "events", "metadata": {"events": [{"name": "a"}]}})
    samples += [
        bad("silent", [], [sound("silent.wav")]),
        bad("short", [], [sound("short.wav")]),
        bad("text", [], [sound("text.wav")]),
        bad("none", [], []),
        bad("two", [], [sound("0-mix.wav"), sound("1-mix.wav")]),
        bad("lengths", [sound("short.wav")], [sound("0-mix.wav")]),
        bad("thought", [], [sound("0-mix.wav")], thought=3),
        wrong_events,
    ]
    write_samples(tmp_path / "all.jsonl", samples)
    figures = ENCODE_LATENTS.run(
        encode_config(tmp_path / "all.jsonl", edits_per_sample=1), context_of(tmp_path / "e")
    )
    kinds = {row["id"]: row["kind"] for row in read_jsonl(tmp_path / "e" / "set_aside.jsonl")}
    assert kinds == {
        "silent": "silent",
        "short": "shorter than one latent",
        "text": "cannot be read",
        "none": "no wanted sound",
        "two": "several wanted sounds",
        "lengths": "tracks of two lengths",
        "thought": "wrong chain of thought",
        "events": "wrong events",
    }
    assert figures["samples"] == 5  # two scenes with their edits, and the one whose edits cannot be made
    write_samples(tmp_path / "none.jsonl", samples[2:4])
    with pytest.raises(StageError, match="no sample can be used"):
        ENCODE_LATENTS.run(encode_config(tmp_path / "none.jsonl"), context_of(tmp_path / "n"))


def test_edits_that_cannot_be_made_are_set_aside_alone(tmp_path: Path) -> None:
    samples, _ = read_samples(write_scenes(tmp_path, 2, with_video=False))
    save(tmp_path / "silent.wav", torch.zeros(1, RATE), RATE)
    (event,) = samples[0].metadata["events"]
    samples[0].metadata["events"].append({**event, "path": "silent.wav", "name": "nothing"})
    samples[1].metadata["events"][0]["start_s"] = "soon"
    write_samples(tmp_path / "scenes.jsonl", samples)
    config = encode_config(tmp_path / "scenes.jsonl", edits_per_sample=8)
    figures = ENCODE_LATENTS.run(config, context_of(tmp_path / "e"))
    assert figures == {"samples": 1 + 6 + 1, "set_aside": 3}, "two silent edits, and a scene of wrong events"
    kinds = sorted(row["kind"] for row in read_jsonl(tmp_path / "e" / "set_aside.jsonl"))
    assert kinds == ["silent", "silent", "wrong events"]


def shards_of(folder: Path, facts: dict[str, Any], rows: list[dict[str, bytes]]) -> Path:
    writer = ShardWriter(folder, 10)
    for number, arrays in enumerate(rows):
        sample = Sample(
            id=f"s{number}", task="sound", messages=[Message(role="user", content=[TextPart(text="")])]
        )
        writer.write(number, sample, [], None, arrays)
    writer.close({FACTS: facts})
    return folder


def test_arrays_that_cannot_be_used_are_named_before_training(tmp_path: Path) -> None:
    features = {"kind": "features", "made_by": "clip", "source": "x", "width": 4, "rate": 8.0, "side": 16}
    facts = {
        "autoencoder": "toy", "sample_rate": RATE, "channels": 1, "hop_samples": HOP, "latent_dim": DIM,
        "conditions": {"frames": features},
    }  # fmt: skip
    good = array_bytes(torch.randn(DIM, 20), "toy")
    frames, times = array_bytes(torch.randn(8, 4), "clip"), array_bytes(torch.arange(8) / 8, "clip")
    nan = torch.randn(DIM, 20)
    nan[3, 4] = torch.nan
    damaged = bytearray(good)
    damaged[-5] ^= 1
    rows = [
        {"mean": good, "deviation": good, "frames": frames, "frames_times": times},
        {"mean": array_bytes(nan, "toy"), "deviation": good},
        {"mean": array_bytes(torch.randn(DIM, 20), "other"), "deviation": good},
        {"mean": bytes(damaged), "deviation": good},
        {"mean": good, "deviation": array_bytes(torch.randn(DIM, 19), "toy")},
        {"mean": good},
        {
            "mean": good,
            "deviation": good,
            "frames": array_bytes(torch.randn(8, 4), "clap"),
            "frames_times": times,
        },
        {
            "mean": good,
            "deviation": good,
            "frames": frames,
            "frames_times": array_bytes(torch.arange(8) / 2.0, "clip"),
        },
        {
            "mean": good,
            "deviation": good,
            "frames": array_bytes(torch.full((8, 4), torch.nan), "clip"),
            "frames_times": times,
        },
    ]
    sources, found = open_corpus([shards_of(tmp_path / "a", facts, rows)])
    usable = survey_sounds(sources, found)
    assert usable.train == [[0]]
    assert [each.kind for each in usable.bad] == [
        "not finite", "array of another encoder", "damaged array", "latents of another length", "missing array",
        "array of another encoder", "features of another length", "not finite",
    ]  # fmt: skip
    other = shards_of(tmp_path / "b", {**facts, "autoencoder": "other"}, rows[:1])
    with pytest.raises(StageError, match="encoded otherwise.*autoencoder"):
        open_corpus([tmp_path / "a", other])
    with pytest.raises(StageError, match="no sound to train on"):
        TRAIN_FLOW.run(train_config(other), context_of(tmp_path / "t"))


def test_guidance_and_edits_need_their_training(
    encoded: Path, generator: SoundGenerator, tmp_path: Path
) -> None:
    config = train_config(
        encoded / "encode" / "shards", steps=10, dropout=0.0, dropout_together=0.0, audio_context=False
    )
    TRAIN_FLOW.run(config, context_of(tmp_path))
    plain = SoundGenerator.load(tmp_path, AUTOENCODER)
    (sample, *_), _ = read_samples(encoded / "scenes.jsonl")
    conditions = plain.conditions(sample, 1.0, "here")
    with pytest.raises(ConfigError, match="without dropout"):
        plain.make(conditions, 1.0, SamplerSettings(steps=1), "0")
    made = plain.make(conditions, 1.0, SamplerSettings(steps=1, guidance=1.0), "0")
    assert made.shape == (1, RATE)
    track = read_track(encoded / "0-mix.wav")
    with pytest.raises(ConfigError, match="without audio context"):
        edit_track(
            plain, track, "inpaint", find_span(track, "inpaint", 0.2, 0.5), lambda a, b: {},
            SamplerSettings(steps=1, guidance=1.0), "0",
        )  # fmt: skip
    with pytest.raises(ConfigError, match="not the one whose latents"):
        SoundGenerator.load(tmp_path, "tests.audiollm.flow.test_sound_stages:other_autoencoder")
    del generator


def other_autoencoder() -> Any:
    from tests.audiollm.flow.toy import ToyAutoencoder

    made = ToyAutoencoder()
    made.digest = "other"  # type: ignore[misc]
    return made


def test_a_batch_does_not_depend_on_ranks_or_on_its_packs(encoded: Path) -> None:
    sources, facts = open_corpus([encoded / "encode" / "shards"])
    usable = survey_sounds(sources, facts)
    model = SoundModel(sound_model_config(train_config(encoded / "encode" / "shards"), facts, usable))
    task = FlowTask(model, sources, facts, usable, FlowTaskConfig(seed=3, batch_size=4))
    batch = task.batch(2, torch.Generator())
    alone = [task.packed([task.sound(8 + index)]) for index in range(4)]
    assert torch.equal(batch.x_LD, torch.cat([each.x_LD for each in alone]))
    assert torch.equal(batch.t_B, torch.cat([each.t_B for each in alone]))
    assert batch.total == sum(each.total for each in alone)
    other_draw = task.batch(3, torch.Generator())
    assert not torch.equal(batch.target_LD, other_draw.target_LD)


def test_windows_are_the_longest_sounds_of_a_training(encoded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, facts = open_corpus([encoded / "encode" / "shards"])
    usable = survey_sounds(sources, facts)
    config = train_config(encoded / "encode" / "shards", window_s=0.5)
    made = sound_model_config(config, facts, usable)
    assert made.longest_s == pytest.approx(0.5), "longer ones are made in windows, as they were trained"
    lengths: list[int] = []

    def measured(task: FlowTask, data_TD: torch.Tensor, *_: object) -> float:
        lengths.append(len(data_TD))
        return 1.0

    monkeypatch.setattr(FlowTask, "_loss_over_times", measured)
    task_config = FlowTaskConfig(seed=0, batch_size=4, window=10)
    FlowTask(SoundModel(made), sources, facts, usable, task_config).evaluate(0)
    assert set(lengths) == {10}


def surveyed(shards: Path) -> tuple[CorpusFacts, UsableSounds]:
    sources, facts = open_corpus([shards])
    return facts, survey_sounds(sources, facts)


def test_a_training_goes_on_where_the_samples_have_more_than_the_model_takes(
    encoded: Path, tmp_path: Path
) -> None:
    samples, _ = read_samples(write_scenes(tmp_path, 4))
    texts = [
        each if each.metadata["split"] == "test" else each.model_copy(update={
            "messages": [Message(role="user", content=[TextPart(text="a tone")]), each.messages[1]]
        })
        for each in samples
    ]  # fmt: skip
    write_samples(tmp_path / "texts.jsonl", texts)
    ENCODE_LATENTS.run(encode_config(tmp_path / "texts.jsonl"), context_of(tmp_path / "encode"))
    shards = tmp_path / "encode" / "shards"
    config = train_config(shards, dropout=0.0, dropout_together=0.0, window_s=0.5)
    TRAIN_FLOW.run(config, context_of(tmp_path / "texts"))
    assert set(SoundModel.from_pretrained(tmp_path / "texts").config.conditions) == {"caption", "cot"}
    for wrong in ({"audio_context": False}, {"preset": "thinksound"}, {"gated_fusion": False}):
        with pytest.raises(
            ConfigError, match=f"{next(iter(wrong))}: .* is set, and the start was trained with"
        ):
            build_sound_model(train_config(shards, start=tmp_path / "texts", **wrong), *surveyed(shards))
    context = context_of(tmp_path / "more")
    TRAIN_FLOW.run(train_config(encoded / "encode" / "shards", start=tmp_path / "texts"), context)
    assert "frames, sync: not taken by" in context.console.file.getvalue()  # type: ignore[attr-defined]
    found = SoundModel.from_pretrained(tmp_path / "more").config
    assert set(found.conditions) == {"caption", "cot"}
    assert (found.dropout_each, found.dropout_together, found.longest_s) == (0.2, 0.1, 1.0), "as it goes on"


def test_edits_of_samples_are_as_long_as_their_tracks(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "long.wav", tone(60, 2.5), RATE)
    content = [AudioPart(path="long.wav"), TextPart(text="remove a low tone")]
    write_samples(
        tmp_path / "s.jsonl", [Sample(id="a", task="sound", messages=[Message(role="user", content=content)])]
    )
    counts: list[int] = []
    plain = SoundGenerator.sample_latents

    def counted(self: SoundGenerator, conditions: Any, count: int, *rest: Any) -> torch.Tensor:
        counts.append(count)
        return plain(self, conditions, count, *rest)

    monkeypatch.setattr(SoundGenerator, "sample_latents", counted)
    config = GenerateSoundConfig(
        model=trained, autoencoder=AUTOENCODER, samples=tmp_path / "s.jsonl", split="all", duration_s=0.5,
        sampling=SoundSamplingConfig(steps=1),
    )  # fmt: skip
    GENERATE_SOUND.run(config, context_of(tmp_path / "made"))
    (row,) = read_jsonl(tmp_path / "made" / "generated.jsonl")
    assert row["duration_s"] == 2.5 and load(tmp_path / "made" / row["audio"]).duration_s == 2.5
    assert len(counts) > 2 and max(counts) <= RATE // HOP, "in windows of the training's length"


def test_a_real_sound_within_a_longer_file_is_cut_out(trained: Path, tmp_path: Path) -> None:
    save(tmp_path / "long.wav", torch.cat([tone(60, 1.0), tone(200, 0.5), tone(60, 1.0)], dim=1), RATE)
    pictures = [np.full((32, 32, 3), 40, np.uint8)] * 16
    write_video(tmp_path / "long.mp4", pictures, 8)
    content = [VideoPart(path="long.mp4", start_s=1.0, end_s=1.5), TextPart(text="a high tone")]
    wanted = Message(role="assistant", content=[AudioPart(path="long.wav", start_s=1.0, end_s=1.5)])
    asked = Message(role="user", content=content)
    write_samples(tmp_path / "s.jsonl", [Sample(id="a", task="sound", messages=[asked, wanted])])
    config = GenerateSoundConfig(
        model=trained, autoencoder=AUTOENCODER, samples=tmp_path / "s.jsonl", split="all",
        sampling=SoundSamplingConfig(steps=1),
    )  # fmt: skip
    GENERATE_SOUND.run(config, context_of(tmp_path / "made"))
    (sound,) = read_generated(tmp_path / "made" / "generated.jsonl")
    assert sound.reference is not None and sound.video_start_s == 1.0
    real = load(sound.reference).samples_CN
    assert torch.equal(real, load(tmp_path / "long.wav", 1.0, 1.5).samples_CN)
    assert load(sound.path).samples_CN.shape == real.shape


def test_plans_count_what_the_stages_before_make(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "other")]
    for path in paths:
        path.mkdir()
    plans = {
        path.name: StagePlan(facts={"samples": 100.0, "seconds": 300.0}, artifacts={"shards": path})
        for path in paths
    }
    config = train_config(paths[0], steps=None, passes=10, batch_size=4, strategy="fsdp2")
    config = config.model_copy(update={"latents": [LatentsConfig(path=path) for path in paths[:2]]})
    assert TRAIN_FLOW.plan is not None and ENCODE_LATENTS.plan is not None
    plan = TRAIN_FLOW.plan(config, plans)
    assert plan.tokens == 10 * 200 / 4 * 4 * 300, "ten passes over both sources"
    assert plan.memory_mb_on is not None
    model_mb, one, four = plan.parameters * 4 / 2**20, plan.memory_mb_on(1), plan.memory_mb_on(4)
    assert four - 1200 == pytest.approx(max(model_mb, model_mb * 5 / 4) + (one - 1200 - model_mb * 5) / 4)
    assert ENCODE_LATENTS.plan(encode_config(paths[0], edits_per_sample=1), plans).facts["samples"] == 200


def test_samples_are_picked_evenly() -> None:
    words = [Message(role="user", content=[TextPart(text="a")])]
    samples = [Sample(id=str(number), task="sound", messages=words) for number in range(199)]
    picked = [int(each.id) for each in chosen_samples(samples, "all", 100)]
    assert len(picked) == 100 and picked[0] == 0 and picked[-1] == 197
    assert len(chosen_samples(samples, "all", 500)) == 199
    assert chosen_samples(samples, "test", 5) == []
    for scales in ({"guidance": float("nan")}, {"guidance_by": {"caption": -1.0}}):
        with pytest.raises(ValidationError):
            SoundSamplingConfig(**scales)  # type: ignore[arg-type]


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


def test_a_made_sound_fits_a_track_of_any_channels() -> None:
    for channels in (1, 2, 6):
        track = Track(np.zeros((4, channels), np.int32), RATE, "WAV", "PCM_16")
        fitted_CN = track.fitted(torch.tensor([[0.0] * 8, [0.5] * 8]), RATE)
        assert fitted_CN.shape == (channels, 8) and float(fitted_CN.mean()) == 0.25
        assert channels == 2 or torch.all(fitted_CN == 0.25)
    halved_CN = track.fitted(torch.zeros(1, 8), 2 * RATE)
    assert halved_CN.shape == (6, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rules": [{"pattern": "*", "optimizer": "muon"}], "strategy": "fsdp2"}, "fsdp2 has no Muon"),
        ({"ema_decay": 0.9, "strategy": "zero2"}, "zero2 cannot average weights"),
    ],
)
def test_strategies_that_cannot_do_what_is_asked_are_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=reason):
        train_config(tmp_path, **changes)


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
