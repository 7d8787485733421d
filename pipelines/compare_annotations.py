"""The stage `compare_annotations`: two annotations of the same recordings, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from audiollm.data.text.forms import comparison_form
from audiollm.errors import StageError
from audiollm.files.atomic import NUMBER, Kinds, read_json, read_jsonl, write_json, write_text
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan

Span = tuple[str, int, int]
"""A recording, and start and end in hundredths of a second: what is the same segment in both."""
PASSES = ("first", "second")


class ComparisonConfig(StageConfig):
    """Settings of `compare_annotations`."""

    first: InputPath
    """`segments.jsonl` of a stage annotate; what lies beside it is read, too."""
    second: InputPath
    """`segments.jsonl` of another annotation of the same recordings."""
    first_scores: InputPath | None = None
    """`results.json` of an evaluation of what was trained on the first; the figures that both have are compared."""
    second_scores: InputPath | None = None
    """As `first_scores`, of what was trained on the second."""
    examples: int = Field(20, ge=0)
    """Segments that both kept and whose texts differ most, listed."""


@dataclass
class Annotation:
    """Values of one pass that are compared."""

    segments: int = 0
    seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped segments by the short form of the reason."""
    described: int = 0
    refused: int = 0
    pairwise_wer: list[float] = field(default_factory=list)
    vote_share: list[float] = field(default_factory=list)
    texts: dict[Span, str] = field(default_factory=dict)
    """Normalized texts of the kept segments."""
    reference_texts: dict[Span, str] = field(default_factory=dict)
    """Given texts, by segment."""
    hypotheses: dict[str, dict[Span, str]] = field(default_factory=dict)
    """Recognizer (and `consensus`) -> what it made of segments whose text is known."""


def run_comparison(config: ComparisonConfig, context: Context) -> dict[str, Any]:
    """Write `compare.json` and `compare.md`; returns the former's content, without the examples.

    Raises:
        StageError: no segment is in both (exit code 2).
    """
    passes = {name: read_annotation(getattr(config, name)) for name in PASSES}
    compared = compare(passes["first"], passes["second"], config.examples)
    if not compared["both"]["spans"]:
        raise StageError(
            f"compare_annotations: {config.first} and {config.second} have no segment in common",
            "give two annotations of the same recordings, with the same settings for segments",
            exit_code=2,
        )
    if config.first_scores is not None and config.second_scores is not None:
        scores = [_flatten_figures(read_json(path)) for path in (config.first_scores, config.second_scores)]
        compared["scores"] = {
            name: {"first": scores[0][name], "second": scores[1][name]}
            for name in scores[0]
            if name in scores[1]
        }
    write_json(context.folder / "compare.json", compared)
    write_text(context.folder / "compare.md", as_markdown(compared))
    for line in describe_comparison(compared):
        context.say(line)
    return {name: value for name, value in compared.items() if name != "differing"}


def read_annotation(segments: Path) -> Annotation:
    """The figures of one pass: of `segments.jsonl` and of `filtered.jsonl` beside it, row by row."""
    annotation = Annotation()
    for row in _read_annotation_rows(segments):
        span = _read_span(row)
        annotation.segments += 1
        annotation.seconds += row["end_s"] - row["start_s"]
        if text := comparison_form(row.get("text") or "", row.get("language")):
            annotation.texts[span] = text
        _add_measured(annotation, row)
        _add_heard(annotation, span, row)
    for row in _read_annotation_rows(segments.parent / "filtered.jsonl"):
        dropped = row.get("dropped") or {}
        annotation.dropped[dropped.get("kind") or dropped.get("rule") or "not said"] += 1
        # errors are compared on all that both have heard, not on what each has kept
        _add_heard(annotation, _read_span(row), row)
    return annotation


def compare(first: Annotation, second: Annotation, examples: int) -> dict[str, Any]:
    """Compare the figures of two annotations, and their values for the same segments."""
    both = sorted(first.texts.keys() & second.texts.keys())
    same = sum(first.texts[span] == second.texts[span] for span in both)
    differing = sorted(
        (
            (_compute_word_errors([first.texts[span]], [second.texts[span]]) or 0.0, span)
            for span in both
            if first.texts[span] != second.texts[span]
        ),
        key=lambda item: (-item[0], item[1]),
    )
    return {
        "first": _annotation_figures(first, second),
        "second": _annotation_figures(second, first),
        "both": {
            "spans": len(both),
            "only_first": len(first.texts.keys() - second.texts.keys()),
            "only_second": len(second.texts.keys() - first.texts.keys()),
            "same_text": round(same / len(both), 4) if both else None,
            "word_differences": _compute_word_errors(
                [first.texts[span] for span in both], [second.texts[span] for span in both]
            ),
        },
        "differing": [
            {
                "path": span[0], "start_s": span[1] / 100, "end_s": span[2] / 100, "rate": round(rate, 4),
                "first": first.texts[span], "second": second.texts[span],
            }
            for rate, span in differing[:examples]
        ],
    }  # fmt: skip


