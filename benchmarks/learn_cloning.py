"""Does a model learn to clone a voice that it never heard? Leave one speaker out, six times.

    make learn-cloning DATA=shared/data

The corpus is made of the spoken digit dataset (`cloning_voices.py`): three digits an utterance; five real speakers,
their voices shifted in pitch and formants, and synthetic voices to train on; of the sixth neither a recording nor a
shifted one. The tokenizer is trained on other speech alone and hears none of the six. The speakers are two halves of
three: those of a half begin with a model that heard the other half and the synthetic voices. Each of the six then
speaks 30 texts, each with a reference of three digits of the speaker that it never heard. The halves are trained side
by side, a core each.

Judged by Resemblyzer (GE2E; trained on LibriSpeech and VoxCeleb): a clone counts as right where the mean of its own
speaker's references is nearer (cosine) than those of the five others. Beside it the same for real recordings of the
speaker that are no references, and the words, as Pocketsphinx hears them with a grammar of all thousand texts.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from cloning_voices import SAMPLE_RATE, WORDS, speakers, write_group, write_speech, write_synthetic
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from audiollm.audio import load, resample, to_mono
from audiollm.evaluate.recognizers import PocketsphinxRecognizer
from audiollm.evaluate.statistics import share
from audiollm.files import read_jsonl
from audiollm.recipe import load_recipe
from audiollm.runner import run_recipe

REAL_CLIPS = 30
"""Of each speaker, that show what the judge makes of the voice itself."""
CLONE = {
    "clone": {
        "about": "say a text in the voice of a recording",
        "audio": ["reference", "audio"],
        "phrasings": [[{"system": "{reference}"}, {"user": "{text}"}, {"assistant": "{audio}"}]],
    }
}
LEARNING_RATE = 1e-3
"""Of the six: half of that of the model that they begin with."""
ENCODER = {"hidden_size": 128, "num_layers": 2}
"""Of the references: their pitch and formants are plain in a spectrogram, and hidden in codes."""
CORRUPT_CODES = 0.3
"""What a voice is like can be read from the codes before, too; where they cannot be trusted, from the reference."""
TOKENIZER_MINUTES, BASE_MINUTES, MODEL_MINUTES = 36, 22, 6
"""Of CPU time; of the tokenizer, of each half's beginning, and of each of the six."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd and other speech")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    recordings = arguments.data / "fsdd" / "recordings"
    if not recordings.is_dir():
        raise SystemExit(f"no spoken digits in {recordings}: give the folder of recordings with --data")
    folder = arguments.runs / "learn_cloning"
    names = write_corpus(arguments.data, folder)
    run(corpus_stages(folder, names), folder, Console(stderr=True))
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        halves = [processes.submit(train_half, folder, names, half) for half in ("first", "second")]
        for half in halves:
            half.result()
    report(folder, names)


def write_corpus(data: Path, folder: Path) -> list[str]:
    """All voices and the tokenizer's training audio; the names of the real speakers."""
    found = speakers(data / "fsdd" / "recordings")
    with Progress() as bar, ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        work = [processes.submit(write_synthetic, folder / "voices" / "synthetic")]
        for name, recordings in found.items():
            work.append(processes.submit(write_group, folder / "voices" / name, name, recordings))
        for done in bar.track(as_completed(work), len(work), description="groups of voices"):
            done.result()
        write_speech(data, folder / "speech", bar)
    return list(found)


