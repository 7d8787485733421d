"""Models that name the sounds in windows of audio, behind one protocol: TFLite, ONNX, transformers, our own checkpoint.

Shapes: B clips at a time, F windows, K classes, N samples.
"""

from __future__ import annotations

import csv
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from audiollm.errors import ConfigError
from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import fit_inputs, open_model, opening

FILE_SAMPLE_RATE = 16000
"""Sample rate of a YAMNet-class file, which takes mono sound in [-1, 1]."""
FILE_WINDOW_S = 0.975
"""Window of a file that takes any length: that of YAMNet."""
_ASKED_WINDOW_S = 10.0
_TAGGER = "audio classifier"
_REMEDY = (
    "give a .tflite or .onnx file of a waveform classifier, a transformers folder with safetensors weights, "
    "or a checkpoint of audiollm"
)
_ANY_WINDOW_S = 1.0
_ANSWER_TOKENS, _MAX_LABEL_CHARACTERS, _MAX_LABELS = 128, 60, 20


class WindowScores(NamedTuple):
    """How sure a tagger is of each class in each window, `[F, K]` in [0, 1]."""

    labels: list[str]
    scores_FK: NDArray[np.float32]


class Tagger(Protocol):
    """Names sounds. `labels` are its classes in the model's order; none where it answers in words of its own."""

    sample_rate: int
    window_s: float
    labels: list[str]

    def hear(self, windows: Iterable[NDArray[np.float32]]) -> WindowScores:
        """Tag windows `[N]` of `window_s` at `sample_rate`."""


class TfliteTagger:
    """A waveform classifier in a .tflite file, in one thread.

    Raises:
        ConfigError: not a model of mono waveforms, or its classes have no names.
    """

    sample_rate = FILE_SAMPLE_RATE

    def __init__(self, path: Path, labels: Path | None = None, window_s: float | None = None) -> None:
        from ai_edge_litert.interpreter import Interpreter

        try:
            self._interpreter = Interpreter(model_path=str(path), num_threads=1)
            inputs = self._interpreter.get_input_details()
            shape = [int(size) for size in inputs[0]["shape_signature"]]
            samples = _samples_of_window(path, [size if size > 1 else None for size in shape], window_s)
            if shape[-1] != samples:
                self._interpreter.resize_tensor_input(inputs[0]["index"], [*[1] * (len(shape) - 1), samples])
            self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError, OSError) as error:
            raise _not_a_tagger(path, error) from error
        self._input = self._interpreter.get_input_details()[0]
        outputs = self._interpreter.get_output_details()
        if len(inputs) != 1 or self._input["dtype"] is not np.float32:
            raise _not_a_tagger(path, ValueError("it does not take a float waveform alone"))
        self.window_s = samples / self.sample_rate
        self.labels, which = _labels_of(path, labels, [int(out["shape"][-1]) for out in outputs])
        self._output = outputs[which]["index"]

    def hear(self, windows: Iterable[NDArray[np.float32]]) -> WindowScores:
        return WindowScores(self.labels, np.stack([self._score_window(window_N) for window_N in windows]))

    def _score_window(self, window_N: NDArray[np.float32]) -> NDArray[np.float32]:
        self._interpreter.set_tensor(self._input["index"], window_N.reshape(self._input["shape"]))
        self._interpreter.invoke()
        return _as_scores(self._interpreter.get_tensor(self._output), len(self.labels))


