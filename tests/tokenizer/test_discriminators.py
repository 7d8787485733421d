"""The adversary against the `encodec` package, a naive period discriminator, and losses worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from encodec.msstftd import MultiScaleSTFTDiscriminator as EncodecDiscriminator
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.training.adversary import (
    DeadDiscriminatorWatch,
    discriminator_health,
    discriminator_loss,
    feature_matching_loss,
    frozen,
    generator_loss,
)
from tokenizer.training.discriminators import (
    TINY,
    DiscriminatorOutput,
    Discriminators,
    MultiPeriodDiscriminator,
    MultiScaleSTFTDiscriminator,
)


def output(logits: list[float], *features: list[float]) -> DiscriminatorOutput:
    return DiscriminatorOutput(torch.tensor(logits), [torch.tensor(feature) for feature in features])


@pytest.mark.parametrize("channels", [1, 2])
def test_stft_discriminator_is_encodecs(channels: int) -> None:
    torch.manual_seed(0)
    windows = [256, 64]
    ours = MultiScaleSTFTDiscriminator(windows, audio_channels=channels, channels=4)
    theirs = EncodecDiscriminator(
        4, in_channels=channels, n_ffts=windows, hop_lengths=[64, 16], win_lengths=windows
    )
    for member, oracle in zip(ours.members, theirs.discriminators, strict=True):
        pairs = zip([*member.convolutions, member.to_logits], [*oracle.convs, oracle.conv_post], strict=True)
        for layer, wrapped in pairs:
            copy_convolution(layer, wrapped.conv)
    samples_BCN = torch.randn(2, channels, 1003)
    logits, features = theirs(samples_BCN)
    for index, found in enumerate(ours(samples_BCN)):
        torch.testing.assert_close(found.logits, logits[index], atol=1e-5, rtol=1e-5)
        assert len(found.features) == len(features[index])
        for given, expected in zip(found.features, features[index], strict=True):
            torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def copy_convolution(source: nn.Conv2d, target: nn.Conv2d) -> None:
    target.bias.copy_(source.bias)
    if hasattr(target, "weight_v"):
        target.weight_v.copy_(source.weight)
        target.weight_g.copy_(source.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1))
    else:
        target.weight.copy_(source.weight)


@pytest.mark.parametrize("channels", [1, 2])
def test_period_discriminator_is_hifi_gans(channels: int) -> None:
    """The paper's form: fold to `[B, C, N / P, P]`, convolve with `(5, 1)` kernels and strides of `(3, 1)`."""
    torch.manual_seed(0)
    ours = MultiPeriodDiscriminator((2, 3, 5), audio_channels=channels, channels=2, growth=2, max_channels=8)
    samples_BCN = torch.randn(2, channels, 601)
    for period, member, found in zip((2, 3, 5), ours.members, ours(samples_BCN), strict=True):
        hidden = functional.pad(samples_BCN, (0, -601 % period), mode="reflect")
        hidden = hidden.reshape(2, channels, -1, period)
        for index, layer in enumerate(member.convolutions):
            stride = 3 if index < 4 else 1
            hidden = functional.conv2d(hidden, layer.weight[..., None], layer.bias, (stride, 1), (2, 0))
            hidden = torch.where(hidden > 0, hidden, 0.1 * hidden)
            torch.testing.assert_close(refold(found.features[index], period), hidden, atol=1e-5, rtol=1e-5)
        last = member.to_logits
        expected = functional.conv2d(hidden, last.weight[..., None], last.bias, 1, (1, 0))
        torch.testing.assert_close(refold(found.logits, period), expected, atol=1e-5, rtol=1e-5)


def refold(x_PHL: Tensor, period: int) -> Tensor:
    """`[B P, H, L]` to the paper's `[B, H, L, P]`."""
    return x_PHL.unflatten(0, (-1, period)).permute(0, 2, 3, 1)


def test_published_widths_of_hifi_gan() -> None:
    member = MultiPeriodDiscriminator((2,)).members[0]
    assert [layer.out_channels for layer in member.convolutions] == [32, 128, 512, 1024, 1024]


