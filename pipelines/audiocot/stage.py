"""The stage `audiocot`: videos and recordings to chains of thought, pairs and edits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import TaskID

from audiollm.audio.discovery import AudioError, links_note
from audiollm.endpoints import Budget
from audiollm.errors import ConfigError, StageError
from audiollm.failures import watched_failures
from audiollm.files.atomic import write_json
from audiollm.recipe.plug_ins import plug_in_facts
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan
from pipelines.audiocot.answers.choice import AnswerPlace
from pipelines.audiocot.chain import STEPS, CotChain, build_chain, missing_parts
from pipelines.audiocot.corpus import balance_drops
from pipelines.audiocot.made.carrying import MadeForm, carry_out
from pipelines.audiocot.made.plans import MadePlan
from pipelines.audiocot.output import (
    JUDGED,
    MADE_FOLDER,
    REVIEW,
    clip_questions,
    plan_made,
    read_kept,
    remove_stale,
    write_clips,
    write_review,
    write_samples_of,
)
from pipelines.audiocot.rules import RULES, ClipThresholds
from pipelines.audiocot.settings import AudioCotConfig
from pipelines.audiocot.sound_shards import (
    SHARDS_FOLDER,
    index_sound_shards,
    plan_sound_shards,
    write_sound_shard,
)
from pipelines.audiocot.sources import FILES, STAGE_NAME, FileSources, ListError, file_sources, video_files
from pipelines.audiocot.walk import CotWalks
from pipelines.execution.ledger import Ledger
from pipelines.steps.chain import Missing
from pipelines.steps.driving import StepRun, call_each
from pipelines.steps.inputs import MANIFESTS, InputError, collect, digests
from pipelines.steps.results import (
    Place,
    Row,
    Spool,
    not_whole_sentence,
    set_aside_sentence,
    write_rules,
    write_timings,
)
from pipelines.steps.rules import Drop
from pipelines.steps.stage import (
    as_stage_errors,
    go_on_without,
    plan_missing,
    refuse_missing,
    request_report,
)

_SECONDS_PER_AUDIO_SECOND = 0.24
"""CPU-seconds of steps and composed sound per second of sound with pictures: benchmarks/history/audiocot.md."""
_PLANS_PER_BATCH = 8
"""Pairs and edits that a worker is sent at a time: one takes some milliseconds, sending it half of one."""


@watched_failures("audiocot")
def run_audiocot(config: AudioCotConfig, context: Context) -> dict[str, Any]:
    """Write the files that README.md names; returns `funnel.json`'s content.

    Raises:
        StageError: inputs that cannot be used, or a model that is missing (exit code 2), before the work; a step
            that fails on every item; a spent budget or an endpoint that does not answer, after which the run can be
            continued.
    """
    next_run = "run again to go on (with a larger budget, where it is spent)"
    with (
        as_stage_errors("audiocot", next_run, InputError, ListError, AudioError),
        Ledger(context.folder / "ledger" / "ledger.sqlite") as ledger,
    ):
        funnel = _think_about_files(config, context, ledger)
        request_report(_write_page, config, context, ledger)
    _print_audiocot_summary(funnel, config, context)
    return funnel


def _think_about_files(config: AudioCotConfig, context: Context, ledger: Ledger) -> dict[str, Any]:
    folder, began, cpu_began = context.folder, time.monotonic(), time.process_time()
    if config.retry_failed:
        context.say(f"{ledger.forget_errors()} calls that failed are tried again")
    budget = Budget(str(folder.resolve()), config.budget.calls, config.budget.tokens)
    # absolute: actors of a cluster work in folders of their own
    place = AnswerPlace(folder.resolve() / "ledger" / "answers.sqlite", budget)
    limits, chain, lacking = _build_runnable_chain(config, context, place)
    sources = _collect_file_sources(config, context, ledger)
    spool = Spool(folder / "ledger" / "spool.sqlite")
    try:
        run = StepRun(config, context, chain.steps, ledger, "levels")
        walks = CotWalks(chain, limits, spool, config.held_out)
        before_walks = time.process_time()
        run.walk("thinking about sounds", len(sources.files), walks.begin(sources.files))
        walk_cpu_s = time.process_time() - before_walks
        drops: dict[Place, Drop] = {}
        if limits.max_balance is not None:
            drops = balance_drops(spool, limits.max_balance, config.seed)
        funnel = write_clips(folder, spool, sources, drops, limits)
    finally:
        spool.close()
    clips = read_kept(folder)
    plans = plan_made(clips, config)
    made_sounds, failed = _carry_out_plans(config, context, ledger, plans)
    counts = write_samples_of(folder, clips, made_sounds, config.little_evidence == "keep")
    funnel |= {
        "samples": counts,
        "made": _by_operation([plan for plan, _ in made_sounds]),
        "not_made": failed,
        "little_evidence": sum(clip["little_evidence"] for clip in clips),
        "review": write_review(folder, clips, config.review_share, config.seed),
    }
    if config.shards:
        funnel["shard_samples"] = _write_shards(config, context, ledger, clips)
    write_json(folder / "funnel.json", funnel)
    took = {
        "wall_s": round(time.monotonic() - began, 3),
        "driver_cpu_s": round(time.process_time() - cpu_began, 3),
        # of this process: with one worker the steps' own is part of it
        "walk_cpu_s": round(walk_cpu_s, 3),
        "workers": config.num_workers,
        "engine": config.engine,
    }
    write_rules(folder, RULES, config.limits, limits, lacking)
    write_timings(folder, run.costs, "levels", took)
    return funnel


def _build_runnable_chain(
    config: AudioCotConfig, context: Context, place: AnswerPlace
) -> tuple[ClipThresholds, CotChain, list[Missing]]:
    """Return the thresholds that can be applied, the steps that can run, and what is missing.

    Raises:
        StageError: something is missing, and the settings do not say to go on without.
    """
    settings, limits = config.step_settings(), config.limits
    chain = build_chain(settings, place)
    lacking = missing_parts(chain, limits)
    refuse_missing(config, lacking)
    without, unset = go_on_without(lacking, context)
    runnable = {
        name: step_settings
        for name, step_settings in settings.items()
        if STEPS.step_class(name).name not in without
    }
    return limits.model_copy(update=unset), build_chain(runnable, place), lacking


def _collect_file_sources(config: AudioCotConfig, context: Context, ledger: Ledger) -> FileSources:
    with context.progress("fetching", None) as bar:
        fetched = context.folder / "fetched"
        inputs = collect(
            config.inputs, fetched, lambda name: bar.advance(TaskID(0)), FILES, config.max_unpacked_gb
        )
    for note in inputs.notes:
        context.say(note)
    files = [*inputs.files, *video_files(inputs)]
    with context.progress("reading the files", len(files)) as bar:
        digest_by_path, unread = digests(
            files, ledger, lambda done: bar.update(TaskID(0), completed=done), STAGE_NAME
        )
    # pictures that cannot be read are an error of the sound that they belong to
    paths = {item.path for item in inputs.files}
    inputs.rejected += [row for row in unread if row["place"] in paths]
    sources = file_sources(inputs, digest_by_path, config.use_truth)
    if not sources.files and not sources.rejected:
        raise StageError(
            f"audiocot: no videos or recordings in {', '.join(config.inputs)}{links_note(*config.inputs)}",
            "give a folder of videos or recordings",
            exit_code=2,
        )
    return sources


def _carry_out_plans(
    config: AudioCotConfig, context: Context, ledger: Ledger, plans: list[MadePlan]
) -> tuple[list[tuple[MadePlan, Mapping[str, Any]]], dict[str, int]]:
    """Carry out the plans; returns those that could be, and the number of the others by reason."""
    remove_stale(context.folder, plans)
    form = MadeForm(context.folder / MADE_FOLDER, config.made.sample_rate, config.made.channels)
    with context.progress("making pairs and edits", len(plans)) as bar:
        outcomes = call_each(
            "make",
            partial(carry_out, form=form),
            plans,
            config.num_workers,
            ledger,
            lambda: bar.advance(TaskID(0)),
            batch_size=_PLANS_PER_BATCH,
        )
    made_sounds: list[tuple[MadePlan, Mapping[str, Any]]] = []
    failed: dict[str, int] = {}
    for plan, outcome in zip(plans, outcomes, strict=True):
        if outcome.value is None:
            reason = f"{plan.operation}: {outcome.error}"
            failed[reason] = failed.get(reason, 0) + 1
        else:
            made_sounds.append((plan, outcome.value))
    return made_sounds, failed


def _write_shards(config: AudioCotConfig, context: Context, ledger: Ledger, clips: Sequence[Row]) -> int:
    """Write the questions about clips with their sound, each shard by one of the workers; returns their number.

    Raises:
        StageError: a shard that cannot be written.
    """
    questions = clip_questions(clips, config.little_evidence == "keep")
    planned = plan_sound_shards(context.folder, questions, clips, config.samples_per_shard)
    with context.progress("writing shards", len(planned)) as bar:
        outcomes = call_each(
            "shard", write_sound_shard, planned, config.num_workers, ledger, lambda: bar.advance(TaskID(0))
        )
    for shard, outcome in zip(planned, outcomes, strict=True):
        if outcome.value is None:
            raise StageError(f"audiocot: {shard.folder}: {outcome.error}", "is the disk full?")
    return index_sound_shards(context.folder)


def _write_page(folder: Path) -> Path:
    from pipelines.audiocot.report.page import write_audiocot_report

    return write_audiocot_report(folder)


def _by_operation(plans: list[MadePlan]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for plan in plans:
        counts[plan.operation] = counts.get(plan.operation, 0) + 1
    return dict(sorted(counts.items()))


def _print_audiocot_summary(funnel: Mapping[str, Any], config: AudioCotConfig, context: Context) -> None:
    context.say(
        f"{funnel['segments']} clips, {funnel['seconds'] / 60:.1f} minutes, from {funnel['files_kept']} of "
        f"{funnel['audio_files']} files" + set_aside_sentence(funnel, "clip")
    )
    counts = ", ".join(f"{count} {operation}" for operation, count in funnel["made"].items())
    if count := funnel["little_evidence"]:
        fate = "" if config.little_evidence == "keep" else ", not in thinking.jsonl"
        context.say(f"the tagger has no name for the loudest sound of {count} clips: little evidence{fate}")
    if funnel["files_not_whole"]:
        context.say(not_whole_sentence(funnel["files_not_whole"]))
    context.say(f"made: {counts or 'nothing'}; {funnel['review']['listed']} clips to review")


def plan_audiocot(config: AudioCotConfig, upstream: Mapping[str, StagePlan]) -> StagePlan:
    """Estimate the time by the length of the input, as far as it is known.

    Raises:
        ConfigError: a list that cannot be used; a model is missing, and the settings do not say to go on without.
    """
    place = AnswerPlace(Path("answers.sqlite"), Budget("plan"))
    lacking = missing_parts(build_chain(config.step_settings(), place), config.limits)
    without = plan_missing(config, [missing_step.reason for missing_step in lacking])
    lists = [path for text in config.inputs if (path := Path(text)).suffix in MANIFESTS and path.is_file()]
    try:
        facts = [note for path in lists for note in FILES.read_list(path).notes]
    except ListError as error:
        raise ConfigError(f"audiocot: {error}", "", "mend the list, then plan again") from None
    seconds = sum(plan.facts.get("seconds", 0.0) for plan in upstream.values())
    samples = sum(plan.facts.get("samples", 0.0) for plan in upstream.values())
    seconds = seconds or sum(_seconds_of(Path(text)) for text in config.inputs)
    return StagePlan(
        memory_mb=1200.0,
        disk_mb=seconds * config.made.sample_rate * config.made.channels * 2e-6 * len(config.made.edits),
        core_seconds=5.0 + seconds * _SECONDS_PER_AUDIO_SECOND / config.num_workers,
        note="; ".join([*facts, *without]),
        facts={"seconds": seconds, "clip_s": config.clip_length_s or (seconds / samples if samples else 0.0)},
    )


def _seconds_of(path: Path) -> float:
    """Seconds of sound of a file, of a list, or below a folder, by the headers; 0 for what is not here yet."""
    from audiollm.audio import find_audio, probe

    if not path.exists():
        return 0.0
    total = 0.0
    listed = [path]
    if path.is_dir():
        listed = find_audio(path)[0]
    elif path.suffix in MANIFESTS:
        listed = [path.parent / listed_path for listed_path, _ in FILES.read_list(path).rows]
    for file in listed:
        try:
            total += probe(file).duration_s or 0.0
        except AudioError:
            continue
    return total


STAGE = Stage(
    kind="audiocot",
    config=AudioCotConfig,
    run=run_audiocot,
    artifacts={
        "samples": "cot.jsonl",
        "edits": "edits.jsonl",
        "thinking": "thinking.jsonl",
        "clip_questions": "thinking_clip.jsonl",
        "region_questions": "thinking_region.jsonl",
        "instructions": "thinking_instruction.jsonl",
        "clips": "clips.jsonl",
        "files": "files.jsonl",
        "set_aside": "set_aside.jsonl",
        "funnel": "funnel.json",
    },
    help="write chains of thought about the sound of videos and recordings",
    plan=plan_audiocot,
    facts=lambda config: plug_in_facts(config.steps),
    keeps=("ledger", "fetched", SHARDS_FOLDER, MADE_FOLDER, REVIEW, JUDGED),
)