class OnnxTagger:
    """A waveform classifier in an .onnx file, in one thread on the CPU.

    Raises:
        ConfigError: not a model of mono waveforms, or its classes have no names.
    """

    sample_rate = FILE_SAMPLE_RATE

    def __init__(self, path: Path, labels: Path | None = None, window_s: float | None = None) -> None:
        from audiollm.onnx_models import single_thread_session

        try:
            self._session = single_thread_session(path)
        except Exception as error:  # onnxruntime's errors have no base of their own
            raise _not_a_tagger(path, error) from error
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or inputs[0].type != "tensor(float)":
            raise _not_a_tagger(path, ValueError("it does not take a float waveform alone"))
        self._input, self._dimensions = inputs[0].name, len(inputs[0].shape)
        fixed = [size if isinstance(size, int) and size > 1 else None for size in inputs[0].shape]
        samples = _samples_of_window(path, fixed, window_s)
        self.window_s = samples / self.sample_rate
        probe = self._session.run(None, {self._input: self._shaped(np.zeros(samples, np.float32))})
        named = _label_lines(self._session.get_modelmeta().custom_metadata_map)
        self.labels, self._output = _labels_of(path, labels, [out.shape[-1] for out in probe], named)

    def hear(self, windows: Iterable[NDArray[np.float32]]) -> WindowScores:
        return WindowScores(self.labels, np.stack([self._score_window(window_N) for window_N in windows]))

    def _score_window(self, window_N: NDArray[np.float32]) -> NDArray[np.float32]:
        outputs = self._session.run(None, {self._input: self._shaped(window_N)})
        return _as_scores(outputs[self._output], len(self.labels))

    def _shaped(self, window_N: NDArray[np.float32]) -> NDArray[np.float32]:
        return window_N.reshape((1,) * (self._dimensions - 1) + (-1,))


