"""A histogram as inline SVG in the page's own colours: kept and dropped segments on each other, thresholds as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

BINS = 32
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 264.0, 136.0, 36.0, 6.0, 18.0, 18.0
_DIGIT_WIDTH = 6.4
"""Of the texts, in the widest of the fonts."""
_RELATIVE_TOLERANCE = 1e-9
"""Relative difference below which numbers are drawn as equal."""
_LAYERS = (
    (1, "kept", "kept"),
    (2, "dropped", "dropped by this rule"),
    (0, "other", "dropped for another reason"),
)
"""Fate, class and name, from the bottom up."""


def draw_histogram(
    values: Sequence[float], fates: Sequence[int], limits: Sequence[float], title: str
) -> Markup:
    """Bars of counts over the values, and a dashed line at each threshold within the range.

    Args:
        values: at least one, finite.
        fates: of each value 0 (dropped for another reason), 1 (kept) or 2 (dropped by a rule on this value).
        title: what it shows, for those who hear the page.
    """
    low, high, bins = _choose_bins(values, limits)
    counts = [[0, 0, 0] for _ in range(bins)]
    for value, fate in zip(values, fates, strict=True):
        place = min(bins - 1, max(0, math.floor(bins * (value - low) / (high - low))))
        counts[place][fate] += 1
    highest = max(map(sum, counts))
    width = (_WIDTH - _LEFT - _RIGHT) / bins
    scale = (_HEIGHT - _TOP - _BOTTOM) / highest
    parts = [*_count_axis(highest, scale), *_value_axis(low, high)]
    for place, column in enumerate(counts):
        parts += _draw_bin(
            column,
            _LEFT + place * width,
            width,
            scale,
            low + place * (high - low) / bins,
            (high - low) / bins,
        )
    for limit in sorted(set(limits)):
        if low <= limit <= high:
            parts.append(_limit(limit, _across(limit, low, high)))
    head = f'<svg class="chart histogram" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title)}">'
    return Markup(head + "".join(parts) + "</svg>")


def _choose_bins(values: Sequence[float], limits: Sequence[float]) -> tuple[float, float, int]:
    """The range and number of bins: a few far values go into the outermost bins, near thresholds are included."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    inner_low, inner_high = ordered[int(0.005 * len(ordered))], ordered[-1 - int(0.005 * len(ordered))]
    if inner_high > inner_low and high - low > 2 * (inner_high - inner_low):
        low, high = inner_low, inner_high
    size = max(abs(low), abs(high))
    size = size if size > _RELATIVE_TOLERANCE else 1.0
    span = high - low if high - low > _RELATIVE_TOLERANCE * size else size
    for limit in limits:
        if low - span <= limit <= high + span:
            low, high = min(low, limit), max(high, limit)
    if high - low < BINS and abs(high) < 1e6 and all(value == round(value) for value in (*ordered, *limits)):
        low, high = math.floor(low) - 0.5, math.ceil(high) + 0.5
        return low, high, round(high - low)
    if high - low <= _RELATIVE_TOLERANCE * size:
        return low - 0.5 * span, high + 0.5 * span, BINS
    margin = 0.02 * (high - low)
    return low if 0 <= low < margin else low - margin, high + margin, BINS


def _draw_bin(
    counts: Sequence[int], x_left: float, width: float, scale: float, start: float, step: float
) -> list[str]:
    bars, base = [], _HEIGHT - _BOTTOM
    counts_text = ", ".join(f"{counts[fate]:,} {name}" for fate, _, name in _LAYERS if counts[fate])
    for fate, name, _ in _LAYERS:
        height = counts[fate] * scale
        if height:
            base -= height
            bars.append(
                f'<rect class="{name}" x="{x_left + 0.5:.1f}" y="{base:.1f}" width="{max(width - 1, 0.5):.1f}" '
                f'height="{max(height, 0.6):.1f}"/>'
            )
    if not bars:
        return []
    return [
        f"<g><title>{_format_tick(start)} to {_format_tick(start + step)}: {counts_text}</title>{''.join(bars)}</g>"
    ]


def _count_axis(highest: int, scale: float) -> list[str]:
    parts = []
    for count in _choose_ticks(0, highest, 3):
        if count == round(count):
            y = _HEIGHT - _BOTTOM - count * scale
            parts.append(
                f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{_WIDTH - _RIGHT:g}"/>'
                f'<text x="{_LEFT - 4:g}" y="{y + 3:.1f}" text-anchor="end">{_format_tick(count)}</text>'
            )
    return parts


def _value_axis(low: float, high: float) -> list[str]:
    """Ticks under the axis, with as many digits as tell them apart, and as many as have room."""
    ticks = _choose_ticks(low, high, 5)
    texts = [_format_tick(tick) for tick in ticks]
    if len(set(texts)) < len(texts):
        texts = [f"{tick:.6g}" for tick in ticks]
    room = _DIGIT_WIDTH * (2 + max(map(len, texts), default=0))
    stride = max(1, math.ceil(room * len(texts) / (_WIDTH - _LEFT - _RIGHT)))
    parts = []
    for tick, text in list(zip(ticks, texts, strict=True))[::stride]:
        x = _across(tick, low, high)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 4:g}" text-anchor="{_anchor_text(x)}">{text}</text>')
    return parts


def _limit(limit: float, x: float) -> str:
    return (
        f'<path class="limit" d="M{x:.1f} {_TOP - 3:g}V{_HEIGHT - _BOTTOM:g}"/>'
        f'<text class="limit" x="{x:.1f}" y="{_TOP - 6:g}" text-anchor="{_anchor_text(x)}">{_format_tick(limit)}</text>'
    )


def _anchor_text(x: float) -> str:
    """The side of a text that stands at `x`: near an end of the axis it would be cut if it were centred."""
    return "start" if x < _LEFT + 20 else "end" if x > _WIDTH - _RIGHT - 20 else "middle"


def _across(value: float, low: float, high: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low)


def _choose_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers in a range."""
    step = (high - low) / count
    size = 10.0 ** math.floor(math.log10(step))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= step)
    first = math.ceil(low / step)
    return [step * (first + place) for place in range(math.floor(high / step) - first + 1)]


def _format_tick(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= (1e4 if letter == "k" else size):
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) > 1e-12 else "0"
