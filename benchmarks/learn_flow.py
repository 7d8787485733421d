"""Does a model make the sounds that it is asked for? What, when, in what order, and edits of a track.

    make -C benchmarks learn-flow DATA=../shared/data [SEEDS="1 2 3"] [CONTROLS=1]

Scenes of 3 s are composed of real recordings (`compose_scenes`): spoken digits (takes 0 to 4 held out), and ESC-10's
dogs, babies, sneezes, roosters and clocks over rain, sea, fire, saws, helicopters or nothing (fold 1 held out). One
autoencoder and, for each seed, one flow-matching model are trained; the setting is fixed in this file. Recordings,
scenes and backdrops of the test are held out together.

The judges share nothing with the model: a classifier of the 15 sounds, trained on the real training recordings, and
the moments at which the energy rises. The ceiling is what they say of the same real scenes passed through the
autoencoder.

Printed for each way of asking (video alone, CoT alone, both, caption alone, and with the conditions of another scene):
the share of events recognized at their places, of onsets within 200 ms (scenes without a backdrop), and of pairs in
the right order (scenes of two events without a backdrop); then edits (`edit_sounds`): a sound added or removed by words
and by the region of its object, gaps filled, tracks extended; the distance to the nearest training scene; recognition
and diversity at several scales of guidance (`guidance.svg`). Means over seeds with 95 % intervals.

With --controls two more models are trained with the first seed: one whose context is never trained, whose removals must
fail, and one without gated fusion.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from scipy import stats

from audiollm.audio import Waveform, load, save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.evaluate.judges.classifier import ClassifierConfig, ClipClassifier, train_classifier
from audiollm.evaluate.sound.edited_sounds import judge_edits, read_edited
from audiollm.evaluate.sound.generated_sounds import GeneratedSound, read_generated
from audiollm.evaluate.sound.onsets import energy_onsets
from audiollm.evaluate.sound.sound_judges import ClassSpace, OwnClasses
from audiollm.evaluate.sound.suite import SuiteJudges, evaluate_sounds
from audiollm.files.atomic import write_jsonl
from audiollm.flow.generator import SoundGenerator
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from pipelines.scenes.settings import SoundSource
from pipelines.scenes.sounds import find_sounds, load_event

RATE = 16_000
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
EVENTS = ["dog bark", "baby cry", "person sneeze", "rooster", "clock tick"]
BACKDROPS = ["rain", "sea waves", "fire crackling", "chainsaw", "helicopter"]
SCENES, TEST_SCENES, EDITED_SCENES = 3000, 100, 40
FLOW_STEPS, BATCH = 4_500, 16
ESTIMATE_VARIANCE = 0.35
DROPOUT = {"dropout_video": 0.45, "dropout_words": 0.45}
CONTEXT = {"everything": 1.5, "pair": 0.5}
AUTOENCODER = "autoencoder"
"""The stage's name."""
EVENT_S = 1.0
MUON = (
    "*.qkv.weight", "*adaLN_modulation.1.weight", "*_input_proj.*.weight", "*.encoders.*.linear.weight",
    "*.convolutions.*.weight", "*.layers.*.out.weight", "*.layers.*.up.weight", "*.layers.*.down.weight",
)  # fmt: skip
"""Matrices and convolutions that Muon optimises."""
WAYS: dict[str, list[str]] = {
    "video": ["frames", "sync"],
    "CoT": ["cot"],
    "video and CoT": ["frames", "sync", "cot"],
    "caption": ["caption"],
}
EXCHANGED = "exchanged"
"""All conditions of another scene: a control that must gain nothing."""
JUDGE = ClassifierConfig(steps=600)
SAMPLING: dict[str, Any] = {"guidance": 5.0, "schedule": "cosine"}
SCALES = (1.0, 2.0, 3.0, 5.0, 8.0)
"""Scales of guidance at which recognition and diversity are measured, on `SWEPT_SCENES` scenes by their CoT."""
SWEPT_SCENES = 24
NEAREST_OF = 400
"""Training scenes among which the nearest one is looked for."""
CONTROLS: dict[str, dict[str, Any]] = {
    "context never trained": {
        "context": {"everything": 1.0, "nothing": 0.0, "spans": 0.0, "end": 0.0, "pair": 0.0}
    },
    "without gated fusion": {"gated_fusion": False},
}
"""Settings of the trainings that differ from the model in one thing."""


