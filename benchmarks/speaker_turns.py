"""Diarization error of the step `speakers` on mixtures whose turns are known, and on a meeting.

    python benchmarks/speaker_turns.py [--data ../shared/data] [--full] [--tuning] [--hours 3]

Mixtures of a minute (6, with `--full` 20) are made from LibriSpeech test-other (7 speakers, 2 to 4 in each, a tenth
of the speech overlaps); the settings were tuned on other speakers and seeds, the 40 of train-clean-100 (`--tuning`
scores those). The reference is where the clean clips are loud, the hypothesis starts from Silero VAD.
pyannote.metrics scores, overlap included; a collar of 0.25 s on each side of a boundary, or none. The peers: one
speaker for everything, and ours when told how many there are. `--hours`: a file of so many hours goes through in a
process of its own; time, and peak memory against 1 GB.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import bench_parser, parse_options, print_row
from numpy.typing import NDArray

from audiollm.audio import load
from audiollm.audio.streams import save_stream
from pipelines.annotate.step import Recording, RecordingMetadata
from pipelines.annotate.steps.speakers import Speakers, SpeakersConfig
from pipelines.annotate.voice.activity import VoiceActivity, speech_spans
from pipelines.steps.step import Listener

RATE = 16000
MEMORY_LIMIT_MB = 1000
Clips = dict[str, list[NDArray[np.float32]]]


class Turn(NamedTuple):
    start_s: float
    end_s: float
    speaker: str


class Case(NamedTuple):
    samples_N: NDArray[np.float32]
    turns: list[Turn]


BENCH = "speaker_turns"


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--mixtures", type=int, default=6)
    parser.add_argument(
        "--tuning", action="store_true", help="score the mixtures that the settings were tuned on"
    )
    parser.add_argument("--hours", type=float, default=0.0, help="a long file as well")
    arguments = parse_options(parser, mixtures=20)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*'uem' was approximated.*")
    if arguments.tuning:
        clips = {name: clips * 4 for name, clips in tuning_speakers(arguments.data).items()}
        cases = [mix(clips, 1000 + seed, 45) for seed in range(24)]
        score("tuning mixtures", cases)
    else:
        clips = test_speakers(arguments.data)
        cases = [mix(clips, seed, 60) for seed in range(arguments.mixtures)]
        score(f"{len(cases)} mixtures", cases)
        score("meeting excerpt", [meeting(arguments.data)])
    if arguments.hours:
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
            path = Path(folder) / "long.flac"
            pieces = (torch.from_numpy(case.samples_N)[None] for case in repeated(cases, arguments.hours))
            save_stream(path, pieces, RATE)
            spans = spans_of(repeated(cases, arguments.hours))
            used_mb, seconds, num_speakers = pool.apply(through, (path, spans))
        print_row(
            BENCH,
            f"{arguments.hours:g} h",
            used_mb,
            MEMORY_LIMIT_MB,
            "MB peak, limit as peer",
            minutes=round(seconds / 60, 2),
            real_time_factor=round(seconds / arguments.hours / 3600, 4),
            speakers=num_speakers,
        )


def score(name: str, cases: list[Case]) -> None:
    """Prints error and its parts with both collars, for ours, for one speaker, and for ours told the number."""
    spans = [spans_of([case]) for case in cases]
    began = time.process_time()
    turns_by_case = [turns_of(case, span, SpeakersConfig()) for case, span in zip(cases, spans, strict=True)]
    spent_s = time.process_time() - began
    sound_s = sum(len(case.samples_N) for case in cases) / RATE
    oracle_turns = [
        turns_of(case, span, SpeakersConfig(num_speakers=len({turn.speaker for turn in case.turns})))
        for case, span in zip(cases, spans, strict=True)
    ]
    single_turns = [[Turn(start_s, end_s, "one") for start_s, end_s in span] for span in spans]
    truth = [case.turns for case in cases]
    for collar_s in (0.25, 0.0):
        ours, single, oracle = (
            error(truth, turns, collar_s) for turns in (turns_by_case, single_turns, oracle_turns)
        )
        for peer_name, peer in (("one speaker", single), ("number told", oracle)):
            title, unit = f"{name}, collar {collar_s} s, peer: {peer_name}", "diarization error"
            print_row(BENCH, title, ours["error"], peer["error"], unit, parts=ours, peer_parts=peer)
    precision, recall = overlap_scores(truth, turns_by_case)
    overlapped_s = float(sum(_overlapped(turns).sum() for turns in truth)) / 100
    if overlapped_s:
        base = overlapped_s / sum(end_s - start_s for span in spans for start_s, end_s in span)
        print_row(
            BENCH, f"{name}, overlap, peer: all marked", precision, base, "precision", more_is_better=True,
            recall=round(recall, 4), overlap_s=round(overlapped_s, 1),
        )  # fmt: skip
    counts = Counter(
        len({turn.speaker for turn in turns}) - len({turn.speaker for turn in case.turns})
        for case, turns in zip(cases, turns_by_case, strict=True)
    )
    share = counts[0] / len(cases)
    off = {f"{key:+d}": counts[key] for key in sorted(counts)}
    print_row(BENCH, f"{name}, number of speakers", share, 1.0, "share right", more_is_better=True, off=off)
    unit, factor = "times real time, one core, without VAD", round(spent_s / sound_s, 4)
    speed = sound_s / spent_s
    print_row(BENCH, f"{name}, speed", speed, 1.0, unit, more_is_better=True, real_time_factor=factor)


def turns_of(case: Case, spans: list[list[float]], config: SpeakersConfig) -> list[Turn]:
    """Return the turns that the step finds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mixture.flac"
        save_stream(path, [torch.from_numpy(case.samples_N)[None]], RATE)
        value = _step(config).process(_recording(path, spans))
    return [Turn(turn["start_s"], turn["end_s"], turn["speaker"]) for turn in value["turns"]]


