"""Speaker diarization of one recording: the turns of its speakers, and where two speak at once.

Windows of speech become voices (`embedders.py`), voices become speakers (`linking.py`), and then the recording
teaches its own detector: windows that are surely one speaker are added up and cut together, so that it is known of each
whether its middle holds one speaker or two; a linear discriminant learns to tell these states apart, and the likeliest
path through them is the result. No weights come with it, and it knows the voices and the room at hand.

Shapes: W windows, N samples at 16 kHz, D embedding dimension, K speakers, S states (a speaker, or two of them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.annotate.voice.linking import group, unit

SAMPLE_RATE = 16000
WINDOW_S, HOP_S = 0.9, 0.2
_SHORTEST_S = 0.4
_SMOOTHING_WINDOWS = 2
"""Windows on either side that a voice is averaged with before clustering."""
_PURE_WINDOW_SHARE = 0.7
"""Share of the windows, those most like a neighbour, that is clustered: the others may hold two voices."""
MAX_CLUSTERED_WINDOWS = 1000
"""Most windows that are clustered and kept as sound, evenly spread; the rest of a long recording is compared."""
_CLEAN_WINDOW_SHARE, _MAX_CLEAN_WINDOWS = 0.6, 100
_MIXTURES_PER_PAIR = 24
_MAX_PAIRS = 12
_PAIR_WITHIN_S = 2.0
_BATCH = 256
_MIN_LOG_PROBABILITY = -50.0
PAUSE_S = 0.3

Array = NDArray[np.float32]
State = tuple[int, ...]


class Window(NamedTuple):
    """A window to be embedded; it represents its cell, the part of the speech nearer to it than to other windows."""

    start_s: float
    end_s: float
    cell_start_s: float
    cell_end_s: float


class SpeakerTurn(NamedTuple):
    start_s: float
    end_s: float
    speaker: int
    overlap: bool


class PathCosts(NamedTuple):
    """Costs of the Viterbi path, in nats: `change` of speaker, and `overlap` for each window with two speakers.
    `doubt` divides the discriminant's log probabilities, which are overconfident because windows overlap."""

    change: float = 3.0
    overlap: float = 0.0
    doubt: float = 10.0


COSTS = PathCosts()


class Diarization(NamedTuple):
    """Turns in order, and each speaker's voice `[K, D]`; speakers are numbered from 0 as they first appear."""

    turns: list[SpeakerTurn]
    voices_KD: Array


