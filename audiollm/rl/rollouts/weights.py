"""The weights that an engine samples from, brought up to those that are trained before every step."""

from __future__ import annotations

from typing import Any

from audiollm.families.rollout import RolloutEngine
from audiollm.train.loop.whole import Read, WholeCopy


class SampledWeights:
    """The weights of a training's engine.

    Args:
        engine: is told whenever the weights are others.
        whole: the copy of the weights that the engine reads, where a strategy spreads them over ranks; None: the
            engine reads those that are trained.
    """

    def __init__(self, engine: RolloutEngine[Any], whole_copy: WholeCopy | None) -> None:
        self._engine, self._whole_copy = engine, whole_copy

    def read_by(self, read: Read) -> None:
        """Take the strategy's way to read whole tensors."""
        if self._whole_copy is not None:
            self._whole_copy.read_by(read)

    def fill(self) -> None:
        """Bring the engine's weights up to those of now; all ranks must call it."""
        if self._whole_copy is not None:
            self._whole_copy.fill()
        self._engine.weights_changed()
