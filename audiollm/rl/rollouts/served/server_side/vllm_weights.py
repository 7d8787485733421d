"""Weights by published names, in buckets in shared memory, for the workers of vLLM. Imports no audiollm."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

BucketEntry = tuple[str, Sequence[int], str, int]
"""A tensor in a bucket: name, shape, name of its dtype, and its first byte."""


class WeightReceiver:
    """Methods that vLLM adds to its workers (`worker_extension_cls`), called in this order: begin, buckets, end."""

    vllm_config: Any
    device: torch.device
    get_model: Any

    def begin_published_weights(self) -> None:
        """Prepare the model for weights as they are in its folder."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.get_model())

    @torch.no_grad()
    def load_published_bucket(self, path: str, entries: Sequence[BucketEntry]) -> None:
        """Load the tensors of a bucket."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.get_model().load_weights(read_bucket(path, entries, self.device))

    @torch.no_grad()
    def end_published_weights(self) -> None:
        """Bring the weights that came into the layout of vLLM's kernels."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.get_model(), self.vllm_config.model_config)


def read_bucket(
    path: str, entries: Sequence[BucketEntry], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket by name, copied to a device: the sender writes into its memory again."""
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, shape, dtype, first in entries:
        flat = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=prod(shape), offset=first)
        yield name, flat.reshape(tuple(shape)).to(device, copy=True)
