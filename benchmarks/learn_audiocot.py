"""Does a model learn to write chains of thought (CoT) about sounds that it never heard?

    make -C benchmarks learn-audiocot DATA=../shared/data [SEEDS="1 2 3"] [FLOW=runs/learn_flow]
    python benchmarks/learn_audiocot.py --smoke     # all of it, in a few CPU-minutes

Scenes of 3 s are composed of real recordings as for `learn_flow` (takes and a fold held out), `audiocot` writes their
questions and true answers, and for each seed a thinker of Qwen2.5-Omni's class with random weights is trained on three
tasks: the CoT of a clip, the CoT of an object beside that of its clip, and an instruction as operation, span and CoT.
It is asked about held-out scenes, instructions in held-out wordings; a program that reads records alone scores it.

Controls: pictures in random order, videos exchanged, sounds exchanged, both; a writer that is trained and asked with
captions in place of clips. End to end (with the flow model of a run of `learn_flow`, which has the same scenes): sounds
from the CoT that was written, beside those from the true CoT and from the caption alone; and 20 instructions from words
to changed track. Means over seeds with 95 % intervals; the setting is fixed in this file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import learn_flow
import numpy as np
import yaml
from rich.console import Console
from scipy import stats

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Message, Sample, TextPart, VideoPart
from audiollm.data.records.thoughts import ThoughtRecord, caption_of_record, prose_of
from audiollm.errors import BadSample, ConfigError
from audiollm.evaluate.judges.classifier import ClipClassifier
from audiollm.evaluate.sound.edited_sounds import DONE, UNTOUCHED, judge_edits, read_edited
from audiollm.evaluate.sound.event_judge import event_judge
from audiollm.evaluate.sound.generated_sounds import read_generated
from audiollm.evaluate.sound.sound_judges import OwnClasses
from audiollm.files.atomic import read_jsonl, write_jsonl
from audiollm.flow.editing.operations import edit_track, find_span
from audiollm.flow.editing.requests import EditRequest, edit_conditions
from audiollm.flow.editing.tracks import read_track
from audiollm.flow.generator import SoundGenerator, sampler_settings
from audiollm.flow.settings import SoundSamplingConfig
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe

NAME = "learn_audiocot"
PICTURES = {"per_second": 4.0, "side": 56}
STEPS, BATCH, RATE = 1_200, 16, 1.0e-3
MUON = (
    "*_proj.weight", "*visual.blocks.*.attn.*.weight", "*.patch_embed.proj.weight", "*.merger.mlp.*.weight",
    "*audio_tower.conv?.weight", "*audio_tower.layers.*.fc?.weight", "*audio_tower.proj.weight",
)  # fmt: skip
"""Matrices and convolutions that Muon optimises."""
WEIGHTS = {"clip": 0.5, "region": 0.1, "instruction": 0.4}
"""Shares of the kinds of questions in training: by number a clip's are 14 %, and an object's, of 29 %, are easy."""
CAPTIONS = {kind: f"captions_{kind}.jsonl" for kind in WEIGHTS}
MAX_ANSWER_TOKENS, MAX_QUESTIONS = 256, 400
"""Questions of each kind: all instructions about the held-out scenes."""
EDITS, MAX_EXTENDED_S = 20, 10.0
SAMPLING = learn_flow.SAMPLING
AUTOENCODER = learn_flow.AUTOENCODER
CONTROLS: dict[str, dict[str, Any]] = {
    "frames shuffled": {"shuffle_frames": True},
    "videos exchanged": {"exchange": ["video"]},
    "sounds exchanged": {"exchange": ["sound"]},
    "both exchanged": {"exchange": ["video", "sound"]},
}
OF_CONTROLS = {"questions": ["clip", "region"]}
WAYS = {"true CoT": ["cot"], "written CoT": ["cot"], "caption alone": ["caption"]}
"""Ways to ask the flow model."""
BARS = {
    ("clip", "events named (F1)"): 0.8,
    ("clip", "order of two events"): 0.9,
    ("clip", "times within 0.25 s"): 0.8,
    ("region", "its sound and no other"): 0.8,
    ("instruction", "operation and span"): 0.9,
}
SMOKE: dict[str, dict[str, Any]] = {
    "scenes": {"scenes": 8, "held_out_scenes": 4},
    "thinker": {"width": 64, "layers": 2, "encoder_width": 32, "audio_layers": 1, "vision_layers": 1, "mel_bins": 16},
    "writer": {"steps": 10, "batch_size": 4},
    "asked": {"max_questions": 2, "max_answer_tokens": 24},
    "flow": {"steps": 10, "batch_size": 2},
    "making": {"max_samples": 2, "sampling": {"steps": 2}},
}  # fmt: skip
"""Settings of each kind of stage at a size that shows that it runs, and nothing else."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd and esc10")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--flow", type=Path, help="folder of a run of learn_flow; else nothing is made of the CoT"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="everything at a toy size, one seed, made sounds"
    )
    parser.add_argument("overrides", nargs="*", help="settings of the recipe: writer_1.steps=100")
    arguments = parser.parse_args()
    if not arguments.smoke:
        for name in ("fsdd", "esc10"):
            if not (arguments.data / name).is_dir():
                raise SystemExit(f"no recordings in {arguments.data / name}: give their folder with --data")
    data = None if arguments.smoke else arguments.data.resolve()
    seeds = arguments.seeds[:1] if arguments.smoke else arguments.seeds
    folder = arguments.runs / (f"{NAME}_smoke" if arguments.smoke else NAME)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    first_stages = data_stages(data)
    of_data = [
        override for override in arguments.overrides if override.split(".")[0] in ("scenes", "audiocot")
    ]
    _run_audiocot_recipe({"name": folder.name, "stages": first_stages}, folder, of_data, console)
    write_captions(folder)
    stages = [
        *first_stages,
        *(stage for seed in seeds for stage in writer_stages(seed, folder.resolve(), arguments.smoke)),
    ]
    _run_audiocot_recipe(
        {"name": folder.name, "stages": [*stages, {"report": {}}]}, folder, arguments.overrides, console
    )
    report_answers(folder, seeds)
    flow = _flow_folder(arguments.flow, folder, arguments.smoke)
    if flow is None:
        print(json.dumps({"bench": NAME, "case": "end to end", "ours": None, "unit": "n/a: give --flow"}))
        return
    for seed in seeds:
        write_conditions(folder, seed)
    stages += [
        stage for seed in seeds for stage in sound_stages(seed, folder.resolve(), flow, arguments.smoke)
    ]
    _run_audiocot_recipe(
        {"name": folder.name, "stages": [*stages, {"report": {}}]}, folder, arguments.overrides, console
    )
    judge = _judge(data, folder)
    report_sounds(folder, seeds, judge)
    generator = SoundGenerator.load(*_flow_model(flow, seeds[0], arguments.smoke, folder))
    report_edits(folder, seeds, generator, judge, 2 if arguments.smoke else 24)


