"""Shards: what goes in comes out, by others' readers too; what is broken is named once, and the rest is read."""

from __future__ import annotations

import contextlib
import io
import json
import math
import pickle
import tarfile
import tracemalloc
import uuid
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import soundfile
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.audio import encode_bytes, load_bytes
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.records.shards import Encodings, Shards, ShardWriter, index_shards, read_index, read_shards
from audiollm.errors import BadSample, ConfigError
from audiollm.files.atomic import write_json
from audiollm.recipe.stages import RecipeStage, Stage, StageConfig


def sample(index: int) -> Sample:
    messages = [
        Message(role="user", content=[TextPart(text=f"say é {index}")]),
        Message(role="assistant", content=[AudioPart(path=f"{index}.wav", end_s=1.5)]),
    ]
    return Sample(id=f"clip_{index}", messages=messages, task="tts", metadata={"split": "train"})


def encodings(index: int) -> Encodings:
    random = np.random.default_rng(index)
    return [[random.integers(1024, size=(8, 3 + index + v)).astype(np.int16)] for v in range(12)]


def write(folder: Path, start: int, stop: int) -> list[int]:
    """Returns what had to be encoded."""
    writer, worked = ShardWriter(folder, 4), []
    for index in range(start, stop):
        if not writer.has(index):
            worked.append(index)
            writer.write(index, sample(index), encodings(index))
    writer.close({"codec": {"num_codebooks": 8}})
    return worked


def test_round_trip(tmp_path: Path) -> None:
    assert write(tmp_path, 0, 10) == list(range(10))
    assert read_index(tmp_path)["counts"] == {
        "samples": 10,
        "frames": sum(3 + i for i in range(10)),
        "shards": 3,
    }
    for index, coded in enumerate(read_shards(tmp_path)):
        assert coded.sample == sample(index)
        for ours, theirs in zip(coded.encodings, encodings(index), strict=True):
            assert np.array_equal(ours[0].numpy(), theirs[0])


def test_resume_redoes_only_what_is_missing_and_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write(whole, 0, 10)
    writer = ShardWriter(cut, 4)
    for index in range(6):  # killed with the second shard half full
        if not writer.has(index):
            writer.write(index, sample(index), encodings(index))
    assert write(cut, 0, 10) == list(range(4, 10))
    for path in whole.iterdir():
        assert path.read_bytes() == (cut / path.name).read_bytes(), path.name


def test_an_unfinished_folder_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="index.json"):
        list(read_shards(tmp_path))


