"""What public training objectives of published speech models teach, on random weights of the published classes.

    OMP_NUM_THREADS=1 python benchmarks/public_objectives.py [--steps 250] [--families qwen3_tts,higgs_audio_v2]

The same small model learns one clip of 12 frames by heart under each objective, and says it by its class's own greedy
`generate`. Each objective is written here anew, from its description, over the published class; our own trains our
model, whose tensors the class then holds.

    talker, predictor    training loss at the end, in nats, as the objective itself counts it; of Higgs: codes, and none
    offset               the labels that the heads predict best, read with the objective's own inputs: `its own`, those
                         of a frame before or behind, those of another codebook, or `nothing`: more than half of chance
    leak                 cross entropy of fresh random codes of 4 values (entropy 1.386) after a training on such codes:
                         below it, a prediction reads its own target. Behind the slash: as generation computes it
    frames, right        frames said (12 wanted, 39 is the limit), and the share of the clip's codes among them

A JSON line for each objective, and a table at the end. Qwen3-TTS needs the packages of `make -C benchmarks oracles`,
and is left out without them. The forks of Higgs Audio v3 have no row: no installed package has their class, whose one
table for reading and predicting codes is what they tear apart; their labels are shifted once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import bench_parser
from objective_subjects import BOOKS, CODES, Losses, Subject
from published_models import ORACLE, in_its_environment
from torch import Tensor, nn
from torch.nn import functional

from audiollm.supervised.guards.leak import VALUES as LEAK_VALUES
from audiollm.supervised.guards.offsets import PLACES

FAMILIES = ("qwen3_tts", "higgs_audio_v2")
FRAMES, LIMIT = 12, 39
LEARNING_RATE = 1e-3
"""Chosen, with the spread of the random weights, so that a model learns to use a leak within the steps, where there is
one: wilder steps do not."""
CLIPS_PER_STEP = 8
"""Of the leak test; by heart, one clip is learned."""
HELD_OUT_CLIPS = 64
COLUMNS = ("class", "objective", "talker", "predictor", "offset", "leak", "frames", "right")


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--family", help="measure this one in this process")
    parser.add_argument("--lines", type=Path, help="file that gets the JSON lines of this process")
    parser.add_argument("--steps", type=int, default=250)
    arguments = parser.parse_args()
    if arguments.family is not None:
        measure(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        lines.touch()
        for family in arguments.families.split(","):
            if family == "qwen3_tts" and not ORACLE.is_dir():
                reason = f"no {ORACLE}: `make -C benchmarks oracles` fetches the published package"
                print(
                    json.dumps({"bench": "public_objectives", "case": family, "skipped": reason}), flush=True
                )
                continue
            options = ["--steps", str(arguments.steps), "--lines", str(lines)]
            in_its_environment(__file__, family, options)
        print(f"\n{table([json.loads(line) for line in lines.read_text().splitlines()])}")


def measure(arguments: argparse.Namespace) -> None:
    """Measure and print the objectives of one family."""
    torch.set_num_threads(1)
    module = {"qwen3_tts": "qwen3_tts_objectives", "higgs_audio_v2": "higgs_objectives"}[arguments.family]
    subjects = importlib.import_module(
        module
    ).subjects  # the packages of one family are not there for the other
    with tempfile.TemporaryDirectory() as folder, arguments.lines.open("a") as file:
        for new_subject in subjects(Path(folder)):
            line = json.dumps(measure_objective(new_subject, arguments.steps))
            print(line, flush=True)
            file.write(line + "\n")


def measure_objective(new_subject: Callable[[], Subject], steps: int) -> dict[str, Any]:
    """The JSON line of an objective."""
    subject = new_subject()
    clip_KT = torch.randint(1, CODES, (BOOKS, FRAMES), generator=torch.Generator().manual_seed(0))
    losses = train(subject, lambda step: [clip_KT], steps)
    line: dict[str, Any] = {"bench": "public_objectives", "case": f"{subject.name}, {subject.objective}"}
    line |= {"class": subject.name, "objective": subject.objective}
    line |= {"talker": round(float(losses.first), 5)}
    line |= {"predictor": None if losses.rest is None else round(float(losses.rest), 5)}
    with torch.no_grad():
        line |= offsets(subject.frame_logits(clip_KT, as_generated=False), clip_KT)
    spoken_KT = subject.speak(LIMIT)
    common = min(FRAMES, spoken_KT.shape[1])
    right = int((spoken_KT[:, :common] == clip_KT[:, :common]).sum())
    line |= {"frames": spoken_KT.shape[1], "right": round(right / clip_KT.numel(), 3)}
    return line | leak(new_subject(), steps)


def train(subject: Subject, clips_of: Callable[[int], Sequence[Tensor]], steps: int) -> Losses:
    """Train all weights; return the losses of the last step, from before its update."""
    optimizer = torch.optim.AdamW(subject.parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        losses = subject.losses(clips_of(step))
        optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        nn.utils.clip_grad_norm_(subject.parameters, 1.0)
        optimizer.step()
    return losses


def leak(subject: Subject, steps: int) -> dict[str, float]:
    """Cross entropy of fresh random codes in nats: with the objective's own inputs and labels, and as generated.

    Of models with a predictor it is the predictor's.
    """
    generator = torch.Generator().manual_seed(1)

    def fresh_clips(count: int) -> list[Tensor]:
        shape = BOOKS, FRAMES
        return [torch.randint(1, 1 + LEAK_VALUES, shape, generator=generator) for _ in range(count)]

    train(subject, lambda step: fresh_clips(CLIPS_PER_STEP), steps)
    with torch.no_grad():
        clips = fresh_clips(HELD_OUT_CLIPS)
        losses = subject.losses(clips)
        logits_FKV = torch.cat([subject.frame_logits(clip_KT, as_generated=True) for clip_KT in clips])
        first = 0 if losses.rest is None else 1
        codes_FK = torch.cat([clip_KT.T for clip_KT in clips])[:, first:]
        generated = functional.cross_entropy(logits_FKV[:, first:].flatten(0, 1), codes_FK.flatten())
        trained = losses.rest if losses.rest is not None else generated
    return {"leak": round(float(trained), 3), "leak as generated": round(float(generated), 3)}


def offsets(logits_TKV: Tensor, clip_KT: Tensor) -> dict[str, str]:
    """The place whose labels most heads of each decoder predict best, of `guards.offsets.PLACES`."""
    places = [best_place(logits_TKV[:, book], clip_KT, book) for book in range(len(clip_KT))]
    (rest, _), *_ = Counter(places[1:]).most_common(1)
    return {"offset": places[0] if places[0] == rest else f"{places[0]}; {rest}"}


def best_place(logits_TV: Tensor, clip_KT: Tensor, book: int) -> str:
    """Name the place whose labels a head predicts best."""
    losses: dict[str, float] = {}
    for frame, shift in PLACES:
        if not 0 <= book + shift < len(clip_KT):
            continue
        first, last = max(0, -frame), FRAMES - max(0, frame)
        labels_T = clip_KT[book + shift, first + frame : last + frame]
        name = f"frame {frame:+d}" if frame else f"codebook {shift:+d}" if shift else "its own"
        losses[name] = float(functional.cross_entropy(logits_TV[first:last], labels_T))
    best = min(losses, key=lambda name: losses[name])
    return best if losses[best] < math.log(CODES) / 2 else "nothing"


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The lines as a table in Markdown."""
    rows = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for line in lines:
        own, generated = line["leak"], line["leak as generated"]
        cells = {
            **line,
            "leak": f"{own:.3f}" if abs(own - generated) < 0.02 else f"{own:.3f} / {generated:.3f}",
        }
        cells["right"] = f"{line['right']:.0%}"
        for name in ("talker", "predictor"):
            cells[name] = "" if line[name] is None else f"{line[name]:.2g}"
        rows.append(f"| {' | '.join(str(cells[column]) for column in COLUMNS)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
