"""All latencies of one output by name, plain and computation-aware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from audiollm.evaluate.interpret import latency
from audiollm.evaluate.interpret.latency import (
    SPEECH_TO_SPEECH,
    SPEECH_TO_TEXT,
    TEXT_TO_TEXT,
    EmissionTimes,
    OutputPiece,
    average_token_delay,
    computing_times,
    first_letter_appearance_lagging,
)
from audiollm.evaluate.interpret.logged_outputs import (
    FRAME_MS,
    LoggedOutput,
    Unit,
    emissions_of,
    reference_units,
    revisions_of,
)
from audiollm.evaluate.report.metric_error import MetricError

Value = float | str
"""A latency, or the reason why there is none."""

FROM_TIMES: dict[str, Callable[[EmissionTimes], float]] = {
    "AL": latency.average_lagging,
    "LAAL": latency.length_adaptive_average_lagging,
    "AP": latency.average_proportion,
    "DAL": latency.differentiable_average_lagging,
    "YAAL": latency.yaal,
    "LongYAAL": latency.long_yaal,
    "StartOffset": latency.start_offset,
    "EndOffset": latency.end_offset,
}
"""Latencies that follow from the emissions alone."""
LATENCIES = (*FROM_TIMES, "FLAL", "ATD")
CLOCK_TOLERANCE_MS = 1.0
"""Rounding of the times in a log."""
CLOCK_SUFFIX = "_CA"
"""Ends the names of computation-aware latencies, as in SimulEval."""


@dataclass(frozen=True)
class LatencyOptions:
    """How outputs are counted."""

    unit: Unit = "word"
    frame: float = FRAME_MS
    text_source: bool = False
    """Whether times count words of a written source, not milliseconds."""
    score_empty: bool = False
    """Score an empty output as its reference, said at the source's end; else it has no latency, and is counted."""


def latencies_of(output: LoggedOutput, options: LatencyOptions) -> dict[str, Value]:
    """Return every latency of an output, by name; computation-aware ones where the log has times on the clock."""
    if not output.delays and options.score_empty:
        units = reference_units(output, options.unit, options.frame)
        at_end = EmissionTimes.at_the_end(output.source_length, units)
        pieces = [OutputPiece(time) for time in at_end.times_H]
        durations = TEXT_TO_TEXT if options.text_source else SPEECH_TO_TEXT
        scores = {name: _value_or_reason(of_times, at_end) for name, of_times in FROM_TIMES.items()}
        return scores | {
            "FLAL": output.source_length - output.onset,
            "ATD": average_token_delay(pieces, durations, speech=False),
        }
    scores = _compute_latencies(output, options)
    scores["ATD"] = _value_or_reason(_token_delay, output, options, False)
    if has_clock(output) and not options.text_source:
        on_clock = output.model_copy(update={"delays": output.elapsed, "revisions": []})
        aware = _compute_latencies(on_clock, options)
        if output.revisions:
            del aware["FLAL"]  # the times of revisions are known by the source alone
        aware["ATD"] = _value_or_reason(_token_delay, output, options, True)
        scores |= {name + CLOCK_SUFFIX: value for name, value in aware.items()}
    return scores


def has_clock(output: LoggedOutput) -> bool:
    """Whether `elapsed` holds times on the clock: no unit comes out before its source was there.

    SimulEval writes zeros, or what the computation took alone, where nothing keeps the source's pace.
    """
    pairs = zip(output.elapsed, output.delays, strict=True) if output.elapsed else ()
    return bool(output.elapsed) and all(elapsed >= delay - CLOCK_TOLERANCE_MS for elapsed, delay in pairs)


def gaps_of(output: LoggedOutput) -> list[float]:
    """Return the silences between pieces of speech, where the output ran out; none for text."""
    return output.playback().gaps if output.is_speech else []


def _compute_latencies(output: LoggedOutput, options: LatencyOptions) -> dict[str, Value]:
    """Return the latencies by one clock, without ATD."""
    scores: dict[str, Value] = {}
    try:
        emissions = emissions_of(output, options.unit, options.frame)
    except MetricError as error:
        return dict.fromkeys((*FROM_TIMES, "FLAL"), error.reason)
    for name, of_times in FROM_TIMES.items():
        scores[name] = _value_or_reason(of_times, emissions)
    if output.is_speech:
        scores["EndOffset"] = output.playback().end - output.source_length
    scores["FLAL"] = _value_or_reason(
        first_letter_appearance_lagging, output.delays, revisions_of(output, options.unit), output.onset
    )
    return scores


def _token_delay(output: LoggedOutput, options: LatencyOptions, clock: bool) -> float:
    times = _piece_times(output, options)
    computing = [0.0] * len(times)
    if clock:
        on_clock = output.model_copy(update={"delays": output.elapsed})
        computing = computing_times(times, _piece_times(on_clock, options))
    lengths = output.durations or [0.0] * len(times)
    pieces = [OutputPiece(*values) for values in zip(times, lengths, computing, strict=True)]
    text_durations = TEXT_TO_TEXT if options.text_source else SPEECH_TO_TEXT
    durations = SPEECH_TO_SPEECH if output.is_speech else text_durations
    return average_token_delay(pieces, durations, output.is_speech)


def _piece_times(output: LoggedOutput, options: LatencyOptions) -> list[float]:
    """Return the times of the pieces of speech, or of the units of text."""
    return output.delays if output.is_speech else list(emissions_of(output, options.unit).times_H)


def _value_or_reason(function: Callable[..., float], *arguments: object) -> Value:
    try:
        return function(*arguments)
    except MetricError as error:
        return error.reason
