"""A sweep from its first trial to its page: trials, further seeds, the final run. It can be killed at any moment."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from audiollm.errors import ConfigError, StageError
from audiollm.progress import ProgressLog
from audiollm.recipe.runner import read_result
from audiollm.sweep.figures import Figure, are_finite, evaluations, read_figure, scalar_figures
from audiollm.sweep.ledger import STAGES, SweepLedger, Trial
from audiollm.sweep.study import Pruning, Sampler, SweepStudy, front
from audiollm.sweep.trial_process import RunOrder
from audiollm.sweep.trial_recipes import Donors, SweepRecipes
from audiollm.sweep.workers import POLL_SECONDS, ActiveRun, RunEnd, RunProcess, work

LEDGER, LOG, OUTCOME = "ledger.jsonl", "log.txt", "outcome.json"
LOCK_SECONDS = 10.0
"""Longest wait for the processes of a sweep that was killed."""
PAGE_SECONDS = 60.0
"""Shortest time between two pages of a sweep that goes on."""
MAX_FIRST_FAILURES = 3
"""Failed trials after which a sweep without a success ends."""


@dataclass(frozen=True)
class SweepOptions:
    """What a sweep does, beside its recipes. The first five belong to its identity: with others it is another sweep."""

    figures: tuple[Figure, ...]
    sampler: Sampler = "tpe"
    pruning: Pruning = "none"
    prune_by: Figure | None = None
    """The evaluations that pruning looks at; None without pruning."""
    seed: int = 0
    trials: int | None = None
    cpu_minutes: float | None = None
    """CPU time of all trials together after which none begins."""
    workers: int = 1
    confirm: int = 0
    """Runs of the winner with further seeds."""
    pick: int | None = None
    """The winner's number; None: the best."""
    final_stages: tuple[str, ...] = ()
    final_overrides: tuple[str, ...] = ()
    retry_failed: bool = False
    download: bool = False

    @property
    def targets(self) -> list[str]:
        """Stages of which the sweep reads a figure, in each trial."""
        listed = (*self.figures, *([self.prune_by] if self.prune_by else []))
        return sorted({figure.stage for figure in listed})

    @property
    def has_final(self) -> bool:
        """Whether the winner is run for figures that no trial has."""
        return bool(self.final_stages or self.final_overrides)


