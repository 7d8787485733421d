"""Cost of `audiocot` on seconds-long clips: the engine over its steps, every step by itself, two workers; of a writer's
patches; and how far records that are measured (YAMNet, onsets) are from the truth of composed scenes.

The recordings are those of ESC-10 in the folder of real data; the tagger is YAMNet. Prints a JSON line per case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from measure import adopt_descendants, bench_parser, cpu_seconds, in_turns, parse_options, print_row
from rich.console import Console

from audiollm.audio import load, save
from audiollm.models.audio_llms.loading import PatchProduct
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.audiocot.settings import AudioCotConfig
from pipelines.audiocot.stage import STAGE
from pipelines.scenes.settings import ComposeScenesConfig
from pipelines.scenes.stage import run_compose_scenes

YAMNET = "judge_models/tflite-support/tensorflow_lite_support/cc/test/testdata/task/audio"
CLIP_S = 2.5
EVENTS = {
    "dog bark": {"dog", "bark", "bow-wow"},
    "clock tick": {"tick", "clock", "tick-tock"},
    "person sneeze": {"sneeze", "respiratory sounds"},
    "rooster": {"chicken or rooster", "crowing or cock-a-doodle-doo"},
    "baby cry": {"baby cry or infant cry", "crying or sobbing"},
}
"""Labels of ESC-10 that are events, and the names of YAMNet's classes (as records have them) that are right."""
BACKDROPS = ["rain", "sea waves"]
NEAR_S = 0.25
PATCHES, PATCH, WIDTH = 1_536, (2, 14, 14), 1_280
"""Patches of 16 clips of 12 frames of 56 x 56; the patch and the width of Qwen2.5-Omni 7B."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--files", type=int, default=30, help="recordings of a run, two clips each")
    parser.add_argument(
        "--pair-files",
        type=int,
        default=48,
        help="recordings of each run of a pair: starts are a small part of it",
    )
    parser.add_argument("--pairs", type=int, default=1, help="of one worker and two; 0: without them")
    parser.add_argument("--scenes", type=int, default=40, help="composed scenes; 0: without them")
    arguments = parse_options(parser, files=60, pair_files=320, pairs=5, scenes=200)
    settings = settings_of(arguments.data)
    report_patches()
    with tempfile.TemporaryDirectory() as temporary:
        report_costs(recordings(arguments.data, arguments.files, Path(temporary)), settings, Path(temporary))
        if arguments.pairs:
            more = recordings(arguments.data, arguments.pair_files, Path(temporary))
            report_workers(more, settings, Path(temporary), arguments.pairs)
        if arguments.scenes:
            report_truth(arguments.data, settings, Path(temporary), arguments.scenes)


def recordings(data: Path, count: int, folder: Path) -> list[str]:
    """Recordings spread over the classes of ESC-10, as WAV.

    Compressed ones are decoded in a process beside the run, whose CPU-seconds are in no figure.
    """
    paths = sorted((data / "esc10").rglob("*.ogg"))
    if len(paths) < count:
        raise SystemExit(f"fewer than {count} recordings in {data / 'esc10'}: give the folder with --data")
    copies = [
        folder / "recordings" / f"{path.parent.name}-{path.stem}.wav"
        for path in paths[:: len(paths) // count][:count]
    ]
    for path, copy in zip(paths[:: len(paths) // count], copies, strict=False):
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            sound = load(path)
            save(copy, sound.samples_CN, sound.sample_rate)
    return [str(copy) for copy in copies]


def settings_of(data: Path) -> dict[str, Any]:
    tagger = data / YAMNET / "yamnet_audio_classifier_with_metadata.tflite"
    return {
        "clip_s": CLIP_S,
        "steps": {"tags": {"model": str(tagger.resolve())}},
        "thresholds": {"max_voice": None, "max_balance": None, "min_level_dbfs": None},
        "made": {"sample_rate": 16_000, "channels": 1},
    }


def report_costs(files: Sequence[str], settings: dict[str, Any], folder: Path) -> None:
    """The engine over its steps, and every step by itself."""
    # imports and models are no part of what a clip costs
    think(folder / "warm", {**settings, "input": list(files[:1])})
    think(folder / "one", {**settings, "input": list(files)})
    timings = json.loads((folder / "one" / "timings.json").read_text())
    took, steps_s = timings["walk_cpu_s"], sum(step["seconds"] for step in timings["steps"].values())
    line(
        "overhead",
        took,
        round(steps_s, 3),
        steps_s / took,
        "CPU-seconds of the walks (peer: of their steps alone)",
    )
    for name, step in timings["steps"].items():
        if step["seconds"]:
            hours = step["audio_s"] / step["seconds"]
            line(f"step {name}", round(hours, 1), None, None, "hours of sound an hour of one core")
    remainder_s = timings["driver_cpu_s"] - took
    line("the rest", round(remainder_s, 2), None, None, "CPU-seconds of made sounds, samples and shards")


def report_patches() -> None:
    """Patches of a batch of videos, forward and backward, as products and as transformers' convolution, in turns."""
    theirs = torch.nn.Conv3d(3, WIDTH, PATCH, PATCH, bias=False)
    ours = PatchProduct(3, WIDTH, PATCH, PATCH, bias=False)
    ours.load_state_dict(theirs.state_dict())
    patches = torch.randn(PATCHES, 3, *PATCH)
    torch.testing.assert_close(ours(patches), theirs(patches), atol=1e-4, rtol=1e-4)
    layers = {"ours": ours, "theirs": theirs}
    took = in_turns({name: partial(pass_through, layer, patches) for name, layer in layers.items()}, 5)
    ours_s, peer = (median(seconds) for seconds in took.values())
    line("patches of a writer", round(ours_s, 4), round(peer, 4), peer / ours_s, "CPU-seconds, 1,536 patches")


