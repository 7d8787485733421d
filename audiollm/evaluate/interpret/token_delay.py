"""Average token delay (ATD, arXiv 2211.13173): the end of each output token against the end of its source token.

Output of the same time is a chunk; the source that was read since the chunk before it is that chunk's source. Both are
cut into tokens of a fixed duration (the last one of a chunk may be shorter). Output token t of chunk c is compared with
source token s(t) = t - max(0, output before c - source before c), or with the last one that was read where s(t) had not
been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from audiollm.evaluate.report.metric_error import MetricError


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
