"""The weights of a model that do not learn, stored in fewer bytes in place, and left out of what a training saves.

In the format that is asked for: linear layers none of whose parameters is trained. In bf16, whatever the format: the
table of words and the output heads, which are often one tensor. As they are: what is trained, norms, convolutions,
biases, tables of codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from audiollm.errors import ConfigError
from audiollm.models.dual_ffn import Head
from audiollm.models.frozen.formats import SmallFormat, stored_bytes
from audiollm.models.frozen.layers import FrozenEmbedding, FrozenHead, FrozenLinear
from audiollm.models.frozen.stored import FORMATS, HalfWeight, StoredWeight
from audiollm.products import Linear

SMALL_LAYERS = (FrozenLinear, FrozenEmbedding)
"""Classes of the layers whose weights are stored in fewer bytes."""


class FrozenLayer(NamedTuple):
    """A layer whose weight may be stored in fewer bytes."""

    parent: nn.Module
    child: str
    name: str
    """Full name of its weight."""
    layer: Any
    is_table: bool
    """Stored in bf16, whatever the format."""


class StoredSizes(NamedTuple):
    """Bytes of the weights of a model."""

    before: int
    after: int
    layers: int
    """Layers whose weights are stored in fewer bytes."""


def frozen_layers(model: nn.Module) -> list[FrozenLayer]:
    """Return the layers of a model whose weights may be stored in fewer bytes.

    Of a weight that several layers share, all of them are, or none.
    """
    tables = _find_tables(model)
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), set()).add(id(module))
    layers = []
    for parent_name, parent in model.named_modules():
        for child, layer in parent.named_children():
            is_table = id(layer) in tables
            kinds = (nn.Embedding, nn.Linear, Linear, Head) if is_table else (nn.Linear, Linear)
            if type(layer) in kinds and not any(p.requires_grad for p in layer.parameters()):
                name = ".".join(filter(None, [parent_name, child, "weight"]))
                is_tied = len(users[id(layer.weight)]) > 1
                layers.append(FrozenLayer(parent, child, name, layer, is_table or is_tied))
    replaceable = {id(frozen.layer) for frozen in layers}
    return [frozen for frozen in layers if users[id(frozen.layer.weight)] <= replaceable]


def shrink_frozen(
    model: nn.Module,
    format: SmallFormat,
    references: Sequence[nn.Module] = (),
    beside: Sequence[nn.Module] = (),
) -> StoredSizes:
    """Store the frozen weights of models in fewer bytes, in place; a weight that several share stays one.

    Args:
        references: models of the same names, of which only what is frozen in the first is stored so: where they are
            the same model, they compute the same.
        beside: models that are trained beside it.

    Raises:
        ConfigError: no weight of the first model is frozen, or the library of the format is not installed.
    """
    models = [model, *references, *beside]
    planned = [frozen_layers(trained_or_fixed) for trained_or_fixed in models]
    names = {frozen.name for frozen in planned[0]}
    for layers in planned[1 : len(references) + 1]:
        layers[:] = [frozen for frozen in layers if frozen.name in names]
    if not planned[0]:
        raise ConfigError(
            f"frozen_weights: {format}, and no linear layer of the model is frozen",
            "",
            "train an adapter or patterns of names (`trained`), or leave frozen_weights out",
        )
    before, num_layers = _count_bytes(models), len(planned[0])
    stored: dict[tuple[int, ...], StoredWeight] = {}
    for layers in planned:
        while layers:  # with the layer goes its weight, before the next one is stored
            frozen = layers.pop(0)
            weight = frozen.layer.weight
            key = (weight.data_ptr(), *weight.shape)
            if key not in stored:
                stored[key] = (HalfWeight if frozen.is_table else FORMATS[format])(weight)
            place_stored(frozen, stored[key])
    return StoredSizes(before, _count_bytes(models), num_layers)


def place_stored(frozen: FrozenLayer, stored: StoredWeight) -> None:
    """Put a layer of a stored weight in the place of the layer that has it whole."""
    setattr(frozen.parent, frozen.child, _small_layer(frozen.layer, stored))


def num_stored(modules: Iterable[nn.Module]) -> int:
    """Return how many numbers modules store in fewer bytes, beside their parameters."""
    stored = {id(m): m for module in modules for m in module.modules() if isinstance(m, StoredWeight)}
    return sum(math.prod(weight.shape) for weight in stored.values())


def check_whole(model: nn.Module) -> None:
    """Raises: ValueError: weights of a model are stored in fewer bytes, and cannot be saved."""
    if any(isinstance(module, SMALL_LAYERS) for module in model.modules()):
        raise ValueError(
            "frozen weights are stored in fewer bytes: load what was trained into a model made anew (load_trained)"
        )


def small_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that are stored in fewer bytes, in float32, by the names that they had as parameters."""
    for name, module in model.named_modules():
        if isinstance(module, SMALL_LAYERS):
            yield f"{name}.weight", module.weight.float()


def load_trained(model: nn.Module, weights: Mapping[str, Tensor], is_small: bool) -> None:
    """Load what a training ended with into its model made anew, whose frozen weights are whole.

    Args:
        is_small: whether the training stored frozen weights in fewer bytes; what it left out stays as it is.

    Raises:
        RuntimeError: other names or shapes than the model's.
    """
    left_out = {frozen.name for frozen in frozen_layers(model)} - weights.keys() if is_small else set()
    state = model.state_dict()
    model.load_state_dict({**{name: state[name] for name in left_out}, **weights})


def planned_savings(model: nn.Module, format: SmallFormat) -> tuple[int, int]:
    """Return the numbers of the frozen weights that a format would store in fewer bytes, and these bytes."""
    numbers, stored, counted = 0, 0, set[int]()
    for frozen in frozen_layers(model):
        weight = frozen.layer.weight
        if id(weight) not in counted:
            counted.add(id(weight))
            numbers += weight.numel()
            stored += stored_bytes(tuple(weight.shape), "bf16" if frozen.is_table else format)
    return numbers, stored


def _find_tables(model: nn.Module) -> set[int]:
    """The modules that are tables of words or output heads."""
    tables = {id(module) for module in model.modules() if type(module) is Head}
    for module in model.modules():
        for find in ("get_input_embeddings", "get_output_embeddings"):
            if hasattr(module, find):
                try:
                    tables.add(id(getattr(module, find)()))
                except (NotImplementedError, AttributeError):  # parts of transformers' models that have none
                    continue
    return tables


def _small_layer(layer: Any, stored: StoredWeight) -> nn.Module:
    if isinstance(layer, nn.Embedding):
        assert isinstance(stored, HalfWeight)
        return FrozenEmbedding(stored, layer)
    return (FrozenHead if isinstance(layer, Head) else FrozenLinear)(stored, layer)


def _count_bytes(models: Sequence[nn.Module]) -> int:
    """Bytes of parameters and buffers, those in the same memory counted once."""
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    in_memory = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(in_memory.values())
