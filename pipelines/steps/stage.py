"""What stages that are chains of steps share in their runs: errors, what they do without, and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError, StageError
from audiollm.recipe.runner import Context
from pipelines.execution.engine import EngineError, RunHalted
from pipelines.execution.ledger import Ledger, LedgerError
from pipelines.steps.chain import Missing
from pipelines.steps.driving import call_each
from pipelines.steps.settings import StepsConfig


@contextmanager
def as_stage_errors(stage: str, next_run: str, *unusable: type[Exception]) -> Iterator[None]:
    """Errors of a run as those that a person reads.

    Args:
        next_run: what to do after a run that was halted.
        unusable: errors of inputs, with exit code 2.

    Raises:
        StageError: in place of each.
    """
    try:
        yield
    except unusable as error:
        raise StageError(f"{stage}: {error}", exit_code=2) from None
    except RunHalted as halt:
        remedy = f"all that was measured and answered is kept: {next_run}"
        raise StageError(f"{stage} stopped: {halt}", remedy) from None
    except EngineError as error:
        raise StageError(f"{stage}: {error}", "audiollm doctor says what is missing") from None
    except LedgerError as error:
        raise StageError(f"{stage}: {error}") from None


def refuse_missing(config: StepsConfig, lacking: Sequence[Missing]) -> None:
    """
    Raises:
        StageError: something is missing, and the settings do not say to go on without.
    """
    if lacking and config.missing_scorer == "fail":
        listed = "\n".join(f"  {missing_step.reason}" for missing_step in lacking)
        raise StageError(
            f"{config.catalog.stage}: the preset {config.preset} needs what is not here:\n{listed}",
            "or go on without: missing_scorer=skip (the report will say which thresholds were not applied)",
            exit_code=2,
        )


def plan_missing(config: StepsConfig, reasons: Sequence[str]) -> list[str]:
    """Notes of a plan on what the run will do without.

    Raises:
        ConfigError: something is missing, and the settings do not say to go on without.
    """
    stage = config.catalog.stage
    if reasons and config.missing_scorer == "fail":
        raise ConfigError(
            f"{stage}: the preset {config.preset} needs what is not here: {'; '.join(reasons)}",
            "",
            f"give it, or set {stage}.missing_scorer=skip to go on without",
        )
    return [f"without: {reason}" for reason in reasons]


def go_on_without(lacking: Sequence[Missing], context: Context) -> tuple[set[str], dict[str, None]]:
    """Say what is missing; returns the steps that cannot run, and the thresholds that cannot be applied, as null."""
    for lack in lacking:
        context.say(f"going on without: {lack.reason}")
    without = {missing_step.step for missing_step in lacking if missing_step.blocks_step}
    return without, {rule.threshold: None for missing_step in lacking for rule in missing_step.rules}


def request_report(
    write: Callable[[Path], object], config: StepsConfig, context: Context, ledger: Ledger
) -> None:
    """Have one of the workers write `report.html`.

    Args:
        write: given the folder; a worker calls it.

    Raises:
        StageError: it cannot be written.
    """
    function = partial(_write_report, write=write)
    (outcome,) = call_each("report", function, [context.folder], config.num_workers, ledger)
    if outcome.value is None:
        page = context.folder / "report.html"
        remedy = "all other results are written: correct the problem and run again to make the report alone"
        raise StageError(f"{config.catalog.stage}: {page}: {outcome.error}", remedy)


def _write_report(folder: Path, write: Callable[[Path], object]) -> dict[str, Any]:
    return {"page": str(write(folder))}
