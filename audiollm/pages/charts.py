"""Charts for a page, as inline SVG that takes the page's colours."""

from __future__ import annotations

import hashlib
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
DISTINCT_COLOURS = [f"var(--c{index})" for index in range(6)]
"""Colours of few names; further names reuse them."""
COMPARED_COLOURS, _DASHES = 8, ("-", (0, (4, 1.5)), (0, (1, 1.3)), (0, (5, 1.3, 1, 1.3)))
MAX_COMPARED = COMPARED_COLOURS * len(_DASHES)
"""Most series that a picture of several methods tells apart: each colour in each kind of line."""
_MAX_POINTS = 800
_SMOOTHED_SHARE, _FEWEST_SMOOTHED = 0.1, 20
"""Share of a line's points that each of its drawn points is the mean of, and the fewest points for that."""
_MAX_DRAWN = 1e30


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

    The first and the last have the page's two colours, those between have colours between. A row of a training's
    figures is of a single step, whose batch differs from the next one's: lines are drawn as running means, with the
    rows pale behind them where there are at most three.

    Args:
        title: what the chart shows, for those who hear the page.
        legend_title: what the names of the series are.
    """
    series = [curve for curve in series if curve.points]
    if not series:
        return None

    def draw(axes: Axes) -> None:
        for colour, curve in zip(_SERIES[: len(series)], series, strict=True):
            if not curve.dotted and len(series) <= 3 and running_means(curve.points) is not curve.points:
                axes.plot(*_split_points(curve.points), color=colour, linewidth=0.9, alpha=0.3)
            _plot_curve(axes, curve, color=colour, linewidth=1.4, label=curve.name, markersize=3.2)
        _fit_axes(axes, series, y_label)
        if len(series) > 1:
            is_crowded = len(series) > 3
            axes.legend(
                frameon=False,
                fontsize=8 if is_crowded else 9,
                handlelength=1.0 if is_crowded else 1.6,
                borderaxespad=0.1,
                ncols=2 if is_crowded else 1,
                columnspacing=1.0,
                labelspacing=0.25 if is_crowded else 0.5,
                title=legend_title or None,
                title_fontsize=8.5,
            )

    return _drawn((3.15, 2.35), draw, title, _colours_between(len(series)))


def compared_chart(series: Sequence[Series], y_label: str, title: str) -> Markup | None:
    """One larger chart of up to `MAX_COMPARED` series without a legend; None where there is no point at all.

    The colour and the kind of line of a series follow from its place (`line_style`), also where others have no points:
    one legend beside them serves several charts.
    """
    visible = [(place, curve) for place, curve in enumerate(series[:MAX_COMPARED]) if curve.points]
    if not visible:
        return None

    def draw(axes: Axes) -> None:
        for place, curve in visible:
            colour, dashes = line_style(place)
            style = {"color": _SERIES[colour], "linestyle": _DASHES[dashes]}
            _plot_curve(axes, curve, linewidth=1.5, markersize=3, **style)
        _fit_axes(axes, [curve for _, curve in visible], y_label)

    return _drawn((4.5, 2.7), draw, title, [f"var(--m{place})" for place in range(COMPARED_COLOURS)])


def line_style(place: int) -> tuple[int, int]:
    """The number of the colour and that of the kind of line by which the series at a place is told apart."""
    return place % COMPARED_COLOURS, place // COMPARED_COLOURS % len(_DASHES)


def reliability_chart(bins: Sequence[tuple[float, float, int]], title: str) -> Markup | None:
    """Bars of accuracy by confidence, with a line in each at its mean confidence; None without a pair in any bin.

    Args:
        bins: mean confidence, accuracy, and number of pairs of each bin.
        title: what the chart shows, for those who hear the page.
    """
    filled_bins = [bin_values for bin_values in bins if bin_values[2] > 0]
    if not filled_bins:
        return None
    lowest = 0.5 if all(confidence >= 0.5 for confidence, _, _ in filled_bins) else 0.0
    centres, width = _bin_centres([confidence for confidence, _, _ in filled_bins], lowest)
    accuracies = [accuracy for _, accuracy, _ in filled_bins]

    def draw(axes: Axes) -> None:
        axes.plot([lowest, 1], [lowest, 1], color=_GRID, linestyle=(0, (4, 2)), linewidth=1.4)
        axes.bar(centres, accuracies, width=0.84 * width, color=_SERIES[0], alpha=0.45)
        for centre, (confidence, _, count) in zip(centres, filled_bins, strict=True):
            ends = [centre - 0.42 * width, centre + 0.42 * width]
            axes.plot(ends, [confidence, confidence], color=_SERIES[1], linewidth=2)
            axes.text(centre, 0.025, f"{count:,}", ha="center", fontsize=8)
        axes.set_xlim(lowest, 1)
        axes.set_ylim(0, 1.04)
        axes.set_xlabel("confidence of the model")
        axes.set_ylabel("share in the right order")
        axes.tick_params(length=3, width=0.6)

    return _drawn((4.5, 2.9), draw, title, _colours_between(2))


def bar_chart(bars: Mapping[str, Sequence[float | None]], groups: Sequence[str], title: str) -> Markup:
    """Bars side by side for each group: a colour of `DISTINCT_COLOURS` for each name."""

    def draw(axes: Axes) -> None:
        width = 0.8 / len(bars)
        for index, values in enumerate(bars.values()):
            places = [at - 0.4 + (index + 0.5) * width for at in range(len(groups))]
            heights = [0.0 if value is None else value for value in values]
            axes.bar(places, heights, width * 0.9, color=_SERIES[index % len(DISTINCT_COLOURS)])
        if not any(value for values in bars.values() for value in values):
            axes.set_ylim(0, 1)
        axes.grid(visible=False, axis="x")
        axes.set_xticks(range(len(groups)), groups)
        axes.tick_params(length=0)

    return _drawn((3.3, 2.2), draw, title, DISTINCT_COLOURS)


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, title: str, *, is_counted: bool = False
) -> Markup:
    """Lines through (x, y) points: a colour of `DISTINCT_COLOURS` for each name.

    Args:
        is_counted: x is a whole number, and y begins at 0.
    """
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes) -> None:
        for index, points in enumerate(lines.values()):
            colour = _SERIES[index % len(DISTINCT_COLOURS)]
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.4, linewidth=1.5)
        if is_counted:
            axes.set_ylim(bottom=0)
        elif not any(y for points in lines.values() for _, y in points):
            axes.set_ylim(0, 1)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=is_counted))
        axes.tick_params(length=3, width=0.6)

    return _drawn((3.3, 2.2), draw, title, DISTINCT_COLOURS)


def scatter_chart(
    groups: Mapping[str, Sequence[tuple[float | str, float]]],
    x_label: str,
    title: str,
    *,
    steps: Sequence[tuple[float, float]] = (),
    is_log: bool = False,
) -> Markup:
    """Points (x, y): a colour of `DISTINCT_COLOURS` for each group, with a legend where there are several.

    Args:
        groups: x is a number, or a text that has a place of its own on the axis.
        steps: corners of a line of steps behind the points.
        is_log: x has a logarithmic axis.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    places = [x for points in groups.values() for x, _ in points]

    def draw(axes: Axes) -> None:
        if steps:
            axes.step(*zip(*steps, strict=True), where="post", color=_SERIES[0], linewidth=1.2, alpha=0.6)
        for index, (name, points) in enumerate(groups.items()):
            if points:
                colour = _SERIES[index % len(DISTINCT_COLOURS)]
                axes.scatter([x for x, _ in points], [y for _, y in points], color=colour, s=14, label=name)
        if len(groups) > 1:
            axes.legend(frameon=False, fontsize=8)
        axes.set_xlabel(x_label)
        if is_log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        elif not any(isinstance(x, str) for x in places):
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=all(float(x).is_integer() for x in places)))
        axes.tick_params(length=3, width=0.6)

    return _drawn((3.3, 2.2), draw, title, DISTINCT_COLOURS)


