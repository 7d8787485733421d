"""The stage `annotate`: recordings, or a synthetic corpus, to annotated segments."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import TaskID

from audiollm.audio.discovery import AudioError, links_note
from audiollm.data.text.forms import comparison_form
from audiollm.errors import ConfigError, StageError
from audiollm.failures import watched_failures
from audiollm.files.atomic import write_json
from audiollm.files.set_aside import Row
from audiollm.recipe.plug_ins import plug_in_facts
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage
from pipelines.annotate.execution import chain as chains
from pipelines.annotate.execution.chain import Chain
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.execution.corpus import DuplicateConfig, Verdicts, judge_segments, kept_rows
from pipelines.annotate.execution.plan import plan_annotation
from pipelines.annotate.execution.rules import RULES, Thresholds
from pipelines.annotate.execution.shards import remove_shards
from pipelines.annotate.execution.walk import Run, write_shards
from pipelines.annotate.input import synthetic
from pipelines.annotate.input.annotated import LEDGER, annotated_corpus, copy_annotation
from pipelines.annotate.input.sources import (
    RECORDINGS,
    Sources,
    collect_recordings,
    match_sources,
    pattern_hint,
    speaker_warning,
)
from pipelines.annotate.input.spoken_corpus import SpokenCorpus, plan_corpus, speak_texts
from pipelines.annotate.input.transcripts import TranscriptError
from pipelines.annotate.output.columns import make_columns
from pipelines.annotate.output.rows import corrections_sentence, unmatched_warning, write_output
from pipelines.annotate.pretrained_parts import named_classes, part_rows
from pipelines.annotate.recognizers.choice import STRONGER, PocketsphinxConfig
from pipelines.annotate.recognizers.value import recognizer_rows
from pipelines.annotate.steps.speakers import SpeakersConfig
from pipelines.execution.ledger import Ledger
from pipelines.review.applied import CorrectionIndex
from pipelines.review.corrections import CORRECTIONS, read_corrections
from pipelines.steps.chain import Missing
from pipelines.steps.inputs import InputError, digests
from pipelines.steps.results import (
    Spool,
    not_whole_sentence,
    part_ids,
    set_aside_sentence,
    write_rules,
    write_timings,
)
from pipelines.steps.stage import as_stage_errors, go_on_without, refuse_missing, request_report

_LARGEST_AUTO_GRAMMAR = 60
_LINK_COSINE = 0.83


@watched_failures("annotate")
def run_annotation(config: AnnotationConfig, context: Context) -> dict[str, Any]:
    """Write the files of `write_output` and those that the report reads beside them; returns `funnel.json`'s content.

    Raises:
        StageError: inputs, transcripts or a grammar that cannot be used, or a scorer that is missing (exit code 2),
            before the work; workers that cannot be set up; a step that fails on every item; an endpoint that does
            not answer, after which the run can be continued.
    """
    with (
        as_stage_errors("annotate", "run again to go on", TranscriptError, InputError, AudioError),
        Ledger(ledger_path := context.folder / LEDGER) as ledger,
    ):
        if (corpus := annotated_corpus(config.inputs)) is not None:
            return _take_annotation(corpus, config, context, ledger)
        if config.earlier is not None and config.earlier.resolve() != ledger_path.resolve():
            with Ledger(config.earlier) as earlier:
                context.say(f"{ledger.learn(earlier)} measurements are known from {config.earlier}")
        funnel = _annotate_recordings(config, context, ledger)
        if config.shards:
            write_shards(config, context, ledger)
        else:  # those of an earlier run belong to other segments
            remove_shards(context.folder / "shards")
        request_report(_write_page, config, context, ledger)
    _print_annotation_summary(config, funnel, context)
    return funnel


def _take_annotation(
    corpus: Path, config: AnnotationConfig, context: Context, ledger: Ledger
) -> dict[str, Any]:
    """Take an annotated corpus as it is: its segments, and what was measured of them."""
    with Ledger(corpus / LEDGER) as measured:
        ledger.learn(measured)
    funnel = copy_annotation(corpus, context.folder)
    request_report(_write_page, config, context, ledger)
    context.say(
        f"{corpus} is annotated: its {funnel['segments']} segments, {funnel['seconds'] / 60:.1f} minutes, are taken as "
        "they are; the recipe's steps, recognizers and thresholds are not used"
    )
    return funnel


def _annotate_recordings(config: AnnotationConfig, context: Context, ledger: Ledger) -> dict[str, Any]:
    folder, began, cpu_began = context.folder, time.monotonic(), time.process_time()
    if config.retry_failed:
        context.say(f"{ledger.forget_errors()} calls that failed are tried again")
    chain = chains.build(config.step_settings(), config.recognizer_settings(), {})
    refuse_missing(config, chains.missing(chain, config.limits))
    sources = _collect_annotation_sources(config, context, ledger)
    thresholds, chain, lacking = _build_annotation_chain(config, context, sources)
    warnings = [likeness_warning(config, chain)]
    if "speakers" not in chain.settings:
        warnings.append(speaker_warning(sources.recordings))
    for warning in filter(None, warnings):
        sources.warnings.append(warning)
        context.say(f"warning: {warning}")
    spool = Spool(folder / "ledger" / "spool.sqlite")
    try:
        corrections = CorrectionIndex(
            read_corrections(folder), [source.name for source in sources.recordings]
        )
        annotation = Run(config, context, chain, thresholds, sources.recordings, ledger, spool, corrections)
        annotation.annotate()
        verdicts = _verdicts(config, chain, spool, sources)
        annotation.sample(verdicts)
        columns = make_columns(config.bins, (row for _, row in kept_rows(spool, verdicts)))
        recognizers = recognizer_rows({name: chain.settings[name] for name in chain.recognizers})
        digests = {row["name"]: row["digest"] for row in recognizers if row["digest"]}
        funnel = write_output(folder, spool, sources, verdicts, columns, thresholds, digests, corrections)
    finally:
        spool.close()
    columns.save(folder / "bins.json")
    workers = config.num_workers
    took = {
        "wall_s": round(time.monotonic() - began, 3),
        # of this process: with one worker the steps' own is part of it
        "driver_cpu_s": round(time.process_time() - cpu_began, 3),
        "workers": workers,
        "engine": config.engine,
    }
    write_rules(folder, RULES, config.limits, thresholds, lacking)
    write_json(folder / "recognizers.json", recognizers)
    others = {name: value for name, value in chain.settings.items() if name not in chain.recognizers}
    write_json(folder / "models.json", part_rows(others))
    write_timings(folder, annotation.costs, "voice_activity", took)
    return funnel


# ---------------------------------------------------------------------------------------------- what to do


def _collect_annotation_sources(config: AnnotationConfig, context: Context, ledger: Ledger) -> Sources:
    inputs, transcripts, test = config.inputs, config.transcripts, config.test
    unspoken: list[Row] = []
    if not inputs and config.corpus.texts is not None:
        spoken_corpus = _speak_texts(config, context, ledger)
        inputs, unspoken = [str(spoken_corpus.listing)], spoken_corpus.set_aside
    elif not inputs:
        corpus, target = config.corpus, context.folder / "corpus"
        with context.progress("speaking a corpus", corpus.num_word_takes) as bar:
            synthetic.speak_corpus(
                target, corpus, config.seed, lambda done: bar.update(TaskID(0), completed=done)
            )
        inputs, transcripts = [str(target)], synthetic.PATTERN
        test = f"take<{corpus.test_takes}" if corpus.test_takes else None
    with context.progress("fetching", None) as bar:
        fetched = context.folder / "fetched"
        collected = collect_recordings(
            inputs, fetched, lambda name: bar.advance(TaskID(0)), config.max_unpacked_gb
        )
    with context.progress("reading the files", len(collected.files)) as bar:
        digest_by_path, unread = digests(
            collected.files, ledger, lambda done: bar.update(TaskID(0), completed=done), RECORDINGS.stage
        )
    collected.rejected += unread
    recognize = config.untranscribed == "recognize"
    sources = match_sources(collected, digest_by_path, transcripts, test, recognize_untranscribed=recognize)
    sources.orphans += unspoken
    for note in sources.notes:
        context.say(note)
    if not sources.num_audio:
        raise StageError(
            f"annotate: no audio files in {', '.join(inputs)}{links_note(*inputs)}",
            "give a folder of recordings",
            exit_code=2,
        )
    if transcripts is None and all(source.metadata.text is None for source in sources.recordings):
        _hint_at_a_pattern(sources, context)
    return sources


def _speak_texts(config: AnnotationConfig, context: Context, ledger: Ledger) -> SpokenCorpus:
    """Speak the texts of a file on the workers.

    Raises:
        StageError: texts or voices that cannot be used, or a synthesizer that lacks something (exit code 2); not one
            clip can be spoken.
    """
    corpus = config.corpus
    reason = corpus.make_synthesizer().missing()
    if reason is not None:
        raise StageError(f"annotate: corpus.synthesizer: {reason}", exit_code=2)
    try:
        plan = plan_corpus(corpus, config.seed, config.limits.max_duration_s)
    except ConfigError as error:
        raise StageError(f"annotate: {error}", exit_code=2) from None
    context.say(f"speaking {plan.summary()}")
    with context.progress("speaking a corpus", len(plan.clips)) as bar:
        spoken_corpus = speak_texts(
            context.folder / "corpus",
            corpus,
            plan,
            seed=config.seed,
            workers=config.num_workers,
            ledger=ledger,
            on_done=lambda: bar.advance(TaskID(0)),
        )
    for note in spoken_corpus.notes:
        context.say(note)
    return spoken_corpus


def _hint_at_a_pattern(sources: Sources, context: Context) -> None:
    hint = pattern_hint([source.name for source in sources.recordings])
    if hint:
        context.say(
            f"file names such as {sources.recordings[0].name} look like fields; if they say what is spoken,"
        )
        context.say(f"give it as a pattern, for instance transcripts='{hint}'")


def _build_annotation_chain(
    config: AnnotationConfig, context: Context, sources: Sources
) -> tuple[Thresholds, Chain, list[Missing]]:
    """Return the steps that can run, the thresholds that can be applied, and the missing ones.

    Raises:
        StageError: a grammar that cannot be used.
    """
    recognizers = []
    for recognizer in config.recognizer_settings():
        if isinstance(recognizer, PocketsphinxConfig) and recognizer.grammar is None:
            recognizer = recognizer.model_copy(
                update={"grammar": _choose_annotation_grammar(config, sources, context)}
            )
        recognizers.append(recognizer)
    settings = config.step_settings(context.folder / "separated")
    sampled = {}
    if config.quality_sample and "quality" not in settings:
        names = dict.fromkeys(("snr", "bandwidth", "reverberation"), False)
        sampled["quality"] = chains.STEPS.step_class("quality").settings.model_validate(
            {"windows": 3, **names}
        )
    thresholds = config.limits
    chain = chains.build(settings, recognizers, sampled)
    lacking = chains.missing(chain, thresholds)
    if not lacking:
        return thresholds, chain, []
    without, unset = go_on_without(lacking, context)
    runnable = {
        name: step_config
        for name, step_config in settings.items()
        if chains.STEPS.step_class(name).name not in without
    }
    hearing = [
        recognizer for recognizer in recognizers if (recognizer.name or recognizer.kind) not in without
    ]
    if not hearing:
        runnable.pop("consensus", None)
    return thresholds.model_copy(update=unset), chains.build(runnable, hearing, sampled), lacking


def _choose_annotation_grammar(
    config: AnnotationConfig, sources: Sources, context: Context
) -> tuple[str, ...] | None:
    """Return pocketsphinx's closed grammar after a trial; None: open vocabulary."""
    from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer

    if config.grammar == "open":
        return None
    if config.grammar != "auto":
        try:
            PocketsphinxRecognizer(config.grammar)
        except ValueError as error:
            raise StageError(f"annotate: grammar: {error}", exit_code=2) from None
        return tuple(config.grammar)
    given_texts = {source.metadata.text for source in sources.recordings}
    if None in given_texts:  # a recording may hold any words
        return None
    texts = sorted({comparison_form(str(text), "en") for text in given_texts} - {""})
    if not 0 < len(texts) <= _LARGEST_AUTO_GRAMMAR:
        return None
    try:
        PocketsphinxRecognizer(texts)
    except ValueError as error:
        context.say(f"no closed grammar of the given texts ({error}): recognizing with the open vocabulary")
        return None
    return tuple(texts)


