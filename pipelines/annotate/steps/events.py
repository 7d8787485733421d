"""The step `events`: the sounds in a segment, each with start and end.

Shapes: F windows, K classes, N samples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from audiollm.errors import ConfigError
from audiollm.evaluate.judges.taggers import (
    AskedTagger,
    OnnxTagger,
    Tagger,
    TfliteTagger,
    TransformersTagger,
    WindowScores,
)
from audiollm.evaluate.judges.yamnet import AUTO, TaggerPath, absence
from audiollm.recipe.stages import ModelPath
from pipelines.annotate.step import SegmentStep
from pipelines.steps.step import StepConfig, Value

FILES = (".tflite", ".onnx")
SILENCE = "Silence"
GROUPS = {
    "Animal": "Whale vocalization",
    "Domestic animals, pets": "Caterwaul",
    "Livestock, farm animals, working animals": "Honk",
    "Fowl": "Honk",
    "Wild animals": "Whale vocalization",
    "Musical instrument": "Scratching (performance technique)",
    "Plucked string instrument": "Ukulele",
    "Keyboard (musical)": "Harpsichord",
    "Percussion": "Steelpan",
    "Mallet percussion": "Steelpan",
    "Brass instrument": "Trombone",
    "Bowed string instrument": "Double bass",
    "Wind instrument, woodwind instrument": "Clarinet",
    "Water": "Gurgling",
    "Liquid": "Boiling",
    "Vehicle": "Skateboard",
    "Boat, Water vehicle": "Ship",
    "Motor vehicle (road)": "Traffic noise, roadway noise",
    "Emergency vehicle": "Fire engine, fire truck (siren)",
    "Rail transport": "Subway, metro, underground",
    "Aircraft": "Fixed-wing aircraft, airplane",
    "Engine": "Accelerating, revving, vroom",
    "Alarm": "Steam whistle",
    "Mechanisms": "Single-lens reflex camera",
    "Tools": "Drill",
    "Power tool": "Drill",
}
"""AudioSet's classes that name a group of things rather than a sound, each with the last of those in it: in AudioSet's
order, which its models keep, they follow the group's name."""
_NARROWER_SHARE = 0.5


class EventsConfig(StepConfig):
    """Settings of `events`."""

    model: TaggerPath | None = None
    """`auto` (YAMNet's published file, where it is on this machine), a waveform classifier (`.tflite`, `.onnx`) of the
    YAMNet kind (mono at 16 kHz in, a score from 0 to 1 a class out), a transformers audio classifier's folder, or a
    trained model of audiollm, which is asked."""
    labels: Path | None = None
    """Class names of a `.tflite` or `.onnx` file, where neither the file nor one beside it has them."""
    codec: ModelPath | None = None
    """Codec of an audiollm model without an audio encoder, where it is not in the model's run."""
    window_s: float | None = Field(default=None, gt=0, le=60)
    """Window that is tagged at once; None: the model's own (YAMNet 0.975 s)."""
    hop_s: float | None = Field(default=None, gt=0, le=60)
    """Seconds from one window to the next; None: half a window."""
    onset: float = Field(default=0.5, gt=0, le=1)
    """Score of a class from which an event begins."""
    offset: float = Field(default=0.25, gt=0, le=1)
    """Score of a class below which an event ends."""
    top: int = Field(default=5, ge=1)
    """Most tags per segment."""
    gpus: float = Field(default=0.0, ge=0)
    """Share of a GPU that a worker takes, for a transformers folder; 0: the CPU."""

    @model_validator(mode="after")
    def _fits(self) -> EventsConfig:
        is_file = self.model == AUTO or (self.model is not None and self.model.suffix.lower() in FILES)
        if self.labels is not None and not is_file:
            raise ValueError("labels: are for a .tflite or .onnx file; a folder tells its own")
        if is_file and (self.codec is not None or self.gpus):
            raise ValueError(
                "codec and gpus: are for a model's folder; a .tflite or .onnx file takes neither"
            )
        if self.offset > self.onset:
            raise ValueError(
                f"offset: {self.offset} is above onset: {self.onset}; an event would end as it begins"
            )
        return self


class AudioItem(Protocol):
    """An item with sound, a segment of the annotation or any other."""

    @property
    def duration_s(self) -> float: ...

    def samples(self, sample_rate: int) -> NDArray[np.float32]:
        """Mono at `sample_rate`, `[N]`."""


