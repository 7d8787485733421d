"""The continuous variant: the same latents however it is called, its divergence, its stereo image, its training."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from audiollm.audio import save, set_channels
from audiollm.autoencoder import Autoencoder, load_autoencoder
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_jsonl
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.train.loop.loop import LoopConfig, step_generator, train
from tokenizer.clips import Clip
from tokenizer.continuous.data import GAIN_DB, StereoStore, stereo_crops
from tokenizer.continuous.model import AudioVAE, Posterior, VAEConfig, stereo_views
from tokenizer.continuous.run import vae_config
from tokenizer.continuous.settings import TrainVAEConfig
from tokenizer.continuous.stage import TRAIN_VAE
from tokenizer.continuous.task import VAETask, VAETaskConfig
from tokenizer.native.layers import mel_filters
from tokenizer.native.pitch import PitchTarget
from tokenizer.training.discriminators import DiscriminatorConfig
from tokenizer.training.losses import MELS, WINDOWS, ReconstructionLoss

HOP = 2048
SMALL = VAEConfig(mel_hidden_size=24, hidden_size=32, encoder_layers=(1, 1), decoder_layers=(1, 1))
GAME = DiscriminatorConfig((2,), (512,), 2, 4, 2, 8, (1,), 8)
CPU = torch.device("cpu")


@pytest.fixture(
    scope="module",
    params=[{}, {"harmonic_source": True}, {"phase_band_hz": 700.0}],
    ids=["free", "harmonic", "phase"],
)
def model(request: pytest.FixtureRequest) -> AudioVAE:
    torch.manual_seed(0)
    return AudioVAE(replace(SMALL, **request.param)).eval()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Clip]:
    """A chord that wanders from left to right, a mono click track at 22.05 kHz, and noise in antiphase."""
    folder = tmp_path_factory.mktemp("stereo")
    time_N = torch.arange(44_100) / 44_100
    chord_N = sum(torch.sin(2 * torch.pi * f * time_N) for f in (220, 277, 330)) * 0.1
    pan_N = time_N
    click_N = (torch.arange(11_025) % 5000 < 40).float() * 0.3
    noise_N = torch.randn(22_050, generator=torch.Generator().manual_seed(0)) * 0.05
    save(folder / "chord.wav", torch.stack([chord_N * (1 - pan_N), chord_N * pan_N]), 44_100)
    save(folder / "click.wav", click_N[None], 22_050)
    save(folder / "noise.wav", torch.stack([noise_N, -noise_N]), 44_100)
    return [Clip(folder / f"{name}.wav", 0.0, None) for name in ("chord", "click", "noise")]


def context_of(folder: Path) -> Context:
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    return Context(folder, recipe, Console(file=io.StringIO()), {})


def stereo(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(2, samples, generator=torch.Generator().manual_seed(seed)) * 0.1


def in_pieces(x: Tensor, seed: int, longest: int) -> list[Tensor]:
    dice, pieces, start = torch.Generator().manual_seed(seed), [], 0
    while start < x.shape[1]:
        size = int(torch.randint(1, longest, (1,), generator=dice))
        pieces.append(x[:, start : start + size])
        start += size
    return pieces


def test_published_shape() -> None:
    config = VAEConfig()
    assert (config.sample_rate, config.hop_samples, config.latent_dim) == (44_100, 2048, 64)
    small = AudioVAE(SMALL)
    assert small.latent_rate == pytest.approx(21.533, abs=1e-3)
    assert small.encode(torch.zeros(2, 397_312)).shape == (64, 194)  # ThinkSound's default clip


@pytest.mark.parametrize("samples", [1, 2, HOP - 1, HOP, HOP + 1, 7 * HOP, 8 * HOP, 8 * HOP + 1, 44_100])
def test_lengths(model: AudioVAE, samples: int) -> None:
    latent_DT = model.encode(stereo(samples))
    frames = -(-samples // HOP)
    assert latent_DT.shape == (64, frames)
    decoded_CN = model.decode(latent_DT)
    assert decoded_CN.shape == (2, frames * HOP)
    assert bool(torch.isfinite(decoded_CN).all()) and float(decoded_CN.abs().max()) <= 1
    assert torch.equal(model.decode(latent_DT, num_samples=samples), decoded_CN[:, :samples])


@pytest.mark.parametrize("samples", [5, 3 * HOP + 17, 8 * HOP, 21 * HOP + 1234])
def test_latents_and_sound_are_the_same_however_they_are_made(model: AudioVAE, samples: int) -> None:
    """Alone, in pieces of any size, and before silence: bit for bit."""
    x_CN = stereo(samples, seed=samples)
    whole = model.encode_distribution(x_CN)
    for longest in (9000, 70_000):
        parts = list(model.encode_stream(in_pieces(x_CN, longest, longest)))
        assert torch.equal(torch.cat([part.mean for part in parts], dim=1), whole.mean)
        assert torch.equal(torch.cat([part.log_variance for part in parts], dim=1), whole.log_variance)
    padded_CN = torch.nn.functional.pad(x_CN, (0, 9 * HOP))
    assert torch.equal(model.encode(padded_CN)[:, : whole.mean.shape[1]], whole.mean)
    decoded_CN = model.decode(whole.mean)
    for longest in (2, 5, 30):
        streamed = list(model.decode_stream(in_pieces(whole.mean, longest, longest)))
        assert torch.equal(torch.cat(streamed, dim=1), decoded_CN)


def test_pieces_give_what_the_whole_gives(model: AudioVAE) -> None:
    """Windows with carried context against one pass of the training forward's halves."""
    x_CN = stereo(20 * HOP)
    whole_TD = model.encoder(stereo_views(x_CN)[None])[0].detach()
    torch.testing.assert_close(model.encode(x_CN), whole_TD[:, :64].T, atol=1e-5, rtol=1e-4)
    latent_DT = model.encode(x_CN)
    at_once_CN = model.decoder(latent_DT.T[None])[0].detach().clamp(-1, 1)
    torch.testing.assert_close(model.decode(latent_DT), at_once_CN, atol=1e-5, rtol=1e-4)