def likeness_warning(config: AnnotationConfig, chain: Chain) -> str:
    """Why an embedder's voices may be joined or parted wrongly: no cosine is set for it; empty where one is."""
    speakers = chain.settings.get("speakers")
    if not isinstance(speakers, SpeakersConfig) or speakers.embedder == "auto":
        return ""
    unset = ["link_speakers"] if config.link_speakers is None else []
    if speakers.diarizer is None and "threshold" not in speakers.model_fields_set:
        unset.append("steps.speakers.threshold")
    if not unset:
        return ""
    return (
        f"voices of {speakers.embedder.name} are compared by the cosines that suit resemblyzer: set "
        f"{' and '.join(unset)} to the cosine from which two voices are one speaker to this model"
    )


# ---------------------------------------------------------------------------------------------- making of it


def _verdicts(config: AnnotationConfig, chain: Chain, spool: Spool, sources: Sources) -> Verdicts:
    preset = config.chosen_preset
    names = {number: source.name for number, source in enumerate(sources.recordings)}
    ids = part_ids([(file, number) for file, number, _ in spool.parts()], names)
    same = config.duplicates
    if same is None:
        same = DuplicateConfig() if preset.drop_duplicates else False
    cosine = config.link_speakers or _LINK_COSINE
    return judge_segments(
        spool,
        ids,
        config.outlier_iqr or preset.outlier_iqr,
        same or None,
        cosine if "speakers" in chain.steps else None,
    )


