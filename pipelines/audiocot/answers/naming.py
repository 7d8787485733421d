"""Names of sounds by a tagger's scores, each at the level of AudioSet's tree that the scores support.

Shapes: F windows, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from audiollm.evaluate.judges.audioset import (
    abstract_classes,
    branch_of,
    broader_classes,
    class_depth,
    classes_above,
)
from audiollm.evaluate.judges.taggers import WindowScores
from pipelines.annotate.steps.events import SILENCE, runs_above, window_edges

NAME_SCORE = 0.75
"""Score from which a class names a sound. Of ESC-10's folds 1 and 2, by YAMNet, the surest name of a clip is its class
or the class above in 0.84, 0.88 and 0.90 of the clips that have a name from 0.59, 0.7 and 0.75 on: 0.80, 0.74 and 0.69
of all."""
_SECOND_SOUND_SCORE = 0.9
"""Score from which a class of another kind that is heard as long is a second sound and no wrong name of the first."""
_RIVAL_SHARE = 0.65
"""Share of a class's score from which one beside it in the tree makes its name doubtful: the broader one is taken."""
_MAX_KINDS = 20
"""A class of more kinds (an animal, a vehicle) is too broad to name a sound; music is one."""
_MUSIC = "Music"
_GROUPS = ("Respiratory sounds", "Human locomotion", "Human group actions")
"""Classes that taggers do not know. Of a cough, a sneeze and a throat clearing that are unsure each, one is sure."""
_PLACES = ("Acoustic environment", "Sound reproduction")
"""Branches that name where or by what a recording was made."""
_MANNERS = "Source-ambiguous sounds"
"""The branch that names how something sounds: of a named sound it is no second one."""


class SoundSpan(NamedTuple):
    """A sound without a break.

    Args:
        label: the class that names it; None: no class is sure enough.
        score: highest score of that class; without one, of any class.
    """

    label: str | None
    start_s: float
    end_s: float
    score: float


@dataclass
class _Candidate:
    """Windows `[first, end)` in which classes of one family are heard, and the highest score there of each class."""

    first: int
    end: int
    labels: set[str]
    peaks: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None


def name_sounds(
    window_scores: WindowScores, middles_s: Sequence[float], duration_s: float, onset: float, offset: float
) -> list[SoundSpan]:
    """Sounds in order of time: the runs of all classes by hysteresis, those of one family as one sound.

    Args:
        middles_s: of the windows, in the clip.
        onset: score from which a run begins.
        offset: score below which it ends.
    """
    edges_s = window_edges(middles_s, duration_s)
    labels, scores_FK = _with_groups(window_scores)
    columns = {label: column for column, label in enumerate(labels) if _is_sound(label)}
    candidates = _find_sound_candidates(scores_FK, columns, onset, offset)
    for candidate in candidates:
        peaks_K = scores_FK[candidate.first : candidate.end].max(axis=0)
        candidate.peaks = {label: float(peaks_K[column]) for label, column in columns.items()}
        candidate.name = _best_name(candidate.labels, candidate.peaks)
    _unify_names(candidates, offset)
    spans = []
    for candidate in candidates:
        members = [candidate.name] if candidate.name else candidate.labels
        score = max(candidate.peaks[member] for member in members)
        start_s, end_s = edges_s[candidate.first], edges_s[candidate.end]
        spans.append(SoundSpan(candidate.name, round(start_s, 3), round(end_s, 3), round(score, 4)))
    return sorted(spans, key=lambda span: (span.start_s, -span.score, span.label or ""))


def whole_name(label: str) -> str:
    """A class's name in lower case, with its synonyms: "Fire engine, fire truck (siren)" is "fire engine or fire truck
    (siren)", so that a list of names can be read."""
    return " or ".join(name for name in label.lower().split(", ") if name != "etc.")


def _with_groups(window_scores: WindowScores) -> WindowScores:
    """The scores with those of `_GROUPS`, each the sum over its kinds."""
    labels, scores_FK = window_scores
    groups = {}
    for group in [group for group in _GROUPS if group not in labels]:
        members = [column for column, label in enumerate(labels) if group in classes_above(label)]
        groups[group] = scores_FK[:, members].sum(axis=1).clip(max=1.0)
    return WindowScores([*labels, *groups], np.column_stack([scores_FK, *groups.values()]))


