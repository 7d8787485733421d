"""Where models live that take part in a training without being trained: a reference, a reward model, a teacher."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from audiollm.recipe.ranks import Ranks
from audiollm.train.options import FrozenPlacement
from audiollm.train.parallel.wrapping import fsdp2


def place_frozen(module: nn.Module, placement: FrozenPlacement, ranks: Ranks, device: torch.device) -> None:
    """Put a model without gradients where its passes will be computed, in place, beside any strategy.

    Args:
        placement: `whole`: on the device of every rank. `sharded`: in parts over the ranks, gathered layer by layer
            for each pass (FSDP2); on one rank, whole. `cpu`: in the machine's memory, copied to the device layer by
            layer for each pass.
        device: of this rank's passes.

    Raises:
        ValueError: the module has a parameter that is trained.
    """
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if trained:
        raise ValueError(f"not frozen: {', '.join(trained[:3])}")
    if placement == "cpu":
        _keep_on_cpu(module, device)
        return
    module.to(device)
    if placement == "sharded" and ranks.world > 1:
        fsdp2(device, None, keep_gathered=False)(module)


def _keep_on_cpu(module: nn.Module, device: torch.device) -> None:
    """Keep the parameters in the machine's memory; those of a layer are on the device while it computes alone.

    Layers are the parts that FSDP2 would gather one at a time (`_no_split_modules`); what is in none of them
    (embeddings, heads) is on the device through the pass. Buffers stay there.
    """
    layers = _outermost_layers(module)
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outer_parameters = [parameter for parameter in module.parameters() if id(parameter) not in in_layers]
    for name, buffer in list(module.named_buffers()):
        owner, _, buffer_name = name.rpartition(".")
        setattr(module.get_submodule(owner), buffer_name, buffer.to(device))
    _fetch_around(module, outer_parameters, device)
    for layer in layers:
        _fetch_around(layer, list(layer.parameters()), device)


def _outermost_layers(module: nn.Module) -> list[nn.Module]:
    names = {
        name for submodule in module.modules() for name in getattr(submodule, "_no_split_modules", None) or ()
    }
    layers: list[nn.Module] = []
    inside: set[int] = set()
    for submodule in module.modules():  # parents come before their parts
        if submodule is not module and type(submodule).__name__ in names and id(submodule) not in inside:
            layers.append(submodule)
            inside |= {id(inner) for inner in submodule.modules()}
    return layers


def _fetch_around(module: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Copy parameters to the device before each forward pass of the module, and let go of the copies after it."""
    cpu_copies = [(parameter, parameter.data.cpu()) for parameter in parameters]
    for parameter, stored in cpu_copies:
        parameter.data = stored

    def fetch(_module: nn.Module, _inputs: object) -> None:
        for parameter, stored in cpu_copies:
            parameter.data = stored.to(device, copy=True)

    def let_go(_module: nn.Module, _inputs: object, _output: object) -> None:
        for parameter, stored in cpu_copies:
            parameter.data = stored

    module.register_forward_pre_hook(fetch)
    module.register_forward_hook(let_go, always_call=True)