def test_bad_input_is_refused(model: AudioVAE) -> None:
    for bad in (torch.zeros(1, 100), torch.zeros(100), torch.zeros(2, 0), torch.zeros(1, 2, 100)):
        with pytest.raises(ValueError, match="set_channels"):
            model.encode(bad)
    assert model.encode(set_channels(torch.zeros(1, 100), 2)).shape == (64, 1)
    with pytest.raises(ValueError, match="finite"):
        model.encode(torch.full((2, 100), torch.nan))
    for bad, why in ((torch.zeros(64, 0), "one frame"), (torch.zeros(32, 3), "64, frames")):
        with pytest.raises(ValueError, match=why):
            model.decode(bad)
    with pytest.raises(ValueError, match="finite"):
        model.decode(torch.full((64, 3), torch.inf))


def test_divergence_equals_torch() -> None:
    posterior = Posterior(torch.randn(3, 5), torch.randn(3, 5) * 2)
    given = Normal(posterior.mean, torch.exp(posterior.log_variance / 2))
    theirs = kl_divergence(given, Normal(0.0, 1.0))
    torch.testing.assert_close(posterior.divergence(), theirs)


def test_draws_have_the_mean_and_the_variance() -> None:
    mean, log_variance = torch.tensor([[3.0], [-1.0]]), torch.tensor([[0.5], [-4.0]])
    posterior = Posterior(mean.expand(2, 20_000), log_variance.expand(2, 20_000))
    draw = posterior.sample(torch.Generator().manual_seed(0))
    assert torch.equal(draw, posterior.sample(torch.Generator().manual_seed(0)))
    torch.testing.assert_close(draw.mean(1, keepdim=True), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(draw.var(1, keepdim=True), log_variance.exp(), atol=0, rtol=0.05)


def test_the_deviation_is_stable_audios(model: AudioVAE) -> None:
    x_CN = stereo(8 * HOP)
    raw_TD = model.encoder(stereo_views(x_CN)[None])[0].detach()[:, 64:]
    deviation_DT = torch.exp(model.encode_distribution(x_CN).log_variance / 2)
    torch.testing.assert_close(deviation_DT, (torch.nn.functional.softplus(raw_TD) + 1e-4).T)


def test_normalized_draws_have_mean_0_and_variance_1() -> None:
    torch.manual_seed(1)
    model = AudioVAE(SMALL)
    sounds = [stereo(40_000, seed=i) * 3**i for i in range(3)]
    model.measure_latents(sounds)
    dice = torch.Generator().manual_seed(2)
    posteriors = [model.encode_distribution(x) for x in sounds]
    draws = [posterior.sample(dice) for posterior in posteriors for _ in range(60)]
    normal_DT = model.normalize(torch.cat(draws, dim=1))
    torch.testing.assert_close(normal_DT.mean(1), torch.zeros(64), atol=0.05, rtol=0)
    torch.testing.assert_close(normal_DT.var(1), torch.ones(64), atol=0.08, rtol=0)
    batch_BDT = torch.stack([draws[0], draws[1]])
    torch.testing.assert_close(model.denormalize(model.normalize(batch_BDT)), batch_BDT)
    with pytest.raises(ValueError, match="no clip"):
        model.measure_latents([])


def test_the_latent_hears_both_channels_and_their_phase(model: AudioVAE) -> None:
    x_1CN = stereo(6 * HOP)[None].requires_grad_()
    model.encoder(stereo_views(x_1CN)).square().sum().backward()
    left, right = x_1CN.grad[0].abs().sum(dim=1)  # type: ignore[index]
    assert float(left) > 0 and float(right) > 0
    x_CN = stereo(6 * HOP)
    x_CN[1] = x_CN[0] * 0.3
    latent_DT = model.encode(x_CN)
    swapped_DT, antiphase_DT = model.encode(x_CN.flip(0)), model.encode(x_CN * torch.tensor([[1.0], [-1.0]]))
    assert float((swapped_DT - latent_DT).abs().max()) > 1e-2
    assert float((antiphase_DT - latent_DT).abs().max()) > 1e-2  # left and right alone would be the same


def test_every_mel_band_hears_something_at_44_kHz() -> None:
    for window, mels in [*zip(WINDOWS, MELS, strict=True), (SMALL.n_fft, SMALL.num_mels)]:
        assert float(mel_filters(44_100, window, mels).sum(dim=0).min()) > 0


def test_saving(model: AudioVAE, tmp_path: Path) -> None:
    other = AudioVAE(replace(SMALL, latent_dim=16))
    other.measure_latents([stereo(30_000)])
    other.save_pretrained(tmp_path)
    again = AudioVAE.from_pretrained(tmp_path)
    assert again.config == other.config and not again.training
    assert torch.equal(again.encode(stereo(5000)), other.encode(stereo(5000)))
    assert torch.equal(again.latent_std_D, other.latent_std_D)
    with pytest.raises(ConfigError):
        AudioVAE.from_pretrained(tmp_path / "elsewhere")


def test_store_keeps_stereo_and_level(clips: list[Clip]) -> None:
    store = StereoStore(clips, 44_100)
    assert store.duration_s == pytest.approx(2.0)
    chord_CN, click_CN, noise_CN = (store[i] for i in range(3))
    assert chord_CN.shape == (2, 44_100) and not torch.equal(chord_CN[0], chord_CN[1])
    assert click_CN.shape == (2, 22_050) and torch.equal(click_CN[0], click_CN[1])
    torch.testing.assert_close(noise_CN[0], -noise_CN[1])
    assert float(noise_CN.std()) == pytest.approx(0.05, rel=0.02)
    assert [len(samples_CN) for _, samples_CN in store.picked(2)] == [2, 2]


def test_long_clips_are_taken_in_parts(tmp_path: Path) -> None:
    ramp_CN = torch.linspace(-0.9, 0.9, 45 * 2000).repeat(2, 1)
    save(tmp_path / "long.wav", ramp_CN, 2000)
    store = StereoStore([Clip(tmp_path / "long.wav", 0.0, None)], 2000)
    assert len(store) == 3
    torch.testing.assert_close(torch.cat([store[i] for i in range(3)], dim=1), ramp_CN, atol=1e-4, rtol=0)


def test_crops_are_full_and_of_one_gain(clips: list[Clip]) -> None:
    store = StereoStore(clips[2:], 44_100)  # in antiphase throughout
    crops_BCN = stereo_crops(store, 4, 44_100, step_generator(0, 0)).samples
    assert crops_BCN.shape == (4, 2, 44_100)
    torch.testing.assert_close(crops_BCN[:, 0], -crops_BCN[:, 1], atol=2e-3, rtol=0)  # but for the dither
    level_db = 20 * torch.log10(crops_BCN[..., :22_050].std(dim=2) / 0.05)
    assert float(level_db.abs().max()) < GAIN_DB + 0.2 and float(level_db.std()) > 0.1


def task_of(clips: list[Clip], source: bool = False, band_hz: float = 0.0, **changes: Any) -> VAETask:
    torch.manual_seed(3)
    store = StereoStore(clips, 44_100)
    config = VAETaskConfig(
        seed=0, batch_size=2, crop_frames=6, discriminators=GAME, pitch_weight=float(source)
    )
    model = AudioVAE(replace(SMALL, harmonic_source=source, phase_band_hz=band_hz))
    return VAETask(model, store, store, replace(config, **changes))


@pytest.mark.parametrize(("source", "band_hz"), [(False, 0.0), (True, 0.0), (True, 700.0)])
def test_every_parameter_gets_a_gradient(clips: list[Clip], source: bool, band_hz: float) -> None:
    task = task_of(clips, source, band_hz, adversary_share=0.0)
    modules, groups = task.modules(), task.optimizers()
    batch = task.batch(0, step_generator(0, 0))
    if batch.pitch is not None:
        batch = batch._replace(pitch=PitchTarget(torch.full_like(batch.pitch.hz_BF, 200.0), 1.0))
    for key, parameter in modules["discriminators"].named_parameters():
        if key.endswith("to_logits.bias"):  # where no logit is beyond the hinge, its two halves cancel out
            parameter.data += 1
    for update in task.updates(batch, 0, 10):
        owned = [p for name in groups[update.optimizer] for p in modules[name].parameters()]
        update.loss.backward(inputs=owned)
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, f"{name}.{key}"


def test_a_batch_without_voice_trains(clips: list[Clip]) -> None:
    task = task_of(clips[2:], source=True)
    batch = task.batch(0, step_generator(0, 0))
    assert batch.pitch is not None and batch.pitch.voiced_share == 0.0
    update = next(task.updates(batch, 0, 10))
    update.loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in task.model.parameters() if p.grad is not None)