def through(path: Path, spans: list[list[float]]) -> tuple[float, float, int]:
    """A long file in this process: its peak memory in MB, the seconds that it took, and the number of speakers."""
    torch.set_num_threads(1)
    step = _step(SpeakersConfig())
    began = time.perf_counter()
    value = step.process(_recording(path, spans))
    status = Path("/proc/self/status").read_text()
    return (
        int(status.split("VmHWM:")[1].split()[0]) / 1024,
        time.perf_counter() - began,
        len(value["speakers"]),
    )


def error(truth: list[list[Turn]], hypotheses: list[list[Turn]], collar_s: float) -> dict[str, float]:
    """Diarization error over all cases and its parts, as shares of the speakers' time."""
    from pyannote.core import Annotation, Segment
    from pyannote.metrics.diarization import DiarizationErrorRate

    def annotation(turns: list[Turn]) -> Any:
        result = Annotation()
        for index, turn in enumerate(turns):
            result[Segment(turn.start_s, turn.end_s), index] = turn.speaker
        return result

    metric = DiarizationErrorRate(collar=2 * collar_s)  # pyannote's collar is centred on the boundary
    parts: Counter[str] = Counter()
    for reference, hypothesis in zip(truth, hypotheses, strict=True):
        parts.update(metric(annotation(reference), annotation(hypothesis), detailed=True))
    names = {"missed detection": "miss", "false alarm": "false_alarm", "confusion": "confusion"}
    shares = {short: round(parts[long] / parts["total"], 4) for long, short in names.items()}
    return {"error": round(sum(shares.values()), 4), **shares}


def overlap_scores(truth: list[list[Turn]], hypotheses: list[list[Turn]]) -> tuple[float, float]:
    """Precision and recall of the time in which two speak at once, whoever they are."""
    hits = marked = num_real = 0
    for real, hypothesis in zip(truth, hypotheses, strict=True):
        real_F, heard_F = _overlapped(real), _overlapped(hypothesis)
        size = min(len(real_F), len(heard_F))
        hits += int((real_F[:size] & heard_F[:size]).sum())
        marked, num_real = marked + int(heard_F.sum()), num_real + int(real_F.sum())
    return hits / max(1, marked), hits / max(1, num_real)


def test_speakers(data: Path) -> Clips:
    """Ten utterances of each of 7 speakers of test-other."""
    root = data / "librispeech_speakers" / "librispeech_test-other"
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
    return {folder.name: [_load_speech(path) for path in sorted(folder.glob("*.flac"))] for folder in folders}


def tuning_speakers(data: Path) -> Clips:
    """Return an utterance of each of 40 speakers of train-clean-100."""
    root = data / "librispeech_speakers" / "librispeech_train-clean-100"
    return {path.stem: [_load_speech(path)] for path in sorted(root.rglob("*.flac"))}


def meeting(data: Path) -> Case:
    """Six seconds of an AMI meeting, with turns as its annotators heard them."""
    folder = data / "dialogue" / "lhotse" / "test" / "fixtures" / "ami"
    [cut] = json.loads((folder / "cuts.json").read_text())
    turns = [
        Turn(supervision["start"], supervision["start"] + supervision["duration"], supervision["speaker"])
        for supervision in cut["supervisions"]
    ]
    return Case(_load_speech(next(folder.glob("*.wav"))), turns)


