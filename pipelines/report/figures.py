"""Pictures for the page: curves as inline SVG that takes the page's colours, spectrograms as small PNGs.

Shapes: N samples, M mel bands, T frames.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

# colours that stand for the page's own, which differ between light and dark
_INK, _GRID, _SERIES = "#010203", "#010204", [f"#0102{number:02x}" for number in range(16, 32)]
_SVG_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "audiollm",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.parse_math": False,  # names are shown as they are written: `$\\x$` is no formula
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "figure.facecolor": "none",
}
COMPARED_COLOURS, _DASHES = 8, ("-", (0, (4, 1.5)), (0, (1, 1.3)), (0, (5, 1.3, 1, 1.3)))
MAX_COMPARED = COMPARED_COLOURS * len(_DASHES)
"""Most series that a picture of several methods tells apart: each colour in each kind of line."""
_MAX_POINTS = 800
_MAX_DRAWN = 1e30

DYNAMIC_RANGE_DB = 70.0
_SILENT_DB = -50.0
"""A point below it is dark even where nothing is louder: silence is drawn as silence."""
_BANDS, _COLUMNS, _TICKS_HZ = 96, 420, (500, 1000, 2000, 4000, 8000, 16000)


# ----------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Series:
    """A line of a chart: its name and (step, value) points. `dotted` marks each point (evaluations)."""

    name: str
    points: Sequence[tuple[float, float]]
    dotted: bool = False


def series_of(rows: Sequence[Mapping[str, Any]], key: str, name: str, dotted: bool = False) -> Series:
    """The finite values of `key` in the rows of a `metrics.jsonl`."""
    points = {}
    for row in rows:
        value, step = _drawable(row.get(key)), _drawable(row.get("step"))
        if value is not None and step is not None:
            points[step] = value
    return Series(name, sorted(points.items()), dotted)


def _drawable(value: Any) -> float | None:
    """The value where it is a number that no axis overflows at: a file of figures may be damaged."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < _MAX_DRAWN else None


def curve_chart(series: Sequence[Series], y_label: str, title: str, legend_title: str = "") -> Markup | None:
    """One chart of up to 16 series over the training steps; None where there is no point at all.

    The first and the last have the page's two colours, those between have colours between.

    Args:
        title: what the chart shows, for those who hear the page.
        legend_title: what the names of the series are.
    """
    series = [one for one in series if one.points]
    if not series:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SVG_STYLE):
        figure = Figure(figsize=(3.15, 2.35), layout="constrained")
        axes = figure.add_subplot()
        for colour, one in zip(_SERIES[: len(series)], series, strict=True):
            steps, values = zip(*_thinned(one.points), strict=True)
            marker = "o" if one.dotted or len(steps) == 1 else None
            axes.plot(
                steps, values, color=colour, linewidth=1.4, label=one.name, marker=marker, markersize=3.2
            )
        _fit(axes, series, y_label)
        if len(series) > 1:
            many = len(series) > 3
            axes.legend(
                frameon=False,
                fontsize=8 if many else 9,
                handlelength=1.0 if many else 1.6,
                borderaxespad=0.1,
                ncols=2 if many else 1,
                columnspacing=1.0,
                labelspacing=0.25 if many else 0.5,
                title=legend_title or None,
                title_fontsize=8.5,
            )
        svg = _saved(figure)
    return _inline(svg, title, _page_colours(len(series)))


def compared_chart(series: Sequence[Series], y_label: str, title: str) -> Markup | None:
    """One larger chart of up to `MAX_COMPARED` series without a legend; None where there is no point at all.

    The colour and the kind of line of a series follow from its place (`line_style`), also where others have no points:
    one legend beside them serves several charts.
    """
    shown = [(place, one) for place, one in enumerate(series[:MAX_COMPARED]) if one.points]
    if not shown:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SVG_STYLE):
        figure = Figure(figsize=(4.5, 2.7), layout="constrained")
        axes = figure.add_subplot()
        for place, one in shown:
            colour, dashes = line_style(place)
            steps, values = zip(*_thinned(one.points), strict=True)
            marker = "o" if one.dotted or len(steps) == 1 else None
            style = _DASHES[dashes]
            axes.plot(
                steps,
                values,
                color=_SERIES[colour],
                linestyle=style,
                linewidth=1.5,
                marker=marker,
                markersize=3,
            )
        _fit(axes, [one for _, one in shown], y_label)
        svg = _saved(figure)
    colours = {stand_in: f"var(--m{place})" for place, stand_in in enumerate(_SERIES[:COMPARED_COLOURS])}
    return _inline(svg, title, {_INK: "currentColor", _GRID: "var(--line)", **colours})