def _find_sound_candidates(
    scores_FK: NDArray[np.float32], columns: Mapping[str, int], onset: float, offset: float
) -> list[_Candidate]:
    """Runs of all classes, surest first, each joined to the sound of its family that it overlaps."""
    runs = [
        (float(scores_FK[first:end, column].max()), class_depth(label), label, first, end)
        for label, column in columns.items()
        for first, end in runs_above(scores_FK[:, column], onset, offset)
    ]
    candidates: list[_Candidate] = []
    for score, _, label, first, end in sorted(runs, reverse=True):
        beside = [sound for sound in candidates if min(end, sound.end) > max(first, sound.first)]
        relative = next((sound for sound in beside if _is_relative(label, sound.labels)), None)
        if relative is not None:
            relative.labels.add(label)
            relative.first, relative.end = min(first, relative.first), max(end, relative.end)
        elif not any(_is_wrong_name(label, score, first, end, sound) for sound in beside):
            candidates.append(_Candidate(first, end, {label}))
    return candidates


def _is_relative(label: str, members: set[str]) -> bool:
    return any(_share_a_name(label, member) for member in members)


def _share_a_name(label: str, member: str) -> bool:
    """Whether two classes may be one sound: the one is a kind of the other, or both of a class that can name it."""
    lines = [{name, *broader_classes(name)} for name in (label, member)]
    return label in lines[1] or member in lines[0] or any(_can_name(name) for name in lines[0] & lines[1])


def _is_wrong_name(label: str, score: float, first: int, end: int, surer: _Candidate) -> bool:
    """Whether a run that lies half and more in a surer sound of another kind is a wrong name of it.

    A part of a long sound may be another sound; it needs less to be one than a run that is about as long.
    """
    overlap = min(end, surer.end) - max(first, surer.first)
    is_part = 2 * overlap < surer.end - surer.first
    least_score = NAME_SCORE if is_part else _SECOND_SOUND_SCORE
    return 2 * overlap >= end - first and (score < least_score or label in branch_of(_MANNERS))


def _best_name(members: set[str], peaks: Mapping[str, float]) -> str | None:
    """The narrowest class that is sure and without a rival; where all have rivals, the one that they share."""
    line = members.union(*(broader_classes(label) for label in members)) & peaks.keys()
    sure = [label for label in line if peaks[label] >= NAME_SCORE and _can_name(label)]
    sure.sort(key=lambda label: (-class_depth(label), -peaks[label], label))
    for label in sure:
        if not any(_is_rival(member, label, peaks) for member in line):
            return label
    shared = [label for label in sure if all(label in (*broader_classes(name), name) for name in sure)]
    return next(iter(shared or sorted(sure, key=lambda label: -peaks[label])), None)


def _unify_names(candidates: Sequence[_Candidate], offset: float) -> None:
    """Give a sound one name throughout a clip: the broader one of two, and that of a relative where it has none."""
    names = {candidate.name for candidate in candidates if candidate.name}
    for candidate in candidates:
        if candidate.name:
            broader = broader_classes(candidate.name) & names
            candidate.name = min(broader, key=class_depth, default=candidate.name)
    names = {candidate.name for candidate in candidates if candidate.name}
    for candidate in candidates:
        if candidate.name is None:
            relatives = [name for name in names if _is_relative(name, candidate.labels)]
            audible = [name for name in relatives if candidate.peaks[name] >= offset]
            candidate.name = max(audible, key=lambda name: (candidate.peaks[name], name), default=None)


def _is_rival(member: str, label: str, peaks: Mapping[str, float]) -> bool:
    is_beside = member not in {label, *broader_classes(label)} and label not in broader_classes(member)
    return is_beside and peaks[member] >= _RIVAL_SHARE * peaks[label]


def _can_name(label: str) -> bool:
    if label in abstract_classes() and label not in _GROUPS:
        return False
    return len(branch_of(label)) <= _MAX_KINDS + 1 or label in branch_of(_MUSIC)


def _is_sound(label: str) -> bool:
    return label != SILENCE and not any(label in branch_of(place) for place in _PLACES)
