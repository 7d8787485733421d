"""Engines of a user's own, for tests of `rollouts`."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from audiollm.families.policy import Policy
from audiollm.families.rollout import Rollout, RolloutSettings

OWN_ENGINES = "tests.audiollm.rl.online.own_engines:"
NOT_CALLABLE = 3


class TwoParts:
    """Samples in two parts, every second prompt together, as two actors would."""

    announced = 0

    def __init__(self, policy: Policy[Any, Any, Any], folder: Path) -> None:
        assert (folder / "config.json").exists()
        self._engine = policy.rollout_engine()

    def sample(
        self, prompts: Sequence[Any], numbers: Sequence[Sequence[int]], settings: RolloutSettings
    ) -> list[list[Rollout]]:
        found: list[list[Rollout]] = [[] for _ in prompts]
        for part in (0, 1):
            groups = self._engine.sample(prompts[part::2], numbers[part::2], settings)
            for place, group in zip(range(part, len(prompts), 2), groups, strict=True):
                found[place] = group
        return found

    def weights_changed(self) -> None:
        TwoParts.announced += 1
        self._engine.weights_changed()


class Forgetful(TwoParts):
    """Gives no log-probabilities."""

    def sample(self, *given: Any) -> list[list[Rollout]]:
        return [
            [replace(each, tokens=replace(each.tokens, logprob_A=None)) for each in group]
            for group in super().sample(*given)
        ]


class Backwards(TwoParts):
    """Gives the answers of a group in another order."""

    def sample(self, *given: Any) -> list[list[Rollout]]:
        return [group[::-1] for group in super().sample(*given)]


def no_engine(policy: Policy[Any, Any, Any], folder: Path) -> dict[str, int]:
    return {}


def broken(policy: Policy[Any, Any, Any], folder: Path) -> TwoParts:
    raise RuntimeError("no such card")


class DiesOnce:
    """Is killed in the midst of a step, once: after it has sampled, before it answers."""

    STEP = 7

    def __init__(self, policy: Policy[Any, Any, Any], folder: Path) -> None:
        self._engine = policy.rollout_engine()

    def sample(
        self, prompts: Sequence[Any], numbers: Sequence[Sequence[int]], settings: RolloutSettings
    ) -> list[list[Rollout]]:
        found = self._engine.sample(prompts, numbers, settings)
        mark = Path("died")
        if settings.step == self.STEP and settings.temperature > 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def weights_changed(self) -> None:
        self._engine.weights_changed()
