"""Latencies of one output, from the times at which its units came out.

X is the length of the source, R the number of units of the reference, H that of the output, D_i the time at which unit
i came out (i = 1 ... H). All times have one unit: milliseconds of speech, or words of a text source. A time counts the
source that had been read (*plain*), or the time on the clock since the source began (*computation-aware*): the
functions are the same.

| name | definition | source |
|---|---|---|
| AP | sum of D_i / (X R); above 1 for an output longer than its reference | arXiv 1606.02012 |
| AL | mean over i <= tau of D_i - (i - 1) X / R; tau: the first i with D_i >= X, else H | arXiv 1810.08398 |
| LAAL | AL with max(R, H) in the place of R | arXiv 2206.05807 |
| DAL | mean of d_i - (i - 1) X / H, d_1 = D_1, d_i = max(D_i, d_{i-1} + X / H) (R does not count) | arXiv 1906.05218 |
| YAAL | LAAL over the units before the source's end alone; none if there is none | arXiv 2509.17349 |
| LongYAAL | the same over the units before the recording's end | arXiv 2509.17349 |
| ATD | average token delay, below | arXiv 2211.13173 |

ATD compares the end of each output token with the end of its source token. Output of the same time is a chunk; the
source that was read since the chunk before it is that chunk's source. Both are cut into tokens of a fixed duration (the
last one of a chunk may be shorter). Output token t of chunk c is compared with source token
s(t) = t - max(0, output before c - source before c), or with the last one that was read where s(t) had not been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from audiollm.evaluate.report.metric_error import MetricError

Revision = tuple[float, Sequence[str]]
"""Time, and the units of the whole output as it is shown from then on."""


@dataclass(frozen=True)
class EmissionTimes:
    """Times of an output's units, with the lengths that latencies compare them with."""

    times_H: tuple[float, ...]
    source_length: float
    reference_units: int
    recording_end: float | None = None
    """End of the whole recording that the source is a part of; None: the source is the recording."""

    def __post_init__(self) -> None:
        if not self.times_H:
            raise MetricError("no output")
        if not self.source_length > 0:
            raise MetricError("the source has no length")
        if self.reference_units < 1:
            raise MetricError("the reference has no units")

    @classmethod
    def at_the_end(cls, source_length: float, reference_units: int) -> EmissionTimes:
        """Return the emissions that an empty output is scored as: the reference's units, all at the source's end."""
        return cls((source_length,) * max(1, reference_units), source_length, max(1, reference_units))


def average_proportion(output: EmissionTimes) -> float:
    """Return AP, a share of the source."""
    return sum(output.times_H) / (output.source_length * output.reference_units)


def average_lagging(output: EmissionTimes) -> float:
    """Return AL; D_1 for an output that begins after the source's end."""
    return _lagging(output, output.reference_units)


def length_adaptive_average_lagging(output: EmissionTimes) -> float:
    """Return LAAL; D_1 for an output that begins after the source's end."""
    return _lagging(output, max(output.reference_units, len(output.times_H)))


def differentiable_average_lagging(output: EmissionTimes) -> float:
    """Return DAL."""
    pace = output.source_length / len(output.times_H)
    total = previous = 0.0
    for place, time in enumerate(output.times_H):
        previous = time if place == 0 else max(time, previous + pace)
        total += previous - place * pace
    return total / len(output.times_H)


def yaal(output: EmissionTimes) -> float:
    """Return YAAL.

    Raises:
        MetricError: the first unit came out after the source's end.
    """
    return _lagging_before(output, output.source_length)


def long_yaal(output: EmissionTimes) -> float:
    """Return LongYAAL: units after the source's end count, up to the end of the recording.

    Raises:
        MetricError: the first unit came out after the recording's end.
    """
    end = output.recording_end
    return _lagging_before(output, output.source_length if end is None else end)


def start_offset(output: EmissionTimes) -> float:
    """Return D_1."""
    return output.times_H[0]


def end_offset(output: EmissionTimes) -> float:
    """Return D_H - X."""
    return output.times_H[-1] - output.source_length