def _drawn(
    size: tuple[float, float], draw: Callable[[Axes], None], title: str, colours: Sequence[str]
) -> Markup:
    """The picture that `draw` draws, of a size in inches, with the page's colours for those of the series."""
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context(_SVG_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    page_colours = {_INK: "currentColor", _GRID: "var(--line)", **dict(zip(_SERIES, colours, strict=False))}
    return _inline(buffer.getvalue().decode(), title, page_colours)


def _plot_curve(axes: Axes, curve: Series, **style: Any) -> None:
    """A curve as running means, or as dots where they are evaluations."""
    means = curve.points if curve.dotted else running_means(curve.points)
    axes.plot(*_split_points(means), marker="o" if curve.dotted or len(means) == 1 else None, **style)


def _bin_centres(confidences: Sequence[float], lowest: float) -> tuple[list[float], float]:
    """The centres of bins of equal width, one for each confidence, and the width: the fewest bins that part them."""
    for count in (10, 20, 50):
        width = (1 - lowest) / count
        places = [min(count - 1, max(0, int((value - lowest) / width))) for value in confidences]
        if len(set(places)) == len(places):
            return [lowest + (place + 0.5) * width for place in places], width
    return list(confidences), (1 - lowest) / 50


def _fit_axes(axes: Axes, series: Sequence[Series], y_label: str) -> None:
    """Set the visible range and the labels."""
    low, high, highest = _find_visible_range(series)
    axes.set_ylim(low, high)
    if highest > high:
        axes.text(0.16, 0.93, f"from {highest:.3g}", transform=axes.transAxes, fontsize=8.5)
    _label(axes, y_label)


def _colours_between(count: int) -> list[str]:
    """The page's two colours, for the first and the last of `count` series, and colours between."""
    first, last = "var(--first)", "var(--second)"
    between = [
        f"color-mix(in oklch, {last} {100 * number / (count - 1):.0f}%, {first})"
        for number in range(1, count - 1)
    ]
    return [first, *between, last][:count]


def _label(axes: Axes, y_label: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("training step")
    # beside the axis a long label is cut
    axes.set_title(y_label, loc="left", fontsize=8.5, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_short_number))
    axes.tick_params(length=3, width=0.6)


def running_means(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Each point as the mean of those around it, at the ends of those that there are; few points as they are."""
    reach = round(_SMOOTHED_SHARE * len(points) / 2)
    if len(points) < _FEWEST_SMOOTHED or not reach:
        return points
    sums = [0.0, *itertools.accumulate(value for _, value in points)]
    means = []
    for place, (step, _) in enumerate(points):
        first, last = max(0, place - reach), min(len(points), place + reach + 1)
        means.append((step, (sums[last] - sums[first]) / (last - first)))
    return means


def _split_points(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The steps and the values of at most `_MAX_POINTS` points, the last among them."""
    step = -(-len(points) // _MAX_POINTS)
    thinned = [*points[:-1:step], points[-1]]
    return [at for at, _ in thinned], [value for _, value in thinned]


def _find_visible_range(series: Sequence[Series]) -> tuple[float, float, float]:
    """The visible range of values, and the highest: an early outburst would flatten the rest, and is cut."""
    values, calm = [], []
    for curve in series:
        values += [value for _, value in curve.points]
        calm += [value for step, value in curve.points if step >= 0.1 * curve.points[-1][0]]
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


def _own_ids(svg: str, title: str) -> str:
    """The picture with the ids alone that it refers to, which no other picture of the page has."""
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    prefix = hashlib.blake2b((title + svg).encode(), digest_size=4).hexdigest()
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>c{prefix}-", svg)


def _inline(svg: str, title: str, colours: Mapping[str, str]) -> Markup:
    """matplotlib's SVG without its prologue, its metadata and its colours, and with ids of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _own_ids(svg, title)
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    assert view_box is not None
    head = f'<svg class="chart" viewBox="{view_box.group(1)}" role="img" aria-label="{escape(title)}">'
    svg = head + svg[svg.index(">") + 1 :]
    for stand_in, colour in colours.items():
        svg = svg.replace(stand_in, colour)
    return Markup(svg)
