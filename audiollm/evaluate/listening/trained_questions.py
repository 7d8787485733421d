"""Which questions a model was trained on, as the stages of its run say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.errors import ConfigError
from audiollm.files.atomic import DamagedFile
from audiollm.recipe.runner import StageResult, read_result

if TYPE_CHECKING:
    from audiollm.evaluate.listening.audio_qa import Question

Span = tuple[Path, float]
"""A file, and the second from which it is heard."""
MOST_STAGES = 20
"""Stages that are followed back, each the `start` of the next."""


def trained_questions(
    model: str | Path | None, questions: Sequence[Question], folder: Path
) -> frozenset[str]:
    """The ids of the questions that a stage of the model's run, or of those it began from, was trained on.

    A question was, where a sample that is not held out asks it about the same span of the same file. Samples in shards,
    and models that no run of a recipe made, are not known.

    Args:
        folder: what the questions' recordings are relative to.
    """
    if model is None:
        return frozenset()
    texts_of: dict[Span, list[str]] = {}
    for sample in _samples_of(Path(model)):
        texts, spans = _asked_about(sample)
        for span in spans:
            texts_of.setdefault(span, []).extend(texts)
    return frozenset(
        question.id
        for question in questions
        if any(
            question.question in text
            for text in texts_of.get(_span(folder / question.audio_id, question.start_s), ())
        )
    )


def _samples_of(model: Path) -> Iterator[Sample]:
    """Training samples of the stages behind a model, the last one first."""
    for _ in range(MOST_STAGES):
        result = _stage_around(model)
        if result is None:
            return
        for path in _manifests(result.settings):
            try:
                samples, _ = read_samples(path)
            except ConfigError:
                continue  # it is gone, or no manifest
            yield from (sample for sample in samples if sample.metadata.get("split") != "test")
        start = result.settings.get("start")
        if not isinstance(start, str):
            return
        model = Path(start)


def _stage_around(model: Path) -> StageResult | None:
    for folder in (model, model.parent):
        try:
            result = read_result(folder)
        except (DamagedFile, OSError):
            return None
        if result is not None:
            return result
    return None


def _manifests(settings: Mapping[str, Any]) -> Iterator[Path]:
    """The files of `samples`: a path, or a list of sources with one each."""
    samples = settings.get("samples")
    for source in samples if isinstance(samples, list) else [samples]:
        path = source.get("path") if isinstance(source, dict) else source
        if isinstance(path, str) and Path(path).is_file():
            yield Path(path)


def _span(path: Path, start_s: float) -> Span:
    return path.resolve(), round(start_s, 2)


def _asked_about(sample: Sample) -> tuple[list[str], list[Span]]:
    """Return the texts of a sample's user turns, and the spans of recordings in them."""
    turns = [message for message in sample.messages if message.role == "user"]
    texts = [" ".join(part.text for part in turn.content if part.type == "text") for turn in turns]
    return texts, [_span(Path(part.path), part.start_s) for part in sample.audio("user")]