# ----------------------------------------------------------------------------------------------- saying it


def _print_annotation_summary(config: AnnotationConfig, funnel: Mapping[str, Any], context: Context) -> None:
    context.say(
        f"{funnel['segments']} segments, {funnel['seconds'] / 60:.1f} minutes, "
        f"from {funnel['files_kept']} of {funnel['audio_files']} recordings"
        + set_aside_sentence(funnel, "segment")
    )
    if funnel["files_not_whole"]:
        context.say(not_whole_sentence(funnel["files_not_whole"]))
    texts = funnel["recognized_texts"]
    if texts["refused"]:
        why = ", ".join(f"{count} {reason}" for reason, count in texts["reasons"].items())
        context.say(
            f"recognized text: trusted in {texts['kept']} segments ({texts['kept_s'] / 60:.1f} minutes), refused in "
            f"{texts['refused']} ({texts['refused_s'] / 60:.1f} minutes), which stay without text: {why}"
        )
        if any(isinstance(recognizer, PocketsphinxConfig) for recognizer in config.recognizer_settings()):
            context.say(STRONGER)
    if "corrections" in funnel:
        context.say(corrections_sentence(funnel["corrections"]))
        if funnel["corrections"]["unmatched"]:
            context.say(f"warning: {unmatched_warning(funnel['corrections']['unmatched'])}")
    if funnel["text_agreement"] is not None:
        context.say(f"the recognizer hears the given text in {100 * funnel['text_agreement']:.0f} % of them")


def _write_page(folder: Path) -> Path:
    from pipelines.annotate.report import write_annotation_report

    return write_annotation_report(folder)


def _plug_in_sources(config: AnnotationConfig) -> list[str]:
    """The source of a user's own steps, and of the classes that steps name."""
    names = [name for settings in config.step_settings().values() for name in named_classes(settings)]
    return plug_in_facts([*config.steps, *names])


STAGE = Stage(
    kind="annotate",
    config=AnnotationConfig,
    run=run_annotation,
    artifacts={
        "segments": "segments.jsonl",
        "filtered": "filtered.jsonl",
        "files": "files.jsonl",
        "set_aside": "set_aside.jsonl",
        "funnel": "funnel.json",
        "ledger": "ledger/ledger.sqlite",
    },
    help="find who says what in the recordings",
    plan=plan_annotation,
    facts=_plug_in_sources,
    keeps=("ledger", "fetched", "corpus", "shards"),
    by_hand=(CORRECTIONS,),
)
