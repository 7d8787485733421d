"""DeepSpeed ZeRO: optimizer states (2), and weights too (3), in flat parts over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.recipe.ranks import Ranks
from audiollm.train.parallel import deepspeed_internals as internals
from audiollm.train.parallel.pieces import Held, gather_pieces
from audiollm.train.parallel.wrapping import Build, Optimizers, fresh_accelerator, is_trained, refuse_several

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of Adam's averages of gradients and of their squares."""


class ZeroStrategy:
    """DeepSpeed ZeRO 2 and 3, through Accelerate. One module is trained, by one optimizer; no float64."""

    def __init__(
        self, ranks: Ranks, stage: int, dtype: torch.dtype | None, clip_norm: float, device: torch.device
    ) -> None:
        self._ranks, self._stage, self._dtype = ranks, stage, dtype
        self._clip_norm, self._device = clip_norm, device
        self.casts_weights = dtype is not None
        self.optimizers: Optimizers = {}

    def prepare(
        self, modules: Mapping[str, nn.Module], groups: Mapping[str, list[str]], build: Build
    ) -> dict[str, nn.Module]:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        refuse_several(groups, f"zero{self._stage}")
        trained = [name for name, module in modules.items() if is_trained(module)]
        if len(trained) > 1:
            raise ValueError(f"zero{self._stage} trains one module, not {trained}: set strategy to ddp")
        if self._device.type == "cpu":
            internals.leave_out_compiled_sums()
        optimizer = next(iter(build().values()))
        accelerator = fresh_accelerator(zero=_zero_plugin(self._stage, self._dtype, self._clip_norm))
        self._engine, prepared = accelerator.prepare(modules[trained[0]], optimizer)
        # Accelerate tells transformers that ZeRO 3 is on: each `from_pretrained` after it would cut its model up over
        # the ranks, and wait for ever on one that loads alone
        unset_hf_deepspeed_config()
        self._zero = self._engine.optimizer
        self._names = {p: f"{trained[0]}.{key}" for key, p in modules[trained[0]].named_parameters()}
        internals.check_private_names(self._zero, [p for p, _ in self._trained()], self._stage)
        self._start_states()
        self.optimizers = {"main": prepared}
        self._unreached = {name for _, name in self._trained()}
        for parameter, name in self._trained():  # DeepSpeed moves gradients away: `grad` tells nothing
            parameter.register_hook(partial(self._note_gradient, name))
        return {**modules, trained[0]: self._engine}

    def accumulate(self, optimizer: str, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor, optimizer: str, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        self._engine.backward(loss * self._ranks.world)
        if last:
            self._engine.step()  # clips, and zeroes the gradients
            self._empty_gradients()

    def step(self, optimizer: str, clip_norm: float) -> Tensor:
        return torch.as_tensor(self._engine.get_global_grad_norm())

    def without_gradient(self, optimizer: str) -> set[str]:
        return set(self._unreached)

    def settle(self) -> None:
        """DeepSpeed lets go of gathered weights by itself."""

    def held(self, tensor: Tensor) -> Held:
        """For a trained parameter the fp32 weights, else what is computed with."""
        if tensor.requires_grad and tensor in self._names:
            return internals.fp32_piece(tensor, self._stage, self._ranks.rank)
        if internals.is_partitioned(tensor):
            return internals.frozen_piece(tensor, self._ranks.rank)
        return tensor.detach()

    def read(self, tensor: Tensor) -> Tensor:
        """For a trained parameter the fp32 weights, as `held`."""
        return gather_pieces(self.held(tensor), self._ranks)

    @torch.no_grad()
    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Both what is computed with and, where it is trained, the fp32 weights behind it."""
        from deepspeed import zero

        value = value.to(self._device)
        with zero.GatheredParameters([tensor], modifier_rank=0, enabled=internals.is_partitioned(tensor)):
            tensor.copy_(value)
        if tensor.requires_grad and tensor in self._names:
            self._set_rank_piece(tensor, value)

    def local(self, parameter: Tensor) -> Tensor:
        raise ValueError(
            f"averaged weights (ema_decay) need the strategy ddp or fsdp2, not zero{self._stage}"
        )

    def optimizer_state(self) -> dict[str, Callable[[], Held]]:
        """Adam's count of steps is the same for all; each parameter has a copy, as without ZeRO."""
        count = next(iter(internals.optimizer_states(self._zero).values()))["step"]
        entries: dict[str, Callable[[], Held]] = {}
        for parameter, name in self._trained():
            entries[f"main/{name}.step"] = partial(torch.clone, count)
            for key in ADAM_MOMENTS:
                piece = partial(internals.fp32_piece, parameter, self._stage, self._ranks.rank, key)
                entries[f"main/{name}.{key}"] = piece
        return entries

    def restore_optimizers(self, entries: Mapping[str, Callable[[], Tensor]]) -> None:
        trained = [(parameter, f"main/{name}") for parameter, name in self._trained()]
        counts = {float(entries[f"{name}.step"]()) for _, name in trained if f"{name}.step" in entries}
        if not counts:
            return
        if len(counts) > 1:
            raise ValueError(
                f"zero{self._stage} cannot go on from this checkpoint: its parameters were updated "
                f"{sorted(counts)} times; go on with the strategy ddp or fsdp2"
            )
        for state in internals.optimizer_states(self._zero).values():
            state["step"].fill_(counts.copy().pop())
        for parameter, name in trained:
            for key in ADAM_MOMENTS:
                self._set_rank_piece(parameter, entries[f"{name}.{key}"](), key)

    def scaler_state(self) -> dict[str, float]:
        return {"scale": internals.loss_scale(self._zero)} if self._dtype == torch.float16 else {}

    def restore_scaler(self, state: Mapping[str, float]) -> None:
        if state and self._dtype == torch.float16:
            internals.set_loss_scale(self._zero, state["scale"])

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        self._unreached.discard(name)

    def _trained(self) -> list[tuple[nn.Parameter, str]]:
        return [(p, name) for p, name in self._names.items() if p.requires_grad]

    def _set_rank_piece(self, parameter: Tensor, value: Tensor, entry: str | None = None) -> None:
        """This rank's part of the fp32 weight, or of a moment of it, out of the whole.

        ZeRO 3 fills the last part up; DeepSpeed's own setter of the whole fails where a part is nothing else.
        """
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        value = value.to(self._device).float()
        if self._stage == 3:
            size = internals.partition_size(parameter)
            filled = torch.zeros(size * self._ranks.world, device=self._device)
            filled[: value.numel()] = value.flatten()
            value = filled[size * self._ranks.rank :][:size]
        weight, moment = (
            (safe_set_full_fp32_param, safe_set_full_optimizer_state)
            if self._stage == 2
            else (safe_set_local_fp32_param, safe_set_local_optimizer_state)
        )
        if entry is None:
            weight(parameter, value)
        else:
            moment(parameter, value, entry)

    def _empty_gradients(self) -> None:
        """ZeRO 3 (0.19.8) empties a gradient with the first backward pass of a step, and only what that pass reaches.

        What a later one reaches first would be added to the gradient of the step before.
        """
        from deepspeed.utils import safe_set_local_grad

        if self._stage == 3:
            for parameter, _ in self._trained():
                size = internals.partition_size(parameter)
                safe_set_local_grad(parameter, torch.zeros(size, device=self._device))

    def _start_states(self) -> None:
        """Adam's moments, at zero, of what DeepSpeed's optimizer updates: this rank's share of each group, end to end.

        Made before the first step: ZeRO 2 (0.19.8) links the states of all groups to their parameters once the
        first group is done, and never those that come after it.
        """
        states = internals.optimizer_states(self._zero)
        for flat in internals.flat_fp32_weights(self._zero, self._stage):
            count = torch.zeros((), dtype=torch.float32, device=flat.device)
            states[flat] = {"step": count, **{key: torch.zeros_like(flat) for key in ADAM_MOMENTS}}
        if self._stage == 2:
            internals.link_states(self._zero)


def _zero_plugin(stage: int, dtype: torch.dtype | None, clip_norm: float) -> Any:
    from accelerate import DeepSpeedPlugin

    settings: dict[str, Any] = {
        # its own counts of samples; the loop has its own
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip_norm,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype is not None:
        settings["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    return DeepSpeedPlugin(hf_ds_config=settings)
