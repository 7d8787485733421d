"""Plans of all clips of a split, drawn from (seed, split, number) alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from audiollm.errors import ConfigError
from pipelines.soundscapes.questions import KINDS, Draw, PlannedQuestion, plan_question
from pipelines.soundscapes.settings import ComposeSoundscapesConfig, Kind
from pipelines.soundscapes.takes import Inventory, Take


@dataclass(frozen=True)
class PlannedClip:
    """A clip before its sound is mixed."""

    id: str
    is_held_out: bool
    question: PlannedQuestion
    background: Take | None
    gaps_s: Sequence[float]
    """Silences between successive events."""
    seed: int
    """Of the part of the background that is used."""

    @property
    def takes(self) -> list[Take]:
        """Takes of the events and the background."""
        takes = [event.take for event in self.question.events]
        return takes if self.background is None else [*takes, self.background]


def servable_kinds(config: ComposeSoundscapesConfig, inventories: Sequence[Inventory]) -> list[Kind]:
    """Kinds of questions that all splits can serve: those that the settings name, or all.

    Raises:
        ConfigError: a kind that the settings name lacks something, or no kind is left.
    """
    lacks = {
        kind: next(filter(None, (row.lack(inventory, config) for inventory in inventories)), "")
        for kind, row in KINDS.items()
    }
    for kind in config.kinds or ():
        if lacks[kind]:
            remedy = "give more inputs, hold out more of them, or leave this kind out"
            raise ConfigError(f"kinds: {kind}: {lacks[kind]}", "", remedy)
    kinds = [kind for kind in config.kinds or KINDS if not lacks[kind]]
    if not kinds:
        reasons = "; ".join(f"{kind}: {lack}" for kind, lack in lacks.items())
        raise ConfigError(f"no kind of question can be asked: {reasons}", "", "give more inputs")
    return kinds


def plan_clips(
    config: ComposeSoundscapesConfig, inventory: Inventory, kinds: Sequence[Kind], is_held_out: bool
) -> list[PlannedClip]:
    """Plan the clips of a split: equally many of each kind, in a drawn order."""
    count = config.test_clips if is_held_out else config.clips
    split = "test" if is_held_out else "train"
    turns = [(kinds[number % len(kinds)], number // len(kinds)) for number in range(count)]
    random.Random(f"{config.seed}/{split}").shuffle(turns)
    return [_plan_clip(config, inventory, f"{split}-{place:06d}", turn) for place, turn in enumerate(turns)]


# Private


def _plan_clip(
    config: ComposeSoundscapesConfig, inventory: Inventory, id: str, turn: tuple[Kind, int]
) -> PlannedClip:
    kind, number = turn
    rng = random.Random(f"{config.seed}/{id}")
    question = plan_question(kind, Draw(inventory, config, number, rng))
    background = rng.choice(inventory.backgrounds) if inventory.backgrounds else None
    gaps_s = [rng.uniform(*config.gap_s) for _ in question.events[1:]]
    return PlannedClip(id, id.startswith("test"), question, background, gaps_s, rng.getrandbits(32))
