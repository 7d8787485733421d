"""The stage `train_tokenizer` on a folder of recordings, through the recipe that ships, with broken files in it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import (
    DacConfig,
    HiggsAudioV2TokenizerConfig,
    HiggsAudioV2TokenizerModel,
    HubertConfig,
    HubertModel,
)

from audiollm.audio import AudioError, load, normalize_rms, save
from audiollm.audio.level import running_level
from audiollm.codec import codec_digest, load_codec
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.data.records.shards import Shards, read_index
from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.files.set_aside import read_set_aside
from audiollm.recipe.runner import Context, run_recipe
from audiollm.recipe.stages import load_recipe
from tokenizer.clips import ClipStore, find_clips
from tokenizer.higgs import HiggsTokenizer, new_higgs, published_config
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.training import task as tokenizer_task
from tokenizer.training.settings import TokenizeConfig
from tokenizer.training.stages import HIGGS_PARAMETERS
from tokenizer.training.tokenizing import tokenize_samples

TINY_HUBERT = HubertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8,) * 7,
    num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
)  # fmt: skip
RECIPE = Path(__file__).parents[2] / "recipes" / "tokenizer" / "tiny.yaml"


def save_tiny_higgs(folder: Path) -> None:
    acoustic = DacConfig(
        encoder_hidden_size=4, downsampling_ratios=[8, 5, 4, 2, 3], decoder_hidden_size=64,
        upsampling_ratios=[8, 5, 4, 2, 3], hidden_size=16,
    )  # fmt: skip
    shape = HiggsAudioV2TokenizerConfig(
        target_bandwidths=[0.15, 0.6], codebook_size=64, codebook_dim=8, acoustic_model_config=acoustic,
        semantic_model_config=TINY_HUBERT,
    )  # fmt: skip
    HiggsAudioV2TokenizerModel(shape).save_pretrained(folder)


def tone(path: Path, seconds: float, pitch: float = 220.0, rate: int = 16_000) -> None:
    time_N = torch.arange(round(seconds * rate)) / rate
    save(path, 0.1 * torch.sin(2 * math.pi * pitch * time_N)[None], rate)


@pytest.fixture(autouse=True)
def few_frames_of_the_last_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_task, "REFIT_FRAMES_PER_CODE", 1)
    monkeypatch.setattr(tokenizer_task, "FRAMES_FITTED", 100)


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "recordings"
    (folder / "more").mkdir(parents=True)
    for index in range(5):
        tone(folder / "more" / f"{index}.wav", 1.5, 150.0 + 60 * index)
    (folder / "broken.wav").write_bytes(b"RIFF\x24\x00\x00\x00WAVEfmt ")
    (folder / "notes.txt").write_text("not audio")
    return folder


def test_a_folder_is_split_by_file_and_long_files_are_taken_in_parts(recordings: Path) -> None:
    tone(recordings / "long.flac", 150.0)
    clips = find_clips(recordings)
    assert not {c.path for c in clips.train} & {c.path for c in clips.test} and clips.test
    spans = [(c.start_s, c.end_s) for c in [*clips.train, *clips.test] if c.path.name == "long.flac"]
    assert spans == [(0.0, 60.0), (60.0, 150.0)] or spans == [(0.0, 60.0), (60.0, 120.0), (120.0, 150.0)]
    assert [Path(bad.place).name for bad in clips.bad] == ["broken.wav"]
    assert find_clips(recordings)[:2] == clips[:2]


def test_samples_without_a_split_are_trained_on(tmp_path: Path) -> None:
    """As by every training; the streams of one's own talks have a split only where they are held out."""

    def stream(id: str, **metadata: str) -> Sample:
        heard = Message(role="user", content=[AudioPart(path=f"{id}.wav")])
        return Sample(id=id, task="interpret", messages=[heard], metadata=metadata)

    made = [stream("a"), stream("b", split="test"), stream("c", split="train"), stream("d", split="dev")]
    write_samples(tmp_path / "streams.jsonl", made)
    clips = find_clips(tmp_path / "streams.jsonl")
    assert [[clip.path.stem for clip in each] for each in (clips.train, clips.test)] == [
        ["a", "c"],
        ["b", "d"],
    ]


def test_a_name_that_is_not_utf8_costs_its_file_alone(recordings: Path) -> None:
    before = find_clips(recordings)
    odd = Path(os.fsdecode(os.fsencode(recordings) + b"/caf\xe9.wav"))
    save(recordings / "clean.wav", 0.1 * torch.randn(1, 24_000), 24_000)
    (recordings / "clean.wav").rename(odd)
    clips = find_clips(recordings)
    assert (clips.train, clips.test) == (before.train, before.test)
    assert clips.bad[-1].reason == "its name is not valid UTF-8: rename it"