def describe_comparison(compared: Mapping[str, Any]) -> list[str]:
    """The comparison in a few sentences."""
    first, second, both = compared["first"], compared["second"], compared["both"]
    lines = [
        f"kept: {first['hours']:.3g} h, then {second['hours']:.3g} h "
        f"({first['segments']} and {second['segments']} segments)",
        f"{both['spans']} segments with words in both: {both['same_text']:.0%} with the same text, "
        f"{both['word_differences']:.1%} of the words differ",
    ]
    agreements = [figures["pairwise_wer"] for figures in (first, second)]
    if any(value is not None for value in agreements):
        lines.append(
            "recognizers differ by "
            + ", then ".join("nothing to compare" if v is None else f"{v:.1%}" for v in agreements)
        )
    for name in sorted(first["word_errors"].keys() | second["word_errors"].keys()):
        rates = [figures["word_errors"].get(name) for figures in (first, second)]
        lines.append(
            f"word errors of {name}: "
            + ", then ".join("not there" if v is None else f"{v:.1%}" for v in rates)
        )
    if first["described"] or second["described"] or second["refused"]:
        lines.append(
            f"descriptions: {first['described']}, then {second['described']} ({second['refused']} refused)"
        )
    for name, values in compared.get("scores", {}).items():
        lines.append(f"{name}: {values['first']:.4g}, then {values['second']:.4g}")
    return lines


def as_markdown(compared: Mapping[str, Any]) -> str:
    """Format the comparison for people, with the drops and the texts that differ most."""
    first, second = compared["first"], compared["second"]
    lines = [
        "# Two annotations of the same recordings",
        "",
        *(f"- {line}" for line in describe_comparison(compared)),
        "",
    ]
    kinds = sorted(first["dropped"].keys() | second["dropped"].keys())
    if kinds:
        lines += ["| dropped | first | second |", "|---|---|---|"]
        lines += [
            f"| {_escape_cell(kind)} | {first['dropped'].get(kind, 0)} | {second['dropped'].get(kind, 0)} |"
            for kind in kinds
        ]
        lines.append("")
    if compared["differing"]:
        lines += ["| recording | first | second |", "|---|---|---|"]
        lines += [
            f"| {_escape_cell(Path(row['path']).name)} {row['start_s']:.2f} s | {_escape_cell(row['first'])} "
            f"| {_escape_cell(row['second'])} |"
            for row in compared["differing"]
        ]
        lines.append("")
    return "\n".join(lines)


def plan_comparison(config: ComparisonConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    return StagePlan(memory_mb=500, disk_mb=1, core_seconds=5, note="two annotations")


# ---------------------------------------------------------------------------------------------- private


def _annotation_figures(annotation: Annotation, other_annotation: Annotation) -> dict[str, Any]:
    return {
        "segments": annotation.segments,
        "hours": round(annotation.seconds / 3600, 5),
        "dropped": dict(sorted(annotation.dropped.items())),
        "described": annotation.described,
        "refused": annotation.refused,
        "pairwise_wer": round(fmean(annotation.pairwise_wer), 4) if annotation.pairwise_wer else None,
        "vote_share": round(fmean(annotation.vote_share), 4) if annotation.vote_share else None,
        "word_errors": _errors_by_recognizer(annotation, other_annotation),
    }


def _errors_by_recognizer(annotation: Annotation, other_annotation: Annotation) -> dict[str, float]:
    """Against the texts that were known, on the segments that both passes have heard."""
    rates = {}
    for name, texts in sorted(annotation.hypotheses.items()):
        spans = sorted(
            span
            for span in texts
            if span in annotation.reference_texts and span in other_annotation.reference_texts
        )
        rate = _compute_word_errors(
            [annotation.reference_texts[span] for span in spans], [texts[span] for span in spans]
        )
        if rate is not None:
            rates[name] = rate
    return rates


def _add_measured(annotation: Annotation, row: Mapping[str, Any]) -> None:
    measured = row.get("measured") or {}
    consensus = measured.get("consensus") or {}
    for name in ("pairwise_wer", "vote_share"):
        if consensus.get(name) is not None:
            getattr(annotation, name).append(consensus[name])
    if gate := (measured.get("description") or {}).get("gate"):
        annotation.described += bool(gate["accepted"])
        annotation.refused += not gate["accepted"]


def _add_heard(annotation: Annotation, span: Span, row: Mapping[str, Any]) -> None:
    if row.get("text_source") != "given" or not (
        text := comparison_form(row.get("text") or "", row.get("language"))
    ):
        return
    consensus = ((row.get("measured") or {}).get("consensus") or {}).get("text")
    hypotheses = dict(row.get("heard") or {})
    if consensus is not None and len(hypotheses) > 1:
        hypotheses["consensus"] = consensus
    if hypotheses:
        annotation.reference_texts[span] = text
    for name, words in hypotheses.items():
        annotation.hypotheses.setdefault(name, {})[span] = comparison_form(words, row.get("language"))


def _compute_word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> float | None:
    from audiollm.evaluate.report.text_errors import word_error_rate

    rate = word_error_rate(references, hypotheses)
    return None if rate is None else round(rate, 4)


ROW_KEYS: Mapping[str, Kinds] = {"path": str, "start_s": NUMBER, "end_s": NUMBER}


def _read_annotation_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from read_jsonl(path, "run the stage annotate again", ROW_KEYS)


def _read_span(row: Mapping[str, Any]) -> Span:
    recording = str(row.get("file") or row["path"])
    return recording, round(row["start_s"] * 100), round(row["end_s"] * 100)


def _flatten_figures(value: Any, prefix: str = "") -> dict[str, float]:
    """All numbers of nested figures by their dotted names."""
    if isinstance(value, Mapping):
        parts = (_flatten_figures(inner, f"{prefix}{name}.") for name, inner in value.items())
        return {name: number for figures in parts for name, number in figures.items()}
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {prefix.rstrip("."): float(value)} if is_number else {}


def _escape_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


STAGE = Stage(
    kind="compare_annotations",
    config=ComparisonConfig,
    run=run_comparison,
    artifacts={"comparison": "compare.json", "summary": "compare.md"},
    help="compare two annotations of the same recordings",
    plan=plan_comparison,
)
