"""The linear autoencoder: principal components as another library finds them, exact pieces, phases, its stage."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import librosa
import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.decomposition import PCA
from torch import Tensor

from audiollm.audio import save
from audiollm.autoencoder import Autoencoder, autoencoder_of_run, load_autoencoder
from audiollm.errors import ConfigError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from tokenizer.mel_pca import phases
from tokenizer.mel_pca.model import MelPCA, MelPCAConfig
from tokenizer.mel_pca.run import fit_mel_pca
from tokenizer.mel_pca.settings import FitMelPCAConfig

RATE = 16_000
SMALL = MelPCAConfig(mel_hop_samples=64, num_mels=24, latent_dim=12)
HOP = SMALL.hop_samples


def sweeps(seed: int, seconds: float = 2.0, channels: int = 1) -> Tensor:
    """Gliding harmonics that come and go over soft noise, `[C, N]`."""
    dice = np.random.default_rng(seed)
    time_N = np.arange(round(seconds * RATE)) / RATE
    made = dice.normal(0, 0.003, (channels, len(time_N)))
    for channel in made:
        for _ in range(3):
            first, last = dice.uniform(150, 1500, 2)
            begin, length = dice.uniform(0, seconds * 0.7), dice.uniform(0.2, 0.6)
            phase_N = 2 * np.pi * (first * time_N + (last - first) * time_N**2 / (2 * seconds))
            within_N = (time_N >= begin) & (time_N < begin + length)
            channel += within_N * sum(np.sin(k * phase_N) / k for k in (1, 2, 3)) * 0.1
    return torch.from_numpy(made).float()


def fitted(config: MelPCAConfig = SMALL) -> MelPCA:
    model = MelPCA(config)
    model.fit(sweeps(seed, channels=config.channels) for seed in range(8))
    return model


@pytest.fixture(scope="module")
def model() -> MelPCA:
    return fitted()


def in_pieces(x: Tensor, longest: int, seed: int) -> list[Tensor]:
    dice, pieces, start = np.random.default_rng(seed), [], 0
    while start < x.shape[1]:
        size = int(dice.integers(1, longest))
        pieces.append(x[:, start : start + size])
        start += size
    return pieces


def log_mels(config: MelPCAConfig, samples_CN: Tensor) -> Tensor:
    """A model that keeps every number in its place tells the log-mel frames themselves, `[T, X]`."""
    whole = MelPCA(MelPCAConfig(**{**vars(config), "latent_dim": config.numbers}))
    return whole.encode(samples_CN).T


def test_components_are_those_of_another_library(model: MelPCA) -> None:
    frames_TX = torch.cat([log_mels(SMALL, sweeps(seed)) for seed in range(8)]).double().numpy()
    other = PCA(SMALL.latent_dim, svd_solver="full").fit(frames_TX)
    unbiased = len(frames_TX) / (len(frames_TX) - 1)
    np.testing.assert_allclose(model.mean_X, other.mean_, atol=1e-4)
    np.testing.assert_allclose(model.deviation_D**2 * unbiased, other.explained_variance_, rtol=1e-3)
    likeness_D = np.abs((model.components_XD.numpy() * other.components_.T).sum(axis=0))
    np.testing.assert_allclose(likeness_D, 1, atol=1e-3)
    # the maximum-likelihood noise of probabilistic PCA is the mean of the variances left out
    np.testing.assert_allclose(model.noise**2 * unbiased, other.noise_variance_, rtol=1e-3)
    found = model.encode_distribution(sweeps(0))
    np.testing.assert_allclose(
        torch.exp(0.5 * found.log_variance), model.noise.expand_as(found.mean), rtol=1e-6
    )
    np.testing.assert_allclose(
        np.abs(found.mean), np.abs(other.transform(log_mels(SMALL, sweeps(0))).T), atol=0.02
    )


def test_a_fit_tells_the_share_that_it_keeps() -> None:
    shares = [
        MelPCA(MelPCAConfig(mel_hop_samples=64, num_mels=24, latent_dim=kept)).fit(map(sweeps, range(8)))
        for kept in (2, 12, SMALL.numbers)
    ]
    assert shares[0] < shares[1] < shares[2] == pytest.approx(1)


def test_frames_are_those_of_librosa() -> None:
    samples_CN = sweeps(1, seconds=0.512)
    margin = (HOP - SMALL.mel_hop_samples) // 2
    padded_N = np.pad(samples_CN[0].numpy(), (margin, HOP - SMALL.mel_hop_samples - margin))
    mel_MT = librosa.feature.melspectrogram(
        y=padded_N, sr=RATE, n_fft=HOP, hop_length=SMALL.mel_hop_samples, n_mels=24, power=1, center=False
    )
    ours_TX = log_mels(SMALL, samples_CN)
    np.testing.assert_allclose(ours_TX.reshape(-1, 24).T, np.log(np.maximum(mel_MT, 1e-3)), atol=1e-3)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("samples", [1, HOP, 4 * HOP + 1, 6 * HOP, 20 * HOP + 77])
def test_pieces_of_any_size_are_the_whole(channels: int, samples: int) -> None:
    config = MelPCAConfig(**{**vars(SMALL), "channels": channels})
    model = fitted(config)
    x_CN = sweeps(3, channels=channels)[:, :samples]
    whole = model.encode_distribution(x_CN)
    assert whole.mean.shape == (config.latent_dim, -(-samples // HOP))
    decoded_CN = model.decode(whole.mean)
    assert decoded_CN.shape == (channels, whole.mean.shape[1] * HOP)
    assert torch.equal(model.decode(whole.mean, samples), decoded_CN[:, :samples])
    for seed in range(10):
        parts = list(model.encode_stream(in_pieces(x_CN, 3 * HOP, seed)))
        assert torch.equal(torch.cat([part.mean for part in parts], dim=1), whole.mean)
        assert torch.equal(torch.cat([part.log_variance for part in parts], dim=1), whole.log_variance)
        streamed = list(model.decode_stream(in_pieces(whole.mean, 7, seed)))
        assert torch.equal(torch.cat(streamed, dim=1), decoded_CN)


def convergence(made_N: Tensor, wanted_MT: Tensor, model: MelPCA) -> float:
    """Distance of mel magnitudes, relative to the wanted ones."""
    found_XT = log_mels(model.config, made_N[None]).exp().T
    return float((found_XT - wanted_MT).norm() / wanted_MT.norm())


@pytest.mark.slow
def test_phases_are_as_good_as_those_of_a_whole_recording() -> None:
    """librosa's fast Griffin-Lim sees all frames at once; ours sees blocks, and may be little worse."""
    config = MelPCAConfig(num_mels=64, latent_dim=160)
    model = MelPCA(config)
    model.fit(sweeps(seed) for seed in range(60))
    for seed in range(30, 33):
        x_CN = sweeps(seed)
        wanted_XT = log_mels(config, x_CN).exp().T
        latent_DT = model.encode(x_CN)
        ours_CN = model.decode(latent_DT)
        mel_MT = wanted_XT.T.reshape(-1, config.num_mels).T.numpy()
        linear_FT = np.maximum(model.inverse_MF.T.numpy() @ mel_MT, 1e-5)
        theirs_N = librosa.griffinlim(
            linear_FT, n_iter=32, hop_length=config.mel_hop_samples, n_fft=config.hop_samples,
            center=False, random_state=0,
        )  # fmt: skip
        margin = (config.hop_samples - config.mel_hop_samples) // 2
        theirs_N = torch.from_numpy(theirs_N[margin:][: ours_CN.shape[1]])
        ours, theirs = (convergence(each, wanted_XT, model) for each in (ours_CN[0], theirs_N))
        assert ours < 1.25 * theirs and ours < 0.35, (ours, theirs)


