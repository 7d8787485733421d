"""A preference between spoken answers: from a manifest through `tokenize` to shards, and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from audiollm.audio import encode_bytes, load, save
from audiollm.codec import load_codec
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart, write_samples
from audiollm.data.records.shards import ShardWriter
from audiollm.files.set_aside import read_set_aside
from audiollm.recipe.runner import Context
from audiollm.rl.groups import AnswerPair, groups_of
from tokenizer import AudioTokenizer, TokenizerConfig
from tokenizer.corpus.command import read_inputs
from tokenizer.corpus.decoding import detokenize_shards
from tokenizer.corpus.encoding import CODED_AUDIO, Coding, Corpus, planned_seconds, tokenize_corpus
from tokenizer.training.settings import TokenizeConfig
from tokenizer.training.tokenizing import tokenize_samples

TINY = TokenizerConfig(
    mel_hidden_size=16,
    hidden_size=16,
    encoder_layers=(1, 1),
    decoder_layers=(1, 1),
    latent_dim=8,
    codebook_size=16,
)
SECONDS = {"heard.wav": 0.5, "good.wav": 1.0, "bad.wav": 0.75, "worse.wav": 0.25}


@pytest.fixture
def codec_folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AudioTokenizer(TINY).save_pretrained(tmp_path / "codec")
    return tmp_path / "codec"


def preference(id: str, *names: str) -> Sample:
    """A heard recording in the question, and an answer for each name, the best first."""
    asked = [
        Message(role="system", content=[TextPart(text="Speak.")]),
        Message(role="user", content=[AudioPart(path="heard.wav"), TextPart(text="Say it as she does.")]),
    ]
    answers = [
        RatedAnswer(
            content=[TextPart(text=name), AudioPart(path=name, speaker="ann")],
            rank=place,
            score=1 / place,
            origin="policy",
        )
        for place, name in enumerate(names, start=1)
    ]
    return Sample(id=id, messages=asked, task="tts", answers=answers, metadata={"split": "train"})


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    for seed, (name, seconds) in enumerate(SECONDS.items()):
        noise = 0.1 * torch.randn(1, round(24_000 * seconds), generator=torch.Generator().manual_seed(seed))
        save(tmp_path / name, noise, 24_000)
    samples = [
        preference("two", "good.wav", "bad.wav"),
        preference("gone", "good.wav", "none.wav"),
        preference("three", "good.wav", "bad.wav", "worse.wav"),
    ]
    write_samples(tmp_path / "samples.jsonl", samples)
    return tmp_path / "samples.jsonl"


def test_a_corpus_of_preferences(tmp_path: Path, manifest: Path, codec_folder: Path) -> None:
    codec = load_codec(codec_folder)
    inputs = read_inputs([str(manifest)])
    corpus = Corpus(inputs.samples, [planned_seconds(sample) for sample in inputs.samples])
    assert corpus.durations_s[0] == pytest.approx(0.5 + 1.0 + 0.75)
    assert corpus.digest != Corpus(corpus.samples[:1], [1.0]).digest
    counts, rows = tokenize_corpus(codec, corpus, tmp_path / "shards", Coding(codec_folder), 2)
    assert counts["samples"] == 2 and [(row["id"], row["kind"]) for row in rows] == [
        ("gone", "cannot be read")
    ]
    assert "none.wav" in rows[0]["place"]

    source = open_source(tmp_path / "shards")
    original = {sample.id: sample for sample in read_samples(manifest)[0]}
    for index in range(len(source)):
        loaded = source[index]
        sample = loaded.sample
        assert (
            sample.answers == original[sample.id].answers and sample.messages == original[sample.id].messages
        )
        assert len(sample.metadata[CODED_AUDIO]) == len(sample.audio_parts()) == len(loaded.encodings[0])
        asked = loaded.without_answers()
        assert asked.sample.messages == sample.messages and not asked.sample.answers
        assert len(asked.audio) == 1 and torch.equal(asked.encodings[0][0], loaded.encodings[0][0])
        with pytest.raises(IndexError):
            loaded.answered(len(sample.answers))
        for number in range(len(sample.answers)):
            answered = loaded.answered(number)
            for part, codes_KT in zip(answered.sample.audio_parts(), answered.encodings[0], strict=True):
                expected_KT = codec.encode(
                    load(part.path, sample_rate=codec.sample_rate, mono=True).samples_CN
                )
                assert torch.equal(codes_KT, expected_KT.long()), "each answer has its own codes"
        assert groups_of(sample, "pairs")[0] == AnswerPair(
            0, len(sample.answers) - 1, 1 - 1 / len(sample.answers)
        )
    counts, bad = detokenize_shards(
        tmp_path / "shards", codec, tmp_path / "sound", "wav", None, lambda s: None, 64
    )
    assert counts["written"] == 3 + 4 and not bad


def test_the_stage_of_recipes_codes_answers_as_it_codes_prompts(
    tmp_path: Path, manifest: Path, codec_folder: Path
) -> None:
    config = TokenizeConfig(samples=manifest, codec=codec_folder, sound=True)
    tokenize_samples(config, Context(tmp_path / "stage", None, Console(quiet=True), {}))  # type: ignore[arg-type]
    (gone,) = read_set_aside(tmp_path / "stage" / "set_aside.jsonl")
    assert gone["id"] == "gone"
    source = open_source(tmp_path / "stage" / "shards")
    for index, answers in ((0, 2), (1, 3)):
        loaded = source[index]
        assert len(loaded.encodings) == config.encodings
        assert all(len(encoding) == 1 + answers for encoding in loaded.encodings)
        heard, *spoken = loaded.audio
        assert heard.load().num_samples == 12_000 and not any(clip.content for clip in spoken)
        frames = [codes_KT.shape[1] for codes_KT in loaded.encodings[0]]
        rate = load_codec(codec_folder).frame_rate
        names = ("heard.wav", "good.wav", "bad.wav", "worse.wav")[: 1 + answers]
        assert frames == [pytest.approx(SECONDS[name] * rate, abs=1) for name in names]


class _Demanding(AudioTokenizer):
    """Refuses clips of less than half a second, and has more codes than 16 bits hold."""

    def encode(self, samples_CN: torch.Tensor) -> torch.Tensor:
        if samples_CN.shape[1] < 12_000:
            raise ValueError("too few samples for one frame")
        return torch.full((8, samples_CN.shape[1] // 960), 40_000)


def test_the_stage_sets_aside_what_the_codec_refuses_and_keeps_large_codes(
    tmp_path: Path, manifest: Path, codec_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = _Demanding(replace(TINY, codebook_size=65_536))
    monkeypatch.setattr("tokenizer.training.tokenizing.load_codec", lambda folder: codec)
    config = TokenizeConfig(samples=manifest, codec=codec_folder, encodings=1)
    tokenize_samples(config, Context(tmp_path, None, Console(quiet=True), {}))  # type: ignore[arg-type]
    rows = {row["id"]: row for row in read_set_aside(tmp_path / "set_aside.jsonl")}
    assert set(rows) == {"gone", "three"} and rows["three"]["kind"] == "cannot be encoded"
    assert "worse.wav" in rows["three"]["place"] and "too few samples" in rows["three"]["reason"]
    source = open_source(tmp_path / "shards")
    assert [source[index].sample.id for index in range(len(source))] == ["two"]
    assert all(bool((codes_KT == 40_000).all()) for codes_KT in source[0].encodings[0])


def test_shards_hold_the_recordings_of_prompts_and_answers(tmp_path: Path) -> None:
    tones = {f"{n}.flac": encode_bytes(torch.full((1, 800 * (n + 1)), 0.25), 8_000, "flac") for n in range(3)}
    sample = preference("two", "1.flac", "2.flac").with_parts(
        lambda part: part if isinstance(part, TextPart) or "flac" in part.path else AudioPart(path="0.flac")
    )
    writer = ShardWriter(tmp_path / "shards", 2)
    writer.write(0, sample, [], tones)
    with pytest.raises(ValueError, match="must be the path of an audio part"):
        writer.write(1, sample, [], {"3.flac": b""})
    writer.close({})
    (loaded,) = (open_source(tmp_path / "shards")[index] for index in range(1))
    assert loaded.sample == sample
    assert [clip.load().num_samples for clip in loaded.audio] == [800, 1600, 2400]
    assert [clip.load().num_samples for clip in loaded.answered(1).audio] == [800, 2400]
    again = (tmp_path / "shards" / "shard-000000.tar").read_bytes()
    twice = ShardWriter(tmp_path / "twice", 2)
    twice.write(0, sample, [], tones)
    twice.close({})
    assert (tmp_path / "twice" / "shard-000000.tar").read_bytes() == again


def test_codes_for_fewer_parts_than_prompt_and_answers_have(tmp_path: Path) -> None:
    from audiollm.errors import BadSample

    writer = ShardWriter(tmp_path / "shards", 2)
    writer.write(0, preference("two", "good.wav", "bad.wav"), [[np.zeros((2, 3)).astype(np.int16)] * 2])
    writer.close({"codec": {"num_codebooks": 2, "codebook_size": 8}})
    with pytest.raises(BadSample, match="codes of 2 audio parts, and the sample has 3"):
        open_source(tmp_path / "shards")[0]
