"""Judges of sounds: models that name classes, spaces that sounds and texts are put into, and judges of synchrony.

All are loaded from a local folder or file, or are a user's own, named `package.module:factory`.

Shapes: N samples, D embedding dimension, K classes, O offsets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from audiollm.audio import Waveform
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.classifier import ClipClassifier
from audiollm.evaluate.judges.taggers import AudioClassifier, OnnxTagger, Tagger, TfliteTagger
from audiollm.files.json_files import OFFLINE, read_json_file
from audiollm.files.transformers_folders import fit_inputs, open_model, opening
from audiollm.recipe.plug_ins import import_named, is_import_path

Vector = NDArray[np.float64]
_SURE = 1e-6
"""Scores of taggers are taken for at least this far from 0 and 1, so that they have finite logits."""


class SoundClasses(Protocol):
    """A judge of what is heard. `labels` are its classes."""

    labels: list[str]

    def logits(self, sound: Waveform) -> Vector:
        """Scores `[K]` of one sound before softmax or sigmoid."""


class SoundSpace(Protocol):
    """A space in which similar sounds are near to each other."""

    def embed(self, sound: Waveform) -> Vector:
        """The place `[D]` of a sound."""


class TextSoundSpace(SoundSpace, Protocol):
    """A space that texts have places in, too (CLAP)."""

    def embed_text(self, text: str) -> Vector:
        """The place `[D]` of a text."""


class SynchronyJudge(Protocol):
    """A judge of how late a sound is for its pictures (Synchformer), always a user's own."""

    def offsets(self, video: Path, sound: Waveform) -> tuple[Vector, Vector]:
        """Scores `[O]` of the 21 offsets of `OFFSETS_S` for the first and the last 4.8 s."""


class ClassSpace:
    """The logits of a judge of classes as a space."""

    def __init__(self, classes: SoundClasses) -> None:
        self._classes = classes

    def embed(self, sound: Waveform) -> Vector:
        return self._classes.logits(sound)


