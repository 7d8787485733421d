"""Judges chosen by a command: `pocketsphinx`, a model's folder, or `package.module:factory`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from audiollm.data.records.text_origin import DIGEST_CHARACTERS
from audiollm.evaluate.judges.judging import Recognizer, VoiceJudge
from audiollm.evaluate.judges.listening_model import ListeningModelRecognizer
from audiollm.evaluate.judges.pretrained import (
    ClassifierSpeakerJudge,
    PretrainedEmotionJudge,
    PretrainedRecognizer,
    PretrainedSpeakerJudge,
)
from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer
from audiollm.evaluate.subjects.loading import plug_in
from audiollm.families.registry import open_model_folder
from audiollm.files.atomic import folder_digest
from audiollm.models.recognition.recognizer import folder_recognizer
from audiollm.recipe.plug_ins import is_import_path

POCKETSPHINX = "pocketsphinx"
LISTENING_MODEL = "model="
"""Before the folder of a model that hears, where a recognizer is named."""
Judge = TypeVar("Judge", covariant=True)


@dataclass(frozen=True)
class ChosenJudge(Generic[Judge]):
    """A judge, and the fingerprint that identifies it in the rows."""

    judge: Judge
    fingerprint: str


def choose_recognizer(spec: str | None, language: str | None = None) -> ChosenJudge[Recognizer] | None:
    """`pocketsphinx` (English, open vocabulary), the folder of a recognizer, a model that hears, or an import path.

    Args:
        spec: a folder as `annotate` takes it: `transformers=FOLDER`, `faster_whisper=FOLDER`, or the folder alone;
            `model=FOLDER`: a model of any family that was trained on the task `asr`.
        language: of the speech; None: a multilingual Whisper detects it.

    Raises:
        ConfigError: no recognizer there.
    """
    if spec is None:
        return None
    if spec == POCKETSPHINX:
        return ChosenJudge(PocketsphinxRecognizer(), POCKETSPHINX)
    if is_import_path(spec):
        return _plug_in_judge(spec, Recognizer, "name and recognize(samples_CN, sample_rate)")
    if spec.startswith(LISTENING_MODEL):
        listener = ListeningModelRecognizer(spec.removeprefix(LISTENING_MODEL))
        return ChosenJudge(listener, f"{folder_digest(listener.folder)} {language}")
    judge = PretrainedRecognizer(spec, language)
    return ChosenJudge(judge, f"{folder_digest(judge.folder)} {language}")


def recognizer_digest(spec: str) -> str | None:
    """The digest by which trainings know a recognizer's weights; None of one that is in no folder.

    Args:
        spec: as of `choose_recognizer`.

    Raises:
        ConfigError: another kind of recognizer.
    """
    if spec == POCKETSPHINX or is_import_path(spec):
        return None
    if spec.startswith(LISTENING_MODEL):
        folder = open_model_folder(Path(spec.removeprefix(LISTENING_MODEL))).path
    else:
        folder = folder_recognizer(spec)[1]
    return folder_digest(folder)[:DIGEST_CHARACTERS]


def choose_speaker_judge(spec: str | None) -> ChosenJudge[VoiceJudge] | None:
    """The folder of a Hugging Face x-vector model, or of a classifier of speakers of ours, or an import path.

    Raises:
        ConfigError: no judge there.
    """
    if spec is None:
        return None
    if is_import_path(spec):
        return _plug_in_judge(spec, VoiceJudge, "name and embed(samples_1N, sample_rate)")
    folder = Path(spec)
    if (folder / "classifier.json").exists():
        return ChosenJudge(ClassifierSpeakerJudge(folder), folder_digest(folder))
    return ChosenJudge(PretrainedSpeakerJudge(folder), folder_digest(folder))


def choose_emotion_judge(spec: str | None) -> ChosenJudge[VoiceJudge] | None:
    """The folder of a Hugging Face audio classifier, or an import path (emotion2vec, for example).

    What is plugged in needs `embed`; with `labels` and `classify(samples_1N, sample_rate)` it names emotions, too.

    Raises:
        ConfigError: no judge there.
    """
    if spec is None:
        return None
    if is_import_path(spec):
        return _plug_in_judge(spec, VoiceJudge, "name and embed(samples_1N, sample_rate)")
    return ChosenJudge(PretrainedEmotionJudge(Path(spec)), folder_digest(Path(spec)))


def _plug_in_judge(path: str, protocol: Any, needs: str) -> ChosenJudge[Any]:
    judge = plug_in(path, (protocol,), needs)
    return ChosenJudge(judge, f"{path} {getattr(judge, 'fingerprint', '')}")
