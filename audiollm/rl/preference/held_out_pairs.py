"""The held-out groups that the policy orders worst, for a person to read: `pairs.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from audiollm.data.records.sample import ContentPart, TextPart, VideoPart
from audiollm.data.records.source import LoadedSample
from audiollm.files.atomic import write_jsonl
from audiollm.recipe.ranks import Ranks
from audiollm.rl.preference.batches import ItemOrigin, MicroBatch, StepMaker

PAIRS_KEPT = 64
"""Most groups in `pairs.jsonl`."""


@dataclass(frozen=True)
class OrderedItem:
    """A group of held-out answers and the implicit rewards that the policy gives them."""

    origin: ItemOrigin
    rewards: tuple[float | None, ...]
    """Of each answer of the origin; None: not computed (the middle of a list)."""

    @property
    def margin(self) -> float:
        """Reward of the better answer less that of the worse; a single answer's own, negated if undesirable."""
        first, last = self.rewards[0], self.rewards[-1]
        assert first is not None and last is not None
        if self.origin.desirable is not None:
            return first if self.origin.desirable else -first
        return first - last

    @property
    def badness(self) -> tuple[float, Any]:
        """Sorts the worst first; what is no number is the worst."""
        margin = self.margin
        return (-math.inf if math.isnan(margin) else margin, (self.origin.record, self.origin.answers))


class WorstItems:
    """Gathers the items of an evaluation; keeps the worst."""

    def __init__(self) -> None:
        self._items: list[OrderedItem] = []

    def add(self, micro: MicroBatch[Any], metrics: Mapping[str, Tensor]) -> None:
        """Take a micro-batch with the figures of its items, `[I]` each: implicit rewards, or a reward model's scores.

        Figures without either add nothing.
        """
        chosen, rejected = (
            _values(metrics, f"reward_{role}") or _values(metrics, f"score_{role}")
            for role in ("chosen", "rejected")
        )
        single = _values(metrics, "reward")
        for number, origin in enumerate(micro.origins):
            if chosen and rejected:
                between = [None] * (len(origin.answers) - 2)
                self._items.append(OrderedItem(origin, (chosen[number], *between, rejected[number])))
            elif single and origin.desirable is not None:
                self._items.append(OrderedItem(origin, (single[number],)))

    def write(self, path: Path, steps: StepMaker[Any, Any, Any], step: int, ranks: Ranks) -> None:
        """Write the worst items of all ranks, in place of those of the evaluation before. Called on every rank."""
        worst = sorted(self._items, key=lambda item: item.badness)[:PAIRS_KEPT]
        every = [item for items in ranks.gather(worst) for item in items]
        if ranks.first and every:
            worst = sorted(every, key=lambda item: item.badness)[:PAIRS_KEPT]
            write_jsonl(
                path, [_ordered_item_row(item, steps.read(item.origin.record)[0], step) for item in worst]
            )


def described_messages(loaded: LoadedSample) -> list[dict[str, Any]]:
    """Return the messages of a record as plain data, with the addresses of their recordings."""
    numbers = iter(range(loaded.num_asked))
    return [
        {"role": message.role, "content": _describe_content(message.content, loaded, numbers)}
        for message in loaded.sample.messages
    ]


def _ordered_item_row(item: OrderedItem, loaded: LoadedSample, step: int) -> dict[str, Any]:
    origin = item.origin
    answers = [
        {
            "role": role,
            "content": _describe_content(
                loaded.sample.answers[number].content, loaded, iter(_parts_of(loaded, number))
            ),
            "reward": _finite(reward),
            "tokens": tokens,
        }
        for number, role, reward, tokens in zip(
            origin.answers, _roles(origin), item.rewards, origin.num_tokens, strict=True
        )
    ]
    return {
        "step": step,
        "id": loaded.sample.id,
        "messages": described_messages(loaded),
        "answers": answers,
        "margin": _finite(item.margin),
        "right": item.margin > 0,
    }


def _roles(origin: ItemOrigin) -> list[str]:
    if origin.desirable is not None:
        return ["desirable" if origin.desirable else "undesirable"]
    return ["chosen", *["between"] * (len(origin.answers) - 2), "rejected"]


def _parts_of(loaded: LoadedSample, number: int) -> range:
    """The numbers, among all audio parts of the record, of those of an answer."""
    sizes = [len(answer.audio_parts()) for answer in loaded.sample.answers]
    first = loaded.num_asked + sum(sizes[:number])
    return range(first, first + sizes[number])


def _describe_content(
    content: Sequence[ContentPart], loaded: LoadedSample, numbers: Iterator[int]
) -> list[dict[str, Any]]:
    """Parts as plain data: of a recording its number in the record, and its file, or its name in a shard."""
    described: list[dict[str, Any]] = []
    for content_part in content:
        if isinstance(content_part, TextPart):
            described.append({"type": "text", "text": content_part.text})
            continue
        if isinstance(content_part, VideoPart):
            end = "its end" if content_part.end_s is None else f"{content_part.end_s:g} s"
            description = (
                f"[pictures of {Path(content_part.path).name} from {content_part.start_s:g} s to {end}]"
            )
            described.append({"type": "text", "text": description})
            continue
        number = next(numbers)
        content_of = loaded.audio[number].content if loaded.audio else None
        path = content_of if isinstance(content_of, str) else content_part.path
        span = {"start_s": content_part.start_s, "end_s": content_part.end_s}
        described.append({"type": "audio", "path": path, **span, "part": number})
    return described


def _values(metrics: Mapping[str, Tensor], name: str) -> list[float]:
    """The figure of the first objective that has it: in a mix, those of the others have its name before them."""
    values = [value for key, value in metrics.items() if key == name or key.endswith(f"/{name}")]
    return [float(value) for value in values[0].detach().cpu()] if values else []


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
