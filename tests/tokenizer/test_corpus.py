"""A corpus to shards and back: codes of whole files, resuming, bad files, and names that stay in their folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from audiollm.audio import load, normalize_rms, save
from audiollm.codec import Codec, codec_digest, load_codec
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.records.shards import ShardWriter, read_index, read_shards
from audiollm.errors import ConfigError, StageError
from audiollm.failures import MAX_EQUAL_FAILURES, FailedOnEveryItem
from tokenizer import AudioTokenizer, TokenizerConfig
from tokenizer.corpus import encoding as corpus
from tokenizer.corpus.cluster_work import ClusterWorkers
from tokenizer.corpus.decoding import OutputNames, detokenize_shards, open_shards, path_of_id
from tokenizer.corpus.encoding import Coding, Corpus, check_record, tokenize_corpus

TINY = TokenizerConfig(
    mel_hidden_size=16,
    hidden_size=16,
    encoder_layers=(1, 1),
    decoder_layers=(1, 1),
    latent_dim=8,
    codebook_size=16,
)


@pytest.fixture(scope="module")
def codec_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("codec")
    AudioTokenizer(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def codec(codec_folder: Path) -> Codec:
    return load_codec(codec_folder)


def sound(path: Path, seconds: float, rate: int = 24_000, channels: int = 1, seed: int = 0) -> Path:
    random = np.random.default_rng(seed)
    samples_CN = 0.1 * random.standard_normal((channels, round(seconds * rate)))
    save(path, torch.from_numpy(samples_CN), rate)
    return path


def sample(path: Path, name: str = "", **span: float) -> Sample:
    part = AudioPart(path=str(path), **span)
    messages = [Message(role="assistant", content=[part])]
    return Sample(id=name or path.stem, messages=messages, task="audio", metadata={"speaker": "a"})


def make_corpus(samples: list[Sample]) -> Corpus:
    return Corpus(samples, [corpus.planned_seconds(row) for row in samples])


def encode(
    codec: Codec, samples: list[Sample], out: Path, coding: Coding, **settings: Any
) -> tuple[dict[str, int], list[dict[str, str]]]:
    return tokenize_corpus(codec, make_corpus(samples), out, coding, settings.pop("per_shard", 2), **settings)


def test_codes_are_those_of_each_whole_file(tmp_path: Path, codec: Codec, codec_folder: Path) -> None:
    kinds = [(24_000, 1), (8000, 1), (192_000, 1), (44_100, 2), (24_000, 2)]
    files = [sound(tmp_path / f"{i}.wav", 0.7 + i / 9, *kind, seed=i) for i, kind in enumerate(kinds)]
    seconds: list[float] = []
    counts, bad = encode(
        codec, [sample(f) for f in files], tmp_path / "out", Coding(codec_folder), advance=seconds.append
    )
    assert not bad and counts["samples"] == 5 and counts["shards"] == 3
    for path, coded in zip(files, read_shards(tmp_path / "out"), strict=True):
        whole_1N = load(path, sample_rate=24_000, mono=True).samples_CN
        assert torch.equal(coded.encodings[0][0], codec.encode(whole_1N))
        assert coded.sample.id == path.stem and coded.sample.metadata["speaker"] == "a"
        about = {"path": str(path), "num_samples": whole_1N.shape[1], "gain_db": 0.0}
        assert coded.sample.metadata["coded_audio"] == [about]
    assert sum(seconds) == pytest.approx(sum(0.7 + i / 9 for i in range(5)), abs=1e-3)
    facts = read_index(tmp_path / "out")["codec"]
    assert (facts["num_codebooks"], facts["sample_rate"], facts["path"]) == (8, 24_000, str(codec_folder))


def test_spans_prefixes_and_levels(tmp_path: Path, codec: Codec, codec_folder: Path) -> None:
    path = sound(tmp_path / "a.wav", 1.0)
    rows = [sample(path, "span", start_s=0.25, end_s=0.75), sample(path, "whole")]
    coding = Coding(codec_folder, num_codebooks=3, level_dbfs=-33.0)
    encode(codec, rows, tmp_path / "out", coding)
    for coded, span in zip(read_shards(tmp_path / "out"), [(0.25, 0.75), (0.0, None)], strict=True):
        samples_1N = load(path, *span).samples_CN
        levelled_1N = normalize_rms(samples_1N, -33.0)
        same = coded.encodings[0][0] == codec.encode(levelled_1N)[:3]
        assert float(same.float().mean()) > 0.97  # the gain differs in its last bits
        gain_db = 20 * np.log10(float(levelled_1N.norm() / samples_1N.norm()))
        assert coded.sample.metadata["coded_audio"][0]["gain_db"] == pytest.approx(gain_db, abs=1e-4)
    from safetensors.torch import load_file

    vectors_KVD = load_file(tmp_path / "out/codebooks.safetensors")["vectors_KVD"]
    assert torch.equal(vectors_KVD, codec.codebook_vectors_KVD[:3])
    assert read_index(tmp_path / "out")["codec"]["digest"] == codec_digest(codec, 3) != codec_digest(codec)


def test_codes_of_silence_are_not_taught_as_words(tmp_path: Path, codec: Codec, codec_folder: Path) -> None:
    """A sound whose channels cancel each other has words in one of them; silence, and a whisper of noise, have none."""
    voice = sound(tmp_path / "voice.wav", 1.0)
    voice_1N = load(voice).samples_CN
    silent, faint = tmp_path / "silent.wav", tmp_path / "faint.wav"
    save(silent, 0 * voice_1N, 24_000)
    save(faint, 1e-3 * voice_1N, 24_000)
    save(tmp_path / "inverted.wav", torch.cat([voice_1N, -voice_1N]), 24_000)
    question = Message(role="user", content=[TextPart(text="Say: one.")])
    plain = [sample(path) for path in (voice, silent, faint, tmp_path / "inverted.wav")]
    with_words = [row.model_copy(update={"messages": [question, *row.messages]}) for row in plain]
    _, bad = encode(codec, with_words, tmp_path / "out", Coding(codec_folder))
    assert {row["id"]: row["kind"] for row in bad} == {"silent": "silent", "faint": "silent"}
    first, last = read_shards(tmp_path / "out")
    assert np.array_equal(first.encodings[0][0], last.encodings[0][0])
    assert encode(codec, plain, tmp_path / "plain", Coding(codec_folder))[1] == []  # nothing is said of them


def bad_files(folder: Path) -> dict[Path, str]:
    """Files that cannot be used, with a word of the reason."""
    with_nan = np.full((9000, 1), 0.1, dtype=np.float32)
    with_nan[8000] = np.nan
    folder.mkdir(exist_ok=True)
    soundfile.write(folder / "nan.wav", with_nan, 24_000, "FLOAT")
    soundfile.write(folder / "no_samples.wav", with_nan[:0], 24_000)
    (folder / "empty.wav").touch()
    (folder / "broken.flac").write_bytes(b"fLaC" + bytes(range(200)))
    names = {
        "nan.wav": "NaN",
        "no_samples.wav": "no samples",
        "empty.wav": "empty",
        "broken.flac": "cannot be",
    }
    return {folder / name: reason for name, reason in names.items()}


def test_bad_files_are_set_aside_and_the_rest_goes_on(
    tmp_path: Path, codec: Codec, codec_folder: Path
) -> None:
    good, bad = sound(tmp_path / "good.wav", 0.5), bad_files(tmp_path / "bad")
    rows = [*(sample(path) for path in bad), sample(good), sample(good, "far", start_s=9.0)]
    counts, set_aside = encode(codec, rows, tmp_path / "out", Coding(codec_folder))
    assert counts["samples"] == 1
    listed = [json.loads(line) for line in (tmp_path / "out/set_aside.jsonl").read_text().splitlines()]
    assert listed == set_aside and [row["place"] for row in listed] == [*map(str, bad), str(good)]
    for row, reason in zip(listed, [*bad.values(), "beyond"], strict=True):
        assert reason in row["reason"], row
    with pytest.raises(StageError, match=r"nan\.wav.*NaN") as stopped:
        encode(codec, rows, tmp_path / "strict", Coding(codec_folder), strict=True)
    assert stopped.value.exit_code == 2


class Refusing:
    """A codec without streams that takes no clip shorter than a second."""

    frame_rate, num_codebooks, codebook_size, sample_rate = 10.0, 2, 2**16, 1000
    codebook_vectors_KVD = torch.zeros(2, 2**16, 1)

    def encode(self, samples_CN: Tensor) -> Tensor:
        if samples_CN.shape[1] < 1000:
            raise ValueError("shorter than a second")
        return torch.full((2, -(-samples_CN.shape[1] // 100)), 2**16 - 1)

    def decode(self, codes_KT: Tensor) -> Tensor:
        return torch.full((1, codes_KT.shape[1] * 100), 0.5)


def test_a_codec_without_streams(tmp_path: Path, codec_folder: Path) -> None:
    rows = [
        sample(sound(tmp_path / "short.wav", 0.5, 1000)),
        sample(sound(tmp_path / "long.wav", 1.234, 1000)),
    ]
    counts, set_aside = encode(Refusing(), rows, tmp_path / "out", Coding(codec_folder))
    assert counts["samples"] == 1 and "shorter than a second" in set_aside[0]["reason"]
    (coded,) = read_shards(tmp_path / "out")
    assert int(coded.encodings[0][0].min()) == 2**16 - 1  # beyond int16
    counts, set_aside = detokenize_shards(tmp_path / "out", Refusing(), tmp_path / "sound", "wav")
    assert not set_aside and load(tmp_path / "sound/long.wav").num_samples == 1234


@pytest.mark.parametrize("count", [3, 30])
def test_a_codec_that_refuses_every_clip_ends_the_run(tmp_path: Path, codec_folder: Path, count: int) -> None:
    rows = [sample(sound(tmp_path / f"{n:02d}.wav", 0.5 + n / 100, 1000)) for n in range(count)]
    with pytest.raises(FailedOnEveryItem, match=r"the codec failed on all .*shorter than a second"):
        encode(Refusing(), rows, tmp_path / "out", Coding(codec_folder))
    assert len((tmp_path / "out/set_aside.jsonl").read_text().splitlines()) == min(count, MAX_EQUAL_FAILURES)


class Killed(BaseException):
    pass


def killed_after(seconds: float) -> Any:
    done = [0.0]

    def advance(more: float) -> None:
        done[0] += more
        if done[0] > seconds:
            raise Killed

    return advance


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path, codec: Codec, codec_folder: Path) -> None:
    nan = next(iter(bad_files(tmp_path / "bad")))
    files = [sound(tmp_path / f"{i}.flac", 0.5, seed=i) for i in range(6)]
    rows = [sample(path) for path in [files[0], nan, *files[1:]]]
    coding = Coding(codec_folder)
    encode(codec, rows, tmp_path / "whole", coding)
    with pytest.raises(Killed):  # in the third shard; the second is whole, and so is what was set aside
        encode(codec, rows, tmp_path / "cut", coding, advance=killed_after(2.3))
    assert [path.name for path in sorted((tmp_path / "cut").glob("*.tar"))] == [
        "shard-000000.tar",
        "shard-000001.tar",
    ]
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("*.tar")}
    _, set_aside = encode(codec, rows, tmp_path / "cut", coding)
    assert [row["id"] for row in set_aside] == ["nan"]
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes(), path.name


@pytest.mark.slow  # two processes load torch
def test_workers_write_the_same_shards(tmp_path: Path, codec: Codec, codec_folder: Path) -> None:
    rows = [sample(sound(tmp_path / f"{i}.wav", 0.3, seed=i)) for i in range(3)]
    rows.insert(1, sample(next(iter(bad_files(tmp_path / "bad")))))
    one, two = (encode(codec, rows, tmp_path / f"{n}", Coding(codec_folder), workers=n) for n in (1, 2))
    assert one == two
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes(), path.name


@pytest.mark.slow  # two actors load torch
def test_actors_write_the_same_shards(
    tmp_path: Path, codec: Codec, codec_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths may be relative to the working directory of the run, where no actor begins."""
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    rows = [sample(sound(Path(f"{i}.wav"), 0.3, seed=i)) for i in range(5)]
    rows.insert(1, sample(next(iter(bad_files(Path("bad"))))))
    coding = Coding(Path(os.path.relpath(codec_folder)))
    encode(codec, rows, tmp_path / "here", coding)
    encode(codec, rows, tmp_path / "there", coding, workers=ClusterWorkers(2))
    for path in (tmp_path / "here").iterdir():
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes(), path.name


