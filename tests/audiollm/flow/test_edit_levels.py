"""Levels of edits: what lies below hearing goes on, sounds are as loud as the track allows, and silence is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from audiollm.audio import resample
from audiollm.flow.editing.fitting import low_band
from audiollm.flow.editing.levels import (
    CEILING_DBFS,
    below_ceiling,
    change_db,
    decibels_to_gain,
    limit_peaks,
    loudest_rms,
    true_peak,
)
from audiollm.flow.editing.operations import OPERATIONS, EditResult, Operation, edit_track, find_span
from audiollm.flow.editing.tracks import Track
from audiollm.flow.generator import CONTEXT_SHARE
from audiollm.flow.model.context import AudioContext, LatentState
from audiollm.flow.model.sampling import SamplerSettings
from tests.audiollm.flow.test_seams import Oracle
from tests.audiollm.flow.toy import RATE, ToyAutoencoder, tone

CEILING = decibels_to_gain(CEILING_DBFS)


class Listener(Oracle):
    """Makes a given sound, and remembers the context that each window is made in."""

    def __init__(self, made_CN: Tensor, longest_s: float = 10.0) -> None:
        super().__init__(made_CN, 0, 1.0)
        self.model.config = replace(self.model.config, longest_s=longest_s)
        self.contexts: list[AudioContext] = []
        self.made: list[Tensor] = []

    def sample_latents(
        self,
        conditions: Any,
        count: int,
        settings: SamplerSettings,
        key: str,
        context: AudioContext | None = None,
    ) -> Tensor:
        assert context is not None
        self.contexts.append(AudioContext(context.latents_LD.clone(), context.state_L.clone()))
        made_TD = super().sample_latents(conditions, count, settings, key, context)
        self.made.append(torch.where(self.contexts[-1].fixed_L[:, None], context.latents_LD, made_TD).clone())
        return self.made[-1]


def track_of(samples_CN: Tensor, rate: int = RATE, subtype: str = "PCM_16") -> Track:
    dtype = np.int32 if subtype.startswith("PCM") else np.float64
    return Track(np.zeros((0, len(samples_CN)), dtype), rate, "WAV", subtype).replaced(0, samples_CN)


def edit(
    listener: Listener, track: Track, operation: Operation, start_s: float | None, end_s: float
) -> EditResult:
    span = find_span(track, operation, start_s, end_s)

    def conditions_at(begin_s: float, length_s: float) -> Any:
        listener.start_s = begin_s
        return {}

    return edit_track(listener, track, operation, span, conditions_at, SamplerSettings(steps=1), "0")


def slow(kind: str, length: int, rate: int) -> Tensor:
    time_N = torch.arange(length) / rate
    wave = {
        "offset": torch.full_like(time_N, 0.35),
        "infrasound": 0.1 * torch.sin(2 * torch.pi * 7.0 * time_N) - 0.2,
        "drift": 0.1 + 0.02 * time_N,
    }
    return wave[kind]


@pytest.mark.parametrize("operation", ["inpaint", "remove", "extend"])
@pytest.mark.parametrize(
    ("kind", "rate"), [("offset", 8000), ("offset", 44_100), ("infrasound", 16_000), ("drift", 8000)]
)
def test_what_lies_below_hearing_goes_on_through_a_span(operation: Operation, kind: str, rate: int) -> None:
    """A model makes nothing there. A span of another mean, or a jump at its borders, would be a thump."""
    slow_N = slow(kind, 5 * rate, rate)
    hum_CN = resample(tone(110, 5.0, 0.05), RATE, rate)
    track = track_of(slow_N + hum_CN, rate)
    if operation == "extend":
        track = replace(track, samples_NC=track.samples_NC[: 3 * rate])
    listener = Listener(tone(110, 6.0, 0.05))
    after = edit(listener, track, operation, None if operation == "extend" else 2.0, 3.5).track
    span = slice(3 * rate if operation == "extend" else 2 * rate, round(3.5 * rate))
    edited_N = after.waveform()[0]
    error_N = low_band(edited_N[None], rate)[0, span] - slow_N[span]
    near = rate // 5 if operation == "extend" else None  # what follows a track's end nobody knows
    assert float(error_N[:near].abs().max()) < 0.02, (kind, operation)
    jumps_N = edited_N.diff().abs()
    assert float(jumps_N[span.start - 2 : span.start + 2].max()) < 1.5 * float(
        jumps_N[: span.start - 2].max()
    )


def test_the_model_hears_a_track_without_its_offset() -> None:
    for operation in OPERATIONS:
        listener = Listener(torch.zeros(1, 5 * RATE))
        end_s = 4.5 if operation == "extend" else 3.0
        edit(
            listener,
            track_of(0.35 + tone(110, 4.0, 0.05)),
            operation,
            None if operation == "extend" else 2.0,
            end_s,
        )
        latents_DT = ToyAutoencoder().denormalize(listener.contexts[0].latents_LD.T)
        assert float(latents_DT[0, :30].abs().max()) < 0.1, (
            "the first number of a latent is its mean, 7 with the offset"
        )


@pytest.mark.parametrize(
    ("operation", "inside", "outside"),
    [
        ("extend", LatentState.HIDDEN, LatentState.FIXED),
        ("inpaint", LatentState.HIDDEN, LatentState.FIXED),
        ("add", LatentState.VISIBLE, LatentState.VISIBLE),
        ("remove", LatentState.VISIBLE, LatentState.FIXED),
    ],
)
def test_what_an_operation_shows_of_the_track(
    operation: Operation, inside: LatentState, outside: LatentState
) -> None:
    """`add` and `remove` see the track in the span, and all see it around the span."""
    listener, track = Listener(torch.zeros(1, 6 * RATE)), track_of(tone(110, 4.0))
    start_s, end_s = (None, 5.0) if operation == "extend" else (2.0, 3.0)
    edit(listener, track, operation, start_s, end_s)
    (context,) = listener.contexts
    first, last = (80, 100) if operation == "extend" else (40, 60)
    assert set(context.state_L[first:last].tolist()) == {inside}
    around_L = torch.cat([context.state_L[:first], context.state_L[last:]])
    assert len(around_L) >= 60 and set(around_L.tolist()) == {outside}
    encoded_DT = ToyAutoencoder().normalize(ToyAutoencoder().encode_distribution(tone(110, 4.0)).mean)
    torch.testing.assert_close(context.latents_LD[10:40], encoded_DT.T[10:40], atol=0.2, rtol=0)


def test_a_later_window_keeps_the_end_of_the_one_before_it() -> None:
    listener = Listener(tone(60, 8.0), longest_s=1.0)
    edit(listener, track_of(tone(60, 1.0)), "extend", None, 5.0)
    assert len(listener.contexts) >= 4
    done_TD = listener.contexts[0].latents_LD[:7]
    for context, made_TD in zip(listener.contexts, listener.made, strict=True):
        kept = int(context.fixed_L.sum())
        assert len(context.state_L) == 20 and kept >= round(20 * CONTEXT_SHARE)
        assert bool(context.fixed_L[:kept].all()) and not bool(context.state_L[kept:].any())
        assert torch.equal(context.latents_LD[:kept], done_TD[-kept:]), "the sound that was made before it"
        done_TD = torch.cat([done_TD, made_TD[kept:]])


def test_an_added_sound_is_faded_in_and_out() -> None:
    track = track_of(tone(110, 3.0, 0.1), 16_000)
    listener = Listener(tone(173, 4.0, 0.3))
    result = edit(listener, track, "add", 0.5, 1.2)
    layer_N = result.layer.waveform()[0].abs()
    first, last = result.span
    edge, middle = round(0.002 * 16_000), float(layer_N[first + 1000 : last - 1000].max())
    assert middle > 0.2
    assert float(layer_N[first : first + edge].max()) < 0.05 * middle
    assert float(layer_N[last - edge : last].max()) < 0.05 * middle
    assert float(layer_N[first + 1000 : first + 3000].max()) > 0.9 * middle


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_loud_sound_is_turned_down_and_told(operation: Operation, subtype: str) -> None:
    """A model that makes a sound ten times full scale: nothing of it is clipped."""
    track = track_of(tone(110, 4.0, 0.1), subtype=subtype)
    listener = Listener(tone(173, 8.0, 10.0))
    start_s, end_s = (None, 5.0) if operation == "extend" else (1.0, 2.5)
    result = edit(listener, track, operation, start_s, end_s)
    span_CN = result.track.waveform(*result.span)
    assert true_peak(span_CN, RATE) <= CEILING + 1e-3
    louder = loudest_rms(span_CN, RATE) / loudest_rms(track.waveform(), RATE)
    assert louder < decibels_to_gain(0.5 if operation == "remove" else 13.0)
    assert result.gain_db < -15 and any("turned down by" in line for line in result.remarks())


def test_peaks_that_meet_are_limited_and_told() -> None:
    """Two loud sounds at once: the sum stays below full scale, and beside its peaks it is the sum."""
    track = track_of(tone(110, 4.0, 0.6))
    bursts_CN = tone(173, 4.0, 0.9) * (tone(3, 4.0, 1.0) > 0.9)
    result = edit(Listener(bursts_CN), track, "add", 1.0, 2.5)
    span_CN = result.track.waveform(*result.span)
    assert true_peak(span_CN, RATE) <= CEILING + 1e-3 and result.limited_db < -1
    assert any("limited" in line for line in result.remarks())
    untouched = bool(((span_CN - track.waveform(*result.span)).abs() < 2e-3).float().mean() > 0.3)
    assert untouched


def test_a_loud_track_keeps_its_own_peaks() -> None:
    """Full scale outside of the span is no reason to make the span's own peaks smaller at its borders."""
    loud_CN = tone(110, 4.0, 1.0)
    result = edit(Listener(torch.zeros(1, 4 * RATE)), track_of(loud_CN), "add", 1.0, 2.0)
    assert result.limited_db == 0.0
    assert np.array_equal(result.track.samples_NC, track_of(loud_CN).samples_NC)


