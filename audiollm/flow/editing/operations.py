"""Operations on tracks: extend, inpaint, add, remove. What lies outside of the span is the input's own, bit for bit.

| operation | context inside the span | wanted | in the span, the result is |
|---|---|---|---|
| extend | hidden, after the end of the track | a continuation | the made sound |
| inpaint | hidden | what fits around and the words | the made sound |
| add | shown | the added sound alone | the input plus the made sound |
| remove | shown | the track without the sound | the made sound |

Outside the span the context is kept. Spans longer than the sounds of the training are made in windows, each of which
keeps the end of the one before it.

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
from audiollm.flow.editing.seams import FADE_S, MOST_LAG_S, WINDOW_S, best_lag, fade_weights, with_seams
from audiollm.flow.editing.tracks import Track
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.context import LatentState, span_context
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.windows import ConditionsAt, fill_latents

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
    section = _section(generator, track, span)
    made_CN = _make_section(generator, track, operation, section, conditions_at, settings, key)
    part_CN = _fitted(made_CN, track, operation, section)
    edited = track.replaced(span.start, part_CN)
    return EditResult(edited, track.layer(edited), span)


def heard_from_s(generator: SoundGenerator, track: Track, span: EditSpan) -> float:
    """The second of the track from which the model hears it for an edit of the span."""
    return _section(generator, track, span).start / track.sample_rate


# Private


class _Section(NamedTuple):
    """The part of a track around a span that the model hears."""

    start: int
    """The first sample of the section, counted in the track."""
    end: int
    """The sample behind the section's last, in the track or beyond its end."""
    span: EditSpan
    """The span, in samples of the track."""


def _section(generator: SoundGenerator, track: Track, span: EditSpan) -> _Section:
    """The span with as much around it as a window of the training has, and always two seconds where these are.

    It lies in the middle, or nearer to an end of the track: what one side lacks the other has.
    """
    rate, longest_s = track.sample_rate, generator.model.config.longest_s
    spare = max(2 * rate, round(longest_s * rate) - (span.end - span.start))
    behind = max(0, track.num_samples - span.end)
    before = min(span.start, max(spare // 2, spare - behind))
    after = min(behind, spare - before)
    return _Section(span.start - before, span.end + after, span)


def _make_section(
    generator: SoundGenerator,
    track: Track,
    operation: Operation,
    section: _Section,
    conditions_at: ConditionsAt,
    settings: SamplerSettings,
    key: str,
) -> Tensor:
    """Made sound of the section `[C, N]` at the track's rate and channels."""
    autoencoder, rate = generator.autoencoder, generator.sample_rate
    heard_CN = track.waveform(section.start, section.end)
    missing = section.end - section.start - heard_CN.shape[1]
    heard_CN = torch.nn.functional.pad(heard_CN, (0, missing))
    at_rate_CN = set_channels(resample(heard_CN, track.sample_rate, rate), autoencoder.channels)
    mean_TD = generator.encode(at_rate_CN)
    per_latent = autoencoder.hop_samples * track.sample_rate / rate
    first = math.floor((section.span.start - section.start) / per_latent)
    last = math.ceil((section.span.end - section.start) / per_latent)
    first, last = min(first, len(mean_TD) - 1), min(max(last, first + 1), len(mean_TD))
    if operation == "add":  # the added sound alone is wanted, before and after it there is silence
        context = span_context(mean_TD, 0, len(mean_TD), LatentState.SHOWN)
    else:
        inside = LatentState.SHOWN if operation == "remove" else LatentState.HIDDEN
        context = span_context(mean_TD, first, last, inside)
    start_s = section.start / track.sample_rate
    latents_TD = fill_latents(generator, context, start_s, conditions_at, settings, key)
    made_CN = generator.decode(latents_TD, at_rate_CN.shape[1])
    return track.fitted(made_CN, rate)[:, : section.end - section.start]


def _fitted(made_CN: Tensor, track: Track, operation: Operation, section: _Section) -> Tensor:
    """The samples of the span, with its seams."""
    (start, end), rate = section.span, track.sample_rate
    length = end - start
    offset = start - section.start
    made_CN = torch.nn.functional.pad(made_CN, (0, max(0, offset + length - made_CN.shape[1])))
    original_CN = track.waveform(start, end)
    original_CN = torch.nn.functional.pad(original_CN, (0, length - original_CN.shape[1]))
    if operation == "add":
        part_CN = made_CN[:, offset : offset + length].clone()
        size = min(round(FADE_S * rate), length // 2)
        if size:
            part_CN[:, :size] *= fade_weights(size)
            part_CN[:, -size:] *= fade_weights(size).flip(0)
        return original_CN + part_CN
    width, most = round(WINDOW_S * rate), round(MOST_LAG_S * rate)
    before_CN = track.waveform(max(0, start - width), start)
    after_CN = track.waveform(end, end + width) if end < track.num_samples else original_CN[:, :0]
    part_CN = _aligned(made_CN, before_CN, after_CN, offset, length, most, rate)
    return with_seams(part_CN, before_CN, after_CN, original_CN if operation == "remove" else None, rate)


def _aligned(
    made_CN: Tensor, before_CN: Tensor, after_CN: Tensor, offset: int, length: int, most: int, rate: int
) -> Tensor:
    """The made span moved to fit the track before it, and from its middle on to fit the track after it."""
    most = min(most, length // 4)
    padded_CN = torch.nn.functional.pad(
        made_CN, (most + before_CN.shape[1], most + after_CN.shape[1] + length)
    )
    shift = most + before_CN.shape[1]  # of a sample of the section in `padded_CN`

    def lag(there_CN: Tensor, begin: int) -> int:
        piece_CN = padded_CN[:, shift + begin - most : shift + begin + there_CN.shape[1] + most]
        return best_lag(there_CN, piece_CN, most)

    early = lag(before_CN, offset - before_CN.shape[1]) if before_CN.shape[1] else 0
    late = lag(after_CN, offset + length) if after_CN.shape[1] else early
    first_CN, second_CN = (
        padded_CN[:, shift + offset + each : shift + offset + each + length] for each in (early, late)
    )
    if early == late:
        return first_CN.clone()
    size = min(2 * round(FADE_S * rate), length // 2)
    begin = (length - size) // 2
    weight_N = torch.zeros(length)
    weight_N[begin : begin + size], weight_N[begin + size :] = fade_weights(size), 1.0
    return first_CN * (1 - weight_N) + second_CN * weight_N
