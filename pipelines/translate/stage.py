"""The stage `translate`: translations of segments with the time at which each of their words may be said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan, planned_fact
from pipelines.review.applied import correction_digests
from pipelines.translate.settings import TranslateConfig

if TYPE_CHECKING:
    from pipelines.compose.rows import SegmentRow
    from pipelines.translate.translators import TranslatedText, Translator

NO_TIMES = "no word times"
NO_TRANSLATION = "no translation"
MAX_WORDS_PER_WORD, SPARE_WORDS = 3, 8
"""Most words of a translation: so many per word of the source, and so many more."""
SECONDS_PER_TEXT = 0.4
"""Core-seconds in which a model of 75 M parameters translates a sentence with four beams."""


def run_translation(config: TranslateConfig, context: Context) -> dict[str, Any]:
    """Write `segments.jsonl` with translations, and `recordings.jsonl` of those whose words have times.

    Raises:
        StageError: no segment has a translation.
        ConfigError: a translator that cannot be opened.
    """
    from audiollm.errors import BadSample, StageError
    from audiollm.files.atomic import write_jsonl
    from audiollm.files.set_aside import SetAside
    from pipelines.compose.rows import read_segments
    from pipelines.translate.translators import open_translator
    from pipelines.translate.word_alignment import WordPair, align_words, due_times

    set_aside = SetAside(context.folder / "set_aside.jsonl", "translate")
    files = [read_segments(path) for path in config.segments]
    segments = [segment for rows_of_file, _ in files for segment in rows_of_file]
    set_aside.add(bad_row for _, bad in files for bad_row in bad)
    translator = open_translator(config)
    texts = [segment for segment in segments if segment.text.strip()]
    try:
        translations = _translate(translator, texts, config, context)
    finally:
        translator.close()
    translated: list[tuple[SegmentRow, str]] = []
    for segment, translation in zip(texts, translations, strict=True):
        if reason := _translation_fault(segment, translation):
            set_aside.add([BadSample(segment.path, segment.id, reason, NO_TRANSLATION)])
        else:
            translated.append((segment, translation.text))
    if not translated:
        raise StageError("no segment has a translation", f"see {context.folder / 'set_aside.jsonl'}", 2)
    pairs = [
        WordPair([word for word, _, _ in _aligned_words(segment)] or segment.text.split(), _units(target))
        for segment, target in translated
    ]
    rows, aligned = [], {}
    for (segment, target), links in zip(translated, align_words(pairs), strict=True):
        words = _aligned_words(segment)
        row = segment.model_dump() | {"target": target, "translated_by": translator.facts}
        if words:
            ends_s = due_times(links, [end_s for _, _, end_s in words])
            row["target_ends_s"] = [round(end_s, 3) for end_s in ends_s]
            aligned[segment.id] = row
        else:
            reason = (
                "its words have no times: add the step `alignment` to `annotate` (steps: {alignment: {}})"
            )
            set_aside.add([BadSample(segment.path, segment.id, reason, NO_TIMES)])
        rows.append(row)
    write_jsonl(context.folder / "segments.jsonl", rows)
    recordings = _aligned_recordings(segments, aligned)
    write_jsonl(context.folder / "recordings.jsonl", recordings)
    return {
        "translated": len(rows),
        "recordings": len(recordings),
        "words": sum(len(pair.target) for pair in pairs),
        "set_aside": len(set_aside.rows),
    }


# Private


def _translate(
    translator: Translator, segments: Sequence[SegmentRow], config: TranslateConfig, context: Context
) -> list[TranslatedText]:
    """Translate batch by batch; what an earlier attempt translated is read from `kept.jsonl`."""
    from audiollm.evaluate.report.store import RowStore
    from pipelines.translate.translators import TranslatedText

    store = RowStore(context.folder / "kept.jsonl")
    pending = [
        segment for segment in segments if store.get(translator.facts, segment.id, segment.text) is None
    ]
    with context.progress("translating", len(pending)) as bar:
        for first in range(0, len(pending), config.batch_size):
            batch = pending[first : first + config.batch_size]
            for segment, (text, problem) in zip(batch, translator.translate(batch), strict=True):
                row = {"text": text, "problem": problem}
                store.add(row, translator.facts, segment.id, segment.text)
                bar.advance(bar.task_ids[0])
    rows = [store.get(translator.facts, segment.id, segment.text) or {} for segment in segments]
    return [TranslatedText(row["text"], row["problem"]) for row in rows]


def _translation_fault(segment: SegmentRow, translation: TranslatedText) -> str:
    """The reason why a translation cannot be used; empty where it can."""
    from audiollm.data.text.repeated_words import loop_reason

    if translation.problem:
        return translation.problem
    if not translation.text.strip():
        return "the translation is empty"
    sources, targets = len(segment.text.split()), len(_units(translation.text))
    if targets > SPARE_WORDS + MAX_WORDS_PER_WORD * sources:
        return f"a translation of {targets} words for {sources}: {translation.text[:60]!r}"
    if reason := loop_reason(translation.text, segment.duration_s):
        return f"the translation is {reason}: {translation.text[:60]!r}"
    return ""


def _units(target: str) -> list[str]:
    from audiollm.data.records.aligned_recording import target_units

    return [unit.text for unit in target_units(target)]


def _aligned_words(segment: SegmentRow) -> list[tuple[str, float, float]]:
    """Words with start and end in seconds from the start of the segment, as `alignment` measured them."""
    measured = (segment.model_extra or {}).get("measured") or {}
    words = (measured.get("alignment") or {}).get("words") or []
    return [(str(word["word"]), float(word["start_s"]), float(word["end_s"])) for word in words]


def _aligned_recordings(
    segments: Sequence[SegmentRow], aligned: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The recordings of which every segment that has a text has a translation with times, as `compose_streams` reads
    them."""
    by_path: dict[str, list[SegmentRow]] = defaultdict(list)
    for segment in segments:
        if segment.text.strip():
            by_path[segment.path].append(segment)
    recordings = []
    for path, members in by_path.items():
        if any(segment.id not in aligned for segment in members):
            continue
        members = sorted(members, key=lambda segment: segment.start_s)
        rows = [aligned[segment.id] for segment in members]
        words = [
            {
                "text": word,
                "start_s": round(segment.start_s + start_s, 3),
                "end_s": round(segment.start_s + end_s, 3),
            }
            for segment in members
            for word, start_s, end_s in _aligned_words(segment)
        ]
        recordings.append(
            {
                "id": members[0].id,
                "audio": path,
                "text": " ".join(segment.text for segment in members),
                "target": " ".join(row["target"] for row in rows),
                "target_ends_s": [
                    round(segment.start_s + end_s, 3)
                    for segment, row in zip(members, rows, strict=True)
                    for end_s in row["target_ends_s"]
                ],
                "words": words,
                "speaker": members[0].speaker,
                "split": members[0].split,
            }
        )
    return recordings


def _plan_translation(config: TranslateConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    names = ("clips", "audio_s")
    facts = {name: sum(planned_fact(plans, path, name) for path in config.segments) for name in names}
    clips = facts["clips"]
    seconds = SECONDS_PER_TEXT if config.model is not None else 0.02
    return StagePlan(
        memory_mb=1500 if config.model is not None else 200,
        core_seconds=5 + seconds * clips if clips else None,
        note=f"{clips:.0f} texts by {config.translator}" if clips else f"by {config.translator}",
        facts=facts,
    )


STAGE = Stage(
    kind="translate",
    config=TranslateConfig,
    run=run_translation,
    artifacts={"segments": "segments.jsonl", "recordings": "recordings.jsonl"},
    help="translate segments, and say when each word of a translation has its source",
    plan=_plan_translation,
    facts=lambda config: correction_digests(*config.segments),
)