@dataclass
class Sweep:
    """A sweep in its folder.

    Args:
        recipes: of its runs.
        options: what it does.
        console: receives a line for each trial.
        write_page: writes the page of what is done so far.
    """

    recipes: SweepRecipes
    options: SweepOptions
    console: Console
    write_page: Callable[[Sweep], Path]
    ledger: SweepLedger = field(init=False)
    study: SweepStudy = field(init=False)
    _lock: int = field(init=False, default=-1)
    _page_time: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.ledger = SweepLedger(self.recipes.folder / LEDGER)
        self.study = self._new_study()

    # ------------------------------------------------------------------------------------- its phases

    def run(self) -> Path:
        """Do all that is not done.

        Returns:
            The page.

        Raises:
            ConfigError: another sweep is in this folder, or the final run was done and the command wants more trials.
            StageError: from a shared stage; no trial succeeds; a figure is none of its stage's.
        """
        self._page_time = time.monotonic()
        with self._locked():
            self.ledger = SweepLedger(self.recipes.folder / LEDGER)
            self.ledger.begin(self._header())
            self._refuse_after_final()
            self._run_shared()
            if self.options.retry_failed:
                for trial in self.ledger.record.in_state("failed"):
                    self.ledger.write("retry", trial=trial.number)
            self.study = self._new_study()
            self.study.replay(self.ledger.record, self.ledger.events, self.options.prune_by)
            try:
                self._search()
                self._refuse_pick()
                if self.winner is not None:
                    self._confirm(self.winner)
                    self._score(self.winner)
            finally:
                page = self.write_page(self)
        return page

    @property
    def front(self) -> list[Trial]:
        """The best trials so far; of a single figure there is at most one."""
        return front(list(self.ledger.record.trials.values()), self.options.figures)

    @property
    def winner(self) -> Trial | None:
        """The trial that is confirmed and scored: the picked one, or the best by a single figure."""
        if self.options.pick is not None:
            return self.ledger.record.trials.get(self.options.pick)
        best = self.front
        return best[0] if len(self.options.figures) == 1 and best else None

    def confirmation_seeds(self) -> list[int]:
        """Seeds of the confirmations."""
        return [self.recipes.base.seed + index for index in range(1, self.options.confirm + 1)]

    def final_targets(self) -> list[str]:
        """Stages whose figures the final run is for."""
        if self.options.final_stages:
            return list(self.options.final_stages)
        return self.options.targets

    # ------------------------------------------------------------------------------------ preparations

    def _header(self) -> dict[str, Any]:
        options = self.options
        return {
            "spaces": {space.key: space.text for space in self.recipes.spaces},
            "fixed": list(self.recipes.fixed),
            "figures": {
                str(figure): "max" if figure.is_larger_better else "min" for figure in options.figures
            },
            "sampler": options.sampler,
            "prune": options.pruning,
            "prune_by": str(options.prune_by or ""),
            "seed": options.seed,
            STAGES: dict(self.recipes.prints),
        }

    def _new_study(self) -> SweepStudy:
        options = self.options
        return SweepStudy(
            self.recipes.spaces, options.figures, options.sampler, options.pruning, options.seed
        )

    def _refuse_after_final(self) -> None:
        """
        Raises:
            ConfigError: the final figures are there, and the command would choose again knowing them.
        """
        record, where = self.ledger.record, str(self.ledger.path)
        if record.final is None:
            return
        number = record.final["trial"]
        remedy = "--sweep-name begins another sweep beside it"
        if self.options.pick not in (None, number):
            raise ConfigError(f"--pick: trial {number} has been scored, and no other is to be", where, remedy)
        if self._next_number() is not None or record.in_state("running") or self.options.retry_failed:
            problem = (
                f"trial {number} has been scored by --final: trials that come later would be chosen by it"
            )
            raise ConfigError(problem, where, remedy)
        now = (list(self.options.final_overrides), self.final_targets())
        if self.options.has_final and now != (record.final["overrides"], list(record.final["figures"])):
            raise ConfigError("--final: the final run was another one, and is not repeated", where, remedy)

    def _refuse_pick(self) -> None:
        """
        Raises:
            ConfigError: the picked trial has no figures.
        """
        if self.options.pick is not None and (self.winner is None or self.winner.state != "done"):
            numbers = ", ".join(str(trial.number) for trial in self.ledger.record.in_state("done"))
            raise ConfigError(
                f"--pick: no finished trial {self.options.pick}", "command line", f"done: {numbers}"
            )

    def _run_shared(self) -> None:
        """Run the shared stages, in a process that shows its progress as `audiollm run` does."""
        recipes = self.recipes
        if not recipes.shared:
            return
        if all(_is_finished(donor.folder, donor.fingerprint) for donor in recipes.shared.values()):
            self._say(f"shared stages: done before ({', '.join(recipes.shared)})")
            return
        self._say(f"shared stages, in {recipes.base.folder}:")
        overrides = recipes.overrides({space.key: space.probes()[0] for space in recipes.spaces})
        outcome = recipes.folder / "shared.json"
        outcome.parent.mkdir(parents=True, exist_ok=True)
        order = self._order(recipes.base.folder, overrides, {}, list(recipes.shared), outcome)
        process = RunProcess(order, 0, 1, None, self._lock)
        try:
            end = process.wait()
        finally:
            process.kill()
        if end.error:
            raise StageError(f"a shared stage failed: {end.error}", "the same command goes on from here")

    def _order(
        self, folder: Path, overrides: Sequence[str], donors: Donors, stages: Sequence[str], outcome: Path
    ) -> RunOrder:
        named_donors = {name: [str(donor.folder), donor.fingerprint] for name, donor in donors.items()}
        root, path = str(self.recipes.root), str(self.recipes.path)
        return RunOrder(
            path,
            list(overrides),
            str(folder),
            root,
            named_donors,
            list(stages),
            str(outcome),
            self.options.download,
        )

    # ------------------------------------------------------------------------------------------ trials

    def _search(self) -> None:
        """Run trials until the budget is spent."""
        pending = [trial.number for trial in self.ledger.record.in_state("running")]

        def start(slot: int) -> ActiveRun | None:
            number = pending.pop(0) if pending else self._next_number()
            if number is None:
                return None
            if changed := self.recipes.changed_stages():
                problem = f"{', '.join(changed)}: settings, inputs or source changed while the sweep ran"
                raise StageError(problem, "--sweep-name begins another sweep beside it")
            if number not in self.ledger.record.trials:
                self.ledger.write("begin", trial=number, parameters=self.study.propose(number))
            return self._start_trial(number, slot)

        ended = len(self.ledger.record.in_state("done", "pruned", "failed"))
        self._work(start, "trials", self._trial_limit(), ended)

    def _next_number(self) -> int | None:
        """The number of the next new trial; None: the budget is spent."""
        number, limit = len(self.ledger.record.trials), self._trial_limit()
        if limit is not None and number >= limit:
            return None
        minutes = self.options.cpu_minutes
        if minutes is not None and self.ledger.record.cpu_seconds >= 60 * minutes:
            return None
        return number

    def _trial_limit(self) -> int | None:
        if self.options.sampler == "grid":
            size = self.study.grid_size
            return size if self.options.trials is None else min(size, self.options.trials)
        return self.options.trials

    def _start_trial(self, number: int, slot: int) -> ActiveRun:
        trial, recipes = self.ledger.record.trials[number], self.recipes
        folder = recipes.folder / trial_name(number)
        overrides = recipes.overrides(trial.parameters)
        order = self._order(folder, overrides, recipes.shared, self.options.targets, folder / OUTCOME)
        return ActiveRun(
            RunProcess(order, slot, self.options.workers, folder / LOG, self._lock),
            lambda end: self._end_trial(number, folder, end),
            lambda: self._cut_trial(number, folder),
        )

    def _evaluations(self, folder: Path) -> list[tuple[int, float]]:
        prune_by = self.options.prune_by
        return [] if prune_by is None else evaluations(prune_by, folder / prune_by.stage)

    def _cut_trial(self, number: int, folder: Path) -> bool:
        """Show new evaluations to the pruner; where it says so, write that the trial is pruned."""
        prune_by, rows = self.options.prune_by, self._evaluations(folder)
        if prune_by is None or not rows:
            return False
        count = self.study.report(number, [value for _, value in rows], prune_by)
        if count is not None:
            self._write_end(number, "pruned", folder, rows[:count])
        return count is not None

    def _end_trial(self, number: int, folder: Path, end: RunEnd) -> None:
        if not end.error and self._cut_trial(number, folder):
            return  # it was faster than the look at its evaluations
        rows = self._evaluations(folder)
        if end.error:
            self._write_end(number, "failed", folder, rows, error=end.error)
            self._refuse_without_success()
            return
        figures = self._figures_in(folder)
        if are_finite(figures):
            self._write_end(number, "done", folder, rows, figures)
            return
        self._write_end(number, "failed", folder, rows, error=f"not a number: {_listed(figures)}")
        self._refuse_without_success()

    def _write_end(
        self,
        number: int,
        state: str,
        folder: Path,
        rows: Sequence[tuple[int, float]],
        figures: dict[str, float] | None = None,
        error: str = "",
    ) -> None:
        seconds, cpu_seconds = _time_of(folder)
        self.ledger.write(
            "end",
            trial=number,
            state=state,
            figures=figures or {},
            evaluations=[list(row) for row in rows],
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            error=error,
        )
        trial = self.ledger.record.trials[number]
        self.study.end(trial)
        self._say(self._trial_line(trial))
        if time.monotonic() - self._page_time > PAGE_SECONDS:
            self.write_page(self)
            self._page_time = time.monotonic()

    def _trial_line(self, trial: Trial) -> str:
        values = " ".join(space.override(trial.parameters[space.key]) for space in self.recipes.spaces)
        if trial.state == "done":
            is_best = any(best.number == trial.number for best in self.front)
            mark = " (best so far)" if is_best else ""
            return f"trial {trial.number}: {_listed(trial.figures)}{mark}  {values}"
        reason = f": {trial.error.splitlines()[0]}" if trial.error else ""
        return f"trial {trial.number}: {trial.state}{reason}  {values}"

    def _refuse_without_success(self) -> None:
        """
        Raises:
            StageError: the first trials have all failed.
        """
        record = self.ledger.record
        failed = record.in_state("failed")
        if len(failed) >= MAX_FIRST_FAILURES and not record.in_state("done", "pruned"):
            problem = f"the first {len(failed)} trials failed; the last: {failed[-1].error}"
            log = self.recipes.folder / trial_name(failed[-1].number) / LOG
            raise StageError(problem, f"see {log}; once it is mended, --retry-failed runs them again")

    # --------------------------------------------------------------------------- confirmations, final

    def _confirm(self, winner: Trial) -> None:
        """Run the winner with further seeds of the stages that the trials run."""
        done = self.ledger.record.confirmations.get(winner.number, {})
        seeds = [seed for seed in self.confirmation_seeds() if seed not in done]

        def start(slot: int) -> ActiveRun | None:
            if not seeds:
                return None
            seed = seeds.pop(0)
            folder = self.recipes.folder / f"confirm_{winner.number:04d}_{seed}"
            extra = [f"{stage}.seed={seed}" for stage in self.recipes.seeded_stages()]
            overrides = self.recipes.overrides(winner.parameters, extra)
            targets = self.options.targets
            order = self._order(folder, overrides, self.recipes.shared, targets, folder / OUTCOME)

            def conclude(end: RunEnd) -> None:
                figures = {} if end.error else self._figures_in(folder)
                values = {"trial": winner.number, "seed": seed, "figures": figures, "error": end.error}
                self.ledger.write("confirmation", **values)
                self._say(f"trial {winner.number}, seed {seed}: {end.error or _listed(figures)}")

            process = RunProcess(order, slot, self.options.workers, folder / LOG, self._lock)
            return ActiveRun(process, conclude)

        if seeds:
            self._work(start, "further seeds", len(seeds))

    def _figures_in(self, folder: Path) -> dict[str, float]:
        return {str(figure): read_figure(figure, folder / figure.stage) for figure in self.options.figures}

    def _score(self, winner: Trial) -> None:
        """Run the final stages for the winner alone, on the stages of its trial."""
        if not self.options.has_final or self.ledger.record.final is not None:
            return
        recipes, targets = self.recipes, self.final_targets()
        donors = recipes.donors_of(trial_name(winner.number), winner.parameters)
        folder = recipes.folder / "final"
        overrides = recipes.overrides(winner.parameters, self.options.final_overrides)
        order = self._order(folder, overrides, donors, targets, folder / OUTCOME)

        def conclude(end: RunEnd) -> None:
            if end.error:
                raise StageError(f"the final run failed: {end.error}", f"see {folder / LOG}")
            figures = {stage: _figures_of(folder / stage) for stage in targets}
            values = {"trial": winner.number, "overrides": list(self.options.final_overrides)}
            self.ledger.write("final", **values, figures=figures)

        waiting = [order]

        def start(slot: int) -> ActiveRun | None:
            if not waiting:
                return None
            process = RunProcess(waiting.pop(), slot, self.options.workers, folder / LOG, self._lock)
            return ActiveRun(process, conclude)

        self._work(start, f"final run of trial {winner.number}", 1)

    # ----------------------------------------------------------------------------------------- helpers

    def _work(
        self, start: Callable[[int], ActiveRun | None], description: str, total: int | None, done: int = 0
    ) -> None:
        """Keep the workers busy below a bar of progress."""
        with (
            ProgressLog(self.console, description) as log,
            log.bar(description, total, unit="run", completed=done) as progress,
        ):
            work(start, self.options.workers, lambda: progress.advance(progress.task_ids[0]))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One sweep a folder. The lock is held by the workers, too: those of a killed sweep have to end first."""
        folder = self.recipes.folder
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as file:
            deadline = time.monotonic() + LOCK_SECONDS
            while not _is_locked(file.fileno()):
                if time.monotonic() > deadline:
                    raise ConfigError("another process runs this sweep", str(folder), "wait for it")
                time.sleep(POLL_SECONDS)
            self._lock = file.fileno()
            yield

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        sys.stdout.flush()


def trial_name(number: int) -> str:
    """The folder of a trial in that of its sweep."""
    return f"trial_{number:04d}"


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_finished(folder: Path, fingerprint: str) -> bool:
    result = read_result(folder)
    return result is not None and (result.state, result.fingerprint) == ("done", fingerprint)


def _time_of(folder: Path) -> tuple[float, float]:
    """Seconds and CPU-seconds of the stages in a run's folder."""
    results = [result for path in folder.glob("*/stage.json") if (result := read_result(path.parent))]
    return sum(result.seconds for result in results), sum(result.cpu_seconds for result in results)


def _figures_of(folder: Path) -> dict[str, float]:
    result = read_result(folder)
    return dict(scalar_figures(result.figures)) if result else {}


def _listed(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.5g}" for name, value in figures.items())
