"""Time to voice: minutes from raw recordings to speech that an independent recognizer gets right.

Runs the quickstart on the recordings, with one or several training budgets (everything before `train` runs once), and
prints, for the first budget whose generated speech is recognized at least 0.95 as often as the held-out real
recordings, the minutes of all stages from `annotate` to `generate`: by the clock, and in CPU-minutes over 2 cores,
which do not depend on what else the machine does. The judges' time is not counted: they measure and make nothing.
By default tokenizer and model have few steps, which show the way alone; `--full` has those of the recipe, as the claim.
"""

from __future__ import annotations

import json
from pathlib import Path

from measure import bench_parser, parse_options
from rich.console import Console

from audiollm.files.atomic import read_json
from audiollm.recipe.runner import read_result, run_recipe
from audiollm.recipe.stages import load_recipe, required

TARGET, CORES = 0.95, 2
MAKING = ("annotate", "compose", "train_tokenizer", "tokenize", "train", "generate")


def main() -> None:
    here = Path(__file__).resolve().parents[1]
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--audio", type=Path, help="folder of recordings; without it the embedded synthesizer speaks"
    )
    parser.add_argument("--transcripts", help="a table, or a pattern such as '{text}_{speaker}_{take}.wav'")
    parser.add_argument("--test", help="which recordings are held out, for example 'take<5'")
    steps_help = "steps of the model to try, one after the other; 0: those of the recipe"
    parser.add_argument("--steps", type=int, nargs="+", default=[100], help=steps_help)
    tokenizer_help = "steps of the tokenizer; 0: those of the recipe"
    parser.add_argument("--tokenizer-steps", type=int, default=100, help=tokenizer_help)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="time-to-voice")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parse_options(parser, steps=[0], tokenizer_steps=0)
    options = {key: getattr(arguments, key) for key in ("audio", "transcripts", "test")}
    overrides = [f"{key}={json.dumps(str(value))}" for key, value in options.items() if value is not None]
    if arguments.tokenizer_steps:
        overrides.append(f"train_tokenizer.steps={arguments.tokenizer_steps}")
    best, minutes = 0.0, None
    for steps in arguments.steps:
        recipe = load_recipe(
            here / "recipes" / "quickstart.yaml",
            [f"seed={arguments.seed}", *overrides, *([f"train.steps={steps}"] if steps else [])],
            name=arguments.name,
            runs=arguments.runs,
        )
        run_recipe(recipe, Console(stderr=True))
        score = read_json(recipe.folder / "summary.json")["relative_accuracy"]
        results = {stage: required(read_result(recipe.folder / stage)) for stage in MAKING}
        spent = sum(result.seconds for result in results.values()) / 60
        cpu_seconds = {stage: round(result.cpu_seconds, 1) for stage, result in results.items()}
        steps = int(results["train"].figures["steps"])
        row = {"bench": "time_to_voice", "case": f"{steps} steps", "ours": round(spent, 2), "unit": "minutes"}
        row |= {"cpu_minutes_of_two_cores": round(sum(cpu_seconds.values()) / 60 / CORES, 2), **cpu_seconds}
        print(json.dumps({**row, "relative_accuracy": round(score, 4)}), flush=True)
        best = max(best, score)
        if score >= TARGET:
            minutes = round(spent, 2)
            break
    final = {
        "bench": "time_to_voice",
        "case": arguments.audio.parent.name if arguments.audio else "synthetic",
        "ours": minutes if minutes is not None else "not reached",
        "peer": None,
        "ratio": None,
        "unit": "minutes",
        "best": round(best, 4),
    }
    print(json.dumps(final))


if __name__ == "__main__":
    main()
