"""Suite `emotion`: is speech in the emotion that was asked for? Over the folder of ESD.

A model speaks each text after a prompt of the same speaker and emotion with another text. Word errors; the share of
clips in which a classifier names the emotion; the cosine of emotion embeddings with the prompt (what Higgs Audio V2
reports with emotion2vec as "SIM") and with the real recording of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from audiollm.errors import ConfigError
from audiollm.evaluate.judges.judging import (
    FileEmbeddings,
    JudgedClip,
    SpeechClip,
    SpeechJudges,
    cosine,
    digest,
    value_of,
)
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.report.statistics import confusion, metric_table, share, shares_by
from audiollm.evaluate.report.store import Row
from audiollm.evaluate.report.suite import (
    Example,
    ScoreTable,
    Sound,
    SuiteResult,
    metric_cells,
    reasons_of,
    share_tiles,
)
from audiollm.evaluate.speech.esd import EMOTIONS, Utterance
from audiollm.evaluate.speech.scoring import Bench, error_summary, rate_of, word_errors
from audiollm.evaluate.speech.tts import error_rows, judge_names, judged_by
from audiollm.failures import failed_calls
from audiollm.pages.formats import with_interval

VERSION = 1
_STEMS = {"neu": "Neutral", "hap": "Happy", "joy": "Happy", "ang": "Angry", "sad": "Sad", "sur": "Surprise"}
LIKENESS = {
    "prompt_similarity": "emotion similarity to the prompt ↑",
    "real_similarity": "emotion similarity to the real recording ↑",
}


def evaluate_emotion(
    utterances: Sequence[Utterance], clips: Mapping[str, SpeechClip], bench: Bench, about: str = ""
) -> SuiteResult:
    """Judge every clip.

    Args:
        clips: by the utterances' ids. A clip that is the real recording itself has no similarity to it.

    Raises:
        ConfigError: the judge has labels, and none of them is an emotion of ESD.
    """
    emotion_of_label = esd_labels(getattr(bench.judges.voices, "labels", None))
    bench = replace(bench, judges=_with_emotions(bench.judges, emotion_of_label))
    embedded = FileEmbeddings(bench.judges.voices)
    rows: list[Row] = []
    for utterance in utterances:
        rows.append(_emotion_row(utterance, clips[utterance.id], embedded, emotion_of_label, bench))
        bench.advance(utterance.id)
    words = error_summary(rows, bench.form)
    judged = [row for row in rows if isinstance(row["right"], bool)]
    accuracy = share([row["right"] for row in judged])
    unjudged = metric_table([1.0 if isinstance(row["right"], bool) else row["right"] for row in rows])[
        "reasons"
    ]
    expected, named = [row["emotion"] for row in judged], [row["named"] for row in judged]
    likeness = {name: metric_table([row[name] for row in rows]) for name in LIKENESS}
    recognized = {**accuracy, "not_available": len(rows) - len(judged), "reasons": unjudged}
    result = {
        "suite": "emotion",
        "judges": judge_names(bench),
        "language": bench.form.language,
        "clips": len(rows),
        "words": words,
        "emotion": recognized,
        "by_emotion": shares_by(expected, [row["right"] for row in judged]),
        "by_speaker": shares_by([row["speaker"] for row in judged], [row["right"] for row in judged]),
        "confusion": confusion(expected, named, EMOTIONS),
        **likeness,
    }
    return SuiteResult(
        "Emotion",
        [line for line in (about, judged_by(bench)) if line],
        result,
        [error_rows({"clips": words}), *_tables(result)],
        [
            _utterance_example(row, utterance)
            for row, utterance in sorted(zip(rows, utterances, strict=True), key=_utterance_badness)
        ],
        [(row["id"], row[key]) for row in rows for key in ("errors", "right") if _is_failure(row[key])],
        tiles=[
            *share_tiles("emotion recognized", recognized),
            *share_tiles(f"{words['unit']} errors", words, "rate"),
        ],
    )


def esd_labels(labels: Sequence[str] | None) -> dict[str, str]:
    """ESD's emotions by a judge's labels (`ang`, `anger`, `Angry`, ...); labels of other emotions are left out.

    Raises:
        ConfigError: there are labels, and none of them is an emotion of ESD.
    """
    emotion_of_label = {}
    for label in labels or ():
        stem = label.rpartition("/")[2].strip().lower()[:3]  # emotion2vec writes 生气/angry
        if stem in _STEMS:
            emotion_of_label[label] = _STEMS[stem]
    if labels and not emotion_of_label:
        raise ConfigError(
            f"the judge's labels name no emotion of ESD: {', '.join(labels[:8])}",
            "--emotion-judge",
            f"its config's id2label must name some of {', '.join(EMOTIONS)}",
        )
    return emotion_of_label


def _emotion_row(
    utterance: Utterance,
    clip: SpeechClip,
    embedded: FileEmbeddings,
    emotion_of_label: Mapping[str, str],
    bench: Bench,
) -> Row:
    about = {
        "id": utterance.id,
        "speaker": utterance.speaker,
        "emotion": utterance.emotion,
        "text": utterance.text,
        "path": str(clip.path) if clip.path else None,
    }
    try:
        if clip.path is None:
            raise MetricError(clip.problem)
        prompt = digest(utterance.prompt) if utterance.prompt else None
        contents = [digest(clip.path), prompt, digest(utterance.path)]
        depends_on = ["emotion", VERSION, bench.fingerprint, bench.form.name, bench.form.language]
        depends_on += [utterance.text, utterance.emotion, *contents]
        earlier_row = bench.store.get(*depends_on)
        if earlier_row is not None:
            bench.judges.note_earlier_answers()
            return {**earlier_row, **about}
        failed_before = failed_calls()
        judged = bench.judges.judge(clip)
        if judged.problem:
            raise MetricError(judged.problem)
    except MetricError as error:
        reasons = dict.fromkeys(["errors", "right", *LIKENESS], error.reason)
        return {**about, "heard": None, "named": None, "missing": True, **reasons}
    row = {**about, "duration_s": judged.duration_s, **word_errors(judged, utterance.text, bench.form)}
    row |= _judge_emotion(judged, utterance.emotion, emotion_of_label, bench.judges)
    real = None if contents[0] == contents[2] else utterance.path
    for name, other_path, reason in (
        ("prompt_similarity", utterance.prompt, "no prompt"),
        ("real_similarity", real, "it is the real recording"),
    ):
        try:
            if other_path is None:
                raise MetricError(reason)
            row[name] = cosine(embedded.of(other_path), value_of(judged.embedding))
        except MetricError as error:
            row[name] = error.reason
    if failed_calls() == failed_before:  # else the next run asks again
        bench.store.add(row, *depends_on)
    return row


@dataclass(frozen=True)
class _EmotionLabels:
    """A judge's `classify` as a `LabelJudge`."""

    judge: Any

    @property
    def name(self) -> str:
        return str(self.judge.name)

    @property
    def labels(self) -> Sequence[str]:
        return list(self.judge.labels)

    def predict(self, samples_CN: Tensor, sample_rate: int) -> tuple[str, float | None]:
        return str(self.judge.classify(samples_CN, sample_rate)), None


