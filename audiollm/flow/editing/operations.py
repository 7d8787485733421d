"""Operations on tracks: extend, inpaint, add, remove. What lies outside of the span is the input's own, bit for bit.

| operation | context inside the span | wanted | in the span, the result is |
|---|---|---|---|
| extend | hidden, after the end of the track | a continuation | the made sound |
| inpaint | hidden | what fits around and the words | the made sound |
| add | shown | the added sound alone | the input plus the made sound |
| remove | shown | the track without the sound | the made sound |

Outside the span the context is kept. Spans longer than the sounds of the training are made in windows, each of which
keeps the end of the one before it. The model neither hears nor makes what lies below 20 Hz: the track's own goes on
through the span (`low_band`).

Shapes: C channels, N samples, T latents, D latent dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from audiollm.audio import resample, set_channels
from audiollm.errors import ConfigError
from audiollm.flow.editing.fitting import Surroundings, fit_to_track, low_band
from audiollm.flow.editing.levels import AUDIBLE_DB, change_db, loudest_rms
from audiollm.flow.editing.tracks import Track
from audiollm.flow.generator import ConditionsAt, SoundGenerator, fill_latents
from audiollm.flow.model.context import LatentState, span_context
from audiollm.flow.model.sampling import SamplerSettings

Operation = Literal["extend", "inpaint", "add", "remove"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class EditSpan(NamedTuple):
    """A span in samples of the track, and of what is made around it."""

    start: int
    end: int


@dataclass(frozen=True)
class EditResult:
    """An edited track, and what was added to the input to get it."""

    track: Track
    layer: Track
    """Edited track minus input: `track.without(layer)` is the input."""
    span: EditSpan
    gain_db: float
    """Gain of the made sound by which it is no louder than the track around it allows; 0: it was not turned down."""
    limited_db: float
    """Lowest gain at a peak of the span that would have been above full scale; 0: there was none."""
    change_db: float
    """Largest change of a band of frequencies in 0.2 s of the span."""

    @property
    def is_audible(self) -> bool:
        return self.change_db >= AUDIBLE_DB

    def remarks(self) -> list[str]:
        """What a listener should know: that sound was turned down, or that the edit cannot be heard."""
        remarks = []
        if self.gain_db <= -0.1:
            remarks.append(
                f"the made sound is turned down by {-self.gain_db:.1f} dB, to the level of the track"
            )
        if self.limited_db <= -0.1:
            remarks.append(f"peaks above full scale are limited, by {-self.limited_db:.1f} dB at most")
        if not self.is_audible:
            remarks.append(
                f"the edit cannot be heard: it changes no band of the span by more than {self.change_db:.2f} dB "
                f"(audible from {AUDIBLE_DB:g} dB on)"
            )
        return remarks


def find_operation(name: str) -> Operation:
    """The operation of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in OPERATIONS:
        raise ConfigError(f"no operation {name!r}", "command line", f"known: {', '.join(OPERATIONS)}")
    return name


def find_span(track: Track, operation: Operation, start_s: float | None, end_s: float | None) -> EditSpan:
    """The samples of a span.

    Args:
        start_s: its beginning in seconds; None: 0, and for `extend` the track's end, which is the only one possible.
        end_s: its end; None: the track's.

    Raises:
        ConfigError: it has no sample, does not lie in the track, or for `extend` does not lie after it.
    """
    rate, length = track.sample_rate, track.num_samples
    if operation == "extend":
        if end_s is None:
            raise ConfigError(
                "extend: the span needs an end", "--span", "give the length to extend to, as in --span ,12.5"
            )
        start, end = length, round(end_s * rate)
        if start_s is not None and round(start_s * rate) != length:
            raise ConfigError(
                f"extend: the span begins at the track's end, {track.duration_s:.3f} s, not at {start_s:g} s",
                "--span",
                "leave its beginning out, or inpaint from there",
            )
        if end <= start:
            raise ConfigError(
                f"extend: the span ends at {end_s:g} s, and the track at {track.duration_s:.3f} s",
                "--span",
                "give a later end",
            )
        return EditSpan(start, end)
    start = 0 if start_s is None else round(start_s * rate)
    end = length if end_s is None else round(end_s * rate)
    if not 0 <= start < end <= length:
        raise ConfigError(
            f"the span of {start / rate:g} to {end / rate:g} s does not lie in the track of {track.duration_s:.3f} s",
            "--span",
            "give seconds from its beginning, as in --span 1.5,3",
        )
    return EditSpan(start, end)


