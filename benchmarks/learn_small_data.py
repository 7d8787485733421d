"""How little data teaches a model a new voice, and what does it forget? A sixth speaker for models of five.

    make -C benchmarks learn-small-data DATA=../shared/data

Begins with the models of learn_published.py in Qwen3-TTS's layout, which are trained where they are not there, and the
speaker who was left out of them: from 0.25, 0.5, 1 and 2 minutes and from all that there is, by all weights, adapters
of rank 8 and 32 in float32, and of rank 32 over weights of nf4; with 30 % of the old samples among the new ones, and
with none. Each arm takes as many steps. Every model then says ten digits in all six voices, five times: 50 clips of the
new voice, 250 of the old ones. Classifiers of digits and of six speakers that real takes train (takes 0 to 4 held out)
judge the words, the voice, and the voice in the first 0.3 s alone; short words are those whose real takes are.

A model in the shape of Higgs Audio v3 STT hears the same speaker in a room that it never heard: a minute of it, with
and without old samples.

Bars, from a minute with old samples: words of the new voice at most 3 points below those of the old ones before; the
new voice the nearest of six in 0.85; old voices lose at most 3 points of words and voice; nf4 within 2 points of the
float32 adapter; of the listener's errors half are gone, and old speakers lose at most 1 point.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learn_published import BENCH as PUBLISHED
from learn_published import CHAINS, CLAIMED_SEEDS, LEFT_OUT, RECORDINGS, codec_of, digits_heard, train_arms
from proof import Proof, arms_of, check_data, json_lines, print_line, proof_parser, write_changed
from scipy.signal import fftconvolve

from audiollm.audio import load, save
from audiollm.evaluate.judges.classifier import ClipClassifier
from audiollm.evaluate.judges.voicing import track_voicing
from audiollm.evaluate.report.metric_error import MetricError
from audiollm.evaluate.speech.run import read_generated_clips
from audiollm.files.atomic import read_jsonl, write_json

BENCH = "learn_small_data"
VOICES, CODES, LISTENERS = f"{BENCH}_voices", f"{BENCH}_codes", f"{BENCH}_listeners"
METHODS = {"full": f"{BENCH}_full", "adapters": f"{BENCH}_adapters"}
"""Block of arms -> its chain."""
MINUTES = {"quarter": 0.25, "half": 0.5, "one": 1.0, "two": 2.0, "all": 60.0}
"""Name of an amount -> minutes of speech at most."""
OPENING_S = 0.3
ROOM_S, ROOM_DECAY_S = 0.4, 0.06
"""Length of the room's answer, and the time in which it falls to 1/e: some 0.4 s to -60 dB."""
WORDS_BELOW, VOICE_BAR, MOST_LOST, NF4_BELOW = 0.03, 0.85, 0.03, 0.02
CURVES = {
    "new words": "words of the new voice",
    "new voice": "likeness of the new voice",
    "old words": "words of the old voices",
    "old voice": "likeness of the old voices",
}
LABELS = {
    "full": "all weights",
    "lora8": "adapter of rank 8",
    "lora32": "of rank 32",
    "nf4": "of rank 32 over nf4",
}
LISTENER_LEFT, LISTENER_LOST = 0.5, 0.01

Scores = dict[str, float]


def main() -> None:
    parser = proof_parser(__doc__, CLAIMED_SEEDS)
    parser.add_argument("--source", type=Path, help="folder of learn_tts.py's run, with its tokenizer")
    parser.add_argument("--arms", nargs="+", help="full_one_replay and its like; by default all")
    options = parser.parse_args()
    check_data(options.data, RECORDINGS)
    codec = codec_of(options)
    first = Proof(options.runs / PUBLISHED, options.seeds, (), CHAINS, threads=None)
    train_arms(first, options.data, codec, ["qwen3_tts", "higgs_v3_stt"])
    chains = (VOICES, CODES, BENCH, *METHODS.values(), LISTENERS)
    proof = Proof(options.runs / BENCH, options.seeds, options.overrides, chains, threads=None)
    data = Proof(proof.folder, (), options.overrides, chains, threads=None)
    judged = first.folder / f"says_qwen3_tts_{proof.seeds[0]}" / "generated.jsonl"
    prepare(data, (options.data / RECORDINGS).resolve(), codec, judged)
    arms = options.arms or [arm for block, chain in METHODS.items() for arm in arms_of(chain, block)]
    proof.run(BENCH, published=first.folder, codec=codec)
    for block, chain in METHODS.items():
        if chosen := [arm for arm in arms if arm in arms_of(chain, block)]:
            proof.run(chain, arms=chosen, published=first.folder, codec=codec)
    proof.run(LISTENERS, published=first.folder)
    judge = VoiceScorer(proof.folder)
    start = [judge.score(proof.folder / f"spoken_start_{seed}") for seed in proof.seeds]
    scores = {
        arm: [judge.score(proof.folder / f"{speech_of(arm)}_{arm}_{seed}") for seed in proof.seeds]
        for arm in arms
    }
    write_json(proof.folder / "scores.json", {"start": start, **scores})
    draw_curves(proof.folder, start, scores)
    report(start, scores)
    report_listeners(proof, first)


