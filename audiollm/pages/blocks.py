"""The blocks of which sections are made: notices, facts, tables, charts, clips, cards, lists.

A block is HTML (`Markup`). Texts that are given to one are escaped; blocks, None and lists of both are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from audiollm.pages.clips import PageClip
from audiollm.pages.formats import percent_or_dash

_VOID = {"img", "input", "br"}
Content = Any
"""A text, a number, a block, None or False (nothing), or an iterable of these."""


def join(*content: Content) -> Markup:
    """Contents after one another."""
    return Markup("").join(_flat(content))


def _flat(content: Iterable[Content]) -> Iterable[Markup]:
    for item in content:
        if isinstance(item, Markup):
            yield item
        elif isinstance(item, str):
            yield escape(item)
        elif isinstance(item, Iterable):
            yield from _flat(item)
        elif item is not None and item is not False:
            yield escape(item)


def element(tag: str, *content: Content, **attributes: Content) -> Markup:
    """An HTML element. `class_` and `data_at` are written as `class` and `data-at`; None and False are left out."""
    words = [tag]
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            words.append(name)
        elif value is not None and value is not False and (value != "" or name != "class"):
            words.append(f'{name}="{escape(value)}"')
    inside = "" if tag in _VOID else f"{join(content)}</{tag}>"
    return Markup(f"<{' '.join(words)}>{inside}")


# ----------------------------------------------------------------------------------------------- texts


def notice(*content: Content) -> Markup:
    """A gap, an alarm or a problem, set off from the texts around it."""
    return element("p", *content, class_="absent")


def paragraph(*content: Content) -> Markup:
    return element("p", *content)


def note(*content: Content) -> Markup:
    """A small line below what it explains."""
    return element("p", *content, class_="small")


def small(*content: Content, tag: str = "span") -> Markup:
    return element(tag, *content, class_="small")


def isolated(*content: Content) -> Markup:
    """A text from outside, which may run from right to left."""
    return element("bdi", *content)


def file_label(*content: Content, tag: str = "span") -> Markup:
    return element(tag, *content, class_="file")


def heading(title: Content, about: Content = None) -> Markup:
    """The heading of a part of a section, with a small remark."""
    return element("h3", title, about and [" ", small(about)])


def facts(pairs: Iterable[tuple[str, Content]]) -> Markup:
    """Titles with their values, in a row; nothing where there are none."""
    listed = [element("div", element("dt", title), element("dd", value)) for title, value in pairs]
    return element("dl", listed, class_="facts") if listed else Markup()


def definitions(pairs: Iterable[tuple[Content, Content]], style: str = "") -> Markup:
    """Titles with their texts, one below the other."""
    listed = [element("div", element("dt", title), element("dd", text)) for title, text in pairs]
    return element("dl", listed, class_=style)


def details(summary: Content, *content: Content, is_open: bool = False, style: str = "") -> Markup:
    """What a click shows."""
    return element("details", element("summary", summary), *content, class_=style, open=is_open)


def configuration(stages: Iterable[tuple[Content, Iterable[tuple[str, Content]]]]) -> Markup:
    """Settings of stages, each below its name."""
    return element("div", [details(name, definitions(pairs)) for name, pairs in stages], class_="settings")


def counted_reasons(pairs: Iterable[tuple[Content, int]]) -> Markup:
    """Names with their counts, as a row of labels."""
    return element(
        "ul", [element("li", bold(f"{count:,}"), " ", name) for name, count in pairs], class_="reasons"
    )


def bold(*content: Content) -> Markup:
    return element("b", *content)


def share_bar(percent: float, style: str = "", digits: int = 1, lost_percent: float = 0.0) -> Markup:
    """A bar that is filled to `percent`, and from there for what was lost."""
    filled = element("i", style=f"width:{percent:.{digits}f}%")
    lost = lost_percent and element("i", class_="lost", style=f"width:{lost_percent:.{digits}f}%")
    return element("span", filled, lost or None, class_=f"bar {style}".strip())


def label_bars(rows: Iterable[tuple[Content, int, float, bool]]) -> Markup:
    """Counts of labels as bars: name, count, width in percent, and whether it is out of what is wanted."""
    listed = [
        element(
            "li",
            element("span", name),
            share_bar(percent),
            element("span", f"{count:,}"),
            class_="out" if is_out else "",
        )
        for name, count, percent, is_out in rows
    ]
    return element("ul", listed, class_="labels") if listed else Markup()


def alarms(rows: Iterable[tuple[int, str, str]]) -> Markup:
    """Step (counted from 0), kind and text of the alarms of a training; steps are shown as on the console, from 1."""
    return join(notice(bold(kind), f" (step {step + 1:,}): {text}") for step, kind, text in rows)


# ---------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Cell:
    """A cell of a table with attributes of its own (`class_`, `colspan`, `style`)."""

    content: Content
    attributes: Mapping[str, Content] = field(default_factory=dict)


def cell(*content: Content, **attributes: Content) -> Cell:
    return Cell(content, attributes)


def table(
    headings: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    style: str = "numbers",
    has_row_headings: bool = True,
    over: Sequence[Content] = (),
) -> Markup:
    """A table that can be scrolled where it is wide. The first cell of a row is its heading.

    Args:
        headings: an empty one is no heading.
        has_row_headings: whether it is; the cells of a list are all alike.
        over: a row of headings above the others, of several columns each.
    """
    lines = []
    for row in rows:
        cells = [_body_cell(content) for content in row]
        if has_row_headings:
            cells[0] = element("th", row[0], scope="row")
        lines.append(element("tr", cells))
    head = [element("tr", [_head_cell(content) for content in line]) for line in (over, headings) if line]
    return scrolled(element("table", element("thead", head), element("tbody", lines), class_=style))


def scrolled(*content: Content) -> Markup:
    """What may be wider than the page."""
    return element("div", *content, class_="wide")


def _body_cell(content: Content) -> Markup:
    if isinstance(content, Cell):
        return element("td", content.content, **content.attributes)
    return element("td", content)


def _head_cell(content: Content) -> Markup:
    if isinstance(content, Cell):
        return element("th", content.content, **content.attributes)
    return element("th", content, scope="col" if content else None)


def reasons_table(what: str, rows: Iterable[tuple[str, str]]) -> Markup:
    """Files or cases with the reason why they have no value."""
    listed = [(cell(name, class_="file"), reason) for name, reason in rows]
    return table([what, "reason"], listed, "list", has_row_headings=False)


def set_aside_table(rows: Iterable[Mapping[str, str]], num_more: int) -> Markup:
    """Rows of `set_aside.jsonl`: place, id, kind, reason, stage."""
    headings = ("recording or place", "reason", "particulars", "stage")
    listed = [
        (
            cell(isolated(row["place"]), row["id"] and [" ", small(row["id"])], class_="file"),
            row["kind"],
            row["reason"],
            row["stage"],
        )
        for row in rows
    ]
    more = note(f"And {num_more:,} more in set_aside.jsonl.") if num_more else None
    return join(table(headings, listed, "list", has_row_headings=False), more)


def score_cell(table: Mapping[str, Any]) -> Markup:
    """A share with its interval, drawn and in words; a dash without a value.

    Args:
        table: `accuracy` (or `value`), `low`, `high` and `n`, as `share` of `audiollm.evaluate` gives them.
    """
    value, low, high = table.get("value", table.get("accuracy")), table.get("low"), table.get("high")
    if value is None:
        return escape("–")
    if low is None or high is None:
        return join(bold(percent_or_dash(value)), small(f"n = {table.get('n')}"))
    drawn = element(
        "span",
        element("i", style=f"left:{100 * low}%;width:{100 * (high - low)}%"),
        element("b", style=f"left:{100 * value}%"),
        class_="interval",
        aria_hidden="true",
    )
    interval = f"{percent_or_dash(low)} to {percent_or_dash(high)}, n = {table.get('n')}"
    return join(bold(percent_or_dash(value)), drawn, small(interval))


def mark(is_right: bool | None) -> Markup:
    """Right, wrong or not judged."""
    if is_right is None:
        return element("span", "·", class_="mark", aria_label="not judged")
    word, sign = ("right", "✓") if is_right else ("wrong", "✗")
    return element("span", sign, class_=f"mark {word}", role="img", aria_label=word)


def heat(
    rows: Iterable[tuple[Content, Sequence[tuple[Content, float, bool]]]],
    headings: Sequence[Content],
    style: str = "heat",
    over: Sequence[Content] = (),
) -> Markup:
    """A table whose cells are coloured by a share: text, share, and whether it is a hit."""
    listed = [
        [
            name,
            *(
                cell(text, class_="hit" if hit else "", style=f"--share:{share:.3f}")
                for text, share, hit in cells
            ),
        ]
        for name, cells in rows
    ]
    return table(headings, listed, style, over=over)


def confusion_table(matrix: Mapping[str, Any] | None, verb: str = "heard") -> Markup:
    """A confusion matrix of `audiollm.evaluate`, each count coloured by its share of its row; nothing without one.

    The column of nothing heard is left out where it is empty.
    """
    if not matrix or not matrix["counts"]:
        return Markup()
    heard_labels, counts = list(matrix["heard"]), [list(row) for row in matrix["counts"]]
    if len(heard_labels) > len(matrix["asked"]) and not any(row[-1] for row in counts):
        heard_labels, counts = heard_labels[:-1], [row[:-1] for row in counts]
    rows = [
        (
            asked,
            [
                (n or "", n / max(1, sum(row)), name == asked)
                for name, n in zip(heard_labels, row, strict=True)
            ],
        )
        for asked, row in zip(matrix["asked"], counts, strict=True)
    ]
    return heat(rows, [small(f"asked ↓ {verb} →"), *heard_labels])


# ------------------------------------------------------------------------------------ charts and clips


class Chart(NamedTuple):
    """A picture with its title; without a point its `svg` is None."""

    title: str
    svg: Markup | None
    note: str = ""


def charts(listed: Iterable[Chart], style: str = "") -> Markup:
    """Those charts that have a point.

    Args:
        style: `two` for larger ones.
    """
    figures = [
        figure(chart.svg, chart.title, chart.note and note(chart.note)) for chart in listed if chart.svg
    ]
    return element("div", figures, class_=f"charts {style}".strip()) if figures else Markup()


def figure(picture: Markup, title: Content, *below: Content, style: str = "") -> Markup:
    """A picture below its title."""
    return element("figure", element("figcaption", title), picture, *below, class_=f"card {style}".strip())


def clip(sound: PageClip, label: str) -> Markup:
    """A clip to play with its spectrogram, or the reason why there is none.

    Args:
        label: what it is, for those who hear the page.
    """
    if sound.problem or sound.spectrogram is None:
        return notice(f"No sound: {sound.problem}")
    picture = sound.spectrogram
    frequencies = [element("span", text, style=f"bottom:{place}%") for place, text in picture.frequency_ticks]
    times = [element("span", text, style=f"left:{place}%") for place, text in picture.time_ticks]
    screen = element(
        "div",
        element("img", src=picture.image, alt=f"spectrogram of {label}"),
        sound.span and element("i", class_="span", style=f"left:{sound.span[0]}%;width:{sound.span[1]}%"),
        element("i", class_="head"),
        sound.audio and element("button", hidden=True, type="button", aria_label=f"play {label}"),
        class_="screen",
    )
    plot = element(
        "div",
        element("div", frequencies, class_="frequencies", aria_hidden="true"),
        screen,
        element("span", "kHz", class_="unit"),
        element(
            "div",
            times,
            element("span", f"{sound.duration_s:.2f} s", class_="second"),
            class_="times",
            aria_hidden="true",
        ),
        class_="plot",
    )
    return element("div", plot, player(sound, label), class_="clip")


def player(sound: PageClip, label: str) -> Markup:
    """The player of a clip alone."""
    audio = sound.audio and element("audio", controls=True, preload="none", src=sound.audio, aria_label=label)
    return join(audio, note("The first half minute.") if sound.cut else None)


def named_clips(clips: Iterable[tuple[Content, PageClip]], about: str) -> Markup:
    """Clips side by side, each below its name."""
    listed = [
        element(
            "div", element("p", name, class_="clip-name"), clip(sound, f"{join(name).striptags()}, {about}")
        )
        for name, sound in clips
    ]
    return element("div", listed, class_="trio")


def message(text: str, clips: Iterable[PageClip], label: str) -> Markup:
    """The words and the recordings of a message or an answer."""
    return join(text and element("p", text, class_="said"), [clip(sound, label) for sound in clips])


# ----------------------------------------------------------------------------------------------- cards


def card(title: Content, *content: Content, style: str = "", badge: str = "") -> Markup:
    """A case of a list, below its title.

    Args:
        badge: what is wrong with it.
    """
    wrong = element("span", badge, class_="badge") if badge else None
    style = " ".join(filter(None, ["card", "bad" if badge else "", style]))
    return element("article", element("h4", title, wrong), *content, class_=style)


def cards(listed: Iterable[Markup], style: str = "") -> Markup:
    """Cards side by side.

    Args:
        style: `wide-cards` for wider ones.
    """
    return element("div", listed, class_=f"cards {style}".strip())


def example(title: Content, *content: Content) -> Markup:
    """A case that takes the whole width."""
    return element("article", element("h3", title), *content, class_="card example")


def lines(*content: Content, file: Content = None) -> Markup:
    """Short lines below a clip, those that are not empty; the name of its file last."""
    listed = [element("li", line) for line in chain(content) if line]
    last = element("li", file, class_="file") if file is not None else None
    return element("ul", listed, last, class_="verdicts")


def chips(listed: Iterable[Content]) -> Markup:
    """Small labels; nothing where there are none."""
    items = [
        item if isinstance(item, Markup) and item.startswith("<li") else element("li", item)
        for item in listed
    ]
    return element("ul", items, class_="chips") if items else Markup()


# ---------------------------------------------------------------------------------------------- stages


class StagePart(NamedTuple):
    """The part of one stage in a section on all stages of a kind."""

    name: str
    absent: str
    """Why the stage has no result; empty where it has."""
    brief: str
    """What stands beside its name."""
    content: Markup


def stage_parts(parts: Sequence[StagePart]) -> Markup:
    """One part as it is; several each below the name of its stage, the last with something to show open."""
    if len(parts) == 1:
        return parts[0].content
    last = next(reversed([part for part in parts if not part.absent] or parts), None)
    return join(
        details(
            [element("h3", part.name), " ", small(part.brief)],
            part.content,
            is_open=part is last,
            style="stage",
        )
        for part in parts
    )
