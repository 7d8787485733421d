"""The section on corrections: how many segments people corrected, and corrections that have lost their segments."""

from __future__ import annotations

from audiollm.pages.blocks import facts, heading, join, note, set_aside_table
from audiollm.pages.page import Section
from pipelines.review.applied import UNMATCHED
from pipelines.steps.page.folder import Folder, Row, clean_text, named
from pipelines.steps.page.funnel import count_of

ROWS_SHOWN = 50
TITLES = {
    "segments": "segments with a correction", "text": "texts", "speaker": "speakers", "span": "spans",
    "accepted": "accepted", "rejected": "rejected", "unmatched": "without a segment",
}  # fmt: skip


def corrections_section(folder: Folder, counts: Row) -> Section:
    """The counts of `funnel.json`, and the corrections that match no segment any more.

    Args:
        counts: its value `corrections`.
    """
    lost = [row for row in folder.rows("set_aside.jsonl") if row.get("kind") == UNMATCHED]
    listed = [
        {
            "place": named(row.get("place")), "id": "", "kind": UNMATCHED, "stage": "annotate",
            "reason": clean_text(row.get("reason")),
        }
        for row in lost[:ROWS_SHOWN]
    ]  # fmt: skip
    content = join(
        facts([(title, f"{count_of(counts, name):,}") for name, title in TITLES.items()]),
        note("audiollm review shows and makes them; corrections.jsonl holds them."),
        [
            heading("Corrections without a segment", "they stay in corrections.jsonl"),
            set_aside_table(listed, len(lost) - len(listed)),
        ]
        if lost
        else None,
    )
    return Section("corrections", "Corrections", content, "Corrected by people")
