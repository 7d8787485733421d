"""Lines of the tables that `inspect` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from audiollm.data.inspection import StreamRow

ON, OFF = "●", "·"
"""Marks of a target and of a masked position."""


@dataclass(frozen=True)
class SampleView:
    """A sample compiled, and what was assumed for it."""

    heading: str
    notes: list[str]
    books: int
    """Codebooks of a row."""
    rows: list[StreamRow]
    summary: list[dict[str, Any]]
    has_codes: bool


def row_cells(row: StreamRow, width: int, books: int) -> Text:
    """Kind, token or codes, and targets of a row, padded to the same width for every row.

    Args:
        width: characters of the column of tokens and codes.
        books: codebooks of the codec.
    """
    line = Text(f"{row.kind:<9}  ", style={"text": "cyan", "audio in": "magenta"}.get(row.kind, "blue"))
    if row.codes:
        for place, (code, is_target) in enumerate(zip(row.codes, row.is_target, strict=True)):
            line.append(" " * (place > 0) + f"{code:>4}", style="green" if is_target else "dim")
        line.append(" " * (width - (5 * books - 1)))
    else:
        line.append(f"{row.token:<{width}}", style="green" if row.is_target[0] else "")
    line.append("  ")
    for is_target in row.is_target:
        line.append(ON if is_target else OFF, style="green" if is_target else "dim")
    return line.append(" " * (max(books, 6) - len(row.is_target)))


def row_line(row: StreamRow, width: int, books: int) -> Text:
    """The line of a row: position, `row_cells` and the weight of its targets."""
    weight = sum(row.weights)
    line = Text(f"{row.position:>6}  ", style="dim").append_text(row_cells(row, width, books))
    return line.append(f"  {weight:.4f}" if weight else f"  {OFF}", style="green" if weight else "dim")


def left_out(rows: Sequence[StreamRow], width: int, books: int, has_codes: bool) -> Text:
    """The line in place of rows of audio that are left out."""
    weight = sum(sum(row.weights) for row in rows)
    trained = all(all(row.is_target) for row in rows)
    masked = not any(any(row.is_target) for row in rows)
    state = "all targets" if trained else "all masked" if masked else "targets"
    frames = "" if has_codes or not rows[0].codes else f" for {len(rows) - books - 1} frames"
    text = f"… {len(rows)} rows of {rows[0].kind}{frames}, {state}"
    line = Text(f"{'':>6}  {'':<9}  {text:<{width}}  {'':<{max(books, 6)}}", style="dim")
    return line.append(f"  {weight:.4f}" if weight else f"  {OFF}")