# ---------------------------------------------------------------------------------------------- recipe


def data_stages(data: Path | None) -> list[dict[str, Any]]:
    """Scenes of real recordings (None: of made ones, few), and their questions with true answers."""
    scenes: dict[str, Any] = {"event_s": learn_flow.EVENT_S, "sample_rate": learn_flow.RATE}
    if data is None:
        scenes |= SMOKE["scenes"]
    else:
        events, backdrops = learn_flow.sound_sources(data)
        scenes |= {
            "events": events,
            "backdrops": backdrops,
            "scenes": learn_flow.SCENES,
            "held_out_scenes": learn_flow.TEST_SCENES,
        }
    thoughts = {
        "input": "${scenes.samples}",
        "preset": "everything",
        "steps": {"objects": {}},
        "made": {"sample_rate": learn_flow.RATE, "channels": 1},
        "shards": False,
        "workers": 1,
    }
    return [{"name": "scenes", "compose_scenes": scenes}, {"audiocot": thoughts}]


def writer_stages(seed: int, folder: Path, smoke: bool) -> list[dict[str, Any]]:
    """A writer of clips and one of captions, and what both are asked."""
    stages: list[dict[str, Any]] = []
    artifacts = {"clip": "clip_questions", "region": "region_questions", "instruction": "instructions"}
    by_kind = {kind: f"${{audiocot.{name}}}" for kind, name in artifacts.items()}
    captions = {kind: str(folder / name) for kind, name in CAPTIONS.items()}
    for name, samples, by_question, pictures in (
        ("writer", "${audiocot.thinking}", by_kind, PICTURES),
        ("captions", str(folder / "captions.jsonl"), captions, None),
    ):
        begin = {"samples": samples, "seed": seed, **(SMOKE["thinker"] if smoke else {})}
        train = {
            "start": f"${{begin_{name}_{seed}.checkpoint}}",
            "samples": [{"path": by_question[kind], "weight": weight} for kind, weight in WEIGHTS.items()],
            "objective": "sft",
            "pictures": pictures,
            "steps": STEPS,
            "batch_size": BATCH,
            "learning_rate": RATE,
            "rules": [{"pattern": pattern, "optimizer": "muon"} for pattern in MUON],
            "max_tokens": 8_192,
            "evaluations": 2,
            "eval_answers": 4,
            "seed": seed,
            **(SMOKE["writer"] if smoke else {}),
        }
        ask = {
            "model": f"${{{name}_{seed}.checkpoint}}",
            "samples": samples,
            "pictures": pictures,
            "max_answer_tokens": MAX_ANSWER_TOKENS,
            "max_questions": MAX_QUESTIONS,
            **(SMOKE["asked"] if smoke else {}),
        }
        stages += [
            {"name": f"begin_{name}_{seed}", "new_thinker": begin},
            {"name": f"{name}_{seed}", "train_preference": train},
            {"name": f"{name}_asked_{seed}", "evaluate_thoughts": ask},
        ]
        if name == "writer":
            stages += [
                {
                    "name": _audiocot_stage_name(control, seed),
                    "evaluate_thoughts": {**ask, **OF_CONTROLS, **changes},
                }
                for control, changes in CONTROLS.items()
            ]
    return stages


