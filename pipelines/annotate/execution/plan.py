"""The plan of an annotation for `audiollm plan`: audio by headers, times by measured rates of a CPU, missing parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from audiollm.errors import ConfigError
from audiollm.files.atomic import read_json
from audiollm.recipe.stages import StagePlan
from pipelines.annotate.execution import chain as chains
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.input.annotated import FUNNEL, annotated_corpus
from pipelines.annotate.input.sources import RECORDINGS, collect_recordings, match_sources
from pipelines.annotate.input.spoken_corpus import plan_corpus
from pipelines.annotate.input.transcripts import TranscriptError, is_pattern, read_transcripts
from pipelines.steps.chain import paths_of
from pipelines.steps.inputs import MANIFESTS, InputError, is_address, is_tar
from pipelines.steps.stage import plan_missing

_PROBED_FILES = 2000
# seconds of one core, measured; see README.md
_SECONDS_PER_CLIP, _SECONDS_PER_SCORE, _STARTUP_S = 0.026, 0.48, 3.0
_GRAMMAR_RTF = 0.03
_RTF = {
    "voice_activity": 0.01,
    "pocketsphinx": 0.7,
    "speakers": 0.2,
    "quality": 0.2,
    "events": 0.06,
    "prosody": 0.04,
}
_DRIVER_MB, _WORKER_MB = 700.0, 750.0
_SPOKEN_WORD_S = 0.47
_BYTES_PER_SPOKEN_S = 48_000


def plan_annotation(config: AnnotationConfig, upstream: Mapping[str, StagePlan]) -> StagePlan:
    """Audio seconds and clips from the headers of up to 2,000 files; times from measured rates of one CPU.

    Raises:
        ConfigError: transcripts or lists that cannot be used; a scorer is missing, and the settings do not say to go on
            without.
    """
    del upstream
    if (corpus := annotated_corpus(config.inputs)) is not None:
        return _plan_annotated(corpus)
    notes = _lacking(config)
    disk_mb, is_estimate = 0.0, True
    work_s, speech_mb = 0.0, 0.0
    if not config.inputs:
        clips, audio_s, work_s, corpus_notes = _plan_corpus(config)
        notes = [*corpus_notes, *notes]
        speech_mb = config.corpus.make_synthesizer().memory_mb
        disk_mb = audio_s * _BYTES_PER_SPOKEN_S / 1e6
    else:
        notes = [*_check_lists(config), *notes]
        audio_s, clips, note = _probe(config.inputs)
        is_estimate = bool(note)
        notes.insert(0, note)
    workers = config.num_workers
    rates = dict(_RTF)
    has_all_texts = config.transcripts is not None and config.untranscribed == "set_aside"
    if config.grammar != "open" and (has_all_texts or not config.inputs):
        rates["pocketsphinx"] = _GRAMMAR_RTF
    names = [
        "voice_activity",
        *config.step_settings(),
        *(recognizer.kind for recognizer in config.recognizer_settings()),
    ]
    work_s += sum(rates.get(name, 0.0) for name in dict.fromkeys(names)) * audio_s + _SECONDS_PER_CLIP * clips
    work_s += _SECONDS_PER_SCORE * min(clips, config.quality_sample)
    return StagePlan(
        memory_mb=_DRIVER_MB + _WORKER_MB * workers * (workers > 1) + speech_mb * workers,
        disk_mb=disk_mb + 4e-3 * clips,
        core_seconds=2 * _STARTUP_S + work_s / workers,
        note="; ".join(filter(None, notes)),
        facts={"audio_s": audio_s, "clips": clips, "most_audio_s": math.inf if is_estimate else audio_s},
    )


def _plan_annotated(corpus: Path) -> StagePlan:
    """The plan of taking a corpus that is annotated already."""
    counts = read_json(corpus / FUNNEL)
    return StagePlan(
        memory_mb=_DRIVER_MB,
        core_seconds=_STARTUP_S,
        note=f"{corpus} is annotated and is taken as it is",
        facts={
            "audio_s": counts["seconds"],
            "clips": float(counts["segments"]),
            "most_audio_s": counts["seconds"],
        },
    )


def _plan_corpus(config: AnnotationConfig) -> tuple[float, float, float, list[str]]:
    """Clips of the corpus that is spoken, their seconds, the seconds of one core that speak them, and notes.

    Raises:
        ConfigError: texts or voices that cannot be used; the synthesizer lacks something.
    """
    corpus = config.corpus
    if corpus.texts is None:
        clips = float(corpus.num_word_takes)
        return clips, _SPOKEN_WORD_S * clips, 0.0, ["speaks its own corpus"]
    synthesizer = corpus.make_synthesizer()
    if not all(path.exists() for path in (corpus.texts, *synthesizer.inputs)):
        return 0.0, 0.0, 0.0, ["speaks texts that are not here yet: they are not counted"]
    if (reason := synthesizer.missing()) is not None:
        raise ConfigError(f"annotate: corpus.synthesizer: {reason}")
    plan = plan_corpus(corpus, config.seed, config.limits.max_duration_s)
    work_s = sum(len(clip.text) for clip in plan.clips) / synthesizer.characters_per_cpu_s
    notes = [f"speaks {plan.summary()}", plan.set_aside_note()]
    return float(len(plan.clips)), plan.seconds, work_s, [note for note in notes if note]


def _lacking(config: AnnotationConfig) -> list[str]:
    """Missing models that the run will do without.

    Raises:
        ConfigError: a model is missing and the run must not go on without it.
    """
    chain = chains.build(config.step_settings(), config.recognizer_settings(), {})
    # a model that an earlier stage makes, or that is not here yet: the plan says so by itself
    later = {
        name
        for name, step_config in chain.settings.items()
        if not all(map(Path.exists, paths_of(step_config).values()))
    }
    lacking = [
        missing_step.reason
        for missing_step in chains.missing(chain, config.limits)
        if missing_step.step not in later
    ]
    return plan_missing(config, lacking)


def _check_lists(config: AnnotationConfig) -> list[str]:
    """Open the lists of recordings and the transcripts as the run will, where they are here; returns facts about them.

    Raises:
        ConfigError: they cannot be used, or match no recording.
    """
    transcripts = config.transcripts
    if (
        transcripts is not None
        and not is_pattern(transcripts)
        and not Path(transcripts).expanduser().exists()
    ):
        return []  # an earlier stage makes them
    try:
        if not all(_is_here(text) for text in config.inputs):
            lists = [RECORDINGS.read_list(Path(text)) for text in config.inputs if _is_list(text)]
            if transcripts is not None and not is_pattern(transcripts):
                lists.append(read_transcripts(Path(transcripts).expanduser()))
            return [note for listed in lists for note in listed.notes]
        # nothing is fetched, and no output lies at the root
        inputs = collect_recordings(config.inputs, Path("/fetched"), lambda name: None)
        digests = {item.path: "" for item in inputs.files}
        recognize = config.untranscribed == "recognize"
        sources = match_sources(inputs, digests, transcripts, config.test, recognize_untranscribed=recognize)
    except (TranscriptError, InputError) as error:
        raise ConfigError(f"annotate: {error}", "", "mend the list, then plan again") from None
    transcribed = sum(source.metadata.text is not None for source in sources.recordings)
    without = sources.num_audio - len(inputs.rejected) - transcribed
    notes = list(sources.notes)
    if transcripts is not None:
        notes.append(f"transcripts of {transcribed} recordings, {without} without")
    if sources.orphans:
        notes.append(f"{len(sources.orphans)} rows of the transcripts without a recording")
    return notes


def _is_here(text: str) -> bool:
    """Return whether an input is a file or a folder on this disk that needs no unpacking."""
    return not is_address(text) and not is_tar(text) and Path(text).exists()


def _is_list(text: str) -> bool:
    return text.lower().endswith(MANIFESTS) and Path(text).is_file()


def _recordings(path: Path) -> list[Path]:
    """The recordings of a folder, of a list, or the file itself."""
    from audiollm.audio import find_audio

    if path.is_dir():
        return find_audio(path)[0]
    if _is_list(str(path)):
        return [path.parent / listed_path for listed_path, _ in RECORDINGS.read_list(path).rows]
    return [path]


def _probe(inputs: list[str]) -> tuple[float, float, str]:
    from audiollm.audio import AudioError, probe

    files: list[Path] = []
    unknown = 0
    for text in inputs:
        path = Path(text)
        if is_address(text) or not path.exists():
            unknown += 1
        else:
            files += _recordings(path)
    step = max(1, -(-len(files) // _PROBED_FILES))
    durations = []
    for file in files[::step]:
        try:
            durations.append(probe(file).duration_s or 0.0)
        except AudioError:
            continue
    share = len(files) / max(1, len(files[::step]))
    notes = [f"from the headers of {len(files[::step])} of {len(files)} files"] if step > 1 else []
    if unknown:
        notes.append(f"{unknown} inputs that are not here are not counted")
    return sum(durations) * share, len(durations) * share, "; ".join(notes)
