"""The stages end to end on a linear autoencoder: encoded, trained, generated; bad input; ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from audiollm.audio import load, save
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
from audiollm.files.atomic import read_jsonl
from audiollm.flow.corpus import CorpusFacts, UsableSounds, open_corpus, read_sound, survey_sounds
from audiollm.flow.editing.operations import edit_track, find_span
from audiollm.flow.editing.tracks import read_track
from audiollm.flow.encoding import FACTS, ConditionEncoders
from audiollm.flow.generate import chosen_samples
from audiollm.flow.generator import SoundGenerator, sampler_settings
from audiollm.flow.model.packed import Features
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.settings import (
    EditSoundsConfig,
    GenerateSoundConfig,
    LatentsConfig,
    SoundSamplingConfig,
    TrainFlowConfig,
)
from audiollm.flow.sound_model import SoundModel
from audiollm.flow.stages import EDIT_SOUNDS, ENCODE_LATENTS, GENERATE_SOUND, TRAIN_FLOW, flow_parameters
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


def test_bad_videos_are_set_aside_and_the_rest_is_encoded(tmp_path: Path) -> None:
    samples, _ = read_samples(write_scenes(tmp_path, 2))
    (wanted,) = samples[0].audio("assistant")
    pictures = [np.full((32, 32, 3), 40, np.uint8)] * 8
    whole = (tmp_path / "0.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 3])
    write_video(tmp_path / "short.mp4", pictures[:6], 8)
    with av.open(str(tmp_path / "empty.mkv"), "w") as container:  # a stream of pictures without any
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        container.mux(stream.encode(None))
    box = Region(x=90, y=0, width=9, height=9)
    answers = {
        "cut": (VideoPart(path="cut.mp4"), wanted),
        "short": (VideoPart(path="short.mp4"), wanted),
        "short span": (VideoPart(path="0.mp4", end_s=0.75), wanted),
        "no frames": (VideoPart(path="empty.mkv"), wanted),
        "sound alone": (VideoPart(path="0-mix.wav"), wanted),
        "missing": (VideoPart(path="none.mp4"), wanted),
        "outside": (VideoPart(path="0.mp4", region=[box]), wanted),
        "mute": (VideoPart(path="0.mp4"), AudioPart(path="0.mp4")),
    }
    samples += [
        Sample(
            id=name, task="sound",
            messages=[Message(role="user", content=[video]), Message(role="assistant", content=[sound])],
        )
        for name, (video, sound) in answers.items()
    ]  # fmt: skip
    write_samples(tmp_path / "all.jsonl", samples)
    figures = ENCODE_LATENTS.run(encode_config(tmp_path / "all.jsonl"), context_of(tmp_path / "e"))
    assert figures == {"samples": 2, "set_aside": len(answers)}
    rows = {row["id"]: row for row in read_jsonl(tmp_path / "e" / "set_aside.jsonl")}
    assert list(rows) == list(answers)
    kinds = {name: row["kind"] for name, row in rows.items()}
    others = {"short span": "video of another length", "mute": "cannot be read"}
    assert kinds == {**dict.fromkeys(answers, "unreadable video"), **others}
    for name, said in (
        ("short", "ends at 0.8"),
        ("short span", "0.75 s is shorter than the sound's 1.00 s"),
        ("sound alone", "has no pictures"),
        ("missing", "does not exist"),
        ("outside", "outside of the picture of 32 x 32"),
    ):
        assert said in rows[name]["reason"], rows[name]


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


def test_it_is_told_that_no_sample_has_solo_tracks(tmp_path: Path) -> None:
    samples, _ = read_samples(write_scenes(tmp_path, 2, with_video=False))
    for name, kept in (("some", samples[:1]), ("none", samples[:0])):
        without = [each.model_copy(update={"metadata": {}}) for each in samples[len(kept) :]]
        write_samples(tmp_path / f"{name}.jsonl", [*kept, *without])
        context = context_of(tmp_path / name)
        figures = ENCODE_LATENTS.run(encode_config(tmp_path / f"{name}.jsonl", edits_per_sample=1), context)
        assert figures["samples"] == 2 + len(kept)
        told = " ".join(context.console.file.getvalue().split())  # type: ignore[attr-defined]
        assert told.count("no sample has solo tracks") == (not kept)


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
    good, longer = (array_bytes(torch.randn(DIM, count), "toy") for count in (20, 60))
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
        {"mean": longer, "deviation": longer, "frames": frames, "frames_times": times},
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
        "array of another encoder", "features of another length", "features of another length", "not finite",
    ]  # fmt: skip
    other = shards_of(tmp_path / "b", {**facts, "autoencoder": "other"}, rows[:1])
    with pytest.raises(StageError, match="encoded otherwise.*autoencoder"):
        open_corpus([tmp_path / "a", other])
    moved = {**facts, "conditions": {"frames": {**features, "source": "y"}}}
    assert open_corpus([tmp_path / "a", shards_of(tmp_path / "c", moved, rows[:1])])[1] == found
    with pytest.raises(StageError, match="no sound to train on"):
        TRAIN_FLOW.run(train_config(other), context_of(tmp_path / "t"))
    given = train_config(tmp_path / "a")
    unweighted = given.model_copy(update={"samples": [LatentsConfig(path=tmp_path / "a", weight=0)]})
    with pytest.raises(StageError, match="every weight is 0"):
        TRAIN_FLOW.run(unweighted, context_of(tmp_path / "t"))


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
    samples = []
    for name, seconds in (("long", 3.0), ("short", 1.0)):
        save(tmp_path / f"{name}.wav", tone(60, seconds), RATE)
        words = Message(role="user", content=[TextPart(text="a low tone")])
        wanted = Message(role="assistant", content=[AudioPart(path=f"{name}.wav")])
        samples.append(Sample(id=name, task="sound", messages=[words, wanted]))
    write_samples(tmp_path / "samples.jsonl", samples)
    asked = GenerateSoundConfig(
        model=tmp_path, autoencoder=AUTOENCODER, samples=tmp_path / "samples.jsonl", split="all",
        sampling=SoundSamplingConfig(steps=1, guidance=1.0),
    )  # fmt: skip
    assert GENERATE_SOUND.run(asked, context_of(tmp_path / "made")) == {"sounds": 1, "set_aside": 1}
    (row,) = read_jsonl(tmp_path / "made" / "set_aside.jsonl")
    assert row["id"] == "long" and "3 s: the model was trained on 1.0 s" in row["reason"]
    del generator


@pytest.mark.parametrize(
    ("dropout_together", "scales", "why"),
    [
        (0.0, {"guidance": 4.5}, "guidance: .* without dropout"),
        (0.0, {"guidance_by": {"caption": 3.0}}, "guidance: .* without dropout"),
        (0.1, {"guidance_by": {"caption": 2.0, "frames": 4.0}}, "guidance_by: .* with dropout 0"),
    ],
)
def test_guidance_that_a_model_cannot_have_is_refused_before_any_work(
    encoded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dropout_together: float,
    scales: dict[str, Any],
    why: str,
) -> None:
    shards = encoded / "encode" / "shards"
    config = train_config(shards, dropout=0.0, dropout_together=dropout_together)
    assert config.dropout_video == config.dropout_words == 0
    assert train_config(shards).dropout_video == train_config(shards).dropout_words == 0.2
    SoundModel(sound_model_config(config, *surveyed(shards))).save_pretrained(tmp_path / "model")

    def worked(*_: object, **__: object) -> None:
        raise AssertionError("worked before the refusal")

    monkeypatch.setattr("audiollm.flow.generator.sample_latents", worked)
    monkeypatch.setattr(ConditionEncoders, "encode", worked)
    given: dict[str, Any] = {
        "model": tmp_path / "model", "autoencoder": AUTOENCODER, "samples": encoded / "scenes.jsonl",
        "sampling": SoundSamplingConfig(steps=1, **scales),
    }  # fmt: skip
    generate, edit = GenerateSoundConfig(**given), EditSoundsConfig(**given)
    for run in (
        lambda: GENERATE_SOUND.run(generate, context_of(tmp_path / "made")),
        lambda: EDIT_SOUNDS.run(edit, context_of(tmp_path / "edits")),
        lambda: SoundGenerator.load(tmp_path / "model", AUTOENCODER).sample_latents(
            {"caption": Features(torch.zeros(1, 3))}, 4, sampler_settings(given["sampling"]), "0"
        ),
    ):
        with pytest.raises(ConfigError, match=why) as refusal:
            run()
        assert "set guidance" in str(refusal.value)


def other_autoencoder() -> Any:

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


def test_latents_are_drawn_anew_from_mean_and_deviation(encoded: Path) -> None:
    sources, facts = open_corpus([encoded / "encode" / "shards"])
    usable = survey_sounds(sources, facts)
    usable = usable._replace(train=[usable.train[0][:1]])  # so that every item is the same sample
    model = SoundModel(sound_model_config(train_config(encoded / "encode" / "shards"), facts, usable))
    task = FlowTask(model, sources, facts, usable, FlowTaskConfig(seed=3, batch_size=1))
    sound = read_sound(sources[0][usable.train[0][0]], facts, None)
    drawn = torch.stack([task.sound(item).data_TD for item in range(40)])
    assert torch.equal(drawn[7], task.sound(7).data_TD) and not torch.equal(drawn[7], drawn[8])
    normal = (drawn - sound.mean_TD) / sound.deviation_TD
    assert abs(float(normal.mean())) < 0.03 and float(normal.std()) == pytest.approx(1, abs=0.03)


def test_windows_are_the_longest_sounds_of_a_training(encoded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, facts = open_corpus([encoded / "encode" / "shards"])
    usable = survey_sounds(sources, facts)
    config = train_config(encoded / "encode" / "shards", window_s=0.5)
    made = sound_model_config(config, facts, usable)
    assert made.longest_s == pytest.approx(0.5), "longer ones are made in windows, as they were trained"
    lengths: list[int] = []

    def measured(task: FlowTask, data_TD: torch.Tensor, *_: object) -> torch.Tensor:
        lengths.append(len(data_TD))
        return torch.ones((), dtype=torch.float64)

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


def test_plans_count_what_the_stages_before_make(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "other")]
    for path in paths:
        path.mkdir()
    plans = {
        path.name: StagePlan(facts={"samples": 100.0, "seconds": 300.0}, artifacts={"shards": path})
        for path in paths
    }
    config = train_config(paths[0], steps=None, passes=10, batch_size=4, strategy="fsdp2")
    config = config.model_copy(update={"samples": [LatentsConfig(path=path) for path in paths[:2]]})
    assert TRAIN_FLOW.plan is not None and ENCODE_LATENTS.plan is not None
    plan = TRAIN_FLOW.plan(config, plans)
    seconds = 300 / 100  # of a sound
    assert plan.tokens == pytest.approx(10 * 200 / 4 * 4 * 15.6 * seconds), "ten passes over both sources"
    assert plan.memory_mb_on is not None
    model_mb, one, four = plan.parameters * 4 / 2**20, plan.memory_mb_on(1), plan.memory_mb_on(4)
    assert four - 1200 == pytest.approx(max(model_mb, model_mb * 5 / 4) + (one - 1200 - model_mb * 5) / 4)
    assert ENCODE_LATENTS.plan(encode_config(paths[0], edits_per_sample=1), plans).facts["samples"] == 200


@pytest.mark.parametrize(
    ("shape", "millions"),
    [
        ({"hidden_size": 64, "num_heads": 4, "multi_stream_blocks": 2, "single_stream_blocks": 4}, 2.6),
        ({"size": "1b"}, 1286.8),
        ({"size": "1b", "preset": "thinksound"}, 1277.1),
    ],
)
def test_sizes_go_from_two_million_to_the_published_one(
    tmp_path: Path, shape: dict[str, Any], millions: float
) -> None:
    assert round(flow_parameters(TrainFlowConfig(samples=tmp_path, **shape)) / 1e6, 1) == millions


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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rules": [{"pattern": "*", "optimizer": "muon"}], "strategy": "fsdp2"}, "fsdp2 has no Muon"),
        ({"ema_decay": 0.9, "strategy": "zero2"}, "zero2 cannot average weights"),
        ({"ema_decay": 0.0, "strategy": "zero2"}, "zero2 mixes up .* take fsdp2"),
        ({"ema_decay": 0.0, "strategy": "zero3"}, "zero3 mixes up .* take fsdp2"),
    ],
)
def test_strategies_that_cannot_do_what_is_asked_are_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=reason):
        train_config(tmp_path, **changes)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"hidden_size": 100, "num_heads": 3}, "hidden_size 100 with num_heads 3"),
        ({"hidden_size": 36, "num_heads": 4}, "must be an even number"),
        ({"preset": "thinksound", "audio_context": True}, "audio_context: preset thinksound has none"),
        ({"preset": "thinksound", "gated_fusion": True}, "gated_fusion: preset thinksound has none"),
    ],
)
def test_a_shape_that_no_model_has_is_refused_with_the_settings(
    wrong: dict[str, object], reason: str, tmp_path: Path
) -> None:
    train_config(tmp_path, preset="thinksound")
    with pytest.raises(ValueError, match=reason):
        train_config(tmp_path, **wrong)