class Event(NamedTuple):
    """A class, heard without a break; `score` is its highest, times are from the segment's start."""

    label: str
    start_s: float
    end_s: float
    score: float


class Events(SegmentStep[EventsConfig]):
    """Sound events with times, and the tags of the segment as a whole."""

    name = "events"
    settings = EventsConfig
    measures_sounds = True

    def missing(self) -> str | None:
        model, labels, codec = self.config.model, self.config.labels, self.config.codec
        if model is None:
            return "events.model: not set: give auto (YAMNet), a .tflite, an .onnx, or a transformers folder"
        if model == AUTO:
            return f"events.model: {absence()}"
        if model.is_file():
            kind = model.suffix.lower()
            if kind not in FILES:
                return f"events.model: {model} is neither a .tflite, nor an .onnx, nor a folder"
            if kind == ".tflite" and importlib.util.find_spec("ai_edge_litert") is None:
                return "events.model: a .tflite file needs ai-edge-litert: pip install 'audiollm[events]'"
        elif not any((folder / "config.json").is_file() for folder in (model, model / "model")):
            return f"events.model: no model at {model}: give a .tflite or .onnx file, or a folder with a config.json"
        for key, path in (("labels", labels), ("codec", codec)):
            if path is not None and not path.exists():
                return f"events.{key}: {path} does not exist"
        return None

    def setup(self) -> None:
        self._tagger = load_tagger(self.config)

    @property
    def window_s(self) -> float:
        """Length of a window in seconds, once the step is set up."""
        return self._tagger.window_s

    @property
    def _window_samples(self) -> int:
        return round(self._tagger.window_s * self._tagger.sample_rate)

    def process(self, item: AudioItem) -> Value:
        """`{events: [{label, start_s, end_s, score}], tags: [{label, score}]}`, events by time, tags by score.

        A tag's score is the mean over the windows, so that tags say what the segment is full of: with the highest
        score, one window's mistake would be a tag. What is short and sure is an event.
        """
        middles_s = self.middles(item)
        return self.value_of(self.hear(item, middles_s), middles_s, item.duration_s)

    def middles(self, item: AudioItem) -> list[float]:
        """The middles of the item's windows, one per hop, in seconds; a shorter item begins with its only window."""
        rate, window = self._tagger.sample_rate, self._window_samples
        hop = max(round((self.config.hop_s or self._tagger.window_s / 2) * rate), 1)
        starts = window_starts(len(item.samples(rate)), window, hop)
        return [(start + window / 2) / rate for start in starts]

    def hear(self, item: AudioItem, middles_s: Sequence[float]) -> WindowScores:
        """The scores of windows, by their middles; silence lies around the item."""
        rate, window = self._tagger.sample_rate, self._window_samples
        samples_N = item.samples(rate)
        starts = [round(middle_s * rate - window / 2) for middle_s in middles_s]
        before, behind = max(0, -min(starts)), max(0, max(starts) + window - len(samples_N))
        padded_N = np.pad(samples_N, (before, behind)) if before or behind else samples_N
        return self._tagger.hear(padded_N[before + start : before + start + window] for start in starts)

    def value_of(self, window_scores: WindowScores, middles_s: Sequence[float], duration_s: float) -> Value:
        """The step's value by the scores of the windows."""
        groups = groups_in(window_scores.labels)
        events = find_events(
            window_scores, middles_s, duration_s, groups, self.config.onset, self.config.offset
        )
        tags = rank_tags(window_scores, groups, self.config.top)
        return {
            "events": [event._asdict() for event in events],
            "tags": [{"label": label, "score": score} for label, score in tags],
        }


def load_tagger(config: EventsConfig) -> Tagger:
    """Load the model that the settings name.

    Raises:
        ConfigError: it cannot be used.
    """
    model = config.model
    assert isinstance(model, Path)  # `missing` reports anything else first
    if model.suffix.lower() == ".tflite" and model.is_file():
        return TfliteTagger(model, config.labels, config.window_s)
    if model.is_file():
        return OnnxTagger(model, config.labels, config.window_s)
    if _is_own(model):
        return AskedTagger(model, config.codec, config.window_s)
    if config.codec is not None:
        raise ConfigError("events.codec: is for a model of audiollm", str(model), "leave it out")
    return TransformersTagger(model, config.window_s, "cuda" if config.gpus else "cpu")


