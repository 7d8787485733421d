"""The closed-form start: against NumPy's own decompositions, on two ranks, with a semantic half, and in the stage."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from audiollm.audio import save
from audiollm.files.atomic import read_json
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from tests.audiollm.train.two_ranks import on_two_ranks
from tokenizer.clips import Clip, ClipStore
from tokenizer.native.autoencoder import FUTURE_FRAMES, PAST_FRAMES
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.training import task as tokenizer_task
from tokenizer.training.linear_path import (
    LINEAR_PATH_RULES,
    RIDGE,
    SALIENCE_SHARE,
    _frames_of,
    fit_linear_path,
)
from tokenizer.training.settings import TrainTokenizerConfig
from tokenizer.training.task import TokenizerTask, TokenizerTaskConfig

SHAPE = {
    "mel_hidden_size": 16, "hidden_size": 24, "encoder_layers": (1, 1), "decoder_layers": (1, 1), "codebook_size": 16,
    "latent_dim": 8, "num_mels": 40,
}  # fmt: skip


def speech_like(rows: int, samples: int, seed: int = 0) -> Tensor:
    """Harmonic tones whose pitch glides and whose timbre and level change, with some noise, `[B, N]`."""
    dice = torch.Generator().manual_seed(seed)
    time_N = torch.arange(samples) / 24_000
    sounds = []
    for _ in range(rows):
        low, bend, tilt = torch.rand(3, generator=dice).tolist()
        turns_N = (100 + 150 * low) * time_N * (1 + 0.2 * bend * time_N)
        tone_N = torch.stack([torch.sin(2 * math.pi * k * turns_N) / k ** (0.5 + tilt) for k in range(1, 30)])
        level_N = 0.05 + 0.1 * (1 + torch.sin(2 * math.pi * (1 + 3 * tilt) * time_N))
        sounds.append(level_N * (tone_N.sum(0) + 0.1 * torch.randn(samples, generator=dice)))
    return torch.stack(sounds)


def new_model(**changes: object) -> AudioTokenizer:
    torch.manual_seed(0)
    return AudioTokenizer(TokenizerConfig(**{**SHAPE, "linear_path": True, **changes}))  # type: ignore[arg-type]


def test_the_maps_are_principal_components_and_their_ridge_regression() -> None:
    model = new_model(harmonic_source=True)
    crops = [speech_like(4, 9_600, seed) for seed in range(6)]
    figures = fit_linear_path(model, crops)
    assert model.encoder.linear is not None and model.decoder.linear is not None
    pairs = [_frames_of(model, crop_BN) for crop_BN in crops]
    features_SX = torch.cat([pair[0] for pair in pairs]).double().numpy()
    magnitudes_SY = torch.cat([pair[1] for pair in pairs]).double().numpy()
    assert features_SX.shape == (240, 4 * (40 + 64)) and magnitudes_SY.shape == (240, 4 * 481)
    weights = np.ones((4, 104))
    variances = features_SX.var(axis=0).reshape(4, 104)
    weights[:, 40:] = math.sqrt(SALIENCE_SHARE * variances[:, :40].sum() / variances[:, 40:].sum())
    centred_SX = (features_SX - features_SX.mean(axis=0)) * weights.flatten()
    left, deviations, _ = np.linalg.svd(centred_SX, full_matrices=False)
    made_SD = model.encoder.linear(torch.from_numpy(features_SX).float()).detach().double().numpy()
    kept_SD = left[:, :8] * deviations[:8]
    scale = math.sqrt(8 / (kept_SD.var(axis=0).sum()))
    signs = np.sign((made_SD * kept_SD).sum(axis=0))
    np.testing.assert_allclose(made_SD, signs * scale * kept_SD, atol=2e-3)
    assert made_SD.var(axis=0).sum() == pytest.approx(8, rel=1e-4)
    assert figures["features_kept"] == pytest.approx((deviations[:8] ** 2).sum() / (deviations**2).sum())
    gram = made_SD.T @ made_SD / len(made_SD) + RIDGE * np.eye(8)
    centred_SY = magnitudes_SY - magnitudes_SY.mean(axis=0)
    back_DY = np.linalg.solve(gram, made_SD.T @ centred_SY / len(made_SD))
    np.testing.assert_allclose(model.decoder.linear.weight.detach().numpy().T, back_DY, atol=2e-3)
    np.testing.assert_allclose(
        model.decoder.linear.bias.detach().numpy(), magnitudes_SY.mean(axis=0), atol=1e-4
    )
    explained = 1 - ((centred_SY - made_SD @ back_DY) ** 2).sum() / (centred_SY**2).sum()
    assert figures["magnitudes_explained"] == pytest.approx(explained, abs=1e-4)
    # before the first step latents are these components alone
    latents_BTD = model.latent(crops[0]).detach().flatten(0, 1)
    torch.testing.assert_close(latents_BTD, torch.from_numpy(made_SD[: len(latents_BTD)]).float())


def test_each_latent_frame_has_its_own_mel_frames_and_magnitudes() -> None:
    model, samples_BN = new_model(harmonic_source=True), speech_like(2, 9_600)
    context = model.encoder.shape.context_samples
    around_BCN = torch.nn.functional.pad(samples_BN[:, None], (context, context))
    own_BTX = model.encoder.frames_of_latents(model.encoder.mels(around_BCN))
    torch.testing.assert_close(own_BTX.unflatten(2, (4, -1)).flatten(1, 2), model.encoder.mel(samples_BN))
    latent_BTD = torch.randn(2, 10, 8)
    padded_BTD = torch.nn.functional.pad(latent_BTD, (0, 0, PAST_FRAMES, FUTURE_FRAMES))
    linear_BRCF = model.decoder.linear_magnitudes(padded_BTD)
    assert model.decoder.linear is not None and linear_BRCF is not None
    expected_BTY = model.decoder.linear(latent_BTD)
    torch.testing.assert_close(linear_BRCF.flatten(2).unflatten(1, (10, 4)).flatten(2), expected_BTY)


def test_sound_that_was_not_fitted_is_explained_too() -> None:
    model, held_out_BN = new_model(), speech_like(4, 9_600, seed=99)
    fit_linear_path(model, [speech_like(4, 9_600, seed) for seed in range(20)])
    assert model.encoder.linear is not None and model.decoder.linear is not None
    features_SX, magnitudes_SY = _frames_of(model, held_out_BN)
    with torch.no_grad():
        error_SY = model.decoder.linear(model.encoder.linear(features_SX)) - magnitudes_SY
    assert float(error_SY.var()) < 0.6 * float(magnitudes_SY.var())


def test_a_semantic_half_has_no_components() -> None:
    model = new_model(quantizer="split_rvq")
    crop_BN = speech_like(2, 9_600)
    fit_linear_path(model, [speech_like(4, 9_600, seed) for seed in range(6)])
    with torch.no_grad():
        semantic_BTD, acoustic_BTD = model.latent(crop_BN).chunk(2, dim=2)
    assert model.encoder.linear is not None and not model.encoder.linear.weight[:8].any()
    assert (
        float(semantic_BTD.std()) > 0.01 and float(acoustic_BTD.std()) > 0.3
    )  # what the blocks give; components
    alone = new_model()
    fit_linear_path(alone, [speech_like(4, 9_600, seed) for seed in range(6)])
    torch.testing.assert_close(acoustic_BTD, alone.latent(crop_BN).detach())


def test_silence_gives_maps_of_numbers() -> None:
    model = new_model(harmonic_source=True)
    figures = fit_linear_path(model, [torch.zeros(2, 9_600)])
    assert all(math.isfinite(value) for value in figures.values())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_only_the_two_maps_learn_slower() -> None:
    patterns = [rule.pattern for rule in LINEAR_PATH_RULES]
    names = [f"tokenizer.{name}" for name, _ in new_model(harmonic_source=True).named_parameters()]
    slower = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    maps = {
        f"tokenizer.{half}.linear.{part}" for half in ("encoder", "decoder") for part in ("weight", "bias")
    }
    assert slower == maps


@pytest.mark.parametrize(
    ("settings", "passes"),
    [({"teacher": "none"}, 5), ({"teacher": "own"}, 22), ({"teacher": "none", "linear_path": False}, 22)],
)
def test_a_start_in_closed_form_needs_fewer_passes(
    tmp_path: Path, settings: dict[str, object], passes: int
) -> None:
    assert TrainTokenizerConfig(audio=str(tmp_path), **settings).passes == passes  # type: ignore[arg-type]


def fit_on(folder: Path, ranks: Ranks) -> None:
    store = ClipStore([Clip(path, 0.0, None) for path in sorted((folder / "clips").glob("*"))], 24_000)
    config = TokenizerTaskConfig(seed=0, batch_size=4, crop_frames=6)
    tokenizer_task.FRAMES_FITTED = 5 * 24  # of five batches one rank has three
    task = TokenizerTask(new_model(harmonic_source=True), store, store, config, ranks=ranks)
    figures = task.fit_linear_path()
    torch.save((task.model.state_dict(), figures), folder / f"{ranks.world}-{ranks.rank}.pt")


def write_clips(folder: Path) -> None:
    folder.mkdir()
    for index, sound_N in enumerate(speech_like(6, 36_000)):
        save(folder / f"{index}.wav", sound_N[None], 24_000)


def test_two_ranks_fit_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_task, "FRAMES_FITTED", 0)  # put back what `fit_on` sets here
    write_clips(tmp_path / "clips")
    fit_on(tmp_path, ALONE)
    on_two_ranks(partial(fit_on), tmp_path)
    one, figures = torch.load(tmp_path / "1-0.pt", weights_only=True)
    for rank in (0, 1):
        other, other_figures = torch.load(tmp_path / f"2-{rank}.pt", weights_only=True)
        assert other_figures == pytest.approx(figures)
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-5, msg=key)


RECIPE = """
name: {name}
stages:
  - train_tokenizer:
      audio: {audio}
      teacher: none
      steps: 10
      batch_size: 2
      crop_frames: 6
      mel_hidden_size: 16
      hidden_size: 16
      blocks: [1, 1, 1, 1]
      {more}
