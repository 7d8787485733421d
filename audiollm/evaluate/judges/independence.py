"""Independence of a recognizer that judges: whether its weights also taught the model that it judges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


def taught_references_note(model: str | Path | None, writers: Sequence[Sequence[str]]) -> str:
    """The sentence for reports where references were written by a recognizer that also taught the model; else empty.

    Args:
        writers: digests of the recognizers that wrote each reference, see `text_recognizers`.

    Raises:
        ConfigError: the model's `trained.json` is damaged.
    """
    teaching = _teaching_of(model)
    count = sum(bool(teaching.keys() & set(digests)) for digests in writers)
    return (
        f"{count} of {len(writers)} references were written by the recognizer that taught the model"
        if count
        else ""
    )


def _teaching_of(model: str | Path | None) -> Teaching:
    """What `trained.json` says; nothing of a model without one: a published one, an import path, an endpoint."""
    if model is None:
        return {}
    folders = (Path(model), Path(model) / "model")
    folder = next((folder for folder in folders if (folder / TRAINED_FILE).is_file()), None)
    return {} if folder is None else read_trained(folder).recognizers or {}
