"""A file that crashes its decoder, in a corpus that is encoded or trained on by one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from audiollm.audio import decoding_process, save
from audiollm.codec import load_codec
from audiollm.data.records.sample import AudioPart, Message, Sample
from tests.audiollm.audio.crashing_decoder import CRASHES, install, write
from tokenizer import AudioTokenizer, TokenizerConfig
from tokenizer.clips import ClipStore, find_clips
from tokenizer.continuous.data import StereoStore
from tokenizer.corpus.encoding import Coding, Corpus, planned_seconds, tokenize_corpus

TINY = TokenizerConfig(
    mel_hidden_size=16,
    hidden_size=16,
    encoder_layers=(1, 1),
    decoder_layers=(1, 1),
    latent_dim=8,
    codebook_size=16,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that crashes, between two that do not."""
    install(tmp_path / "hook", monkeypatch)
    folder = tmp_path / "in"
    for name in ("a.wav", "c.wav"):
        save(folder / name, 0.1 * torch.randn(1, 24_000), 24_000)
    write(folder / "b.mp3", CRASHES)
    yield folder
    decoding_process.end_all()


def test_tokenize_sets_it_aside_each_time(tmp_path: Path, folder: Path) -> None:
    AudioTokenizer(TINY).save_pretrained(tmp_path / "codec")
    codec = load_codec(tmp_path / "codec")
    samples = [
        Sample(
            id=path.stem,
            messages=[Message(role="assistant", content=[AudioPart(path=str(path))])],
            task="audio",
        )
        for path in sorted(folder.iterdir())
    ]
    corpus = Corpus(samples, [planned_seconds(row) for row in samples])
    for out in (tmp_path / "out", tmp_path / "out", tmp_path / "other"):
        counts, set_aside = tokenize_corpus(codec, corpus, out, Coding(tmp_path / "codec"), 2)
        assert counts["samples"] == 2
        assert [(row["place"], "crashes its decoder" in row["reason"]) for row in set_aside] == [
            (str(folder / "b.mp3"), True)
        ]


def test_a_codec_is_trained_without_it(folder: Path) -> None:
    clips = find_clips(folder)
    assert [(Path(bad.place).name, "crashes its decoder" in bad.reason) for bad in clips.bad] == [
        ("b.mp3", True)
    ]
    assert len(clips.train) + len(clips.test) == 2


@pytest.mark.parametrize("kind", [ClipStore, StereoStore])
def test_another_clip_is_drawn_for_one_that_crashes_when_it_is_decoded(
    folder: Path, kind: type[ClipStore] | type[StereoStore]
) -> None:
    found = find_clips(folder)
    write(found.train[0].path, CRASHES)
    store = kind([*found.train, *found.test], 24_000, cache_mb=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        assert store.draw(generator)[1].numel() > 0
    assert "crashes its decoder" in store.bad[0].reason
