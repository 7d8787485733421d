"""Pretrained diarizers by path: pipelines of pyannote.audio, and Sortformer models of NeMo.

Both publish their weights as pickles, which can run any code when they are opened. Here torch opens them with its
restricted reader alone, which builds tensors, plain values and the few classes below; a file with more is refused.

Shapes: N samples at 16 kHz, K speakers, D embedding dimension.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from audiollm.errors import ConfigError
from pipelines.annotate.pretrained_parts import is_installed
from pipelines.annotate.voice.diarization import (
    SAMPLE_RATE,
    Diarization,
    SpeakerTurn,
    cut_windows,
    place_windows,
)
from pipelines.annotate.voice.linking import unit

Array = NDArray[np.float32]
SORTFORMER_SUFFIX = ".nemo"
PYANNOTE_CONFIG = "config.yaml"
_PYANNOTE, _PYANNOTE_WEIGHTS = "pyannote.audio", "pytorch_model.bin"
_PYANNOTE_PIPELINES = (
    "pyannote.audio.pipelines.SpeakerDiarization",
    "pyannote.audio.pipelines.speaker_diarization.SpeakerDiarization",
)
_NEMO_MAJOR = 3
"""The first NeMo that takes samples, and that builds no class of a file's choice."""
_MAX_VOICE_WINDOWS = 100
"""Most windows of one speaker that are embedded, evenly spread over what the speaker says alone."""
_FORCE_RESTRICTED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class SpeakerSpan(NamedTuple):
    """Seconds in which a speaker speaks, by the diarizer's name; spans of two speakers may overlap."""

    start_s: float
    end_s: float
    speaker: str


class Diarizer(Protocol):
    """A pretrained model that tells who speaks when."""

    def speaker_spans(self, samples_N: Array) -> list[SpeakerSpan]:
        """The spans of the speakers in a recording, mono at 16 kHz."""


def diarizer_problem(path: Path) -> str | None:
    """Name what a diarizer lacks, with the remedy; None: nothing. Imports and loads nothing."""
    if path.suffix.lower() == SORTFORMER_SUFFIX:
        if not path.is_file():
            return f"no file {path}: give a Sortformer model of NeMo (.nemo)"
        if not is_installed("nemo.collections.asr"):
            return "the package nemo_toolkit is not installed: pip install 'audiollm[sortformer]'"
        if int(version("nemo_toolkit").partition(".")[0]) < _NEMO_MAJOR:
            return f"nemo_toolkit {version('nemo_toolkit')} is too old: pip install -U 'audiollm[sortformer]'"
        return None
    if not (path / PYANNOTE_CONFIG).is_file():
        return f"no pipeline at {path}: give the folder of one of pyannote.audio, with its config.yaml"
    if not is_installed(_PYANNOTE):
        return "the package pyannote.audio is not installed: pip install 'audiollm[pyannote]'"
    return None


def load_diarizer(
    path: Path, num_speakers: int | None = None, max_speakers: int | None = None, device: str = "cpu"
) -> Diarizer:
    """Load the diarizer that a path names: a `.nemo` file, or the folder of a pyannote pipeline.

    Raises:
        ConfigError: it cannot be opened, or not safely.
    """
    if path.suffix.lower() == SORTFORMER_SUFFIX:
        return SortformerDiarizer(path, device)
    return PyannoteDiarizer(path, num_speakers, max_speakers, device)


