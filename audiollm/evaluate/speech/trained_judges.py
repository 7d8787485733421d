"""The three judges of the stage `evaluate`.

Two classifiers are trained on the real training clips: one of texts, one of speakers. The third is a recognizer:
Pocketsphinx, or a pretrained one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from rich.progress import TaskID
from torch import Tensor

from audiollm.audio import AudioError, Waveform
from audiollm.data.text.forms import comparison_form
from audiollm.evaluate.judges.classifier import (
    ClassifierConfig,
    ClipClassifier,
    UntrainableError,
    train_classifier,
)
from audiollm.evaluate.judges.features import Clip
from audiollm.evaluate.judges.judging import Recognizer, SpeechClip, SpeechJudges, load_span
from audiollm.evaluate.judges.pretrained import PretrainedRecognizer
from audiollm.evaluate.judges.recognizers import choose_grammar
from audiollm.evaluate.speech.new_voices import AnchorVoices
from audiollm.evaluate.speech.settings import EvaluationConfig
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required

MAX_TEXTS = 60
MAX_SPEAKERS = 300
MIN_CLIPS_PER_LABEL = 5
MAX_JUDGED_CLIP_S = 60.0
MAX_TRAINING_CLIP_S = {"classifier": 15.0, "speaker": 4.0}
"""Seconds of a clip that a judge is trained on: a text is heard whole, a voice in any part."""
JUDGE_RATE = 16_000
BAR = TaskID(0)


def gather_judges(
    config: EvaluationConfig,
    context: Context,
    train: Sequence[SpeechClip],
    judged_clips: Sequence[SpeechClip],
) -> tuple[SpeechJudges, dict[str, Any]]:
    """All judges that this material allows, trained now or loaded from the stage's folder.

    Args:
        train: real clips of the training split; nothing else trains a judge.
        judged_clips: every clip that will be judged; only their texts are looked at.

    Returns:
        The judges, and the facts about each for `scores.json`: its labels, or why it is left out.
    """
    facts: dict[str, Any] = {}
    labelled: dict[str, list[tuple[SpeechClip, str]]] = {}
    for name, reason, pairs in (
        ("classifier", why_no_text_judge(train, judged_clips), [(clip, clip.text) for clip in train]),
        ("speaker", why_no_speaker_judge(train), _label_by_speaker(train)),
    ):
        if reason:
            facts[name] = {"left_out": reason}
        else:
            labelled[name] = _select_balanced_clips(pairs, config)
    classifiers = _trained_judges(labelled, config, context)
    for name, pairs in labelled.items():
        judge = classifiers.get(name)
        if judge is None:
            facts[name] = {"left_out": "its training takes cannot be read, or are silent"}
        else:
            description = {"labels": judge.labels, "bandwidth_hz": judge.bandwidth_hz}
            facts[name] = {**description, "training_clips": len(pairs)}
    for name in ("classifier", "speaker"):
        if "left_out" in facts[name]:
            context.say(f"no {name} judge: {facts[name]['left_out']}")
    recognizer, grammar, note = _choose_words_judge(config, judged_clips)
    facts[recognizer.name] = {"grammar": grammar, "note": note}
    voices = AnchorVoices(classifiers["speaker"]) if "speaker" in classifiers else None
    judges = SpeechJudges(
        recognizer, voices, classifiers, grammar, max_clip_s=MAX_JUDGED_CLIP_S, sample_rate=JUDGE_RATE
    )
    return judges, facts


class ComparedRecognizer:
    """A pretrained recognizer whose transcripts are in the form in which texts are compared.

    Args:
        folder: of transformers or of CTranslate2.
        language: of the speech; None: a multilingual model detects it.
    """

    def __init__(self, folder: Path, language: str | None) -> None:
        self._recognizer, self._language = PretrainedRecognizer(folder, language), language
        self.name = self._recognizer.name
        self.digest = self._recognizer.digest

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        """See `Recognizer.recognize`."""
        return comparison_form(self._recognizer.recognize(samples_CN, sample_rate), self._language)


def _choose_words_judge(
    config: EvaluationConfig, judged_clips: Sequence[SpeechClip]
) -> tuple[Recognizer, list[str] | None, str]:
    """The recognizer, all texts that it can write (None: any), and a note about it."""
    if config.recognizer is None:
        return choose_grammar(sorted({clip.text for clip in judged_clips} - {""}))
    languages = {clip.language for clip in judged_clips} - {None}
    language = languages.pop() if len(languages) == 1 else None
    note = "open vocabulary" if language is None else f"open vocabulary, language {language}"
    return ComparedRecognizer(config.recognizer, language), None, note


def why_no_text_judge(train: Sequence[SpeechClip], judged_clips: Sequence[SpeechClip]) -> str:
    """Why the texts are not a closed set that a classifier can learn; empty where they are."""
    counts = Counter(clip.text for clip in train)
    if not 2 <= len(counts) <= MAX_TEXTS:
        return f"{len(counts)} different training texts; a closed set has 2 to {MAX_TEXTS}"
    rarest = min(counts, key=lambda text: (counts[text], text))
    if counts[rarest] < MIN_CLIPS_PER_LABEL:
        return f"only {counts[rarest]} training clips of {rarest!r}; each text needs at least {MIN_CLIPS_PER_LABEL}"
    unknown = sorted({clip.text for clip in judged_clips} - set(counts))
    return f"{unknown[0]!r} is asked for and was never trained on" if unknown else ""


def why_no_speaker_judge(train: Sequence[SpeechClip]) -> str:
    """Why no classifier of speakers can be trained; empty where one can."""
    number = len(_known_speakers(train))
    if 2 <= number <= MAX_SPEAKERS:
        return ""
    return f"{number} speakers with {MIN_CLIPS_PER_LABEL} or more training clips; 2 to {MAX_SPEAKERS} can be told apart"


def _known_speakers(train: Sequence[SpeechClip]) -> set[str]:
    counts = Counter(clip.speaker for clip in train if clip.speaker)
    return {speaker for speaker, count in counts.items() if count >= MIN_CLIPS_PER_LABEL}


def _label_by_speaker(train: Sequence[SpeechClip]) -> list[tuple[SpeechClip, str]]:
    known_speakers = _known_speakers(train)
    return [(clip, clip.speaker) for clip in train if clip.speaker in known_speakers]


def _select_balanced_clips(
    pairs: Sequence[tuple[SpeechClip, str]], config: EvaluationConfig
) -> list[tuple[SpeechClip, str]]:
    """A seeded choice of equally many clips of each label, at most `judge_clips` in all."""
    groups: dict[str, list[tuple[SpeechClip, str]]] = {}
    for clip, label in pairs:
        groups.setdefault(label, []).append((clip, label))
    quota = max(MIN_CLIPS_PER_LABEL, config.judge_clips // len(groups))
    draw = random.Random(config.seed)
    return [
        pair for _, group in sorted(groups.items()) for pair in draw.sample(group, min(quota, len(group)))
    ]


def _trained_judges(
    labelled: Mapping[str, Sequence[tuple[SpeechClip, str]]], config: EvaluationConfig, context: Context
) -> dict[str, ClipClassifier]:
    """The judges in the stage's folder; missing ones are trained first."""
    folders = {name: context.folder / "judges" / name for name in labelled}
    missing = [name for name in labelled if not (folders[name] / "classifier.json").exists()]
    if missing:
        _train_missing({folders[name]: labelled[name] for name in missing}, config, context)
    return {name: ClipClassifier.load(f) for name, f in folders.items() if (f / "classifier.json").exists()}


