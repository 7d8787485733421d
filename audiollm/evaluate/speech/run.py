"""The stage `evaluate`, suite tts: is the requested text heard, in the requested voice?

The judges (`trained_judges.py`) hear the real test clips, the generated clips and, where given, real clips through
the codec alone. The result is the score relative to the real clips: no judge is right about all of these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.data.text.forms import comparison_form
from audiollm.devices import one_thread
from audiollm.errors import StageError, first_problem
from audiollm.evaluate.judges.independence import shared_weights_note
from audiollm.evaluate.judges.judging import JudgedClip, LoopRefused, SpeechClip, SpeechJudges
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import confusion, lengths, ratio, share, shares_by
from audiollm.evaluate.report.text_errors import word_error_rate
from audiollm.evaluate.speech.new_voices import new_voice_scores, new_voices
from audiollm.evaluate.speech.settings import EvaluationConfig, words_prefix
from audiollm.evaluate.speech.trained_judges import BAR, gather_judges
from audiollm.evaluate.speech.voices import voicing_scores
from audiollm.files.atomic import read_jsonl, write_json, write_jsonl
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required

MIN_REAL_SHARE = 0.5
"""Share of the real recordings below which a judge is not to be trusted."""


class GeneratedRow(BaseModel):
    """A line of `generated.jsonl`; `path` is relative to that file's folder, or absolute."""

    model_config = ConfigDict(extra="ignore")

    id: str
    path: str
    text: str
    speaker: str | None = None
    language: str | None = None
    stopped: bool = True


def evaluate_speech(config: EvaluationConfig, context: Context) -> dict[str, Any]:
    """Train or load the judges, judge all clips, write the artifacts.

    Returns:
        The figures: `real_accuracy`, `generated_accuracy`, `relative_accuracy` by the judge named in `judge`,
        those of the recognizer and of the speaker judge, and the numbers of clips.

    Raises:
        StageError: no samples to train or to compare with, or a row of the JSONL that cannot be used.
    """
    train, real = read_takes(config.samples, context)
    sets = {"real": real, "generated": read_generated_clips(config.audio)}
    if config.reference_audio is not None:
        sets["reference"] = read_generated_clips(config.reference_audio)
    with one_thread():
        judges, facts = gather_judges(
            config, context, train, [clip for clips in sets.values() for clip in clips]
        )
        has_new_voices = judges.voices is not None and bool(
            new_voices(real, judges.classifiers["speaker"].labels)
        )
        judged_clips = {
            name: judge_all(clips, judges, context, f"hearing {name} clips", embedded=has_new_voices)
            for name, clips in sets.items()
        }
    scores = {name: score(sets[name], judged_clips[name], judges, may_fail=name != "real") for name in sets}
    recognizer = required(judges.recognizer).name
    result = {
        "suite": "tts", "judge": _describe_main_judge(judges), "recognizer": recognizer, "judges": facts, "sets": scores
    }  # fmt: skip
    note = shared_weights_note(config.model, judges.recognizer)
    if warnings := [*filter(None, [note]), *_deaf_judges(scores["real"], judges.names)]:
        for warning in warnings:
            context.say(f"note: {warning}")
        result["warnings"] = warnings
    result["voicing"] = voicing_scores(sets, context)
    if has_new_voices and (tables := _score_new_voices(sets, judged_clips, judges)):
        result["new_voices"] = tables
    result["relative"] = {judge: _relative_score(scores, judge) for judge in judges.names}
    rows = clip_rows(sets["generated"], judged_clips["generated"], judges, context.folder)
    write_jsonl(context.folder / "clips.jsonl", rows)
    write_json(context.folder / "scores.json", result)
    _print_scores(result, context)
    return speech_figures(result)


# ---------------------------------------------------------------------------------------------- reading