def prepare(proof: Proof, recordings: Path, codec: Path, judged: Path) -> None:
    """The recordings of all speakers, the new one's minutes as codes, and judges."""
    room = write_room(recordings, proof.folder / "in_room")
    proof.run(VOICES, recordings=recordings, heard_in_room=room, judged=judged)
    for source, prefix in (("annotate", ""), ("room", "room_")):
        rows = [
            row for row in read_jsonl(proof.folder / source / "segments.jsonl") if row["speaker"] == LEFT_OUT
        ]
        for name, minutes in MINUTES.items():
            chosen = json_lines(first_minutes(rows, minutes))
            write_changed(proof.folder / "minutes" / f"{prefix}{name}.jsonl", chosen)
    proof.run(CODES, codec=codec)


def speech_of(arm: str) -> str:
    """The stage that speaks, of an arm's block."""
    return "said" if arm in arms_of(METHODS["full"], "full") else "spoke"


def write_room(recordings: Path, folder: Path) -> Path:
    """The new speaker's recordings as they sound in a room: one answer of noise that dies away."""
    for path in sorted(recordings.glob(f"*_{LEFT_OUT}_*.wav")):
        target = folder / path.name
        if target.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        sound = load(path)
        times_N = np.arange(round(ROOM_S * sound.sample_rate)) / sound.sample_rate
        answer_N = np.random.default_rng(1).standard_normal(len(times_N)) * np.exp(-times_N / ROOM_DECAY_S)
        answer_N *= 0.3 / np.sqrt((answer_N**2).sum())
        answer_N[0] += 1.0
        dry_N = sound.mono().samples_CN[0].numpy()
        wet_N = fftconvolve(dry_N, answer_N)[: len(dry_N) + len(times_N) // 4]
        wet_N *= min(1.0, 0.9 / np.abs(wet_N).max())
        save(target, torch.from_numpy(wet_N[None]).float(), sound.sample_rate)
    return folder


def first_minutes(rows: Sequence[Mapping[str, Any]], minutes: float) -> list[Mapping[str, Any]]:
    """Training segments of so many minutes, each digit as often as the others, and all held-out ones."""
    by_text = defaultdict[str, list[Mapping[str, Any]]](list)
    for row in sorted(rows, key=lambda row: str(row["id"])):
        if row["split"] == "train":
            by_text[str(row["text"])].append(row)
    for text, takes in by_text.items():
        random.Random(text).shuffle(takes)
    in_turn = [
        takes[place]
        for place in range(max(map(len, by_text.values())))
        for takes in by_text.values()
        if place < len(takes)
    ]
    chosen, seconds = list[Mapping[str, Any]](), 0.0
    for row in in_turn:
        seconds += float(row["duration_s"])
        if seconds > 60 * minutes:
            break
        chosen.append(row)
    return [*chosen, *(row for row in rows if row["split"] == "test")]


class VoiceScorer:
    """Judges what a model says in new and old voices, by classifiers that real takes trained."""

    def __init__(self, folder: Path) -> None:
        judges = folder / "judges" / "judges"
        self._words, self._speakers = (
            ClipClassifier.load(judges / name) for name in ("classifier", "speaker")
        )
        self._short = short_words(read_jsonl(folder / "annotate" / "segments.jsonl"))

    def score(self, folder: Path) -> Scores:
        """Shares of clips, of the new voice (`new`) and of the others (`old`)."""
        marks = defaultdict[str, list[float]](list)
        for clip in read_generated_clips(folder / "generated.jsonl"):
            whose = "new" if clip.speaker == LEFT_OUT else "old"
            for name, mark in self._marks(clip):
                marks[f"{whose} {name}"].append(mark)
        return {name: statistics.mean(values) for name, values in sorted(marks.items())}

    def _marks(self, clip: Any) -> Iterator[tuple[str, float]]:
        sound = load(clip.path).mono()
        samples_1N, rate = sound.samples_CN, sound.sample_rate
        is_right = float(self._words.predict(samples_1N, rate)[0] == clip.text)
        yield "words", is_right
        if clip.text in self._short:
            yield "short words", is_right
        yield "voice", float(self._speakers.predict(samples_1N, rate)[0] == clip.speaker)
        opening_1N = samples_1N[:, : round(OPENING_S * rate)]
        yield (
            f"voice in the first {OPENING_S} s",
            float(self._speakers.predict(opening_1N, rate)[0] == clip.speaker),
        )
        if clip.speaker == LEFT_OUT:
            try:
                yield "voiced frames", track_voicing(samples_1N, rate).voiced_share
            except MetricError:
                yield "voiced frames", 0.0


def short_words(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """The half of the words whose real takes are shorter than the others'."""
    lengths = defaultdict[str, list[float]](list)
    for row in rows:
        if row["speaker"] == LEFT_OUT:
            lengths[str(row["text"])].append(float(row["duration_s"]))
    ordered = sorted(lengths, key=lambda text: statistics.mean(lengths[text]))
    return set(ordered[: len(ordered) // 2])


def draw_curves(folder: Path, start: Sequence[Scores], scores: Mapping[str, Sequence[Scores]]) -> None:
    """Write `curves.svg`: words and voice over minutes, of the new voice and of the old ones."""
    from matplotlib.figure import Figure

    spoken = {name: minutes_of(folder / "minutes" / f"{name}.jsonl") for name in MINUTES}
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 2, sharex=True).flat, CURVES.items(), strict=True):
        for number, (method, label) in enumerate(LABELS.items()):
            for replay, style in (("replay", "o-"), ("alone", "x--")):
                points = sorted(
                    (spoken[arm.split("_")[1]], statistics.mean(row[name] for row in rows))
                    for arm, rows in scores.items()
                    if arm.startswith(f"{method}_") and arm.endswith(replay)
                )
                if points:
                    text = label if replay == "replay" else f"{label}, no old samples"
                    axes.plot(*zip(*points, strict=True), style, label=text, color=f"C{number}")
        if name.startswith("old"):
            axes.axhline(statistics.mean(row[name] for row in start), color="0.6", label="before")
        axes.set(title=title, xlabel="minutes of the new voice", xscale="log", ylim=(0, 1.03))
        axes.set_xticks([0.25, 0.5, 1, 2], ["¼", "½", "1", "2"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(folder / "curves.svg", metadata={"Date": None})


def minutes_of(path: Path) -> float:
    """Minutes of speech that are trained on."""
    return sum(float(row["duration_s"]) for row in read_jsonl(path) if row["split"] == "train") / 60


def report(start: Sequence[Scores], scores: Mapping[str, Sequence[Scores]]) -> None:
    """A JSON line an arm and measure."""
    show = partial(print_line, BENCH, unit="share of clips")
    for name in start[0]:
        show(f"before: {name}", [row[name] for row in start])
    for arm, rows in scores.items():
        method, amount, replay = arm.split("_")
        counts = MINUTES[amount] >= 1 and replay == "replay"
        old = {name: statistics.mean(row[f"old {name}"] for row in start) for name in ("words", "voice")}
        bars = {
            "new words": old["words"] - WORDS_BELOW,
            "new voice": VOICE_BAR,
            "old words": old["words"] - MOST_LOST,
            "old voice": old["voice"] - MOST_LOST,
        }
        if method == "nf4" and (peers := scores.get(f"lora32_{amount}_{replay}")):
            bars["new words"] = statistics.mean(row["new words"] for row in peers) - NF4_BELOW
        for name in rows[0]:
            show(f"{arm}: {name}", [row[name] for row in rows], peer=bars.get(name) if counts else None)


def report_listeners(proof: Proof, first: Proof) -> None:
    """A JSON line an arm: errors on the new speaker in the room, and what old speakers lose."""

    def heard(folder: Path, stage: str) -> list[float]:
        return [digits_heard(folder / f"{stage}_{seed}") for seed in proof.seeds]

    show = partial(print_line, BENCH)
    wrong_before = [1 - share for share in heard(proof.folder, "room_heard_before")]
    old_before = heard(first.folder, "hears_higgs_v3_stt")
    show("listener before: wrong digits of a new speaker in a room", wrong_before)
    for arm in arms_of(LISTENERS, "listeners"):
        wrong = [1 - share for share in heard(proof.folder, f"room_heard_{arm}")]
        lost = [
            before - after
            for before, after in zip(old_before, heard(proof.folder, f"others_heard_{arm}"), strict=True)
        ]
        error_shares = [after / max(1e-9, before) for before, after in zip(wrong_before, wrong, strict=True)]
        show(f"listener {arm}: wrong digits of the new speaker", wrong)
        show(
            f"listener {arm}: share of its errors that are left",
            error_shares,
            peer=LISTENER_LEFT,
            peer_is="the bar, at most",
        )
        show(
            f"listener {arm}: old speakers' digits lost", lost, peer=LISTENER_LOST, peer_is="the bar, at most"
        )


if __name__ == "__main__":
    main()
