"""The private names of DeepSpeed that ZeRO training uses, in one table, and the check that they exist."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from audiollm.errors import StageError

READ_IN_VERSION = "0.19.8"
"""DeepSpeed version whose source the table below was read in."""


@dataclass(frozen=True)
class PrivateName:
    """One private attribute of DeepSpeed's ZeRO optimizer."""

    name: str
    stages: tuple[int, ...]
    purpose: str


PRIVATE_NAMES = (
    PrivateName("optimizer", (2, 3), "the torch optimizer that updates the flat parts"),
    PrivateName("single_partition_of_fp32_groups", (2,), "this rank's flat fp32 weights, one per group"),
    PrivateName("fp32_partitioned_groups_flat", (3,), "this rank's flat fp32 weights, one per sub-group"),
    PrivateName("_lazy_init_hp_params_optimizer_state", (2,), "links optimizer states to their parameters"),
    PrivateName("loss_scaler", (2, 3), "holds the fp16 loss scale"),
)


def check_private_names(zero_optimizer: Any, stage: int) -> None:
    """Raises: StageError: this DeepSpeed's optimizer of that ZeRO stage lacks a private name of the table."""
    needed = [entry for entry in PRIVATE_NAMES if stage in entry.stages]
    gone = [f"{entry.name} ({entry.purpose})" for entry in needed if not hasattr(zero_optimizer, entry.name)]
    if gone:
        raise StageError(
            f"DeepSpeed {version('deepspeed')} lacks what zero{stage} needs: {', '.join(gone)}",
            f"install deepspeed=={READ_IN_VERSION}, or set strategy to fsdp2",
        )
