"""A judge of voices for samples whose speakers are few and known: a classifier, trained on their recordings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from audiollm.audio import AudioError
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.devices import one_thread
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.classifier import ClassifierConfig, UntrainableError, train_classifier
from audiollm.evaluate.judges.features import Clip
from audiollm.evaluate.judges.judging import load_span
from audiollm.evaluate.report.suite import spread_items
from audiollm.synthesis.run import text_and_speaker

STEPS = 400
"""Training steps, as the stage `evaluate` has by default."""
MAX_CLIPS, MAX_CLIP_S, RATE = 3000, 15.0, 16_000
MIN_CLIPS_PER_SPEAKER = 5
REMEDY = "give a voice_judge: the folder of an x-vector model of transformers, or an import path"


def recordings_of_speakers(samples: Sequence[Sample]) -> dict[str, list[AudioPart]]:
    """The recordings of each speaker in the training split, in the samples' order."""
    recordings_by_speaker: dict[str, list[AudioPart]] = defaultdict(list)
    for sample in samples:
        speaker, answer_audio = text_and_speaker(sample)[1], sample.audio("assistant")
        if speaker and answer_audio and not sample.is_held_out:
            recordings_by_speaker[speaker].append(answer_audio[-1])
    return recordings_by_speaker


def trained_voice_judge(
    samples: Sequence[Sample], folder: Path, seed: int, on_step: Callable[[int, float], None]
) -> Path:
    """Train a classifier of the samples' speakers, once.

    Args:
        folder: where it is saved; what is there already is taken.
        seed: of its training. A judge that evaluates the model later must have another one, and be its own.

    Returns:
        The folder, for `choose_speaker_judge`.

    Raises:
        ConfigError: fewer than two speakers have recordings enough.
    """
    if (folder / "classifier.json").exists():
        return folder
    of_speaker = recordings_of_speakers(samples)
    audible_speakers = {
        name: parts for name, parts in of_speaker.items() if len(parts) >= MIN_CLIPS_PER_SPEAKER
    }
    if len(audible_speakers) < 2:
        reason = f"{len(audible_speakers)} speakers have {MIN_CLIPS_PER_SPEAKER} training recordings, and 2 are needed"
        raise ConfigError(f"score.voice: {reason}", "", REMEDY)
    waves: list[Clip] = []
    labels: list[str] = []
    for name, parts in sorted(audible_speakers.items()):
        for audio_part in spread_items(parts, MAX_CLIPS // len(audible_speakers)):
            try:
                wave = load_span(
                    Path(audio_part.path), audio_part.start_s, audio_part.end_s, MAX_CLIP_S, RATE
                )
            except AudioError:
                continue
            waves.append((wave.samples_CN, wave.sample_rate))
            labels.append(name)
    try:
        with one_thread():
            judge = train_classifier(waves, labels, ClassifierConfig(steps=STEPS, seed=seed), on_step)
    except UntrainableError as error:
        raise ConfigError(f"score.voice: {error}", "", REMEDY) from error
    judge.save(folder)
    return folder
