"""Which recognizers wrote the text of a sample: their digests travel with segments and samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.data.records.sample import Sample

TEXT_RECOGNIZERS = "text_recognizers"
"""The column of segments and the key of metadata with the digests of the recognizers that wrote a text."""
DIGEST_CHARACTERS = 12
"""First characters of a folder's SHA-256 by which a recognizer is known."""


def text_recognizers(sample: Sample) -> list[str]:
    """Digests of the recognizers that wrote the sample's text; none where it was given."""
    return read_text_recognizers(sample.metadata)


def read_text_recognizers(columns: Mapping[str, Any]) -> list[str]:
    """The same, of the columns of a segment or of metadata; a value of another form is none."""
    digests = columns.get(TEXT_RECOGNIZERS)
    return [digest for digest in digests if isinstance(digest, str)] if isinstance(digests, list) else []
