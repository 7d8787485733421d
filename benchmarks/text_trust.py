"""Trust in recognized text: the kept share, its errors, and how often foreign speech and sounds keep text.

    python benchmarks/text_trust.py [--data ../shared/data] [--full] [--half choose|report|both]
        [--recognizer faster_whisper=FOLDER] [--recognizer transformers=FOLDER] [--groups "sound events;foreign speech"]

Runs `annotate` as it is without any setting (Pocketsphinx, open vocabulary), and once with each recognizer whose folder
is there, on packs of recordings. The files of each pack are ordered by the SHA-256 of their name and dealt in turn to
two halves: thresholds were chosen on `choose`, and `report` is what counts. `peer` is the same without the rules on
text: every word that is heard is kept.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from measure import bench_parser, parse_options, print_row

os.environ["OMP_NUM_THREADS"] = "1"

import jiwer
import numpy as np
import soundfile
from rich.console import Console

from audiollm.audio.discovery import looks_like_audio
from audiollm.data.text.forms import comparison_form
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.annotate.execution.config import AnnotationConfig
from pipelines.annotate.stage import STAGE

Row = dict[str, Any]
_READ = "read_speech_en"
_TEXTS = {
    "jfk.flac": "And so, my fellow Americans, ask not what your country can do for you, ask what you can do for your "
    "country.",
    "1272-141231-0002.flac": "the cut on his chest still dripping blood the ache of his overstrained eyes even the "
    "soaring arena around him with the thousands of spectators were trivialities not worth thinking about",
    "LJ002-0020.wav": "in eighteen thirteen",
    "LJ002-0035.wav": "eight the press yard",
    "librispeech-1995-1837-0001.wav": "it was the first great sorrow of his life it was not so much the loss of the "
    "cotton itself but the fantasy the hopes the dreams built around it",
    "2412-153948-0000.flac": "if the reader will excuse me i will say nothing of my antecedents nor of the "
    "circumstances which led me to leave my native country the narrative would be tedious to him and painful to myself",
}
"""Texts of files, from the pack's README or manifests; of 1272-141231-0002 LibriSpeech's own, because the README
gives the text of another utterance."""
_LANGUAGES = {"speech_zh": "zh", "_fr_": "fr", "russian": "ru"}
"""Part of a path of the foreign speech -> the language that is spoken."""
_ENGLISH_AMONG_OTHERS = ("bria", "loona", "SimulEval")
"""English speech in the pack of other languages."""
_SINGING = ("vocadito", "Karissa_Hobbs")
"""Recordings of songs with words, which a recognizer may write down."""
_WITHOUT_SPEECH = ("sound events", "music, noises")
_KINDS = ("pocketsphinx", "faster_whisper", "transformers")
_SPEECH_AMONG_NOISES = ("clean_freesound", "noisy_snr0", "speech.wav", "speech_bab_0dB")

_print_trust_line = partial(print_row, "text_trust", more_is_better=True)


class Group(NamedTuple):
    """Recordings of one kind.

    Args:
        texts: by file name; None where nothing is known, empty where nothing is said in English.
    """

    title: str
    files: list[Path]
    texts: dict[str, str] | None


def main() -> None:
    parser = bench_parser(__doc__)
    data = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--half", choices=["choose", "report", "both"], default="both")
    parser.add_argument(
        "--recognizer", action="append", default=[], help="kind=FOLDER; skipped where it is absent"
    )
    parser.add_argument("--clips", type=int, default=12, help="of each group, evenly picked; 0: all")
    parser.add_argument("--groups", default="", help="titles, separated by semicolons; empty: all")
    arguments = parse_options(parser, clips=0)
    if not (arguments.data / _READ).is_dir():
        parser.error(f"no {_READ} under {arguments.data}: give --data")
    titles = [title.strip() for title in arguments.groups.split(";") if title.strip()]
    halves = [half for half in ("choose", "report") if arguments.half in (half, "both")]
    with tempfile.TemporaryDirectory() as folder:
        packs = groups(arguments.data, Path(folder) / "made")
        if arguments.clips:
            packs = [group._replace(files=evenly_picked(group.files, arguments.clips)) for group in packs]
        for recognizer in recognizers(arguments.recognizer):
            for number, half in enumerate(halves):
                target = Path(folder) / f"{recognizer.title}-{number}"
                silent = [
                    measure(group, half, recognizer, target / group.title)
                    for group in packs
                    if not titles or group.title in titles
                ]
                print_sounds(half, recognizer, [rows for rows in silent if rows is not None])


def evenly_picked(files: Sequence[Path], count: int) -> list[Path]:
    """At most so many of the files."""
    count = min(count, len(files))
    return [files[number * len(files) // count] for number in range(count)]


class RecognizerCase(NamedTuple):
    """A recognizer to measure: its title, and its settings for `annotate`; none are Pocketsphinx."""

    title: str
    settings: Row | None


def recognizers(texts: Sequence[str]) -> list[RecognizerCase]:
    """Pocketsphinx, and the recognizers of `kind=FOLDER` whose folders are there."""
    cases = [RecognizerCase("Pocketsphinx", None)]
    for text in texts:
        kind, _, folder = text.partition("=")
        if not Path(folder).is_dir():
            print(f"no folder {folder}: {kind} is skipped", file=sys.stderr)
            continue
        names = [name for name in Path(folder).resolve().parts if name != "ctranslate2"]
        cases.append(RecognizerCase(f"{names[-1]} by {kind}", {"kind": kind, "model": folder}))
    return cases


def groups(data: Path, synthetic_folder: Path) -> list[Group]:
    """The packs by kind. Of recordings that are there in several formats only the FLAC is taken."""
    texts = known_texts(data)
    foreign_paths = _audio(data / "speech_other_lang")
    foreign = [path for path in foreign_paths if not any(name in str(path) for name in _ENGLISH_AMONG_OTHERS)]
    noises = [path for path in _audio(data / "noisy_pairs") if not path.name.startswith(_SPEECH_AMONG_NOISES)]
    songs = [path for path in _audio(data / "music_nature") if path.name.startswith(_SINGING)]
    music = [path for path in _audio(data / "music_nature") if path not in songs]
    read = [path for name in (_READ, "ljspeech_32", "dialogue") for path in _audio(data / name)]
    return [
        Group("read English", [path for path in read if path.name in texts], texts),
        Group("foreign speech", foreign + _audio(data / "speech_zh"), {}),
        Group("sound events", _audio(data / "esc10"), {}),
        Group("music, noises", music + noises + _write_synthetic_sounds(synthetic_folder), {}),
        Group("singing", songs, {}),
        Group("LibriSpeech, no transcripts", _audio(data / "librispeech_speakers"), None),
    ]


def known_texts(data: Path) -> dict[str, str]:
    """File name -> what is read in it."""
    texts = dict(_TEXTS)
    with (data / "ljspeech_32" / "metadata.csv").open(encoding="utf-8") as file:
        rows = csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE)
        texts |= {f"{row[0]}.flac": row[2] for row in rows}
    for path in (data / _READ / "pocketsphinx").rglob("*transcription"):
        lines = re.findall(r"<s> (.*?) +</s> \((.*)\)", path.read_text(encoding="utf-8"))
        texts |= {f"{name}.wav": text for text, name in lines}
    for path in (data / "dialogue" / "higgs-audio").rglob("voice_prompts/*.txt"):
        texts[f"{path.stem}.wav"] = path.read_text(encoding="utf-8")
    return texts


def half_of(files: Iterable[Path], half: str) -> list[Path]:
    """The files ordered by the hash of their name, and every second of them."""
    ordered = sorted(files, key=lambda path: sha256(path.name.encode()).hexdigest())
    return ordered[half == "report" :: 2]


def measure(group: Group, half: str, recognizer: RecognizerCase, folder: Path) -> list[Row] | None:
    """Annotate one half of a group, and print; returns the rows of a group in which nobody speaks."""
    by_pack: dict[str, list[Path]] = {}
    for path in group.files:
        by_pack.setdefault(str(path).partition("/data/")[2].partition("/")[0], []).append(path)
    files = [path for pack in by_pack.values() for path in half_of(pack, half)]
    folder.mkdir(parents=True)
    settings: Row = {"input": [str(path) for path in files], "quality_sample": 0}
    if recognizer.settings is not None:
        settings |= {"recognizers": [recognizer.settings], "workers": 1}
    config = AnnotationConfig.model_validate(settings)
    recipe = Recipe("trust", folder, "tiny", 0, folder, (), {})
    STAGE.run(config, Context(folder, recipe, Console(quiet=True), {}))
    rows = [json.loads(line) for line in (folder / "segments.jsonl").read_text().splitlines()]
    name = f"{recognizer.title}, {half}: {group.title}"
    steps = json.loads((folder / "timings.json").read_text())["steps"]
    step = next((steps[kind] for kind in _KINDS if kind in steps), None)
    if step is not None:
        _print_trust_line(f"{name}: cost of recognition, with all figures", step["seconds"] / step["audio_s"], None,
               "CPU-s per audio-s")  # fmt: skip
    if group.texts:
        _print_errors(name, rows, group.texts)
    if group.title == "foreign speech":
        _print_languages(name, rows)
    heard_s = sum(row["duration_s"] for row in rows)
    kept_s = sum(row["duration_s"] for row in rows if row["text"])
    with_hypothesis = [row for row in rows if any(row["heard"].values())]
    _print_trust_line(
        f"{name}: segments with text", *_share(rows), "share of segments", n=len(rows), files=len(files)
    )
    with_text = {row["file"] for row in rows if row["text"]}
    files_heard = {row["file"] for row in with_hypothesis}
    _print_trust_line(f"{name}: files with text", len(with_text) / len(files), len(files_heard) / len(files),
           "share of files", n=len(files))  # fmt: skip
    _print_trust_line(
        f"{name}: time with text", kept_s / heard_s if heard_s else 0.0, None, "share of seconds", s=heard_s
    )
    return rows if group.title in _WITHOUT_SPEECH else None


def print_sounds(half: str, recognizer: RecognizerCase, silent: Sequence[Sequence[Row]]) -> None:
    """Print how many segments of sounds, music, noise and silence keep a text, all groups together."""
    rows = [row for group in silent for row in group]
    if rows:
        name = f"{recognizer.title}, {half}: sounds, music, noise and silence: segments with text"
        _print_trust_line(name, *_share(rows), "share of segments", n=len(rows))


def _print_languages(name: str, rows: Sequence[Row]) -> None:
    """Print how often the language of foreign speech is right, of the segments that keep a text and of all."""
    right = [row for row in rows if row["text"] and row["language"] == _language_of(row["path"])]
    with_text = [row for row in rows if row["text"]]
    _print_trust_line(f"{name}: right language, of segments with text", len(right) / max(len(with_text), 1), None,
           "share of segments", n=len(with_text))  # fmt: skip
    _print_trust_line(f"{name}: right language and text, of all segments", len(right) / max(len(rows), 1), None,
           "share of segments", n=len(rows))  # fmt: skip


def _language_of(path: str) -> str | None:
    return next((language for fragment, language in _LANGUAGES.items() if fragment in path), None)


def _share(rows: Sequence[Row]) -> tuple[float, float]:
    count = max(len(rows), 1)
    return sum(bool(row["text"]) for row in rows) / count, sum(
        any(row["heard"].values()) for row in rows
    ) / count


def _print_errors(name: str, rows: Sequence[Row], texts: dict[str, str]) -> None:
    """Word errors in the segments that keep their text, and in all; the share of the words that are kept."""
    kept_counts, every = np.zeros(2), np.zeros(2)
    for file in {row["file"] for row in rows}:
        file_rows = sorted((row for row in rows if row["file"] == file), key=lambda row: row["start_s"])
        errors_S, words_S = errors_by_segment(
            _words(texts[Path(file).name]), [_words(next(iter(row["heard"].values()))) for row in file_rows]
        )
        has_text_S = np.array([bool(row["text"]) for row in file_rows])
        kept_counts += errors_S[has_text_S].sum(), words_S[has_text_S].sum()
        every += errors_S.sum(), words_S.sum()
    _print_trust_line(
        f"{name}: wrong words in segments with text",
        kept_counts[0] / max(kept_counts[1], 1),
        every[0] / every[1],
        "word error rate",
        n=int(kept_counts[1]),
    )
    _print_trust_line(
        f"{name}: words in segments with text",
        kept_counts[1] / every[1],
        1.0,
        "share of words",
        n=int(every[1]),
    )


def errors_by_segment(
    words: Sequence[str], hypotheses: Sequence[Sequence[str]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Errors and reference words of each segment of a file, whose words are aligned as a whole. Words that were missed
    belong to the segment that was heard last before them."""
    errors_S, words_S = np.zeros(len(hypotheses)), np.zeros(len(hypotheses))
    segment_of = [number for number, hypothesis in enumerate(hypotheses) for _ in hypothesis]
    if not segment_of:
        errors_S[0] = words_S[0] = len(words)
        return errors_S, words_S
    aligned = jiwer.process_words(
        " ".join(words), " ".join(word for hypothesis in hypotheses for word in hypothesis)
    )
    for chunk in aligned.alignments[0]:
        size = max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
        for step in range(size):
            at = chunk.hyp_start_idx - 1 if chunk.type == "delete" else chunk.hyp_start_idx + step
            segment = segment_of[max(at, 0)]
            errors_S[segment] += chunk.type != "equal"
            words_S[segment] += chunk.type != "insert"
    return errors_S, words_S