def corpus_stages(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """A tokenizer, and the codes of every group."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = folder / "tasks.yaml"
    tasks.write_text(yaml.safe_dump(CLONE))
    tokenizer = {
        "audio": str(folder / "speech"),
        "preset": "native",
        "teacher": "own",
        "adversary_share": 1,
        "batch_size": 8,
        "quantizer_dropout": 0.15,
        "cpu_minutes": TOKENIZER_MINUTES,
    }
    stages: list[dict[str, Any]] = [{"train_tokenizer": tokenizer}]
    for group in [*names, "synthetic"]:
        segments = str(folder / "voices" / group / "segments.jsonl")
        compose: dict[str, Any] = {"segments": segments, "tasks_file": str(tasks), "tasks": {"clone": 1.0}}
        if (
            group == "synthetic"
        ):  # nothing of it is asked for: a few held out, to see when training has done its work
            compose |= {"split": "file", "test_share": 0.03}
        stages.append({"name": f"compose_{group}", "compose": compose})
        tokenize = {"samples": f"${{compose_{group}.samples}}", "codec": "${train_tokenizer.checkpoint}"}
        tokenize |= {"sound": True, "encodings": 1}
        stages.append({"name": f"tokenize_{group}", "tokenize": tokenize})
    return stages


def train_half(folder: Path, names: list[str], half: str) -> None:
    """Models without each speaker of the half, and what they say; in a process of its own."""
    torch.set_num_threads(1)
    left_out = names[:3] if half == "first" else names[3:]
    run(half_stages(folder, names, left_out), folder / half, Console(stderr=True, force_terminal=False))


def half_stages(folder: Path, names: list[str], left_out: list[str]) -> list[dict[str, Any]]:
    def shards(without: Sequence[str]) -> list[str]:
        return [
            str(folder / f"tokenize_{name}" / "shards")
            for name in [*names, "synthetic"]
            if name not in without
        ]

    learn = {"audio_in": "features", "corrupt_codes": CORRUPT_CODES}
    base = {
        "shards": shards(left_out),
        "model": {"audio_encoder": ENCODER},
        "cpu_minutes": BASE_MINUTES,
        **learn,
    }
    stages: list[dict[str, Any]] = [{"name": "train_base", "train": base}]
    for name in left_out:
        train = {
            "start": "${train_base.checkpoint}",
            "shards": shards([name]),
            "learning_rate": LEARNING_RATE,
            "cpu_minutes": MODEL_MINUTES,
            **learn,
        }
        stages.append({"name": f"train_without_{name}", "train": train})
        speak = {
            "model": f"${{train_without_{name}.checkpoint}}",
            "codec": str(folder / "train_tokenizer"),
            "samples": str(folder / f"compose_{name}" / "samples.jsonl"),
            "takes": 1,
        }
        stages.append({"name": f"generate_{name}", "generate": speak})
    return stages


def run(stages: list[dict[str, Any]], folder: Path, console: Console) -> None:
    """The stages as a recipe in that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.yaml"
    whole = {"name": folder.name, "size": "tiny", "seed": 0, "stages": stages}
    recipe.write_text(yaml.safe_dump(whole, sort_keys=False))
    run_recipe(load_recipe(recipe, name=folder.name, runs=folder.parent), console)


def report(folder: Path, names: list[str]) -> None:
    """A JSON line for every speaker left out, and one for all of them."""
    judge = SpeakerJudge()
    listener = PocketsphinxRecognizer([" ".join(words) for words in itertools.product(WORDS, repeat=3)])
    rows = {name: list(read_jsonl(folder / "voices" / name / "segments.jsonl")) for name in names}
    references = [judge.mean([Path(r["path"]) for r in rows[n] if r["split"] == "test"]) for n in names]
    every = {"clone": Heard(), "real": Heard()}
    for name in names:
        made = folder / ("first" if name in names[:3] else "second") / f"generate_{name}"
        kept = [row for row in rows[name] if row["speaker"] == name and row["split"] == "train"][:REAL_CLIPS]
        clips = {
            "clone": [(made / row["path"], row["text"]) for row in read_jsonl(made / "generated.jsonl")],
            "real": [(Path(row["path"]), row["text"]) for row in kept],
        }
        own = {kind: Heard() for kind in clips}
        for which, (path, text) in [(kind, clip) for kind in clips for clip in clips[kind]]:
            nearest = names[int((torch.stack(references) @ judge.embed(path)).argmax())]
            for heard in (own[which], every[which]):
                heard.voices.append(nearest == name)
                heard.words += words_right(listener, path, text)
        print(json.dumps(line(f"without {name}", own)), flush=True)
    print(json.dumps(line(f"all {len(names)}", every)))


@dataclass
class Heard:
    """What the judges made of some clips."""

    voices: list[bool] = field(default_factory=list)
    """Nearest to the own speaker."""
    words: list[bool] = field(default_factory=list)


def line(case: str, heard: dict[str, Heard]) -> dict[str, Any]:
    clone, real = (share(heard[kind].voices) for kind in ("clone", "real"))
    return {
        "bench": "learn_cloning",
        "case": case,
        "ours": round(clone["accuracy"], 3),
        "peer": round(real["accuracy"], 3),
        "ratio": round(clone["accuracy"] / real["accuracy"], 3),
        "unit": "share nearest to its own speaker among six (peer: real recordings; chance: 0.167)",
        "interval": [round(clone["low"], 3), round(clone["high"], 3)],
        "n": clone["n"],
        "words_right": {kind: round(sum(each.words) / len(each.words), 3) for kind, each in heard.items()},
    }


class SpeakerJudge:
    """Resemblyzer's encoder of voices."""

    def __init__(self) -> None:
        from resemblyzer import VoiceEncoder

        self._encoder = VoiceEncoder("cpu", verbose=False)

    def embed(self, path: Path) -> Tensor:
        """Unit length, `[256]`."""
        wave = load(path)
        samples_1N = resample(to_mono(wave.samples_CN), wave.sample_rate, SAMPLE_RATE)
        return torch.from_numpy(self._encoder.embed_utterance(samples_1N[0].numpy()))

    def mean(self, paths: list[Path]) -> Tensor:
        """Of several recordings, unit length."""
        summed_D = torch.stack([self.embed(path) for path in paths]).sum(dim=0)
        return summed_D / summed_D.norm()


def words_right(listener: PocketsphinxRecognizer, path: Path, text: str) -> list[bool]:
    """Of each word, whether it is heard where it belongs."""
    wave = load(path)
    heard = listener.recognize(wave.samples_CN, wave.sample_rate).split()
    return [right == said for right, said in itertools.zip_longest(text.split(), heard[: len(text.split())])]


if __name__ == "__main__":
    main()
