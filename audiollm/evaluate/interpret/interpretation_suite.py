"""Suite `interpret`: latency and quality of logs of simultaneous interpretation, one row per system."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiollm.errors import BadSample
from audiollm.evaluate.interpret.fragment_judge import FragmentVerdict, of_system, tally
from audiollm.evaluate.interpret.latency import length_adaptive_average_lagging, long_yaal
from audiollm.evaluate.interpret.latency_scores import (
    CLOCK_SUFFIX,
    LATENCIES,
    LatencyOptions,
    Value,
    gaps_of,
    latencies_of,
)
from audiollm.evaluate.interpret.logged_outputs import LoggedOutput, Unit, split_units, text_times
from audiollm.evaluate.interpret.pictures import QualityPoint, quality_over_latency, timeline
from audiollm.evaluate.interpret.quality import HeardOutput, corpus_quality, in_form
from audiollm.evaluate.interpret.resegment import ReferenceSegment, resegment
from audiollm.evaluate.judges.text_scorers import TextScorer, Translation
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import metric_table
from audiollm.evaluate.report.store import Row
from audiollm.evaluate.report.suite import (
    MAX_TILES,
    Example,
    ScoreTable,
    Sound,
    SuiteResult,
    reasons_of,
)
from audiollm.evaluate.report.text_errors import TextForm
from audiollm.pages.formats import format_number
from audiollm.pages.page import Tile


@dataclass(frozen=True)
class LogOfSystem:
    """The outputs of one system."""

    name: str
    folder: Path
    """The folder that paths in the log are relative to."""
    outputs: Sequence[LoggedOutput]
    bad: Sequence[BadSample] = ()
    transcripts: Mapping[int, HeardOutput] = field(default_factory=dict)
    """Recognized speech, by index of the source; empty without a recognizer."""


Mixer = Callable[[LoggedOutput, LogOfSystem], Path | None]
"""Writes the sound of source and output side by side; None where a sound is missing."""


@dataclass(frozen=True)
class InterpretationBench:
    """How logs are scored."""

    language: str
    """Language of the outputs."""
    latency: LatencyOptions
    form: TextForm
    """The form in which recognized texts are compared."""
    scorers: Sequence[TextScorer] = ()
    verdicts: Sequence[FragmentVerdict] = ()
    judged_by: str = ""
    """Name of the judge of the fragments, or the file of their verdicts."""
    not_judged: Sequence[tuple[str, str]] = ()
    """Outputs that the judge of fragments gave no verdict on, each with the reason."""


def evaluate_interpretation(
    systems: Sequence[LogOfSystem], bench: InterpretationBench, mix: Mixer | None = None
) -> SuiteResult:
    """Score the logs of one or several systems."""
    rows = {
        system.name: [_interpretation_row(output, system, bench) for output in system.outputs]
        for system in systems
    }
    scores = {system.name: _score_system(system, rows[system.name], bench) for system in systems}
    unit = "words of the source" if bench.latency.text_source else "ms"
    about = [
        f"latency in {unit} by {bench.latency.unit}; empty outputs are "
        + (
            "scored as said at the source's end"
            if bench.latency.score_empty
            else "counted, without a latency"
        ),
        f"recognized speech is compared in the form {bench.form.name} ({bench.form.language})",
    ]
    about += [
        f"{name}: {' · '.join(system_scores['quality']['signatures'].values())}"
        for name, system_scores in scores.items()
    ]
    about += [
        f"{name}: {system_scores['no_reference']} of {system_scores['outputs']} outputs have no reference: "
        "BLEU and chrF count them as 0, AL and AP count one word"
        for name, system_scores in scores.items()
        if system_scores["no_reference"]
    ]
    result: dict[str, Any] = {"suite": "interpret", "systems": scores}
    tables = [_quality_table(scores), *_latency_tables(scores, unit), _output_table(scores)]
    if bench.verdicts:
        about.append(f"fragments judged by {bench.judged_by}")
        result["verdicts"] = {
            system.name: tally(of_system(bench.verdicts, system.name)) for system in systems
        }
        tables.append(_verdict_table(result["verdicts"]))
    points = [
        QualityPoint(name, system_scores["latency"]["LAAL"]["mean"], system_scores["quality"]["BLEU"])
        for name, system_scores in scores.items()
        if system_scores["latency"]["LAAL"]["mean"] is not None
    ]
    pictures = (
        [("Quality over latency", quality_over_latency(points, f"LAAL, {unit}", "BLEU"))] if points else []
    )
    missing = [(str(bad.place), bad.reason) for system in systems for bad in system.bad]
    missing += bench.not_judged
    missing += [
        (f"{system.name} {row['index']} ASR-BLEU", row["problem"])
        for system in systems
        for row in rows[system.name]
        if row["problem"]
    ]
    missing += [
        (f"{system.name} {row['index']} {what}".rstrip(), reason)
        for system in systems
        for row in rows[system.name]
        for what, reason in _missing_latencies(row)
    ]
    examples = [
        _interpretation_example(output, row, system, bench, mix)
        for system in systems
        for output, row in zip(system.outputs, rows[system.name], strict=True)
    ]
    examples.sort(key=lambda pair: -pair[0])
    return SuiteResult(
        "Simultaneous interpretation",
        about,
        result,
        tables,
        [example() for _, example in examples[:MAX_EXAMPLES]],
        missing,
        [{"system": name, **row} for name, system_rows in rows.items() for row in system_rows],
        pictures,
        "Longest lag first",
        tiles=[
            figure
            for name, system_scores in list(scores.items())[:MAX_TILES]
            for figure in _tiles(name, system_scores, unit)
        ],
    )


def _tiles(system: str, scores: Mapping[str, Any], unit: str) -> list[Tile]:
    """Quality and lag of a system; what it has no value of is left out."""
    note = f"{scores['outputs']:,} outputs"
    interval = scores["quality"]["intervals"].get("BLEU")
    about_bleu = f"{interval[0]:.1f} to {interval[1]:.1f}, {note}" if interval else note
    figures = (
        ("BLEU", scores["quality"]["BLEU"], "", about_bleu),
        ("LAAL", scores["latency"]["LAAL"]["mean"], f", {unit}", note),
    )
    return [
        Tile(format_number(value, 2), f"{name}{of}, {system}", about)
        for name, value, of, about in figures
        if value is not None
    ]


MAX_EXAMPLES = 24
"""Examples whose pictures are drawn and whose sounds are mixed; a page shows no more."""


def _interpretation_row(output: LoggedOutput, system: LogOfSystem, bench: InterpretationBench) -> Row:
    transcript = system.transcripts.get(output.index)
    return {
        "index": output.index,
        "output": output.text,
        "reference": output.reference,
        "heard": transcript.text if transcript and not transcript.problem else None,
        "problem": transcript.problem if transcript else "",
        "empty": not output.delays,
        "latency": latencies_of(output, bench.latency),
        "sentences": _sentence_latencies(output, bench.latency),
        "gaps": gaps_of(output),
    }


def _score_system(system: LogOfSystem, rows: Sequence[Row], bench: InterpretationBench) -> dict[str, Any]:
    translations = [
        Translation(_source_text(output), output.text, output.reference) for output in system.outputs
    ]
    by_scorer = {scorer.name: metric_table(scorer.score(translations)) for scorer in bench.scorers}
    quality: dict[str, Any] = corpus_quality(translations, bench.language).plain()
    if system.transcripts:
        recognized_translations = [
            in_form(Translation("", row["heard"], row["reference"]), bench.form)
            for row in rows
            if row["heard"] is not None
        ]
        if recognized_translations:
            recognized = corpus_quality(recognized_translations, bench.language)
            quality["ASR-BLEU"], quality["ASR-chrF"] = recognized.bleu, recognized.chrf
        quality["not_heard"] = len(rows) - len(recognized_translations)
    names = list(dict.fromkeys(name for row in rows for name in row["latency"]))
    latency = {name: metric_table([_latency_of_row(row, name) for row in rows]) for name in names}
    sentences = [scores for row in rows for scores in row["sentences"]]
    for name in ("LAAL", "LongYAAL") if sentences else ():
        latency[f"{name} of sentences"] = metric_table([scores[name] for scores in sentences])
    gaps = [row["gaps"] for row in rows]
    return {
        "outputs": len(rows),
        "empty": sum(row["empty"] for row in rows),
        "no_reference": sum(not row["reference"].strip() for row in rows),
        "set_aside": len(system.bad),
        "quality": quality,
        "scorers": by_scorer,
        "latency": latency,
        "gaps": {
            "per_output": sum(map(len, gaps)) / len(gaps),
            "mean": sum(map(sum, gaps)) / max(1, sum(map(len, gaps))),
        },
    }


def _latency_of_row(row: Row, name: str) -> Value:
    """A latency of an output. An empty one has no times: by the clock, too, it is said at the source's end."""
    if name not in row["latency"] and row["empty"]:
        name = name.removesuffix(CLOCK_SUFFIX)
    value: Value = row["latency"].get(name, "no times on the clock")
    return value