@dataclass
class AudioClassifier:
    """An audio classifier of transformers, and what makes its inputs.

    Args:
        window_s: the longest that it hears at once; None: there is no limit.
        exclusive: whether one class is right and no other; else each is judged alone.
    """

    model: Any
    extractor: Any
    labels: list[str]
    sample_rate: int
    window_s: float | None
    exclusive: bool

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> AudioClassifier:
        """
        Raises:
            ConfigError: the folder holds none, or holds pickled weights only.
        """
        from transformers import AutoFeatureExtractor, AutoModelForAudioClassification

        with opening(folder, _TAGGER, _REMEDY):
            extractor = AutoFeatureExtractor.from_pretrained(str(folder), **OFFLINE)
            model = open_model(AutoModelForAudioClassification, folder, device)
        return cls(
            model=model,
            extractor=extractor,
            labels=[str(model.config.id2label[index]) for index in range(model.config.num_labels)],
            sample_rate=int(extractor.sampling_rate),
            window_s=_hears_at_once(extractor),
            exclusive=model.config.problem_type == "single_label_classification",
        )

    @property
    def tells_padding(self) -> bool:
        """Whether clips of different length can go together: features of one size, or a mask of what is sound."""
        return self.window_s is not None or bool(getattr(self.extractor, "return_attention_mask", False))

    def logits(self, clips: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """Compute the logits `[B, K]` of mono clips at `sample_rate`; sound beyond `window_s` is cut off."""
        import torch

        # transformers writes into what it is given, and clips are shared
        copies = [np.array(clip_N) for clip_N in clips]
        padding = {"padding": True} if len(copies) > 1 and self.window_s is None else {}
        inputs = self.extractor(copies, sampling_rate=self.sample_rate, return_tensors="pt", **padding)
        with torch.no_grad():
            logits_BK = self.model(**fit_inputs(self.model, inputs)).logits
        result_BK: NDArray[np.float64] = logits_BK.double().cpu().numpy()
        return result_BK


class TransformersTagger:
    """An `AudioClassifier` as a tagger: a sigmoid for each class, or a softmax where classes exclude each other.

    Raises:
        ConfigError: the folder holds none, or windows longer than it hears at once.
    """

    def __init__(self, folder: Path, window_s: float | None = None, device: str = "cpu") -> None:
        self._classifier = AudioClassifier.load(folder, device)
        longest_s = self._classifier.window_s
        if window_s is not None and longest_s is not None and window_s > longest_s:
            problem = f"window_s: {window_s}, and the model hears {longest_s:g} s at once"
            raise ConfigError(problem, str(folder), "give shorter windows, or leave window_s out")
        self.sample_rate, self.labels = self._classifier.sample_rate, self._classifier.labels
        self.window_s = window_s or longest_s or _ANY_WINDOW_S

    def hear(self, windows: Iterable[NDArray[np.float32]]) -> WindowScores:
        parts = []
        for some in _batch_windows(windows):
            logits_BK = self._classifier.logits(some)
            if not np.isfinite(logits_BK).all():
                raise ValueError("the sound-event model gives values that are not finite")
            parts.append(probabilities(logits_BK, self._classifier.exclusive).astype(np.float32))
        return WindowScores(self.labels, np.concatenate(parts))


class AskedTagger:
    """Our own understanding checkpoint, asked window by window which sounds it hears: a class is named, or it is not.

    Raises:
        ConfigError: no model there, or no codec for one that needs it.
    """

    sample_rate = FILE_SAMPLE_RATE

    def __init__(self, folder: Path, codec: Path | None = None, window_s: float | None = None) -> None:
        from audiollm.data.chat.tasks import FieldValue, fill_task, load_tasks
        from audiollm.data.records.sample import AudioPart
        from audiollm.families.registry import load_speech_generator

        self._generator = load_speech_generator(folder, codec)
        fields: dict[str, FieldValue] = {"audio": AudioPart(path="(heard)"), "tags": "(asked for)"}
        self._question = fill_task(load_tasks()["tag"], "question", fields).messages[:-1]
        self.window_s = window_s or _ASKED_WINDOW_S
        self.labels: list[str] = []  # whatever it answers

    def hear(self, windows: Iterable[NDArray[np.float32]]) -> WindowScores:
        named = [names for some in _batch_windows(windows) for names in self._ask(some)]
        labels = sorted(set().union(*named))
        return WindowScores(
            labels, np.array([[label in names for label in labels] for names in named], np.float32)
        )

    def _ask(self, windows: Sequence[NDArray[np.float32]]) -> list[list[str]]:
        import torch

        from audiollm.audio import Waveform

        waves = [
            Waveform(torch.from_numpy(np.array(window_N))[None], self.sample_rate) for window_N in windows
        ]
        requests = [
            self._generator.chat_request(self._question, wave, max_tokens=_ANSWER_TOKENS) for wave in waves
        ]
        return [listed(answer.text) for answer in self._generator.answer_all(requests)]


def probabilities(logits_BK: NDArray[np.float64], exclusive: bool) -> NDArray[np.float64]:
    """Softmax over the classes where they exclude each other, else a sigmoid of each, `[B, K]`."""
    if not exclusive:
        return 0.5 * (1.0 + np.tanh(0.5 * logits_BK))
    odds_BK = np.exp(logits_BK - logits_BK.max(axis=1, keepdims=True))
    shares_BK: NDArray[np.float64] = odds_BK / odds_BK.sum(axis=1, keepdims=True)
    return shares_BK


def listed(answer: str) -> list[str]:
    """The names in a list such as "Dog, rain; a car horn." in the order in which they come, without doubles."""
    names = (" ".join(name.split()).strip(" .-*\"'") for name in re.split(r"[,;\n]|\band\b", answer))
    short_names = [name for name in names if name and len(name) <= _MAX_LABEL_CHARACTERS]
    return list(dict.fromkeys(short_names))[:_MAX_LABELS]


def read_labels(path: Path) -> list[str]:
    """Class names: one a line, or a CSV's `display_name` (or its last column where there is none by that name).

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"events.labels: {error}", str(path), "give a text file with a name a line"
        ) from error
    if path.suffix.lower() != ".csv":
        return [line.strip() for line in lines if line.strip()]
    header, *rows = [row for row in csv.reader(lines) if row] or [[]]
    column = header.index("display_name") if "display_name" in header else len(header) - 1
    if any(len(row) <= column for row in rows):
        raise ConfigError(
            "events.labels: rows of unequal length", str(path), "give a name a row, names in quotes"
        )
    return [row[column].strip() for row in rows]


def _batch_windows(windows: Iterable[NDArray[np.float32]]) -> Iterator[list[NDArray[np.float32]]]:
    remaining = iter(windows)
    while some := list(islice(remaining, 4)):
        yield some


def _labels_of(
    path: Path, labels_path: Path | None, sizes: Sequence[int], inside: Sequence[str] = ()
) -> tuple[list[str], int]:
    """The names of a file's classes, and which of its outputs (with `sizes` classes) they belong to."""
    tried = (
        [read_labels(labels_path)]
        if labels_path is not None
        else [inside, *_packed_labels(path), *_labels_beside(path)]
    )
    for names in tried:
        if len(names) in sizes:
            return list(names), list(sizes).index(len(names))
    counts = ", ".join(str(len(names)) for names in tried if names) or "no"
    raise ConfigError(
        f"events.model: {counts} class names, and outputs of {', '.join(map(str, sizes))} values",
        str(labels_path or path),
        "set events.labels to a .txt with a name a line or a .csv with a column display_name, in the model's order",
    )


def _packed_labels(path: Path) -> list[list[str]]:
    """Lists of names inside a TFLite file: the files that go with its metadata are a zip at its end."""
    try:
        with zipfile.ZipFile(path) as packed:
            texts = [packed.read(name) for name in packed.namelist() if name.endswith(".txt")]
    except (OSError, zipfile.BadZipFile):
        return []
    return [text.decode("utf-8", "replace").splitlines() for text in texts]


def _labels_beside(path: Path) -> list[list[str]]:
    named = [path.with_suffix(suffix) for suffix in (".txt", ".csv")]
    listing = [*path.parent.glob("*label*"), *path.parent.glob("*class*")]
    candidates = sorted(candidate for candidate in listing if candidate.suffix.lower() in (".txt", ".csv"))
    return [read_labels(file) for file in [*named, *candidates] if file.is_file()]


def _label_lines(metadata: dict[str, str]) -> list[str]:
    """The names that an ONNX file keeps as `labels`: a JSON list, or one a line."""
    text = metadata.get("labels", "")
    try:
        names = json.loads(text)
    except ValueError:
        names = text.splitlines()
    return [str(name) for name in names] if isinstance(names, list) else []


def _samples_of_window(path: Path, shape: Sequence[int | None], window_s: float | None) -> int:
    """Samples of a window: of the input's shape, or of what is asked for where that is open."""
    *batch, samples = shape or [None]
    if any(batch):
        raise ConfigError(
            f"events.model: takes an input of shape {list(shape)}, not one waveform of mono samples at 16 kHz",
            str(path),
            "give a model that makes its spectrogram itself, as YAMNet's TFLite file does",
        )
    requested = round((window_s or FILE_WINDOW_S) * FILE_SAMPLE_RATE)
    if samples is not None and window_s is not None and requested != samples:
        problem = f"events.window_s: {window_s}, and the model takes {samples / FILE_SAMPLE_RATE:g} s"
        raise ConfigError(problem, str(path), "leave window_s out")
    return samples or requested


def _as_scores(output: NDArray[np.float32], num_classes: int) -> NDArray[np.float32]:
    """One window's scores `[K]`: the mean of what the model gives for its frames.

    Raises:
        ValueError: values outside of 0 to 1.
    """
    scores_K: NDArray[np.float32] = output.reshape(-1, num_classes).mean(axis=0)
    if not (scores_K.min() >= -1e-4 and scores_K.max() <= 1 + 1e-4):
        raise ValueError("the sound-event model gives values outside of 0 to 1: export it with its sigmoid")
    return scores_K.clip(0.0, 1.0)


def _hears_at_once(extractor: Any) -> float | None:
    """Seconds after which a feature extractor cuts: AST by frames of 10 ms, Whisper by its chunk."""
    if type(extractor).__name__ == "ASTFeatureExtractor":
        return float(extractor.max_length) * 0.01
    chunk_s = getattr(extractor, "chunk_length", None)
    return float(chunk_s) if chunk_s and hasattr(extractor, "nb_max_frames") else None


def _not_a_tagger(path: Path, error: Exception) -> ConfigError:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigError(f"no {_TAGGER} loads from {path}: {message}", str(path), _REMEDY)
