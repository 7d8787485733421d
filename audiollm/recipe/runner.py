"""Runs a recipe's stages: skips what is done, resumes what was cut short, meters time and memory.

A run's folder: `runs/<name>/<stage>/` with `stage.json` (fingerprint, state, figures), `config.yaml` and what
the stage itself writes. A stage whose fingerprint changed begins with an empty folder; where the one before had
begun to train, it is kept as `<stage>.before`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil
import yaml
from rich.console import Console
from rich.progress import Progress

from audiollm.errors import ConfigError, StageError, suggestion
from audiollm.failures import watched_failures
from audiollm.files.atomic import DamagedFile, read_json, write_json
from audiollm.files.disk_errors import disk_error
from audiollm.processes import available_cpus
from audiollm.progress import ProgressLog, progress_bar
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.stages import Recipe, RecipeStage

Item = TypeVar("Item")

GRACE_SECONDS = 20.0
"""Seconds that the first rank has to write its report when the other ranks have failed as well."""


@dataclass(frozen=True)
class StageResult:
    """The record of a stage that has run or failed: the content of its `stage.json`."""

    name: str
    kind: str
    fingerprint: str
    state: str
    settings: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of the process and its children."""
    peak_memory_mb: float = 0.0
    error: str = ""
    hub_models: list[str] = field(default_factory=list)
    """Models of the hub that it read, `ORGANIZATION/MODEL@COMMIT`."""


@dataclass(frozen=True)
class Context:
    """The surroundings of a running stage: its folder, recipe, console, earlier results and ranks."""

    folder: Path
    recipe: Recipe
    console: Console
    results: Mapping[str, StageResult]
    ranks: Ranks = ALONE
    """The ranks of the run. A stage that does not declare `all_ranks` runs on one, however many the run has."""
    log: ProgressLog | None = None
    """Says now and then how the stage goes on, where the console is no terminal."""

    @contextmanager
    def progress(self, description: str, total: float | None, **options: Any) -> Iterator[Progress]:
        """A progress bar with one task; call `.advance(task_id=0)` or `.update(0, completed=n)`.

        Args:
            total: None: not known.
            options: of `ProgressLog.bar`.
        """
        bar = self.log.bar if self.log else partial(progress_bar, self.console)
        with bar(description, total, **options) as progress:
            yield progress

    def say(self, text: str) -> None:
        self.console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)


