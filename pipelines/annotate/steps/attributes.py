"""The step `attributes`: what a voice tells of the speaker (age, gender) and of the mood, by models given by path.

Shapes: B segments, K classes, N samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from audiollm.errors import ConfigError
from audiollm.evaluate.judges.taggers import AudioClassifier, probabilities
from audiollm.recipe.stages import ModelPath
from pipelines.annotate.step import Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value

NAMES = ("age", "gender", "emotion")
_SHORTEST_S = 0.1


class AttributesConfig(StepConfig):
    """Settings of `attributes`: folders of transformers audio classifiers with safetensors weights."""

    age: ModelPath | None = None
    """Classes of age, or a model with one output: a number."""
    gender: ModelPath | None = None
    emotion: ModelPath | None = None
    age_scale: float = Field(default=1.0, gt=0)
    """Years that are 1 in the output of a model of age with one output: 100 where it gives 0 to 1."""
    max_duration_s: float = Field(default=30.0, gt=0)
    """Longest sound given to the models; of a longer segment, the middle."""
    batch_size: int = Field(default=1, ge=1)
    """Segments at a time. More are faster on a GPU; a batch's values may differ by rounding from those of one alone."""
    gpus: float = Field(default=0.0, ge=0)
    """Share of a GPU that a worker takes; 0: the CPU."""


class Attributes(SegmentStep[AttributesConfig]):
    """Age, gender and emotion, each `{label, score}` by its model: the likeliest class and its probability.

    Of an age in numbers the label is the whole number of years, and there is no score.
    """

    name = "attributes"
    settings = AttributesConfig

    def __init__(self, config: AttributesConfig) -> None:
        super().__init__(config)
        folders = {name: getattr(config, name) for name in NAMES}
        self._folders: dict[str, Path] = {name: path for name, path in folders.items() if path is not None}
        self.batch_size = config.batch_size

    def missing(self) -> str | None:
        if not self._folders:
            return "attributes: no model: set attributes.age, .gender or .emotion to a folder of an audio classifier"
        for name, folder in self._folders.items():
            if not (folder / "config.json").is_file():
                return (
                    f"attributes.{name}: no model at {folder}: give a transformers folder with a config.json"
                )
        return None

    def setup(self) -> None:
        """
        Raises:
            ConfigError: a folder that holds no audio classifier, or one with a single output that is not for age.
        """
        device = "cuda" if self.config.gpus else "cpu"
        self._models = {name: AudioClassifier.load(folder, device) for name, folder in self._folders.items()}
        for name, model in self._models.items():
            if name != "age" and len(model.labels) < 2:
                problem = f"attributes.{name}: the model has one class"
                raise ConfigError(problem, str(self._folders[name]), "give a classifier of two or more")
        age = self._models.get("age")
        if self.config.age_scale != 1.0 and (age is None or len(age.labels) > 1):
            problem = "attributes.age_scale: is for a model of age with one output"
            raise ConfigError(problem, str(self._folders.get("age", "")), "leave it out")

    def process(self, item: Segment) -> Value:
        """`{age, gender, emotion}`, those that have a model; None of a segment under 0.1 s."""
        return self.process_batch([item])[0]

    def process_batch(self, items: Sequence[Segment]) -> list[Value]:
        """Process several segments at once."""
        values: list[Value] = [dict.fromkeys(self._models) for _ in items]
        long_enough = [place for place, item in enumerate(items) if item.duration_s >= _SHORTEST_S]
        for name, model in self._models.items():
            clips = [self._cut_middle(items[place], model) for place in long_enough]
            for place, logits_K in zip(long_enough, _logits(model, clips), strict=True):
                values[place][name] = self._make_attribute_value(model, logits_K)
        return values

    def _cut_middle(self, item: Segment, model: AudioClassifier) -> NDArray[np.float32]:
        """The middle of the segment, as long as the model and the settings allow, `[N]`."""
        samples_N = item.samples(model.sample_rate)
        longest_s = min(self.config.max_duration_s, model.window_s or math.inf)
        spare = max(len(samples_N) - round(longest_s * model.sample_rate), 0)
        return samples_N[spare // 2 : len(samples_N) - (spare - spare // 2)]

    def _make_attribute_value(self, model: AudioClassifier, logits_K: NDArray[np.float64]) -> Value | None:
        if not np.isfinite(logits_K).all():
            return None
        if len(logits_K) == 1:
            return {"label": str(round(max(float(logits_K[0]) * self.config.age_scale, 0.0))), "score": None}
        shares_K = probabilities(logits_K[None], exclusive=True)[0]
        best = int(shares_K.argmax())
        return {"label": model.labels[best], "score": round(float(shares_K[best]), 3)}


def _logits(model: AudioClassifier, clips: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float64]]:
    """`[K]` of each clip: together where the model can tell a clip from what fills it up to the longest, else alone."""
    if len(clips) > 1 and model.tells_padding:
        return list(model.logits(clips))
    return [model.logits([clip_N])[0] for clip_N in clips]
