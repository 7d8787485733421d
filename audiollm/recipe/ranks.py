"""The place of a process among those of a run, sums over all of them, and how they are started.

The processes ("ranks") meet in `join_ranks`: each was started by `audiollm run ... --launch N`, by torchrun, or by
SLURM's srun. Without any of these a process is `ALONE`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is loaded when there are several ranks: `audiollm plan` does without
    from torch import Tensor

PATIENCE = timedelta(days=30)
"""How long the others wait while the first rank does the stages that do not train."""


@dataclass(frozen=True)
class Ranks:
    """This process among all that train together."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Among those of this machine: the number of its GPU."""
    patient: Any = None
    """A process group on CPU whose operations may last as long as `PATIENCE`."""

    @property
    def first(self) -> bool:
        """Writes files and speaks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on every rank; all must call it, with the same shape. No gradient."""
        if self.world == 1:
            return tensor
        from torch import distributed

        total = tensor.detach().clone()
        distributed.all_reduce(total)
        return total

    def mean(self, figures: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Each figure's mean over the ranks that have it, on every rank; all must call it."""
        local_figures = {key: float(value) for key, value in figures.items()}
        if self.world == 1:
            return local_figures
        rows = self.gather(local_figures)
        keys = list(dict.fromkeys(key for row in rows for key in row))
        rank_values = {key: [row[key] for row in rows if key in row] for key in keys}
        return {key: sum(values) / len(values) for key, values in rank_values.items()}

    def gather(self, value: Any) -> list[Any]:
        """Collect the values of all ranks (plain data), in their order, on every rank."""
        if self.world == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.patient)
        return values

    def of_first(self, value: Any) -> Any:
        """Send the first rank's value (plain data) to every rank; the others wait for it, however long."""
        if self.world == 1:
            return value
        from torch import distributed

        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self.patient)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            from torch import distributed

            distributed.barrier(group=self.patient)


ALONE = Ranks()
"""A process that trains by itself."""


def rank_environment(environment: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of this process, or None where it is alone.

    torchrun sets them. Below srun they follow from SLURM's own (a batch script's own process, which srun did
    not start, is alone).

    Raises:
        ValueError: some are there and some are missing.
    """
    if "WORLD_SIZE" in environment and "RANK" in environment:
        if int(environment["WORLD_SIZE"]) == 1:
            return None
        variables = {"LOCAL_RANK": environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID", "")}
        variables |= {
            key: environment.get(key, "") for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        if missing := sorted(key for key, value in variables.items() if not value):
            raise ValueError(f"RANK and WORLD_SIZE are set, {', '.join(missing)} not: start it with torchrun")
        return variables
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return None
    job = int(environment["SLURM_JOB_ID"])
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20_000 + job % 20_000),
    }


def first_host(nodes: str) -> str:
    """The first of SLURM's compact list: `gpu[03-07,12],login` is `gpu03` and others."""
    begin = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if begin is None:
        raise ValueError(f"SLURM_STEP_NODELIST is no list of hosts: {nodes!r}")
    return begin[1] + (begin[2] or "")


def join_ranks() -> Ranks:
    """Meet the other processes of this run; without any, `ALONE` at once.

    With GPUs, each rank takes the one of its `local_rank`.

    Raises:
        ValueError: the environment is not whole, or this machine has fewer GPUs than ranks.
    """
    variables = rank_environment(os.environ)
    if variables is None:
        return ALONE
    import torch
    from torch import distributed

    os.environ.update(variables)
    local_rank = int(variables["LOCAL_RANK"])
    backend = "gloo"
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"rank {local_rank} of this machine has no GPU: it has {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    if not distributed.is_initialized():
        distributed.init_process_group(backend)
    patient = distributed.new_group(backend="gloo", timeout=PATIENCE)
    return Ranks(distributed.get_rank(), distributed.get_world_size(), local_rank, patient)


def leave(ranks: Ranks) -> None:
    """The end of `join_ranks`, when all went well."""
    if ranks.world > 1:
        from torch import distributed

        ranks.barrier()
        distributed.destroy_process_group()


def launch(processes: int, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments` in that many processes of this machine, by torch's elastic launcher.

    One that fails ends the others.

    Returns:
        The exit code: 0, or that of the process that failed first (it has told why).
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="audiollm",
        max_restarts=0,
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        code = int(error.get_first_failure()[1].exitcode)
        return code if code > 0 else 128 - code
    return 0
