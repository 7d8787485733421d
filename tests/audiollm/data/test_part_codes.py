"""Codes of audio parts in files beside a manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.opening import open_source
from audiollm.data.records.part_codes import save_part_codes
from audiollm.data.records.sample import AudioPart, Message, Sample, write_samples
from audiollm.errors import BadSample

CODES_KT = torch.randint(1024, (3, 7), generator=torch.Generator().manual_seed(0))


def sample(id: str, *parts: AudioPart) -> Sample:
    return Sample(id=id, messages=[Message(role="user", content=list(parts))], task="tts")


def test_a_manifest_gives_the_codes_that_its_parts_name(tmp_path: Path) -> None:
    save_part_codes(tmp_path / "codes" / "a.safetensors", CODES_KT)
    coded = AudioPart(path="a.wav", codes="codes/a.safetensors")
    elsewhere = AudioPart(path="b.wav", codes=str(tmp_path / "codes" / "a.safetensors"))
    plain = sample("none", AudioPart(path="c.wav"))
    write_samples(tmp_path / "s.jsonl", [sample("both", coded, elsewhere), plain])
    source = open_source(tmp_path / "s.jsonl")
    ((first_KT, second_KT),) = source[0].encodings
    assert torch.equal(first_KT, CODES_KT) and torch.equal(second_KT, CODES_KT)
    assert first_KT.dtype == torch.int64 and source[1].encodings == []
    moved, _ = read_samples(tmp_path / "s.jsonl")
    assert [part.codes for part in moved[0].audio_parts()] == [str(tmp_path / "codes/a.safetensors")] * 2
    line = json.loads((tmp_path / "s.jsonl").read_text().splitlines()[1])
    assert "codes" not in line["messages"][0]["content"][0], "other samples are written as before"


@pytest.mark.parametrize("broken", ["missing", "cut", "float", "flat", "other"])
def test_files_without_codes_are_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "a.safetensors"
    if broken == "cut":
        save_part_codes(path, CODES_KT)
        path.write_bytes(path.read_bytes()[:40])
    elif broken != "missing":
        tensor = {"float": CODES_KT.float(), "flat": CODES_KT[0].contiguous(), "other": CODES_KT}[broken]
        save_file({"weights" if broken == "other" else "codes": tensor}, path)
    write_samples(tmp_path / "s.jsonl", [sample("x", AudioPart(path="a.wav", codes="a.safetensors"))])
    with pytest.raises(BadSample, match=r"a\.safetensors") as told:
        open_source(tmp_path / "s.jsonl")[0]
    assert told.value.kind == "undecodable codes" and told.value.id == "x"


def test_codes_of_some_parts_alone_are_refused(tmp_path: Path) -> None:
    save_part_codes(tmp_path / "a.safetensors", CODES_KT)
    parts = AudioPart(path="a.wav", codes="a.safetensors"), AudioPart(path="b.wav")
    write_samples(tmp_path / "s.jsonl", [sample("x", *parts)])
    with pytest.raises(BadSample, match=r"none of b\.wav"):
        open_source(tmp_path / "s.jsonl")[0]