def run_recipe(
    recipe: Recipe,
    console: Console,
    start: str | None = None,
    only: str | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Run all stages that are not done.

    On several ranks the first one does all this and calls the others to the stages that train.

    Args:
        start: run this stage and all after it even if they are done (`--from`).
        only: run this stage alone; what it reads must be there.

    Raises:
        ConfigError: an unknown stage name, or another process at work in the same run folder.
        StageError, ConfigError: from a stage; the report has been written where the recipe has one.
    """
    names = [stage.name for stage in recipe.stages]
    for option, stage_name in (("--from", start), ("--only", only)):
        if stage_name is not None and stage_name not in names:
            raise ConfigError(
                f"{stage_name}: this recipe has no such stage", option, suggestion(stage_name, names)
            )
    if not ranks.first:
        _follow(recipe, console, ranks)
        return
    if only is None:
        _refuse_in_vain(recipe)
    recipe.folder.mkdir(parents=True, exist_ok=True)
    with _locked(recipe.folder):
        _run_stages(recipe, console, start, only, ranks)
    ranks.of_first(None)  # no more to come


def read_result(folder: Path) -> StageResult | None:
    """The stage result kept in `folder`, if any.

    Raises:
        DamagedFile: `stage.json` does not hold one.
    """
    path = folder / "stage.json"
    try:
        result = StageResult(**read_json(path))
    except FileNotFoundError:
        return None
    except TypeError:
        raise DamagedFile(path, "it holds no result of a stage") from None
    if not isinstance(result.figures, dict) or not all(
        isinstance(value, (int, float))
        for value in (result.seconds, result.cpu_seconds, result.peak_memory_mb)
    ):
        raise DamagedFile(path, "it holds no result of a stage")
    return result


def _follow(recipe: Recipe, console: Console, ranks: Ranks) -> None:
    """Run on the ranks after the first: carry out the stages that train, when the first rank asks for them."""
    while (name := ranks.of_first(None)) is not None:
        stage = next(stage for stage in recipe.stages if stage.name == name)
        try:
            with _plain_errors(stage.folder):
                stage.stage.run(stage.config, Context(stage.folder, recipe, console, {}, ranks))
        except (StageError, ConfigError):
            time.sleep(GRACE_SECONDS)  # most likely all ranks met it; the first one is to tell, and to report
            raise


def _refuse_in_vain(recipe: Recipe) -> None:
    """Ask the stages that read what is not there yet whether they must refuse it: the work before them may be long.

    Raises:
        ConfigError: from the first that must.
    """
    by_name = {stage.name: stage for stage in recipe.stages}
    for stage in recipe.stages:
        sources = [by_name[name] for name in stage.upstream]
        if stage.stage.refuse is None or any(source.folder.exists() for source in sources):
            continue
        plans = {source.name: source.stage.plan(source.config, {}) for source in sources if source.stage.plan}
        stage.stage.refuse(stage.config, plans)


def _run_stages(recipe: Recipe, console: Console, start: str | None, only: str | None, ranks: Ranks) -> None:
    fingerprints: dict[str, str] = {}
    results: dict[str, StageResult] = {}
    forced = False
    for index, stage in enumerate(recipe.stages):
        fingerprints[stage.name] = fingerprint = stage.fingerprint(fingerprints)
        forced = forced or stage.name == start
        title = f"[{index + 1}/{len(recipe.stages)}] {stage.name}"
        _drop_damaged_result(stage, console)
        done = _is_done(stage, fingerprint)
        if only is not None and stage.name != only:
            if done:
                results[stage.name] = done
            continue
        if done and not forced and only is None:
            results[stage.name] = done
            console.print(f"[dim]{title}: done before ({done.seconds:.0f} s)[/dim]", highlight=False)
            continue
        if forced or (only and done):
            _empty(stage.folder, stage.stage.by_hand)
        _require_upstream(stage, results)
        console.print(f"[bold]{title}[/bold]: {stage.stage.help}", highlight=False)
        try:
            shared = ranks if stage.stage.all_ranks else ALONE
            context = Context(stage.folder, recipe, console, results, shared)
            with _plain_errors(stage.folder), _threads_of_waiting(ranks if shared is ALONE else ALONE):
                results[stage.name] = _run_stage(stage, fingerprint, context)
        except (StageError, ConfigError):
            _report_failure(recipe, stage, console, results)
            raise


def _threads_of_waiting(ranks: Ranks) -> AbstractContextManager[None]:
    """Let a stage of one rank use the CPUs of the others, which wait."""
    if ranks.world == 1:
        return nullcontext()
    from audiollm.devices import at_least_threads  # a run of one rank may need no torch

    return at_least_threads(available_cpus())


def _run_stage(stage: RecipeStage, fingerprint: str, context: Context) -> StageResult:
    before = read_result(stage.folder)
    if before is None or before.fingerprint != fingerprint:
        if before is not None:
            context.say("its settings or inputs changed: starting it afresh")
        _clear(stage.folder, (*stage.stage.keeps, *stage.stage.by_hand), context)
        before = None
    stage.folder.mkdir(parents=True, exist_ok=True)
    (stage.folder / "config.yaml").write_text(
        yaml.safe_dump({stage.stage.kind: stage.settings()}, sort_keys=False)
    )
    common = {
        "name": stage.name,
        "kind": stage.stage.kind,
        "fingerprint": fingerprint,
        "settings": stage.settings(),
        "hub_models": stage.hub_models(),
    }
    for model in stage.hub_models():
        context.say(f"from the hub: {model}")
    meter_file = stage.folder / "stage.json"
    with (
        ProgressLog(context.console, stage.name) as log,
        ResourceMeter(meter_file, common, before) as meter,
    ):
        context = replace(context, log=log)
        context.ranks.of_first(stage.name)
        try:
            with _plain_errors(stage.folder), watched_failures(stage.name):
                figures = stage.stage.run(stage.config, context)
        except (StageError, ConfigError) as error:
            with suppress(OSError):  # the error itself may be that the disk is full
                meter.write("failed", error=str(error))
            raise
        for artifact, path in stage.artifacts.items():
            if not path.exists():
                raise RuntimeError(f"stage {stage.name!r} ended without its artifact {artifact!r}: {path}")
        for artifact in stage.stage.publish:
            shutil.copyfile(
                stage.artifacts[artifact], context.recipe.folder / stage.stage.artifacts[artifact]
            )
        result = meter.write("done", figures=figures)
    if aside := result.figures.get("set_aside"):
        context.say(f"set aside: {aside}; why: {stage.folder / 'set_aside.jsonl'}")
    context.say(
        f"done in {result.seconds:.0f} s ({result.cpu_seconds / 60:.1f} CPU minutes), "
        f"peak memory {result.peak_memory_mb:.0f} MB"
    )
    return result


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the disk and damaged files into a `StageError` with the file and the remedy."""
    try:
        yield
    except (StageError, ConfigError):
        raise
    except DamagedFile as error:
        raise StageError(f"{error.path} is damaged: {error.reason}", error.remedy) from error
    except Exception as error:
        disk_failure = disk_error(error, folder)
        if disk_failure is None:
            raise
        raise StageError(*disk_failure) from error


def _drop_damaged_result(stage: RecipeStage, console: Console) -> None:
    """A damaged `stage.json` counts as none, but for a stage that has trained: it would begin afresh.

    Raises:
        StageError: naming the file.
    """
    try:
        read_result(stage.folder)
    except DamagedFile as error:
        if _has_trained(stage.folder):
            backup_name = f"{stage.folder.name}.before"
            remedy = (
                f"restore it, or remove it to train afresh; what was trained is then kept in {backup_name}"
            )
            raise StageError(f"{error.path} is damaged: {error.reason}", remedy) from None
        console.print(
            f"  {error.path} is damaged: the stage runs again", highlight=False, markup=False, soft_wrap=True
        )
        error.path.unlink()


def _has_trained(folder: Path) -> bool:
    return any(folder.glob("checkpoint*"))


def _clear(folder: Path, keeps: tuple[str, ...], context: Context) -> None:
    """Empty the folder but for what the stage keeps; what was trained takes the place of what was kept before."""
    if _has_trained(folder):
        before = folder.with_name(f"{folder.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        os.replace(folder, before)
        context.say(f"what was trained before is kept in {before}")
        for path in (before / name for name in keeps):
            if path.exists():
                folder.mkdir(exist_ok=True)
                os.replace(path, folder / path.name)
        return
    _empty(folder, keeps)


def _empty(folder: Path, keeps: tuple[str, ...]) -> None:
    """Delete the folder but for these names in it."""
    if not keeps or not folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.name in keeps:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_done(stage: RecipeStage, fingerprint: str) -> StageResult | None:
    result = read_result(stage.folder)
    if result is None or result.state != "done" or result.fingerprint != fingerprint:
        return None
    return result if all(path.exists() for path in stage.artifacts.values()) else None


def _require_upstream(stage: RecipeStage, results: Mapping[str, StageResult]) -> None:
    missing = [name for name in stage.upstream if name not in results and not stage.stage.reads_run]
    if missing:
        raise ConfigError(
            f"{stage.name}: needs {missing[0]!r}, which has not run", "--only", "run without --only"
        )


def _report_failure(
    recipe: Recipe, failed: RecipeStage, console: Console, results: dict[str, StageResult]
) -> None:
    result = None
    with suppress(DamagedFile):  # by a full disk, perhaps
        result = read_result(failed.folder)
    if result is not None:
        results[failed.name] = result
    for stage in recipe.stages:
        if stage.stage.reads_run:
            shutil.rmtree(stage.folder, ignore_errors=True)
            console.print(
                f"{failed.name} failed; [bold]{stage.name}[/bold]: {stage.stage.help}", highlight=False
            )
            try:
                with _plain_errors(stage.folder):
                    _run_stage(stage, "after a failure", Context(stage.folder, recipe, console, results))
            except (StageError, ConfigError) as error:  # the disk is full: the first error is the one to tell
                console.print(f"  no report: {error}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process a run folder; the lock goes with the process, however it ends."""
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "another process is running this", str(folder), "wait for it, or give --name"
            ) from None
        yield


class ResourceMeter:
    """Wall seconds, CPU seconds and peak memory (this process and its children) of a stage, over all its attempts.

    Memory is the sum of resident sets, sampled; pages that processes share count in each. CPU time of children is
    sampled too, so the last quarter of a second of each is not counted. The figures are
    written every few seconds, so that those of a killed attempt are not lost.
    """

    def __init__(self, path: Path, common: dict[str, Any], before: StageResult | None) -> None:
        self._path, self._common = path, common
        self._seconds_before = before.seconds if before else 0.0
        self._cpu_seconds_before = before.cpu_seconds if before else 0.0
        self._own_cpu_started = time.process_time()
        self._cpu_of_children: dict[tuple[int, float], float] = {}
        self._cpu_of_earlier_work = {key: spent for key, _, spent in _children()}
        self._peak_mb = before.peak_memory_mb if before else 0.0
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ResourceMeter:
        self.write("running")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()

    def write(self, state: str, figures: dict[str, Any] | None = None, error: str = "") -> StageResult:
        if state != "running":
            self._stop.set()
            self._thread.join()
        self._sample()
        result = StageResult(
            **self._common,
            state=state,
            figures=figures or {},
            seconds=self._seconds_before + time.monotonic() - self._started,
            cpu_seconds=self._cpu_seconds_before
            + time.process_time()
            - self._own_cpu_started
            + sum(self._cpu_of_children.values()),
            peak_memory_mb=self._peak_mb,
            error=error,
        )
        write_json(self._path, result.__dict__)
        return result

    def _watch(self) -> None:
        ticks = 0
        while not self._stop.wait(0.25):
            self._sample()
            ticks += 1
            if ticks % 20 == 0:
                with suppress(OSError):  # a full disk is told by what the stage itself writes
                    self.write("running")

    def _sample(self) -> None:
        total = psutil.Process(os.getpid()).memory_info().rss
        for key, memory, cpu_seconds in _children():
            total += memory
            self._cpu_of_children[key] = cpu_seconds - self._cpu_of_earlier_work.get(key, 0.0)
        self._peak_mb = max(self._peak_mb, total / 2**20)


def _children() -> Iterator[tuple[tuple[int, float], int, float]]:
    """Every child that lives, and theirs: its id and start, resident bytes, CPU-seconds."""
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.Error):
            spent = child.cpu_times()
            yield (
                (child.pid, child.create_time()),
                child.memory_info().rss,
                spent.user + spent.system,
            )
