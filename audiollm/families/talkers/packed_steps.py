"""The steps of a talker's generation on a CPU, with weights laid out for them.

A frame takes as many passes through the depth decoder as it has codebooks, each of few rows through narrow layers: most
of it is overhead. `models.packed_decoder` has layers with less of it, which both stacks take where they can.

Shapes: R rows of a cache, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from audiollm.families.talkers.stack import DecoderStack
from audiollm.families.talkers.talker import DepthTalker, Talker
from audiollm.models.cache import AttendCached, Cache, attend_cached
from audiollm.models.packed_decoder import (
    MULTIPLY_ADDS_PER_NUMBER_READ,
    PACKED_LAYERS,
    Norm,
    PackedLayer,
    RotaryAngles,
    can_pack,
    threads_for,
)

StackStep = Callable[[Tensor, AttendCached, Cache], Tensor]


class TalkerSteps:
    """A talker's steps of generation, computed by packed copies of its stacks where these can be packed.

    A stack with adapters, on a GPU, in half precision or of more than 2 GB computes its steps itself.

    Args:
        model: its present weights are copied.
    """

    def __init__(self, model: Talker) -> None:
        self._model, self._state = model, _weight_state(model)
        self._backbone = _step_of(model.backbone)
        self._depth = _step_of(model.depth) if isinstance(model, DepthTalker) else None

    def extend_backbone(self, x_RC: Tensor, cache: Cache) -> Tensor:
        """See `DecoderStack.extend`."""
        return self._backbone(x_RC, attend_cached(cache, len(x_RC), None), cache)

    def depth_passes(self, cache: Cache) -> DepthPasses:
        """Prepare passes of a `DepthTalker`'s depth decoder over a cache with room for a frame."""
        assert self._depth is not None
        return DepthPasses(self._depth, cache, self._model.num_codebooks)

    def is_current(self) -> bool:
        """Return whether the model's weights are still those that were copied."""
        return self._state == _weight_state(self._model)


class DepthPasses:
    """The depth decoder's passes over the codebooks of a frame: their attention is prepared once, and is the same in
    every frame of as many answers."""

    def __init__(self, step: StackStep, cache: Cache, num_passes: int) -> None:
        self._step, self._cache, self._num_passes = step, cache, num_passes
        self._attends: list[AttendCached] = []
        self._rows = 0

    def extend(self, x_RC: Tensor, place: int) -> Tensor:
        """Compute the hidden states `[R, C]` at a place of each frame, behind the places before it."""
        rows = len(x_RC)
        if rows != self._rows:
            self._cache.lengths[:rows] = [0] * rows
            self._attends = [attend_cached(self._cache, rows, None) for _ in range(self._num_passes)]
            self._rows = rows
        return self._step(x_RC, self._attends[place], self._cache)


class PackedStack:
    """A copy of a stack's layers for steps of a row a sequence. The numbers are those of `DecoderStack.extend`, up to
    rounding."""

    def __init__(self, stack: DecoderStack) -> None:
        shape = stack.shape
        self._layers = [PackedLayer.of(layer, shape) for layer in stack.layers]  # type: ignore[arg-type]
        self._norm = Norm.of(stack.norm)
        heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        self._weights_per_layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)

    def __call__(self, x_RC: Tensor, attend: AttendCached, cache: Cache) -> Tensor:
        """Extend rows of a cache by the position that attention was prepared for."""
        rows = len(x_RC)
        tables = (cache.cosine_LD, cache.signed_sine_LD)
        turn = RotaryAngles(*(table.index_select(0, attend.position_X)[:, None] for table in tables))
        with threads_for(self._weights_per_layer * (rows + MULTIPLY_ADDS_PER_NUMBER_READ) // 6):
            for index, layer in enumerate(self._layers):
                x_RC = layer.finish(x_RC, attend(index, *layer.begin(x_RC, rows, turn)), rows)
            return self._norm(x_RC)


def _step_of(stack: DecoderStack) -> StackStep:
    linears = [module for module in stack.layers.modules() if isinstance(module, nn.Linear)]
    if all(type(linear) in PACKED_LAYERS for linear in linears) and can_pack(list(stack.parameters())):
        return PackedStack(stack)

    def plain_step(x_RC: Tensor, attend: AttendCached, cache: Cache) -> Tensor:
        hidden_RC: Tensor = stack(x_RC, attend.position_X, attend)
        return hidden_RC

    return plain_step


def _weight_state(model: Talker) -> list[tuple[int, int]]:
    """Addresses of the weights and torch's counts of writes to them: they differ after a change."""
    return [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in model.parameters()
    ]