class Planted:
    """An object that runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (self._path,))


def test_a_foreign_shard_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, proof = tmp_path / "shards", tmp_path / "ran"
    write(folder, 0, 2)
    pickle.loads(pickle.dumps(Planted(proof)))  # noqa: S301 (the negative control)
    assert proof.exists()
    proof.unlink()
    (shard,) = folder.glob("*.tar")
    with tarfile.open(shard, "a") as archive:
        member = pickle.dumps(Planted(proof))
        for key in ("clip_0", "clip_1", "0"):
            info = tarfile.TarInfo(f"{key}.pkl")
            info.size = len(member)
            archive.addfile(info, io.BytesIO(member))
    with contextlib.suppress(Exception):
        list(read_shards(folder))
    monkeypatch.chdir(folder)
    write_json(folder / "index.json", {**read_index(folder), "shards": [f"pipe:touch {proof}"]})
    with pytest.raises(BadSample, match="missing"):
        list(read_shards(Path()))
    assert [bad.kind for bad in Shards(Path()).bad] == ["missing shard", "unlisted shard"]
    assert not proof.exists()


# Sound in shards, indices, and what others write

RATE = 16_000
FACTS = {"codec": {"num_codebooks": 8, "codebook_size": 1024}}


def tone(index: int, seconds: float = 0.1) -> bytes:
    """A FLAC of a tone of its own."""
    times_N = torch.arange(round(seconds * RATE)) / RATE
    return encode_bytes(0.5 * torch.sin(2 * math.pi * (200 + 50 * index) * times_N)[None], RATE, "flac")


def spoken(index: int, path: str = "0.flac") -> Sample:
    messages = [
        Message(role="user", content=[TextPart(text=f"say é {index}")]),
        Message(role="assistant", content=[AudioPart(path=path)]),
    ]
    return Sample(id=f"clip_{index}", messages=messages, task="tts")


def write_sound(folder: Path, count: int = 6, per_shard: int = 4) -> None:
    writer = ShardWriter(folder, per_shard)
    for index in range(count):
        codes = [] if index % 2 else encodings(index)
        writer.write(index, spoken(index), codes, {"0.flac": tone(index)})
    writer.close({})


def foreign(path: Path, members: list[dict[str, object]]) -> None:
    """A tar as others write it."""
    with webdataset.TarWriter(str(path)) as tar:
        for number, record in enumerate(members):
            tar.write({"__key__": f"dir/{number:04d}", **record})


def test_a_plain_webdataset_reader_reads_ours(tmp_path: Path) -> None:
    write_sound(tmp_path)
    urls = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    rows = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [json.loads(row["json"])["id"] for row in rows] == [f"clip_{i}" for i in range(6)]
    shards = Shards(tmp_path)
    for index, row in enumerate(rows):
        expected_N, rate = soundfile.read(io.BytesIO(row["0.flac"]), dtype="float32")
        waveform = shards[index].audio[0].load()
        assert rate == waveform.sample_rate and np.array_equal(waveform.samples_CN[0].numpy(), expected_N)
        assert ("codes.npz" in row) == bool(shards[index].encodings)


def test_every_sample_is_read_alone(tmp_path: Path) -> None:
    write_sound(tmp_path)
    shards = open_source(tmp_path)
    assert isinstance(shards, Shards) and len(shards) == 6 and shards.bad == ()
    for index in (5, 0, 3, 2):
        loaded = shards[index]
        assert loaded.sample == spoken(index)
        assert loaded.frames == (0 if index % 2 else 3 + index)
        back = pickle.loads(pickle.dumps(loaded))  # noqa: S301
        assert back.sample == loaded.sample and back.audio == loaded.audio
        for ours, theirs in zip(loaded.encodings, back.encodings, strict=True):
            assert torch.equal(ours[0], theirs[0])
    with pytest.raises(IndexError, match="no sample 6"):
        shards[6]


@pytest.mark.parametrize("extension", ["flac", "wav", "mp3", "ogg"])
def test_tars_of_others_are_indexed(tmp_path: Path, extension: str) -> None:
    content = encode_bytes(load_bytes(tone(1, 0.5)).samples_CN, RATE, extension)
    sound = {extension: content, "json": spoken(0, "somewhere/else.wav").model_dump(mode="json")}
    text = {
        "json": {
            "id": "t",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "task": "text",
        }
    }
    foreign(tmp_path / "a.tar", [sound, text, {"txt": "no json here"}])
    shards = open_source(str(tmp_path / "a.tar"))
    assert len(shards) == 3
    assert shards[0].audio[0].load().num_samples == pytest.approx(RATE // 2, abs=2500)  # a lossy codec pads
    assert shards[1].audio == ()
    with pytest.raises(BadSample, match=r"dir/0002: has no \.json"):
        shards[2]
    assert not (tmp_path / "index.json").exists(), "a single tar is indexed in memory"
    assert len(open_source(tmp_path)) == 3 and (tmp_path / "index.json").exists()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_any_length_and_folders_between(tmp_path: Path, form: int) -> None:
    """Members without a plain header are left to tarfile, and read the same."""
    keys = ["a", "ü", "deep/" + "d" * 90 + "/" + "x" * 60, "y" * 99]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        for number, key in enumerate(keys):
            folder = tarfile.TarInfo(f"folder{number}")
            folder.type = tarfile.DIRTYPE
            members = [
                ("json", json.dumps(spoken(number).model_dump(mode="json")).encode()),
                ("flac", tone(number)),
            ]
            for ending, content in members:
                info = tarfile.TarInfo(
                    f"{key}.{ending}" if len(key) != 99 or form != tarfile.USTAR_FORMAT else f"y.{ending}"
                )
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
                archive.addfile(folder)
    shards = open_source(tmp_path / "a.tar")
    assert [shards[n].sample for n in range(len(keys))] == [spoken(n) for n in range(len(keys))]
    for number in range(len(keys)):
        expected = load_bytes(tone(number)).samples_CN
        assert torch.equal(shards[number].audio[0].load().samples_CN, expected)


def test_any_fsspec_url(tmp_path: Path) -> None:
    write_sound(tmp_path)
    folder = f"memory://{uuid.uuid4().hex}"
    system = fsspec.filesystem("memory")
    for path in tmp_path.glob("*.tar"):
        system.pipe_file(f"{folder}/{path.name}", path.read_bytes())
    made = index_shards(folder)
    assert made.counts == index_shards(tmp_path).counts
    assert system.cat_file(f"{folder}/index.json") == (tmp_path / "index.json").read_bytes()
    here, there = open_source(tmp_path), open_source(folder)
    assert [there[i].sample for i in range(6)] == [here[i].sample for i in range(6)]
    assert torch.equal(there[5].audio[0].load().samples_CN, here[5].audio[0].load().samples_CN)
    with pytest.raises(ConfigError, match="does not exist"):
        open_source("memory://nothing/there")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_source("no-such-protocol://x/y")


@settings(max_examples=60)
@given(st.data())
def test_a_cut_tar_gives_the_samples_before_the_cut_and_one_bad_sample(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "cut"
    if not folder.exists():
        write_sound(folder, count=6, per_shard=6)
    whole = (folder / "shard-000000.tar").read_bytes()
    made = index_shards(folder)
    last = int(made.rows["offset"][-1] + made.rows["size"][-1])
    cut = data.draw(st.integers(0, last))
    (tmp_path := tmp_path_factory.mktemp("tar") / "shard-000000.tar").write_bytes(whole[:cut])
    complete = [n for n in range(6) if made.rows["offset"][n] + made.rows["size"][n] <= cut]
    for attempt in (tmp_path.parent, tmp_path.parent):  # scanned, then by the index
        shards = open_source(attempt)
        assert [shards[i].sample.id for i in range(len(shards))] == [f"clip_{n}" for n in complete]
        (bad,) = shards.bad
        assert bad.kind == "truncated tar" and str(tmp_path) in bad.place
        assert int(bad.place.rpartition(" ")[2]) <= cut


def test_a_tar_that_is_cut_after_it_was_indexed(tmp_path: Path) -> None:
    write_sound(tmp_path, count=6, per_shard=3)
    opened = open_source(tmp_path)
    second = tmp_path / "shard-000001.tar"
    second.write_bytes(second.read_bytes()[:1000])
    with pytest.raises(BadSample, match="cut short"):
        opened[5]
    again = open_source(tmp_path)
    assert len(again) == 3 and [bad.kind for bad in again.bad] == ["truncated tar"]
    second.unlink()
    missing = open_source(tmp_path)
    assert len(missing) == 3 and [bad.kind for bad in missing.bad] == ["missing shard"]
    assert read_index(tmp_path)["counts"]["samples"] == 6, "the index is left as it was"


def test_damage_in_the_middle_of_a_tar_is_found(tmp_path: Path) -> None:
    write_sound(tmp_path, count=3, per_shard=3)
    path = tmp_path / "shard-000000.tar"
    content = bytearray(path.read_bytes())
    offset = int(index_shards(tmp_path).rows["offset"][1])
    content[offset : offset + 512] = b"\xff" * 512
    path.write_bytes(bytes(content))
    (tmp_path / "index.safetensors").write_bytes(b"damaged, too")
    shards = open_source(tmp_path)
    assert len(shards) == 1 and [bad.place for bad in shards.bad] == [f"{path} at byte {offset}"]


def test_every_kind_of_bad_sample_is_named(tmp_path: Path) -> None:
    codes = encodings(0)[:1]
    buffer = io.BytesIO()
    np.savez(buffer, **{"0-0": np.full((8, 3), 1024)})
    record = spoken(0).model_dump(mode="json")
    rows: list[tuple[dict[str, object], str]] = [
        ({"json": b"{"}, "wrong JSON"),
        ({"json": b"\xff\xfe{}"}, "text encoding"),
        ({"json": {**record, "task": ""}}, "invalid record"),
        ({"json": {**record, "id": "1"}}, "missing codes"),
        ({"json": {**record, "id": "2"}, "codes.npz": b"no zip"}, "undecodable codes"),
        ({"json": {**record, "id": "3"}, "codes.npz": buffer.getvalue()}, "codes out of range"),
    ]
    foreign(tmp_path / "a.tar", [row for row, _ in rows])
    write_json(tmp_path / "index.json", {**FACTS, "shards": ["a.tar"]})
    shards = Shards(tmp_path)
    assert len(shards) == len(rows)
    for index, (_, kind) in enumerate(rows):
        with pytest.raises(BadSample, match=f"a\\.tar/dir/{index:04d}") as caught:
            shards[index]
        assert caught.value.kind == kind
    writer = ShardWriter(tmp_path / "ours", 4)
    writer.write(0, spoken(0), codes)
    writer.write(1, spoken(1, "2.flac"), codes, {"2.flac": b"fLaC and then nothing"})
    writer.write(2, spoken(0), codes)
    writer.write(3, spoken(3), [[*codes[0], *codes[0]]])
    writer.close(FACTS)
    ours = Shards(tmp_path / "ours")
    assert len(ours) == 3 and [(bad.kind, bad.id) for bad in ours.bad] == [("doubled id", "clip_0")]
    assert [bad.id for bad in Shards(tmp_path / "ours").bad] == ["clip_0"], "known to the index"
    for index, kind in ((0, "missing audio"), (1, "undecodable audio")):
        with pytest.raises(BadSample) as caught:
            ours[index].audio[0].load()
        assert caught.value.kind == kind and caught.value.id == f"clip_{index}"
    with pytest.raises(BadSample, match="codes of 2 audio parts, and the sample has 1"):
        ours[2]


def test_no_member_leads_out_of_the_tar_and_sound_needs_a_part(tmp_path: Path) -> None:
    secret = tmp_path / "secret.flac"
    secret.write_bytes(tone(1))
    foreign(tmp_path / "a.tar", [{"json": spoken(0, str(secret)).model_dump(mode="json")}])
    with pytest.raises(BadSample, match="neither codes, arrays nor sound"):
        open_source(tmp_path / "a.tar")[0]
    writer = ShardWriter(tmp_path / "ours", 4)
    for path in ("1.flac", "../0.flac", "0.exe"):
        with pytest.raises(ValueError, match="must be the path of an audio part"):
            writer.write(0, spoken(0, "../0.flac"), [], {path: tone(0)})


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl.gz"):
        (tmp_path / name).write_text("x")
        with pytest.raises(ConfigError, match="neither a manifest nor shards"):
            open_source(tmp_path / name)
    with pytest.raises(ConfigError, match="a folder without shards"):
        open_source(tmp_path)
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"give samples\.jsonl in it"):
        open_source(tmp_path)
    write_json(tmp_path / "index.json", {"shards": [], "codec": {"codebook_size": "1024"}})
    with pytest.raises(ConfigError, match=r"codec\.codebook_size must be a number"):
        open_source(tmp_path)
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(ConfigError, match="made anew"):
        open_source(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        open_source(f"pipe:touch {tmp_path}/ran")
    assert not (tmp_path / "ran").exists()


def test_opening_tars_of_others_leaves_the_fingerprint_of_a_stage_that_reads_them(tmp_path: Path) -> None:
    """A run that goes on finds its input as it was: the index made meanwhile is no part of it, all else is."""
    shards = tmp_path / "shards"
    shards.mkdir()
    foreign(shards / "a.tar", [{"json": spoken(0).model_dump(mode="json"), "flac": tone(0)}])
    kind = Stage("train", StageConfig, lambda config, context: {}, {}, "trains")
    stage = RecipeStage("train", kind, StageConfig(), tmp_path / "run", (), (shards,))
    before = stage.fingerprint({})
    assert len(open_source(shards)) == 1 and {path.name for path in shards.iterdir()} == {
        "a.tar",
        "index.json",
        "index.safetensors",
    }
    assert stage.fingerprint({}) == before
    foreign(shards / "b.tar", [{"json": spoken(1).model_dump(mode="json"), "flac": tone(1)}])
    assert stage.fingerprint({}) != before
    (shards / "b.tar").unlink()
    assert stage.fingerprint({}) == before
    elsewhere = tmp_path / "model"
    elsewhere.mkdir()
    write_json(elsewhere / "index.json", {})
    reading = RecipeStage("train", kind, StageConfig(), tmp_path / "run", (), (elsewhere,))
    with_index = reading.fingerprint({})
    (elsewhere / "index.json").unlink()
    assert reading.fingerprint({}) != with_index, "a file of that name elsewhere counts"


def zipped(**arrays: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name.replace('_', '-')}.npy", content)
    return buffer.getvalue()


def npy(array: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    """A .npy file, whose header may promise another shape."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": "<i8", "fortran_order": False, "shape": shape or array.shape}
    )
    return buffer.getvalue() + array.astype("<i8").tobytes()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            zipped(a0_0=npy(np.zeros((8, 2_000_000)))),
            r"122 MB unpacked, the limit is 64 MB; max_codes_mb raises it",
        ),
        (zipped(a0_0=npy(np.zeros((8, 4)), (8, 1 << 40))), r"its header says \(8, 1099511627776\)"),
    ],
    ids=["bomb", "lying header"],
)
def test_codes_that_unpack_to_too_much_are_never_unpacked(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    assert len(content) < 1 << 20
    with tarfile.open(tmp_path / "shard-000000.tar", "w") as tar:
        for name, member in (("a.json", sample(0).model_dump_json().encode()), ("a.codes.npz", content)):
            about = tarfile.TarInfo(name)
            about.size = len(member)
            tar.addfile(about, io.BytesIO(member))
    tracemalloc.start()
    source = open_source(tmp_path)
    with pytest.raises(BadSample, match=reason):
        source[0]
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_the_limit_of_unpacked_codes_can_be_changed(tmp_path: Path) -> None:
    write(tmp_path, 0, 2)
    assert open_source(tmp_path, max_codes_mb=1)[0].encodings
    with pytest.raises(BadSample, match=r"the limit is 0\.0001 MB"):
        open_source(tmp_path, max_codes_mb=0.0001)[0]
