"""Choice of the test segments, and of the samples to keep where there are too many of a kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipelines.compose.rows import Row, SegmentRow


class Balance(BaseModel):
    """A limit on the training samples of a task that share a property."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: str = Field("task", min_length=1)
    """Property that is limited: the `speaker`, `file`, `text` or `answer`, a column of the segments (of a list its
    first element), or the `task` alone."""
    most: int | None = Field(None, ge=1)
    """Most samples per group."""
    share: float | None = Field(None, gt=0, le=1)
    """Largest share of a group in the kept samples; where groups are too few for it, all get the same number."""

    @model_validator(mode="after")
    def _says_how_many(self) -> Balance:
        if self.most is None and self.share is None:
            raise ValueError("give `most`, a number, or `share`")
        if self.by == "task" and self.share is not None:
            raise ValueError("the share of a task is its weight in `tasks`")
        return self

    def group(self, row: Row, answer: str) -> str:
        """Return the group that a row is counted in; rows without the column form one group."""
        group_by_property = {
            "task": "",
            "speaker": row.speaker,
            "file": row.file,
            "text": row.words,
            "answer": answer,
        }
        if self.by in group_by_property:
            return group_by_property[self.by]
        value: Any = row.columns.get(self.by)
        if isinstance(value, (list, tuple)):
            value = value[0] if value else ""
        return str(value or "")


def draw_kept_ids(groups: Mapping[str, str], balance: Balance, seed: int) -> set[str]:
    """Draw, by a hash, the ids that are kept: of each group as many as the limits allow.

    Args:
        groups: id -> group.
    """
    sizes = Counter(groups.values())
    limit = max(sizes.values(), default=0)
    if balance.most is not None:
        limit = min(limit, balance.most)
    if balance.share is not None:
        limit = min(limit, _limit_of_share(list(sizes.values()), balance.share))
    members: dict[str, list[str]] = defaultdict(list)
    for id in sorted(groups, key=lambda id: (place(f"{seed}:balance:{id}"), id)):
        members[groups[id]].append(id)
    return {id for group_ids in members.values() for id in group_ids[:limit]}


def connected(segments: Sequence[SegmentRow]) -> list[str]:
    """For each segment the name of its group: those that share a speaker or a file, by any number of steps.

    The speaker of a sound without speech says nothing. A group is named after the first of its files, in order.
    """
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(node: tuple[str, str]) -> tuple[str, str]:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for segment in segments:
        nodes = [("file", segment.source)]
        if segment.kind != "sound":
            nodes.append(("speaker", segment.speaker))
        low, high = sorted((root(nodes[0]), root(nodes[-1])))
        parent[high] = low  # "file" sorts before "speaker", so a root is a file
    return [root(("file", segment.source))[1] for segment in segments]


def choose_test(
    groups: Iterable[str], share: float, seed: int, seconds: Mapping[str, float] | None = None
) -> set[str]:
    """The groups whose place (a hash of seed and name, in [0, 1)) is below `share`; never none nor all.

    Args:
        seconds: of each group; one that holds more than half of all is trained on.

    Returns:
        Their names; empty where there are fewer than two groups.
    """
    half = sum((seconds or {}).values()) / 2
    placed = {
        name: place(f"{seed}:{name}") + (seconds is not None and seconds[name] > half) for name in groups
    }
    ordered = sorted(placed, key=lambda name: (placed[name], name))
    count = sum(value < share for value in placed.values())
    return set(ordered[: min(max(count, 1), len(ordered) - 1)])


def place(text: str) -> float:
    """Hash a text to a number in [0, 1)."""
    return int(sha256(text.encode()).hexdigest()[:16], 16) / 16**16


def _limit_of_share(sizes: Sequence[int], share: float) -> int:
    """The largest number that is at most `share` of what is left when every group is cut to it; 1 at the least."""
    share = max(share, 1 / len(sizes)) if sizes else 1.0
    low, high = 1, max(sizes, default=1)
    while low < high:
        middle = (low + high + 1) // 2
        # the share that the largest group has falls as the limit falls, so it can be searched by halves
        fits = middle <= share * sum(min(size, middle) for size in sizes) + 1e-9
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
