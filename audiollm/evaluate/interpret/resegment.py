"""Re-segmentation of a long output by the sentences of its reference, so that latencies are those of sentences.

As mwerSegmenter does: the boundaries are those of an alignment with the fewest edits between the words of the output
and the words of all reference sentences, one after the other. Output between two sentences belongs to the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from audiollm.evaluate.interpret.latency import EmissionTimes


@dataclass(frozen=True)
class ReferenceSegment:
    """A sentence of a recording: where it is said, and its reference in units."""

    start: float
    end: float
    units: tuple[str, ...]


@dataclass(frozen=True)
class SegmentOutput:
    """The part of an output that belongs to a sentence."""

    segment: ReferenceSegment
    units: tuple[str, ...]
    times: tuple[float, ...]
    """From the beginning of the recording."""

    def emissions(self, recording_end: float) -> EmissionTimes:
        """Return the emissions, with times from the beginning of the sentence.

        Raises:
            MetricError: nothing was said for it.
        """
        start = self.segment.start
        times = tuple(time - start for time in self.times)
        length = self.segment.end - start
        return EmissionTimes(times, length, max(1, len(self.segment.units)), recording_end - start)


def resegment(
    units: Sequence[str], times: Sequence[float], segments: Sequence[ReferenceSegment]
) -> list[SegmentOutput]:
    """Divide an output among the sentences of its reference."""
    from rapidfuzz.distance import Levenshtein

    reference = [unit for segment in segments for unit in segment.units]
    cut_before = [0] * (len(reference) + 1)
    """Units of the output that belong to the first p units of the reference."""
    for operation in Levenshtein.opcodes(reference, list(units)):
        for place in range(operation.src_start, operation.src_end + 1):
            moved = operation.dest_start + place - operation.src_start
            cut_before[place] = min(moved, operation.dest_end)
        cut_before[operation.src_end] = operation.dest_end
    outputs, done, begin = [], 0, 0
    for place, segment in enumerate(segments):
        done += len(segment.units)
        end = len(units) if place == len(segments) - 1 else cut_before[done]
        outputs.append(SegmentOutput(segment, tuple(units[begin:end]), tuple(times[begin:end])))
        begin = end
    return outputs
