"""Judges of speech given by path: recognizers, voices and emotions of Hugging Face, and our own trained classifier of
speakers. Nothing is downloaded, nothing pickled is read.

Shapes: C channels, N samples, T frames, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.audio import resample, to_mono
from audiollm.data.records.text_origin import DIGEST_CHARACTERS
from audiollm.files.atomic import folder_digest
from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import fit_inputs, open_model, opening
from audiollm.hub_models.names import folder_label


class PretrainedRecognizer:
    """A speech recognizer in a local folder: of transformers (CTC or Whisper-like), or a Whisper of CTranslate2.

    Args:
        source: `transformers=FOLDER`, `faster_whisper=FOLDER`, or the folder alone.
        language: the spoken language (`en`, `zh`), for a multilingual model; None: the model detects it.

    Raises:
        ConfigError: the folder holds none, or holds pickled weights only.
    """

    def __init__(self, source: str | Path, language: str | None = None) -> None:
        from audiollm.models.recognition.recognizer import folder_recognizer, is_whisper, open_recognizer

        self.folder = folder_recognizer(str(source))[1]
        self.name = folder_label(self.folder)
        self.is_whisper = is_whisper(self.folder)
        """Whether its texts are compared in Whisper's own form where a suite does not say another."""
        self.digest = folder_digest(self.folder)[:DIGEST_CHARACTERS]
        """By which trainings and annotations know its weights."""
        self._recognizer = open_recognizer(str(source), language)

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        """The transcript, as the model writes it."""
        mono_1N = resample(to_mono(samples_CN), sample_rate, self._recognizer.sample_rate)
        return self._recognizer.transcribe([mono_1N[0].numpy()])[0].text


class PretrainedSpeakerJudge:
    """A speaker verification model of transformers (WavLM-SV and other x-vector heads) in a local folder.

    Raises:
        ConfigError: the folder holds none, or holds pickled weights only.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForAudioXVector

        self.name, self.folder = folder_label(folder), folder
        self._model, self._inputs = _pretrained(
            folder, AutoModelForAudioXVector, "speaker judge (an x-vector model)"
        )

    @torch.no_grad()
    def embed(self, samples_1N: Tensor, sample_rate: int) -> Tensor:
        """The embedding of the voice, float32 `[D]`."""
        embedding_D: Tensor = self._model(**self._inputs(samples_1N, sample_rate)).embeddings[0].float()
        return embedding_D


class ClassifierSpeakerJudge:
    """A classifier of speakers that the stage `evaluate` trained (`judges/speaker`), as a judge of voices.

    A voice is placed among the training speakers, so similarity of a new voice is measured only as far as those
    few span it.

    Raises:
        ConfigError: the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        from audiollm.evaluate.judges.classifier import ClipClassifier

        self.name, self.folder = f"{folder.parent.parent.name}/{folder.name}", folder
        with opening(folder, "trained classifier", "give the folder of a classifier that `evaluate` trained"):
            self._classifier = ClipClassifier.load(folder)

    def embed(self, samples_1N: Tensor, sample_rate: int) -> Tensor:
        """The embedding of the voice, float32 `[K]`, K training speakers: the logits, less their mean.

        Raises:
            MetricError: the clip is silent.
        """
        logits_K = self._classifier.logits(samples_1N, sample_rate)
        return logits_K - logits_K.mean()


class PretrainedEmotionJudge:
    """An audio classifier of transformers in a local folder: its labels, and its encoder's mean over time.

    Raises:
        ConfigError: the folder holds none, or holds pickled weights only.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForAudioClassification

        self.name, self.folder = folder_label(folder), folder
        what = "emotion judge (an audio classifier)"
        self._model, self._inputs = _pretrained(folder, AutoModelForAudioClassification, what)
        self.labels = [str(self._model.config.id2label[i]) for i in range(self._model.config.num_labels)]

    def classify(self, samples_1N: Tensor, sample_rate: int) -> str:
        """The most probable of `labels`."""
        return self.labels[int(self._forward(samples_1N, sample_rate).logits[0].argmax())]

    def embed(self, samples_1N: Tensor, sample_rate: int) -> Tensor:
        """The mean over time of the last hidden states, float32 `[D]` (emotion2vec's utterance embedding)."""
        hidden_TD: Tensor = self._forward(samples_1N, sample_rate).hidden_states[-1][0].float()
        return hidden_TD.mean(dim=0)

    @torch.no_grad()
    def _forward(self, samples_1N: Tensor, sample_rate: int) -> Any:
        return self._model(**self._inputs(samples_1N, sample_rate), output_hidden_states=True)


def _pretrained(folder: Path, model_class: Any, what: str) -> tuple[Any, Callable[[Tensor, int], Any]]:
    """The model in a folder, and a function from a mono waveform `[1, N]` and its sample rate to the model's inputs.

    Raises:
        ConfigError: the folder holds none, or holds pickled weights only.
    """
    from transformers import AutoFeatureExtractor

    with opening(folder, what):
        extractor = AutoFeatureExtractor.from_pretrained(str(folder), **OFFLINE)
        model = open_model(model_class, folder)
    rate = int(extractor.sampling_rate)

    def inputs(samples_1N: Tensor, sample_rate: int) -> Any:
        mono_1N = resample(samples_1N, sample_rate, rate)
        return fit_inputs(model, extractor(mono_1N[0].numpy(), sampling_rate=rate, return_tensors="pt"))

    return model, inputs