def _train_missing(
    missing: Mapping[Path, Sequence[tuple[SpeechClip, str]]], config: EvaluationConfig, context: Context
) -> None:
    """Train one judge per folder, in parallel threads; an interruption ends them all."""
    stop = Event()
    with context.progress("training judges", config.judge_steps * len(missing)) as progress:

        def advance(step: int, loss: float) -> None:
            if stop.is_set():
                raise InterruptedError
            progress.advance(BAR)

        with ThreadPoolExecutor(config.workers) as pool:
            running = [
                pool.submit(_train_judge, pairs, f, config, context, advance) for f, pairs in missing.items()
            ]
            try:
                for future in running:
                    future.result()
            except BaseException:
                stop.set()
                raise


def _train_judge(
    pairs: Sequence[tuple[SpeechClip, str]],
    folder: Path,
    config: EvaluationConfig,
    context: Context,
    on_step: Callable[[int, float], None],
) -> None:
    """Train one judge and save it; nothing is saved if its clips do not suffice."""
    waves: list[Clip] = []
    labels: list[str] = []
    for clip, label in pairs:
        try:
            wave = _load_judge_clip(clip, MAX_TRAINING_CLIP_S[folder.name])
        except AudioError as error:
            context.say(f"judge {folder.name}: left out of its training: {error}")
            continue
        waves.append((wave.samples_CN, wave.sample_rate))
        labels.append(label)
    settings = ClassifierConfig(steps=config.judge_steps, seed=config.seed)
    try:
        judge = train_classifier(waves, labels, settings, on_step)
    except UntrainableError as error:
        context.say(f"judge {folder.name}: {error}")
        return
    judge.save(folder)


def _load_judge_clip(clip: SpeechClip, max_s: float) -> Waveform:
    return load_span(required(clip.path), clip.start_s, clip.end_s, max_s, JUDGE_RATE)
