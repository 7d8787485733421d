"""Modules made ready for several ranks: DDP by Accelerate, FSDP2 by torch; the place of models that are not trained."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from audiollm.recipe.ranks import Ranks
from audiollm.train.settings import FrozenPlacement

Optimizers = dict[str, torch.optim.Optimizer]
Build = Callable[[], Optimizers]


def ddp(device: torch.device, unused_parameters: bool) -> Callable[[nn.Module], nn.Module]:
    """Buffers are not broadcast: what changes them (codebooks, averages) sees to it that ranks agree."""
    accelerator = fresh_accelerator(device, unused_parameters)

    def wrap(module: nn.Module) -> nn.Module:
        prepared: nn.Module = accelerator.prepare_model(module)
        return prepared

    return wrap


def fsdp2(
    device: torch.device, dtype: torch.dtype | None, keep_gathered: bool = True
) -> Callable[[nn.Module], nn.Module]:
    """torch's `fully_shard`, called directly: Accelerate has FSDP2 on accelerators alone, not on CPUs.

    A module says by `_no_split_modules`, as in transformers, which of its parts are gathered one at a time.

    Args:
        keep_gathered: what belongs to no such part stays gathered between forward and backward pass; False: it does
            not, as no backward pass follows.
    """
    from torch.distributed import broadcast, get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (get_world_size(),))
    # inputs are left as they are: among them are the weights of the targets
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = policy if dtype else MixedPrecisionPolicy(cast_forward_inputs=False)

    def wrap(module: nn.Module) -> nn.Module:
        for tensor in module.state_dict().values():
            broadcast(tensor, src=0)  # as DDP and ZeRO do: the parts must be of one whole
        units = {
            name
            for submodule in module.modules()
            for name in getattr(submodule, "_no_split_modules", None) or ()
        }
        for submodule in list(module.modules()):
            if type(submodule).__name__ in units and submodule is not module:
                fully_shard(submodule, mesh=mesh, mp_policy=policy)
        freed = None if keep_gathered else True
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=freed)  # in place
        return module

    return wrap


def fresh_accelerator(
    device: torch.device | None = None, unused_parameters: bool = False, zero: Any = None
) -> Any:
    """A fresh Accelerator: it keeps its state in globals, and an earlier stage may have had another strategy."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if zero is not None:
        return Accelerator(deepspeed_plugin=zero)
    assert device is not None
    handler = DistributedDataParallelKwargs(
        broadcast_buffers=False, find_unused_parameters=unused_parameters, gradient_as_bucket_view=True
    )
    return Accelerator(cpu=device.type == "cpu", kwargs_handlers=[handler], mixed_precision="no")


def is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def refuse_several(groups: Mapping[str, list[str]], strategy: str) -> None:
    if len(groups) > 1:
        raise ValueError(
            f"{strategy} has one optimizer, and this task has {sorted(groups)}: set strategy to ddp"
        )


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