def edit_track(
    generator: SoundGenerator,
    track: Track,
    operation: Operation,
    span: EditSpan,
    conditions_at: ConditionsAt,
    settings: SamplerSettings,
    key: str,
) -> EditResult:
    """Edit a span of a track.

    Args:
        conditions_at: the words, pictures and object of the edit, for a part of the track.
        key: decides the noise; the same key gives the same edit.

    Raises:
        ConfigError: a model that was trained without audio context, or guidance that it cannot have.
    """
    section = _cut_section(generator, track, span)
    surroundings = _surround_section(track, operation, section)
    made_CN = _make_section(generator, surroundings, track, section, conditions_at, settings, key)
    fit = fit_to_track(made_CN, surroundings)
    edited = track.replaced(span.start, fit.samples_CN)
    before_CN, after_CN = track.waveform(*span), edited.waveform(*span)
    before_CN = torch.nn.functional.pad(before_CN, (0, after_CN.shape[1] - before_CN.shape[1]))
    loudest = loudest_rms(surroundings.track_CN, track.sample_rate)
    change = change_db(before_CN, after_CN, track.sample_rate, loudest)
    return EditResult(edited, track.layer(edited), span, fit.gain_db, fit.limited_db, change)


def heard_from_s(generator: SoundGenerator, track: Track, span: EditSpan) -> float:
    """The second of the track from which the model hears it for an edit of the span."""
    return _cut_section(generator, track, span).start / track.sample_rate


# Private


class _Section(NamedTuple):
    """The part of a track around a span that the model hears."""

    start: int
    """The first sample of the section, counted in the track."""
    end: int
    """The sample behind the section's last, in the track or beyond its end."""
    span: EditSpan
    """The span, in samples of the track."""


def _cut_section(generator: SoundGenerator, track: Track, span: EditSpan) -> _Section:
    """The span with as much around it as a window of the training has, and always two seconds where these are.

    It lies in the middle, or nearer to an end of the track: what one side lacks the other has.
    """
    rate, longest_s = track.sample_rate, generator.model.config.longest_s
    spare = max(2 * rate, round(longest_s * rate) - (span.end - span.start))
    behind = max(0, track.num_samples - span.end)
    before = min(span.start, max(spare // 2, spare - behind))
    after = min(behind, spare - before)
    return _Section(span.start - before, span.end + after, span)


def _surround_section(track: Track, operation: Operation, section: _Section) -> Surroundings:
    """The section of the track, filled up with silence beyond its end, in two bands."""
    first, last = section.span.start - section.start, section.span.end - section.start
    section_CN = track.waveform(section.start, section.end)
    missing = section.end - section.start - section_CN.shape[1]
    section_CN = torch.nn.functional.pad(section_CN, (0, missing))
    is_hidden = operation in ("extend", "inpaint")
    low_CN = low_band(section_CN, track.sample_rate, (first, last) if is_hidden else None)
    is_end = section.span.end >= track.num_samples
    return Surroundings(operation, section_CN - low_CN, low_CN, first, last, track.sample_rate, is_end)


def _make_section(
    generator: SoundGenerator,
    surroundings: Surroundings,
    track: Track,
    section: _Section,
    conditions_at: ConditionsAt,
    settings: SamplerSettings,
    key: str,
) -> Tensor:
    """Made sound of the section `[C, N]` at the track's rate and channels, without the low band."""
    autoencoder, rate = generator.autoencoder, generator.sample_rate
    operation = surroundings.operation
    at_rate_CN = resample(surroundings.track_CN, track.sample_rate, rate)
    at_rate_CN = set_channels(at_rate_CN, autoencoder.channels)
    mean_TD = generator.encode(at_rate_CN)
    per_latent = autoencoder.hop_samples * track.sample_rate / rate
    first, last = math.floor(surroundings.start / per_latent), math.ceil(surroundings.end / per_latent)
    first, last = min(first, len(mean_TD) - 1), min(max(last, first + 1), len(mean_TD))
    if operation == "add":  # the added sound alone is wanted, before and after it there is silence
        context = span_context(mean_TD, 0, len(mean_TD), LatentState.VISIBLE)
    else:
        inside = LatentState.VISIBLE if operation == "remove" else LatentState.HIDDEN
        context = span_context(mean_TD, first, last, inside)
    start_s = section.start / track.sample_rate
    latents_TD = fill_latents(generator, context, start_s, conditions_at, settings, key)
    made_CN = track.fitted(generator.decode(latents_TD, at_rate_CN.shape[1]), rate)
    made_CN = made_CN[:, : surroundings.track_CN.shape[1]]
    return made_CN - low_band(made_CN, track.sample_rate)
