"""Pictures of interpretation as inline SVG: quality over latency, and the timeline of one source and its output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from audiollm.evaluate.interpret.logged_outputs import LoggedOutput

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 560.0, 300.0, 52.0, 40.0, 26.0, 20.0
_ROW, _LETTER = 16.0, 7.0
"""Height of a row of the names, and the width that is kept for a letter."""
_COLOURS = ("#4269d0", "#c2410c", "#15803d", "#a855f7", "#0e7490", "#92400e")
"""Where the picture stands in no page of ours, which has its own."""


@dataclass(frozen=True)
class QualityPoint:
    """A system in the picture of quality over latency."""

    name: str
    latency: float
    quality: float
    is_on_curve: bool = False
    """Whether a line joins it to the others that are: settings of one system."""


def quality_over_latency(points: Sequence[QualityPoint], latency: str, quality: str) -> str:
    """Draw systems as numbered points, with their names beside the picture: better ones lie up and left."""
    height = max(_HEIGHT, _TOP + _ROW * len(points) + 10)
    x_low, x_high = _axis_range([point.latency for point in points])
    y_low, y_high = _axis_range([point.quality for point in points])

    def at(x: float, y: float) -> tuple[float, float]:
        right, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return _LEFT + right * (_WIDTH - _LEFT - _RIGHT), height - _BOTTOM - up * (height - _TOP - _BOTTOM)

    parts = []
    for tick in _axis_ticks(y_low, y_high):
        y = at(x_low, tick)[1]
        parts += [_svg_line(_LEFT, y, _WIDTH - _RIGHT, y), _svg_text(_LEFT - 6, y + 4, f"{tick:.6g}", "end")]
    for tick in _axis_ticks(x_low, x_high):
        x = at(tick, y_low)[0]
        parts += [
            _svg_line(x, _TOP, x, height - _BOTTOM),
            _svg_text(x, height - _BOTTOM + 16, f"{tick:.6g}", "middle"),
        ]
    curve = sorted((point.latency, point.quality) for point in points if point.is_on_curve)
    if len(curve) > 1:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        parts.append(
            f'<polyline points="{places}" fill="none" stroke="currentColor" stroke-dasharray="4 3"/>'
        )
    for place, point in enumerate(points):
        x, y = at(point.latency, point.quality)
        style = f'r="5" fill="{_page_colour(place % 6)}"'
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" {style}><title>{_escape(point.name)}</title></circle>'
        )
        parts.append(
            _svg_text(x + (7 if place % 2 else -7), y - 6, f"{place + 1}", "start" if place % 2 else "end")
        )
        row = _TOP + _ROW * place
        parts.append(f'<circle cx="{_WIDTH + 6:g}" cy="{row:.1f}" {style}/>')
        parts.append(_svg_text(_WIDTH + 16, row + 4, f"{place + 1}  {point.name}", "start"))
    parts.append(_svg_text((_LEFT + _WIDTH - _RIGHT) / 2, height - 6, latency, "middle"))
    parts.append(_svg_text(4, 10, quality, "start"))
    names = _LETTER * max(len(point.name) for point in points) + 44
    return _svg(_WIDTH + names, height, parts, f"{quality} over {latency}")


def timeline(output: LoggedOutput, units: Sequence[str], times: Sequence[float], per_second: float) -> str:
    """Draw the source as a bar, and below it the output when it came out: words, or pieces of speech as heard.

    Args:
        per_second: units of time per second: 1000 for milliseconds.
    """
    intervals = output.playback().intervals if output.is_speech else ()
    end = max([output.source_length, *times, *(start + length for start, length in intervals)])
    width = max(_WIDTH, 70.0 * end / per_second)
    scale = (width - 20) / end
    parts = [
        f'<rect x="10" y="6" width="{output.source_length * scale:.1f}" height="14" fill="{_page_colour(0)}"/>',
        _svg_text(14, 17, "source", "start", "var(--surface, #fff)"),
    ]
    for start, length in intervals:
        parts.append(
            f'<rect x="{10 + start * scale:.1f}" y="26" width="{max(1.0, length * scale):.1f}" height="14" '
            f'fill="{_page_colour(1)}" fill-opacity="0.6"/>'
        )
    right, ends = width, [-1e9] * 4
    for unit, time in zip(units, times, strict=False):
        x = 10 + time * scale
        lane = min(range(len(ends)), key=lambda index: (ends[index] > x, index))
        ends[lane] = x + 7.5 * len(unit) + 6
        parts.append(_svg_line(x, 24, x, 46 + lane * 14))
        parts.append(_svg_text(x + 2, 56 + lane * 14, unit, "start"))
        right = max(right, ends[lane])
    bottom = 46 + 4 * 14 + 12
    for second in range(int(end / per_second) + 1):
        parts.append(_svg_text(10 + second * per_second * scale, bottom + 8, f"{second} s", "middle"))
    return _svg(right, bottom + 14, parts, "timeline of source and output")


def _page_colour(number: int) -> str:
    """A colour of the page of a suite, or of that of a run."""
    return f"var(--c{number}, var(--m{number}, {_COLOURS[number]}))"


def _axis_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.1 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _axis_ticks(low: float, high: float) -> list[float]:
    """Round values between the two, four to nine of them: steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next((power * multiple for multiple in (5, 2) if power * multiple * 4 <= high - low), power)
    return [place * step for place in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    head = (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" aria-label="{_escape(title)}">'
    )
    return f"{head}{''.join(parts)}</svg>"


def _svg_line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="var(--line, #ddd)"/>'


def _svg_text(x: float, y: float, text: str, anchor: str, colour: str = "currentColor") -> str:
    style = f'font-size="11" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{_escape(text)}</text>'


def _escape(text: str) -> str:
    from html import escape

    return escape(text)
