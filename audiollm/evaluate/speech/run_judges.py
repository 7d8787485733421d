"""The three judges of speech: what each is trained on or told, when it is left out, and what it hears.

Two classifiers are trained on the real training takes: one of texts, one of speakers.
Pocketsphinx is the third.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from rich.progress import TaskID

from audiollm.audio import AudioError, Waveform, load
from audiollm.evaluate.judges.classifier import (
    ClassifierConfig,
    ClipClassifier,
    UntrainableError,
    train_classifier,
)
from audiollm.evaluate.judges.features import Clip
from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer
from audiollm.evaluate.speech.settings import EvaluationConfig
from audiollm.recipe.runner import Context

MOST_LABELS = 60
FEWEST_CLIPS = 5
LONGEST_CLIP_S = 60.0
LONGEST_TRAINING_CLIP_S = 15.0
JUDGE_RATE = 16_000
BAR = TaskID(0)


@dataclass(frozen=True)
class Take:
    """Something to hear, and what should be heard: `text` is in the form that a recognizer writes."""

    id: str
    path: Path
    text: str
    speaker: str | None
    start_s: float = 0.0
    end_s: float | None = None
    stopped: bool = True


@dataclass(frozen=True)
class JudgedTake:
    """What the judges made of one take. A missing clip has a `problem`, and nothing was heard."""

    duration_s: float = 0.0
    problem: str = ""
    answers: Mapping[str, str] = field(default_factory=dict)
    confidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SpeechJudges:
    """The judges that can judge here: by name, a classifier of texts or speakers and a recognizer."""

    classifiers: Mapping[str, ClipClassifier]
    recognizer: PocketsphinxRecognizer
    grammar: Sequence[str] | None
    facts: Mapping[str, Any]

    def labels(self, judge: str) -> Sequence[str] | None:
        """All answers that a judge can give; None: an open vocabulary."""
        return self.grammar if judge == "pocketsphinx" else self.classifiers[judge].labels

    @property
    def names(self) -> list[str]:
        return [*self.classifiers, "pocketsphinx"]


def gather_judges(
    config: EvaluationConfig, context: Context, train: Sequence[Take], asked: Sequence[Take]
) -> SpeechJudges:
    """All judges that this material allows, trained or found trained; for each that it does not, why.

    Args:
        train: real takes of the training split; nothing else trains a judge.
        asked: every take that will be judged; only their texts are looked at.
    """
    facts: dict[str, Any] = {}
    labelled: dict[str, list[tuple[Take, str]]] = {}
    for name, reason, pairs in (
        ("classifier", why_no_text_judge(train, asked), [(take, take.text) for take in train]),
        ("speaker", why_no_speaker_judge(train), _with_known_speaker(train)),
    ):
        if reason:
            facts[name] = {"left_out": reason}
        else:
            labelled[name] = _choose(pairs, config)
    classifiers = _trained_judges(labelled, config, context)
    for name, pairs in labelled.items():
        judge = classifiers.get(name)
        if judge is None:
            facts[name] = {"left_out": "its training takes cannot be read, or are silent"}
        else:
            known = {"labels": judge.labels, "bandwidth_hz": judge.bandwidth_hz}
            facts[name] = {**known, "training_clips": len(pairs)}
    for name in ("classifier", "speaker"):
        if "left_out" in facts[name]:
            context.say(f"no {name} judge: {facts[name]['left_out']}")
    recognizer, grammar, note = _recognizer(sorted({take.text for take in asked} - {""}))
    facts["pocketsphinx"] = {"grammar": grammar, "note": note}
    return SpeechJudges(classifiers, recognizer, grammar, facts)


def why_no_text_judge(train: Sequence[Take], asked: Sequence[Take]) -> str:
    """Why the texts are not a closed set that a classifier can learn; empty where they are."""
    counts = Counter(take.text for take in train)
    if not 2 <= len(counts) <= MOST_LABELS:
        return f"{len(counts)} different training texts; a closed set has 2 to {MOST_LABELS}"
    rarest = min(counts, key=lambda text: (counts[text], text))
    if counts[rarest] < FEWEST_CLIPS:
        return f"only {counts[rarest]} training clips of {rarest!r}; each text needs at least {FEWEST_CLIPS}"
    unknown = sorted({take.text for take in asked} - set(counts))
    return f"{unknown[0]!r} is asked for and was never trained on" if unknown else ""


def why_no_speaker_judge(train: Sequence[Take]) -> str:
    """Why there are no speakers to tell apart; empty where there are."""
    number = len(_known_speakers(train))
    if 2 <= number <= MOST_LABELS:
        return ""
    return (
        f"{number} speakers with {FEWEST_CLIPS} or more training clips; 2 to {MOST_LABELS} can be told apart"
    )


def _known_speakers(train: Sequence[Take]) -> set[str]:
    counts = Counter(take.speaker for take in train if take.speaker)
    return {speaker for speaker, count in counts.items() if count >= FEWEST_CLIPS}


def _with_known_speaker(train: Sequence[Take]) -> list[tuple[Take, str]]:
    known = _known_speakers(train)
    return [(take, take.speaker) for take in train if take.speaker in known]


def _choose(pairs: Sequence[tuple[Take, str]], config: EvaluationConfig) -> list[tuple[Take, str]]:
    """At most `judge_clips` in all, a seeded choice of equally many of each label."""
    groups: dict[str, list[tuple[Take, str]]] = {}
    for take, label in pairs:
        groups.setdefault(label, []).append((take, label))
    quota = max(FEWEST_CLIPS, config.judge_clips // len(groups))
    draw = random.Random(config.seed)
    return [
        pair for _, group in sorted(groups.items()) for pair in draw.sample(group, min(quota, len(group)))
    ]


def _trained_judges(
    labelled: Mapping[str, Sequence[tuple[Take, str]]], config: EvaluationConfig, context: Context
) -> dict[str, ClipClassifier]:
    """The judges in the stage's folder, after training those that are not there yet."""
    folders = {name: context.folder / "judges" / name for name in labelled}
    missing = [name for name in labelled if not (folders[name] / "classifier.json").exists()]
    if missing:
        _train_missing({folders[name]: labelled[name] for name in missing}, config, context)
    return {name: ClipClassifier.load(f) for name, f in folders.items() if (f / "classifier.json").exists()}


