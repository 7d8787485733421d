"""Augmentation of heard audio: the effect of each setting, what it preserves, and when it is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from audiollm.audio import save
from audiollm.data.hearing.augment import augment_features, warp_frequencies
from audiollm.data.hearing.augmentation import Augmentation
from audiollm.data.hearing.features import ClipFeatures, FeatureShape, HeardClips, clip_features, mel_features
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import AudioPart, Sample, write_samples
from audiollm.data.records.source import AudioClip
from audiollm.errors import BadSample
from audiollm.files.set_aside import SetAside
from audiollm.supervised.corpus.batches import Batching, BatchMaker, evaluation_packs
from audiollm.supervised.corpus.survey import survey_sources
from tests.audiollm.supervised.heard_samples import SHAPE, asked, small_template, sound
from tests.audiollm.supervised.train_samples import SMALL, run_stage, settings_of

NOTHING = Augmentation(time_masks=0, mel_masks=0, gain_db=0, tilt_db=0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frames_of(clip: ClipFeatures) -> Tensor:
    return torch.cat([window.mel_MF for window in clip.windows], dim=1)


def varied(clip: ClipFeatures, seed: int = 0, shape: FeatureShape = SHAPE, **changes: Any) -> Tensor:
    config = Augmentation.model_validate({**NOTHING.model_dump(), **changes})
    return frames_of(augment_features(clip, config, shape, generator(seed)))


@settings(max_examples=40)
@given(
    samples=st.integers(1, 50_000),
    seed=st.integers(0, 1000),
    padded=st.booleans(),
    per_position=st.sampled_from([2, 8]),
)
def test_windows_frames_and_rows_stay(samples: int, seed: int, padded: bool, per_position: int) -> None:
    """The input clip is left unchanged, because it is kept for the next pass."""
    shape = FeatureShape(20, 40, 2, padded, per_position)
    clip = mel_features(torch.randn(1, samples, generator=generator(seed)), shape)
    before = frames_of(clip).clone()
    made = augment_features(clip, Augmentation(shift=1.0), shape, generator(seed))
    assert [w.rows for w in made.windows] == [w.rows for w in clip.windows]
    assert [w.mel_MF.shape for w in made.windows] == [w.mel_MF.shape for w in clip.windows]
    assert all(window.mel_MF.is_contiguous() for window in made.windows)
    assert torch.equal(frames_of(clip), before)
    assert torch.isfinite(frames_of(made)).all()


def test_the_same_draw_is_the_same_and_another_is_not() -> None:
    clip, config = mel_features(sound(1.0), SHAPE), Augmentation(shift=1.0)
    first, again, other = (frames_of(augment_features(clip, config, SHAPE, generator(n))) for n in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_nothing_asked_for_is_nothing_done() -> None:
    clip = mel_features(sound(1.0), SHAPE)
    assert torch.equal(varied(clip), frames_of(clip))


def test_a_gain_is_that_of_the_recording() -> None:
    """A recording 6 dB louder has the features that the gain makes: closed form, through the mel spectrogram itself."""
    clip = mel_features(sound(1.0), SHAPE)
    made = varied(clip, seed=1, gain_db=6.0)
    drawn_db = ((made - frames_of(clip)).mean() * 40).item()
    assert 0.5 < abs(drawn_db) <= 6.0
    louder = mel_features(sound(1.0) * 10 ** (drawn_db / 20), SHAPE)
    torch.testing.assert_close(made, frames_of(louder), atol=1e-4, rtol=0)


def test_levels_and_tilts_are_spread_over_what_is_asked_for() -> None:
    clip = ClipFeatures(mel_features(sound(0.1), SHAPE).windows)
    plain = frames_of(clip)
    gains_db = torch.stack([(varied(clip, n, gain_db=10.0) - plain).mean() * 40 for n in range(300)])
    assert gains_db.abs().max() <= 10 and gains_db.min() < -9 and gains_db.max() > 9
    assert abs(gains_db.mean()) < 1.2  # 3.6 sigma of 300 draws of a uniform one of +-10
    for seed in range(5):
        tilt_db_M = ((varied(clip, seed, tilt_db=8.0) - plain) * 40)[:, 0]
        steps = tilt_db_M.diff()
        assert torch.allclose(steps, steps.mean().expand_as(steps), atol=1e-3)
        assert abs(tilt_db_M[0] + tilt_db_M[-1]) < 1e-3 and 0 < abs(tilt_db_M[-1]) <= 8


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.2])
@pytest.mark.parametrize("tone_hz", [440.0, 1500.0, 3900.0])
def test_warped_tones_are_tones_of_other_frequencies(factor: float, tone_hz: float) -> None:
    """The loudest bin is that of a tone at the multiplied frequency, which the mel spectrogram itself says."""
    shape = FeatureShape(80, 400, 2, False, 2)

    def tone_mel(frequency_hz: float) -> Tensor:
        seconds = torch.arange(16_000) / 16_000
        samples = 0.3 * torch.sin(2 * torch.pi * frequency_hz * seconds)
        return frames_of(mel_features(samples[None], shape))[:, 20:80].mean(dim=1, keepdim=True)

    warped, asked_for = warp_frequencies(tone_mel(tone_hz), factor), tone_mel(tone_hz * factor)
    assert abs(int(warped.argmax()) - int(asked_for.argmax())) <= 1
    assert factor == 1 or abs(int(warped.argmax()) - int(tone_mel(tone_hz).argmax())) >= 2
    if factor == 1:
        assert torch.equal(warped, asked_for)


def test_a_frequency_warp_is_one_for_the_whole_clip_and_spread_evenly() -> None:
    clip = mel_features(sound(1.0), SHAPE)
    plain = frames_of(clip)
    factors = torch.tensor(
        [1 + 0.2 * (2 * torch.rand((), generator=generator(seed)).item() - 1) for seed in range(20)]
    )
    assert factors.min() < 0.9 and factors.max() > 1.1
    for seed, factor in enumerate(factors.tolist()):
        warped = varied(clip, seed, frequency_warp=0.2)
        torch.testing.assert_close(warped, warp_frequencies(plain, factor), atol=1e-5, rtol=0)


def test_masks_are_as_many_and_as_wide_as_asked_for_and_hold_the_mean() -> None:
    clip = mel_features(sound(1.2), SHAPE)  # 120 frames, 20 bins
    plain, widths = frames_of(clip), []
    for seed in range(200):
        made = varied(clip, seed, time_masks=1, time_mask_s=0.3, time_mask_share=0.9)
        hidden_F = (made != plain).any(dim=0)
        assert torch.all(made[:, hidden_F] == plain.mean())
        places = hidden_F.nonzero()
        assert not len(places) or int(places[-1] - places[0]) + 1 == len(places)  # one stretch
        widths.append(len(places))
    assert min(widths) == 0 and max(widths) == 30 and 13 < sum(widths) / 200 < 17
    capped = [
        int((varied(clip, n, time_masks=1, time_mask_s=9.0, time_mask_share=0.1) != plain).any(dim=0).sum())
        for n in range(60)
    ]
    assert max(capped) == 12  # a tenth of the clip
    bands = [
        int((varied(clip, n, mel_masks=2, mel_mask_share=0.15) != plain).any(dim=1).sum()) for n in range(60)
    ]
    assert max(bands) in (5, 6) and any(width > 3 for width in bands)  # two of up to 3 bins


def test_a_shift_moves_the_end_before_the_beginning() -> None:
    clip = mel_features(sound(1.0), SHAPE)  # 100 frames
    plain, places = frames_of(clip), set()
    for seed in range(50):
        made = varied(clip, seed, shift=0.3)
        (moved,) = [n for n in range(100) if torch.equal(made, plain.roll(n, dims=1))]
        places.add(moved)
    assert max(places) < 30 and len(places) > 15


def test_silence_that_fills_a_window_up_stays_behind_the_sound() -> None:
    """The encoder repeats the last frame of a window that is filled up: it must be silence still."""
    shape = FeatureShape(20, 100, 1, padded=True)
    clip = mel_features(sound(0.7), shape)
    plain = frames_of(clip)
    assert plain.shape[1] == 73
    for seed in range(20):
        made = varied(
            clip, seed, shape, shift=1.0, time_masks=3, time_mask_share=0.5, mel_masks=2, mel_mask_share=0.5
        )
        assert torch.equal(made[:, 70:], plain[:, 70:]) and not torch.equal(made[:, :70], plain[:, :70])


# In training


def write_source(folder: Path, samples: int) -> Path:
    rows = []
    for number in range(samples):
        save(folder / f"{number}.wav", sound(0.3, number, 2500.0 if number % 2 else 300.0), 16_000)
        split = "test" if number >= samples - 2 else "train"
        messages = asked("which tone?", "high" if number % 2 else "low")
        user = messages[0].model_copy(
            update={"content": [AudioPart(path=f"{number}.wav"), *messages[0].content[1:]]}
        )
        rows.append(
            Sample(id=f"s{number}", messages=[user, messages[1]], task="tone", metadata={"split": split})
        )
    write_samples(folder / "samples.jsonl", rows)
    return folder / "samples.jsonl"


def test_each_source_has_its_own_and_evaluations_none(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_source(tmp_path / name, 4)
    sources = [open_source(tmp_path / name / "samples.jsonl") for name in ("one", "two")]
    template, aside = small_template(), SetAside(tmp_path / "aside.jsonl", "test", [])
    found = survey_sources(sources, template, 200, "cut", aside, lambda: None, SHAPE)

    def mels(*augmentations: Augmentation | None) -> list[Tensor]:
        batching = Batching(
            batch_size=4, max_tokens=400, max_length=200, text_dropout=0, speaker_dropout=0, corrupt_codes=0,
            encoder=SHAPE, augment=augmentations,
        )  # fmt: skip
        maker = BatchMaker(sources, None, found, template, batching, seed=0)
        first = maker(5).packs[0].features
        again = BatchMaker(sources, None, found, template, batching, seed=0)(5).packs[0].features
        assert first is not None and again is not None
        assert torch.equal(first.mel_MX, again.mel_MX)  # whatever was made before: a function of the step
        held = evaluation_packs(sources, found, template, batching, aside)["tone"][0].features
        assert held is not None
        plain = [clip_features(source[n].audio[0], SHAPE) for source in sources for n in (2, 3)]
        heard = held.mel_MX[:, : sum(frames_of(clip).shape[1] for clip in plain)]
        assert torch.equal(heard, torch.cat([frames_of(clip) for clip in plain], dim=1))
        return list(first.mel_MX.split(list(first.frames), dim=1))

    plain, both, second = mels(), mels(NOTHING, Augmentation()), mels(None, Augmentation())
    assert len(plain) == len(both) == len(second)
    same = [torch.equal(one, other) for one, other in zip(plain, second, strict=True)]
    assert any(same) and not all(same)


def test_features_are_made_once_and_kept_while_there_is_room(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / f"{name}.wav", sound(0.5), 16_000)
    first, second = (AudioClip(name, name, str(tmp_path / f"{name}.wav")) for name in ("a", "b"))
    size = sum(window.mel_MF.nbytes for window in clip_features(first, SHAPE).windows)
    heard = HeardClips(SHAPE, size)
    made = {"a": heard("a", first), "b": heard("b", second)}
    for name in ("a", "b"):
        (tmp_path / f"{name}.wav").unlink()
    assert heard("a", first) is made["a"]
    with pytest.raises(BadSample):
        heard("b", second)


def understanding(**values: Any) -> dict[str, Any]:
    encoder = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_mel_bins": 20, "stem": "conv2d"}
    model = {**SMALL, "dropout": 0.0, "audio_encoder": {**encoder, "stem_channels": 8}}
    given = {
        "audio_in": "features",
        "shape": model,
        "ema_decay": 0,
        "text_weight": 1.0,
        "learning_rate": 1e-2,
    }
    return given | {"augment": {"gain_db": 3, "tilt_db": 0, "mel_masks": 0}, "batch_size": 8} | values


def test_a_run_that_is_cut_short_ends_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; and without the variation it ends elsewhere, so that the test could fail."""
    manifest = str(write_source(tmp_path, 10))
    whole = run_stage(tmp_path / "whole", manifest, **understanding())

    class Cut(Exception):
        pass

    seen: list[int] = []
    drawn = BatchMaker.__call__

    def stops(self: BatchMaker, step: int) -> Any:
        seen.append(step)
        if step == 7:
            raise Cut
        return drawn(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(BatchMaker, "__call__", stops)
        with pytest.raises(Cut):
            run_stage(tmp_path / "cut", manifest, checkpoint_seconds=0, **understanding())
    seen.clear()
    resumed = run_stage(tmp_path / "cut", manifest, checkpoint_seconds=0, **understanding())
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1] and resumed["text_loss"] == whole["text_loss"]
    plain = run_stage(tmp_path / "plain", manifest, **understanding(augment=None))
    assert plain["text_loss"] != whole["text_loss"]


@pytest.mark.slow
def test_two_tones_are_told_apart_through_the_2d_stem(tmp_path: Path) -> None:
    manifest = str(write_source(tmp_path, 26))
    figures = run_stage(tmp_path / "run", manifest, **understanding(steps=100))
    assert figures["text_loss"] < 0.1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"augment": {}}, "audio_in is codes"),
        ({"samples": [{"path": "shards", "augment": {"shift": 1}}]}, "audio_in is codes"),
        ({"audio_in": "features", "augment": {"time_mask": 2}}, "Extra inputs"),
        ({"audio_in": "features", "augment": {"shift": 1.5}}, "less than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        settings_of({"samples": "shards", **values})


def test_a_sources_settings_take_the_place_of_the_stages() -> None:
    sources = [{"path": "shards"}, {"path": "shards", "augment": {"shift": 1}}]
    found = settings_of({"samples": sources, "audio_in": "features", "augment": {"gain_db": 3}}).augmentations
    assert found == (Augmentation(gain_db=3), Augmentation(shift=1))
    assert settings_of({"samples": "shards"}).augmentations == (None,)