def test_what_breaks_after_the_start_is_drawn_no_more(recordings: Path) -> None:
    store = ClipStore(find_clips(recordings).train, 24_000)
    store.clips[0].path.write_bytes(b"gone")
    dice = torch.Generator().manual_seed(0)
    assert all(len(store.draw(dice)[1]) == 36_000 for _ in range(20))
    assert [bad.place for bad in store.bad] == [str(store.clips[0].path)]
    assert len(list(store.picked(10))) == len(store) - 1
    for clip in store.clips:
        clip.path.write_bytes(b"gone")
    store = ClipStore(store.clips, 24_000)
    with pytest.raises(AudioError, match="draws more"):
        store.draw(dice)


@pytest.mark.slow
def test_the_recipe_trains_a_codec_with_a_teacher_of_its_own(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"mel_hidden_size": 16, "hidden_size": 16, "batch_size": 4, "crop_frames": 12}
    changes = {"steps": 12, "minutes": "null", "blocks": "[1, 1, 1, 1]", **small}
    overrides = [f"train_tokenizer.{key}={value}" for key, value in changes.items()]
    recipe = load_recipe(RECIPE, [f"audio={recordings}", *overrides])
    run_recipe(recipe, Console(quiet=True))
    stage = recipe.folder / "train_tokenizer"
    codec = load_codec(stage / "model")
    assert codec.encode(torch.randn(1, 5000) * 0.1).shape == (8, 6)
    assert (stage / "teacher" / "model" / "model.safetensors").exists()
    figures = read_json(stage / "stage.json")["figures"]
    assert figures["bitrate_bps"] == 2000 and figures["set_aside"] == 1
    assert [Path(row["place"]).name for row in read_set_aside(stage / "set_aside.jsonl")] == ["broken.wav"]
    rows = read_jsonl(stage / "metrics.jsonl")
    assert any("semantic" in row for row in rows)
    # the curves end at the figures above them: those of the tokenizer that is saved
    names = ("mel", "stft", "perplexity_first", "perplexity_mean")
    assert [rows[-1][f"evaluation/{name}"] for name in names] == pytest.approx(
        [figures[name] for name in names], rel=1e-5
    )
    assert rows[-1]["step"] == figures["steps"]
    assert "Semantic loss" in (recipe.folder / "report.html").read_text()