def mix(clips: Clips, seed: int, duration_s: float) -> Case:
    """Two to four of the speakers in turns: pauses, overlaps (a tenth of the speech) and short remarks."""
    dice = np.random.default_rng(seed)
    names = dice.choice(sorted(clips), size=int(dice.integers(2, 5)), replace=False)
    remaining = {name: [clips[name][at] for at in dice.permutation(len(clips[name]))] for name in names}
    gains = {name: 10 ** (dice.uniform(-4, 4) / 20) for name in names}
    total_N = np.zeros(round((duration_s + 20) * RATE), np.float32)
    turns: list[Turn] = []
    clock_s, last, last_s = 0.3, "", 0.0
    while clock_s < duration_s:
        options = [name for name in names if name != last and remaining[name]]
        if not options:
            break
        name = str(options[int(dice.integers(len(options)))])
        piece_N = _piece(remaining[name], dice)
        piece_N = piece_N * np.float32(gains[name] * 0.05 / np.sqrt(np.mean(piece_N**2)))
        kind = dice.random()
        length_s = len(piece_N) / RATE
        if not last or kind < 0.55:
            start_s = clock_s + dice.uniform(0.1, 1.0)
        else:
            start_s = clock_s - min(dice.uniform(0.3, 2.0), 0.7 * length_s, 0.7 * last_s)
        begin = round(start_s * RATE)
        total_N[begin : begin + len(piece_N)] += piece_N
        turns += [Turn(start_s + a, start_s + b, name) for a, b in speech(piece_N)]
        clock_s, last, last_s = max(clock_s, start_s + length_s), name, length_s
    total_N = total_N[: round((clock_s + 0.3) * RATE)]
    total_N += (1e-3 * dice.standard_normal(len(total_N))).astype(np.float32)
    return Case(total_N.clip(-1, 1), turns)


def speech(clip_N: NDArray[np.float32]) -> list[tuple[float, float]]:
    """Return the spans of a clean clip within 30 dB of its loud frames; pauses below 0.3 s belong to them."""
    frames_FN = clip_N[: len(clip_N) // 160 * 160].reshape(-1, 160).astype(np.float64)
    level_F = 10 * np.log10(np.mean(frames_FN**2, axis=1) + 1e-10)
    loud = np.flatnonzero(level_F > np.percentile(level_F, 95) - 30)
    spans: list[list[float]] = []
    for frame in loud:
        if spans and frame * 0.01 - spans[-1][1] < 0.3:
            spans[-1][1] = (frame + 1) * 0.01
        else:
            spans.append([frame * 0.01, (frame + 1) * 0.01])
    return [(a, b) for a, b in spans if b - a >= 0.1]


def _piece(clips: list[NDArray[np.float32]], dice: np.random.Generator) -> NDArray[np.float32]:
    """Takes 1.5 to 7 s off the first clip, cut where it is quiet."""
    clip_N = clips.pop(0)
    length = round(math.exp(dice.uniform(math.log(1.5), math.log(7))) * RATE)
    if len(clip_N) < length + RATE * 1.2:
        return clip_N
    around = range(length - RATE // 3, length + RATE // 3, 160)
    cut = min(around, key=lambda at: float(np.sum(clip_N[at - 200 : at + 200] ** 2)))
    clips.insert(0, clip_N[cut:])
    return clip_N[:cut]


def spans_of(cases: Iterable[Case]) -> list[list[float]]:
    """Return Silero VAD's speech spans, cases end to end; each case is processed once."""
    spans_by_case: dict[int, list[list[float]]] = {}
    result: list[list[float]] = []
    clock_s = 0.0
    for case in cases:
        if id(case) not in spans_by_case:
            probabilities_F = VoiceActivity().probabilities(case.samples_N)
            spans = speech_spans(probabilities_F, len(case.samples_N) / RATE)
            spans_by_case[id(case)] = [[span.start_s, span.end_s] for span in spans]
        result += [[clock_s + start_s, clock_s + end_s] for start_s, end_s in spans_by_case[id(case)]]
        clock_s += len(case.samples_N) / RATE
    return result


def repeated(cases: list[Case], hours: float) -> Iterator[Case]:
    """The cases again and again, for so long."""
    count, clock_s = 0, 0.0
    while clock_s < hours * 3600:
        case = cases[count % len(cases)]
        yield case
        count, clock_s = count + 1, clock_s + len(case.samples_N) / RATE


def _step(config: SpeakersConfig) -> Speakers:
    step = Speakers(config)
    if problem := step.missing():
        raise SystemExit(problem)
    step.setup()
    return step


def _recording(path: Path, spans: list[list[float]]) -> Recording:
    return Recording(
        str(path), RecordingMetadata(), {"voice_activity": {"spans": spans}}, Listener(str(path))
    )


def _overlapped(turns: list[Turn]) -> NDArray[np.bool_]:
    """Measure overlap in steps of 10 ms."""
    voices_F = np.zeros(round(100 * max((turn.end_s for turn in turns), default=0)) + 1, int)
    for turn in turns:
        voices_F[round(100 * turn.start_s) : round(100 * turn.end_s)] += 1
    overlapped_F: NDArray[np.bool_] = voices_F > 1
    return overlapped_F


def _load_speech(path: Path) -> NDArray[np.float32]:
    samples_N: NDArray[np.float32] = load(path, sample_rate=RATE, mono=True).samples_CN[0].numpy()
    return samples_N


if __name__ == "__main__":
    main()
