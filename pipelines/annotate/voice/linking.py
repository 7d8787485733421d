"""Clustering of voices into persons: within a recording, of unknown number of speakers, and across recordings.

Shapes: W windows, K speakers, D embedding dimension. Voices are points on the unit sphere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
_MIN_WINDOWS_PER_SPEAKER = 4
_CANNOT_LINK = -2.0
_WARD_STOP, _FEW_WINDOWS, _MAX_WARD_SCALE = 6.0, 75, 2.5
"""Ward's rule stops at `_WARD_STOP` times 1 - threshold, a little early: merging by likeness of means then goes on.
The stop grows with the root of the windows per `_FEW_WINDOWS`, as Ward's heights do, by a factor of at most
`_MAX_WARD_SCALE`: without this limit, a long recording loses a speaker who says little."""


class FileSpeaker(NamedTuple):
    """One speaker of one file."""

    file: str
    name: str
    embedding: Sequence[float]
    seconds: float


def group(
    voices_WD: Array, threshold: float, num_speakers: int | None = None, max_speakers: int | None = None
) -> Array:
    """Cluster the voices of one recording into speakers, as mean voices `[K, D]`.

    Ward's rule first joins windows into groups that are surely one speaker; groups whose means are more alike than
    `threshold` are then one; and a group of less than four windows is nobody, unless there is no other.

    Args:
        voices_WD: at least one; its own square in memory is used.
        threshold: cosine likeness of two mean voices from which they are one speaker.
        num_speakers: known beforehand: exactly so many (fewer where there are fewer windows).
        max_speakers: at most so many, the least alike.
    """
    labels_W = np.zeros(len(voices_WD), np.int64)
    if len(voices_WD) > 1:
        tree = _ward(voices_WD)
        scale = min(_MAX_WARD_SCALE, max(1.0, len(voices_WD) / _FEW_WINDOWS) ** 0.5)
        labels_W = _cut_tree(tree, num_speakers, _WARD_STOP * (1 - threshold) * scale)
    if num_speakers is not None:
        return _average_voices(voices_WD, _nearest(voices_WD, _average_voices(voices_WD, labels_W)))
    labels_W = _nearest(voices_WD, _average_voices(voices_WD, labels_W))
    labels_W = _merge_similar_labels(voices_WD, labels_W, threshold, max_speakers)
    means_KD = _average_voices(voices_WD, labels_W)
    counts_K = np.bincount(labels_W)
    means_KD = means_KD[counts_K >= min(_MIN_WINDOWS_PER_SPEAKER, int(counts_K.max()))]
    for _ in range(2):
        means_KD = _average_voices(voices_WD, _nearest(voices_WD, means_KD))
    return means_KD


def link(voices: Iterable[FileSpeaker], threshold: float = 0.83) -> dict[tuple[str, str], str]:
    """Link speakers across files: map (file, name) to a name that is the same wherever the voice occurs.

    The two most alike groups of voices become one, again and again, until none are more alike than `threshold`
    (likeness of two groups: the mean of that of their voices, each weighted with its seconds). Two speakers of one file
    are never one. The result does not depend on the order of what comes in: groups are named `V0`, `V1`, … by the
    first (file, name) in each.

    Args:
        voices: no (file, name) twice; embeddings of one length, and of one embedder. Their square is held: 1.6 GB for
            20,000 of them.
        threshold: cosine likeness from which two voices are one speaker; the default suits resemblyzer.

    Raises:
        ValueError: a (file, name) comes twice.
    """
    ordered = sorted(voices, key=lambda voice: (voice.file, voice.name))
    keys = [(voice.file, voice.name) for voice in ordered]
    if len(set(keys)) < len(keys):
        double = next(key for key, after in pairwise(keys) if key == after)
        raise ValueError(f"speaker {double[1]!r} of {double[0]} comes twice: give each file once")
    if not ordered:
        return {}
    voices_GD = unit(np.array([voice.embedding for voice in ordered], np.float64))
    likeness_GG = (voices_GD @ voices_GD.T).astype(np.float32)
    files = np.array([voice.file for voice in ordered])
    likeness_GG[files[:, None] == files[None]] = _CANNOT_LINK  # the diagonal as well
    members = _cluster_groups(likeness_GG, [max(voice.seconds, 1e-3) for voice in ordered], threshold)
    named = {first: f"V{count}" for count, first in enumerate(sorted(min(group) for group in members))}
    return {keys[index]: named[min(group)] for group in members for index in group}


def unit(voices_WD: NDArray[np.floating]) -> NDArray[np.floating]:
    """Scale vectors to length 1; zeros stay zeros."""
    return voices_WD / np.maximum(np.linalg.norm(voices_WD, axis=1, keepdims=True), 1e-9)


def _cluster_groups(likeness_GG: Array, weights: Sequence[float], threshold: float) -> list[list[int]]:
    """Cluster by weighted average linkage down to `threshold`; groups inherit `_CANNOT_LINK` from their members.

    `likeness_GG` is used up. Each row's nearest is kept, so that a merge costs about as much as one row.
    """
    members, weights_G = [[index] for index in range(len(weights))], np.array(weights)
    nearest_G = likeness_GG.argmax(axis=1)
    best_G = likeness_GG.max(axis=1)
    while True:
        first = int(best_G.argmax())
        if best_G[first] < threshold:
            return [group for group in members if group]
        first, second = sorted((first, int(nearest_G[first])))
        members[first] += members[second]
        members[second] = []
        share = weights_G[first] / (weights_G[first] + weights_G[second])
        weights_G[first] += weights_G[second]
        row_G = share * likeness_GG[first] + (1 - share) * likeness_GG[second]
        row_G[(likeness_GG[first] == _CANNOT_LINK) | (likeness_GG[second] == _CANNOT_LINK)] = _CANNOT_LINK
        likeness_GG[first], likeness_GG[:, first] = row_G, row_G
        likeness_GG[second], likeness_GG[:, second] = _CANNOT_LINK, _CANNOT_LINK
        closer_G = row_G > best_G
        nearest_G[closer_G], best_G[closer_G] = first, row_G[closer_G]
        stale = np.flatnonzero(np.isin(nearest_G, (first, second)) & ~closer_G)
        nearest_G[stale] = likeness_GG[stale].argmax(axis=1)
        best_G[stale] = likeness_GG[stale].max(axis=1)
        for group in (first, second):
            nearest_G[group], best_G[group] = likeness_GG[group].argmax(), likeness_GG[group].max()


def _ward(voices_WD: Array) -> NDArray[np.float64]:
    """Ward's tree over cosine distances, which tells windows of one speaker better than over Euclidean ones."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    distance_WW = np.clip(1 - voices_WD @ voices_WD.T, 0, 2).astype(np.float64)
    distance_WW = (distance_WW + distance_WW.T) / 2
    np.fill_diagonal(distance_WW, 0)
    tree: NDArray[np.float64] = linkage(squareform(distance_WW, checks=False), "ward")
    return tree


