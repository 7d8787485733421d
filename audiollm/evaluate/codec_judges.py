"""Judges of decoded speech given by path: a recognizer and a speaker judge of Hugging Face, nothing downloaded.

Shapes: C channels, N samples, D embedding dimension.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from audiollm.audio import resample, to_mono
from audiollm.config import ConfigError


class PretrainedRecognizer:
    """A speech recognizer of transformers (CTC or Whisper-like) in a local folder.

    Raises:
        ConfigError: the folder holds none, or holds pickled weights only.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import pipeline

        self.name = folder.name
        try:
            if not folder.is_dir():  # else the name would be looked up on the hub
                raise OSError("no such folder")
            self._pipeline = pipeline(
                "automatic-speech-recognition", model=str(folder), model_kwargs={"use_safetensors": True}
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _not_a_judge(folder, "speech recognizer", error) from error
        self._rate = int(self._pipeline.feature_extractor.sampling_rate)

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        """What is said, as the model writes it."""
        mono_1N = resample(to_mono(samples_CN), sample_rate, self._rate)
        return str(self._pipeline({"raw": mono_1N[0].numpy(), "sampling_rate": self._rate})["text"])


class PretrainedSpeakerJudge:
    """A speaker verification model of transformers (WavLM-SV and other x-vector heads) in a local folder.

    Raises:
        ConfigError: the folder holds none, or holds pickled weights only.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoFeatureExtractor, AutoModelForAudioXVector

        self.name = folder.name
        try:
            self._extractor = AutoFeatureExtractor.from_pretrained(str(folder), local_files_only=True)
            self._model = AutoModelForAudioXVector.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True
            ).eval()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _not_a_judge(folder, "speaker judge (an x-vector model)", error) from error
        self._rate = int(self._extractor.sampling_rate)

    @torch.no_grad()
    def embed(self, samples_1N: Tensor, sample_rate: int) -> Tensor:
        """The voice, float32 `[D]`."""
        mono_1N = resample(samples_1N, sample_rate, self._rate)
        inputs = self._extractor(mono_1N[0].numpy(), sampling_rate=self._rate, return_tensors="pt")
        embedding_D: Tensor = self._model(**inputs).embeddings[0].float()
        return embedding_D


def _not_a_judge(folder: Path, what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"no {what} loads from {folder}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        str(folder),
        "give a folder that transformers' from_pretrained reads, with safetensors weights",
    )