def diarize(
    embed: Callable[[Sequence[Array]], Array],
    blocks: Iterable[Array],
    spans: Sequence[Sequence[float]],
    threshold: float,
    num_speakers: int | None = None,
    max_speakers: int | None = None,
    min_turn_s: float = 0.3,
    costs: PathCosts = COSTS,
) -> Diarization:
    """Find the speaker turns within the spans of speech; where two speak at once, both have a turn, marked as overlap.

    Memory: the voices of all windows (5 a second of speech), and the sound of at most `MAX_CLUSTERED_WINDOWS` of them.

    Args:
        embed: windows of mono at 16 kHz `[N]` to voices `[W, D]` of length 1.
        blocks: the whole recording, mono at 16 kHz, end to end.
        spans: `[start_s, end_s]` of speech, in order.
        threshold, num_speakers, max_speakers: as for `voices.group`.
        min_turn_s: what is shorter goes to the turn before or after it.
    """
    windows = place_windows(spans)
    if not windows:
        return Diarization([], np.zeros((0, 0), np.float32))
    every = max(2, -(-len(windows) // MAX_CLUSTERED_WINDOWS))
    voices_WD, sounds = _embed_all(embed, blocks, windows, every)
    smooth_WD = _smooth(voices_WD, windows)
    window_indices = np.arange(0, len(windows), every)
    pure = window_indices[_pure(smooth_WD, windows, window_indices)]
    means_KD = group(smooth_WD[pure], threshold, num_speakers, max_speakers)
    labels_W = (smooth_WD @ means_KD.T).argmax(axis=1)
    present, labels_W = np.unique(labels_W, return_inverse=True)
    means_KD = means_KD[present]
    clean = _clean(smooth_WD, means_KD, labels_W, windows, window_indices)
    path: list[State] = [(int(label),) for label in labels_W]
    if len(means_KD) > 1:
        sound_of = {index: sounds[index // every] for indices in clean for index in indices}
        scores_WS, states = _state_scores(embed, voices_WD, windows, labels_W, clean, sound_of)
        path = [states[index] for index in _likeliest_path(scores_WS, states, windows, costs)]
    turns = join_turns(windows, path, min_turn_s)
    voices_KD = unit(np.stack([smooth_WD[indices].mean(axis=0) for indices in clean])).astype(np.float32)
    order = list(dict.fromkeys(turn.speaker for turn in turns))
    renamed = [turn._replace(speaker=order.index(turn.speaker)) for turn in turns]
    return Diarization(renamed, voices_KD[order])


def place_windows(spans: Sequence[Sequence[float]]) -> list[Window]:
    """Place windows of `WINDOW_S` about every `HOP_S` within the spans of speech; each span has at least one.

    Args:
        spans: `[start_s, end_s]`, in order, apart from each other.
    """
    windows: list[Window] = []
    for start_s, end_s in spans:
        count = max(1, round((end_s - start_s) / HOP_S))
        step_s = (end_s - start_s) / count
        length_s = min(WINDOW_S, max(end_s - start_s, _SHORTEST_S))
        for index in range(count):
            middle_s = start_s + step_s * (index + 0.5)
            begin_s = max(min(max(middle_s - length_s / 2, start_s), end_s - length_s), 0.0)
            cell = (start_s + step_s * index, start_s + step_s * (index + 1))
            windows.append(Window(begin_s, begin_s + length_s, *cell))
    return windows


def cut_windows(blocks: Iterable[Array], windows: Sequence[Window]) -> Iterator[Array]:
    """Yield the sound of each window, `[N]`, from the blocks of a recording; only the necessary part is held.

    Args:
        blocks: mono at 16 kHz, end to end.
        windows: in order of their starts.
    """
    source, held_N, held_from = iter(blocks), np.zeros(0, np.float32), 0
    for window in windows:
        start, end = round(window.start_s * SAMPLE_RATE), round(window.end_s * SAMPLE_RATE)
        while held_from + len(held_N) < end and (block_N := next(source, None)) is not None:
            held_N, held_from = _from(start, np.concatenate([held_N, block_N]), held_from)
        held_N, held_from = _from(start, held_N, held_from)
        window_N = held_N[: max(0, end - max(start, held_from))]
        yield np.pad(window_N, (0, end - start - len(window_N)))


def _from(start: int, held_N: Array, held_from: int) -> tuple[Array, int]:
    """Drop the held samples before `start`; return the rest and the place of its first sample."""
    passed = min(max(0, start - held_from), len(held_N))
    return held_N[passed:], held_from + passed


def join_turns(windows: Sequence[Window], path: Sequence[State], min_turn_s: float) -> list[SpeakerTurn]:
    """Make turns from the state of each window, in order of their starts; overlap gives a turn to both speakers.

    A run of one state that is shorter than `min_turn_s` goes to the run that it touches (the longer one), if any;
    pauses of a speaker below `PAUSE_S` are bridged.
    """
    runs: list[tuple[float, float, State]] = []
    for window, state in zip(windows, path, strict=True):
        if runs and runs[-1][2] == state and window.cell_start_s - runs[-1][1] < PAUSE_S:
            runs[-1] = (runs[-1][0], window.cell_end_s, state)
        else:
            runs.append((window.cell_start_s, window.cell_end_s, state))
    runs = _without_short(runs, min_turn_s)
    turns: list[SpeakerTurn] = []
    for start_s, end_s, state in runs:
        turns += [SpeakerTurn(start_s, end_s, speaker, len(state) > 1) for speaker in state]
    return turns


def _without_short(
    runs: list[tuple[float, float, State]], min_turn_s: float
) -> list[tuple[float, float, State]]:
    """Merge short runs into their neighbours, the shortest first; a run that touches no other stays."""
    runs = list(runs)
    isolated_runs: set[tuple[float, float]] = set()
    while True:
        short = [
            (end - start, index)
            for index, (start, end, _) in enumerate(runs)
            if end - start < min_turn_s - 1e-6 and (start, end) not in isolated_runs
        ]
        if not short:
            return runs
        index = min(short)[1]
        start_s, end_s, _ = runs[index]
        near = [
            neighbour
            for neighbour in (index - 1, index + 1)
            if 0 <= neighbour < len(runs)
            and max(runs[neighbour][0] - end_s, start_s - runs[neighbour][1]) < PAUSE_S
        ]
        if not near:
            isolated_runs.add((start_s, end_s))
            continue
        into = max(near, key=lambda neighbour: runs[neighbour][1] - runs[neighbour][0])
        low, high = sorted((index, into))
        runs[low : high + 1] = [(runs[low][0], runs[high][1], runs[into][2])]
        for at in (low, low - 1):  # runs that are now beside one of the same state
            if (
                0 <= at < len(runs) - 1
                and runs[at][2] == runs[at + 1][2]
                and runs[at + 1][0] - runs[at][1] < PAUSE_S
            ):
                runs[at : at + 2] = [(runs[at][0], runs[at + 1][1], runs[at][2])]


def _embed_all(
    embed: Callable[[Sequence[Array]], Array], blocks: Iterable[Array], windows: Sequence[Window], every: int
) -> tuple[Array, list[Array]]:
    """Embed all windows `[W, D]`, and keep the sound of every `every`th."""
    voices_WD = np.zeros((0, 0), np.float32)
    sounds: list[Array] = []
    waiting: list[Array] = []
    for index, sound_N in enumerate(cut_windows(blocks, windows)):
        waiting.append(sound_N)
        if index % every == 0:
            sounds.append(sound_N.copy())
        if len(waiting) == _BATCH or index == len(windows) - 1:
            voices_BD = embed(waiting)
            if not len(voices_WD):
                voices_WD = np.zeros((len(windows), voices_BD.shape[1]), np.float32)
            voices_WD[index + 1 - len(waiting) : index + 1] = voices_BD
            waiting = []
    return voices_WD, sounds


def _smooth(voices_WD: Array, windows: Sequence[Window]) -> Array:
    """Average each voice with those of the windows around it that are near in time."""
    middle_W = _middles(windows)
    sum_WD = voices_WD.copy()
    for shift in range(1, _SMOOTHING_WINDOWS + 1):
        near_W = (middle_W[shift:] - middle_W[:-shift] <= _SMOOTHING_WINDOWS * HOP_S + HOP_S / 2)[:, None]
        sum_WD[shift:] += near_W * voices_WD[:-shift]
        sum_WD[:-shift] += near_W * voices_WD[shift:]
    return unit(sum_WD).astype(np.float32, copy=False)


def _pure(
    smooth_WD: Array, windows: Sequence[Window], window_indices: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Select the chosen windows that are most like one 0.4 or 0.8 s before or after."""
    middle_W = _middles(windows)
    likeness = np.full(len(window_indices), -1.0)
    for shift in (-4, -2, 2, 4):
        shifted = window_indices + shift
        inside = (shifted >= 0) & (shifted < len(windows))
        shifted = shifted.clip(0, len(windows) - 1)
        near = inside & (np.abs(middle_W[shifted] - middle_W[window_indices]) < 5 * HOP_S)
        like = np.sum(smooth_WD[window_indices] * smooth_WD[shifted], axis=1)
        likeness = np.where(near, np.maximum(likeness, like), likeness)
    alone = likeness < 0
    likeness[alone] = np.median(likeness)
    pure: NDArray[np.bool_] = likeness >= np.quantile(likeness, 1 - _PURE_WINDOW_SHARE)
    return pure


def _clean(
    smooth_WD: Array,
    means_KD: Array,
    labels_W: NDArray[np.int64],
    windows: Sequence[Window],
    window_indices: NDArray[np.int64],
) -> list[list[int]]:
    """Select for each speaker the windows with sound that are most like its mean, best first; at least one."""
    result = []
    own_W = np.sum(smooth_WD * means_KD[labels_W], axis=1)
    for speaker in range(len(means_KD)):
        mine = [int(index) for index in window_indices if labels_W[index] == speaker]
        long = [index for index in mine if windows[index].end_s - windows[index].start_s > WINDOW_S - 1e-6]
        best = sorted(long or mine, key=lambda index: -own_W[index])
        result.append(best[: min(_MAX_CLEAN_WINDOWS, max(4, round(_CLEAN_WINDOW_SHARE * len(best))))])
    return result


def _state_scores(
    embed: Callable[[Sequence[Array]], Array],
    voices_WD: Array,
    windows: Sequence[Window],
    labels_W: NDArray[np.int64],
    clean: Sequence[Sequence[int]],
    sound_of: dict[int, Array],
) -> tuple[NDArray[np.float64], list[State]]:
    """Compute the log probability of each state at the middle of each window, `[W, S]`, and the states."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    dice = np.random.default_rng(0)
    voices: list[Array] = []
    names: list[State] = []
    for speaker, indices in enumerate(clean):
        voices.append(voices_WD[indices])
        names += [(speaker,)] * len(indices)
    for pair in _select_speaker_pairs(labels_W, windows):
        pair_sounds = [[sound_of[index] for index in clean[speaker]] for speaker in pair]
        mixtures = _mix_windows(pair, pair_sounds, dice)
        voices.append(embed([sound_N for sound_N, _ in mixtures]))
        names += [state for _, state in mixtures]
    states = sorted(set(names), key=lambda state: (len(state), state))
    model = LinearDiscriminantAnalysis(
        solver="lsqr", shrinkage="auto", priors=np.full(len(states), 1 / len(states))
    )
    model.fit(np.concatenate(voices).astype(np.float64), [states.index(name) for name in names])
    parts = np.array_split(
        voices_WD, range(_BATCH, len(voices_WD), _BATCH)
    )  # hours in doubles at once are large
    scores_WS = np.concatenate([model.predict_log_proba(part_WD.astype(np.float64)) for part_WD in parts])
    return np.maximum(scores_WS, _MIN_LOG_PROBABILITY), states


def _select_speaker_pairs(labels_W: NDArray[np.int64], windows: Sequence[Window]) -> list[State]:
    """Select the pairs of speakers that most often speak right after one another: they may speak at once."""
    middle_W = _middles(windows)
    counts: Counter[State] = Counter()
    for index, (before, after) in enumerate(pairwise(labels_W.tolist())):
        if before != after and middle_W[index + 1] - middle_W[index] < _PAIR_WITHIN_S:
            counts[(min(before, after), max(before, after))] += 1
    return sorted(counts, key=lambda pair: (-counts[pair], pair))[:_MAX_PAIRS]


def _mix_windows(
    pair: State, sounds: Sequence[Sequence[Array]], dice: np.random.Generator
) -> list[tuple[Array, State]]:
    """Mix windows from two speakers' clean ones, and return them with the state in the middle of each."""
    size = round(WINDOW_S * SAMPLE_RATE)
    mixtures: list[tuple[Array, State]] = []
    for count in range(3 * _MIXTURES_PER_PAIR):
        swap = int(dice.integers(2))
        first_N, second_N = (
            np.resize(sounds[who][int(dice.integers(len(sounds[who])))], size) for who in (swap, 1 - swap)
        )
        second_N = second_N * np.float32(10 ** (dice.uniform(-3, 3) / 20))
        if count < _MIXTURES_PER_PAIR:  # one after the other
            cut = round(size * dice.uniform(0.15, 0.85))
            both_N = np.concatenate([first_N[:cut], second_N[cut:]])
            mixtures.append((both_N, (pair[swap] if cut > size / 2 else pair[1 - swap],)))
            continue
        start, end = round(size * dice.uniform(0, 0.4)), round(size * dice.uniform(0.6, 1))
        # two at once in the middle: throughout, a remark, or one ends where the other has begun
        shape = int(dice.integers(3))
        audible = slice(0, size) if shape == 0 else slice(start, end if shape == 1 else size)
        both_N = first_N.copy()
        if shape == 2:
            both_N[end:] = 0
        both_N[audible] += second_N[audible]
        mixtures.append((both_N, pair))
    return mixtures


def _likeliest_path(
    scores_WS: NDArray[np.float64], states: Sequence[State], windows: Sequence[Window], costs: PathCosts
) -> list[int]:
    """Viterbi: a change costs for each speaker who begins or ends, and the less the further apart two windows are."""
    change_SS = np.array([[len(set(a) ^ set(b)) for b in states] for a in states]) * costs.change / 2
    local_WS = scores_WS / costs.doubt - costs.overlap * np.array([len(state) > 1 for state in states])
    middle_W = _middles(windows)
    total_S = local_WS[0]
    back_WS = np.zeros(local_WS.shape, np.int64)
    for index in range(1, len(local_WS)):
        nearness = HOP_S / max(HOP_S, middle_W[index] - middle_W[index - 1])
        arrive_SS = total_S[:, None] - nearness * change_SS
        back_WS[index] = arrive_SS.argmax(axis=0)
        total_S = arrive_SS.max(axis=0) + local_WS[index]
    path = [int(total_S.argmax())]
    for index in range(len(local_WS) - 1, 0, -1):
        path.append(int(back_WS[index, path[-1]]))
    return path[::-1]


def _middles(windows: Sequence[Window]) -> NDArray[np.float64]:
    return np.array([(window.cell_start_s + window.cell_end_s) / 2 for window in windows])