class PyannoteDiarizer:
    """A speaker diarization pipeline of pyannote.audio 4 in a local folder, such as speaker-diarization-community-1.

    Its `config.yaml` must name models within the folder (`$model/segmentation`), so that nothing is fetched. The
    package's telemetry is off unless `PYANNOTE_METRICS_ENABLED` is set.

    Args:
        num_speakers: known beforehand.
        max_speakers: at most so many.

    Raises:
        ConfigError: another kind of pipeline, models elsewhere, or a file that cannot be opened safely.

    Source: pyannote-audio 4.0.7, `core/pipeline.py`, `core/model.py` and `pipelines/speaker_diarization.py`.
    """

    def __init__(
        self,
        folder: Path,
        num_speakers: int | None = None,
        max_speakers: int | None = None,
        device: str = "cpu",
    ) -> None:
        os.environ.setdefault("PYANNOTE_METRICS_ENABLED", "0")  # read at the import
        check_pyannote_config(folder)
        import torch
        from pyannote.audio import Pipeline
        from pyannote.audio.core.task import Problem, Resolution, Specifications

        classes = [Problem, Resolution, Specifications, torch.torch_version.TorchVersion]
        with _restricted_reader(folder, "pyannote pipeline"), torch.serialization.safe_globals(classes):
            for weights in sorted(folder.rglob(_PYANNOTE_WEIGHTS)):
                _check_architecture(weights)
            self._pipeline: Any = Pipeline.from_pretrained(str(folder / PYANNOTE_CONFIG))
            self._pipeline.to(torch.device(device))
        bounds = {"num_speakers": num_speakers, "max_speakers": max_speakers}
        self._bounds = {name: count for name, count in bounds.items() if count is not None}

    def speaker_spans(self, samples_N: Array) -> list[SpeakerSpan]:
        """See `Diarizer.speaker_spans`."""
        import torch

        file = {"waveform": torch.from_numpy(samples_N)[None], "sample_rate": SAMPLE_RATE}
        output = self._pipeline(file, **self._bounds)
        annotation = getattr(output, "speaker_diarization", output)  # a `legacy` pipeline gives it alone
        return [
            SpeakerSpan(float(segment.start), float(segment.end), str(speaker))
            for segment, _, speaker in annotation.itertracks(yield_label=True)
        ]


class SortformerDiarizer:
    """A Sortformer of NeMo 3 (`SortformerEncLabelModel`) in a `.nemo` file: at most four speakers.

    Raises:
        ConfigError: the file cannot be opened, or not safely.

    Source: NeMo 3.0.0, `collections/asr/models/sortformer_diar_models.py`; the model cards of
    nvidia/diar_streaming_sortformer_4spk-v2.1.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        import torch
        from nemo.collections.asr.models import SortformerEncLabelModel
        from nemo.utils import logging

        logging.setLevel(logging.ERROR)  # it has a line for every recording
        with _restricted_reader(path, "Sortformer"):
            self._model: Any = SortformerEncLabelModel.restore_from(
                restore_path=str(path), map_location=torch.device(device), strict=False
            )
        self._model.eval()

    def speaker_spans(self, samples_N: Array) -> list[SpeakerSpan]:
        """See `Diarizer.speaker_spans`.

        Raises:
            ValueError: the model gives something else than `begin end speaker`.
        """
        outputs = self._model.diarize(
            audio=[np.array(samples_N)], sample_rate=SAMPLE_RATE, batch_size=1, num_workers=0, verbose=False
        )
        return [_parse_span(line) for line in outputs[0]]


def diarize_pretrained(
    diarizer: Diarizer, embed: Callable[[Sequence[Array]], Array], blocks: Iterable[Array]
) -> Diarization:
    """The turns of a pretrained diarizer as those of `diarization.diarize`, and each speaker's voice by an embedder.

    Memory: the whole recording, 230 MB per hour.

    Args:
        embed: windows of mono at 16 kHz `[N]` to voices `[W, D]` of length 1.
        blocks: the whole recording, mono at 16 kHz, end to end.
    """
    samples_N = np.concatenate([np.zeros(0, np.float32), *blocks]).astype(np.float32, copy=False)
    turns = exclusive_turns(diarizer.speaker_spans(samples_N), len(samples_N) / SAMPLE_RATE)
    voices = []
    for speaker in sorted({turn.speaker for turn in turns}):
        speech = [turn for turn in turns if turn.speaker == speaker]
        alone = [turn for turn in speech if not turn.overlap] or speech
        windows = place_windows([(turn.start_s, turn.end_s) for turn in alone])
        step = -(-len(windows) // _MAX_VOICE_WINDOWS)
        voices.append(embed(list(cut_windows([samples_N], windows[::step]))).mean(axis=0))
    voices_KD = unit(np.stack(voices)).astype(np.float32) if voices else np.zeros((0, 0), np.float32)
    return Diarization(turns, voices_KD)


def exclusive_turns(spans: Iterable[SpeakerSpan], duration_s: float) -> list[SpeakerTurn]:
    """Cut spans that may overlap into turns within the recording, in order of their starts.

    Where several speak at once, each has a turn of the same times, marked as overlap; else no two turns share a moment.
    Speakers are numbered as they first appear.
    """
    inside = [
        span._replace(start_s=max(span.start_s, 0.0), end_s=min(span.end_s, duration_s)) for span in spans
    ]
    inside = sorted(span for span in inside if span.end_s - span.start_s >= 1e-3)
    edges = sorted({edge for span in inside for edge in (span.start_s, span.end_s)})
    numbers: dict[str, int] = {}
    for span in inside:
        numbers.setdefault(span.speaker, len(numbers))
    stretches: list[tuple[float, float, tuple[int, ...]]] = []
    for start_s, end_s in pairwise(edges):
        speakers = {
            numbers[span.speaker] for span in inside if span.start_s <= start_s and end_s <= span.end_s
        }
        state = tuple(sorted(speakers))
        if stretches and stretches[-1][1:] == (start_s, state):
            stretches[-1] = (stretches[-1][0], end_s, state)
        elif state and end_s - start_s >= 1e-3:
            stretches.append((start_s, end_s, state))
    return [
        SpeakerTurn(start_s, end_s, speaker, len(state) > 1)
        for start_s, end_s, state in stretches
        for speaker in state
    ]


def check_pyannote_config(folder: Path) -> None:
    """Accept the `config.yaml` of a pipeline of pyannote.audio whose models lie in its folder.

    Raises:
        ConfigError: it names a class of another package, or a model elsewhere.
    """
    import yaml

    where = str(folder / PYANNOTE_CONFIG)
    try:
        config = yaml.safe_load((folder / PYANNOTE_CONFIG).read_text(encoding="utf-8"))
        pipeline = dict(config["pipeline"])
        name, params = str(pipeline["name"]), dict(pipeline.get("params") or {})
    except (OSError, UnicodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        remedy = "give the folder of a pipeline of pyannote.audio 4"
        raise ConfigError(
            f"no pipeline of pyannote: {type(error).__name__}: {error}", where, remedy
        ) from error
    if name not in _PYANNOTE_PIPELINES or "preprocessors" in config:
        raise ConfigError(
            f"no speaker diarization alone: {name}"
            + (", with preprocessors" if "preprocessors" in config else ""),
            where,
            f"give a pipeline of the class {_PYANNOTE_PIPELINES[0]}: other code that a file names is not imported",
        )
    for part in ("segmentation", "embedding", "plda"):  # the package fetches what is not named
        place = params.get(part)
        if not _is_in_folder(place, folder):
            raise ConfigError(
                f"pipeline.params.{part}: {place or 'nothing'} is not in this folder",
                where,
                f"put it below {folder} and name it $model/{part}, as in pyannote/speaker-diarization-community-1",
            )


# ------------------------------------------------------------------------------------------------ private


def _is_in_folder(place: object, folder: Path) -> bool:
    if not isinstance(place, str) or not place.startswith("$model/"):
        return False
    path = (folder / place.removeprefix("$model/")).resolve()
    return path.is_dir() and path.is_relative_to(folder.resolve())


def _check_architecture(weights: Path) -> None:
    """Raises: ConfigError: the file names a class outside of pyannote's models."""
    import torch

    checkpoint = torch.load(weights, map_location="cpu", weights_only=True)
    module = str(checkpoint[_PYANNOTE]["architecture"]["module"])
    if not module.startswith("pyannote.audio.models."):
        remedy = "give a model as pyannote publishes it: what a file names is not imported"
        raise ConfigError(f"names code outside of pyannote's models ({module})", str(weights), remedy)