def test_momentum_makes_phases_fit_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 12 iterations: 2 % nearer than without momentum; with its sign exchanged it is 2 % farther."""
    config = MelPCAConfig(num_mels=64, latent_dim=160)
    model = MelPCA(config)
    model.fit(sweeps(seed) for seed in range(60))
    monkeypatch.setattr(phases, "ITERATIONS", 12)

    def distance(momentum: float) -> float:
        monkeypatch.setattr(phases, "MOMENTUM", momentum)
        sounds = [sweeps(seed) for seed in range(30, 33)]
        wanted = [log_mels(config, x_CN).exp().T for x_CN in sounds]
        made = [model.decode(model.encode(x_CN))[0] for x_CN in sounds]
        return sum(
            convergence(made_N, wanted_XT, model) for made_N, wanted_XT in zip(made, wanted, strict=True)
        )

    assert distance(phases.MOMENTUM) < 0.99 * distance(0.0)


def test_phases_of_a_frame_are_drawn_once(model: MelPCA, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that was reconstructed ahead of its block begins there with the phases that it has."""
    latent_DT = model.encode(sweeps(3))
    drawn: list[int] = []
    draw = torch.rand

    def counted(size: tuple[int, ...], **settings: Any) -> Tensor:
        drawn.append(size[1])
        return draw(size, **settings)

    monkeypatch.setattr(torch, "rand", counted)
    model.decode(latent_DT)
    frames = latent_DT.shape[1] * SMALL.stride
    assert frames <= sum(drawn) < frames + phases.BLOCK_LATENTS * SMALL.stride


