"""Does a model that speaks learn from preferences between its own takes? Spoken digits, six speakers.

    make -C benchmarks learn-tts-preference DATA=../shared/data

With the tokenizer of learn_tts.py (made there, or here where it is not there yet), for each of three seeds:

- a model learns to say digits in six voices, but not for long enough to say all of them right (`first`);
- it says each digit in each voice many times, and Pocketsphinx writes down what it hears. Of each four takes, one
  that is heard as asked and one that is not make a pair;
- one training on these pairs (`dpo`: DPO with cross entropy on the better take), on the codes as they were made;
- the same budget with the two of a pair exchanged at random (`shuffled`), which must gain nothing.

All models then speak ten digits in six voices, fifteen times, in the usual setting. What counts is the classifier of
digits that learn_tts.py has, trained on real takes: it had no part in the ranking or the training. The settings below
were chosen with seed 0, which is not among the three. Bars: a quarter fewer wrong digits; the asked voice is right no
less often than before, up to 2 points.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import learn_tts
import torch
import yaml
from rich.console import Console
from rich.table import Table
from scipy import stats

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample, write_samples
from audiollm.evaluate.judges.classifier import ClipClassifier
from audiollm.evaluate.judges.judging import SpeechJudges
from audiollm.evaluate.speech.run import read_generated_clips, right
from audiollm.evaluate.speech.trained_judges import JUDGE_RATE, MAX_JUDGED_CLIP_S
from audiollm.files.atomic import read_json, write_json
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe

SEEDS = (1, 2, 3)
SOURCE_HELP = (
    "a run of recipes/quickstart.yaml on these recordings, whose tokenizer is taken; else learn_tts.py's"
)
TOKENIZER_STAGES = 4
"""The first stages of learn_tts.py: annotate, compose, train_tokenizer, tokenize."""
PASSES = 8
"""Of the first models over the clips; learn_tts.py takes 18, and few digits are then wrong."""
COPIES, HELD_OUT_COPIES = 20, 2
"""Prompts of each digit in each voice; pairs of the last ones are held out."""
SAMPLED: dict[str, Any] = {
    "modality": "speech",
    "group_size": 4,
    "temperature": 0.9,
    "top_p": 0.95,
    "text_guidance": 2.0,
    "speaker_guidance": 1.5,
    "max_duration_s": 1.2,
    "score": {"words": 1.0},
}
"""A little freer than the setting in which all models are judged (`learn_tts.SETTING`): takes differ, and the errors
are those that are made there. Learning rates of 5e-5 and more cost the voice 2 to 6 points with seed 0."""
ALIGNED: dict[str, Any] = {
    "objective": [{"name": "dpo", "beta": 0.1}, {"name": "sft", "weight": 1.0}],
    "learning_rate": 2e-5,
    "steps": 120,
    "batch_size": 16,
    "eval_answers": 0,
}
TAKES = 15
"""Of each digit in each voice by each model: 900 clips."""
KINDS = ("first", "dpo", "shuffled")
FEWER, VOICE_LOSS = 0.25, 0.02
"""Bars: at least this share of the wrong digits is gone; at most this share of clips loses the asked voice."""


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
    source = arguments.source or made_source(arguments.runs / "learn_tts", recordings, console)
    folder = arguments.runs / "learn_tts_preference"
    write_prompts(source / "compose" / "samples.jsonl", folder / "data" / "prompts.jsonl")
    run(folder, recipe_of(source, folder, arguments.seeds), "recipe", console)
    for seed in arguments.seeds:
        write_shuffled(folder / f"pairs_{seed}" / "samples.jsonl", shuffled_file(folder, seed), seed)
    run(folder, shuffled_recipe(source, folder, arguments.seeds), "shuffled", console)
    scores = score(folder, arguments.seeds, console)
    write_json(folder / "scores.json", scores)
    report(folder, scores, arguments.seeds, console)


def made_source(source: Path, recordings: Path, console: Console) -> Path:
    """Run the stages of learn_tts.py up to its codes, in its folder: what is there is not made again."""
    full_recipe = learn_tts.recipe_of(recordings)
    run(source, {**full_recipe, "stages": full_recipe["stages"][:TOKENIZER_STAGES]}, "tokenizer", console)
    return source


def recipe_of(source: Path, folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The first models, their takes and pairs, what is trained on these, and what all say; and the judges."""
    codec = codec_of(source)
    stages: list[dict[str, Any]] = []
    for seed in seeds:
        model = f"${{first_{seed}.checkpoint}}"
        sampling = {"model": model, "codec": codec, "samples": str(folder / "data" / "prompts.jsonl")}
        pairs = {"samples": f"${{sampled_{seed}.samples}}", "select": "best_worst"}
        stages += [
            *first_of(source, seed),
            {"name": f"sampled_{seed}", "sample_answers": {**sampling, **SAMPLED, "seed": seed}},
            {"name": f"pairs_{seed}", "select_answers": pairs},
            aligned("dpo", model, f"${{pairs_{seed}.samples}}", seed),
            build_generation(source, "dpo", seed),
        ]
    stages.append(judges_of(source, seeds[0]))
    return {"name": "learn_tts_preference", "size": "tiny", "seed": 0, "stages": stages}


