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
to changed track. Means over seeds with 95 % intervals; proofs/learn_audiocot*.yaml has all settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import learn_flow
import numpy as np
from proof import Proof, check_data, print_line, proof_parser, write_changed

from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Message, Sample, TextPart, VideoPart
from audiollm.data.records.thoughts import ThoughtRecord, caption_of_record, prose_of
from audiollm.errors import BadSample, ConfigError
from audiollm.evaluate.judges.classifier import ClipClassifier
from audiollm.evaluate.sound.edited_sounds import DONE, UNTOUCHED, judge_edits, read_edited
from audiollm.evaluate.sound.event_judge import event_judge
from audiollm.evaluate.sound.sound_judges import OwnClasses
from audiollm.files.atomic import read_json, read_jsonl, write_jsonl
from audiollm.flow.editing.operations import edit_track, find_span
from audiollm.flow.editing.requests import EditRequest, edit_conditions
from audiollm.flow.editing.tracks import read_track
from audiollm.flow.generator import SoundGenerator, sampler_settings
from audiollm.flow.settings import SoundSamplingConfig

NAME = "learn_audiocot"
CHAINS = (f"{NAME}_data", NAME, f"{NAME}_sounds", f"{NAME}_flow")
KINDS = ("clip", "region", "instruction")
"""Kinds of questions."""
EDITS, MAX_EXTENDED_S = 20, 10.0
SAMPLING: dict[str, Any] = {"guidance": 5.0, "schedule": "cosine"}
SYSTEMS = {
    "writer asked": "asked_writer",
    "frames shuffled": "control_frames_shuffled",
    "videos exchanged": "control_videos_exchanged",
    "sounds exchanged": "control_sounds_exchanged",
    "both exchanged": "control_both_exchanged",
    "captions asked": "asked_captions",
}
"""Who is asked, and the stage."""
WAYS = {"true CoT": "true_CoT", "written CoT": "written_CoT", "caption alone": "caption_alone"}
"""Ways to ask the flow model."""
BARS = {
    ("clip", "events named (F1)"): 0.8,
    ("clip", "order of two events"): 0.9,
    ("clip", "times within 0.25 s"): 0.8,
    ("region", "its sound and no other"): 0.8,
    ("instruction", "operation and span"): 0.9,
}
SMOKE = (
    "scenes.scenes=8", "scenes.held_out_scenes=4", "begin.width=64", "begin.layers=2", "begin.encoder_width=32",
    "begin.audio_layers=1", "begin.vision_layers=1", "begin.mel_bins=16", "train.steps=10", "train.batch_size=4",
    "asked.max_questions=2", "asked.max_answer_tokens=24", "control.max_questions=2", "control.max_answer_tokens=24",
    "sounds.max_samples=2", "sounds.sampling={steps: 2}",
)  # fmt: skip
"""Settings at a size that shows that everything runs, and nothing else."""


def main() -> None:
    parser = proof_parser(__doc__)
    flow_help = "folder of a run of learn_flow; else nothing is made of the CoT"
    parser.add_argument("--flow", type=Path, help=flow_help)
    smoke_help = "everything at a toy size, one seed, made sounds"
    parser.add_argument("--smoke", action="store_true", help=smoke_help)
    options = parser.parse_args()
    data, seeds, overrides = options.data.resolve(), options.seeds, options.overrides
    if options.smoke:
        data, seeds, overrides = None, seeds[:1], [*SMOKE, *overrides]
    else:
        check_data(data, "fsdd", "esc10")
    events, backdrops = learn_flow.sound_sources(data) if data else ([], [])
    proof = Proof(options.runs / (f"{NAME}_smoke" if options.smoke else NAME), seeds, overrides, CHAINS)
    run = partial(proof.run, events=events, backdrops=backdrops)
    run(f"{NAME}_data")
    write_captions(proof.folder)
    run(NAME)
    report_answers(proof)
    if options.smoke:
        run(f"{NAME}_flow")
    flow = proof.folder if options.smoke else _flow_folder(options.flow)
    if flow is None:
        print(json.dumps({"bench": NAME, "case": "end to end", "ours": None, "unit": "n/a: give --flow"}))
        return
    for seed in seeds:
        write_conditions(proof.folder, seed)
    models = {seed: {"flow": str(_flow_model(flow, seed))} for seed in seeds}
    run(f"{NAME}_sounds", models, autoencoder=flow / "autoencoder")
    judge = _judge(data, proof.folder)
    report_sounds(proof, judge)
    generator = SoundGenerator.load(_flow_model(flow, seeds[0]), flow / "autoencoder")
    report_edits(proof, generator, judge, 2 if options.smoke else 24)


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
    """Write `captions.jsonl`, the questions of `captions_alone`, and those of each kind."""
    questions = read_samples(folder / "audiocot" / "thinking.jsonl")[0]
    captions = {row["id"]: row["caption"] for row in read_jsonl(folder / "audiocot" / "clips.jsonl")}
    samples = captions_alone(questions, captions)
    write_changed(folder / "captions.jsonl", learn_flow.lines_of(samples))
    for kind in KINDS:
        of_kind = [sample for sample in samples if sample.metadata["question"] == kind]
        write_changed(folder / f"captions_{kind}.jsonl", learn_flow.lines_of(of_kind))


def write_conditions(folder: Path, seed: int) -> None:
    """Write `written_SEED.jsonl`: the asked scenes with the CoT that the writer wrote; without one, their caption."""
    prose_by_clip = {
        row["clip"]: row["prose"]
        for row in read_jsonl(folder / f"asked_writer_{seed}" / "rows.jsonl")
        if row["question"] == "clip"
    }
    scenes = scenes_of_clips(folder)
    samples = []
    for clip, prose in prose_by_clip.items():
        scene = scenes[clip]
        facts = {**scene.metadata, "thought": prose or scene.metadata["caption"]}
        samples.append(scene.model_copy(update={"metadata": facts}))
    write_changed(folder / f"written_{seed}.jsonl", learn_flow.lines_of(samples))


