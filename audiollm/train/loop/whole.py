"""A whole copy of a module whose weights a strategy spreads over ranks: for generation while training.

Under FSDP2 and ZeRO 3 no rank holds the whole model, and an adapter (LoRA) keeps a model from the layouts that
generation is fast with. A copy is filled one tensor at a time, adapters merged, so that a rank needs the memory of the
copy and of one tensor beside what training takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from audiollm.models.frozen.shrink import small_weights
from audiollm.train.loop.modules import announce_weights

Read = Callable[[Tensor], Tensor]
"""Gives a parameter or a buffer whole, on every rank; all ranks must call it (`Strategy.read`)."""


class _Entry(NamedTuple):
    """A tensor by the name that it has without adapters, and the adapter that is added to it."""

    name: str
    tensor: Tensor
    adapter: Any


def fill_whole(module: nn.Module, read: Read, copy: nn.Module | None) -> None:
    """Fill a plain module with the weights of one that is trained; all ranks must call it.

    Args:
        module, read: as `fill_tensors` has them.
        copy: has the module's parameters and persistent buffers by the same names, without adapters; None on a rank
            that needs no copy.

    Raises:
        ValueError: as `fill_tensors` has it.
    """
    fill_tensors(module, read, None if copy is None else copy.state_dict(keep_vars=True))
    if copy is not None:
        announce_weights([copy])


@torch.no_grad()
def fill_tensors(
    module: nn.Module, read: Read, targets: Mapping[str, Tensor] | None, share: float = 1.0
) -> None:
    """Write the weights of a module that is trained into tensors, adapters merged; all ranks must call it.

    Args:
        module: as it was before a strategy wrapped it, with or without LoRA adapters inside.
        read: of the strategy.
        targets: tensors by the names of the module's parameters and persistent buffers, without adapters; None on a
            rank that needs none.
        share: 1 replaces the targets; less mixes the module's weights into them by this share. What is not a
            floating-point number is replaced.

    Raises:
        ValueError: the targets have other names than the module's tensors, or an adapter is not LoRA on a linear layer.
    """
    entries = list(_iterate_entries(module))
    if targets is not None and targets.keys() != {entry.name for entry in entries}:
        different = sorted(targets.keys() ^ {entry.name for entry in entries})
        raise ValueError(f"the copy has other tensors than the trained module: {different[:3]}")
    filled_pointers: set[int] = set()
    for entry in entries:
        target = None if targets is None else targets[entry.name]
        value = read(entry.tensor)
        if target is not None and target.data_ptr() in filled_pointers and target.numel():
            target = None  # tied to one that was mixed before
        if target is not None:
            filled_pointers.add(target.data_ptr())
            if share == 1 or not target.is_floating_point():
                target.copy_(value)
            else:
                target.lerp_(value.to(target), share)
        del value  # one whole tensor at a time
        if entry.adapter is not None:
            _add_adapter(entry, read, target, share)


def unmerged_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and persistent buffers by the names that `fill_tensors` has for them."""
    return {entry.name: entry.tensor for entry in _iterate_entries(module)}


class SavedTensors(nn.Module):
    """Tensors as the buffers of a module, whose memory they share: with it, they are in every checkpoint.

    What they are the weights of is no part of it: the loop counts no parameters there, and switches no mode.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "/"), tensor.detach())


@torch.no_grad()
def whole_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module whose weights are whole here, by name, with LoRA adapters merged.

    Names are those of `fill_whole`'s copy. Tensors without an adapter are the module's own, not copies of them.

    Raises:
        ValueError: an adapter is not LoRA on a linear layer.
    """
    for entry in _iterate_entries(module):
        value = entry.tensor.detach()
        if entry.adapter is not None:
            value = value.clone()
            _add_adapter(entry, lambda tensor: tensor, value)
        yield entry.name, value


class WholeCopy:
    """A whole copy of a trained module on some ranks, filled when it is needed.

    Args:
        module: as `fill_whole` has it.
        copy: None on a rank that needs no copy.
    """

    def __init__(self, module: nn.Module, copy: nn.Module | None) -> None:
        self._module, self._copy = module, copy
        self._read: Read = lambda tensor: tensor

    def read_by(self, read: Read) -> None:
        """Take the strategy's way to read whole tensors; before, the module's tensors are whole on every rank."""
        self._read = read

    def fill(self) -> None:
        """Fill the copy with the present weights; all ranks must call it."""
        fill_whole(self._module, self._read, self._copy)


def _iterate_entries(module: nn.Module) -> Iterator[_Entry]:
    """Yield parameters and persistent buffers, those of adapters left out; weights in fewer bytes are made float32."""
    adapters = {
        f"{name}.weight": submodule
        for name, submodule in module.named_modules()
        if hasattr(submodule, "lora_A") and hasattr(submodule, "base_layer")
    }
    tensors = module.state_dict(keep_vars=True)
    for key, tensor in chain(tensors.items(), small_weights(module)):
        if ".lora_" in key or ".original_module." in key:
            continue
        name = key.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
        yield _Entry(name, tensor, adapters.get(name))


def _add_adapter(entry: _Entry, read: Read, target: Tensor | None, share: float = 1.0) -> None:
    """Add a share of the adapter's product as PEFT merges it."""
    layer = entry.adapter
    if "default" not in layer.lora_A or layer.use_dora.get("default"):
        raise ValueError(f"{entry.name}: only plain LoRA on linear layers can be merged into a copy")
    down, up = read(layer.lora_A["default"].weight), read(layer.lora_B["default"].weight)
    if target is None:
        return
    delta = up @ down
    delta = delta.T if getattr(layer, "fan_in_fan_out", False) else delta
    target.add_((delta * (share * layer.scaling["default"])).to(target))