def read_takes(samples: Path, context: Context) -> tuple[list[SpeechClip], list[SpeechClip]]:
    """The training and the test clips of `samples.jsonl`."""
    good, bad = read_samples(samples)
    for row in bad[:3]:
        context.say(f"left out: {row}")
    takes: dict[str, list[SpeechClip]] = {"train": [], "test": []}
    for sample in good:
        if sample.metadata.get("split") and sample.audio("assistant"):
            takes["test" if sample.is_held_out else "train"].append(_as_speech_clip(sample))
    for split, purpose in (("train", "train the judges on"), ("test", "compare with")):
        if not takes[split]:
            problem = f"{samples}: no sample of split {split!r} with audio to {purpose}"
            raise StageError(problem, "see `split` of the stage compose", exit_code=2)
    return takes["train"], takes["test"]


def read_generated_clips(path: Path) -> list[SpeechClip]:
    """The clips of `generated.jsonl`, or of a file of the same form."""
    takes = []
    for number, values in enumerate(read_jsonl(path), start=1):
        try:
            row = GeneratedRow.model_validate(values)
        except ValidationError as error:
            where = f"{path}, row {number}"
            raise StageError(f"{where}: {first_problem(error)}", "run the stage generate again") from None
        clip = SpeechClip(
            row.id,
            comparison_form(row.text, row.language),
            path.parent / row.path,
            speaker=row.speaker,
            stopped=row.stopped,
            language=row.language,
        )
        takes.append(clip)
    if not takes:
        raise StageError(f"{path}: holds no clips", "run the stage generate again")
    return takes


def _as_speech_clip(sample: Sample) -> SpeechClip:
    audio_part = sample.audio("assistant")[-1]  # earlier ones are references, with texts of their own
    text, speaker = sample.metadata.get("text"), sample.metadata.get("speaker") or audio_part.speaker
    text = text if text is not None else sample.texts("user")[-1]
    return SpeechClip(
        sample.id,
        comparison_form(str(text), sample.language),
        Path(audio_part.path),
        "",
        speaker,
        start_s=audio_part.start_s,
        end_s=audio_part.end_s,
        language=sample.language,
    )


# ---------------------------------------------------------------------------------------------- judging


def judge_all(
    clips: Sequence[SpeechClip],
    judges: SpeechJudges,
    context: Context,
    description: str,
    embedded: bool = False,
) -> list[JudgedClip]:
    """Every judge's answer to every clip; a clip that cannot be read is reported and answered with its problem.

    Args:
        embedded: whether the judge of voices embeds it.
    """
    judged = []
    with context.progress(description, len(clips)) as progress:
        for clip in clips:
            judged.append(judges.judge(clip, embedded))
            if judged[-1].problem:
                context.say(f"cannot be heard: {clip.id}: {judged[-1].file_problem}")
            progress.advance(BAR)
    return judged


# ---------------------------------------------------------------------------------------------- scoring


def right(clip: SpeechClip, judged: JudgedClip, judge: str, judges: SpeechJudges) -> bool | None:
    """Whether a judge heard what was asked for; None: it cannot judge this clip (an unknown voice)."""
    expected = clip.speaker if judge == "speaker" else clip.text
    if judge == "speaker" and expected not in judges.classifiers[judge].labels:
        return None
    return _answer_of_judge(clip, judged, judge, judges) == expected


def score(
    clips: Sequence[SpeechClip], judged_clips: Sequence[JudgedClip], judges: SpeechJudges, may_fail: bool
) -> dict[str, Any]:
    """All tables of one set of clips.

    Args:
        may_fail: a clip that cannot be read counts as wrong (a generated one); else it is left out (a real
            clip, which as an error would flatter the model). Either way it is named in `unreadable`.
    """
    pairs = list(zip(clips, judged_clips, strict=True))
    unreadable = [{"id": clip.id, "problem": judged.file_problem} for clip, judged in pairs if judged.problem]
    if not may_fail:
        pairs = [(clip, judged) for clip, judged in pairs if not judged.problem]
    return {
        "n": len(pairs),
        "unreadable": unreadable,
        "durations": lengths([judged.duration_s for _, judged in pairs if not judged.problem]),
        "not_stopped": sum(not clip.stopped for clip, _ in pairs) / len(pairs) if pairs else None,
        **{judge: _score_judge(pairs, judge, judges) for judge in judges.names},
    }


