"""Does the tokenizer learn, and does it learn more than EnCodec's architecture in the same CPU time?

    make -C benchmarks learn-tokenizer DATA=../shared/data [MINUTES=30]

Trains every side from scratch on the same audio, by the same loop and losses, for the same CPU time (MINUTES of two
cores each), and scores all of them on audio that none has seen. A killed run goes on where it was; a side that is
done is not trained again. `--side` trains one side alone, so that sides can run next to each other.

Sides: `native`; `native-no-teacher`, the same without semantic distillation; `encodec-25hz`, EnCodec re-strided to
hop 960 with 8 x 1024 codes (2 kbps); `encodec-75hz`, its stock strides with 3 x 1024 codes (2.25 kbps). The teacher
of `native` is trained on the same files first; its time and that of the start in closed form are taken from `native`'s.
By `--side` alone:
`native-split`, `native` with a codebook of its own for the semantic half, `native-adversary`, with discriminators after
a third of the steps, and `native-random-start`, `native-no-teacher` without the start in closed form.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from encodec_baseline import RESTRIDED_RATIOS, STOCK_RATIOS, EncodecBaseline
from learning_data import Recording, read_recordings
from learning_scores import score_side
from proof import print_table
from rich.console import Console
from safetensors.torch import load_file, save_file
from sides import parse_side_options, train_sides

from audiollm.codec import FRAME_SAMPLES
from audiollm.files.atomic import read_json, read_jsonl, write_json
from audiollm.recipe.runner import Context
from audiollm.train.loop.loop import LoopConfig, step_generator, train
from tokenizer.clips import ClipStore
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.teacher.model import SemanticTeacher, load_teacher
from tokenizer.teacher.training import TeacherTrainingConfig, train_teacher
from tokenizer.training.linear_path import LINEAR_PATH_RULES
from tokenizer.training.task import OUTPUT_WEIGHTS, TokenizerTask, TokenizerTaskConfig

SIDES = ("native", "encodec-25hz", "native-no-teacher", "encodec-75hz")
TAUGHT = ("native", "native-split", "native-adversary")
ALONE = (*TAUGHT[1:], "native-random-start")
"""Sides that `--side` trains."""
BATCH = {"native": 16, "encodec": 4}
"""Crops of 0.96 s. EnCodec's step costs more, so it takes more and smaller ones."""
LEARNING_RATE = {"native": 1.5e-3, "encodec": 2e-4}
AUTOENCODER_SHARE = {"native": 0.06, "encodec": 0.15}
"""Share of the steps before the codebooks begin: until the latent follows the audio."""
WAVEFORM_WEIGHT = {"native": 0.1, "encodec": 1.0}
"""Weight of L1 on the waveform, beside mel and STFT. EnCodec's decoder, which makes waveforms by convolutions,
learns little from the spectral losses alone in the given time. history/tokenizer.md lists the variants tried."""
TEACHER_SHARE = 0.1
"""The teacher's share of the time of `native`."""
CROP_SAMPLES = 24 * FRAME_SAMPLES
CPU = torch.device("cpu")


def main() -> None:
    options = parse_side_options(__doc__, Path("runs/learn_tokenizer"), 30.0, [*SIDES, *ALONE])
    torch.set_num_threads(1)
    console, out = Console(), options.out / f"{options.minutes:g}-minutes"
    if not options.side:
        train_sides(__file__, SIDES, options, out, 2 * options.minutes, console)
    recordings = read_recordings(options.data)
    if options.side:
        train_side(options.side, recordings, out / options.side, options.minutes, console)
    else:
        rows = {side: _score_tokenizer(side, recordings, out / side, console) for side in SIDES}
        report(rows, options.minutes, console)
        _tell_alarms(out, console)


def train_side(
    side: str, recordings: list[Recording], folder: Path, minutes: float, console: Console
) -> None:
    """Train and save to `folder/weights`, unless that is done."""
    done = folder / "trained.json"
    if done.exists() and read_json(done)["minutes"] == minutes:
        return
    console.print(f"{side}: {minutes:g} minutes of two cores")
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(folder, None, console, {})  # type: ignore[arg-type]
    stores = [
        ClipStore([r.clip for r in recordings if r.held_out == held_out], 24_000)
        for held_out in (False, True)
    ]
    cpu_minutes, teacher, before_s = 2 * minutes, None, 0.0
    if side in TAUGHT:
        teacher, before_s = _teacher(folder / "teacher", stores, TEACHER_SHARE * cpu_minutes, context)
    model = build(side, teacher.feature_dim if teacher else 0)
    crop_frames = CROP_SAMPLES // model.hop_samples
    task_config = TokenizerTaskConfig(
        seed=0,
        batch_size=BATCH[_family(side)],
        crop_frames=crop_frames,
        autoencoder_share=AUTOENCODER_SHARE[_family(side)],
        adversary_share=0.3 if side == "native-adversary" else 1.0,
        pitch_weight=1.0 if _family(side) == "native" else 0.0,
        output_weights={**OUTPUT_WEIGHTS, "waveform": WAVEFORM_WEIGHT[_family(side)]},
    )
    task = TokenizerTask(model, stores[0], stores[1], task_config, teacher)  # type: ignore[arg-type]
    if isinstance(model, EncodecBaseline):
        model.initialize(task.crops(step_generator(0, 0, "initialize")).samples)
    if has_linear_path(model):
        started = time.process_time()
        task.fit_linear_path()
        before_s += time.process_time() - started
    loop = LoopConfig(
        seed=0,
        steps=None,
        minutes=None,
        cpu_minutes=cpu_minutes - before_s / 60,
        learning_rate=LEARNING_RATE[_family(side)],
        ema_decay=0.995,
        unused_parameters=True,  # the quantizer joins after the plain autoencoder
        checkpoint_seconds=60,
        rules=LINEAR_PATH_RULES if has_linear_path(model) else (),
    )
    figures = train(task, loop, folder, context, CPU)
    started = time.process_time()
    task.refit_codebooks()
    figures["cpu_seconds"] += time.process_time() - started
    _save_side(model, folder / "weights")
    write_json(done, {"minutes": minutes, "before_cpu_seconds": before_s, **figures})


