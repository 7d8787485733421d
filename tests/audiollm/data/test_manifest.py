"""A manifest by number gives what reading all of it gives, and a broken line is named without the others being lost."""

from __future__ import annotations

import json
import pickle
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.audio import save
from audiollm.data.records import storage
from audiollm.data.records.manifest import Manifest, read_samples
from audiollm.data.records.opening import open_source
from audiollm.errors import BadSample, ConfigError


def line(id: str, text: str = "hello", path: str | None = None) -> bytes:
    parts: list[dict[str, object]] = [{"type": "text", "text": text}]
    parts += [{"type": "audio", "path": path, "start_s": 0.5, "end_s": 1.0}] if path else []
    record = {"id": id, "messages": [{"role": "user", "content": parts}], "task": "t"}
    return json.dumps(record, ensure_ascii=False).encode()


_lines = st.lists(
    st.one_of(
        st.text(max_size=40).map(lambda text: line("x", text)),
        st.sampled_from([b"", b" ", b"\r", b"\t " * 40, b"{", b"\xff\xfe"]),
    ),
    max_size=12,
)


@settings(max_examples=80)
@given(_lines, st.booleans(), st.integers(1, 100))
def test_by_number_as_line_by_line(lines: list[bytes], ends: bool, block: int) -> None:
    """The oracle is Python's own splitting of the whole file; blocks may end anywhere."""
    unique = [row.replace(b'"x"', f'"{n}"'.encode()) for n, row in enumerate(lines)]
    url = f"memory://{uuid.uuid4().hex}.jsonl"
    fsspec.filesystem("memory").pipe_file(url, b"\n".join(unique) + b"\n" * ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.read_blocks, "__defaults__", (block,))
        manifest = Manifest(url)
    # no sample is shorter than 64 bytes, so a longer line of blanks is a broken one
    expected = [(n, row) for n, row in enumerate(unique, start=1) if row.strip() or len(row) > 64]
    assert len(manifest) == len(expected)
    for index, (number, row) in enumerate(expected):
        try:
            record = json.loads(row.decode())
        except ValueError:
            with pytest.raises(BadSample, match=f":{number}") as caught:
                manifest[index]
            assert caught.value.kind == ("text encoding" if row.startswith(b"\xff") else "wrong JSON")
        else:
            assert (
                manifest[index].model_dump(mode="json")["messages"][0]["content"][0]["text"]
                == (record["messages"][0]["content"][0]["text"])
            )


def test_a_local_file_as_read_samples_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    broken = [b'{"id": "b"}', b"[]", line("é").decode().encode("utf-16")]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([line("a"), *broken, b"", line("last", "ü")]))
    manifest = pickle.loads(pickle.dumps(Manifest(path)))  # noqa: S301
    good = []
    kinds = []
    for index in range(len(manifest)):
        try:
            good.append(manifest[index])
        except BadSample as bad:
            kinds.append(bad.kind)
    assert [sample.id for sample in good] == ["a", "last"]
    assert kinds[:2] == ["invalid record", "invalid record"] and "text encoding" in kinds[2:]
    samples, bad_lines = read_samples(path)
    assert samples == good and [bad.kind for bad in bad_lines] == kinds
    with pytest.raises(IndexError):
        manifest[len(manifest)]


def test_a_file_that_shrinks_and_one_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(line("a") + b"\n" + line("b"))
    manifest = Manifest(path)
    path.write_bytes(line("a") + b"\n")
    assert manifest[0].id == "a"
    with pytest.raises(BadSample, match="cut short"):
        manifest[1]
    with pytest.raises(ConfigError, match="does not exist"):
        Manifest(tmp_path / "none.jsonl")


def test_audio_is_found_beside_the_manifest_and_decoded_when_asked_for(tmp_path: Path) -> None:
    samples_1N = torch.sin(torch.arange(16_000) / 9)[None]
    save(tmp_path / "sound/a.wav", samples_1N, 8_000)
    path = tmp_path / "samples.jsonl"
    rows = [line("a", path="sound/a.wav"), line("b", path="sound/none.wav"), line("c", path="samples.jsonl")]
    path.write_bytes(b"\n".join(rows))
    source = open_source(path)
    assert len(source) == 3 and source.name == str(path)
    waveform = source[0].audio[0].load()
    assert waveform.sample_rate == 8_000
    assert torch.allclose(waveform.samples_CN, samples_1N[:, 4_000:8_000], atol=1e-4)
    assert source[0].audio[0].load(sample_rate=16_000).num_samples == 8_000
    (first, *_), bad = read_samples(path)
    assert not bad and first.audio_parts()[0].path == str(tmp_path / "sound/a.wav"), (
        "as the whole file is read"
    )
    for index in (1, 2):
        loaded = source[index]  # reading the sample decodes nothing
        with pytest.raises(BadSample, match="audio: ") as caught:
            loaded.audio[0].load()
        assert caught.value.kind == "undecodable audio" and caught.value.id == "bc"[index - 1]


def test_audio_of_a_remote_manifest(tmp_path: Path) -> None:
    save(tmp_path / "a.flac", torch.zeros(1, 800), 800)
    folder = f"memory://{uuid.uuid4().hex}"
    system = fsspec.filesystem("memory")
    system.pipe_file(f"{folder}/sound/a.flac", (tmp_path / "a.flac").read_bytes())
    system.pipe_file(f"{folder}/s.jsonl", line("a", path="sound/a.flac") + b"\n" + line("b", path="no.flac"))
    source = open_source(f"{folder}/s.jsonl")
    assert source[0].audio[0].load().num_samples == 400
    with pytest.raises(BadSample, match="cannot be read"):
        source[1].audio[0].load()
