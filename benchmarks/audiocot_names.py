"""Names in records that `audiocot` measures, on ESC-10 with YAMNet: how many are right, and how many clips have none.

    python benchmarks/audiocot_names.py [--data ../shared/data] [--model FILE] [--folds 3 4]

A clip is judged by the sounds of its record at its loudest moment. Their name is right where it is a class of AudioSet
that is the clip's (`events.CLASSES`: chosen by the names and the ontology, not by results), or one right above it
(`parent`: "water" for rain; of a dog also "domestic animals or pets"). A clip without a name there has little evidence,
and is not in `thinking.jsonl`. Thresholds were chosen on folds 1 and 2; folds 3 and 4 are the test.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from events import CLASSES, read_arguments
from rich.console import Console

from audiollm.data.records.thoughts import ThoughtRecord
from audiollm.evaluate.judges.audioset import classes_above
from audiollm.evaluate.report.statistics import share
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from pipelines.audiocot.answers.measured import is_named, loudest_sounds
from pipelines.audiocot.answers.naming import whole_name
from pipelines.audiocot.settings import AudioCotConfig
from pipelines.audiocot.stage import run_audiocot

STEADY_CLASSES = {"Rain", "Sea waves", "Helicopter", "Chainsaw", "Fire crackling"}
"""Classes that last: their clips must have a background."""
LOUD_DBFS = -50.0
"""Clips with a moment of this level are loud: their records must not say that there is nothing."""
ONE_WAY = {"Canidae, dogs, wolves", "Cat", "Roaring cats (lions, tigers)", "Onomatopoeia", "Natural sounds"}
"""Classes right above a class of a clip that say nothing of it: a howl is a wolf's, too, a growl a cat's."""


def main() -> None:
    model, clips, folds = read_arguments(__doc__, ["3", "4"])
    with tempfile.TemporaryDirectory() as folder:
        rows = think(Path(folder), clips, model)
        questions = (Path(folder) / "thinking.jsonl").read_text(encoding="utf-8").splitlines()
    report(rows, len(questions), "folds " + " and ".join(folds))


def think(folder: Path, clips: Sequence[Path], model: Path) -> list[dict[str, Any]]:
    """Run the stage on these recordings; returns the rows of the clips."""
    settings = {
        "input": [str(clip) for clip in clips],
        "preset": "everything",
        "thresholds": {"min_duration_s": None, "min_level_dbfs": None},
        "steps": {"tags": {"model": str(model)}},
        "made": {"pairs": False, "edits": []},
        "shards": False,
        "workers": 1,
    }
    recipe = Recipe("audiocot_names", folder, "tiny", 0, folder, (), {})
    run_audiocot(AudioCotConfig.model_validate(settings), Context(folder, recipe, Console(stderr=True), {}))
    return [json.loads(line) for line in (folder / "clips.jsonl").read_text(encoding="utf-8").splitlines()]


def record_of(row: Mapping[str, Any]) -> ThoughtRecord:
    return ThoughtRecord.model_validate(row["record"])


def line(case: str, hits: Sequence[bool], folds: str) -> None:
    """Print a share with its interval."""
    if not hits:
        return
    figure = share(hits)
    interval = [round(figure["low"], 3), round(figure["high"], 3)]
    print(json.dumps({"bench": "audiocot_names", "case": case, "ours": round(figure["accuracy"], 4),
                      "unit": "share", "interval_95": interval, "n": figure["n"], "folds": folds}))  # fmt: skip


def report(rows: Sequence[Mapping[str, Any]], num_questions: int, folds: str) -> None:
    """Print a JSON line per figure."""
    right: dict[str, list[bool]] = defaultdict(list)
    exact, every_name = [], []
    for row in rows:
        name = Path(row["path"]).parent.name.split(" - ")[1]
        class_names = {whole_name(label) for label in CLASSES[name]}
        above = {whole_name(label) for child in CLASSES[name] for label in classes_above(child) - ONE_WAY}
        loudest = [
            sound for sound in loudest_sounds(record_of(row), row["measured"]["levels"]) if is_named(sound)
        ]
        every_name += [sound in class_names | above for sound in record_of(row).sounds() if is_named(sound)]
        if loudest:
            right[name].append(set(loudest) <= class_names | above)
            exact.append(set(loudest) <= class_names)
    for name in CLASSES:
        line(f"{name}: name or parent right, of clips with a name", right[name], folds)
    with_name = [hit for hits in right.values() for hit in hits]
    line("name or parent right, of clips with a name", with_name, folds)
    line("name right, of clips with a name", exact, folds)
    line("name or parent right, of all names in records", every_name, folds)
    line("clips with a name (enough evidence)", [not row["little_evidence"] for row in rows], folds)
    line("name or parent right, of all clips", with_name + [False] * (len(rows) - len(with_name)), folds)
    loud = [row for row in rows if max(row["measured"]["levels"]["curve_dbfs"]) >= LOUD_DBFS]
    line("loud clips whose record names nothing", [not record_of(row).sounds() for row in loud], folds)
    steady = [row for row in rows if Path(row["path"]).parent.name.split(" - ")[1] in STEADY_CLASSES]
    line("continuous sounds without a background", [not row["record"]["background"] for row in steady], folds)
    print(json.dumps({"bench": "audiocot_names", "case": "questions in thinking.jsonl", "ours": num_questions,
                      "unit": f"of {len(rows)} clips", "folds": folds}))  # fmt: skip


if __name__ == "__main__":
    main()