def test_the_latents_carry_a_pitch_above_a_voices(tmp_path: Path) -> None:
    """A tone of 900 Hz, which a cock reaches: tracked, and the source of its decoder is at that pitch."""
    time_N = torch.arange(88_200) / 44_100
    tone_N = torch.stack([torch.sin(2 * torch.pi * 900 * k * time_N) / k for k in range(1, 8)]).sum(0) * 0.1
    save(tmp_path / "tone.wav", tone_N[None].repeat(2, 1), 44_100)
    batch = task_of([Clip(tmp_path / "tone.wav", 0.0, None)], source=True).batch(0, step_generator(0, 0))
    assert batch.pitch is not None and batch.pitch.voiced_share > 0.9
    assert float((1200 * torch.log2(batch.pitch.hz_BF[batch.pitch.hz_BF > 0] / 900)).abs().max()) < 30


def test_the_divergence_weighs_as_it_would_without_the_balancer(clips: list[Clip]) -> None:
    """With the STFT distance alone the gradient is that of `stft + kl_weight * kl`, but for its length."""
    task = task_of(clips, output_weights={"stft": 0.7}, adversary_share=1.0, kl_weight=0.01)
    crops = task.batch(0, step_generator(0, 0))
    batch = crops.samples
    parameters = list(task.model.parameters())
    (update,) = task.updates(crops, 0, 10)
    ours = torch.cat([g.flatten() for g in torch.autograd.grad(update.loss, parameters)])
    dice = step_generator(0, 0, "vae")
    made, posterior, _ = task.model(batch, torch.randn(2, 6, SMALL.latent_dim, generator=dice))
    scales = [WINDOWS[i] for i in torch.randperm(4, generator=dice)[:2]]
    signals = [torch.cat([x[:, 0], x[:, 1], x.sum(1) / 2, (x[:, 0] - x[:, 1]) / 2]) for x in (made, batch)]
    stft = ReconstructionLoss(44_100)(signals[0], signals[1], scales)["stft"]
    loss = stft + 0.01 * posterior.divergence().sum(2).mean()
    direct = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    torch.testing.assert_close(ours / ours.norm(), direct / direct.norm(), atol=1e-5, rtol=1e-3)