def test_normalized_latents_have_variance_one_on_average(model: MelPCA) -> None:
    latent_DT = torch.cat([model.encode(sweeps(seed)) for seed in range(8)], dim=1)
    normal_DT = model.normalize(latent_DT)
    assert float(normal_DT.var(dim=1).mean()) == pytest.approx(1, rel=0.02)
    spread_D, before_D = normal_DT.std(dim=1), latent_DT.std(dim=1)
    np.testing.assert_allclose(spread_D / spread_D[0], (before_D / before_D[0]).sqrt(), rtol=1e-3)
    torch.testing.assert_close(model.denormalize(normal_DT), latent_DT)


def test_saved_and_found_again(model: MelPCA, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "fit" / "model")
    for folder in (tmp_path / "fit", autoencoder_of_run(tmp_path)):
        loaded = load_autoencoder(folder)
        assert isinstance(loaded, Autoencoder) and loaded.digest == model.digest
        assert torch.equal(
            loaded.decode(loaded.encode_distribution(sweeps(5)).mean), model.decode(model.encode(sweeps(5)))
        )
    with pytest.raises(ConfigError, match="there are: none"):
        autoencoder_of_run(tmp_path / "fit")
    model.save_pretrained(tmp_path / "other" / "model")
    with pytest.raises(ConfigError, match="there are: fit, other"):
        autoencoder_of_run(tmp_path)


def test_bad_input_is_refused(model: MelPCA, tmp_path: Path) -> None:
    for bad in (torch.zeros(2, 100), torch.zeros(100)):
        with pytest.raises(ValueError, match="set_channels"):
            model.encode(bad)
    with pytest.raises(ValueError, match="samples >= 1"):
        model.encode(torch.zeros(1, 0))
    with pytest.raises(ValueError, match="finite"):
        model.encode(torch.full((1, 100), torch.nan))
    for bad, why in ((torch.zeros(12, 0), "one frame"), (torch.zeros(3, 5), "12, frames")):
        with pytest.raises(ValueError, match=why):
            model.decode(bad)
    with pytest.raises(ValueError, match="finite"):
        model.decode(torch.full((12, 3), torch.inf))
    with pytest.raises(ValueError, match="too few for 12"):
        MelPCA(SMALL).fit([sweeps(0)[:, :HOP]])
    with pytest.raises(ValueError, match="at most 96"):
        MelPCAConfig(num_mels=24, latent_dim=97)
    with pytest.raises(ValueError, match="at most 4"):
        FitMelPCAConfig(audio=tmp_path, num_mels=8, latent_dim=40)


def test_the_stage(tmp_path: Path) -> None:
    (tmp_path / "audio").mkdir()
    for seed in range(24):
        save(tmp_path / "audio" / f"{seed}.wav", sweeps(seed, seconds=1.0), RATE)
    (tmp_path / "audio" / "broken.wav").write_bytes(b"RIFF")
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, tmp_path, (), {})
    folder = tmp_path / "fit"
    folder.mkdir()
    context = Context(folder, recipe, Console(file=io.StringIO()), {})
    config = FitMelPCAConfig(audio=tmp_path / "audio", num_mels=40, latent_dim=32)
    figures = fit_mel_pca(config, context)
    assert 0.8 < figures["variance_kept"] < 1 and figures["latent_rate"] == 15.625
    assert figures["set_aside"] == 1 and figures["mel"] < 0.6
    assert (folder / "examples" / "0_decoded.wav").exists()
    assert load_autoencoder(folder).latent_dim == 32
    config = FitMelPCAConfig(audio=tmp_path / "audio", num_mels=80, latent_dim=320)
    with pytest.raises(ConfigError, match="too few for 320"):
        fit_mel_pca(config, context)
