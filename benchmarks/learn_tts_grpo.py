"""Does a model that speaks learn from rewards on what is heard? Spoken digits, six speakers.

    make -C benchmarks learn-tts-grpo DATA=../shared/data

First models, tokenizer and judges are those of learn_tts_preference.py (made there, or here where they are not there
yet). For each seed:

- GRPO on the first model's own speech (`grpo`): the reward is whether Pocketsphinx hears the digit that was asked for,
  and how similar the voice is to the asked speaker's, by a classifier of speakers; the codes of the first codebook
  alone have advantages;
- the same with the rewards shuffled over each step's answers (`grpo_shuffled`), which must gain nothing.

All models then speak ten digits in six voices, fifteen times, as GRPO samples (the distribution of the model itself),
which the bars are for, and in the usual setting (guided, at a lower temperature), which is told beside. What counts is
the classifier of digits that is trained on real takes: it had no part in the reward. It hears every answer of the
training, too, with a weight of 0, so that the report shows both recognizers over training: where Pocketsphinx alone
gains, it was deceived. The asked voice is judged by another classifier of speakers (another seed) than the reward's.
The settings were chosen with seed 0, which is not among the three. Bars: a quarter fewer wrong digits; the asked voice
is right no less often than before, up to 2 points.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from heard_digits import JUDGE_VARIABLE
from learn_tts import SETTING
from learn_tts_preference import (
    FEWER,
    SEEDS,
    SOURCE_HELP,
    VOICE_LOSS,
    build_generation,
    codec_of,
    first_of,
    judges_of,
    made_source,
    print_shares,
    run,
    samples_of,
    score,
)
from rich.console import Console
from rich.table import Table

from audiollm.files.atomic import read_json, write_json

BENCH = "learn_tts_grpo"
GRPO: dict[str, Any] = {
    "answer": "audio",
    "group_size": 8,
    "batch_size": 8,
    "max_frames": 30,
    "codebooks": 1,
    "learning_rate": 2e-4,
    "steps": 100,
    "evaluations": 2,
    "eval_prompts": 30,
    "kl": {"controller": {"name": "fixed", "coefficient": 0.01}},
}
"""1.2 s at most."""
VOICE_WEIGHT = 0.5
WATCHED = {"heard_digits:classifier": 0.0}
"""What is logged and has no part in the reward."""
KINDS = ("first", "grpo", "grpo_shuffled")
AS_SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "text_guidance": 1.0, "speaker_guidance": 1.0}
SETTINGS = {"as_sampled": AS_SAMPLED, "says": SETTING}
"""How models speak, by the end of the names of the stages."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd/recordings")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--source", type=Path, help=SOURCE_HELP)
    arguments = parser.parse_args()
    recordings = arguments.data / "fsdd" / "recordings"
    if not recordings.is_dir():
        raise SystemExit(f"no spoken digits in {recordings}: give the folder of recordings with --data")
    torch.set_num_threads(1)
    console = Console(stderr=True)
    tts_run = (arguments.runs / "learn_tts").resolve()
    source = (arguments.source or made_source(tts_run, recordings.resolve(), console)).resolve()
    folder = (arguments.runs / "learn_tts_preference").resolve()
    run(folder, firsts_of(source, arguments.seeds), "grpo_firsts", console)
    os.environ[JUDGE_VARIABLE] = str(folder / "judges" / "judges" / "classifier")
    run(folder, recipe_of(source, folder, arguments.seeds), "grpo", console)
    scores = {says: score(folder, arguments.seeds, console, KINDS, says) for says in SETTINGS}
    write_json(folder / "grpo_scores.json", scores)
    for says, setting_scores in scores.items():
        report(folder, setting_scores, arguments.seeds, console, says)


def firsts_of(source: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The first models; the judges of the end; and those of another seed, for the reward."""
    stages = [stage for seed in seeds for stage in first_of(source, seed)]
    stages += [build_generation(source, "first", seed, "as_sampled", AS_SAMPLED) for seed in seeds]
    judges = judges_of(source, seeds[0])
    reward_judges = {"name": "reward_judges", "evaluate": {**judges["evaluate"], "seed": 1}}
    return {
        "name": "learn_tts_preference",
        "size": "tiny",
        "seed": 0,
        "stages": [*stages, judges, reward_judges],
    }


def recipe_of(source: Path, folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """GRPO and its control from each first model, what they say, and the report of all trainings."""
    stages: list[dict[str, Any]] = []
    for kind, rewards in rewards_of(folder).items():
        for seed in seeds:
            settings = {
                "start": str(folder / f"first_{seed}" / "model"),
                "codec": codec_of(source),
                "samples": str(samples_of(source)),
                "rewards": rewards,
                **GRPO,
                "seed": seed,
            }
            stages.append({"name": f"{kind}_{seed}", "train_policy": settings})
            stages += [
                build_generation(source, kind, seed, says, setting) for says, setting in SETTINGS.items()
            ]
    return {"name": "learn_tts_preference", "size": "tiny", "seed": 0, "stages": [*stages, {"report": {}}]}


def rewards_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The rewards of GRPO, and of its control: there, the voice is watched alone."""
    judge = str(folder / "reward_judges" / "judges" / "speaker")
    return {
        "grpo": {
            "heard_digits:words": 1.0,
            "voice": {"weight": VOICE_WEIGHT, "judge": judge},
            **WATCHED,
        },
        "grpo_shuffled": {
            "heard_digits:shuffled_words": 1.0,
            "voice": {"weight": 0.0, "judge": judge},
            **WATCHED,
        },
    }


def report(
    folder: Path, scores: dict[str, dict[str, float]], seeds: Sequence[int], console: Console, says: str
) -> None:
    """The table of a setting for people, and the JSON lines."""
    setting_title = "as sampled" if says == "as_sampled" else "usual setting"
    table = Table(title=f"Digits that a classifier hears wrong, voices that it hears right: {setting_title}")
    for column in ("model", "wrong digits", "right voices", "CPU-s"):
        table.add_column(column)
    for name, row in scores.items():
        spent = read_json(folder / name / "stage.json")["figures"]["cpu_seconds"]
        table.add_row(name, f"{row['wrong']:.3f}", f"{row['voice']:.3f}", f"{spent:.0f}")
    console.print(table)
    first = [scores[f"first_{seed}"] for seed in seeds]
    print_shares(f"{setting_title}, first: wrong digits", [row["wrong"] for row in first], None, BENCH)
    for kind in KINDS[1:]:
        after = [scores[f"{kind}_{seed}"] for seed in seeds]
        pairs = list(zip(first, after, strict=True))
        fewer = [1 - now["wrong"] / max(1e-9, before["wrong"]) for before, now in pairs]
        is_held = kind == "grpo" and says == "as_sampled"
        print_shares(
            f"{setting_title}, {kind}: fewer wrong digits, of those before",
            fewer,
            FEWER if is_held else None,
            BENCH,
        )
        gained = [now["voice"] - before["voice"] for before, now in pairs]
        print_shares(f"{setting_title}, {kind}: right voices gained", gained, None, BENCH)
        if is_held:
            min_voice = statistics.mean(row["voice"] for row in first) - VOICE_LOSS
            print_shares(
                f"{setting_title}, grpo: right voices", [row["voice"] for row in after], min_voice, BENCH
            )


if __name__ == "__main__":
    main()