"""


def test_the_stage_fits_first_and_goes_on_from_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_task, "REFIT_FRAMES_PER_CODE", 1)
    monkeypatch.setattr(tokenizer_task, "FRAMES_FITTED", 200)
    write_clips(tmp_path / "clips")

    def train(name: str, more: str) -> dict[str, float]:
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(RECIPE.format(name=name, audio=tmp_path / "clips", more=more))
        run_recipe(load_recipe(recipe, runs=tmp_path), Console(quiet=True))
        figures: dict[str, float] = read_json(tmp_path / name / "train_tokenizer" / "stage.json")["figures"]
        return figures

    figures = train("first", "")
    assert 0 < figures["features_kept"] <= 1 and 0 < figures["magnitudes_explained"] <= 1
    first = AudioTokenizer.from_pretrained(tmp_path / "first" / "train_tokenizer")
    assert first.config.linear_path
    assert "features_kept" not in train("second", f"start: {tmp_path / 'first' / 'train_tokenizer'}")
    assert AudioTokenizer.from_pretrained(tmp_path / "second" / "train_tokenizer").config.linear_path
    assert "features_kept" not in train("without", "linear_path: false")
    earlier = f"start: {tmp_path / 'without' / 'train_tokenizer'}"
    assert "features_kept" not in train("third", earlier)
    assert not AudioTokenizer.from_pretrained(tmp_path / "third" / "train_tokenizer").config.linear_path
    without = AudioTokenizer.from_pretrained(tmp_path / "without" / "train_tokenizer")
    assert not without.config.linear_path and without.encoder.linear is None
