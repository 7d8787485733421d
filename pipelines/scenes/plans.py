"""Plans of scenes: which sounds, when and where, drawn from (seed, split, number) alone; and their texts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.scenes.settings import ComposeScenesConfig
from pipelines.scenes.sounds import LabelledSound

_FIRST_S, _LAST_S = 0.3, 0.6
"""Time before the first sound at least, and after the beginning of the last."""
_PLACES = {1: ("in the middle",), 2: ("on the left", "on the right")}
_PLACES[3] = ("on the left", "in the middle", "on the right")
_PLACES[4] = ("far left", "left of the middle", "right of the middle", "far right")
_ORDER = ("First", "Then", "Then", "Finally")


@dataclass(frozen=True)
class PlannedEvent:
    """An object that strikes once, and its sound."""

    sound: LabelledSound
    onset_s: float
    lane: int
    """Place from the left, counted from 0."""
    gain_db: float


@dataclass(frozen=True)
class ScenePlan:
    """All that is drawn for a scene."""

    number: int
    held_out: bool
    events: tuple[PlannedEvent, ...]
    """In order of time."""
    backdrop: LabelledSound | None
    seed: tuple[int, ...]
    """Seed of the draws while the scene is made."""

    @property
    def id(self) -> str:
        return f"{'test' if self.held_out else 'train'}-{self.number:06d}"

    def place(self, event: PlannedEvent) -> str:
        """Say where an object is."""
        return _PLACES[len(self.events)][event.lane]


def plan_scene(
    config: ComposeScenesConfig,
    events: Mapping[str, Sequence[LabelledSound]],
    backdrops: Mapping[str, Sequence[LabelledSound]],
    number: int,
    held_out: bool,
) -> ScenePlan:
    """Draw a scene.

    Args:
        events, backdrops: recordings of the split by label.
    """
    seed = (config.seed, int(held_out), number)
    draw = np.random.default_rng(seed)
    max_count = min(config.max_events, len(events), _most_that_fit(config))
    count = int(draw.integers(1, max_count + 1))
    labels = [list(events)[n] for n in draw.permutation(len(events))[:count]]
    spare = config.duration_s - _FIRST_S - _LAST_S - (count - 1) * config.apart_s
    onsets = _FIRST_S + np.sort(draw.uniform(0, max(0.0, spare), count)) + np.arange(count) * config.apart_s
    lanes = draw.permutation(count)
    planned = [
        PlannedEvent(
            events[label][int(draw.integers(len(events[label])))],
            round(float(onset), 3),
            int(lane),
            float(draw.uniform(-3, 3)),
        )
        for label, onset, lane in zip(labels, onsets, lanes, strict=True)
    ]
    names = [None, *backdrops]
    backdrop_label = names[int(draw.integers(len(names)))]
    backdrop = (
        None
        if backdrop_label is None
        else backdrops[backdrop_label][int(draw.integers(len(backdrops[backdrop_label])))]
    )
    return ScenePlan(number, held_out, tuple(planned), backdrop, (*seed, 1))


def caption_of(plan: ScenePlan) -> str:
    """Name the sounds in an order that says nothing of time: "rain, dog bark and seven"."""
    names = [event.sound.name for event in plan.events]
    names += [plan.backdrop.name] if plan.backdrop is not None else []
    names = [names[n] for n in np.random.default_rng((*plan.seed, 2)).permutation(len(names))]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def thought_of(plan: ScenePlan) -> str:
    """Say which sounds there are, when, in what order and where, and that there are no others."""
    words = [
        f"{order}, at {event.onset_s:.1f} seconds, {event.sound.name} {plan.place(event)}."
        for order, event in zip(_ORDER, plan.events, strict=False)
    ]
    behind = "Nothing" if plan.backdrop is None else plan.backdrop.name
    return " ".join([*words, f"In the background: {behind.lower()}.", "No other sounds."])


# Private


def _most_that_fit(config: ComposeScenesConfig) -> int:
    room_s = config.duration_s - _FIRST_S - _LAST_S
    counts = itertools.takewhile(lambda n: (n - 1) * config.apart_s <= room_s, itertools.count(1))
    return max(itertools.islice(counts, 4), default=1)
