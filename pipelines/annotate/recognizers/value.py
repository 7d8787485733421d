"""Parts that all recognizers share: base settings, the value, the check of a model's folder, weights by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from audiollm.data.records.text_origin import DIGEST_CHARACTERS
from audiollm.data.text.repeated_words import compression_ratio
from audiollm.files.atomic import folder_digest
from audiollm.files.json_files import read_json_file
from audiollm.hub_models.folders import is_planned
from audiollm.hub_models.names import snapshot_name
from audiollm.models.recognition.transcript import SpokenWord
from pipelines.annotate.step import SegmentStep
from pipelines.steps.step import StepConfig, Value

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class RecognizerConfig(StepConfig):
    """Base of the settings of every recognizer."""

    name: str | None = Field(None, pattern=_NAME)
    """Name of the recognizer's value; None: its kind. Two recognizers of a run need two names."""


RecognizerSettings = TypeVar("RecognizerSettings", bound=RecognizerConfig)


class RecognizerStep(SegmentStep[RecognizerSettings]):
    """A step that transcribes a segment, under the name that its settings give it or that of its kind."""

    def __init__(self, config: RecognizerSettings) -> None:
        super().__init__(config)
        self.name = config.name or config.kind  # type: ignore[attr-defined]  # each kind has its own literal


def transcript_value(
    text: str,
    words: Sequence[SpokenWord] = (),
    language: str | None = None,
    language_probability: float | None = None,
    confidence: float | None = None,
    mean_log_probability: float | None = None,
    no_speech_probability: float | None = None,
) -> Value:
    """Make a recognizer's value.

    Args:
        text: as it writes it; white space is made single.
        words: of the text, as far as it tells about them; may be empty.
        language: a code such as `en`.
        confidence: of the whole, in [0, 1].
        mean_log_probability: mean over the tokens, in nats (Whisper's `avg_logprob`).
        no_speech_probability: the model's probability that nobody speaks.
    """
    single = " ".join(text.split())
    return {
        "text": single,
        "language": language,
        "language_probability": _share(language_probability),
        "words": [
            {
                "word": word.word.strip(),
                "start_s": _round_seconds(word.start_s),
                "end_s": _round_seconds(word.end_s),
                "confidence": _share(word.confidence),
            }
            for word in words
        ],
        "confidence": _share(confidence),
        "mean_log_probability": _rounded(mean_log_probability),
        "no_speech_probability": _share(no_speech_probability),
        "compression_ratio": round(compression_ratio(single), 3) if single else None,
    }


def missing_folder(where: str, folder: Path, files: Sequence[str], what: str) -> str | None:
    """Name the missing part of a model's folder, for `Step.missing`.

    Args:
        where: the setting that names it.
        files: files that the folder must hold.
        what: description of the right content, with an article.
    """
    lacking = [name for name in files if not (folder / name).is_file() and not is_planned(folder)]
    if not folder.is_dir():
        return f"{where}: no folder {folder}: give {what}"
    return f"{where}: {folder} holds no {' and no '.join(lacking)}: give {what}" if lacking else None


# ------------------------------------------------------------------------------------------------ private


def _share(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(min(max(value, 0.0), 1.0)), 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 4)


def _round_seconds(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(max(value, 0.0)), 3)


Row = dict[str, Any]


def recognizer_rows(settings: Mapping[str, BaseModel]) -> list[Row]:
    """Describe each recognizer: `name`, `kind`, `weights`, and of a folder its `model_type` and SHA-256 `digest`.

    Args:
        settings: of the recognizers, by name.
    """
    return [_recognizer_row(name, config) for name, config in settings.items()]


def _recognizer_row(name: str, config: BaseModel) -> Row:
    values = config.model_dump()
    row: Row = {"name": name, "kind": values["kind"], "model_type": None, "digest": None}
    if values["kind"] == "pocketsphinx":
        return {**row, "weights": f"pocketsphinx {version('pocketsphinx')}, its English model"}
    if "url" in values:
        return {**row, "weights": f"{values['model']} at {values['url']}"}
    folder = Path(values["model"])
    if not folder.is_dir():
        return {**row, "weights": str(values["model"])}
    weights = snapshot_name(folder) or Path(*folder.resolve().parts[-2:]).as_posix()
    row |= {"weights": weights, "digest": folder_digest(folder)[:DIGEST_CHARACTERS]}
    if (folder / "config.json").is_file():
        row["model_type"] = read_json_file(folder / "config.json", dict).get("model_type")
    return row
