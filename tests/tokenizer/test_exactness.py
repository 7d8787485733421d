"""Codes are the same, bit for bit, however the encoder is called; decoding agrees to 1e-5."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.native.streaming import StreamingDecoder, StreamingEncoder


def build(**shape: object) -> AudioTokenizer:
    """Random weights, and codebooks started on what the encoder makes of noise: no code is chosen by chance."""
    torch.manual_seed(0)
    model = AudioTokenizer(TokenizerConfig(**shape)).eval()  # type: ignore[arg-type]
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        latents_BTD = model.latent(sound(4, 960 * 60, dice))
        model.quantizer.initialize(latents_BTD.flatten(0, 1), dice)
        if model.decoder.pitch is not None:
            model.decoder.pitch.net[-1].weight.mul_(20)  # pitch that jumps, most of it voiced
            model.decoder.head.harmonic_share.bias.fill_(3.0)
    return model


def sound(rows: int, length: int, dice: torch.Generator) -> Tensor:
    """Noise whose level wanders, so that latents spread."""
    level = (
        torch.rand(rows, length // 480 + 2, generator=dice).pow(3).repeat_interleave(480, dim=1)[:, :length]
    )
    return torch.randn(rows, length, generator=dice) * level


def pieces(length: int, longest: int, dice: torch.Generator) -> list[int]:
    cuts: list[int] = []
    while sum(cuts) < length:
        cuts.append(min(length - sum(cuts), int(torch.randint(1, longest + 1, (1,), generator=dice))))
    return cuts


@pytest.fixture(scope="module", params=["free", "harmonic", "linear"])
def model(request: pytest.FixtureRequest) -> AudioTokenizer:
    return build(
        mel_hidden_size=24, hidden_size=32, encoder_layers=(1, 2), decoder_layers=(2, 1), codebook_size=64,
        latent_dim=16, step_frames=4, harmonic_source=request.param != "free", linear_path=request.param == "linear",
    )  # fmt: skip


@given(st.one_of(st.integers(1, 3 * 960), st.integers(1, 40_000)), st.integers(0, 2**31))
@settings(max_examples=50)
def test_alone_padded_chunked_and_streamed_are_one(model: AudioTokenizer, length: int, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    # the clip lies at an odd place of a larger tensor: alignment must not matter either
    clip = sound(1, length + 3, dice)[:, 3:]
    codes = model.encode(clip)
    assert codes.shape == (8, -(-length // 960))

    lengths = torch.tensor([length, int(torch.randint(1, 20_000, (1,), generator=dice))])
    batch = torch.zeros(2, int(lengths.max()) + 777)
    batch[0, :length] = clip[0]
    batch[1, : lengths[1]] = sound(1, int(lengths[1]), dice)[0]
    batched, mask = model.encode_batch(batch, lengths)
    assert torch.equal(batched[0][:, mask[0]], codes)

    for longest in (length, 5000, 700):
        encoder = StreamingEncoder(model)
        streamed = [encoder.push(part) for part in clip.split(pieces(length, longest, dice), dim=1)]
        assert torch.equal(torch.cat([*streamed, encoder.flush()], dim=1), codes)

    whole = model.decode(codes, length)
    decoder = StreamingDecoder(model)
    heard = [decoder.push(part) for part in codes.split(pieces(codes.shape[1], 5, dice), dim=1)]
    again = torch.cat([*heard, decoder.flush()], dim=1)
    assert again.shape[1] == codes.shape[1] * 960
    torch.testing.assert_close(again[:, :length], whole, atol=1e-5, rtol=0)
    decoded, sizes = model.decode_batch(batched, mask)
    assert int(sizes[0]) == again.shape[1]
    torch.testing.assert_close(decoded[0, :length], whole[0], atol=1e-5, rtol=0)


def test_a_batch_of_four_is_four_clips() -> None:
    """At a width where matrix products take their fast paths."""
    model = build(encoder_layers=(1, 1), decoder_layers=(1, 1))
    dice = torch.Generator().manual_seed(2)
    lengths = torch.tensor([24_000, 1, 17_123, 9_600])
    batch = sound(4, 24_000, dice)  # what lies beyond a clip's end is not silence here, and does not count
    codes, mask = model.encode_batch(batch, lengths)
    assert mask.sum(dim=1).tolist() == [25, 1, 18, 10]
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(codes[row][:, mask[row]], model.encode(batch[row, None, :length]))


def test_without_carried_context_the_codes_differ(model: AudioTokenizer) -> None:
    """The negative control: cutting a clip to pieces that know nothing of each other is noticed."""
    clip = sound(1, 19_200, torch.Generator().manual_seed(3))
    cut = torch.cat([model.encode(part) for part in clip.split(9_600, dim=1)], dim=1)
    assert not torch.equal(cut, model.encode(clip))


def test_codes_do_not_know_the_future_beyond_the_latency(model: AudioTokenizer) -> None:
    dice = torch.Generator().manual_seed(4)
    clip, other = sound(1, 38_400, dice), sound(1, 38_400, dice)
    seen = 19_200 + model.config.shape.context_samples
    changed = torch.cat([clip[:, :seen], other[:, seen:]], dim=1)
    assert torch.equal(model.encode(clip)[:, :20], model.encode(changed)[:, :20])
    assert not torch.equal(model.encode(clip), model.encode(changed))
    encoder = StreamingEncoder(model)
    assert encoder.latency_s == pytest.approx(4 * 0.04 + 0.045)
    for frames in (1, 4, 5, 24):  # they are there with this much sound, and not with a sample less
        samples = round(encoder.needed_s(frames) * model.sample_rate)
        assert encoder.push(torch.zeros(1, samples - 1)).shape[1] < frames
        assert encoder.push(torch.zeros(1, 1)).shape[1] > 0
        encoder.flush()
    assert StreamingDecoder(model).latency_s == pytest.approx(2 * 0.04 + 0.015)


def test_an_encoder_begins_anew_after_flush(model: AudioTokenizer) -> None:
    dice = torch.Generator().manual_seed(5)
    first, second = sound(1, 5_000, dice), sound(1, 7_000, dice)
    encoder = StreamingEncoder(model)
    for clip in (first, second):
        streamed = torch.cat([encoder.push(clip), encoder.flush()], dim=1)
        assert torch.equal(streamed, model.encode(clip))
    assert encoder.flush().shape == (8, 0)


@pytest.mark.parametrize("kind", ["silence", "direct current", "clipping", "one impulse"])
def test_odd_sounds_have_defined_codes_and_quiet_stays_bounded(model: AudioTokenizer, kind: str) -> None:
    clip = torch.zeros(1, 9_600)
    if kind == "direct current":
        clip += 0.5
    elif kind == "clipping":
        clip = (torch.randn(1, 9_600, generator=torch.Generator().manual_seed(6)) * 100).clamp(-1, 1)
    elif kind == "one impulse":
        clip[0, 5_000] = 1.0
    codes = model.encode(clip)
    assert torch.equal(codes, model.encode(clip.clone()))
    decoded = model.decode(codes)
    assert bool(decoded.isfinite().all()) and float(decoded.abs().max()) <= 1


def test_a_stream_refuses_what_is_not_finite(model: AudioTokenizer) -> None:
    with pytest.raises(ValueError, match="finite"):
        StreamingEncoder(model).push(torch.full((1, 10), torch.inf))
    empty = StreamingDecoder(model)
    assert empty.flush().shape == (1, 0)