def _score_judge(
    pairs: Sequence[tuple[SpeechClip, JudgedClip]], judge: str, judges: SpeechJudges
) -> dict[str, Any]:
    cases = [(clip, judged, right(clip, judged, judge, judges)) for clip, judged in pairs]
    judged_cases = [(clip, judged, correct) for clip, judged, correct in cases if correct is not None]
    correct = [row[2] for row in judged_cases]
    expected = [row[0].speaker or "" if judge == "speaker" else row[0].text for row in judged_cases]
    got = [_answer_of_judge(clip, judged, judge, judges) or "" for clip, judged, _ in judged_cases]
    labels = judges.closed_set(judge)
    result = share(correct)
    result["not_judged"] = len(cases) - len(judged_cases)
    if judge != "speaker":
        result["word_error_rate"] = word_error_rate(expected, got)
    if labels is not None:
        result["by_text"] = shares_by([row[0].text for row in judged_cases], correct)
        result["confusion"] = confusion(expected, got, labels)
    result["by_speaker"] = shares_by([row[0].speaker or "(unknown)" for row in judged_cases], correct)
    return result


def _score_new_voices(
    sets: Mapping[str, Sequence[SpeechClip]],
    judged_clips: Mapping[str, Sequence[JudgedClip]],
    judges: SpeechJudges,
) -> dict[str, Any]:
    """The tables of `new_voice_scores`, each with the `word_error_rate` of its clips."""
    result = new_voice_scores(sets, judged_clips, judges.classifiers["speaker"].labels)
    for name, table in result["sets"].items() if result else ():
        pairs = [
            (clip, judged)
            for clip, judged in zip(sets[name], judged_clips[name], strict=True)
            if clip.speaker in result["voices"] and not (name == "real" and judged.problem)
        ]
        table["word_error_rate"] = _score_judge(pairs, required(judges.recognizer).name, judges)[
            "word_error_rate"
        ]
    return result


def clip_rows(
    clips: Sequence[SpeechClip], judged_clips: Sequence[JudgedClip], judges: SpeechJudges, folder: Path
) -> Iterator[dict[str, Any]]:
    """One row of `clips.jsonl` per generated clip; its path is relative to that file's folder."""
    for clip, judged in zip(clips, judged_clips, strict=True):
        answers = {name: _answer_of_judge(clip, judged, name, judges) for name in judges.names}
        yield {
            "id": clip.id,
            "path": os.path.relpath(required(clip.path), folder),
            "text": clip.text,
            "speaker": clip.speaker,
            "heard": {name: answers[name] for name in judges.names if name != "speaker"},
            "speaker_heard": answers.get("speaker"),
            "correct": {name: right(clip, judged, name, judges) for name in judges.names},
            "confidence": dict(judged.confidence),
            "duration_s": judged.duration_s,
            "stopped": clip.stopped,
            "problem": judged.file_problem or None,
        }


def _answer_of_judge(clip: SpeechClip, judged: JudgedClip, judge: str, judges: SpeechJudges) -> str | None:
    try:
        return judges.answer(judged, judge)
    except LoopRefused:  # what is made up over unclear speech: none of its words were heard
        return ""
    except MetricError as error:
        raise StageError(
            f"{clip.id}: {error.reason}", "run the stage again; report it if it fails again"
        ) from error


# ---------------------------------------------------------------------------------------------- figures