def _missing_latencies(row: Row) -> list[tuple[str, str]]:
    """Measures of an output without a value, with the reasons; empty where no latency has a value."""
    values = {name: value for name, value in row["latency"].items() if not name.endswith(CLOCK_SUFFIX)}
    names_by_reason: dict[str, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, str):
            names_by_reason.setdefault(value, []).append(name)
    return [
        ("" if len(names) == len(values) else ", ".join(names), reason)
        for reason, names in names_by_reason.items()
    ]


def _summarize_reasons(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Reasons for missing values: an output counts once, whatever the number of measures that have none of it."""
    counts: dict[str, int] = {}
    for table in tables.values():
        for reason, count in table["reasons"].items():
            counts[reason] = max(count, counts.get(reason, 0))
    return reasons_of([{"reasons": counts}])


def _source_text(output: LoggedOutput) -> str:
    text = (output.model_extra or {}).get("source_text", output.source)
    return text if isinstance(text, str) else " ".join(map(str, text)) if isinstance(text, list) else ""


def _sentence_latencies(output: LoggedOutput, options: LatencyOptions) -> list[dict[str, Value]]:
    """Latencies of the sentences of a long text output, where the log has `segments` (start, end, reference)."""
    if output.is_speech:
        return []
    unit: Unit = "character" if options.unit == "character" else "word"
    references = [
        ReferenceSegment(segment.start, segment.end, tuple(split_units(segment.reference, unit)))
        for segment in output.segments
    ]
    try:
        times = text_times(output, unit)
    except MetricError as error:
        return [dict.fromkeys(("LAAL", "LongYAAL"), error.reason) for _ in references]
    end = output.recording_end or output.source_length
    latencies = []
    for sentence in resegment(split_units(output.prediction, unit), times, references):
        scores: dict[str, Value] = {}
        for name, function in (("LAAL", length_adaptive_average_lagging), ("LongYAAL", long_yaal)):
            try:
                scores[name] = function(sentence.emissions(end))
            except MetricError as error:
                scores[name] = error.reason
        latencies.append(scores)
    return latencies


def _quality_table(scores: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
    first = next(iter(scores.values()))
    recognized = [
        name
        for name in ("ASR-BLEU", "ASR-chrF")
        if any(name in system_scores["quality"] for system_scores in scores.values())
    ]
    scorers = list(first["scorers"])
    rows = [
        [
            name,
            *(_quality_cell(system_scores["quality"], metric) for metric in ("BLEU", "chrF", *recognized)),
            *(format_number(system_scores["scorers"][scorer]["mean"], 3) for scorer in scorers),
        ]
        for name, system_scores in scores.items()
    ]
    note = reasons_of(
        system_scores["scorers"][scorer] for system_scores in scores.values() for scorer in scorers
    )
    if len(scores) > 1:
        note = f"Systems whose intervals overlap are not told apart by these outputs. {note}".rstrip()
    headings = ["system", "BLEU (95 %)", "chrF (95 %)", *recognized, *scorers]
    return ScoreTable("Quality", headings, rows, note)


def _quality_cell(quality: Mapping[str, Any], metric: str) -> str:
    """A score of a corpus, with its interval where there is one."""
    interval = quality["intervals"].get(metric)
    value = format_number(quality.get(metric), 2)
    return f"{value} ({interval[0]:.1f} to {interval[1]:.1f})" if interval else value


def _latency_tables(scores: Mapping[str, Mapping[str, Any]], unit: str) -> list[ScoreTable]:
    tables = []
    for suffix, title in (("", "Latency"), (CLOCK_SUFFIX, "Computation-aware latency")):
        names = [name + suffix for name in LATENCIES]
        names += [f"{name} of sentences" for name in ("LAAL", "LongYAAL")] if not suffix else []
        names = [
            name
            for name in names
            if any(name in system_scores["latency"] for system_scores in scores.values())
        ]
        if not names:
            continue
        rows = [
            [name, *(format_number(system_scores["latency"].get(key, {}).get("mean"), 2) for key in names)]
            for name, system_scores in scores.items()
        ]
        notes = {
            name: _summarize_reasons(
                {key: system_scores["latency"][key] for key in names if key in system_scores["latency"]}
            )
            for name, system_scores in scores.items()
        }
        note = " ".join(
            f"{name}: {text}" if len(scores) > 1 else text for name, text in notes.items() if text
        )
        headings = ["system", *(name.removesuffix(suffix) if suffix else name for name in names)]
        tables.append(ScoreTable(f"{title}, mean over outputs, {unit} (AP: a share)", headings, rows, note))
    return tables


def _output_table(scores: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
    headings = ["system", "outputs", "empty", "set aside", "gaps per output", "mean gap"]
    rows = [
        [
            name,
            *(str(system_scores[key]) for key in ("outputs", "empty", "set_aside")),
            *(format_number(system_scores["gaps"][key], 2) for key in ("per_output", "mean")),
        ]
        for name, system_scores in scores.items()
    ]
    return ScoreTable(
        "Outputs", headings, rows, "A gap is a silence between pieces of speech: the output ran out."
    )


def _verdict_table(verdicts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> ScoreTable:
    from audiollm.pages.formats import with_interval

    rows = [
        [system, name.upper(), with_interval(proportion, "accuracy"), str(proportion["n"])]
        for system, tallies in verdicts.items()
        for name, proportion in tallies.items()
    ]
    return ScoreTable("Valid fragments, as judged", ["system", "", "share", "fragments"], rows)


def _interpretation_example(
    output: LoggedOutput, row: Row, system: LogOfSystem, bench: InterpretationBench, mix: Mixer | None
) -> tuple[float, Callable[[], Example]]:
    lag = row["latency"].get("LAAL")

    def make() -> Example:
        lines = [("reference", output.reference), ("output", output.text or "(nothing)")]
        lines += [("heard", row["heard"])] if row["heard"] is not None else []
        lines.append(("LAAL", lag if isinstance(lag, str) else format_number(lag, 2)))
        per_second = 1.0 if bench.latency.text_source else 1000.0
        picture = timeline(output, *_timeline_units(output, bench.latency.unit), per_second)
        mixed = mix(output, system) if mix else None
        sounds = [Sound("left: source, right: output, as heard", mixed)] if mixed else []
        return Example(f"{system.name} · {output.index}", lines, sounds, picture)

    return (lag if isinstance(lag, float | int) else float("inf")), make


def _timeline_units(output: LoggedOutput, unit: Unit) -> tuple[list[str], Sequence[float]]:
    """The words of a timeline and their times: characters where the log has a time for each; none of speech."""
    if output.is_speech:
        return [], ()
    words = output.prediction.split()
    is_by_word = len(words) == len(output.delays)
    return words if is_by_word else split_units(output.prediction, unit), output.delays