def pass_through(layer: torch.nn.Module, patches: torch.Tensor) -> None:
    """Forward and backward."""
    layer(patches).square().mean().backward()


def report_workers(files: Sequence[str], settings: dict[str, Any], folder: Path, pairs: int) -> None:
    """Commands of one worker and of two, in turns; wall-clock is that of the stage."""
    walls: dict[int, list[float]] = {1: [], 2: []}
    cpus: dict[int, list[float]] = {1: [], 2: []}
    for pair in range(pairs):
        for workers in (1, 2) if pair % 2 else (2, 1):
            wall_s, cpu_s = command(files, settings, folder / f"{pair}-{workers}", workers)
            walls[workers].append(wall_s)
            cpus[workers].append(cpu_s)
    ratio = median(single / two for single, two in zip(walls[1], walls[2], strict=True))
    grown = median(two / single for single, two in zip(cpus[1], cpus[2], strict=True))
    line(
        "two workers", round(median(walls[2]), 2), round(median(walls[1]), 2), ratio,
        f"wall-clock seconds (peer: one worker); CPU-seconds x {grown:.3f}; load {os.getloadavg()[0]:.1f}",
    )  # fmt: skip


def report_truth(data: Path, settings: dict[str, Any], folder: Path, scenes: int) -> None:
    """Composed scenes of real sounds: records with the truth, and records with tagger and onsets alone."""
    esc10 = {"folder": str((data / "esc10").resolve())}
    config = ComposeScenesConfig.model_validate(
        {
            "events": [{**esc10, "labels": list(EVENTS)}],
            "backdrops": [{**esc10, "labels": BACKDROPS}],
            "scenes": scenes,
            "held_out_scenes": 0,
        }
    )
    composed = folder / "scenes"
    run_compose_scenes(config, context_of(composed))
    plain = {
        **settings,
        "preset": "everything",
        "clip_s": None,
        "shards": False,
        "input": str(composed / "scenes.jsonl"),
    }
    plain["made"] = {"pairs": False, "edits": []}
    for case, use_truth in (("with the truth", True), ("with YAMNet and onsets", False)):
        out = folder / f"records-{use_truth}"
        think(out, {**plain, "use_truth": use_truth})
        num_events = timed = named = equal = clips = 0
        for text in (out / "clips.jsonl").read_text().splitlines():
            clip = json.loads(text)
            facts = json.loads((Path(clip["path"]).parent / "scene.json").read_text())["metadata"]
            events = clip["record"]["events"]
            recorded_events = [
                (entry["sound"], entry["start_s"], entry["end_s"], entry.get("place")) for entry in events
            ]
            wanted_events = [
                (event["name"], event["start_s"], event["end_s"], event["where"])
                for event in sorted(facts["events"], key=lambda event: event["start_s"])
            ]
            behind = [facts["backdrop"]["name"]] if facts["backdrop"] else []
            equal += (recorded_events, clip["record"].get("background", [])) == (wanted_events, behind)
            clips += 1
            for event in facts["events"]:
                near = [entry for entry in events if abs(entry["start_s"] - event["start_s"]) <= NEAR_S]
                right = {event["name"], *EVENTS[event["label"]]}
                num_events += 1
                timed += bool(near)
                named += any(entry["sound"] in right for entry in near)
        line(
            f"events found in time {case}",
            round(timed / num_events, 3),
            None,
            None,
            f"share of {num_events}, within {NEAR_S} s",
        )
        line(f"and named right {case}", round(named / num_events, 3), None, None, f"share of {num_events}")
        line(f"records equal to the truth, {case}", round(equal / clips, 3), None, None, f"share of {clips}")


def command(
    files: Sequence[str], settings: dict[str, Any], folder: Path, workers: int
) -> tuple[float, float]:
    """Run `audiollm audiocot`; return its wall-clock, and the CPU-seconds of all of its processes."""
    adopt_descendants()
    used, known_pids = cpu_seconds(), {child.pid for child in psutil.Process().children()}
    listed, settings_path = folder.with_suffix(".csv"), folder.with_suffix(".yaml")
    listed.write_text("\n".join(["path", *files]))
    settings_path.write_text(json.dumps(settings))
    program = str(Path(sys.executable).parent / "audiollm")
    call = [program, "audiocot", str(listed), "-o", str(folder), "--workers", str(workers)]
    done = subprocess.run([*call, "--settings", str(settings_path)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"a run of {folder.name} failed:\n{done.stdout}{done.stderr}")
    wait_for_adopted(known_pids)  # what workers are forked from ends after the run
    return json.loads((folder / "timings.json").read_text())["wall_s"], cpu_seconds() - used


def wait_for_adopted(known_pids: Collection[int]) -> None:
    """Wait for the ends of all child processes but those known before: decoders of this process outlive each run."""
    while adopted := [child.pid for child in psutil.Process().children() if child.pid not in known_pids]:
        for process in adopted:
            with suppress(ChildProcessError):
                os.waitpid(process, 0)


def think(folder: Path, settings: dict[str, Any]) -> None:
    STAGE.run(AudioCotConfig.model_validate({"workers": 1, **settings}), context_of(folder))


def context_of(folder: Path) -> Context:
    folder.mkdir()
    recipe = Recipe("benchmark", folder, "tiny", 0, folder, (), {})
    return Context(folder, recipe, Console(stderr=True, quiet=True), {})


def line(case: str, ours: float, peer: float | None, ratio: float | None, unit: str) -> None:
    print_row("audiocot", case, ours, peer, unit, ratio=ratio)


if __name__ == "__main__":
    main()
