"""Recordings that several answers share go through the audio encoder once.

transformers' models take the recordings of every row of a batch. Within `encoded_once` the audio tower gets those of
one row per prompt, and what it makes of them is repeated behind it, with its gradient summed.

Shapes: G rows of the batch that have recordings, R rows of features (recordings or windows), F frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SharedRecordings:
    """Which of the G rows with recordings have the same ones."""

    source_G: tuple[int, ...]
    """The first row, counted among the G, that has the same recordings."""
    num_features_G: tuple[int, ...]
    """Rows of features of each."""

    @property
    def firsts(self) -> list[int]:
        """The rows whose recordings are encoded."""
        return sorted(set(self.source_G))


def is_of_pictures(key: str) -> bool:
    """Whether a processor's key holds pictures or what describes them (`pixel_values_videos`, `video_grid_thw`)."""
    return any(word in key for word in ("pixel", "video", "image", "grid"))


def shared_recordings(features: Sequence[Mapping[str, Tensor]]) -> SharedRecordings:
    """Find the rows that share one mapping of features; rows without recordings are left out."""
    counts = [[len(value) for key, value in row.items() if not is_of_pictures(key)] for row in features]
    recordings = [
        (id(row), row_counts[0]) for row, row_counts in zip(features, counts, strict=True) if row_counts
    ]
    places = {row: place for place, (row, _) in reversed(list(enumerate(recordings)))}
    return SharedRecordings(
        tuple(places[row] for row, _ in recordings), tuple(count for _, count in recordings)
    )


@contextmanager
def encoded_once(model: Any, shared: SharedRecordings, input_ids_AL: Tensor) -> Iterator[None]:
    """Let the model's audio tower see shared recordings once, within.

    Nothing changes where none are shared, or where the model has no `audio_tower` of the two known kinds: one that
    takes features `[R, mels, F]` (Qwen2-Audio, Audio Flamingo 3, Voxtral), or frames end to end with their lengths
    (Qwen-Omni).
    """
    tower = next((module for name, module in model.named_modules() if name.endswith("audio_tower")), None)
    tokens_A = (input_ids_AL == getattr(model.config, "audio_token_id", -1)).sum(1)
    tokens_G = [int(count) for count in tokens_A if count > 0]
    if tower is None or len(shared.firsts) == len(shared.source_G) or len(tokens_G) != len(shared.source_G):
        yield
        return
    handles = _hook(tower, shared, tokens_G)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(tower: nn.Module, shared: SharedRecordings, tokens_G: Sequence[int]) -> list[Any]:
    rows_U = _index_segments(shared.num_features_G, shared.firsts)
    total = sum(shared.num_features_G)
    flat = False

    def select(
        _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal flat
        lengths_R = kwargs.get("feature_lens")
        flat = lengths_R is not None
        if lengths_R is None:
            return tuple(map(pick, args)), {key: pick(value) for key, value in kwargs.items()}
        frames_G = [int(row_lengths.sum()) for row_lengths in lengths_R.split(list(shared.num_features_G))]
        frames = _index_segments(frames_G, shared.firsts)
        picked = {key: pick(value) for key, value in kwargs.items() if key != "input_features"}
        if args:
            return (args[0][:, frames], *args[1:]), picked
        return args, {**picked, "input_features": kwargs["input_features"][:, frames]}

    def pick(value: Any) -> Any:
        return value[rows_U] if isinstance(value, Tensor) and value.shape[:1] == (total,) else value

    def repeat(_tower: nn.Module, _args: Any, outputs: Any) -> Any:
        lengths_G = tokens_G if flat else shared.num_features_G
        encoded = sum(lengths_G[first] for first in shared.firsts)
        copies = _copies(lengths_G, shared)
        for key, value in outputs.items():
            if isinstance(value, Tensor) and len(value) == encoded:
                outputs[key] = value[copies]
        return outputs

    return [
        tower.register_forward_pre_hook(select, with_kwargs=True),
        tower.register_forward_hook(repeat),
    ]


def _index_segments(lengths_G: Sequence[int], segments: Sequence[int]) -> Tensor:
    """Return the places of the chosen segments, where segments of these lengths lie end to end."""
    parts = torch.arange(sum(lengths_G)).split(list(lengths_G))
    return torch.cat([parts[g] for g in segments])


def _copies(lengths_G: Sequence[int], shared: SharedRecordings) -> Tensor:
    """Return, for each row's segment, its places among the segments that were encoded."""
    firsts = shared.firsts
    parts = torch.arange(sum(lengths_G[g] for g in firsts)).split([lengths_G[g] for g in firsts])
    indices_of = dict(zip(firsts, parts, strict=True))
    return torch.cat([indices_of[source] for source in shared.source_G])