@dataclass(frozen=True)
class Figures:
    """Shares of one way of asking, or of one edit, on one set of scenes."""

    values: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has fsdd and esc10")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--controls", action="store_true", help="train the two controls with the first seed")
    parser.add_argument("overrides", nargs="*", help="settings of the recipe: flow_1.steps=100")
    arguments = parser.parse_args()
    for name in ("fsdd", "esc10"):
        if not (arguments.data / name).is_dir():
            raise SystemExit(f"no recordings in {arguments.data / name}: give their folder with --data")
    folder = arguments.runs / "learn_flow"
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    full_recipe = recipe_of(arguments.data.resolve(), arguments.seeds, folder.resolve(), arguments.controls)
    composing = {**full_recipe, "stages": full_recipe["stages"][:1]}
    of_scenes = [override for override in arguments.overrides if override.startswith("scenes.")]
    _run_flow_recipe(composing, folder, of_scenes, console)
    samples = [
        s for s in read_samples(folder / "scenes" / "scenes.jsonl")[0] if s.metadata["split"] == "test"
    ]
    rows = [sample.model_dump_json() for sample in exchanged(samples)]
    _write_if_changed(folder / "exchanged.jsonl", "\n".join(rows) + "\n")
    _run_flow_recipe(full_recipe, folder, arguments.overrides, console)
    report(folder, arguments.data, arguments.seeds, samples, arguments.controls)


