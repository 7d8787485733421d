"""How gradients, weights and optimizer states live on the ranks: whole on each (one process, DDP), or in parts.

The loop sees the same four acts everywhere: prepare, backward, step, and reading or writing one tensor as a
whole. So a checkpoint's layout does not depend on the strategy, nor on the number of ranks.

Losses of all ranks add up (see README.md); all strategies here average gradients, so each multiplies by the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from audiollm.errors import ConfigError
from audiollm.recipe.ranks import Ranks
from audiollm.train.parallel.pieces import Held, Piece, gather_pieces
from audiollm.train.parallel.wrapping import Build, Optimizers, ddp, fsdp2, is_trained, refuse_several
from audiollm.train.parallel.zero import ZeroStrategy
from audiollm.train.settings import StrategyName


class Strategy(Protocol):
    """A way to spread a training over ranks, as the loop uses it. `optimizer` is always a name."""

    optimizers: Optimizers
    casts_weights: bool
    """Forward passes see the weights in the products' own type: they need autocast always, not in training alone."""

    def prepare(
        self, modules: Mapping[str, nn.Module], groups: Mapping[str, list[str]], build: Build
    ) -> dict[str, nn.Module]:
        """Wrap the modules that are trained and build the optimizers; returns all modules, by their names."""

    def accumulate(self, optimizer: str, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: the ranks are reduced over with the last alone."""

    def backward(self, loss: Tensor, optimizer: str, last: bool) -> None: ...

    def step(self, optimizer: str, clip_norm: float) -> Tensor:
        """Clip and update. Returns the gradients' norm before clipping; not finite: no update was made."""

    def without_gradient(self, optimizer: str) -> set[str]:
        """The trained parameters that the last backward passes of an optimizer did not reach, by name."""

    def settle(self) -> None:
        """After forward passes without a backward one: weights go back to where they are kept."""

    def held(self, tensor: Tensor) -> Held:
        """Return this rank's part of a parameter or a buffer, in its memory; nothing is sent between ranks."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return a whole parameter or buffer on every rank; all must call it. Where it is whole already: itself."""

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Copy a whole tensor, which every rank gives, into a parameter or a buffer; all ranks must call it."""

    def local(self, parameter: Tensor) -> Tensor:
        """The part of a parameter that this rank holds and updates, sharing its memory."""

    def optimizer_state(self) -> dict[str, Callable[[], Held]]:
        """`optimizer/parameter.entry` -> reads what this rank holds of it; the same names on all ranks."""

    def restore_optimizers(self, entries: Mapping[str, Callable[[], Tensor]]) -> None:
        """Load optimizer states from readers of whole tensors, named as in `optimizer_state`."""

    def scaler_state(self) -> dict[str, float]:
        """State of the fp16 loss scaler; empty in other precisions."""

    def restore_scaler(self, state: Mapping[str, float]) -> None:
        """Load what `scaler_state` gave; an empty state changes nothing."""


def choose_strategy(
    name: StrategyName,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype | None,
    clip_norm: float,
    unused_parameters: bool = False,
) -> Strategy:
    """The strategy of that name; a process that is alone needs none, whatever the name.

    Args:
        dtype: what products are taken in; None for the parameters' own.
        clip_norm: DeepSpeed clips by itself.
        unused_parameters: some steps leave some parameters without a gradient (DDP must look for them).

    Raises:
        ValueError: fp16 with ZeRO on a CPU.
        ConfigError: ZeRO without DeepSpeed.
    """
    half = dtype == torch.float16
    if ranks.world == 1:
        return TorchStrategy(ranks, lambda module: module, half, device)
    if name in ("zero2", "zero3"):
        if find_spec("deepspeed") is None:
            remedy = "pip install 'audiollm[deepspeed]', or set strategy to fsdp2"
            raise ConfigError(f"{name} needs DeepSpeed, which is not installed", "strategy", remedy)
        if half and device.type == "cpu":
            raise ValueError(f"{name} cannot take fp16 on a CPU: set precision to bf16 or fp32")
        return ZeroStrategy(ranks, int(name[-1]), dtype, clip_norm, device)
    if name == "fsdp2":
        return TorchStrategy(ranks, fsdp2(device, dtype), half, device, "fsdp2", dtype is not None)
    return TorchStrategy(ranks, ddp(device, unused_parameters), half, device)


class TorchStrategy:
    """torch's own optimizers: one process, DDP, and FSDP2."""

    def __init__(
        self,
        ranks: Ranks,
        wrap: Callable[[nn.Module], nn.Module],
        half: bool,
        device: torch.device,
        one_optimizer: str = "",
        casts_weights: bool = False,
    ) -> None:
        """`one_optimizer`: the strategy's name where it cannot have several."""
        self.casts_weights = casts_weights
        self._ranks, self._wrap, self._one_optimizer = ranks, wrap, one_optimizer
        self._scaler = torch.amp.GradScaler(device.type) if half else None
        self.optimizers: Optimizers = {}

    def prepare(
        self, modules: Mapping[str, nn.Module], groups: Mapping[str, list[str]], build: Build
    ) -> dict[str, nn.Module]:
        if self._one_optimizer:
            refuse_several(groups, self._one_optimizer)
        wrapped = {name: self._wrap(m) if is_trained(m) else m for name, m in modules.items()}
        self.optimizers = build()  # after wrapping: FSDP2 puts other parameters in their place
        self._modules, self._groups, self._wrapped = dict(modules), groups, wrapped
        return wrapped

    @contextmanager
    def accumulate(self, optimizer: str, last: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for name in [] if last else self._groups[optimizer]:
                stack.enter_context(_without_reduction(self._wrapped[name]))
            yield

    def backward(self, loss: Tensor, optimizer: str, last: bool) -> None:
        if self._ranks.world > 1:
            loss = loss * self._ranks.world
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if self._one_optimizer:  # FSDP2's leaves are not the parameters: they cannot be named
            loss.backward()
        else:
            # the generator's loss goes through the discriminator: its weights' gradients are not even computed
            loss.backward(inputs=self._parameters(optimizer))

    def step(self, optimizer: str, clip_norm: float) -> Tensor:
        used = self.optimizers[optimizer]
        if self._scaler is not None:
            self._scaler.unscale_(used)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters(optimizer), clip_norm)
        if self._scaler is not None:
            self._scaler.step(used)
            self._scaler.update()
        else:
            used.step()
        return _gather_whole(norm)

    def without_gradient(self, optimizer: str) -> set[str]:
        names = self._names()
        return {names[p] for p in self._parameters(optimizer) if p.grad is None}

    def settle(self) -> None:
        for module in self._wrapped.values():
            if hasattr(module, "reshard"):
                module.reshard()  # type: ignore[operator]

    def held(self, tensor: Tensor) -> Held:
        return _take_rank_rows(tensor.detach())

    def read(self, tensor: Tensor) -> Tensor:
        return gather_pieces(self.held(tensor), self._ranks)

    @torch.no_grad()
    def write(self, tensor: Tensor, value: Tensor) -> None:
        tensor.copy_(_like(value, tensor))

    def local(self, parameter: Tensor) -> Tensor:
        return _take_local_part(parameter.detach())

    def optimizer_state(self) -> dict[str, Callable[[], Held]]:
        names = self._names()
        return {
            f"{optimizer}/{names[parameter]}.{key}": partial(_take_rank_rows, value)
            for optimizer, used in self.optimizers.items()
            for group in used.param_groups
            for parameter in group["params"]
            for key, value in used.state.get(parameter, {}).items()
        }

    def restore_optimizers(self, entries: Mapping[str, Callable[[], Tensor]]) -> None:
        names = self._names()
        of_parameter: dict[str, dict[str, Callable[[], Tensor]]] = {}
        for full, read in entries.items():
            owner, _, key = full.rpartition(".")
            of_parameter.setdefault(owner, {})[key] = read
        for optimizer, used in self.optimizers.items():
            state: dict[int, dict[str, Tensor]] = {}
            for index, parameter in enumerate(p for group in used.param_groups for p in group["params"]):
                saved_state = of_parameter.get(f"{optimizer}/{names[parameter]}", {})
                if saved_state:
                    state[index] = {key: _shard_state(read(), parameter) for key, read in saved_state.items()}
            used.load_state_dict({"state": state, "param_groups": used.state_dict()["param_groups"]})

    def scaler_state(self) -> dict[str, float]:
        return dict(self._scaler.state_dict()) if self._scaler is not None else {}

    def restore_scaler(self, state: Mapping[str, float]) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(dict(state))

    def _parameters(self, optimizer: str) -> list[nn.Parameter]:
        groups = self.optimizers[optimizer].param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _names(self) -> dict[Tensor, str]:
        return {p: f"{name}.{key}" for name, m in self._modules.items() for key, p in m.named_parameters()}


def _without_reduction(module: nn.Module) -> AbstractContextManager[None]:
    if hasattr(module, "set_requires_gradient_sync"):
        return _fsdp2_without_reduction(module)
    return module.no_sync() if hasattr(module, "no_sync") else nullcontext()  # type: ignore[operator]


@contextmanager
def _fsdp2_without_reduction(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _gather_whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def _take_local_part(tensor: Any) -> Tensor:
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _take_rank_rows(tensor: Any) -> Held:
    """The tensor, or this rank's rows of a DTensor that FSDP2 shards along dimension 0, uneven shards included."""
    if not _is_sharded(tensor):
        held: Tensor = tensor
        return held
    if [placement.is_shard(0) for placement in tensor.placements] != [True]:
        raise ValueError(f"only shards along dimension 0 can be saved, not {tensor.placements}")
    (chunk,) = (
        tensor.__create_chunk_list__()
    )  # how torch.distributed.checkpoint asks; no public name (torch 2.14)
    shape = tuple(tensor.shape)
    return Piece(shape, chunk.offsets[0] * math.prod(shape[1:]), tensor.to_local().flatten())


def _shard_state(value: Tensor, parameter: Tensor) -> Tensor:
    """`value`, an entry of the parameter's optimizer state, sharded as the parameter is.

    The shard gets memory of its own: a view of `value` would keep all of it alive.
    """
    if value.ndim == 0 or not _is_sharded(parameter):
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(_like(value, parameter))


def _like(value: Tensor, tensor: Tensor) -> Tensor:
    """`value`, sharded where `tensor` is: every rank cuts out its own shard, nothing is sent."""
    if not _is_sharded(tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    moved = value.to(tensor.device)
    return distribute_tensor(moved, tensor.device_mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]
