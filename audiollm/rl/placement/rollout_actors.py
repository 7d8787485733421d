"""Rollouts by Ray actors, each with a whole model of its own; the weights reach them in buckets after every update."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from audiollm.cluster import cause_of_death
from audiollm.devices import default_device
from audiollm.errors import StageError
from audiollm.families.policies import load_policy, plain_model
from audiollm.families.rollout import Rollout, RolloutEngine, RolloutSettings
from audiollm.rl.placement.pool import Joined
from audiollm.rl.rollouts.engines import load_engine
from audiollm.rl.rollouts.settings import EngineChoice
from audiollm.train.loop.modules import announce_weights
from audiollm.train.loop.whole import whole_tensors


@dataclass(frozen=True)
class SampledModel:
    """The model that actors load, and the engine that samples from it."""

    folder: Path
    max_tokens: int
    rollouts: EngineChoice | None
    """A user's engine; None: ours, or transformers'."""
    directory: str
    """Working directory, in which relative paths and modules are looked for."""


class RolloutHost:
    """The work of a rollout actor."""

    def __init__(self, model: SampledModel) -> None:
        self._model = model
        self._bytes = 0

    def set_up(self, place: int) -> None:
        """Load the model, whose weights are then overwritten by those that come in buckets."""
        os.chdir(self._model.directory)
        policy = load_policy(self._model.folder, max_tokens=self._model.max_tokens)
        policy.root.requires_grad_(False).eval().to(default_device())
        self._root: nn.Module = policy.root
        self._targets: dict[str, Tensor] = plain_model(policy.root).state_dict(keep_vars=True)
        self._engine = load_engine(policy, self._model.folder, self._model.rollouts)

    def receive(self, bucket: Bucket) -> None:
        """Write a bucket of weights."""
        write_bucket(bucket, self._targets)
        self._bytes += len(bucket.data_B)

    def received(self, hashes: bool) -> dict[str, str]:
        """Take notice that the weights are complete.

        Returns:
            SHA-256 of all tensors by name, where `hashes` asks for them.
        """
        expected, self._bytes, came = (
            sum(len(bytes_of(tensor)) for tensor in self._targets.values()),
            0,
            self._bytes,
        )
        if came != expected:
            raise ValueError(f"{came} bytes of weights came, and the model has {expected}")
        announce_weights([self._root])
        self._engine.weights_changed()
        return tensor_hashes(self._targets.items()) if hashes else {}

    def sample(
        self, prompts: Sequence[Any], numbers: Sequence[Sequence[int]], settings: RolloutSettings
    ) -> list[list[Rollout]]:
        """See `RolloutEngine.sample`."""
        return self._engine.sample(prompts, numbers, settings)


class RolloutActors:
    """A `RolloutEngine` of the actors of a rank: every n-th prompt, with its whole group, goes to the same one.

    An actor that dies is replaced, gets the weights, and samples its part again: rollouts depend on seed, step, prompt
    and number alone, so they are the same.

    Args:
        source: the model with the weights to sample from, whole on this rank, with or without LoRA adapters; read at
            each call of `weights_changed`, and when an actor is replaced.
    """

    def __init__(self, joined: Joined, model: SampledModel, source: nn.Module) -> None:
        share = joined.choice.rollout
        assert share is not None
        self._source, self._verify = source, share.verify
        self._limit = max(1, int(share.bucket_mb * 1e6))
        self._pool = joined.pool("rollout", RolloutHost, model)
        self._pool.prepare = lambda place: self._send([place])

    def sample(
        self, prompts: Sequence[Any], numbers: Sequence[Sequence[int]], settings: RolloutSettings
    ) -> list[list[Rollout]]:
        """See `RolloutEngine.sample`."""
        parts = [range(first, len(prompts), self._pool.count) for first in range(self._pool.count)]
        calls = [
            self._pool.ask(
                place,
                "sample",
                [prompts[index] for index in indices],
                [list(numbers[index]) for index in indices],
                settings,
            )
            for place, indices in enumerate(parts)
            if indices
        ]
        groups: list[list[Rollout]] = [[] for _ in prompts]
        for indices, call in zip(filter(len, parts), calls, strict=True):
            for index, group in zip(indices, self._pool.answer(call), strict=True):
                groups[index] = group
        return groups

    def weights_changed(self) -> None:
        """Send the weights to all actors."""
        for place, cause in self._send(range(self._pool.count)).items():
            self._pool.replace(place, cause)

    def _send(self, places: Iterable[int]) -> dict[int, str]:
        """Send the weights to actors; return those that died, with the cause. At most two buckets are in memory."""
        actors = {place: self._pool.actor(place) for place in places}
        dead: dict[int, str] = {}

        def settle(waiting: dict[int, Any]) -> dict[int, Any]:
            results = {}
            for place, reference in waiting.items():
                try:
                    results[place] = self._pool.result_of(reference)
                except self._pool.died as error:
                    dead[place] = cause_of_death(error)
                    del actors[place]
            return results

        waiting: dict[int, Any] = {}
        for bucket in buckets(whole_tensors(self._source), self._limit):
            stored = self._pool.ray.put(bucket)
            settle(waiting)
            waiting = {place: actor.receive.remote(stored) for place, actor in actors.items()}
        settle(waiting)
        hashes = settle({place: actor.received.remote(self._verify) for place, actor in actors.items()})
        if self._verify:
            self._compare(hashes)
        return dead

    def _compare(self, hashes: dict[int, dict[str, str]]) -> None:
        expected = tensor_hashes(whole_tensors(self._source))
        for place, received in hashes.items():
            different = sorted(
                name for name in expected.keys() | received.keys() if expected.get(name) != received.get(name)
            )
            if different:
                raise StageError(f"rollout actor {place} has other weights than the policy: {different[:3]}")


_: type[RolloutEngine[Any]] = RolloutActors


class TensorBytes(NamedTuple):
    """Consecutive bytes of a tensor."""

    name: str
    first: int
    """Number of its first byte in the tensor."""
    length: int


class Bucket(NamedTuple):
    """Pieces of tensors, end to end."""

    pieces: list[TensorBytes]
    data_B: Any
    """uint8 `[B]`, a numpy array, which Ray shares between processes without a copy."""


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Yield all bytes of tensors in buckets of at most `limit` bytes; larger tensors are cut.

    Each bucket has memory of its own. One tensor is read at a time, and copied to the CPU piece by piece.
    """
    data_B, pieces, filled = np.empty(limit, np.uint8), list[TensorBytes](), 0
    for name, tensor in tensors:
        flat_B = bytes_of(tensor)
        first = 0
        while first < len(flat_B):
            length = min(len(flat_B) - first, limit - filled)
            data_B[filled : filled + length] = flat_B[first : first + length].cpu().numpy()
            pieces.append(TensorBytes(name, first, length))
            first, filled = first + length, filled + length
            if filled == limit:
                yield Bucket(pieces, data_B)
                data_B, pieces, filled = np.empty(limit, np.uint8), [], 0
    if filled:
        yield Bucket(pieces, data_B[:filled])


@torch.no_grad()
def write_bucket(bucket: Bucket, targets: Mapping[str, Tensor]) -> None:
    """Write the pieces of a bucket into tensors of the same names, types and sizes, in place.

    Raises:
        ValueError: there is no such tensor, or it has fewer bytes.
    """
    begin = 0
    for piece in bucket.pieces:
        target = targets.get(piece.name)
        if target is None:
            raise ValueError(f"no tensor {piece.name!r} to write to")
        target_B = bytes_of(target)
        end = piece.first + piece.length
        if end > len(target_B):
            raise ValueError(f"{piece.name}: {end} bytes come, and the tensor has {len(target_B)}")
        data_B = np.array(bucket.data_B[begin : begin + piece.length])  # writable, as torch wants it
        target_B[piece.first : end].copy_(torch.from_numpy(data_B))
        begin += piece.length


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 `[B]`, without a copy.

    Raises:
        RuntimeError: the tensor is not contiguous.
    """
    return tensor.detach().view(-1).view(torch.uint8)


def tensor_hashes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return SHA-256 of the bytes of each tensor, by name."""
    return {name: hashlib.sha256(bytes_of(tensor).cpu().numpy().data).hexdigest() for name, tensor in tensors}
