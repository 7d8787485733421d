"""The private names of DeepSpeed that ZeRO training uses: one table, all code that uses them, and a check of them.

The table names each attribute that DeepSpeed does not document. No other module of the project uses one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from torch import Tensor

from audiollm.errors import StageError
from audiollm.train.parallel.pieces import Piece, padded_piece

READ_IN_VERSION = "0.19.8"
"""DeepSpeed version whose source the table below was read in."""

Owner = Literal["optimizer", "parameter", "fragment"]
"""DeepSpeed's ZeRO optimizer, a trained parameter, or the link from a parameter to its fp32 weights on this rank."""


@dataclass(frozen=True)
class PrivateName:
    """One undocumented attribute, the ZeRO stages that need it, and the module of DeepSpeed that defines it."""

    name: str
    owner: Owner
    stages: tuple[int, ...]
    module: str
    purpose: str


_ZERO2, _ZERO3 = "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"
_LINKS, _FRAGMENTS = "deepspeed.utils.mixed_precision_linkage", "deepspeed.utils.tensor_fragment"
_PARTITIONS = "deepspeed.runtime.zero.partition_parameters"

PRIVATE_NAMES = (
    PrivateName("optimizer", "optimizer", (2,), _ZERO2, "the torch optimizer that updates the flat parts"),
    PrivateName("optimizer", "optimizer", (3,), _ZERO3, "the torch optimizer that updates the flat parts"),
    PrivateName(
        "single_partition_of_fp32_groups",
        "optimizer",
        (2,),
        _ZERO2,
        "this rank's flat fp32 weights, one per group",
    ),
    PrivateName(
        "fp32_partitioned_groups_flat",
        "optimizer",
        (3,),
        _ZERO3,
        "this rank's flat fp32 weights, one per sub-group",
    ),
    PrivateName(
        "_lazy_init_hp_params_optimizer_state",
        "optimizer",
        (2,),
        _ZERO2,
        "links optimizer states to their parameters",
    ),
    PrivateName("loss_scale", "optimizer", (2,), _ZERO2, "the fp16 loss scale, read and set"),
    PrivateName("loss_scale", "optimizer", (3,), _ZERO3, "the fp16 loss scale, read and set"),
    PrivateName(
        "_hp_mapping", "parameter", (2,), _LINKS, "links a parameter to its fp32 weights on this rank"
    ),
    PrivateName("lp_fragment_address", "fragment", (2,), _FRAGMENTS, "range of the parameter on this rank"),
    PrivateName("get_hp_fragment", "fragment", (2,), _FRAGMENTS, "the fp32 weights or moments of that range"),
    PrivateName("ds_id", "parameter", (3,), _PARTITIONS, "marks a partitioned parameter"),
    PrivateName("ds_tensor", "parameter", (3,), _PARTITIONS, "this rank's padded part of a parameter"),
    PrivateName("ds_shape", "parameter", (3,), _PARTITIONS, "shape of the whole parameter"),
    PrivateName("ds_numel", "parameter", (3,), _PARTITIONS, "elements of the whole parameter"),
)


def check_private_names(zero_optimizer: Any, trained: Sequence[Any], stage: int) -> None:
    """See that DeepSpeed has all names of the table before a run relies on them.

    Args:
        zero_optimizer: DeepSpeed's optimizer of that ZeRO stage.
        trained: the trained parameters, prepared by DeepSpeed.

    Raises:
        StageError: a name is gone.
    """
    links = [getattr(parameter, "_hp_mapping", None) for parameter in trained]
    owners = {
        "optimizer": [zero_optimizer],
        "parameter": trained,
        "fragment": [link for link in links if link is not None],
    }
    needed = [entry for entry in PRIVATE_NAMES if stage in entry.stages]
    gone = [
        f"{entry.name} ({entry.purpose})"
        for entry in needed
        if not all(hasattr(owner, entry.name) for owner in owners[entry.owner])
    ]
    if gone:
        raise StageError(
            f"DeepSpeed {version('deepspeed')} lacks what zero{stage} needs: {', '.join(gone)}",
            f"install deepspeed=={READ_IN_VERSION}, or set strategy to fsdp2",
        )


def leave_out_compiled_sums() -> None:
    """Have sums between CPU processes of one machine made by gloo.

    DeepSpeed would compile a kernel for them at its first use: a minute, and an error where no compiler is installed.
    """
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def flat_fp32_weights(zero_optimizer: Any, stage: int) -> list[Tensor]:
    """This rank's fp32 weights: one flat tensor for each group of parameters (ZeRO 2) or sub-group (ZeRO 3)."""
    flat: list[Tensor] = (
        zero_optimizer.single_partition_of_fp32_groups
        if stage == 2
        else zero_optimizer.fp32_partitioned_groups_flat
    )
    return flat


def optimizer_states(zero_optimizer: Any) -> dict[Tensor, dict[str, Tensor]]:
    """States of the torch optimizer inside DeepSpeed's, by the flat fp32 weights that they belong to."""
    states: dict[Tensor, dict[str, Tensor]] = zero_optimizer.optimizer.state
    return states


def link_states(zero_optimizer: Any) -> None:
    """Link the states in `optimizer_states` to the parameters (ZeRO 2)."""
    zero_optimizer._lazy_init_hp_params_optimizer_state()


def loss_scale(zero_optimizer: Any) -> float:
    """The factor on the loss in fp16."""
    return float(zero_optimizer.loss_scale)


def set_loss_scale(zero_optimizer: Any, scale: float) -> None:
    """Put a saved loss scale back in place."""
    zero_optimizer.loss_scale = scale


def is_partitioned(tensor: Tensor) -> bool:
    """Whether each rank holds a part of the parameter alone (ZeRO 3)."""
    return hasattr(tensor, "ds_id")


def num_elements(parameter: Tensor) -> int:
    """Elements of the whole parameter: under ZeRO 3, an empty tensor stands in its place between steps."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def partition_size(parameter: Any) -> int:
    """Elements of a partitioned parameter (ZeRO 3) on each rank, padding included."""
    return int(parameter.ds_tensor.numel())


def frozen_piece(parameter: Any, rank: int) -> Piece:
    """This rank's piece of a partitioned parameter (ZeRO 3) that is not trained."""
    return padded_piece(tuple(parameter.ds_shape), parameter.ds_tensor.detach(), rank)


def fp32_piece(parameter: Any, stage: int, rank: int, moment: str | None = None) -> Piece:
    """This rank's piece of a trained parameter's fp32 weights, or of one of its moments, by Adam's name for it."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    if stage == 3:
        rank_values = (
            safe_get_local_optimizer_state(parameter, moment)
            if moment
            else safe_get_local_fp32_param(parameter)
        )
        return padded_piece(tuple(parameter.ds_shape), rank_values.detach(), rank)
    shape, fragment = tuple(parameter.shape), parameter._hp_mapping
    if fragment is None:  # all of it is on other ranks
        return Piece(shape, 0, parameter.detach().new_empty(0).float())
    return Piece(shape, fragment.lp_fragment_address.start, fragment.get_hp_fragment(moment).detach())