def _teacher(
    folder: Path, stores: list[ClipStore], cpu_minutes: float, context: Context
) -> tuple[SemanticTeacher, float]:
    """The teacher, trained on the training files, and the CPU seconds that it took."""
    done = folder / "trained.json"
    if not done.exists():
        config = TeacherTrainingConfig(cpu_minutes=cpu_minutes)
        trained = train_teacher(stores[0], stores[1], config, folder, replace(context, folder=folder), CPU)
        write_json(done, {"cpu_seconds": trained.cpu_seconds})
    return load_teacher(folder / "model"), float(read_json(done)["cpu_seconds"])


def build(side: str, semantic_dim: int) -> AudioTokenizer | EncodecBaseline:
    """The untrained model of a side."""
    torch.manual_seed(0)
    if side == "encodec-25hz":
        return EncodecBaseline(RESTRIDED_RATIOS, num_codebooks=8)
    if side == "encodec-75hz":
        return EncodecBaseline(STOCK_RATIOS, num_codebooks=3)
    quantizer = "split_rvq" if side == "native-split" else "rvq"
    shape = TokenizerConfig(
        semantic_dim=semantic_dim,
        quantizer=quantizer,
        harmonic_source=True,
        linear_path=side != "native-random-start",
    )
    return AudioTokenizer(shape)


def has_linear_path(model: AudioTokenizer | EncodecBaseline) -> bool:
    return isinstance(model, AudioTokenizer) and model.config.linear_path


def _family(side: str) -> str:
    return side.partition("-")[0]


def _save_side(model: AudioTokenizer | EncodecBaseline, folder: Path) -> None:
    if isinstance(model, AudioTokenizer):
        model.save_pretrained(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: value.contiguous() for key, value in model.state_dict().items()},
            folder / "encodec.safetensors",
        )


def _load_side(side: str, folder: Path) -> AudioTokenizer | EncodecBaseline:
    if side.startswith("native"):
        return AudioTokenizer.from_pretrained(folder)
    model = build(side, 0)
    model.load_state_dict(load_file(folder / "encodec.safetensors"))
    return model.eval()


def _score_tokenizer(
    side: str, recordings: list[Recording], folder: Path, console: Console
) -> dict[str, Any]:
    """The scores of a trained side, computed once."""
    path, trained = folder / "scores.json", read_json(folder / "trained.json")
    if not path.exists() or read_json(path)["trained"] != trained:
        console.print(f"{side}: scoring")
        model = _load_side(side, folder / "weights")
        write_json(path, {"trained": trained, **score_side(model, recordings, console)})  # type: ignore[arg-type]
    scores: dict[str, Any] = read_json(path)
    return scores


def report(rows: dict[str, dict[str, Any]], minutes: float, console: Console) -> None:
    """The table for people, and a JSON line for every figure of `native` against the re-strided EnCodec."""
    means = {side: _means(row, rows) for side, row in rows.items()}
    cells = [[name, *(side[name] for side in means.values())] for name in means["native"]]
    for name, text in (("codes_used", "{:.0%}"), ("perplexity", "{:.0f}")):
        cells.append([name, *(" ".join(text.format(v) for v in row[name]) for row in rows.values())])
    cells.append(["CPU minutes", *(f"{_cpu_minutes(row):.1f}" for row in rows.values())])
    cells.append(["steps", *(str(row["trained"]["steps"]) for row in rows.values())])
    print_table(console, f"{minutes:g} minutes of two cores each, held-out audio", ("", *rows), cells)
    for name in means["native"]:
        ours, peer = means["native"][name], means["encodec-25hz"][name]
        line: dict[str, Any] = {"bench": "learn_tokenizer", "case": name}
        line |= {"ours": round(ours, 4), "peer": round(peer, 4)}
        if ours and peer and "share" not in name and "original" not in name:
            better = peer / ours if "distance" in name or "error" in name else ours / peer
            line["ratio"] = round(better, 3)
        print(json.dumps({**line, "unit": "score"}))


def _tell_alarms(out: Path, console: Console) -> None:
    """A side that raised an alarm in training (a collapsed codebook) is no peer to be proud of beating."""
    for side in SIDES:
        path = out / side / "alarms.jsonl"
        for row in read_jsonl(path) if path.exists() else []:
            console.print(f"[bold red]{side}: {row['kind']}[/] from step {row['step']}: {row['text']}")


def _means(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Probes as they are, and means over the clips that every side has a value for."""
    means = {}
    for name in row["clips"]:
        common = set.intersection(*(set(side_row["clips"].get(name, {})) for side_row in rows.values()))
        means[f"{name} (n={len(common)})"] = sum(row["clips"][name][clip] for clip in common) / max(
            1, len(common)
        )
    return {**means, **{name: value for name, value in row.items() if name.startswith("probe")}}


def _cpu_minutes(row: dict[str, Any]) -> float:
    trained = row["trained"]
    return float(trained["cpu_seconds"] + trained["before_cpu_seconds"]) / 60


if __name__ == "__main__":
    main()