def test_a_shard_holds_an_hour_at_most() -> None:
    rows = [sample(Path("x.wav"))]
    assert Corpus(rows, [2.0]).samples_per_shard == 512
    assert Corpus(rows, [600.0]).samples_per_shard == 6
    assert Corpus(rows, [9000.0]).samples_per_shard == 1
    assert Corpus(rows, [0.0]).samples_per_shard == 512


def test_a_folder_keeps_to_what_it_was_begun_with(tmp_path: Path) -> None:
    check_record(tmp_path / "record.json", {"codec": "a", "--level": None})
    check_record(tmp_path / "record.json", {"codec": "a", "--level": None})
    with pytest.raises(ConfigError, match="another --level: None, not -23"):
        check_record(tmp_path / "record.json", {"codec": "a", "--level": -23.0})


# Decoding


def test_round_trip_of_names_lengths_and_levels(tmp_path: Path, codec: Codec, codec_folder: Path) -> None:
    files = [
        sound(tmp_path / f"{i}.wav", s, rate) for i, (s, rate) in enumerate([(0.5, 24_000), (0.3331, 8000)])
    ]
    rows = [sample(files[0], "a/b"), sample(files[1], "c.d")]
    encode(codec, rows, tmp_path / "shards", Coding(codec_folder, level_dbfs=-30.0))
    loaded, _, _ = open_shards(tmp_path / "shards", None)
    counts, set_aside = detokenize_shards(tmp_path / "shards", loaded, tmp_path / "out", "flac")
    assert counts == {"written": 2, "kept": 0} and not set_aside
    for path, row, coded in zip(files, ("a/b", "c.d"), read_shards(tmp_path / "shards"), strict=True):
        decoded = load(tmp_path / "out" / f"{row}.flac")
        number = load(path, sample_rate=24_000).num_samples
        gain = 10 ** (-coded.sample.metadata["coded_audio"][0]["gain_db"] / 20)
        expected_1N = (codec.decode(coded.encodings[0][0])[:, :number] * gain).clamp(-1, 1)
        assert decoded.samples_CN.shape == (1, number)
        assert float((decoded.samples_CN - expected_1N).abs().max()) < 1e-4