def test_both_families_train_on_stereo_and_say_what_does_not_fit() -> None:
    torch.manual_seed(0)
    model = Discriminators(replace(TINY, audio_channels=2))
    outputs = model(torch.randn(2, 2, 1500))
    assert len(outputs) == len(model.names) == 4
    generator_loss(outputs).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    with pytest.raises(ValueError, match=r"take \[batch, 2, samples\]"):
        model(torch.randn(2, 1, 1500))
    with pytest.raises(ValueError, match="window of 1024"):
        model(torch.randn(2, 2, 1023))


def test_the_spectrum_is_in_fp32_whatever_comes_in() -> None:
    member = MultiScaleSTFTDiscriminator((256,), channels=2).members[0]
    samples_BCN = torch.randn(1, 1, 1024).bfloat16()
    plain = member._spectrum(samples_BCN.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(member._spectrum(samples_BCN), plain)


def test_losses_by_hand() -> None:
    real = [output([2.0, 0.0], [1.0, -3.0]), output([0.5], [4.0], [0.0, 2.0])]
    fake = [output([-2.0, 0.0], [2.0, -1.0]), output([0.5], [1.0], [1.0, 2.0])]
    # first: mean(0, 1) + mean(0, 1) = 1; second: 0.5 + 1.5 = 2
    assert float(discriminator_loss(real, fake)) == pytest.approx(1.5)
    assert float(generator_loss(fake)) == pytest.approx((1.0 - 0.5) / 2)
    # layers: mean(1, 2) / mean(1, 3); 3 / 4; mean(1, 0) / mean(0, 2)
    assert float(feature_matching_loss(real, fake)) == pytest.approx((0.75 + 0.75 + 0.5) / 3)
    health = {key: float(value) for key, value in discriminator_health(real, fake).items()}
    assert health == pytest.approx({"real_logit": 0.75, "fake_logit": -0.25, "accuracy": 0.5})


def test_real_features_are_a_target() -> None:
    real, fake = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    logits = torch.zeros(1)
    feature_matching_loss(
        [DiscriminatorOutput(logits, [real])], [DiscriminatorOutput(logits, [fake])]
    ).backward()
    assert real.grad is None and fake.grad is not None


def test_frozen_lets_gradients_through_and_restores() -> None:
    torch.manual_seed(0)
    model = Discriminators(TINY)
    model.stft.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    samples_BCN = torch.randn(1, 1, 1200, requires_grad=True)
    with pytest.raises(KeyboardInterrupt), frozen(model):
        generator_loss(model(samples_BCN)).backward()
        raise KeyboardInterrupt
    assert samples_BCN.grad is not None and samples_BCN.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == before
    with frozen(model):
        loss = generator_loss(model(samples_BCN))
    loss.backward()  # after the block too
    assert all(p.grad is None for p in model.parameters())


def test_a_discriminator_learns_and_a_dead_one_is_named() -> None:
    """Noise against smoothed noise: two of the sub-discriminators have lost their last layer."""
    torch.manual_seed(0)
    model = Discriminators(TINY)
    for member in (model.period.members[1], model.stft.members[0]):
        member.to_logits.requires_grad_(False)
        member.to_logits.parametrizations.weight.original0.zero_()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=2e-3)
    watch = DeadDiscriminatorWatch(model.names, patience=25)
    for _ in range(35):
        real_BCN = torch.randn(4, 1, 1536)
        fake_BCN = functional.avg_pool1d(torch.randn(4, 1, 1536), 5, 1, padding=2) * 5**0.5
        real, fake = model(real_BCN), model(fake_BCN)
        watch.update(real, fake)
        loss = discriminator_loss(real, fake)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert watch.dead() == ["period 5", "stft 1024"]
    assert float(discriminator_loss(real[:1] + real[3:], fake[:1] + fake[3:]).detach()) < 1.5
    assert float(discriminator_loss(real[1:3], fake[1:3]).detach()) >= 2.0
    resumed = DeadDiscriminatorWatch(model.names, patience=25)
    assert resumed.dead() == []  # too early to tell
    resumed.load_state_dict(watch.state_dict())
    assert resumed.dead() == watch.dead()


def test_a_gap_that_is_not_finite_counts_as_dead() -> None:
    watch = DeadDiscriminatorWatch(["a", "b"], patience=4)
    for _ in range(4):
        watch.update([output([1.0]), output([float("nan")])], [output([0.0]), output([0.0])])
    assert watch.dead() == ["b"]
