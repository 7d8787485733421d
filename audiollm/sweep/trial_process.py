"""The process of one run of a sweep: it ends with the sweep, and writes how the run ended."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import write_json
from audiollm.hub_models.folders import allow_downloads
from audiollm.processes import end_with_parent
from audiollm.recipe.runner import read_result, run_recipe
from audiollm.sweep.trial_recipes import Donor, load_shared, of_stages, upstream_closure


@dataclass(frozen=True)
class RunOrder:
    """A run of the recipe, as its process is told."""

    path: str
    """The recipe's file."""
    overrides: list[str]
    folder: str
    root: str
    """See `SharedStages.root`."""
    donors: dict[str, list[str]]
    """Finished stages of other runs: folder and fingerprint by name."""
    stages: list[str]
    """Stages to run, after those that they depend on."""
    outcome: str
    """File that receives `state` and `error` at the end."""
    download: bool = False

    @classmethod
    def read(cls, text: str) -> RunOrder:
        return cls(**json.loads(text))

    def text(self) -> str:
        return json.dumps(asdict(self))


def run_order(order: RunOrder, console: Console) -> None:
    """Run the stages.

    Raises:
        ConfigError, StageError: from the recipe or from a stage; a shared stage that has not finished.
    """
    allow_downloads(order.download)
    donors = {name: Donor(Path(folder), print) for name, (folder, print) in order.donors.items()}
    folder = Path(order.folder)
    recipe, _ = load_shared(Path(order.path), order.overrides, folder, donors, Path(order.root))
    names = upstream_closure(recipe, order.stages)
    for name, donor in donors.items():
        result = read_result(donor.folder) if name in names else None
        if name in names and (
            result is None or (result.state, result.fingerprint) != ("done", donor.fingerprint)
        ):
            raise StageError(f"{donor.folder}: this shared stage is gone or changed", "begin the sweep again")
    run_recipe(of_stages(recipe, names), console)


def run_ordered() -> None:
    """Carry out the order in the first argument; the second is the id of the sweep's process."""
    end_with_parent()
    if os.getppid() != int(sys.argv[2]):  # it ended before this process could ask to end with it
        os._exit(1)
    order = RunOrder.read(sys.argv[1])
    outcome: dict[str, Any] = {"state": "done", "error": ""}
    try:
        run_order(order, Console(soft_wrap=not sys.stdout.isatty()))
    except (ConfigError, StageError) as error:
        outcome = {"state": "failed", "error": str(error)}
    except MemoryError as error:
        outcome = {"state": "failed", "error": f"out of memory: {error}"}
    write_json(Path(order.outcome), outcome)
    sys.exit(outcome["state"] != "done")


if __name__ == "__main__":
    run_ordered()
