"""Independence of a recognizer that judges: whether its weights also taught the model that it judges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audiollm.data.records.sample import Sample
from audiollm.data.records.text_origin import text_recognizers
from audiollm.data.text.tokenizer import TRAINED_FILE
from audiollm.generation.engine.defaults import Teaching, read_trained

TAUGHT = {
    "transcripts": "wrote transcripts that the model was trained on",
    "rewards": "gave rewards in its training",
}
ADVICE = "its errors are taken for right: judge with other weights"


def shared_weights_note(model: str | Path | None, judge: object) -> str:
    """The sentence for reports where the judge's weights taught the model; empty where they did not, or it is unknown.

    Args:
        model: its folder, or the folder of the stage around it; None: there are clips and no model.
        judge: a recognizer; those in folders have a `digest`.

    Raises:
        ConfigError: the model's `trained.json` is damaged.
    """
    teaching = _teaching_of(model)
    kind = teaching.get(str(getattr(judge, "digest", "")))
    if kind is None:
        return ""
    return f"{getattr(judge, 'name', 'the judge')} {TAUGHT[kind]}: {ADVICE}"


def count_taught_references(model: str | Path, samples: Sequence[Sample]) -> int:
    """Samples whose reference was written by a recognizer that wrote transcripts of the model's training."""
    teaching = _teaching_of(model)
    return sum(bool(teaching.keys() & set(text_recognizers(sample))) for sample in samples)


def _teaching_of(model: str | Path | None) -> Teaching:
    """What `trained.json` says; nothing of a model without one: a published one, an import path, an endpoint."""
    if model is None:
        return {}
    folders = (Path(model), Path(model) / "model")
    folder = next((folder for folder in folders if (folder / TRAINED_FILE).is_file()), None)
    return {} if folder is None else read_trained(folder).recognizers or {}