def _with_emotions(judges: SpeechJudges, emotion_of_label: Mapping[str, str]) -> SpeechJudges:
    """The judges, with the emotion judge's classifier among them if it names emotions of ESD."""
    return (
        replace(judges, classifiers={"emotion": _EmotionLabels(judges.voices)})
        if emotion_of_label
        else judges
    )


def _judge_emotion(
    judged: JudgedClip, emotion: str, emotion_of_label: Mapping[str, str], judges: SpeechJudges
) -> dict[str, Any]:
    """The emotion that the judge named, and whether it is the one asked for."""
    judge = judges.voices
    try:
        if judge is None:
            raise MetricError("no judge given")
        if not emotion_of_label:
            raise MetricError(f"{judge.name} names no emotions")
        if emotion not in emotion_of_label.values():
            raise MetricError(f"{judge.name} knows no {emotion}")
        label = value_of(judged.labels["emotion"])
    except MetricError as error:
        return {"named": None, "right": error.reason}
    named = emotion_of_label.get(label, label)
    return {"named": named, "right": named == emotion}


def _tables(result: Mapping[str, Any]) -> list[ScoreTable]:
    counts = result["confusion"]["counts"]
    rows = [["all", with_interval(result["emotion"], "accuracy"), str(result["emotion"]["n"]), *[""] * 6]]
    for place, emotion in enumerate(EMOTIONS):
        table = result["by_emotion"].get(emotion)
        if table:
            cells = [str(count) for count in counts[place]]
            rows.append([emotion, with_interval(table, "accuracy"), str(table["n"]), *cells])
    note = reasons_of([result["emotion"]])
    headings = ["asked", "named rightly ↑ (95 %)", "n", *EMOTIONS, "other"]
    likeness = [[LIKENESS[name], *metric_cells(result[name])] for name in LIKENESS]
    why = reasons_of(result[name] for name in LIKENESS)
    return [
        ScoreTable("emotion by the judge, and what it named", headings, rows, note),
        ScoreTable("emotion embeddings (cosine)", ["", "mean", "median", "n", "n/a"], likeness, why),
    ]


def _utterance_badness(pair: tuple[Row, Utterance]) -> tuple[bool, float, float]:
    row = pair[0]
    similarity = row["prompt_similarity"]
    return row["right"] is True, -rate_of(row), similarity if isinstance(similarity, float) else 0.0


def _utterance_example(row: Row, utterance: Utterance) -> Example:
    named = row["named"] if row["named"] is not None else f"n/a: {row['right']}"
    lines = [("asked", f"{utterance.emotion}: {utterance.text}"), ("heard", row["heard"] or "(nothing)")]
    lines.append(("emotion heard", str(named)))
    is_real = row["path"] == str(utterance.path)
    sounds = [Sound("generated", Path(row["path"]))] if row["path"] and not is_real else []
    sounds += [Sound("prompt", utterance.prompt)] if utterance.prompt else []
    return Example(utterance.id, lines, [*sounds, Sound("real", utterance.path)])


def _is_failure(reason: object) -> bool:
    return isinstance(reason, str) and reason != "no judge given"