def test_alarms(clips: list[Clip]) -> None:
    task = task_of(clips)
    assert "posterior collapse" in task.alarms({"channels_active": 0.05}, 10)
    assert task.alarms({"channels_active": 0.9}, 10) == {}


def test_training_brings_the_distance_down(clips: list[Clip], tmp_path: Path) -> None:
    task = task_of(clips, adversary_share=0.8)
    loop = LoopConfig(seed=0, steps=30, minutes=None, learning_rate=4e-3, warmup_steps=3, log_every=30)
    before = task.evaluate(0)
    train(task, loop, tmp_path, context_of(tmp_path), CPU)
    after = task.evaluate(30)
    for name in ("mel", "stft", "mel_mid_side", "stft_mid_side"):
        assert after[name] < 0.8 * before[name], name
    assert set(after) == {"mel", "stft", "mel_mid_side", "stft_mid_side", "snr_db", "kl", "channels_active"}


@pytest.mark.parametrize(("rate", "channels", "hop"), [(44_100, 2, 512), (16_000, 1, 128)])
def test_stage(clips: list[Clip], tmp_path: Path, rate: int, channels: int, hop: int) -> None:
    rows = [
        {
            "id": clip.path.stem,
            "task": "reconstruct",
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "audio", "path": str(clip.path), "start_s": 0.0, "end_s": 1.0}],
                }
            ],
            "metadata": {"split": "test" if clip.path.stem == "noise" else "train"},
        }
        for clip in clips
    ]
    write_jsonl(tmp_path / "samples.jsonl", rows)
    config = TrainVAEConfig(
        audio=tmp_path / "samples.jsonl", steps=10, batch_size=1, crop_frames=4, mel_hidden_size=16,
        hidden_size=16, blocks=(1, 1, 1, 1), adversary_share=1.0, sample_rate=rate, channels=channels,
        mel_hop_samples=hop,
    )  # fmt: skip
    figures = TRAIN_VAE.run(config, context_of(tmp_path))
    assert figures["steps"] == 10 and figures["latent_rate"] == pytest.approx(rate / hop / 4, abs=1e-3)
    assert ("stft_mid_side" in figures) == (channels == 2)
    for artifact in TRAIN_VAE.artifacts.values():
        assert (tmp_path / artifact).exists()
    model = load_autoencoder(tmp_path)
    assert isinstance(model, AudioVAE) and isinstance(model, Autoencoder)
    assert float((model.latent_std_D - 1).abs().max()) > 0
    latent_DT = model.encode(torch.zeros(channels, rate))
    assert model.decode(latent_DT, rate).shape == (channels, rate)
    again = AudioVAE.from_pretrained(tmp_path)
    assert again.digest == model.digest
    again.latent_std_D *= 2
    assert again.digest != model.digest


def published() -> AudioVAE:
    """The published autoencoder of a test."""
    return AudioVAE(replace(SMALL, channels=1))


def test_an_autoencoder_by_import_path(tmp_path: Path) -> None:
    assert load_autoencoder(f"{__name__}:published").channels == 1
    with pytest.raises(ConfigError, match="digest"):
        load_autoencoder(f"{__name__}:Path")
    with pytest.raises(ConfigError, match="config.json is missing"):
        load_autoencoder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "audiolm_vae"}')
    with pytest.raises(ConfigError, match="did you mean 'audiollm_vae'"):
        load_autoencoder(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"size": "small"},
        {"phase_band_hz": 0.0, "harmonic_source": False},
        {"channels": 1, "mel_hop_samples": 128, "sample_rate": 16_000},
    ],
)
def test_planned_parameters_are_the_real_ones(changes: dict[str, Any], tmp_path: Path) -> None:
    config = TrainVAEConfig(audio=tmp_path, **changes)
    count = sum(p.numel() for p in AudioVAE(vae_config(config)).parameters())
    assert TRAIN_VAE.plan is not None
    assert TRAIN_VAE.plan(config, {}).parameters == count
