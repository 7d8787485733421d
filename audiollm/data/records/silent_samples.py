"""Samples whose words go with a recording in which nothing is heard: a model would learn to invent them."""

from __future__ import annotations

from audiollm.audio.samples import SILENCE_DBFS
from audiollm.data.records.sample import Sample, TextPart
from audiollm.errors import BadSample

SILENT = "silent"
"""Kind of the samples with words and a silent recording."""


def teaches_words(sample: Sample) -> bool:
    """Return whether the sample has words of a user or an assistant: silence would be taught as them."""
    roles = ("user", "assistant")
    return any(text.strip() for role in roles for text in sample.texts(role)) or any(
        isinstance(content_part, TextPart) and content_part.text.strip()
        for answer in sample.answers
        for content_part in answer.content
    )


def silent_part(sample: Sample, path: str, level_dbfs: float) -> BadSample:
    """A sample whose words go with a recording in which nothing is heard."""
    reason = (
        f"is silent (its peak is at {level_dbfs:.0f} dBFS, the limit is {SILENCE_DBFS:.0f}) and the sample has words: "
        "get the recording anew, or leave it out"
    )
    return BadSample(path, sample.id, reason, SILENT)