def test_a_hugging_face_encoder_teaches(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    HubertModel(TINY_HUBERT).save_pretrained(tmp_path / "hubert")
    small = {"mel_hidden_size": 16, "hidden_size": 16, "batch_size": 2, "crop_frames": 12, "steps": 10}
    changes = {**small, "minutes": "null", "blocks": "[1, 1, 1, 1]"}
    overrides = [f"train_tokenizer.{key}={value}" for key, value in changes.items()]
    recipe = load_recipe(RECIPE, [f"audio={recordings}", f"teacher={tmp_path / 'hubert'}", *overrides])
    run_recipe(recipe, Console(quiet=True), only="train_tokenizer")
    stage = recipe.folder / "train_tokenizer"
    assert read_json(stage / "model" / "config.json")["semantic_dim"] == 16
    assert not (stage / "teacher").exists()


def test_the_higgs_preset_is_fine_tuned_and_stays_a_folder_of_transformers(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_tiny_higgs(tmp_path / "start")
    changes = {"batch_size": 2, "crop_frames": 12, "steps": 10, "minutes": "null", "preset": "higgs"}
    overrides = [f"train_tokenizer.{key}={value}" for key, value in changes.items()]
    overrides += [f"audio={recordings}", "teacher=null", f"train_tokenizer.start={tmp_path / 'start'}"]
    recipe = load_recipe(RECIPE, overrides)
    run_recipe(recipe, Console(quiet=True), only="train_tokenizer")
    folder = recipe.folder / "train_tokenizer" / "model"
    before, after = (HiggsAudioV2TokenizerModel.from_pretrained(f) for f in (tmp_path / "start", folder))
    weights = dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        moved = not torch.equal(parameter, weights[name])
        assert moved != name.startswith("semantic_model."), name
    clip = torch.randn(1, 9_600, generator=torch.Generator().manual_seed(0)) * 0.1
    codes = after.encode(clip[None]).audio_codes[0]
    assert torch.equal(load_codec(folder).encode(clip), codes)


def test_a_new_higgs_needs_a_hubert_and_takes_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hubert = HubertModel(TINY_HUBERT)
    hubert.save_pretrained(tmp_path / "hubert")
    model = new_higgs(tmp_path / "hubert")
    for name, weight in hubert.state_dict().items():
        assert torch.equal(model.semantic_model.state_dict()[name], weight), name
    with pytest.raises(ConfigError, match="hubert"):
        new_higgs(tmp_path)
    with torch.device("meta"):
        published = HiggsTokenizer(published_config())
    assert sum(p.numel() for p in published.parameters()) == HIGGS_PARAMETERS
    with pytest.raises(ConfigError, match="give `start`"):
        load_recipe(RECIPE, [f"audio={tmp_path}", "train_tokenizer.preset=higgs"])


def test_training_goes_on_from_a_tokenizer(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    shape = {"mel_hidden_size": 16, "hidden_size": 16, "encoder_layers": (1, 1), "decoder_layers": (1, 1)}
    start = AudioTokenizer(TokenizerConfig(codebook_size=64, **shape))  # type: ignore[arg-type]
    start.save_pretrained(tmp_path / "start")
    changes = {"batch_size": 2, "crop_frames": 12, "steps": 10, "minutes": "null", "learning_rate": 1e-9}
    overrides = [f"train_tokenizer.{key}={value}" for key, value in changes.items()]
    begin = [f"audio={recordings}", f"train_tokenizer.start={tmp_path / 'start'}", *overrides]
    recipe = load_recipe(RECIPE, [*begin, "teacher=none"])
    run_recipe(recipe, Console(quiet=True), only="train_tokenizer")
    model = AudioTokenizer.from_pretrained(recipe.folder / "train_tokenizer")
    assert model.config == start.config
    weight = model.encoder.input.weight
    torch.testing.assert_close(weight, start.encoder.input.weight, atol=1e-4, rtol=0)
    with pytest.raises(StageError, match="was taught 0 features"):
        run_recipe(load_recipe(RECIPE, [*begin, "teacher=own"]), Console(quiet=True), only="train_tokenizer")


def test_one_recording_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    tone(tmp_path / "in" / "one.wav", 1.0)
    with pytest.raises(StageError, match="none to hold out"):
        run_recipe(load_recipe(RECIPE, ["audio=in"]), Console(quiet=True))


def small_codec(folder: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    shape = {"mel_hidden_size": 16, "hidden_size": 16, "num_codebooks": 2}
    AudioTokenizer(TokenizerConfig(encoder_layers=(1, 1), decoder_layers=(1, 1), **shape)).save_pretrained(
        folder
    )


def test_the_sound_of_what_is_heard_goes_along_and_is_varied_as_what_is_said(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_codec(tmp_path / "codec")
    encode, encoded = AudioTokenizer.encode, []

    def counted(self: AudioTokenizer, samples_CN: Tensor) -> Tensor:
        encoded.append(samples_CN)
        return encode(self, samples_CN)

    monkeypatch.setattr(AudioTokenizer, "encode", counted)
    said = AudioPart(path=str(recordings / "more" / "1.wav"), start_s=0.25, end_s=1.25)
    messages = [Message(role="system", content=[said]), Message(role="assistant", content=[said])]
    sample = Sample(id="one", messages=messages, task="clone", metadata={"split": "train"})
    write_samples(tmp_path / "samples.jsonl", [sample])
    config = TokenizeConfig(samples=tmp_path / "samples.jsonl", codec=tmp_path / "codec", sound=True)
    tokenize_samples(config, Context(tmp_path / "stage", None, Console(quiet=True), {}))  # type: ignore[arg-type]
    loaded = Shards(tmp_path / "stage" / "shards")[0]
    heard, answer = loaded.audio
    expected = load(said.path, 0.25, 1.25)
    assert heard.load().sample_rate == expected.sample_rate
    torch.testing.assert_close(heard.load().samples_CN, expected.samples_CN, atol=1 / 32768, rtol=0)
    assert answer.content is None, "what is said is there as codes alone"
    assert len(loaded.encodings) == 4 and all(torch.equal(*encoding) for encoding in loaded.encodings)
    assert len(encoded) == 4, "what is heard and said is encoded once in each manner"
    assert len({samples_1N.numpy().tobytes() for samples_1N in encoded}) == 4


def test_processes_that_encode_side_by_side_make_the_same_shards(recordings: Path, tmp_path: Path) -> None:
    """Byte for byte, with the sample that cannot be read set aside in its place."""
    small_codec(tmp_path / "codec")
    places = [
        str(recordings / "more" / "1.wav"),
        str(tmp_path / "absent.wav"),
        str(recordings / "more" / "2.wav"),
    ]
    samples = [
        Sample(
            id=f"{number}",
            messages=[
                Message(role="assistant", content=[AudioPart(path=place, start_s=0.1 * number, end_s=1.0)])
            ],
            task="continue",
            metadata={"split": "train"},
        )
        for number, place in enumerate(places * 2)
    ]
    write_samples(tmp_path / "samples.jsonl", samples)
    written = []
    for workers in (1, 2):
        folder = tmp_path / f"workers{workers}"
        config = TokenizeConfig(
            samples=tmp_path / "samples.jsonl", codec=tmp_path / "codec", samples_per_shard=2, workers=workers
        )
        figures = tokenize_samples(config, Context(folder, None, Console(quiet=True), {}))  # type: ignore[arg-type]
        assert (figures["samples"], figures["set_aside"]) == (4, 2)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        written.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    assert written[0] == written[1] and any(name.endswith(".tar") for name in written[0])


def test_more_processes_encode_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer.training.settings.available_cpus", lambda: 8)
    config = TokenizeConfig.model_construct(workers=None)
    assert [config.num_workers(samples) for samples in (0, 99, 250, 5000)] == [1, 1, 2, 8]
    assert TokenizeConfig.model_construct(workers=3).num_workers(1) == 3


def test_a_stream_is_encoded_as_it_is(recordings: Path, tmp_path: Path) -> None:
    """At another speed its actions would stand after other words, or be fewer than its chunks.

    What is heard has the running level of the live loop, what is said the level of speech.
    """
    small_codec(tmp_path / "codec")
    heard = AudioPart(path=str(recordings / "more" / "1.wav"), start_s=0.0, end_s=1.2)
    said = AudioPart(path=str(recordings / "more" / "2.wav"), start_s=0.0, end_s=0.4)
    actions = Message(role="assistant", content=[*[TextPart(text="")] * 5, said], chunk_frames=6)
    messages = [Message(role="user", content=[heard]), actions]
    sample = Sample(id="one", messages=messages, task="interpret", metadata={"split": "train"})
    write_samples(tmp_path / "samples.jsonl", [sample])
    config = TokenizeConfig(samples=tmp_path / "samples.jsonl", codec=tmp_path / "codec")
    tokenize_samples(config, Context(tmp_path / "stage", None, Console(quiet=True), {}))  # type: ignore[arg-type]
    loaded = Shards(tmp_path / "stage" / "shards")[0]
    ((heard_KT, said_KT),) = loaded.encodings
    assert heard_KT.shape[1] == 30
    codec = AudioTokenizer.from_pretrained(tmp_path / "codec")
    live = running_level(load(heard.path, 0.0, 1.2, 24_000).samples_CN, 24_000)
    whole = normalize_rms(load(said.path, 0.0, 0.4, 24_000).samples_CN, -23.0)
    for codes_KT, samples_1N in ((heard_KT, live), (said_KT, whole)):
        assert (codes_KT == codec.encode(samples_1N)).float().mean() > 0.9, "but for the dither"


def test_recordings_that_were_encoded_before_are_not_encoded_again(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where file, span and codec are the same, and the file was not written since."""
    small_codec(tmp_path / "codec")
    kept, changed = recordings / "more" / "1.wav", recordings / "more" / "2.wav"

    def tokenized(name: str, spans: Sequence[tuple[Path, float, float]], **settings: Any) -> list[Tensor]:
        parts = [AudioPart(path=str(path), start_s=start_s, end_s=end_s) for path, start_s, end_s in spans]
        samples = [
            Sample(id=f"{name}{n}", messages=[Message(role="assistant", content=[part])], task="tts")
            for n, part in enumerate(parts)
        ]
        write_samples(tmp_path / f"{name}.jsonl", samples)
        config = TokenizeConfig(
            samples=tmp_path / f"{name}.jsonl", codec=tmp_path / "codec", encodings=1, **settings
        )
        tokenize_samples(config, Context(tmp_path / name, None, Console(quiet=True), {}))  # type: ignore[arg-type]
        shards = Shards(tmp_path / name / "shards")
        return [shards[n].encodings[0][0] for n in range(len(shards))]

    first = tokenized("first", [(changed, 0.0, 1.0), (kept, 0.0, 1.0)])
    later_s = (tmp_path / "first" / "shards" / "index.json").stat().st_mtime + 1
    os.utime(changed, (later_s, later_s))
    encode, encoded = AudioTokenizer.encode, []

    def counted(self: AudioTokenizer, samples_CN: Tensor) -> Tensor:
        encoded.append(samples_CN.shape[1])
        return encode(self, samples_CN)

    monkeypatch.setattr(AudioTokenizer, "encode", counted)
    spans = [(kept, 0.0, 1.0), (kept, 0.0, 0.5), (changed, 0.0, 1.0)]
    second = tokenized("second", spans, codes_from=tmp_path / "first" / "shards")
    assert torch.equal(second[0], first[1])
    assert encoded == [12_000, 24_000], "another span, and a file that was written since"
    small_codec(tmp_path / "codec", seed=1)
    with pytest.raises(StageError, match="its codes are those of another codec"):
        tokenized("third", spans, codes_from=tmp_path / "first" / "shards")


def test_a_silent_recording_beside_words_is_set_aside(recordings: Path, tmp_path: Path) -> None:
    small_codec(tmp_path / "codec")
    save(tmp_path / "silent.wav", torch.full((1, 24_000), 1e-4), 24_000)
    words = Message(role="user", content=[TextPart(text="Say: one.")])
    samples = [
        Sample(
            id=path.stem,
            messages=[words, Message(role="assistant", content=[AudioPart(path=str(path))])],
            task="tts",
        )
        for path in (tmp_path / "silent.wav", recordings / "more" / "1.wav")
    ]
    write_samples(tmp_path / "s.jsonl", samples)
    config = TokenizeConfig(samples=tmp_path / "s.jsonl", codec=tmp_path / "codec", encodings=1)
    tokenize_samples(config, Context(tmp_path / "out", None, Console(quiet=True), {}))  # type: ignore[arg-type]
    (row,) = read_set_aside(tmp_path / "out" / "set_aside.jsonl")
    assert (row["id"], row["kind"]) == ("silent", "silent")
    assert len(Shards(tmp_path / "out" / "shards")) == 1


def test_the_codec_may_be_given_by_the_folder_of_its_stage(recordings: Path, tmp_path: Path) -> None:
    """As commands take it: `codec: runs/x/train_tokenizer`."""
    small_codec(tmp_path / "train_tokenizer" / "model")
    turn = Message(role="assistant", content=[AudioPart(path=str(recordings / "more" / "1.wav"))])
    write_samples(tmp_path / "s.jsonl", [Sample(id="1", messages=[turn], task="tts")])
    config = TokenizeConfig(samples=tmp_path / "s.jsonl", codec=tmp_path / "train_tokenizer", encodings=1)
    tokenize_samples(config, Context(tmp_path / "out", None, Console(quiet=True), {}))  # type: ignore[arg-type]
    codec = read_json(tmp_path / "out" / "shards" / "index.json")["codec"]
    assert codec["path"] == str(tmp_path / "train_tokenizer" / "model")


def test_a_killed_tokenize_goes_on_and_keeps_what_it_set_aside(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_codec(tmp_path / "codec")
    paths = [recordings / "broken.wav", *(recordings / "more" / f"{n}.wav" for n in range(4))]
    said = [Message(role="assistant", content=[AudioPart(path=str(path))]) for path in paths]
    write_samples(
        tmp_path / "samples.jsonl",
        [
            Sample(id=path.stem, messages=[message], task="tts")
            for path, message in zip(paths, said, strict=True)
        ],
    )
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write("{\n")
    config = TokenizeConfig(
        samples=tmp_path / "samples.jsonl", codec=tmp_path / "codec", samples_per_shard=2, seed=0
    )
    context = Context(tmp_path / "stage", None, Console(quiet=True), {})  # type: ignore[arg-type]
    encode, calls = AudioTokenizer.encode, []

    def killed(self: AudioTokenizer, samples_CN: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(self, samples_CN)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AudioTokenizer, "encode", killed)
        tokenize_samples(config, context)
    figures = tokenize_samples(config, context)
    assert figures["samples"] == 4 and figures["set_aside"] == 2
    rows = read_set_aside(tmp_path / "stage" / "set_aside.jsonl")
    assert [(row["id"], row["kind"]) for row in rows] == [("", "wrong JSON"), ("broken", "cannot be read")]
    assert rows[0]["place"].endswith("samples.jsonl:6") and rows[1]["place"].endswith("broken.wav")
    assert {row["stage"] for row in rows} == {"tokenize"}
    facts = read_index(tmp_path / "stage" / "shards")["codec"]
    assert facts["digest"] == codec_digest(load_codec(tmp_path / "codec"))
