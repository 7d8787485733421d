"""The stage `generate_sound` on a linear autoencoder: one by one, together, edits, sounds within longer files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiollm.audio import load, save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import (
    AudioPart,
    Message,
    Sample,
    TextPart,
    VideoPart,
    write_samples,
)
from audiollm.evaluate.sound.generated_sounds import read_generated
from audiollm.files.atomic import read_jsonl
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.settings import (
    GenerateSoundConfig,
    SoundSamplingConfig,
)
from audiollm.flow.stages import GENERATE_SOUND
from audiollm.video.writing import write_video
from tests.audiollm.flow.toy import (
    AUTOENCODER,
    HOP,
    RATE,
    context_of,
    tone,
)


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


def test_sounds_that_are_sampled_together_are_those_that_are_sampled_alone(
    trained: Path, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lengths, and a video that cannot be read: one call for each length, and the rest is made."""
    samples, _ = read_samples(encoded / "scenes.jsonl")
    (tmp_path / "broken.mp4").write_text("no video")
    broken = VideoPart(path=str(tmp_path / "broken.mp4"))
    samples[2] = samples[2].with_parts(lambda part: broken if isinstance(part, VideoPart) else part)
    short = samples[5].audio_parts()[-1].model_copy(update={"end_s": 0.5})
    samples[5] = samples[5].with_parts(lambda part: short if isinstance(part, AudioPart) else part)
    write_samples(tmp_path / "samples.jsonl", samples)
    calls: list[tuple[int, int]] = []
    plain = SoundGenerator.sample_together

    def counted(
        self: SoundGenerator, wanted: Any, count: int, settings: SamplerSettings
    ) -> list[torch.Tensor]:
        calls.append((len(wanted), count))
        return plain(self, wanted, count, settings)

    monkeypatch.setattr(SoundGenerator, "sample_together", counted)
    made = []
    for size in (1, 16):
        folder = tmp_path / str(size)
        folder.mkdir()
        config = GenerateSoundConfig(
            model=trained, autoencoder=AUTOENCODER, samples=tmp_path / "samples.jsonl", split="all",
            sampling=SoundSamplingConfig(steps=4), batch_size=size,
        )  # fmt: skip
        assert GENERATE_SOUND.run(config, context_of(folder)) == {"sounds": 7, "set_aside": 1}
        assert [row["id"] for row in read_jsonl(folder / "set_aside.jsonl")] == [samples[2].id]
        rows = read_jsonl(folder / "generated.jsonl")
        assert [row["id"] for row in rows] == [each.id for each in samples if each is not samples[2]]
        made.append([load(folder / row["audio"]).samples_CN for row in rows])
    assert calls == [(1, RATE // HOP)] * 4 + [(1, RATE // HOP // 2)] + [(1, RATE // HOP)] * 2 + [
        (6, RATE // HOP),
        (1, RATE // HOP // 2),
    ]
    for alone_CN, together_CN in zip(*made, strict=True):
        torch.testing.assert_close(alone_CN, together_CN, atol=1e-4, rtol=0)


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