def sound_stages(seed: int, folder: Path, flow: Path, smoke: bool) -> list[dict[str, Any]]:
    """Sounds of the held-out scenes by each way to ask; in a smoke run, the flow model too."""
    stages: list[dict[str, Any]] = []
    if smoke:
        fit = {"audio": "${scenes.samples}", "sample_rate": learn_flow.RATE, "latent_dim": 16}
        encode = {
            "samples": "${scenes.samples}",
            "autoencoder": f"${{{AUTOENCODER}.checkpoint}}",
            "edits_per_sample": 1,
        }
        stages += [
            {"name": AUTOENCODER, "fit_mel_pca": fit},
            {"encode_latents": encode},
            {"name": f"flow_{seed}", "train_flow": {"samples": "${encode_latents.shards}", **SMOKE["flow"]}},
        ]
    model, autoencoder = _flow_model(flow, seed, smoke, folder)
    for mode, conditions in WAYS.items():
        make = {
            "model": f"${{flow_{seed}.checkpoint}}" if smoke else str(model),
            "autoencoder": f"${{{AUTOENCODER}.checkpoint}}" if smoke else str(autoencoder),
            "samples": str(folder / f"written_{seed}.jsonl")
            if mode == "written CoT"
            else "${scenes.samples}",
            "conditions": conditions,
            "max_samples": learn_flow.TEST_SCENES,
            "sampling": SAMPLING,
            "seed": seed,
            **(SMOKE["making"] if smoke else {}),
        }
        stages.append({"name": _audiocot_stage_name(mode, seed), "generate_sound": make})
    return stages


def captions_alone(samples: Sequence[Sample], captions: Mapping[str, str]) -> list[Sample]:
    """The questions with a clip's caption in place of its pictures and its sound.

    Args:
        captions: by the clip's id.
    """
    rewritten = []
    for sample in samples:
        question, *answer = sample.messages
        words = [content_part.text for content_part in question.content if isinstance(content_part, TextPart)]
        text = f"The sounds: {captions[sample.metadata['clip']]}. {' '.join(words)}"
        message = Message(role="user", content=[TextPart(text=text)])
        rewritten.append(sample.model_copy(update={"messages": [message, *answer]}))
    return rewritten


