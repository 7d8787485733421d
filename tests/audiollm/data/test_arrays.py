"""Named float arrays of samples, in shards and beside manifests."""

from __future__ import annotations

import json
import pickle
import tarfile
from pathlib import Path

import pytest
import torch

from audiollm.data.records.arrays import array_bytes
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Message, Sample, write_samples
from audiollm.data.records.shards import Shards, ShardWriter
from audiollm.errors import BadSample

MEAN_CT = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
FRAMES_FD = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def sample(id: str, **arrays: str) -> Sample:
    messages = [Message(role="assistant", content=[AudioPart(path="0.wav")])]
    return Sample(id=id, messages=messages, task="sound", arrays=arrays)


def shards_of(folder: Path, count: int = 3) -> Shards:
    writer = ShardWriter(folder, samples_per_shard=2)
    for index in range(count):
        arrays = {
            "latent_mean": array_bytes(MEAN_CT + index, "vae"),
            "frames": array_bytes(FRAMES_FD, "clip"),
        }
        writer.write(index, sample(f"s{index}"), [], arrays=arrays)
    writer.close({})
    return Shards(folder)


def test_shards_keep_arrays_without_codes_and_sound(tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(shards_of(tmp_path)))  # noqa: S301 (written a line above)
    for index in range(3):
        loaded = pickle.loads(pickle.dumps(source[index]))  # noqa: S301 (as a loader's worker sends it)
        assert torch.equal(loaded.array("latent_mean", "vae"), MEAN_CT + index)
        frames_FD = loaded.array("frames")
        assert frames_FD.dtype == torch.bfloat16 and torch.equal(frames_FD, FRAMES_FD)
    with pytest.raises(BadSample, match="no sound"):
        loaded.audio[0].load()


def test_a_manifest_names_files_of_arrays(tmp_path: Path) -> None:
    (tmp_path / "latents").mkdir()
    (tmp_path / "latents" / "a.safetensors").write_bytes(array_bytes(MEAN_CT, "vae"))
    write_samples(tmp_path / "s.jsonl", [sample("a", latent_mean="latents/a.safetensors"), sample("b")])
    source = open_source(tmp_path / "s.jsonl")
    assert torch.equal(source[0].array("latent_mean", made_by="vae"), MEAN_CT)
    (moved, plain), _ = read_samples(tmp_path / "s.jsonl")
    assert moved.arrays == {"latent_mean": str(tmp_path / "latents/a.safetensors")} and plain.arrays == {}
    line = json.loads((tmp_path / "s.jsonl").read_text().splitlines()[1])
    assert "arrays" not in line, "other samples are written as before"


def test_a_flipped_bit_anywhere_is_found_and_named(tmp_path: Path) -> None:
    content = array_bytes(MEAN_CT, "vae")
    path = tmp_path / "a.safetensors"
    write_samples(tmp_path / "s.jsonl", [sample("x", latent_mean="a.safetensors")])
    header = 8 + int.from_bytes(content[:8], "little")
    for place in [*range(0, header, 7), *range(header, len(content), 11)]:
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(bytes(damaged))
        loaded = open_source(tmp_path / "s.jsonl")[0]
        try:
            read = loaded.array("latent_mean", "vae")
        except BadSample as error:
            assert "latent_mean" in str(error) and error.id == "x"
        else:  # a bit of white space, or of a key that nobody reads
            assert place < header and torch.equal(read, MEAN_CT)


@pytest.mark.parametrize(
    ("made_by", "name", "kind"),
    [("other", "latent_mean", "array of another encoder"), (None, "text", "missing array")],
)
def test_arrays_of_another_encoder_and_missing_ones(
    tmp_path: Path, made_by: str | None, name: str, kind: str
) -> None:
    loaded = shards_of(tmp_path)[0]
    with pytest.raises(BadSample) as told:
        loaded.array(name, made_by)
    assert told.value.kind == kind and told.value.id == "s0"


def test_a_member_that_is_gone_is_named(tmp_path: Path) -> None:
    shards_of(tmp_path / "whole", 1)
    (tmp_path / "cut").mkdir()
    with (
        tarfile.open(tmp_path / "whole/shard-000000.tar") as whole,
        tarfile.open(tmp_path / "cut/shard-000000.tar", "w") as cut,
    ):
        for member in whole:
            if not member.name.endswith("frames.safetensors"):
                cut.addfile(member, whole.extractfile(member))
    with pytest.raises(BadSample, match=r"frames") as told:
        open_source(tmp_path / "cut")[0]
    assert told.value.kind == "missing array"


def test_only_float_arrays_with_proper_names_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float"):
        array_bytes(torch.arange(3), "vae")
    with pytest.raises(ValueError, match="has values"):
        array_bytes(torch.zeros(0, 3), "vae")
    with pytest.raises(ValueError, match="small letters"):
        ShardWriter(tmp_path, 2).write(0, sample("a"), [], arrays={"../up": array_bytes(MEAN_CT, "vae")})