def _parse_span(line: object) -> SpeakerSpan:
    """`begin end speaker`, in seconds."""
    words = str(line).split()
    if len(words) != 3:
        raise ValueError(f"Sortformer gives {line!r}, and not `begin end speaker`")
    return SpeakerSpan(float(words[0]), float(words[1]), words[2])


@contextmanager
def _restricted_reader(path: Path, kind: str) -> Iterator[None]:
    """Have torch open pickles with its restricted reader, whatever a package asks for.

    Raises:
        ConfigError: a file holds more than that reader builds, or the block failed to read it.
    """
    before = os.environ.get(_FORCE_RESTRICTED)
    os.environ[_FORCE_RESTRICTED] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"its pickled weights hold more than tensors, and can run code: {_forbidden_class(error)}",
            str(path),
            f"give a {kind} as it is published: such a file is never opened",
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # packages have classes of their own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "download the whole model again, and compare its version with that of the package"
        raise ConfigError(f"no {kind} loads from it: {reason}", str(path), remedy) from error
    finally:
        if before is None:
            del os.environ[_FORCE_RESTRICTED]
        else:
            os.environ[_FORCE_RESTRICTED] = before


def _forbidden_class(error: Exception) -> str:
    """The name of the class or function that the restricted reader refused."""
    words = str(error).partition("GLOBAL ")[2].split()
    return words[0] if words else "unknown"