@pytest.mark.parametrize(
    ("level", "audible"), [(0.0, False), (1e-4, False), (3e-3, False), (0.05, True), (0.3, True)]
)
def test_an_added_sound_that_cannot_be_heard_is_named(level: float, audible: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    track = track_of(0.1 * torch.randn(1, 4 * RATE, generator=dice), subtype="FLOAT")
    result = edit(Listener(tone(173, 4.0, 1.0) * level), track, "add", 1.0, 2.0)
    assert result.is_audible is audible
    assert any("cannot be heard" in line for line in result.remarks()) is not audible


def test_a_short_sound_in_a_long_span_is_audible() -> None:
    click_CN = torch.zeros(1, 40 * RATE)
    click_CN[:, 20 * RATE : 20 * RATE + 80] = 0.3 * tone(173, 0.01)
    track = track_of(0.01 * torch.randn(1, 40 * RATE, generator=torch.Generator().manual_seed(0)))
    assert edit(Listener(10 * click_CN), track, "add", 1.0, 39.0).is_audible


def test_silence_after_a_track_is_no_audible_continuation() -> None:
    result = edit(Listener(torch.zeros(1, 6 * RATE)), track_of(tone(110, 3.0)), "extend", None, 5.0)
    assert result.is_audible, "the fade of the track goes on"
    quiet = edit(Listener(torch.zeros(1, 6 * RATE)), track_of(torch.zeros(1, 3 * RATE)), "extend", None, 5.0)
    assert not quiet.is_audible


def test_a_filled_gap_is_as_loud_as_the_sound_around_it() -> None:
    """An autoencoder that makes all of a sound quieter by 4 dB makes no dip."""

    class Quiet(ToyAutoencoder):
        def decode(self, latent_DT: Tensor, num_samples: int | None = None) -> Tensor:
            return 0.63 * super().decode(latent_DT, num_samples)

    listener = Listener(tone(110, 4.0, 0.2))
    listener.autoencoder = Quiet()
    result = edit(listener, track_of(tone(110, 4.0, 0.2)), "inpaint", 1.0, 2.0)
    rms = float(result.track.waveform(*result.span).square().mean().sqrt())
    assert rms == pytest.approx(0.2 / 2**0.5, rel=0.03)


def test_peaks_between_samples_count() -> None:
    """A quarter of the rate, half a sample late: its samples are 3 dB below its peaks."""
    wave_CN = torch.hann_window(4000) * torch.sin(torch.pi / 2 * torch.arange(4000) + torch.pi / 4)[None]
    assert float(wave_CN.abs().max()) == pytest.approx(0.7071, abs=1e-3)
    assert true_peak(wave_CN, RATE) == pytest.approx(1.0, abs=0.02)
    lower_CN, gain_db = below_ceiling(2 * wave_CN, RATE)
    assert true_peak(lower_CN, RATE) == pytest.approx(CEILING, abs=1e-3) and gain_db == pytest.approx(
        -7.0, abs=0.2
    )
    same_CN, gain_db = below_ceiling(0.5 * wave_CN, RATE)
    assert gain_db == 0.0 and torch.equal(same_CN, 0.5 * wave_CN)


def test_a_limiter_leaves_what_is_below_the_ceiling() -> None:
    wave_CN = torch.cat([tone(110, 0.5, 0.5), tone(110, 0.5, 2.0), tone(110, 0.5, 0.5)], dim=1).repeat(2, 1)
    limited_CN, lowest_db = limit_peaks(wave_CN, RATE, CEILING)
    assert true_peak(limited_CN, RATE) <= CEILING + 1e-3 and lowest_db == pytest.approx(-7.0, abs=0.3)
    assert torch.equal(limited_CN[:, :3900], wave_CN[:, :3900]) and torch.equal(
        limited_CN[:, -3900:], wave_CN[:, -3900:]
    )
    gain_N = (limited_CN / wave_CN)[0][wave_CN[0].abs() > 0.1]
    assert float(gain_N.diff().abs().max()) < 0.1, "no step"


def test_changes_of_bands_are_measured() -> None:
    dice = torch.Generator().manual_seed(1)
    noise_CN = 0.1 * torch.randn(2, 2 * RATE, generator=dice)
    assert change_db(noise_CN, noise_CN, RATE, 0.1) == 0.0
    assert change_db(noise_CN, noise_CN * decibels_to_gain(2.0), RATE, 0.1) == pytest.approx(2.0, abs=1e-3)
    one_CN = noise_CN.clone()
    one_CN[1, RATE:] *= decibels_to_gain(3.0)
    assert change_db(noise_CN, one_CN, RATE, 0.1) == pytest.approx(3.0, abs=0.1)
    assert change_db(torch.zeros(1, 100), torch.zeros(1, 100), RATE, 0.1) == 0.0
    assert change_db(torch.zeros(1, 1), torch.ones(1, 1), RATE, 0.1) > 10