def _train_missing(
    missing: Mapping[Path, Sequence[tuple[Take, str]]], config: EvaluationConfig, context: Context
) -> None:
    """Train a judge for each folder, side by side in threads; an interruption ends them all."""
    stop = Event()
    with context.progress("training judges", config.judge_steps * len(missing)) as progress:

        def advance(step: int, loss: float) -> None:
            if stop.is_set():
                raise InterruptedError
            progress.advance(BAR)

        with ThreadPoolExecutor(config.workers) as pool:
            running = [
                pool.submit(_train, pairs, f, config, context, advance) for f, pairs in missing.items()
            ]
            try:
                for future in running:
                    future.result()
            except BaseException:
                stop.set()
                raise


def _train(
    pairs: Sequence[tuple[Take, str]],
    folder: Path,
    config: EvaluationConfig,
    context: Context,
    on_step: Callable[[int, float], None],
) -> None:
    """Train one judge and save it; nothing is saved where its takes do not suffice."""
    clips: list[Clip] = []
    labels: list[str] = []
    for take, label in pairs:
        try:
            clip = _load(take, LONGEST_TRAINING_CLIP_S)
        except AudioError as error:
            context.say(f"judge {folder.name}: left out of its training: {error}")
            continue
        clips.append((clip.samples_CN, clip.sample_rate))
        labels.append(label)
    settings = ClassifierConfig(steps=config.judge_steps, seed=config.seed)
    try:
        judge = train_classifier(clips, labels, settings, on_step)
    except UntrainableError as error:
        context.say(f"judge {folder.name}: {error}")
        return
    judge.save(folder)


def _recognizer(texts: Sequence[str]) -> tuple[PocketsphinxRecognizer, list[str] | None, str]:
    """With the asked texts as its grammar if they are few and of known words, else open vocabulary."""
    if not 0 < len(texts) <= MOST_LABELS:
        note = f"open vocabulary: {len(texts)} different texts; a grammar holds 1 to {MOST_LABELS}"
        return PocketsphinxRecognizer(None), None, note
    try:
        return PocketsphinxRecognizer(texts), list(texts), ""
    except ValueError as error:
        return PocketsphinxRecognizer(None), None, f"open vocabulary: {error}"


def hear(takes: Sequence[Take], judges: SpeechJudges, context: Context, description: str) -> list[JudgedTake]:
    """Every judge's answer to every take; what cannot be read is said, and answered with its problem."""
    heard = []
    with context.progress(description, len(takes)) as progress:
        for take in takes:
            try:
                heard.append(_hear_one(_load(take, LONGEST_CLIP_S), judges))
            except AudioError as error:
                context.say(f"cannot be heard: {take.id}: {error}")
                heard.append(JudgedTake(problem=str(error)))
            progress.advance(BAR)
    return heard


def _hear_one(clip: Waveform, judges: SpeechJudges) -> JudgedTake:
    answers: dict[str, str] = {"pocketsphinx": judges.recognizer.recognize(clip.samples_CN, clip.sample_rate)}
    confidence: dict[str, float] = {}
    for name, classifier in judges.classifiers.items():
        answers[name], confidence[name] = classifier.predict(clip.samples_CN, clip.sample_rate)
    return JudgedTake(clip.duration_s, "", answers, confidence)


def _load(take: Take, longest_s: float) -> Waveform:
    end_s = take.start_s + longest_s
    return load(
        take.path,
        take.start_s,
        end_s if take.end_s is None else min(end_s, take.end_s),
        JUDGE_RATE,
        mono=True,
    )