def first_of(source: Path, seed: int) -> list[dict[str, Any]]:
    """A first model, and what it says."""
    trained = {
        "samples": str(source / "tokenize" / "shards"),
        "codec": codec_of(source),
        "seed": seed,
        "passes": PASSES,
        "eval_audio_samples": 0,
    }
    return [{"name": f"first_{seed}", "train": trained}, build_generation(source, "first", seed)]


def judges_of(source: Path, seed: int) -> dict[str, Any]:
    """The judges that real takes train."""
    judged = {"audio": f"${{first_{seed}_says.audio}}", "samples": str(samples_of(source))}
    return {"name": "judges", "evaluate": {**judged, "suite": "tts"}}


def shuffled_recipe(source: Path, folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The control: pairs exchanged at random."""
    stages = []
    for seed in seeds:
        model = str(folder / f"first_{seed}" / "model")
        stages.append(aligned("shuffled", model, str(shuffled_file(folder, seed)), seed))
        stages.append(build_generation(source, "shuffled", seed))
    return {"name": "learn_tts_preference", "size": "tiny", "seed": 0, "stages": stages}


def aligned(kind: str, model: str, samples: str, seed: int) -> dict[str, Any]:
    """A training on preferences."""
    settings = {"start": model, "samples": samples, **ALIGNED, "seed": seed}
    return {"name": f"{kind}_{seed}", "train_preference": settings}


def build_generation(
    source: Path,
    kind: str,
    seed: int,
    says: str = "says",
    setting: Mapping[str, Any] = learn_tts.SETTING,
) -> dict[str, Any]:
    """The clips that a model is judged by."""
    settings = {
        "model": f"${{{kind}_{seed}.checkpoint}}",
        "codec": codec_of(source),
        "samples": str(samples_of(source)),
        "takes": TAKES,
        "seed": seed,
        **setting,
    }
    return {"name": f"{kind}_{seed}_{says}", "generate": settings}


def codec_of(source: Path) -> str:
    """The tokenizer."""
    return str(source / "train_tokenizer" / "model")


def samples_of(source: Path) -> Path:
    """The real takes, with texts and speakers."""
    return source / "compose" / "samples.jsonl"


def shuffled_file(folder: Path, seed: int) -> Path:
    """The pairs of a seed, exchanged at random."""
    return folder / "data" / f"shuffled-{seed}.jsonl"


def write_prompts(real: Path, path: Path) -> None:
    """Write each digit in each voice `COPIES` times, without a recording."""
    if path.exists():  # what reads a file that was written again would start afresh
        return
    samples, _ = read_samples(real)
    sample_by_key = {
        (str(sample.metadata["text"]), str(sample.metadata["speaker"])): sample
        for sample in reversed(samples)
        if sample.metadata["split"] == "train"
    }
    prompts = []
    for (text, speaker), sample in sorted(sample_by_key.items()):
        for number in range(COPIES):
            split = "test" if number >= COPIES - HELD_OUT_COPIES else "train"
            about = {"text": text, "speaker": speaker, "split": split}
            update = {"id": f"{text}_{speaker}_{number}", "messages": sample.messages[:-1], "metadata": about}
            prompts.append(sample.model_copy(update=update))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_samples(path, prompts)


def write_shuffled(pairs: Path, path: Path, seed: int) -> None:
    """Write the pairs with the scores of each one's answers exchanged by the toss of a coin; held-out ones stay."""
    if path.exists():
        return
    coins = random.Random(seed)
    samples, _ = read_samples(pairs)
    write_samples(
        path, [_exchanged(sample) if _is_exchanged(sample, coins) else sample for sample in samples]
    )


def score(
    folder: Path, seeds: Sequence[int], console: Console, kinds: Sequence[str] = KINDS, says: str = "says"
) -> dict[str, dict[str, float]]:
    """The share of wrong digits and of right voices of every model, by the judges that real takes trained."""
    trained = {
        name: ClipClassifier.load(folder / "judges" / "judges" / name) for name in ("classifier", "speaker")
    }
    judges = SpeechJudges(None, None, trained, None, MAX_JUDGED_CLIP_S, JUDGE_RATE)
    figures = {}
    for seed in seeds:
        for kind in kinds:
            name = f"{kind}_{seed}"
            with console.status(f"judging {name}"):
                clips = read_generated_clips(folder / f"{name}_{says}" / "generated.jsonl")
                judged_clips = [judges.judge(clip, embedded=False) for clip in clips]
            shares = {
                judge: statistics.mean(
                    bool(right(clip, judged, judge, judges))
                    for clip, judged in zip(clips, judged_clips, strict=True)
                )
                for judge in trained
            }
            figures[name] = {"wrong": 1 - shares["classifier"], "voice": shares["speaker"]}
    return figures


def report(folder: Path, scores: dict[str, dict[str, float]], seeds: Sequence[int], console: Console) -> None:
    """The table for people, and the JSON lines."""
    table = Table(title="Digits that a classifier hears wrong, voices that it hears right, held-out pairs")
    for column in ("model", "wrong digits", "right voices", "pairs ordered right", "CPU-s"):
        table.add_column(column)
    for name, row in scores.items():
        figures = read_json(folder / name / "stage.json")["figures"]
        ordered = f"{figures['accuracy']:.3f}" if "accuracy" in figures else ""
        cells = [f"{row['wrong']:.3f}", f"{row['voice']:.3f}", ordered, f"{figures['cpu_seconds']:.0f}"]
        table.add_row(name, *cells)
    console.print(table)
    print_shares("first: wrong digits", [scores[f"first_{seed}"]["wrong"] for seed in seeds], None)
    for kind in ("dpo", "shuffled"):
        pairs = [(scores[f"first_{seed}"], scores[f"{kind}_{seed}"]) for seed in seeds]
        fewer = [1 - after["wrong"] / before["wrong"] for before, after in pairs]
        before_mean = statistics.mean(before["voice"] for before, _ in pairs)
        is_held = kind == "dpo"
        print_shares(f"{kind}: fewer wrong digits, of those before", fewer, FEWER if is_held else None)
        print_shares(
            f"{kind}: right voices gained",
            [after["voice"] - before["voice"] for before, after in pairs],
            None,
        )
        if is_held:
            print_shares(
                "dpo: right voices", [after["voice"] for _, after in pairs], before_mean - VOICE_LOSS
            )


# ------------------------------------------------------------------------------------------------ private


def run(folder: Path, recipe: dict[str, Any], name: str, console: Console) -> None:
    """Run a recipe in a folder of `runs`; the file stays as it is where nothing changed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    text = yaml.safe_dump(recipe, sort_keys=False)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    run_recipe(load_recipe(path, name=folder.name, runs=folder.parent), console)


def _is_exchanged(sample: Sample, coins: random.Random) -> bool:
    return sample.metadata.get("split") != "test" and coins.random() < 0.5


def _exchanged(sample: Sample) -> Sample:
    better, worse = sample.answers
    scores = (
        better.model_copy(update={"score": worse.score}),
        worse.model_copy(update={"score": better.score}),
    )
    return sample.model_copy(update={"answers": list(scores)})


def print_shares(
    case: str, values: Sequence[float], bar: float | None, bench: str = "learn_tts_preference"
) -> None:
    mean = statistics.mean(values)
    line: dict[str, Any] = {"bench": bench, "case": case, "ours": round(mean, 4)}
    if bar is not None:
        line |= {"peer": round(bar, 4), "ratio": round(mean / bar, 3)}
    line["unit"] = "share (peer: the bar)" if bar is not None else "share"
    if len(values) > 1:
        spread = statistics.stdev(values) / math.sqrt(len(values))
        half = float(stats.t.ppf(0.975, len(values) - 1)) * spread
        line["interval"] = [round(mean - half, 4), round(mean + half, 4)]
    print(json.dumps({**line, "seeds": [round(value, 4) for value in values]}))


if __name__ == "__main__":
    main()
