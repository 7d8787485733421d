"""The three judges of speech: what each is trained on or told, when it is left out, and what it hears.

Two classifiers are trained on the real training takes: one of texts, one of speakers.
Pocketsphinx is the third.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import TaskID

from audiollm.audio import AudioError, Waveform, load
from audiollm.evaluate.classifier import ClassifierConfig, ClipClassifier, train_classifier
from audiollm.evaluate.recognizers import PocketsphinxRecognizer
from audiollm.evaluate.stage import Config
from audiollm.runner import Context

MOST_LABELS = 60
FEWEST_CLIPS = 5
LONGEST_CLIP_S = 30.0
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
class Heard:
    """What the judges made of one take. A missing clip has a `problem`, and nothing was heard."""

    duration_s: float = 0.0
    problem: str = ""
    answers: Mapping[str, str] = field(default_factory=dict)
    confidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Judges:
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


def gather_judges(config: Config, context: Context, train: Sequence[Take], asked: Sequence[Take]) -> Judges:
    """All judges that this material allows, trained or found trained; for each that it does not, why.

    Args:
        train: real takes of the training split; nothing else trains a judge.
        asked: every take that will be judged; only their texts are looked at.
    """
    facts: dict[str, Any] = {}
    classifiers: dict[str, ClipClassifier] = {}
    for name, key, reason in (
        ("classifier", _text_of, why_no_text_judge(train, asked)),
        ("speaker", _speaker_of, why_no_speaker_judge(train)),
    ):
        if reason:
            facts[name] = {"left_out": reason}
            context.say(f"no {name} judge: {reason}")
            continue
        chosen = _training_takes(train, key, config)
        classifiers[name] = judge = _trained_judge(name, chosen, key, config, context)
        facts[name] = {
            "labels": judge.labels,
            "training_clips": len(chosen),
            "bandwidth_hz": judge.bandwidth_hz,
        }
    recognizer, grammar, note = _recognizer(sorted({take.text for take in asked} - {""}))
    facts["pocketsphinx"] = {"grammar": grammar, "note": note}
    return Judges(classifiers, recognizer, grammar, facts)


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


def _text_of(take: Take) -> str:
    return take.text


def _speaker_of(take: Take) -> str:
    return take.speaker or ""


def _training_takes(train: Sequence[Take], key: Callable[[Take], str], config: Config) -> list[Take]:
    if key is _speaker_of:
        known = _known_speakers(train)
        train = [take for take in train if take.speaker in known]
    if len(train) <= config.judge_clips:
        return list(train)
    return random.Random(config.seed).sample(list(train), config.judge_clips)


def _trained_judge(
    name: str, takes: Sequence[Take], key: Callable[[Take], str], config: Config, context: Context
) -> ClipClassifier:
    """The judge in the stage's folder, trained there first if it is not yet."""
    folder = context.folder / "judges" / name
    if (folder / "classifier.json").exists():
        context.say(f"judge {name}: trained before")
        return ClipClassifier.load(folder)
    clips, labels = [], []
    with context.progress(f"reading takes for judge {name}", len(takes)) as progress:
        for take in takes:
            progress.advance(BAR)
            try:
                clip = _load(take)
            except AudioError as error:
                context.say(f"left out of training the judge: {error}")
                continue
            clips.append((clip.samples_CN, clip.sample_rate))
            labels.append(key(take))
    with context.progress(f"training judge {name}", config.judge_steps) as progress:
        judge = train_classifier(
            clips,
            labels,
            ClassifierConfig(steps=config.judge_steps, seed=config.seed),
            on_step=lambda step, loss: progress.update(BAR, completed=step),
        )
    judge.save(folder)
    return judge


def _recognizer(texts: Sequence[str]) -> tuple[PocketsphinxRecognizer, list[str] | None, str]:
    """With the asked texts as its grammar if they are few and of known words, else open vocabulary."""
    if not 0 < len(texts) <= MOST_LABELS:
        note = f"open vocabulary: {len(texts)} different texts; a grammar holds 1 to {MOST_LABELS}"
        return PocketsphinxRecognizer(None), None, note
    try:
        return PocketsphinxRecognizer(texts), list(texts), ""
    except ValueError as error:
        return PocketsphinxRecognizer(None), None, f"open vocabulary: {error}"


def hear(takes: Sequence[Take], judges: Judges, context: Context, description: str) -> list[Heard]:
    """Every judge's answer to every take; what cannot be read is said, and answered with its problem."""
    heard = []
    with context.progress(description, len(takes)) as progress:
        for take in takes:
            try:
                heard.append(_hear_one(_load(take), judges))
            except AudioError as error:
                context.say(f"cannot be heard: {take.id}: {error}")
                heard.append(Heard(problem=str(error)))
            progress.advance(BAR)
    return heard


def _hear_one(clip: Waveform, judges: Judges) -> Heard:
    samples_CN = clip.samples_CN[:, : int(LONGEST_CLIP_S * clip.sample_rate)]
    answers: dict[str, str] = {"pocketsphinx": judges.recognizer.recognize(samples_CN, clip.sample_rate)}
    confidence: dict[str, float] = {}
    for name, classifier in judges.classifiers.items():
        answers[name], confidence[name] = classifier.predict(samples_CN, clip.sample_rate)
    return Heard(clip.duration_s, "", answers, confidence)


def _load(take: Take) -> Waveform:
    return load(take.path, take.start_s, take.end_s, sample_rate=JUDGE_RATE, mono=True)