def scenes_of_clips(folder: Path) -> dict[str, Sample]:
    """The scene of each clip of `audiocot`, by the clip's id."""
    scenes = {}
    for sample in read_samples(folder / "scenes" / "scenes.jsonl")[0]:
        scenes[str(Path(sample.audio("assistant")[0].path).resolve())] = sample
    rows = read_jsonl(folder / "audiocot" / "clips.jsonl")
    return {row["id"]: scenes[str(Path(row["path"]).resolve())] for row in rows}


# ---------------------------------------------------------------------------------------------- report


def report_answers(proof: Proof) -> None:
    """A line for each measure of each kind of question, by the writer, its controls, and the one of captions."""
    for system, stage in SYSTEMS.items():
        tables = [read_json(proof.folder / name / "results.json")["tables"] for name in proof.stages(stage)]
        for kind, table in tables[0].items():
            for measure in table:
                values = [figures[kind][measure]["accuracy"] for figures in tables]
                present = [value for value in values if value is not None]
                bar = BARS.get((kind, measure)) if system == "writer asked" else None
                print_line(NAME, f"{system}: {kind}: {measure}", present, peer=bar)


def report_sounds(proof: Proof, judge: ClipClassifier) -> None:
    """Sounds by the true CoT, by the written CoT with its ratio to the true one, and by the caption alone."""
    true: dict[str, float] = {}
    for mode, arm in WAYS.items():
        figures = [
            learn_flow.figures_of(learn_flow.sounds_of(proof, stage), judge)
            for stage in proof.stages(f"sounds_{arm}")
        ]
        for name in figures[0]:
            values = [row[name] for row in figures]
            peer = true.get(name) if mode == "written CoT" else None
            print_line(
                NAME, f"sounds by {mode}: {name}", values, peer=peer or None, peer_is="by the true CoT"
            )
            if mode == "true CoT":
                true[name] = float(np.nanmean(values)) if not np.isnan(values).all() else 0.0


def report_edits(proof: Proof, generator: SoundGenerator, judge: ClipClassifier, steps: int) -> None:
    """The share of instructions that were done, and of tracks that are unchanged elsewhere."""
    done, untouched, by_operation = [], [], dict[str, list[bool]]()
    for seed in proof.seeds:
        edits, failed = carry_out_edits(proof.folder, seed, generator, steps)
        total = len(edits) + failed
        if not total:
            continue
        rows = judge_edits(edits, OwnClasses(judge)).rows if edits else []
        done.append(sum(bool(row.get(DONE)) for row in rows) / total)
        for edit, row in zip(edits, rows, strict=True):
            by_operation.setdefault(edit.operation, []).append(bool(row.get(DONE)))
        if rows:
            untouched.append(sum(bool(row[UNTOUCHED]) for row in rows) / len(rows))
    print_line(NAME, "edits in plain words: done", done, peer=0.6)
    for operation, outcomes in by_operation.items():
        case = f"edits in plain words: {operation}: done, of those that were carried out"
        print_line(NAME, case, [float(np.mean(outcomes))])
    print_line(NAME, "edits in plain words: the rest of the track is unchanged", untouched, peer=1.0)


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
    for answer in plain_instructions(read_jsonl(folder / f"asked_writer_{seed}" / "rows.jsonl")):
        question, scene = questions[answer["id"]], scenes[answer["clip"]]
        before = folder / "audiocot" / question.audio("user")[0].path
        triple = triples[answer["id"].removesuffix("-think")]
        event = answer["truth"]["record"]["events"][0]
        labels = [x["label"] for x in scene.metadata["events"] if x["name"] == event["sound"]]
        path = out / f"{answer['id'].replace('/', '_')}.flac"
        try:
            video, key = question.video_parts()[0], f"{seed}/{answer['id']}"
            row = _carried_out(answer, before, video, path, generator, settings, key)
        except (ConfigError, BadSample, ValueError):
            failed += 1
            continue
        reference = Path(triple.audio("assistant")[0].path)
        facts = {"id": answer["id"], "by": "plain words", "operation": answer["truth"]["operation"]}
        row |= {**facts, "reference": str((folder / "audiocot" / reference).resolve())}
        rows.append({**row, "event": {**event, "label": labels[0] if labels else event["sound"]}})
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


def _flow_folder(flow_run: Path | None) -> Path | None:
    """The folder of a run of learn_flow.

    Raises:
        SystemExit: there is none in the folder that was given.
    """
    if flow_run is not None and not (flow_run / "autoencoder").is_dir():
        raise SystemExit(
            f"no run of learn_flow in {flow_run}: run make -C benchmarks learn-flow, and give its folder with --flow"
        )
    return flow_run and flow_run.resolve()


def _flow_model(flow: Path, seed: int) -> Path:
    """The model of the seed, or the first that the run has."""
    of_seed = flow / f"flow_{seed}"
    return of_seed if of_seed.is_dir() else min(path for path in flow.glob("flow_*") if path.is_dir())


def _judge(data: Path | None, folder: Path) -> ClipClassifier:
    """A judge of what is heard: of real recordings, or in a smoke run of the made ones."""
    if data is not None:
        return learn_flow.real_judge(data, folder)[0]
    return event_judge(folder / "scenes" / "scenes.jsonl", folder / "judge", 10)[0]


if __name__ == "__main__":
    main()