def _cut_tree(tree: NDArray[np.float64], count: int | None, height: float) -> NDArray[np.int64]:
    from scipy.cluster.hierarchy import fcluster

    labels_W = fcluster(tree, count, "maxclust") if count is not None else fcluster(tree, height, "distance")
    return np.asarray(labels_W, np.int64) - 1


def _average_voices(voices_WD: Array, labels_W: NDArray[np.int64]) -> Array:
    """Average the voices of each label that occurs, in the order of the labels."""
    means = [voices_WD[labels_W == label].mean(axis=0) for label in np.unique(labels_W)]
    return unit(np.stack(means)).astype(np.float32)


def _nearest(voices_WD: Array, means_KD: Array) -> NDArray[np.int64]:
    labels_W: NDArray[np.int64] = (voices_WD @ means_KD.T).argmax(axis=1)
    return labels_W


def _merge_similar_labels(
    voices_WD: Array, labels_W: NDArray[np.int64], threshold: float, max_groups: int | None
) -> NDArray[np.int64]:
    labels_W = np.unique(labels_W, return_inverse=True)[1]
    while labels_W.max() > 0:
        means_KD = _average_voices(voices_WD, labels_W)
        likeness_KK = means_KD @ means_KD.T
        np.fill_diagonal(likeness_KK, -2)
        first, second = divmod(int(likeness_KK.argmax()), len(means_KD))
        if likeness_KK[first, second] < threshold and len(means_KD) <= (max_groups or len(means_KD)):
            break
        labels_W[labels_W == second] = first
        labels_W = np.unique(labels_W, return_inverse=True)[1]
    return labels_W
