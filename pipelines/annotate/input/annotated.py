"""A corpus that is annotated already, as the input of a recipe: the output of `audiollm annotate` is taken as it is."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audiollm.audio import find_audio
from audiollm.files.atomic import read_json, write_json, write_jsonl
from pipelines.review.applied import FILTERED, SEGMENTS, corrected_rows

FUNNEL, LEDGER = "funnel.json", Path("ledger", "ledger.sqlite")
_REQUIRED = (Path(SEGMENTS), Path(FUNNEL), LEDGER)
_FOLDERS = ("corpus", "fetched", "ledger", "separated", "shards")
"""Folders that an annotation writes."""
_COPIED = (
    "files.jsonl",
    "set_aside.jsonl",
    "rules.json",
    "recognizers.json",
    "bins.json",
    "timings.json",
    "not_applied.json",
)


def annotated_corpus(inputs: Sequence[str]) -> Path | None:
    """The folder of the annotation that `inputs` are, which is one folder alone; None: they are recordings.

    A folder of recordings that was annotated into itself is one of recordings: it holds more sound than an annotation
    writes.
    """
    folder = Path(inputs[0]) if len(inputs) == 1 else None
    if folder is None or not all((folder / path).is_file() for path in _REQUIRED):
        return None
    recordings = (path.relative_to(folder) for path in find_audio(folder)[0])
    return None if any(path.parts[0] not in _FOLDERS for path in recordings) else folder


def copy_annotation(corpus: Path, folder: Path) -> dict[str, Any]:
    """Copy an annotation, with the corrections that people made since; returns its `funnel.json`.

    Segments keep the paths of their recordings. `segments` and `seconds` of the funnel are those of the corrected rows.

    Raises:
        DamagedFile: the file of corrections is damaged.
        OSError: a file cannot be read or written.
    """
    rows = corrected_rows(corpus)
    segments = [row for row in rows if not row.get("dropped")]
    write_jsonl(folder / SEGMENTS, segments)
    write_jsonl(folder / FILTERED, [row for row in rows if row.get("dropped")])
    for name in _COPIED:
        if (corpus / name).is_file():
            shutil.copyfile(corpus / name, folder / name)
    seconds = round(sum(row["duration_s"] for row in segments), 3)
    funnel: dict[str, Any] = {**read_json(corpus / FUNNEL), "segments": len(segments), "seconds": seconds}
    write_json(folder / FUNNEL, funnel)
    return funnel
