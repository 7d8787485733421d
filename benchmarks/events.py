"""The step `events` on ESC-10: whether the right class is among the first three tags of a clip, and what it costs.

    python benchmarks/events.py [--data ../shared/data] [--model FILE] [--folds 1 2 3 4]

The judge is YAMNet, which knows AudioSet's classes. A clip counts where one of the first three tags is its class by
name, what makes the sound (the dog that barks), or a kind of either (`CLASSES`: chosen by the names and AudioSet's
ontology, not by results). A broader class (Water, Animal, Engine) never counts. `peer` is what the model gives by
itself: its classes by their mean over the same windows. That tags leave groups of things out (`events.GROUPS`) was
decided after the peer's errors on these clips had been seen; the groups are those of all AudioSet, and the share of
0.5 is not tuned (0.25 to 0.8 give 0.82 to 0.85).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import chain
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from audiollm.audio import load
from audiollm.evaluate.judges.taggers import TfliteTagger
from audiollm.evaluate.report.statistics import share
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.events import Events, EventsConfig, window_starts
from pipelines.steps.step import Listener

CLASSES = {
    "Dog bark": {"Dog", "Bark", "Yip", "Howl", "Bow-wow", "Growling", "Whimper (dog)"},
    "Rain": {"Rain", "Raindrop", "Rain on surface"},
    "Sea waves": {"Ocean", "Waves, surf"},
    "Baby cry": {"Baby cry, infant cry"},
    "Clock tick": {"Clock", "Tick", "Tick-tock"},
    "Person sneeze": {"Sneeze"},
    "Helicopter": {"Helicopter"},
    "Chainsaw": {"Chainsaw"},
    "Rooster": {"Chicken, rooster", "Crowing, cock-a-doodle-doo"},
    "Fire crackling": {"Fire", "Crackle"},
}
"""ESC-10's classes and AudioSet's. Cluck is a hen's, and Whimper a person's of any age."""
TOP = 3


def main() -> None:
    model, clips, _ = read_arguments(__doc__, ["1", "2", "3", "4"])
    compare(model, clips)


def read_arguments(description: str | None, folds: list[str]) -> tuple[Path, list[Path], list[str]]:
    """The options of a benchmark on ESC-10 with YAMNet: the model's file, the clips, and their folds.

    Args:
        description: the help text.
        folds: where --folds is not given.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--model", type=Path, help="YAMNet's .tflite; by default the one under --data")
    parser.add_argument("--folds", nargs="+", default=folds)
    arguments = parser.parse_args()
    model = arguments.model or next((arguments.data / "judge_models").rglob("yamnet*.tflite"), None)
    if model is None:
        parser.error(f"no YAMNet under {arguments.data / 'judge_models'}: give --model")
    clips = sorted((arguments.data / "esc10").rglob("*.ogg"))
    clips = [clip for clip in clips if clip.name.split("-")[0] in arguments.folds]
    if not clips:
        parser.error(f"no ESC-10 under {arguments.data / 'esc10'}: give --data")
    return model, clips, arguments.folds


def compare(model: Path, clips: list[Path]) -> None:
    """Measure and print."""
    step = Events(EventsConfig(model=model, top=TOP))
    step.setup()
    tagger = TfliteTagger(model)
    ours: dict[str, list[bool]] = {name: [] for name in CLASSES}
    plain: dict[str, list[bool]] = {name: [] for name in CLASSES}
    cpu_s = heard_s = 0.0
    for clip in clips:
        name = clip.parent.name.split(" - ")[1]
        duration_s = load(clip).duration_s
        segment = Segment(
            str(clip), 0.0, duration_s, "sound", None, RecordingMetadata(), {}, Listener(str(clip))
        )
        samples_N = segment.samples(tagger.sample_rate)  # decoding and resampling are not the step's
        started = time.process_time()
        tags = step.process(segment)["tags"]
        cpu_s, heard_s = cpu_s + time.process_time() - started, heard_s + duration_s
        ours[name].append(any(tag["label"] in CLASSES[name] for tag in tags))
        plain[name].append(bool(CLASSES[name] & set(first_by_mean(tagger, samples_N))))
    for name in CLASSES:
        _print_event_share(name, ours[name], plain[name])
    _print_event_share("all classes", list(chain(*ours.values())), list(chain(*plain.values())))
    print(json.dumps({"bench": "events", "case": "cost", "ours": round(cpu_s / heard_s, 5), "peer": None,
                      "ratio": None, "unit": "CPU-s per audio-s"}))  # fmt: skip


def first_by_mean(tagger: TfliteTagger, samples_N: np.ndarray) -> list[str]:
    """The model's first three classes, nothing left out."""
    window = round(tagger.window_s * tagger.sample_rate)
    padded_N = np.pad(samples_N, (0, max(window - len(samples_N), 0)))
    tagged = tagger.hear(
        padded_N[start : start + window] for start in window_starts(len(samples_N), window, window // 2)
    )
    order = np.argsort(-tagged.scores_FK.mean(axis=0), kind="stable")
    return [tagged.labels[place] for place in order[:TOP]]


def _print_event_share(case: str, ours: list[bool], plain: list[bool]) -> None:
    if not ours:
        return
    right, peer = share(ours), share(plain)
    interval = [round(right["low"], 3), round(right["high"], 3)]
    print(json.dumps({"bench": "events", "case": f"{case}: right class among the first {TOP} tags",
                      "ours": round(right["accuracy"], 4), "peer": round(peer["accuracy"], 4),
                      "ratio": round(right["accuracy"] / peer["accuracy"], 3) if peer["accuracy"] else None,
                      "unit": "share of clips", "interval_95": interval, "n": right["n"]}))  # fmt: skip


if __name__ == "__main__":
    main()