class ClapSpace:
    """A `ClapModel` of transformers in a local folder; of long sounds it is the mean over windows.

    Raises:
        ConfigError: the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor, ClapModel

        with opening(folder, "CLAP", "give the folder of a ClapModel with its processor, in safetensors"):
            self._processor = AutoProcessor.from_pretrained(str(folder), **OFFLINE)
            self._model = open_model(ClapModel, folder)
        self._rate = int(self._processor.feature_extractor.sampling_rate)

    @torch.inference_mode()
    def embed(self, sound: Waveform) -> Vector:
        extractor = self._processor.feature_extractor
        heard_N = sound.mono().resample(self._rate).samples_CN[0].numpy()
        # of a longer sound the extractor takes a part at random
        pieces = _windows(heard_N, int(extractor.nb_max_samples))
        vectors = []
        for piece in pieces:
            features = extractor(piece, sampling_rate=self._rate, return_tensors="pt")
            vectors.append(_vector(self._model.get_audio_features(**fit_inputs(self._model, features))))
        return np.asarray(np.mean(vectors, axis=0))

    @torch.inference_mode()
    def embed_text(self, text: str) -> Vector:
        inputs = self._processor.tokenizer(text, truncation=True, return_tensors="pt")
        return _vector(self._model.get_text_features(**fit_inputs(self._model, inputs)))


class TaggerClasses:
    """A tagger of windows: its mean scores over a sound as logits."""

    def __init__(self, tagger: Tagger) -> None:
        self._tagger, self.labels = tagger, tagger.labels

    def logits(self, sound: Waveform) -> Vector:
        heard_N = sound.mono().resample(self._tagger.sample_rate).samples_CN[0].numpy()
        size = round(self._tagger.window_s * self._tagger.sample_rate)
        padded_N = np.pad(heard_N, (0, -len(heard_N) % size))
        scores_K = self._tagger.hear(list(padded_N.reshape(-1, size))).scores_FK.mean(
            axis=0, dtype=np.float64
        )
        sure_K = np.clip(scores_K, _SURE, 1 - _SURE)
        return np.asarray(np.log(sure_K / (1 - sure_K)))


class ClassifierClasses:
    """An audio classifier of transformers; long sounds are heard in windows, whose logits are averaged."""

    def __init__(self, classifier: AudioClassifier) -> None:
        self._classifier, self.labels = classifier, classifier.labels

    def logits(self, sound: Waveform) -> Vector:
        heard_N = sound.mono().resample(self._classifier.sample_rate).samples_CN[0].numpy()
        size = len(heard_N)
        if self._classifier.window_s is not None:
            size = min(size, round(self._classifier.window_s * self._classifier.sample_rate))
        return np.asarray(
            np.mean([self._classifier.logits([piece])[0] for piece in _windows(heard_N, size)], axis=0)
        )


class OwnClasses:
    """A classifier that was trained with `ClipClassifier` on real recordings."""

    def __init__(self, classifier: ClipClassifier) -> None:
        self._classifier, self.labels = classifier, classifier.labels

    def logits(self, sound: Waveform) -> Vector:
        """
        Raises:
            ValueError: the sound is silent.
        """
        return np.asarray(self._classifier.logits(sound.samples_CN, sound.sample_rate).double().numpy())


def load_sound_classes(spec: str) -> SoundClasses:
    """A judge of classes: a .tflite or .onnx tagger (YAMNet), a folder of transformers or our own, or `module:factory`.

    Raises:
        ConfigError: it is none of these, or cannot be loaded.
    """
    if is_import_path(spec):
        judge: SoundClasses = import_named(
            spec, "name a function that returns a judge with labels and logits"
        )()
        return judge
    path = Path(spec)
    if path.suffix == ".tflite":
        return TaggerClasses(TfliteTagger(_existing_path(path)))
    if path.suffix == ".onnx":
        return TaggerClasses(OnnxTagger(_existing_path(path)))
    if (path / "classifier.json").exists():
        return OwnClasses(ClipClassifier.load(path))
    return ClassifierClasses(AudioClassifier.load(_existing_path(path)))


def load_sound_space(spec: str) -> SoundSpace:
    """A space of sounds: the folder of a ClapModel, any judge of classes by its logits, or `module:factory`.

    Raises:
        ConfigError: it is none of these, or cannot be loaded.
    """
    if is_import_path(spec):
        space: SoundSpace = import_named(spec, "name a function that returns an object with embed(sound)")()
        return space
    return ClapSpace(Path(spec)) if _is_clap(Path(spec)) else ClassSpace(load_sound_classes(spec))


def load_text_space(spec: str) -> TextSoundSpace:
    """A space of sounds and texts: the folder of a ClapModel, or `module:factory`.

    Raises:
        ConfigError: it is neither, or cannot be loaded.
    """
    if is_import_path(spec):
        remedy = "name a function that returns an object with embed(sound) and embed_text(text)"
        space: TextSoundSpace = import_named(spec, remedy)()
        return space
    return ClapSpace(_existing_path(Path(spec)))


# Private


def _windows(heard_N: NDArray[np.float32], size: int) -> list[NDArray[np.float32]]:
    """The windows of a sound; a rest of less than half a window is left out, since it would count as a whole one."""
    return [heard_N[start : start + size] for start in range(0, max(1, len(heard_N) - size // 2), size)]


def _existing_path(path: Path) -> Path:
    if not path.exists():
        raise ConfigError("no such file or folder", str(path), "check the path of the judge")
    return path


def _is_clap(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and read_json_file(config, dict).get("model_type") == "clap"


def _vector(features: Any) -> Vector:
    """The one row of what a model gives, which is a tensor or an output with pooled features."""
    tensor = features if isinstance(features, torch.Tensor) else features.pooler_output
    return np.asarray(tensor[0].double().numpy())