def test_decoding_keeps_what_is_there_and_can_decode_a_prefix(
    tmp_path: Path, codec: Codec, codec_folder: Path
) -> None:
    rows = [sample(sound(tmp_path / f"{i}.wav", 0.4, seed=i)) for i in range(3)]
    encode(codec, rows, tmp_path / "shards", Coding(codec_folder))
    with pytest.raises(Killed):
        detokenize_shards(tmp_path / "shards", codec, tmp_path / "out", "wav", 2, advance=killed_after(0.5))
    stamp = (tmp_path / "out/0.wav").stat().st_mtime_ns
    counts, _ = detokenize_shards(tmp_path / "shards", codec, tmp_path / "out", "wav", 2)
    assert counts == {"written": 1, "kept": 2} and (tmp_path / "out/0.wav").stat().st_mtime_ns == stamp
    coded = next(read_shards(tmp_path / "shards"))
    expected_1N = codec.decode(coded.encodings[0][0][:2])[:, :9600]
    assert float((load(tmp_path / "out/0.wav").samples_CN - expected_1N).abs().max()) < 1e-4


def foreign_shards(folder: Path, samples: list[Sample], codec_folder: Path | None = None) -> None:
    """Shards that were not written by `tokenize`, two audio parts or one a sample."""
    writer = ShardWriter(folder, 100)
    for index, row in enumerate(samples):
        parts = row.audio("assistant")
        writer.write(index, row, [[np.zeros((8, 3), np.int16) for _ in parts]])
    writer.close({"codec": {"path": str(codec_folder)}} if codec_folder else {})