def write_captions(folder: Path) -> None:
    """Write `captions.jsonl`, the questions of `captions_alone`, and those of each kind (`CAPTIONS`)."""
    questions = read_samples(folder / "audiocot" / "thinking.jsonl")[0]
    captions = {row["id"]: row["caption"] for row in read_jsonl(folder / "audiocot" / "clips.jsonl")}
    caption_questions = captions_alone(questions, captions)
    kinds = {
        name: [s for s in caption_questions if s.metadata["question"] == kind]
        for kind, name in CAPTIONS.items()
    }
    for name, samples in {"captions.jsonl": caption_questions, **kinds}.items():
        rows = [sample.model_dump_json() for sample in samples]
        learn_flow._write_if_changed(folder / name, "\n".join(rows) + "\n")


def write_conditions(folder: Path, seed: int) -> None:
    """Write `written_SEED.jsonl`: the asked scenes with the CoT that the writer wrote; without one, their caption."""
    prose_by_clip = {
        row["clip"]: row["prose"]
        for row in read_jsonl(folder / f"writer_asked_{seed}" / "rows.jsonl")
        if row["question"] == "clip"
    }
    scenes = scenes_of_clips(folder)
    rows = []
    for clip, prose in prose_by_clip.items():
        scene = scenes[clip]
        facts = {**scene.metadata, "thought": prose or scene.metadata["caption"]}
        rows.append(scene.model_copy(update={"metadata": facts}).model_dump_json())
    learn_flow._write_if_changed(folder / f"written_{seed}.jsonl", "\n".join(rows) + "\n")


def scenes_of_clips(folder: Path) -> dict[str, Sample]:
    """The scene of each clip of `audiocot`, by the clip's id."""
    scenes = {}
    for sample in read_samples(folder / "scenes" / "scenes.jsonl")[0]:
        scenes[str(Path(sample.audio("assistant")[0].path).resolve())] = sample
    rows = read_jsonl(folder / "audiocot" / "clips.jsonl")
    return {row["id"]: scenes[str(Path(row["path"]).resolve())] for row in rows}


# ---------------------------------------------------------------------------------------------- report


def report_answers(folder: Path, seeds: Sequence[int]) -> None:
    """A line for each measure of each kind of question, by the writer, its controls, and the one of captions."""
    for system in ("writer asked", *CONTROLS, "captions asked"):
        tables = [
            json.loads((folder / _audiocot_stage_name(system, seed) / "results.json").read_text())["tables"]
            for seed in seeds
        ]
        for kind, table in tables[0].items():
            for measure in table:
                values = [figures[kind][measure]["accuracy"] for figures in tables]
                present = [value for value in values if value is not None]
                bar = BARS.get((kind, measure)) if system == "writer asked" else None
                _print_audiocot_line(f"{system}: {kind}: {measure}", present, bar)


def report_sounds(folder: Path, seeds: Sequence[int], judge: ClipClassifier) -> None:
    """Sounds by the true CoT, by the written CoT with its ratio to the true one, and by the caption alone."""
    true: dict[str, float] = {}
    for mode in WAYS:
        figures = [
            learn_flow.figures_of(
                read_generated(folder / _audiocot_stage_name(mode, seed) / "generated.jsonl"), judge
            )
            for seed in seeds
        ]
        for name in figures[0].values:
            values = [row.values[name] for row in figures]
            _print_audiocot_line(
                f"sounds by {mode}: {name}", values, true.get(name) if mode == "written CoT" else None
            )
            if mode == "true CoT":
                true[name] = float(np.nanmean(values)) if not np.isnan(values).all() else 0.0


