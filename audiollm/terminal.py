"""Tables for a terminal of any width, in which nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_WHOLE_WIDTH = 28
"""Characters up to which a cell stays on one line; longer ones are texts, which go on in the next line."""
COLUMN_GAP = 2

Cell = str | Text


def print_table(
    console: Console,
    headings: Sequence[Cell],
    rows: Sequence[Sequence[Cell]],
    title: str = "",
    figures: bool = True,
    box: Box | None = SIMPLE_HEAD,
) -> None:
    """Print a table. Where the columns do not fit side by side, more tables follow that repeat the first column.

    Args:
        headings: one per column. Text, not markup.
        rows: a cell per heading.
        figures: all columns but the first are set to the right.
    """
    columns = [
        [_style_cell(heading), *(_style_cell(row[place]) for row in rows)]
        for place, heading in enumerate(headings)
    ]
    if not columns:
        return
    frame = 2 + COLUMN_GAP
    for number, group in enumerate(_group_columns(columns, console.width - frame)):
        table = Table(
            title=Text(title) if title and not number else None,
            title_justify="left",
            box=box,
            padding=(0, COLUMN_GAP // 2),
        )
        for place in group:
            heading, *cells = columns[place]
            width = max(cell.cell_len for cell in (heading, *cells))
            table.add_column(
                heading,
                justify="right" if figures and place else "left",
                overflow="fold",
                min_width=min(width, MAX_WHOLE_WIDTH, console.width - frame),
            )
        for row in range(len(rows)):
            table.add_row(*(columns[place][1 + row] for place in group))
        console.print(table)


def _style_cell(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _group_columns(columns: Sequence[Sequence[Text]], width: int) -> list[list[int]]:
    """The columns of each table, by their places; the first column stands in all of them."""
    needed = [min(MAX_WHOLE_WIDTH, max(cell.cell_len for cell in column)) + COLUMN_GAP for column in columns]
    groups, used = [[0]], needed[0]
    for place in range(1, len(columns)):
        if used + needed[place] > width and len(groups[-1]) > 1:
            groups.append([0])
            used = needed[0]
        groups[-1].append(place)
        used += needed[place]
    return groups