def test_no_id_leads_out_of_the_folder(tmp_path: Path, codec: Codec) -> None:
    ids = [
        "../../up",
        "/abs",
        "a/../../b",
        "..",
        "x" * 400,
        "a\x00b",
        "a:b",
        "a?b",
        "same",
        "SAME",
        "é/ü",
        "a/" * 99 + "z",
    ]
    foreign_shards(tmp_path / "shards", [sample(Path("x.wav"), name) for name in ids])
    counts, set_aside = detokenize_shards(tmp_path / "shards", codec, tmp_path / "deep/er/out", "wav")
    assert counts["written"] == len(ids) and not set_aside
    found = list(tmp_path.rglob("*.wav"))
    assert len(found) == len(ids) and all(p.is_relative_to(tmp_path / "deep/er/out") for p in found)
    assert (tmp_path / "deep/er/out/é/ü.wav").exists()


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, codec: Codec) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/way").symlink_to(tmp_path / "elsewhere")
    foreign_shards(tmp_path / "shards", [sample(Path("x.wav"), "way/a"), sample(Path("x.wav"), "b")])
    counts, set_aside = detokenize_shards(tmp_path / "shards", codec, tmp_path / "out", "wav")
    assert counts["written"] == 1 and "link" in set_aside[0]["reason"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_safe_names_are_distinct_and_leave_good_ones_alone(tmp_path: Path) -> None:
    for good in ("a", "speaker 1/clip-2", "b.c", "日本"):
        assert path_of_id(good) == good
    assert len({path_of_id(bad) for bad in ("a:b", "a?b", "a_b", "", ".", "..", "/a", "a/")}) == 8
    names = OutputNames(tmp_path, "flac")
    taken = [*names.take("x", 2), *names.take("x", 1), *names.take("x", 1)]
    assert [path.name for path in taken] == ["x-1.flac", "x-2.flac", "x.flac", "x-3.flac"]


def test_damaged_records_are_set_aside(tmp_path: Path, codec: Codec) -> None:
    good = sample(Path("x.wav"), "good")
    damaged: Iterator[Any] = iter(
        [
            [],
            [{"path": "x", "num_samples": 0}],
            [{"path": "x", "num_samples": 5, "gain_db": "nan"}],
            "no list",
        ]
    )
    rows = [
        good.model_copy(update={"id": f"bad{i}", "metadata": {"coded_audio": about}})
        for i, about in enumerate(damaged)
    ]
    foreign_shards(tmp_path / "shards", [*rows, good])
    counts, set_aside = detokenize_shards(tmp_path / "shards", codec, tmp_path / "out", "flac")
    assert counts["written"] == 1 and [row["id"] for row in set_aside] == ["bad0", "bad1", "bad2", "bad3"]


def test_the_codec_must_be_that_of_the_codes(tmp_path: Path, codec_folder: Path) -> None:
    own = tmp_path / "own"
    AudioTokenizer(TINY).save_pretrained(own)
    row = sample(sound(tmp_path / "a.wav", 0.2))
    encode(load_codec(own), [row], tmp_path / "shards", Coding(own))
    changed = AudioTokenizer.from_pretrained(own)
    changed.decoder.norm.weight.data += 0.1  # trained on around the same codebooks, say
    changed.save_pretrained(own)
    with pytest.raises(ConfigError, match="has changed since"):
        open_shards(tmp_path / "shards", None)
    open_shards(tmp_path / "shards", own)  # said aloud, it is taken
    with pytest.raises(ConfigError, match="is another one than these codes are of"):
        open_shards(tmp_path / "shards", codec_folder)
    AudioTokenizer(TokenizerConfig(**{**vars(TINY), "codebook_size": 32})).save_pretrained(own)
    with pytest.raises(ConfigError, match="codebook_size of the codes is 16"):
        open_shards(tmp_path / "shards", own)
    with pytest.raises(ConfigError, match=r"index\.json"):
        open_shards(tmp_path, None)
    (tmp_path / "shards/shard-000000.tar").unlink()
    with pytest.raises(ConfigError, match="is missing"):
        open_shards(tmp_path / "shards", own)
    foreign_shards(tmp_path / "foreign", [row])
    with pytest.raises(ConfigError, match="names no codec"):
        open_shards(tmp_path / "foreign", None)