def report_edits(
    folder: Path, seeds: Sequence[int], generator: SoundGenerator, judge: ClipClassifier, steps: int
) -> None:
    """The share of instructions that were done, and of tracks that are unchanged elsewhere."""
    done, untouched, by_operation = [], [], dict[str, list[bool]]()
    for seed in seeds:
        edits, failed = carry_out_edits(folder, seed, generator, steps)
        total = len(edits) + failed
        if not total:
            continue
        rows = judge_edits(edits, OwnClasses(judge)).rows if edits else []
        done.append(sum(bool(row.get(DONE)) for row in rows) / total)
        for edit, row in zip(edits, rows, strict=True):
            by_operation.setdefault(edit.operation, []).append(bool(row.get(DONE)))
        if rows:
            untouched.append(sum(bool(row[UNTOUCHED]) for row in rows) / len(rows))
    _print_audiocot_line("edits in plain words: done", done, 0.6)
    for operation, outcomes in by_operation.items():
        _print_audiocot_line(
            f"edits in plain words: {operation}: done, of those that were carried out",
            [float(np.mean(outcomes))],
            None,
        )
    _print_audiocot_line("edits in plain words: the rest of the track is unchanged", untouched, 1.0)


def carry_out_edits(folder: Path, seed: int, generator: SoundGenerator, steps: int) -> tuple[list[Any], int]:
    """From instruction to track, by what the writer understood; returns the edits, and how many it made nothing of.

    Instructions about a sound with a name are taken, evenly over the operations. As in the studio the flow model is
    shown the pictures.
    """
    out = folder / f"plain_edits_{seed}"
    out.mkdir(exist_ok=True)
    questions = {s.id: s for s in read_samples(folder / "audiocot" / "thinking.jsonl")[0]}
    triples = {s.id: s for s in read_samples(folder / "audiocot" / "edits.jsonl")[0]}
    scenes, rows, failed = scenes_of_clips(folder), [], 0
    settings = sampler_settings(SoundSamplingConfig(**SAMPLING, steps=steps))
    for answer in plain_instructions(read_jsonl(folder / f"writer_asked_{seed}" / "rows.jsonl")):
        question, scene = questions[answer["id"]], scenes[answer["clip"]]
        before = Path(question.audio("user")[0].path)
        before = before if before.is_absolute() else folder / "audiocot" / before
        triple = triples[answer["id"].removesuffix("-think")]
        event = answer["truth"]["record"]["events"][0]
        match = next(
            (
                scene_event
                for scene_event in scene.metadata["events"]
                if scene_event["name"] == event["sound"]
            ),
            None,
        )
        path = out / f"{answer['id'].replace('/', '_')}.flac"
        try:
            row = _carried_out(
                answer, before, question.video_parts()[0], path, generator, settings, f"{seed}/{answer['id']}"
            )
        except (ConfigError, BadSample, ValueError):
            failed += 1
            continue
        reference = Path(triple.audio("assistant")[0].path)
        rows.append(
            {
                **row,
                "id": answer["id"],
                "by": "plain words",
                "operation": answer["truth"]["operation"],
                "reference": str(
                    reference if reference.is_absolute() else (folder / "audiocot" / reference).resolve()
                ),
                "event": {**event, "label": event["sound"] if match is None else match["label"]},
            }
        )
    write_jsonl(out / "edited.jsonl", rows)
    return (read_edited(out / "edited.jsonl") if rows else []), failed


