"""Does a model learn to clone a voice that it never heard? Leave one speaker out, six times.

    make -C benchmarks learn-cloning DATA=../shared/data

The corpus is made of the spoken digit dataset (`cloning_voices.py`): five real speakers, their voices shifted in
pitch and formants, and synthetic voices to train on; of the sixth neither a recording nor a shifted one. A reference
is words, each with a recording of it, of the six all ten digits, and the answer is made in the same way: a word, its
codes, the next word. The tokenizer is trained on other speech alone and hears none of the six.

A model first learns to look words up, on codes drawn at random that are nobody's voice (`cloning_codes.py`): which
word is which, from words of a frame or two, then to repeat longer ones. From there six models go on, each on the
voices of all but one speaker and on random codes still, two side by side, a core each. Each of the six speakers then
says 30 texts, each with a reference that no model heard. proofs/learn_cloning*.yaml has all settings.

Judged by Resemblyzer (GE2E; trained on LibriSpeech and VoxCeleb): a clone counts as right where the mean of its own
speaker's test recordings is nearer (cosine) than those of the five others. Beside it the same for recordings of the
speaker that are none of these, and the words, as Pocketsphinx hears them with a grammar of all thousand texts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from cloning_codes import RandomCodes, write_codes
from cloning_voices import DIGITS, SAMPLE_RATE, WORDS, speakers, write_group, write_speech, write_synthetic
from proof import Proof, check_data, proof_parser
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from audiollm.audio import load, resample, to_mono
from audiollm.evaluate.judges.recognizers import PocketsphinxRecognizer
from audiollm.evaluate.report.statistics import share
from audiollm.files.atomic import read_jsonl
from tokenizer.native.model import AudioTokenizer

BENCH, RECORDINGS = "learn_cloning", "fsdd/recordings"
CHAINS = tuple(f"{BENCH}{part}" for part in ("_tokenizer", "_codes", "_lookup", ""))
REAL_CLIPS = 30
"""Real recordings per speaker, whose scores are the judge's upper bound."""
NUM_CODEBOOKS = 3
"""Leading codebooks used: the others refine details that the judge hardly hears, and are hard to learn."""
CODES = {
    "names": RandomCodes(600 * 16, (4, 4), num_spoken=8, frames=(1, 2), by_heart=0.3),
    "words": RandomCodes(800 * 16, (1, len(WORDS)), num_spoken=DIGITS, frames=(3, 30)),
}
"""Random codes of each training that looks words up: a sample for each of its steps' samples."""


def main() -> None:
    options = proof_parser(__doc__, seeds=None).parse_args()
    check_data(options.data, RECORDINGS)
    folder = options.runs / BENCH
    proof = Proof(folder, (), options.overrides, CHAINS, threads=None)
    names = write_corpus(options.data, proof.folder)
    train_tokenizer(proof)
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        for _ in processes.map(partial(encode_group, proof.folder, options.overrides), [*names, "synthetic"]):
            pass
        learn_to_look_up(proof.folder, options.overrides, names[0])
        for _ in processes.map(partial(train_without, proof.folder, options.overrides, names), names):
            pass
        report(proof.folder, names, processes)


def write_corpus(data: Path, folder: Path) -> list[str]:
    """All voices and the tokenizer's training audio; the names of the real speakers."""
    recordings_by_name = speakers(data / RECORDINGS)
    with Progress() as bar, ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        work = [processes.submit(write_synthetic, folder / "voices" / "synthetic")]
        for name, recordings in recordings_by_name.items():
            work.append(processes.submit(write_group, folder / "voices" / name, name, recordings))
        for done in bar.track(as_completed(work), len(work), description="groups of voices"):
            done.result()
        write_speech(data, folder / "speech", bar)
    return list(recordings_by_name)


def train_tokenizer(proof: Proof) -> None:
    """Train the tokenizer on other speech; its first codebooks are the codec of all later steps."""
    proof.run(f"{BENCH}_tokenizer")
    trained, codec = proof.folder / "train_tokenizer", proof.folder / "codec"
    # written again, it would be another one for what was made with it
    if not codec.is_dir() or codec.stat().st_mtime < (trained / "stage.json").stat().st_mtime:
        AudioTokenizer.from_pretrained(trained, NUM_CODEBOOKS).save_pretrained(codec)


def encode_group(folder: Path, overrides: Sequence[str], group: str) -> None:
    """The codes of a group of voices; in a process of its own."""
    segments = folder / "voices" / group / "segments.jsonl"
    values: dict[str, Any] = {"voices": segments, "codec": folder / "codec"}
    # nothing of the synthetic voices is asked for: a few held out, to see when training has done its work
    values |= {"split": "file", "test_share": 0.03} if group == "synthetic" else {}
    _quiet_proof(folder / "groups" / group, overrides).run(f"{BENCH}_codes", **values)


def learn_to_look_up(folder: Path, overrides: Sequence[str], group: str) -> None:
    """A model that repeats the codes of its reference's words, from codes that are nobody's voice."""
    for name, codes in CODES.items():
        write_codes(folder / "codes" / name, folder / "groups" / group / "tokenize" / "shards", codes)
    proof = Proof(folder / "look_up", (), overrides, CHAINS)
    proof.run(f"{BENCH}_lookup", codes=folder / "codes")