def line_style(place: int) -> tuple[int, int]:
    """The number of the colour and that of the kind of line by which the series at a place is told apart."""
    return place % COMPARED_COLOURS, place // COMPARED_COLOURS % len(_DASHES)


def reliability_chart(bins: Sequence[tuple[float, float, int]], title: str) -> Markup | None:
    """Bars of accuracy by confidence, with a line in each at its mean confidence; None without a pair in any bin.

    Args:
        bins: mean confidence, accuracy, and number of pairs of each bin.
        title: what the chart shows, for those who hear the page.
    """
    known = [each for each in bins if each[2] > 0]
    if not known:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    least = 0.5 if all(confidence >= 0.5 for confidence, _, _ in known) else 0.0
    centres, width = _bin_centres([confidence for confidence, _, _ in known], least)
    with matplotlib.rc_context(_SVG_STYLE):
        figure = Figure(figsize=(4.5, 2.9), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([least, 1], [least, 1], color=_GRID, linestyle=(0, (4, 2)), linewidth=1.4)
        axes.bar(
            centres, [accuracy for _, accuracy, _ in known], width=0.84 * width, color=_SERIES[0], alpha=0.45
        )
        for centre, (confidence, _, count) in zip(centres, known, strict=True):
            ends = [centre - 0.42 * width, centre + 0.42 * width]
            axes.plot(ends, [confidence, confidence], color=_SERIES[1], linewidth=2)
            axes.text(centre, 0.025, f"{count:,}", ha="center", fontsize=8)
        axes.set_xlim(least, 1)
        axes.set_ylim(0, 1.04)
        axes.set_xlabel("confidence of the model")
        axes.set_ylabel("share in the right order")
        axes.tick_params(length=3, width=0.6)
        svg = _saved(figure)
    return _inline(svg, title, _page_colours(2))


def _bin_centres(confidences: Sequence[float], least: float) -> tuple[list[float], float]:
    """The centres of bins of equal width, one for each confidence, and the width: the fewest bins that part them."""
    for count in (10, 20, 50):
        width = (1 - least) / count
        places = [min(count - 1, max(0, int((value - least) / width))) for value in confidences]
        if len(set(places)) == len(places):
            return [least + (place + 0.5) * width for place in places], width
    return list(confidences), (1 - least) / 50


def _fit(axes: Axes, series: Sequence[Series], y_label: str) -> None:
    """Set the visible range and the labels."""
    low, high, highest = _limits(series)
    axes.set_ylim(low, high)
    if highest > high:
        axes.text(0.16, 0.93, f"from {highest:.3g}", transform=axes.transAxes, fontsize=8.5)
    _label(axes, y_label)


def _saved(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode()


def _page_colours(count: int) -> dict[str, str]:
    """The page colours that replace the stand-in colours, for a chart of `count` series."""
    first, last = "var(--first)", "var(--second)"
    between = [
        f"color-mix(in oklch, {last} {100 * number / (count - 1):.0f}%, {first})"
        for number in range(1, count - 1)
    ]
    colours = [first, *between, last][:count]
    return {_INK: "currentColor", _GRID: "var(--line)", **dict(zip(_SERIES, colours, strict=False))}


def _label(axes: Axes, y_label: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("training step")
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_short_number))
    axes.tick_params(length=3, width=0.6)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    step = -(-len(points) // _MAX_POINTS)
    return [*points[:-1:step], points[-1]]


def _limits(series: Sequence[Series]) -> tuple[float, float, float]:
    """The visible range of values, and the highest: an early outburst would flatten the rest, and is cut."""
    values, calm = [], []
    for one in series:
        values += [value for _, value in one.points]
        calm += [value for step, value in one.points if step >= 0.1 * one.points[-1][0]]
    low, highest = min(values), max(values)
    high = highest
    if max(calm) - low < 0.35 * (highest - low):
        high = low + (max(calm) - low) / 0.6
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (low - margin if low - margin > 0 or low < 0 else 0.0), high + margin, highest


def _short_number(value: float, _position: int | None = None) -> str:
    if abs(value) >= 10_000:
        size, suffix = (1e6, " M") if abs(value) >= 1e6 else (1e3, " k")
        return f"{value / size:g}{suffix}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.8g}"


def _inline(svg: str, title: str, colours: Mapping[str, str]) -> Markup:
    """matplotlib's SVG without its prologue, metadata, ids and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z.]+_?\d*_\d+"', "", svg)
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    assert view_box is not None
    head = f'<svg class="chart" viewBox="{view_box.group(1)}" role="img" aria-label="{escape(title)}">'
    svg = head + svg[svg.index(">") + 1 :]
    for stand_in, colour in colours.items():
        svg = svg.replace(stand_in, colour)
    return Markup(svg)


# ----------------------------------------------------------------------------------------- spectrograms


@dataclass(frozen=True)
class Spectrogram:
    """A picture with its axes: ticks as (place in percent from the left or the bottom, text)."""

    image: str
    """A PNG as a data URI, low frequencies at the bottom."""
    time_ticks: list[tuple[float, str]]
    frequency_ticks: list[tuple[float, str]]


def mel_decibels(samples_N: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
    """Mel power in dB, `[M, T]`, with windows of 32 ms and at most some 400 frames."""
    import librosa
    import numpy as np

    window = max(16, round(0.032 * sample_rate))
    hop = max(1, round(0.004 * sample_rate), -(-len(samples_N) // _COLUMNS))
    frame = max(2048, 1 << window.bit_length())
    power_MT = librosa.feature.melspectrogram(
        # of a clip that is shorter than a frame librosa warns; what follows it is silence anyway
        y=np.pad(samples_N, (0, max(0, frame - len(samples_N)))),
        sr=sample_rate,
        n_fft=frame,
        win_length=window,
        hop_length=hop,
        n_mels=_BANDS,
        pad_mode="constant",
    )
    power_MT = power_MT[:, : 1 + len(samples_N) // hop]
    decibels: NDArray[np.float32] = 10 * np.log10(np.maximum(power_MT, 1e-12))
    return decibels


def draw_spectrogram(decibels_MT: NDArray[np.float32], sample_rate: int, duration_s: float) -> Spectrogram:
    """Draw the levels down to `DYNAMIC_RANGE_DB` below the loudest point; silence is dark."""
    import numpy as np
    from matplotlib import colormaps
    from PIL import Image

    loudest = max(float(decibels_MT.max()), _SILENT_DB)
    level_MT = np.clip(1 + (decibels_MT - loudest) / DYNAMIC_RANGE_DB, 0, 1)
    picture = Image.fromarray(np.rint(level_MT[::-1] * 255).astype(np.uint8), "P")
    picture.putpalette(np.rint(colormaps["magma"](np.arange(256))[:, :3] * 255).astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    image = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return Spectrogram(image, _time_ticks(duration_s), _frequency_ticks(sample_rate))


def _time_ticks(duration_s: float) -> list[tuple[float, str]]:
    step = next((s for s in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if duration_s / s <= 5), 30.0)
    places = [step * number for number in range(int(duration_s / step) + 1)]
    return [(round(100 * at / duration_s, 2), f"{at:g}") for at in places if at <= 0.72 * duration_s]


def _frequency_ticks(sample_rate: int) -> list[tuple[float, str]]:
    import librosa

    top = float(librosa.hz_to_mel(sample_rate / 2))
    shown = [hz for hz in _TICKS_HZ if hz < 0.46 * sample_rate]
    return [(round(100 * float(librosa.hz_to_mel(hz)) / top, 2), f"{hz / 1000:g}") for hz in shown]