def plain_instructions(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The answers to `EDITS` instructions about a sound with a name, the operations taking turns."""
    by_operation: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["question"] == "instruction" and row["truth"]["record"]["events"]:
            by_operation.setdefault(row["truth"]["operation"], []).append(row)
    answers = []
    for number in range(max(map(len, by_operation.values()), default=0)):
        answers += [group[number] for group in by_operation.values() if number < len(group)]
    return answers[:EDITS]


def _carried_out(
    answer: Mapping[str, Any],
    before: Path,
    video: VideoPart,
    path: Path,
    generator: SoundGenerator,
    settings: Any,
    key: str,
) -> dict[str, Any]:
    """
    Raises:
        ConfigError: the span does not lie in the track.
        ValueError: the answer was no record, or names no sound to add or remove.
    """
    if answer["problem"]:
        raise ValueError(answer["problem"])
    reply = json.loads(answer["answer"].strip().removeprefix("```json").removesuffix("```"))
    record = ThoughtRecord.model_validate_json(json.dumps(reply["record"]))
    operation, (start_s, end_s) = reply["operation"], reply["span"]
    caption = caption_of_record(record)
    if operation in ("add", "remove") and not caption:
        raise ValueError("no sound is named")
    track = read_track(before)
    if operation == "extend":
        span = find_span(track, operation, None, min(end_s, MAX_EXTENDED_S))
    else:
        span = find_span(track, operation, start_s, min(end_s, track.duration_s))
    cot = "" if operation in ("add", "remove") else prose_of(record)
    request = EditRequest(
        operation, caption, span.start / track.sample_rate, span.end / track.sample_rate, cot, video
    )
    conditions = edit_conditions(generator, request, str(before))
    edit_track(generator, track, operation, span, conditions, settings, key).track.save(path)
    return {
        "audio": str(path.resolve()),
        "before": str(before.resolve()),
        "span": [span.start / track.sample_rate, span.end / track.sample_rate],
        "caption": caption,
    }


# --------------------------------------------------------------------------------------------- private


def _flow_folder(flow_run: Path | None, folder: Path, smoke: bool) -> Path | None:
    """The folder of a flow model's run; a smoke run trains its own.

    Raises:
        SystemExit: there is none in the folder that was given.
    """
    if smoke:
        return folder
    if flow_run is not None and not (flow_run / AUTOENCODER).is_dir():
        raise SystemExit(
            f"no run of learn_flow in {flow_run}: run make -C benchmarks learn-flow, and give its folder with --flow"
        )
    return flow_run


def _flow_model(flow: Path, seed: int, smoke: bool, folder: Path) -> tuple[Path, Path]:
    """The folders of model and autoencoder: the model of the seed, or the first that the run has."""
    if smoke:
        return folder / f"flow_{seed}", folder / AUTOENCODER
    of_seed = flow / f"flow_{seed}"
    models = sorted(path for path in flow.glob("flow_*") if path.is_dir())
    return (of_seed if of_seed.is_dir() else models[0]).resolve(), (flow / AUTOENCODER).resolve()


def _judge(data: Path | None, folder: Path) -> ClipClassifier:
    """A judge of what is heard: of real recordings, or in a smoke run of the made ones."""
    if data is not None:
        return learn_flow.real_judge(data, folder)[0]
    return event_judge(folder / "scenes" / "scenes.jsonl", folder / "judge", 10)[0]


def _audiocot_stage_name(mode: str, seed: int) -> str:
    return f"{mode.replace(' ', '_').lower()}_{seed}"


def _run_audiocot_recipe(
    recipe: Mapping[str, Any], folder: Path, overrides: Sequence[str], console: Console
) -> None:
    path = folder / "recipe.yaml"
    full_recipe = {"size": "tiny", "seed": 0, **recipe}
    path.write_text(yaml.safe_dump(full_recipe, sort_keys=False), encoding="utf-8")
    run_recipe(load_recipe(path, list(overrides), name=folder.name, runs=folder.parent), console)


def _print_audiocot_line(case: str, values: Sequence[float], bar: float | None) -> None:
    """Print the mean over seeds with its interval, and its ratio to what is asked for."""
    present = [value for value in values if not np.isnan(value)]
    if not present:
        print(json.dumps({"bench": NAME, "case": case, "ours": None, "unit": "n/a: no such case"}))
        return
    mean = float(np.mean(present))
    line: dict[str, Any] = {"bench": NAME, "case": case, "ours": round(mean, 4)}
    if len(present) > 1:
        half = float(stats.t.ppf(0.975, len(present) - 1) * np.std(present, ddof=1) / np.sqrt(len(present)))
        line |= {"low": round(mean - half, 4), "high": round(mean + half, 4)}
    if bar:
        line |= {"peer": bar, "ratio": round(mean / bar, 4)}
    print(json.dumps({**line, "unit": "share"}))


if __name__ == "__main__":
    main()
