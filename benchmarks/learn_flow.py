"""Does a model make the sounds that it is asked for? What, when, in what order, and edits of a track.

    make -C benchmarks learn-flow DATA=../shared/data [SEEDS="1 2 3"] [CONTROLS=1]

Scenes of 3 s are composed of real recordings (`compose_scenes`): spoken digits (takes 0 to 4 held out), and ESC-10's
dogs, babies, sneezes, roosters and clocks over rain, sea, fire, saws, helicopters or nothing (fold 1 held out). One
autoencoder and, for each seed, one flow-matching model are trained (proofs/learn_flow*.yaml has all settings).
Recordings, scenes and backdrops of the test are held out together.

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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from proof import Proof, arms_of, check_data, print_line, proof_parser, write_changed

from audiollm.audio import Waveform, load, save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.evaluate.judges.classifier import ClassifierConfig, ClipClassifier, train_classifier
from audiollm.evaluate.sound.edited_sounds import judge_edits, read_edited
from audiollm.evaluate.sound.generated_sounds import GeneratedSound, read_generated
from audiollm.evaluate.sound.sound_judges import ClassSpace, OwnClasses
from audiollm.evaluate.sound.sound_measures import energy_onsets
from audiollm.evaluate.sound.suite import SuiteJudges, evaluate_sounds
from audiollm.files.atomic import write_jsonl
from audiollm.flow.generator import SoundGenerator
from pipelines.scenes.settings import SoundSource
from pipelines.scenes.sounds import find_sounds, load_event

BENCH = "learn_flow"
CHAINS = ("learn_flow_scenes", "learn_flow", "learn_flow_controls")
RATE, EVENT_S = 16_000, 1.0
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
EVENTS = ["dog bark", "baby cry", "person sneeze", "rooster", "clock tick"]
BACKDROPS = ["rain", "sea waves", "fire crackling", "chainsaw", "helicopter"]
WAYS = {
    "video": "video",
    "CoT": "CoT",
    "video and CoT": "video_and_CoT",
    "caption": "caption",
    "exchanged": "exchanged",
}
"""Ways of asking; `exchanged` has all conditions of another scene and must gain nothing."""
CONTROLS = {"context never trained": "without_context", "without gated fusion": "without_fusion"}
JUDGE = ClassifierConfig(steps=600)
NEAREST_OF = 400
"""Training scenes among which the nearest one is looked for."""


def main() -> None:
    parser = proof_parser(__doc__)
    parser.add_argument("--controls", action="store_true", help="train the two controls with the first seed")
    options = parser.parse_args()
    check_data(options.data, "fsdd", "esc10")
    events, backdrops = sound_sources(options.data.resolve())
    proof = Proof(options.runs / BENCH, options.seeds, options.overrides, CHAINS)
    proof.run("learn_flow_scenes", events=events, backdrops=backdrops)
    scenes = read_samples(proof.folder / "scenes" / "scenes.jsonl")[0]
    samples = [sample for sample in scenes if sample.metadata["split"] == "test"]
    write_changed(proof.folder / "exchanged.jsonl", lines_of(exchanged(samples)))
    chain = "learn_flow_controls" if options.controls else BENCH
    proof.run(chain, events=events, backdrops=backdrops)
    report(proof, options.data, scenes, options.controls)


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


def lines_of(samples: Sequence[Sample]) -> str:
    """Samples as the text of a `.jsonl` file."""
    return "".join(sample.model_dump_json() + "\n" for sample in samples)


def report(proof: Proof, data: Path, scenes: Sequence[Sample], controls: bool) -> None:
    """A JSON line for each figure: its mean over seeds with its interval, beside the ceiling."""
    folder, first = proof.folder, proof.seeds[0]
    samples = [sample for sample in scenes if sample.metadata["split"] == "test"]
    train = [sample for sample in scenes if sample.metadata["split"] == "train"][:NEAREST_OF]
    training = [Path(sample.audio_parts()[-1].path) for sample in train]
    judge, accuracy = real_judge(data, folder)
    print_case("judge on real recordings", [accuracy])
    generator = SoundGenerator.load(folder / f"flow_{first}", folder / "autoencoder")
    real = figures_of(_real(samples, folder, None), judge)
    ceiling = figures_of(_real(samples, folder, generator), judge, training)
    for name, value in ceiling.items():
        print_case(f"real scenes through the autoencoder: {name}", [value], real.get(name))
    chance = figures_of(_moved(read_generated(folder / "through_vae.jsonl")), judge)
    for name, value in chance.items():
        print_case(f"real sounds of the next scene: {name}", [value], ceiling[name])
    for mode, arm in WAYS.items():
        references = training if mode == "video and CoT" else []
        figures = [
            figures_of(sounds_of(proof, stage), judge, references) for stage in proof.stages(f"sounds_{arm}")
        ]
        for name in figures[0]:
            print_case(f"{mode}: {name}", [row[name] for row in figures], ceiling[name])
    _report_edits("edit", [folder / stage for stage in proof.stages("edits")], judge)
    for name, arm in CONTROLS.items() if controls else ():
        control = figures_of(sounds_of(proof, f"sounds_control_{arm}_{first}"), judge)
        for measure, value in control.items():
            print_case(f"{name}: {measure}", [value], ceiling[measure])
        _report_edits(f"{name}, edit", [folder / f"edits_control_{arm}_{first}"], judge)
    _sweep(proof, judge)


def print_case(case: str, values: Sequence[float], ceiling: float | None = None, bench: str = BENCH) -> None:
    """Print a line: the mean over seeds, and its ratio to the ceiling."""
    unit = "logits" if "distance" in case else "share"
    print_line(bench, case, values, peer=ceiling or None, peer_is="the ceiling", unit=unit)


def sounds_of(proof: Proof, stage: str) -> list[GeneratedSound]:
    """The sounds of a stage `generate_sound`."""
    return read_generated(proof.folder / stage / "generated.jsonl")


def _report_edits(title: str, folders: Sequence[Path], judge: ClipClassifier) -> None:
    """Each measure of each kind of edit, with what a perfect edit gets beside it where it is known."""
    results = [
        judge_edits(read_edited(folder / "edited.jsonl"), OwnClasses(judge)).result for folder in folders
    ]
    for case in results[0]:
        for measure, table in results[0][case].items():
            if table["n"]:
                values = [result[case][measure]["accuracy"] for result in results]
                print_case(f"{title}: {case}: {measure}", values)


def _sweep(proof: Proof, judge: ClipClassifier) -> None:
    """Recognition and diversity by the scale of guidance, as lines and as a picture."""
    from matplotlib.figure import Figure

    space, recognized, diversity = ClassSpace(OwnClasses(judge)), [], []
    scales = {arm: float(values["scale"]) for arm, values in arms_of(BENCH, "scales").items()}
    for arm, scale in scales.items():
        sounds = sounds_of(proof, f"guidance_{arm}_{proof.seeds[0]}")
        recognized.append(figures_of(sounds, judge)["events recognized"])
        places: dict[str, list[Any]] = {}
        for sound in sounds:
            places.setdefault(sound.id, []).append(space.embed(load(sound.path)))
        gaps = [np.linalg.norm(takes[0] - takes[1]) for takes in places.values() if len(takes) == 2]
        diversity.append(float(np.mean(gaps)))
        print_case(f"guidance {scale:g}, CoT: events recognized", [recognized[-1]])
        print_case(f"guidance {scale:g}, CoT: distance of two takes", [diversity[-1]])
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot()
    relative = np.array(diversity) / max(diversity)
    axes.plot([*scales.values()], recognized, "o-", label="events recognized")
    axes.plot([*scales.values()], relative, "s--", label="distance of two takes, of the largest")
    axes.set_xlabel("scale of guidance, CoT alone")
    axes.set_ylim(0, 1.05)
    axes.legend()
    figure.savefig(proof.folder / "guidance.svg")


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
) -> dict[str, float]:
    """What is recognized, when it begins, in what order, and how near the nearest training scene is."""
    classes = OwnClasses(judge)
    judges = SuiteJudges(classes=classes)
    if training:
        judges = replace(judges, space=ClassSpace(classes))
    result = evaluate_sounds(sounds, judges, training).result
    near = "distance to the nearest training sound"
    orders = [order for sound in sounds if (order := right_order(sound, classes)) is not None]
    return {
        "events recognized": result["recognized"]["accuracy"],
        "onsets within 0.2 s": _mean_figure(result, "onsets within 0.2 s"),
        "heard onsets that were asked for": _mean_figure(result, "heard onsets that were asked for"),
        "order of two": float(np.mean(orders)) if orders else float("nan"),
        **({near: float(result["whole"][near])} if training else {}),
    }


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


def _mean_figure(result: Mapping[str, Any], name: str) -> float:
    mean = result["measures"].get(name, {}).get("mean")
    return float("nan") if mean is None else float(mean)


if __name__ == "__main__":
    main()
