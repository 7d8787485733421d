"""Sounds longer than those of the training: made in windows, each of which keeps the end of the one before it.

Shapes: C channels, N samples, T latents, D latent dimension.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from audiollm.errors import ConfigError
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.context import AudioContext, LatentState, hidden_context
from audiollm.flow.model.packed import Conditions
from audiollm.flow.model.sampling import SamplerSettings

CONTEXT_SHARE = 1 / 3
"""Share of a window that is kept from what is before it."""
_LONGER_S = 0.5
"""Seconds by which a sound may be longer than those of the training, and still be made at once."""

ConditionsAt = Callable[[float, float], Conditions]
"""The conditions of a part of a sound: its first second and its length in seconds."""


def make_in_windows(
    generator: SoundGenerator,
    conditions_at: ConditionsAt,
    duration_s: float,
    settings: SamplerSettings,
    key: str,
) -> Tensor:
    """Sound `[C, N]` of any length from conditions; at once where the training had sounds as long.

    Raises:
        ConfigError: a longer one, and the model was trained without audio context; or see `SoundGenerator.make`.
    """
    check_length(generator, duration_s)
    if fits_at_once(generator, duration_s):
        return generator.make(conditions_at(0.0, duration_s), duration_s, settings, key)
    num_samples = generator.samples_of(duration_s)
    context = hidden_context(generator.latents_of(num_samples), generator.model.latent_dim)
    latents_TD = fill_latents(generator, context, 0.0, conditions_at, settings, key)
    return generator.decode(latents_TD, num_samples)


def fits_at_once(generator: SoundGenerator, duration_s: float) -> bool:
    """Whether a sound is no longer than those of the training, or by little."""
    return duration_s <= generator.model.config.longest_s + _LONGER_S


def check_length(generator: SoundGenerator, duration_s: float) -> None:
    """Refuse a length that cannot be made.

    Raises:
        ConfigError: it is longer than the sounds of the training, and the model was trained without audio context.
    """
    config = generator.model.config
    if not fits_at_once(generator, duration_s) and not config.context_trained:
        raise ConfigError(
            f"{duration_s:g} s: the model was trained on {config.longest_s:.1f} s, and cannot continue a sound",
            "sampling",
            "make a shorter one, or train with audio_context",
        )


def fill_latents(
    generator: SoundGenerator,
    context: AudioContext,
    start_s: float,
    conditions_at: ConditionsAt,
    settings: SamplerSettings,
    key: str,
) -> Tensor:
    """Make all latents of a context that are not kept, window by window, `[T, D]`.

    Args:
        start_s: the second of the track at which the context begins.
    """
    rate = generator.latent_rate
    total = len(context.state_L)
    window = max(2, round(generator.model.config.longest_s * rate))
    latents_TD, state_T = context.latents_LD.clone(), context.state_L.clone()
    missing_latents = (~context.fixed_L).nonzero()[:, 0]
    if not len(missing_latents):
        return latents_TD
    first, last = int(missing_latents[0]), int(missing_latents[-1]) + 1
    number = 0
    while first < last:
        begin = 0 if total <= window else max(0, min(first - round(window * CONTEXT_SHARE), total - window))
        end = min(total, begin + window)
        window_context = AudioContext(latents_TD[begin:end], state_T[begin:end])
        conditions = conditions_at(start_s + begin / rate, (end - begin) / rate)
        made_TD = generator.sample_latents(
            conditions, end - begin, settings, f"{key}/{number}", window_context
        )
        latents_TD[begin:end] = made_TD
        state_T[begin:end] = LatentState.FIXED
        first, number = end, number + 1
    return latents_TD
