"""Memory of a training, from a model without memory (on the meta device) and the rows of a batch; nothing is loaded.

Two figures, each with its rule beside it: the peak of a process without a GPU, from its start to the saved model, and
the memory of a GPU. `benchmarks/plan_memory.py` measures the first. The second is the same arithmetic without the
copies on the CPU; it was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from audiollm.models.decoder import DualFFNConfig
from audiollm.models.frozen.shrink import planned_savings
from audiollm.train.settings import FrozenFormat

PROCESS_MB = 960
"""Python, torch, PEFT with transformers, and what they allocate once: of a process without a GPU."""
GPU_MB = 700
"""The context of a GPU, and the workspaces of its libraries."""
GRADIENT_SHARE = 0.3
"""Gradients of activations that exist at once, relative to the kept values of the largest layer."""
GPU_SIZES_GB = (8, 12, 16, 24)
"""Memory of GPUs that a plan compares with; 1 GB of these is 2^30 bytes, as their makers count."""
GPU_USABLE = 0.85
"""Share of a GPU's memory that a plan may fill: some lies between blocks, and the figure itself was not measured."""
COMPARED_FORMATS: Sequence[FrozenFormat] = ("fp32", "bf16", "nf4")


@dataclass(frozen=True)
class StackWork:
    """A stack of layers, and the rows that go through it at once."""

    shape: DualFFNConfig
    rows: float

    def kept_bytes(self, value_bytes: int) -> float:
        """Bytes that a layer keeps for the backward pass, where adapters read the input of every linear layer.

        Two residual sums in float32; in the type of the products two norms, gate, up, SiLU and their product,
        queries, keys and values with rotation, and (with a norm of each head) without, what attention gives, and the
        input of the output layer.

        Args:
            value_bytes: of a number in the type of the products.
        """
        shape = self.shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        values = 2 * shape.hidden_size + 4 * shape.intermediate_size + 3 * queries + 2 * keys
        if shape.qk_norm:
            values += queries + keys
        return self.rows * (4 * 2 * shape.hidden_size + value_bytes * values)

    @property
    def input_bytes(self) -> float:
        """Bytes of the input of a layer, which is all that is kept where activations are computed again."""
        return self.rows * 4 * self.shape.hidden_size


@dataclass(frozen=True)
class BatchWork:
    """The sizes of the activations that a batch keeps for the backward pass."""

    stacks: Sequence[StackWork]
    head_numbers: float
    """Numbers of the hidden states that heads read."""

    def num_bytes(self, value_bytes: int, is_recomputed: bool) -> float:
        """Bytes of the activations of a step, and of their gradients.

        Args:
            value_bytes: of a number in the type of the products.
            is_recomputed: activations are computed again in the backward pass.
        """
        layers = [stack.kept_bytes(value_bytes) for stack in self.stacks]
        largest = max(layers)
        if is_recomputed:
            kept_bytes = sum(stack.shape.num_layers * stack.input_bytes for stack in self.stacks) + largest
        else:
            kept_bytes = sum(
                stack.shape.num_layers * layer for stack, layer in zip(self.stacks, layers, strict=True)
            )
        return kept_bytes + GRADIENT_SHARE * largest + 2 * 4 * self.head_numbers


@dataclass(frozen=True)
class UnloadedModel:
    """A model on the meta device, with what is trained chosen."""

    root: nn.Module
    work: Callable[[float, float], BatchWork]
    """The work of a batch, by its rows and by the frames of speech among them."""


@dataclass(frozen=True)
class WeightSizes:
    """Parameters of a model, and the bytes of those that are stored in fewer than float32 takes."""

    total: int
    trained: int
    largest: int
    """Numbers of the largest linear layer or table."""
    small: int = 0
    small_bytes: int = 0

    @classmethod
    def of(cls, root: nn.Module, format: FrozenFormat) -> WeightSizes:
        """Count a model's parameters, in the format of its frozen ones."""
        parameters = list(root.parameters())
        total = sum(parameter.numel() for parameter in parameters)
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        small, small_bytes = (0, 0) if format == "fp32" else planned_savings(root, format)
        return cls(total, trained, max(parameter.numel() for parameter in parameters), small, small_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, as a training holds them."""
        return 4 * (self.total - self.small) + self.small_bytes

    def state_bytes(self, is_averaged: bool) -> int:
        """Bytes of gradients, of two moments of AdamW and of averages."""
        return 4 * self.trained * (4 if is_averaged else 3)


def process_mb(weights: WeightSizes, activation_bytes: float, is_averaged: bool) -> float:
    """The peak of a training without a GPU, in MB: of loading, of a step, and of saving.

    A model is loaded in float32 before its frozen weights are stored in fewer bytes, and loaded again, beside them, to
    be saved; otherwise the trained one is saved, a tensor at a time.
    """
    whole = 4 * weights.total
    step = weights.num_bytes + weights.state_bytes(is_averaged) + activation_bytes
    save = weights.num_bytes + (whole if weights.small else 4 * weights.largest)
    return PROCESS_MB + max(whole, step, save) / 2**20


def gpu_mb(
    weights: WeightSizes, activation_bytes: float, is_averaged: bool, is_recomputed: bool, is_half: bool
) -> float:
    """The memory of a GPU, in MB.

    Args:
        is_half: products are in half precision. Autocast keeps a copy of each float32 weight that a step reads, of all
            until the backward pass, or of a layer's where activations are computed again (`is_recomputed`).
    """
    copies = 2 * (weights.largest if is_recomputed else weights.total - weights.small) if is_half else 0
    step = weights.num_bytes + copies + weights.state_bytes(is_averaged) + activation_bytes
    return GPU_MB + step / 2**20


def smallest_gpu(memory_mb: float) -> str:
    """The smallest of the GPUs that hold so much, in words."""
    fitting = [size for size in GPU_SIZES_GB if memory_mb <= GPU_USABLE * size * 1024]
    return f"fits {fitting[0]} GB" if fitting else f"more than {GPU_SIZES_GB[-1]} GB"