def _deaf_judges(real: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """A sentence for each judge that is wrong of most real recordings: of generated ones it says nothing."""
    shares = {name: _judge_score(real, name) for name in names}
    return [
        f"{name} is right of {share_right:.0%} of the real recordings alone, so what it says of generated ones tells "
        "nothing: do their texts and speakers fit them, and are there enough to train it on?"
        for name, share_right in shares.items()
        if share_right is not None and share_right < MIN_REAL_SHARE
    ]


def speech_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """The main figures of `scores.json`, flat, for the run's summary."""
    recognizer = result["recognizer"]
    main = "classifier" if result["judge"] == "classifier" else recognizer
    words = words_prefix(recognizer)
    flat: dict[str, Any] = {"judge": result["judge"], "recognizer": recognizer}
    for prefix, judge in (("", main), (words, recognizer), ("speaker_", "speaker")):
        for name, tables in result["sets"].items():
            flat[f"{prefix}{name}_accuracy"] = _judge_score(tables, judge)
            flat[f"{prefix}{name}_interval"] = _interval(tables, judge)
        flat[f"{prefix}relative" + ("" if prefix else "_accuracy")] = result["relative"].get(judge)
    for name, tables in result["sets"].items():
        flat[f"n_{name}"] = tables["n"]
        flat[f"{name}_duration_s"] = tables["durations"]["mean_s"]
        flat[f"{words}{name}_word_error_rate"] = tables[recognizer]["word_error_rate"]
        flat[f"{name}_voiced_share"] = result["voicing"][name]["voiced_share"]
        flat[f"{name}_pitch_right"] = result["voicing"][name]["pitch_right"]
    if "new_voices" in result:
        flat["new_voices"] = len(result["new_voices"]["voices"])
        for name, table in result["new_voices"]["sets"].items():
            flat[f"new_voice_{name}_accuracy"] = table["accuracy"]
            flat[f"new_voice_{name}_interval"] = [table["low"], table["high"]]
            flat[f"new_voice_{name}_word_error_rate"] = table["word_error_rate"]
    flat["not_stopped"] = result["sets"]["generated"]["not_stopped"]
    flat["unreadable"] = len(result["sets"]["generated"]["unreadable"])
    if result.get("warnings"):
        flat["warnings"] = result["warnings"]
    return flat


def _describe_main_judge(judges: SpeechJudges) -> str:
    if "classifier" in judges.classifiers:
        return "classifier"
    vocabulary = "closed grammar" if judges.grammar else "open vocabulary, 1 - word error rate"
    return f"{required(judges.recognizer).name}, {vocabulary}"


def _judge_score(tables: Mapping[str, Any], judge: str) -> float | None:
    """A judge's score of a set: the share of right clips; 1 - word error rate in an open vocabulary."""
    table = tables.get(judge)
    if table is None:
        return None
    if "confusion" in table:
        return table["accuracy"]
    rate = table["word_error_rate"]
    return None if rate is None else max(0.0, 1.0 - rate)


def _interval(tables: Mapping[str, Any], judge: str) -> list[float] | None:
    table = tables.get(judge)
    return [table["low"], table["high"]] if table and "confusion" in table and table["n"] else None


def _relative_score(scores: Mapping[str, Any], judge: str) -> float | None:
    return ratio(_judge_score(scores["generated"], judge), _judge_score(scores["real"], judge))


def _print_scores(result: Mapping[str, Any], context: Context) -> None:
    sets = list(result["sets"])
    context.say("".join([f"{'judge':<14}", *(f"{name + ' (n)':>18}" for name in sets), f"{'relative':>12}"]))
    for judge, relative in result["relative"].items():
        cells = []
        for name in sets:
            value, table = _judge_score(result["sets"][name], judge), result["sets"][name][judge]
            cells.append(f"{'-' if value is None else f'{value:.3f}'} ({table['n']})")
        last = "-" if relative is None else f"{relative:.3f}"
        context.say("".join([f"{judge:<14}", *(f"{cell:>18}" for cell in cells), f"{last:>12}"]))
    if "new_voices" in result:
        tables = [result["new_voices"]["sets"][name] for name in sets]
        numbers = ["-" if table["n"] == 0 else f"{table['accuracy']:.3f} ({table['n']})" for table in tables]
        context.say("".join([f"{'new voices':<14}", *(f"{number:>18}" for number in numbers)]))
    for title, key in (("voiced share", "voiced_share"), ("pitch right", "pitch_right")):
        values = [result["voicing"][name][key] for name in sets]
        numbers = ["-" if value is None else f"{value:.3f}" for value in values]
        context.say("".join([f"{title:<14}", *(f"{number:>18}" for number in numbers)]))