def _words(text: str) -> list[str]:
    return comparison_form(text).split()


def _audio(folder: Path) -> list[Path]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and looks_like_audio(path)]
    names = {path.with_suffix("").name for path in files if path.suffix == ".flac"}
    return [path for path in files if path.suffix == ".flac" or path.with_suffix("").name not in names]


def _write_synthetic_sounds(folder: Path) -> list[Path]:
    """Silence, tones, noises, clicks: 5 s each."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, rate = np.random.default_rng(0), 16000
    time_N = np.arange(5 * rate) / rate
    white_N = rng.normal(0.0, 0.1, len(time_N))
    sounds = {"silence": 0.0 * time_N, "white": white_N, "brown": np.cumsum(white_N) / 60}
    sounds |= {f"tone{hertz}": 0.3 * np.sin(2 * np.pi * hertz * time_N) for hertz in (120, 440, 1000, 3000)}
    sounds["sweep"] = 0.3 * np.sin(2 * np.pi * (100 + 300 * time_N) * time_N)
    sounds["clicks"] = np.where(np.arange(len(time_N)) % 4000 < 20, 0.8, 0.0)
    sounds["hum"] = np.sum([0.1 * np.sin(2 * np.pi * 110 * k * time_N) / k for k in range(1, 20)], axis=0)
    sounds["syllables"] = sounds["hum"] * (1 + np.sin(2 * np.pi * 4 * time_N))
    sounds["babble"] = white_N * (1 + np.sin(2 * np.pi * 4 * time_N))
    for name, samples_N in sounds.items():
        soundfile.write(folder / f"{name}.wav", samples_N.clip(-1, 1), rate)
    return sorted(folder.iterdir())


if __name__ == "__main__":
    main()