def train_without(folder: Path, overrides: Sequence[str], names: list[str], left_out: str) -> None:
    """A model that never heard a speaker, and what it says for him; in a process of its own."""
    trained_names = [name for name in [*names, "synthetic"] if name != left_out]
    voices = [
        {"path": str(folder / "groups" / name / "tokenize" / "shards"), "weight": 1} for name in trained_names
    ]
    _quiet_proof(folder / f"without_{left_out}", overrides).run(
        BENCH,
        samples=[*voices, {"path": str(folder / "codes" / "words"), "weight": len(voices)}],
        lookup=folder / "look_up" / "words" / "model",
        codec=folder / "codec",
        texts=folder / "groups" / left_out / "compose" / "samples.jsonl",
    )


def _quiet_proof(folder: Path, overrides: Sequence[str]) -> Proof:
    """A proof beside another one: its progress is written line by line."""
    proof = Proof(folder, (), overrides, CHAINS)
    proof.console = Console(stderr=True, force_terminal=False)
    return proof


def report(folder: Path, names: list[str], processes: ProcessPoolExecutor) -> None:
    """A JSON line for every speaker left out, and one for all of them."""
    every = {"clone": JudgedClips(), "real": JudgedClips()}
    for name, scores in zip(names, processes.map(partial(listen, folder, names), names), strict=True):
        print(json.dumps(line(f"without {name}", scores)), flush=True)
        for kind, judged in scores.items():
            every[kind].voices += judged.voices
            every[kind].words += judged.words
    print(json.dumps(line(f"all {len(names)}", every)))


def listen(folder: Path, names: list[str], name: str) -> dict[str, JudgedClips]:
    """Score a speaker's clones and recordings with the judges, in a separate process."""
    torch.set_num_threads(1)
    judge = SpeakerJudge()
    listener = PocketsphinxRecognizer([" ".join(words) for words in itertools.product(WORDS, repeat=3)])
    rows = {speaker: list(read_jsonl(folder / "voices" / speaker / "segments.jsonl")) for speaker in names}
    references = [judge.mean([Path(r["path"]) for r in rows[n] if r["split"] == "test"]) for n in names]
    generated = folder / f"without_{name}" / "generate"
    real_rows = [row for row in rows[name] if row["speaker"] == name and row["split"] == "train"][:REAL_CLIPS]
    clips = {
        "clone": [
            (generated / row["path"], row["text"]) for row in read_jsonl(generated / "generated.jsonl")
        ],
        "real": [(Path(row["path"]), row["text"]) for row in real_rows],
    }
    scores = {kind: JudgedClips() for kind in clips}
    for kind, path, text in [(group, *clip) for group in clips for clip in clips[group]]:
        nearest = names[int((torch.stack(references) @ judge.embed(path)).argmax())]
        scores[kind].voices.append(nearest == name)
        scores[kind].words += words_right(listener, path, text)
    return scores


@dataclass
class JudgedClips:
    """Scores of the judges for several clips."""

    voices: list[bool] = field(default_factory=list)
    """For each clip, whether the nearest speaker is its own."""
    words: list[bool] = field(default_factory=list)


def line(case: str, scores: dict[str, JudgedClips]) -> dict[str, Any]:
    clone, real = (share(scores[kind].voices) for kind in ("clone", "real"))
    return {
        "bench": "learn_cloning",
        "case": case,
        "ours": round(clone["accuracy"], 3),
        "peer": round(real["accuracy"], 3),
        "ratio": round(clone["accuracy"] / real["accuracy"], 3),
        "unit": "share nearest to its own speaker among six (peer: real recordings; chance: 0.167)",
        "interval": [round(clone["low"], 3), round(clone["high"], 3)],
        "n": clone["n"],
        "words_right": {
            kind: round(sum(judged.words) / len(judged.words), 3) for kind, judged in scores.items()
        },
    }


class SpeakerJudge:
    """Resemblyzer's encoder of voices."""

    def __init__(self) -> None:
        from resemblyzer import VoiceEncoder

        self._encoder = VoiceEncoder("cpu", verbose=False)

    def embed(self, path: Path) -> Tensor:
        """Return the voice embedding of a recording, unit length, `[256]`."""
        wave = load(path)
        samples_1N = resample(to_mono(wave.samples_CN), wave.sample_rate, SAMPLE_RATE)
        return torch.from_numpy(self._encoder.embed_utterance(samples_1N[0].numpy()))

    def mean(self, paths: list[Path]) -> Tensor:
        """Return the mean embedding of several recordings, scaled to unit length."""
        summed_D = torch.stack([self.embed(path) for path in paths]).sum(dim=0)
        return summed_D / summed_D.norm()


def words_right(listener: PocketsphinxRecognizer, path: Path, text: str) -> list[bool]:
    """Return for each word whether it is recognized at its place."""
    wave = load(path)
    recognized = listener.recognize(wave.samples_CN, wave.sample_rate).split()
    return [
        right == word for right, word in itertools.zip_longest(text.split(), recognized[: len(text.split())])
    ]


if __name__ == "__main__":
    main()