def first_letter_appearance_lagging(
    times: Sequence[float], revisions: Sequence[Revision] = (), onset: float = 0.0
) -> float:
    """Return FLAL: the time, from the onset, of the first unit that is never revised (arXiv 2407.21646, section 4.4).

    Args:
        times: of the output's units. They decide where nothing was ever revised: FLAL is then D_1 - onset.
        revisions: everything that was shown, in order of time.
        onset: when the source begins; 0, or the first sound of speech.

    Raises:
        MetricError: there is no output.
    """
    if not revisions:
        if not times:
            raise MetricError("no output")
        return times[0] - onset
    last = list(revisions[-1][1][:1])
    if not last:
        raise MetricError("no output")
    settled = revisions[-1][0]
    for time, units in reversed(revisions):
        if list(units[:1]) != last:
            break
        settled = time
    return settled - onset


def _lagging(output: EmissionTimes, units: int) -> float:
    if output.times_H[0] > output.source_length:
        return output.times_H[0]
    pace, total = output.source_length / units, 0.0
    for place, time in enumerate(output.times_H):
        total += time - place * pace
        if time >= output.source_length:
            break
    return total / (place + 1)


def _lagging_before(output: EmissionTimes, end: float) -> float:
    pace = output.source_length / max(output.reference_units, len(output.times_H))
    early = [time for time in output.times_H if time < end]
    if output.times_H[0] >= end:
        raise MetricError("the first unit came out after the end")
    return sum(time - place * pace for place, time in enumerate(early)) / len(early)


@dataclass(frozen=True)
class TokenDurations:
    """Durations that ATD gives to tokens, in the unit of the times."""

    source: float
    output: float
    """0: the tokens of a chunk come out at once, as words of subtitles do."""


SPEECH_TO_TEXT = TokenDurations(source=300, output=0)
"""Milliseconds."""
SPEECH_TO_SPEECH = TokenDurations(source=300, output=300)
"""Milliseconds."""
TEXT_TO_TEXT = TokenDurations(source=1, output=1)
"""Words."""


@dataclass(frozen=True)
class OutputPiece:
    """A unit of text, or a piece of speech, as it came out."""

    time: float
    duration: float = 0.0
    """Duration of speech; 0 for text, whose tokens have the duration of `TokenDurations`."""
    computing: float = 0.0
    """Time of computation that delayed the piece, beyond that of the pieces before it; 0 for the plain ATD."""


def average_token_delay(pieces: Sequence[OutputPiece], durations: TokenDurations, speech: bool) -> float:
    """Return the mean delay over the output's tokens.

    Args:
        pieces: in order of time.
        speech: whether the pieces are sound, which is cut into tokens; else each piece is one token.

    Raises:
        MetricError: there is no output.
    """
    source_ends, output_ends = [0.0], [0.0]
    delays: list[float] = []
    num_read = num_written = 0
    heard_until = 0.0
    for time, group in groupby(pieces, key=lambda piece: piece.time):
        chunk = list(group)
        num_read_before, num_written_before = num_read, num_written
        for length in _cut_into_tokens(time - heard_until, durations.source):
            source_ends.append(source_ends[-1] + length)
        heard_until, num_read = time, len(source_ends) - 1
        for length, computing in _output_tokens(chunk, durations.output, speech):
            output_ends.append(max(time, output_ends[-1]) + length + computing)
            num_written += 1
            partner = num_written - max(0, num_written_before - num_read_before)
            delays.append(output_ends[-1] - source_ends[min(partner, num_read)])
    if not delays:
        raise MetricError("no output")
    return sum(delays) / len(delays)


def computing_times(times: Sequence[float], elapsed: Sequence[float]) -> list[float]:
    """Return the computation before each piece that is not already in an earlier piece's time on the clock."""
    behind = [clock - time for time, clock in zip(times, elapsed, strict=True)]
    return [after - before for before, after in zip([0.0, *behind], behind, strict=False)]


def _output_tokens(chunk: Sequence[OutputPiece], length: float, speech: bool) -> list[tuple[float, float]]:
    """Return (duration, time of computation) of each token of a chunk."""
    if not speech:
        return [(length, piece.computing) for piece in chunk]
    lengths = _cut_into_tokens(sum(piece.duration for piece in chunk), length)
    computing = sum(piece.computing for piece in chunk)
    return [(token_length, computing / len(lengths)) for token_length in lengths]


def _cut_into_tokens(duration: float, length: float) -> list[float]:
    num_full, remainder = divmod(duration, length)
    return [length] * int(num_full) + ([remainder] if remainder else [])
