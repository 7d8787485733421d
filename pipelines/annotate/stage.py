"""The stage `annotate`: recordings, or a corpus that it speaks itself, to segments of speech."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from rich.progress import TaskID

from audiollm.data.text import recognition_form, spoken_form
from audiollm.files import write_json, write_jsonl
from audiollm.recipe import InputPath, Stage, StageConfig, StagePlan, check_input
from audiollm.runner import Context, StageError
from pipelines.annotate import synthetic
from pipelines.annotate.segments import Annotator, Recording, Thresholds, make_recognizer, set_aside
from pipelines.annotate.sources import Sources, find_sources, pattern_hint
from pipelines.annotate.transcripts import TranscriptError, compile_pattern, is_pattern, parse_condition
from pipelines.engine import EngineError, available_cpus, run_pool

PRESETS: Mapping[str, Thresholds] = {
    "quickstart": Thresholds(
        min_duration_s=0.1, max_duration_s=30.0, min_level_dbfs=-60.0, max_clipped_share=0.1
    ),
}
_LARGEST_AUTO_GRAMMAR = 60
_LONG_CLIP_WINDOWS = 3


class Config(StageConfig):
    """Settings of the stage `annotate`."""

    input: InputPath | None = None
    """A folder of recordings, or one recording; null: speak a corpus."""
    transcripts: str | None = None
    """A CSV or JSONL of path,text[,speaker,split], or a pattern such as '{text}_{speaker}_{take}.wav'."""
    test: str | None = None
    """Which recordings are the test set, by the transcripts' fields: 'take<5', 'speaker==theo,take>=3'."""
    recognizers: list[Literal["pocketsphinx"]] = Field(default=["pocketsphinx"], max_length=1)
    """Whose text is kept beside a given one and used in place of a missing one."""
    grammar: Literal["auto", "open"] | list[str] = "auto"
    """The texts that a recognizer may hear; auto: those given where there are at most 60, else any."""
    preset: Literal["quickstart"] = "quickstart"
    """The thresholds below, where they are null."""
    min_duration_s: float | None = Field(default=None, ge=0)
    max_duration_s: float | None = Field(default=None, ge=1)
    min_level_dbfs: float | None = None
    max_clipped_share: float | None = Field(default=None, ge=0, le=1)
    """The largest share of samples at full scale."""
    quality_sample: int = Field(default=300, ge=0)
    """On how many segments the quality is measured (DNSMOS, 0.25 s each); reported, never a filter."""
    workers: int | None = Field(default=None, ge=0)
    """Processes; 0 and 1: in this one; null: one a CPU."""
    seed: int = 0
    corpus: synthetic.CorpusConfig = Field(default_factory=synthetic.CorpusConfig)
    """The corpus that is spoken where `input` is null."""

    @field_validator("transcripts")
    @classmethod
    def _transcripts_are_usable(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and is_pattern(value):
            compile_pattern(value)
        elif value is not None:
            check_input(Path(value), info)
        return value

    @field_validator("test")
    @classmethod
    def _test_is_a_condition(cls, value: str | None) -> str | None:
        if value is not None:
            parse_condition(value)
        return value

    @model_validator(mode="after")
    def _go_together(self) -> Config:
        if self.input is None and (self.transcripts or self.test):
            raise ValueError("transcripts and test are for recordings: give `input` as well")
        if self.test and not self.transcripts:
            raise ValueError("test is a condition over fields of the transcripts: give `transcripts` as well")
        limits = self.thresholds
        if limits.min_duration_s >= limits.max_duration_s:
            raise ValueError("min_duration_s must be below max_duration_s")
        return self

    @property
    def thresholds(self) -> Thresholds:
        preset = PRESETS[self.preset]
        own = {field.name: getattr(self, field.name) for field in fields(Thresholds)}
        return Thresholds(
            **{name: getattr(preset, name) if value is None else value for name, value in own.items()}
        )


def run(config: Config, context: Context) -> dict[str, Any]:
    """Write `segments.jsonl`, `set_aside.jsonl` and `funnel.json`; returns the latter's content.

    Raises:
        StageError: transcripts, a condition or a grammar that cannot be used (exit code 2), before the work.
    """
    from audiollm.audio import AudioError

    try:
        sources = _sources(config, context)
        grammar = _grammar(config, sources, context)
    except (TranscriptError, AudioError) as error:
        raise StageError(f"annotate: {error}", exit_code=2) from None
    if not sources.num_audio:
        raise StageError(
            f"annotate: no audio files in {config.input}", "give a folder of recordings", exit_code=2
        )
    segments, rejected = _annotate(config, context, sources, grammar)
    _add_quality(config, context, segments)
    rejected = sorted(
        [*sources.rejected, *sources.orphans, *rejected],
        key=lambda row: (row["place"], row.get("start_s", 0.0)),
    )
    funnel = _funnel(sources, segments, rejected)
    write_jsonl(context.folder / "segments.jsonl", segments)
    write_jsonl(context.folder / "set_aside.jsonl", rejected)
    write_json(context.folder / "funnel.json", funnel)
    _summarize(funnel, context)
    return funnel


# ---------------------------------------------------------------------------------------------- what to do


def _sources(config: Config, context: Context) -> Sources:
    if config.input is None:
        corpus, folder = config.corpus, context.folder / "corpus"
        total = len(corpus.words) * corpus.voices * corpus.takes
        with context.progress("speaking a corpus", total) as bar:
            synthetic.speak_corpus(
                folder, corpus, config.seed, lambda done: bar.update(TaskID(0), completed=done)
            )
        test = f"take<{corpus.test_takes}" if corpus.test_takes else None
        return find_sources(folder, synthetic.PATTERN, test)
    sources = find_sources(config.input, config.transcripts, config.test)
    hint = pattern_hint([source.name for source in sources.found]) if config.transcripts is None else None
    if hint:
        context.say(
            f"file names such as {sources.found[0].name} look like fields; if they say what is spoken,"
        )
        context.say(f"give it as a pattern, for instance transcripts='{hint}'")
    return sources


def _grammar(config: Config, sources: Sources, context: Context) -> list[str] | None:
    """The closed grammar, proved to work; None is the open vocabulary."""
    if not config.recognizers or config.grammar == "open":
        return None
    if config.grammar != "auto":
        try:
            make_recognizer(config.recognizers[0], config.grammar)
        except ValueError as error:
            raise StageError(f"annotate: grammar: {error}", exit_code=2) from None
        return config.grammar
    texts = sorted(
        {recognition_form(spoken_form(source.text)) for source in sources.found if source.text} - {""}
    )
    if not 0 < len(texts) <= _LARGEST_AUTO_GRAMMAR:
        return None
    try:
        make_recognizer(config.recognizers[0], texts)
    except ValueError as error:
        context.say(f"no closed grammar of the given texts ({error}): recognizing with the open vocabulary")
        return None
    return texts


# ------------------------------------------------------------------------------------------------ doing it


def _annotate(
    config: Config, context: Context, sources: Sources, grammar: list[str] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    recordings = {source.name: Recording(source.path, source.text) for source in sources.found}
    annotator = Annotator(config.thresholds, list(config.recognizers), grammar)
    outcomes = _run(config, context, "listening to the recordings", "recordings", annotator, recordings)
    segments: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    for source in sources.found:
        value, error = outcomes[source.name]
        if value is None:
            rejected.append(set_aside(source.path, "failed", error or ""))
            continue
        rejected += value["set_aside"]
        for row in value["segments"]:
            segments.append({**row, "file": source.name, "speaker": source.speaker, "split": source.split})
    segments.sort(key=lambda row: (row["path"], row["start_s"]))
    ids = segment_ids([row["file"] for row in segments])
    return [{"id": name, **row, "quality": None} for name, row in zip(ids, segments, strict=True)], rejected


def segment_ids(files: Sequence[str]) -> list[str]:
    """Unique names of letters, digits, `_` and `-` for the segments of these files, in their order.

    A file with several segments numbers them; where two files would get the same name, each carries a hash of
    its own.
    """
    counts = Counter(files)
    stems = {file: _safe_name(file) for file in counts}
    taken = Counter(stem.casefold() for stem in stems.values())
    seen: Counter[str] = Counter()
    ids = []
    for file in files:
        stem = stems[file]
        if taken[stem.casefold()] > 1 or len(stem) > 100:
            stem = f"{stem[:100]}-{sha256(file.encode()).hexdigest()[:10]}"
        ids.append(f"{stem}--{seen[file]:05d}" if counts[file] > 1 else stem)
        seen[file] += 1
    return ids


def _safe_name(file: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", re.sub(r"\.[^./]*$", "", file)).strip("-") or "recording"


@dataclass
class QualityMeter:
    """Scores segments by DNSMOS; a `Worker` of `pipelines.engine`."""

    def setup(self) -> None:
        from pipelines.annotate.quality import Dnsmos

        self._dnsmos = Dnsmos()

    def process(self, item: tuple[str, float, float]) -> dict[str, Any]:
        from audiollm.audio import load
        from pipelines.annotate.quality import SAMPLE_RATE, WINDOW_S

        samples_N = load(*item, sample_rate=SAMPLE_RATE, mono=True).samples_CN[0].numpy()
        windows = 1 if len(samples_N) < WINDOW_S * SAMPLE_RATE else _LONG_CLIP_WINDOWS
        quality = self._dnsmos.score(samples_N, windows)
        return {"sig": round(quality.sig, 3), "bak": round(quality.bak, 3), "ovr": round(quality.ovr, 3)}


def _add_quality(config: Config, context: Context, segments: list[dict[str, Any]]) -> None:
    chosen = random.Random(config.seed).sample(segments, min(config.quality_sample, len(segments)))
    items = {row["id"]: (row["path"], row["start_s"], row["end_s"]) for row in chosen}
    outcomes = _run(config, context, "measuring the quality of a sample", "quality", QualityMeter(), items)
    for row in chosen:
        row["quality"] = outcomes[row["id"]][0]


def _run(
    config: Config, context: Context, title: str, name: str, worker: Any, items: Mapping[str, Any]
) -> dict[str, tuple[dict[str, Any] | None, str | None]]:
    if not items:
        return {}
    workers = available_cpus() if config.workers is None else config.workers
    try:
        with context.progress(title, len(items)) as bar:
            outcomes = run_pool(
                list(items.items()),
                _ByName(worker),
                key=lambda item: item[0],
                ledger=context.folder / "ledger" / f"{name}.jsonl",
                workers=workers,
                on_done=lambda done: bar.update(TaskID(0), completed=done),
            )
    except EngineError as error:
        raise StageError(f"annotate: {error}", "audiollm doctor says what is missing") from None
    return {key: (outcome.value, outcome.error) for key, outcome in outcomes.items()}


@dataclass
class _ByName:
    """Hands the second part of an item to a worker, the first being its key."""

    worker: Any

    def setup(self) -> None:
        self.worker.setup()

    def process(self, item: tuple[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = self.worker.process(item[1])
        return result


# ----------------------------------------------------------------------------------------------- saying it


def _funnel(
    sources: Sources, segments: Sequence[Mapping[str, Any]], rejected: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    used = {row["path"] for row in segments}
    compared = [row for row in segments if row["text_source"] == "given" and row["heard"]]
    agreed = [row for row in compared if _agrees(row)]
    scored = [row["quality"] for row in segments if row["quality"] is not None]
    quality = {
        name: round(fmean(score[name] for score in scored), 3) for name in ("sig", "bak", "ovr") if scored
    }
    return {
        "files_seen": sources.num_audio + sources.not_audio,
        "not_audio": sources.not_audio,
        "audio_files": sources.num_audio,
        "files_used": len(used),
        "files_set_aside": sources.num_audio - len(used),
        "segments": len(segments),
        "seconds": round(sum(row["duration_s"] for row in segments), 3),
        "reasons": dict(sorted(Counter(row["kind"] for row in rejected).items())),
        "text_agreement": round(len(agreed) / len(compared), 4) if compared else None,
        "quality": {"n": len(scored), **quality},
    }


def _agrees(row: Mapping[str, Any]) -> bool:
    return recognition_form(spoken_form(row["text"])) == recognition_form(next(iter(row["heard"].values())))


def _summarize(funnel: Mapping[str, Any], context: Context) -> None:
    reasons = ", ".join(f"{count} {reason}" for reason, count in funnel["reasons"].items())
    context.say(
        f"{funnel['segments']} segments, {funnel['seconds'] / 60:.1f} minutes, "
        f"from {funnel['files_used']} of {funnel['audio_files']} recordings"
        + (f"; set aside: {reasons}" if reasons else "")
    )
    if funnel["text_agreement"] is not None:
        context.say(f"the recognizer hears the given text in {100 * funnel['text_agreement']:.0f} % of them")


# ---------------------------------------------------------------------------------------------- planning

_PROBED_FILES = 2000
# seconds of one CPU, measured; see README.md
_PER_CLIP_S, _PER_SCORE_S, _START_S = 0.012, 0.22, 3.0
_VOICE_ACTIVITY_RTF, _CLOSED_RTF, _OPEN_RTF = 0.005, 0.015, 0.35
_OWN_MB, _WORKER_MB = 700.0, 750.0
_SPOKEN_CLIP_S = 0.47


def plan(config: Config, upstream: Mapping[str, StagePlan]) -> StagePlan:
    """Audio seconds and clips from the headers of up to 2,000 files; times from measured rates of one CPU."""
    disk_mb = 0.0
    if config.input is None:
        clips = float(len(config.corpus.words) * config.corpus.voices * config.corpus.takes)
        audio_s, note = _SPOKEN_CLIP_S * clips, "speaks its own corpus"
        disk_mb = audio_s * synthetic.SAMPLE_RATE * 2 / 1e6
    elif config.input.exists():
        audio_s, clips, note = _probe_input(config.input)
    else:
        return StagePlan(note=f"{config.input} is not there yet")
    workers = max(1, available_cpus() if config.workers is None else config.workers)
    has_texts = config.input is None or config.transcripts is not None
    is_open = config.grammar == "open" or (config.grammar == "auto" and not has_texts)
    rtf = _VOICE_ACTIVITY_RTF + bool(config.recognizers) * (_OPEN_RTF if is_open else _CLOSED_RTF)
    work_s = rtf * audio_s + _PER_CLIP_S * clips + _PER_SCORE_S * min(clips, config.quality_sample)
    return StagePlan(
        memory_mb=_OWN_MB + _WORKER_MB * workers * (workers > 1),
        disk_mb=disk_mb + 1e-3 * clips,
        seconds=2 * _START_S + work_s / workers,
        note=note,
        facts={"audio_s": audio_s, "clips": clips},
    )


def _probe_input(path: Path) -> tuple[float, float, str]:
    from audiollm.audio import AudioError, find_audio, probe

    files = find_audio(path)[0] if path.is_dir() else [path]
    step = max(1, -(-len(files) // _PROBED_FILES))
    durations = []
    for file in files[::step]:
        try:
            durations.append(probe(file).duration_s or 0.0)
        except AudioError:
            continue
    share = len(files) / max(1, len(files[::step]))
    note = f"from the headers of {len(files[::step])} of {len(files)} files" if step > 1 else ""
    return sum(durations) * share, len(durations) * share, note


STAGE = Stage(
    kind="annotate",
    config=Config,
    run=run,
    artifacts={"segments": "segments.jsonl", "set_aside": "set_aside.jsonl", "funnel": "funnel.json"},
    help="find who says what in the recordings",
    plan=plan,
)
