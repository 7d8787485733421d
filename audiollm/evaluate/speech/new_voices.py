"""Is a generated clip nearer to the voice that was asked for than to others, where no judge was trained on any of them?

Voices of the test recordings alone cannot be labels of the judge that is trained on the training recordings. It says
how like each of its own voices a clip is (anchor models: Sturim, Reynolds, Singer and Quatieri, ICASSP 2001), and clips
of one new voice are alike in that.

Shapes: N samples, K voices of the judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from audiollm.evaluate.judges.classifier import ClipClassifier
from audiollm.evaluate.judges.judging import JudgedClip, SpeechClip
from audiollm.evaluate.report.statistics import share

MIN_REAL_CLIPS = 2
"""Real clips that a new voice needs: one is compared with the others."""


class AnchorVoices:
    """Embeds a clip by how like it is to each voice that a classifier was trained on."""

    name = "speaker"

    def __init__(self, classifier: ClipClassifier) -> None:
        self._classifier = classifier

    def embed(self, samples_1N: Tensor, sample_rate: int) -> Tensor:
        """The classifier's scores about their mean, float32 `[K]` of length 1.

        Raises:
            MetricError: the clip is silent.
        """
        logits_K = self._classifier.logits(samples_1N, sample_rate)
        return functional.normalize(logits_K - logits_K.mean(), dim=0)


def new_voices(clips: Sequence[SpeechClip], known_voices: Collection[str]) -> set[str]:
    """Speakers of clips whom the judge of the voices was not trained on."""
    return {clip.speaker for clip in clips if clip.speaker and clip.speaker not in known_voices}


def new_voice_scores(
    sets: Mapping[str, Sequence[SpeechClip]],
    judged_clips: Mapping[str, Sequence[JudgedClip]],
    known_voices: Collection[str],
) -> dict[str, Any]:
    """How many clips of new voices are nearest to their own, by the cosine to the mean of each voice's real clips.

    A real clip is compared without itself. A generated clip that cannot be heard counts as wrong; a real one is left
    out.

    Args:
        sets: by name, with a set `real`.
        judged_clips: of each set, heard by `AnchorVoices`.
        known_voices: those that the judge was trained on.

    Returns:
        `voices`, those that are told apart, and `sets`: of each the share of the right ones. Empty where fewer than two
        new voices have `MIN_REAL_CLIPS` real clips.
    """
    real = zip(sets["real"], judged_clips["real"], strict=True)
    embeddings: dict[str, list[Tensor]] = defaultdict(list)
    for clip, judged in real:
        if clip.speaker and clip.speaker not in known_voices and isinstance(judged.embedding, Tensor):
            embeddings[clip.speaker].append(judged.embedding)
    sums = {
        voice: torch.stack(of_voice).sum(dim=0)
        for voice, of_voice in sorted(embeddings.items())
        if len(of_voice) >= MIN_REAL_CLIPS
    }
    if len(sums) < 2:
        return {}
    scores = {}
    for name, clips in sets.items():
        correct = []
        for clip, judged in zip(clips, judged_clips[name], strict=True):
            if clip.speaker not in sums or (name == "real" and not isinstance(judged.embedding, Tensor)):
                continue
            correct.append(
                _nearest_voice(judged.embedding, sums, clip.speaker if name == "real" else None)
                == clip.speaker
            )
        scores[name] = share(correct)
    return {"voices": list(sums), "sets": scores}


def _nearest_voice(embedding: object, sums: Mapping[str, Tensor], without: str | None) -> str | None:
    """The nearest voice; None for a clip without embedding.

    Args:
        sums: of the embeddings of each voice.
        without: the voice whose sum holds this embedding, which is taken out of it.
    """
    if not isinstance(embedding, Tensor):
        return None
    likeness = {
        voice: float(
            functional.cosine_similarity(embedding, sum_K - embedding if voice == without else sum_K, dim=0)
        )
        for voice, sum_K in sums.items()
    }
    return max(likeness, key=lambda voice: likeness[voice])