def sound_sources(data: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Events and backdrops, as `compose_scenes` takes them."""
    digits = {
        "folder": str(data / "fsdd" / "recordings"),
        "label": r"^(\d)_",
        "names": dict(zip("0123456789", DIGITS, strict=True)),
        "held_out": "*_[0-4].wav",
    }
    esc = {"folder": str(data / "esc10"), "held_out": "1-*"}
    return [digits, {**esc, "labels": EVENTS}], [{**esc, "labels": BACKDROPS}]


def recipe_of(data: Path, seeds: Sequence[int], folder: Path, controls: bool) -> dict[str, Any]:
    """Scenes, one autoencoder, a model per seed, sounds of every way of asking, edits, and the controls."""
    events, backdrops = sound_sources(data)
    scenes = {
        "events": events,
        "backdrops": backdrops,
        "scenes": SCENES,
        "held_out_scenes": TEST_SCENES,
        "event_s": EVENT_S,
        "sample_rate": RATE,
    }
    components = {"audio": "${scenes.samples}", "sample_rate": RATE}
    encode = {
        "samples": "${scenes.samples}",
        "autoencoder": f"${{{AUTOENCODER}.checkpoint}}",
        "edits_per_sample": 1,
    }
    stages: list[dict[str, Any]] = [
        {"name": "scenes", "compose_scenes": scenes},
        {"name": AUTOENCODER, "fit_mel_pca": components},
        {"encode_latents": encode},
    ]
    for seed in seeds:
        stages += _model_stages(f"flow_{seed}", seed, {})
        for mode in (*WAYS, EXCHANGED):
            source = str(folder / "exchanged.jsonl") if mode == EXCHANGED else "${scenes.samples}"
            make = {"samples": source, "max_samples": TEST_SCENES, "conditions": WAYS.get(mode)}
            stages.append(
                _making(_flow_stage_name(mode, seed), f"flow_{seed}", seed, SAMPLING["guidance"], make)
            )
    first = seeds[0]
    for scale in SCALES:
        make = {
            "samples": "${scenes.samples}", "max_samples": SWEPT_SCENES, "conditions": WAYS["CoT"], "takes": 2,
        }  # fmt: skip
        stages.append(
            _making(_flow_stage_name(f"guidance {scale:g}", first), f"flow_{first}", first, scale, make)
        )
    for name, changes in CONTROLS.items() if controls else ():
        stages += _model_stages(_flow_stage_name(name, first), first, changes)
        make = {
            "samples": "${scenes.samples}",
            "max_samples": TEST_SCENES,
            "conditions": WAYS["video and CoT"],
        }
        stages.append(
            _making(
                f"{_flow_stage_name(name, first)}_sounds",
                _flow_stage_name(name, first),
                first,
                SAMPLING["guidance"],
                make,
            )
        )
    return {"name": "learn_flow", "size": "tiny", "seed": 0, "stages": [*stages, {"report": {}}]}


def _model_stages(name: str, seed: int, changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The training of a model, and its edits."""
    train = {
        "samples": "${encode_latents.shards}",
        "steps": FLOW_STEPS,
        "batch_size": BATCH,
        "estimate_variance": ESTIMATE_VARIANCE,
        **DROPOUT,
        "context": CONTEXT,
        "rules": [{"pattern": pattern, "optimizer": "muon"} for pattern in MUON],
        "seed": seed,
        **changes,
    }
    edit = {
        "model": f"${{{name}.checkpoint}}",
        "autoencoder": f"${{{AUTOENCODER}.checkpoint}}",
        "samples": "${scenes.samples}",
        "by": ["words", "object"],
        "sampling": SAMPLING,
        "max_samples": EDITED_SCENES,
        "seed": seed,
    }
    return [{"name": name, "train_flow": train}, {"name": f"edits_{name}", "edit_sounds": edit}]


def _making(name: str, model: str, seed: int, scale: float, settings: Mapping[str, Any]) -> dict[str, Any]:
    make = {
        "model": f"${{{model}.checkpoint}}",
        "autoencoder": f"${{{AUTOENCODER}.checkpoint}}",
        "sampling": {**SAMPLING, "guidance": scale},
        "seed": seed,
        **settings,
    }
    return {"name": name, "generate_sound": make}


def exchanged(samples: Sequence[Sample]) -> list[Sample]:
    """Each scene with the video, caption and CoT of the next one, and with its own sounds."""
    swapped = []
    for scene, next_scene in zip(samples, [*samples[1:], samples[0]], strict=True):
        metadata = {
            **scene.metadata,
            "caption": next_scene.metadata["caption"],
            "thought": next_scene.metadata["thought"],
        }
        messages = [next_scene.messages[0], scene.messages[-1]]
        swapped.append(scene.model_copy(update={"messages": messages, "metadata": metadata}))
    return swapped


def report(folder: Path, data: Path, seeds: Sequence[int], samples: Sequence[Sample], controls: bool) -> None:
    """A JSON line for each figure: its mean over seeds with its interval, beside the ceiling."""
    judge, accuracy = real_judge(data, folder)
    _print_flow_line("judge on real recordings", [accuracy], None)
    training = [
        Path(s.audio_parts()[-1].path)
        for s in read_samples(folder / "scenes" / "scenes.jsonl")[0]
        if s.metadata["split"] == "train"
    ][:NEAREST_OF]
    generator = SoundGenerator.load(folder / f"flow_{seeds[0]}", folder / AUTOENCODER)
    real = figures_of(_real(samples, folder, None), judge)
    ceiling = figures_of(_real(samples, folder, generator), judge, training)
    for name, value in ceiling.values.items():
        _print_flow_line(f"real scenes through the autoencoder: {name}", [value], real.values.get(name))
    chance = figures_of(_moved(read_generated(folder / "through_vae.jsonl")), judge)
    for name, value in chance.values.items():
        _print_flow_line(f"real sounds of the next scene: {name}", [value], ceiling.values[name])
    for mode in (*WAYS, EXCHANGED):
        references = training if mode == "video and CoT" else []
        figures = [
            figures_of(
                read_generated(folder / _flow_stage_name(mode, seed) / "generated.jsonl"), judge, references
            )
            for seed in seeds
        ]
        for name in figures[0].values:
            _print_flow_line(f"{mode}: {name}", [row.values[name] for row in figures], ceiling.values[name])
    _report_edits("edit", [folder / f"edits_flow_{seed}" for seed in seeds], judge)
    for name in CONTROLS if controls else ():
        stage = _flow_stage_name(name, seeds[0])
        control = figures_of(read_generated(folder / f"{stage}_sounds" / "generated.jsonl"), judge)
        for measure, value in control.values.items():
            _print_flow_line(f"{name}: {measure}", [value], ceiling.values[measure])
        _report_edits(f"{name}, edit", [folder / f"edits_{stage}"], judge)
    _sweep(folder, seeds[0], judge)


def _report_edits(title: str, folders: Sequence[Path], judge: ClipClassifier) -> None:
    """Each measure of each kind of edit, with what a perfect edit gets beside it where it is known."""
    results = [
        judge_edits(read_edited(folder / "edited.jsonl"), OwnClasses(judge)).result for folder in folders
    ]
    for case in results[0]:
        for measure, table in results[0][case].items():
            if table["n"]:
                values = [result[case][measure]["accuracy"] for result in results]
                _print_flow_line(f"{title}: {case}: {measure}", values, None)


def _sweep(folder: Path, seed: int, judge: ClipClassifier) -> None:
    """Recognition and diversity by the scale of guidance, as lines and as a picture."""
    from matplotlib.figure import Figure

    space, recognized, diversity = ClassSpace(OwnClasses(judge)), [], []
    for scale in SCALES:
        sounds = read_generated(folder / _flow_stage_name(f"guidance {scale:g}", seed) / "generated.jsonl")
        recognized.append(figures_of(sounds, judge).values["events recognized"])
        places: dict[str, list[Any]] = {}
        for sound in sounds:
            places.setdefault(sound.id, []).append(space.embed(load(sound.path)))
        gaps = [np.linalg.norm(takes[0] - takes[1]) for takes in places.values() if len(takes) == 2]
        diversity.append(float(np.mean(gaps)))
        _print_flow_line(f"guidance {scale:g}, CoT: events recognized", [recognized[-1]], None)
        _print_flow_line(f"guidance {scale:g}, CoT: distance of two takes", [diversity[-1]], None)
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(SCALES, recognized, "o-", label="events recognized")
    axes.plot(
        SCALES, np.array(diversity) / max(diversity), "s--", label="distance of two takes, of the largest"
    )
    axes.set_xlabel("scale of guidance, CoT alone")
    axes.set_ylim(0, 1.05)
    axes.legend()
    figure.savefig(folder / "guidance.svg")


def real_judge(data: Path, folder: Path) -> tuple[ClipClassifier, float]:
    """A classifier of single events, trained on the real training recordings, and its accuracy on the held-out ones."""
    events, _ = sound_sources(data)
    sounds = find_sounds([SoundSource.model_validate(source) for source in events], "events")
    cut = [(torch.from_numpy(load_event(s.path, RATE, EVENT_S) * 0.1)[None], RATE) for s in sounds]
    train = [n for n, sound in enumerate(sounds) if not sound.held_out]
    test = [n for n, sound in enumerate(sounds) if sound.held_out]
    if (folder / "judge" / "classifier.json").exists():
        judge = ClipClassifier.load(folder / "judge")
    else:
        judge = train_classifier([cut[n] for n in train], [sounds[n].label for n in train], JUDGE)
        judge.save(folder / "judge")
    predictions = judge.predict_many([cut[n] for n in test])
    right = [label == sounds[n].label for n, (label, _) in zip(test, predictions, strict=True)]
    return judge, float(np.mean(right))


def figures_of(
    sounds: Sequence[GeneratedSound], judge: ClipClassifier, training: Sequence[Path] = ()
) -> Figures:
    """What is recognized, when it begins, in what order, and how near the nearest training scene is."""
    classes = OwnClasses(judge)
    judges = SuiteJudges(classes=classes)
    if training:
        judges = replace(judges, space=ClassSpace(classes))
    result = evaluate_sounds(sounds, judges, training).result
    near = "distance to the nearest training sound"
    orders = [order for sound in sounds if (order := right_order(sound, classes)) is not None]
    return Figures(
        {
            "events recognized": result["recognized"]["accuracy"],
            "onsets within 0.2 s": _mean_figure(result, "onsets within 0.2 s"),
            "heard onsets that were asked for": _mean_figure(result, "heard onsets that were asked for"),
            "order of two": float(np.mean(orders)) if orders else float("nan"),
            **({near: float(result["whole"][near])} if training else {}),
        }
    )


def right_order(sound: GeneratedSound, classes: OwnClasses) -> bool | None:
    """Whether two different events are heard in the right order; None where a scene does not tell.

    Each place at which the energy rises is cut out; the place that is most like the first event must be before the
    one that is most like the second.
    """
    if sound.events is None or len(sound.events) != 2 or sound.has_backdrop:
        return None
    first, second = (classes.labels.index(event.label) for event in sound.events)
    waveform = load(sound.path)
    leanings = []
    for onset_s in energy_onsets(waveform):
        start = round(max(0.0, onset_s - 0.02) * waveform.sample_rate)
        cut_CN = waveform.samples_CN[:, start : start + round(0.6 * waveform.sample_rate)]
        try:
            logits = classes.logits(Waveform(cut_CN.contiguous(), waveform.sample_rate))
        except ValueError:
            continue
        leanings.append(float(logits[first] - logits[second]))
    return len(leanings) >= 2 and int(np.argmax(leanings)) < int(np.argmin(leanings))


# ------------------------------------------------------------------------------------------------ private


def _run_flow_recipe(
    recipe: Mapping[str, Any], folder: Path, overrides: Sequence[str], console: Console
) -> None:
    path = folder / "recipe.yaml"
    _write_if_changed(path, yaml.safe_dump(dict(recipe), sort_keys=False))
    run_recipe(load_recipe(path, list(overrides), name=folder.name, runs=folder.parent), console)


def _write_if_changed(path: Path, text: str) -> None:
    """Write it if it is new: stages that read a file that was written again start afresh."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _moved(sounds: Sequence[GeneratedSound]) -> list[GeneratedSound]:
    """Each scene with the sound of the next one: what chance gives."""
    next_sounds = [*sounds[1:], sounds[0]]
    return [
        replace(sound, path=next_sound.path) for sound, next_sound in zip(sounds, next_sounds, strict=True)
    ]


def _real(samples: Sequence[Sample], folder: Path, generator: SoundGenerator | None) -> list[GeneratedSound]:
    """The test scenes' own sounds, or these passed through the autoencoder."""
    rows = []
    for sample in samples:
        path = Path(sample.audio_parts()[-1].path)
        if generator is not None:
            autoencoder, samples_CN = generator.autoencoder, load(path).samples_CN
            with torch.no_grad():
                mean_DT = autoencoder.encode_distribution(samples_CN).mean
                made_CN = autoencoder.decode(mean_DT, samples_CN.shape[1])
            path = folder / "through_vae" / f"{sample.id}.wav"
            save(path, made_CN, RATE)
        rows.append({"id": sample.id, "audio": str(path.resolve()), "metadata": sample.metadata})
    listing = folder / ("real.jsonl" if generator is None else "through_vae.jsonl")
    write_jsonl(listing, rows)
    return read_generated(listing)


def _flow_stage_name(mode: str, seed: int) -> str:
    return f"{mode.replace(' ', '_').lower()}_{seed}"


def _mean_figure(result: Mapping[str, Any], name: str) -> float:
    mean = result["measures"].get(name, {}).get("mean")
    return float("nan") if mean is None else float(mean)


def _print_flow_line(case: str, values: Sequence[float], ceiling: float | None) -> None:
    mean = float(np.mean(values))
    if np.isnan(mean):
        print(json.dumps({"bench": "learn_flow", "case": case, "ours": None, "unit": "n/a: no such scene"}))
        return
    line: dict[str, Any] = {"bench": "learn_flow", "case": case, "ours": round(mean, 4)}
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
        line |= {"low": round(mean - half, 4), "high": round(mean + half, 4)}
    if ceiling:
        line |= {"peer": round(ceiling, 4), "ratio": round(mean / ceiling, 4)}
    print(json.dumps({**line, "unit": "logits" if "distance" in case else "share"}))


if __name__ == "__main__":
    main()