def window_starts(num_samples: int, window: int, hop: int) -> list[int]:
    """Return the windows' first samples: one window per `hop` samples, the last one ending with the sound."""
    last = max(num_samples - window, 0)
    starts = list(range(0, last + 1, hop))
    return starts if starts[-1] == last else [*starts, last]


def groups_in(labels: Sequence[str]) -> dict[int, range]:
    """The groups of `GROUPS` that a model's classes hold, and the classes in each, by place."""
    places = {label: place for place, label in enumerate(labels)}
    last_by_group = {
        places[group]: places[last] for group, last in GROUPS.items() if {group, last} <= places.keys()
    }
    return {group: range(group + 1, last + 1) for group, last in last_by_group.items() if last > group}


def find_events(
    window_scores: WindowScores,
    middles_s: Sequence[float],
    duration_s: float,
    groups: Mapping[int, range],
    onset: float,
    offset: float,
) -> list[Event]:
    """Runs of windows by hysteresis: from the first that scores `onset` to the last before one below `offset`.

    A window speaks for its middle, as far as halfway to the middles of its neighbours; the first and the last also
    for the segment's ends. Silence is no event, nor is a group of things while one in it is heard.

    Args:
        middles_s: of the windows, in the segment.
        groups: see `groups_in`.
    """
    labels, scores_FK = window_scores
    edges_s = window_edges(middles_s, duration_s)
    loud = np.flatnonzero(scores_FK.max(axis=0) >= onset)
    runs = {int(k): runs_above(scores_FK[:, k], onset, offset) for k in loud if labels[k] != SILENCE}
    events = []
    for k, class_runs in runs.items():
        narrower = [run for member in groups.get(k, ()) for run in runs.get(member, ())]
        for first, end in class_runs:
            if not any(first < other_end and other_start < end for other_start, other_end in narrower):
                score = round(float(scores_FK[first:end, k].max()), 4)
                start_s, end_s = round(float(edges_s[first]), 3), round(float(edges_s[end]), 3)
                events.append(Event(labels[k], start_s, end_s, score))
    return sorted(events, key=lambda event: (event.start_s, -event.score, event.label))


def window_edges(middles_s: Sequence[float], duration_s: float) -> list[float]:
    """The seconds between which each window speaks: halfway to the middles of its neighbours, `[F + 1]`."""
    middles_F = np.asarray(middles_s)
    return [0.0, *((middles_F[1:] + middles_F[:-1]) / 2).tolist(), duration_s]


def runs_above(scores_F: NDArray[np.float32], onset: float, offset: float) -> list[tuple[int, int]]:
    """Runs `[first, end)` of windows that begin at `onset` and end below `offset`."""
    runs: list[tuple[int, int]] = []
    first: int | None = None
    for place, score in enumerate([*scores_F.tolist(), -1.0]):
        if first is None and score >= onset:
            first = place
        elif first is not None and score < offset:
            runs.append((first, place))
            first = None
    return runs


def rank_tags(window_scores: WindowScores, groups: Mapping[int, range], top: int) -> list[tuple[str, float]]:
    """The `top` classes by their mean over the windows, those with a mean of 0 left out.

    Silence is no tag, nor is a group of things one of which scores at least half as much: "Animal, Livestock, Fowl"
    would say of a rooster what "Crowing" says alone.
    """
    labels, scores_FK = window_scores
    means_K = scores_FK.mean(axis=0, dtype=np.float64).round(4)
    covered = {
        group
        for group, members in groups.items()
        if means_K[members.start : members.stop].max() >= _NARROWER_SHARE * means_K[group]
    }
    named = [
        (label, float(mean))
        for k, (label, mean) in enumerate(zip(labels, means_K, strict=True))
        if mean > 0 and k not in covered and label != SILENCE
    ]
    return sorted(named, key=lambda tag: (-tag[1], tag[0]))[:top]


def _is_own(folder: Path) -> bool:
    from audiollm.models.hub import read_config
    from audiollm.models.layouts import BOSON, HIGGS, OURS
    from audiollm.models.pretrained import model_folder

    return read_config(model_folder(folder)).get("model_type") in (OURS, HIGGS, BOSON)
