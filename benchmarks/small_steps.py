"""A step of the two trainings of recipes/understanding/small.yaml against the same step with the settings of full.yaml.

    python benchmarks/small_steps.py --real FOLDERS --clips RECORDINGS [--only projector,lora]

`FOLDERS` has `smollm2-135m` and `whisper-base`. `peer` hears 16 recordings of 4 s anew, in windows that are filled up
to 30 s, and keeps frozen weights in float32; `ours` reads the encoder's rows, which were made once, of windows that end
with the recording, and keeps frozen weights in bf16. Both begin from the same weights, and the losses of the first step
are printed: that of `ours` may be 2 % above that of `peer`, at most. CPU-seconds, the least of `--rounds` steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from audiollm.audio import load
from audiollm.data.chat.template import TokenStream
from audiollm.data.hearing.features import (
    NO_MEL_MF,
    ClipFeatures,
    FeatureWindow,
    PackedFeatures,
    mel_features,
)
from audiollm.data.packing import PackedBatch, pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.families.dual_ffn.start import start_template
from audiollm.families.frozen_weights import FrozenWeights
from audiollm.families.registry import packed_training
from audiollm.families.target_logits import read_logits
from audiollm.recipe.ranks import ALONE
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe, required
from audiollm.train.loop.optim import autocast, build_optimizer
from audiollm.train.supervised_settings import TrainConfig

CLIPS, CLIP_S, TEXT = 16, 4.0, "the words that somebody says in this recording stand here"
TRAINED: dict[str, dict[str, Any]] = {
    "projector": {"trained": ["audio_encoder_proj.*"]},
    "lora": {"trained": "adapter", "lora": {"rank": 16, "trained_beside": ["audio_encoder_proj"]}},
}
LOSS_ABOVE = 1.02
"""Loss of ours over that of the peer, at most."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, required=True, help="has smollm2-135m and whisper-base")
    parser.add_argument("--clips", type=Path, required=True, help="a folder with recordings")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="projector,lora")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in options.only.split(","):
        figures = {side: measure(case, side, options) for side in ("peer", "ours")}
        (peer_s, peer_loss), (ours_s, ours_loss) = figures["peer"], figures["ours"]
        line = {"bench": "small_steps", "case": case, "ours": round(ours_s, 2), "peer": round(peer_s, 2)}
        line |= {"ratio": round(peer_s / ours_s, 2), "unit": "CPU-s a step"}
        print(json.dumps({**line, "losses": [round(ours_loss, 4), round(peer_loss, 4)]}), flush=True)
        if ours_loss > LOSS_ABOVE * peer_loss:
            sys.exit(f"{case}: the loss of the first step is {ours_loss:.4f}, and {peer_loss:.4f} before")


def measure(case: str, side: str, options: argparse.Namespace) -> tuple[float, float]:
    """CPU-seconds of a step, and the loss of the first."""
    config = settings(case, side, options.real)
    template = start_template(required(config.start))
    training = required(packed_training(config))
    torch.manual_seed(0)
    model = training.build(template, False)
    shape = required(training.encoder)
    paths = sorted(path for path in options.clips.rglob("*") if path.suffix in (".wav", ".flac"))
    if len(paths) < CLIPS:
        sys.exit(f"{options.clips}: {len(paths)} recordings, and {CLIPS} are needed")
    clips = [
        mel_features(load(path, 0.0, CLIP_S, 16_000, mono=True).samples_CN, shape) for path in paths[:CLIPS]
    ]
    if side == "ours":
        clips = [encoded(clip, model) for clip in clips]
    streams = [stream_of(template.compile, clip) for clip in clips]
    batch, few = (pack(some, 128, encoder=shape) for some in (streams, streams[:4]))
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe("small", Path("small.yaml"), "small", 0, Path(folder), (), {})
        context = Context(Path(folder), recipe, Console(quiet=True), {}, ALONE)
        FrozenWeights(config, context).shrink(model, lambda: read_logits(model, few))
    return steps(model, batch, config, options.rounds)


def settings(case: str, side: str, real: Path) -> TrainConfig:
    """The settings of a training on one side."""
    ours = side == "ours"
    encoder = {"path": str(real / "whisper-base"), "trained": False, "stride": 4, "projector_size": 1024}
    values = {
        "samples": ["samples.jsonl"],
        "start": str(real / "smollm2-135m"),
        "audio_in": "features",
        "audio_weight": 0.0,
        "text_weight": 1.0,
        "shape": {"audio_ffn_layers": [], "audio_encoder": {**encoder, "padded": not ours}},
        "frozen_weights": "bf16" if ours else "fp32",
        "batch_size": CLIPS,
        "steps": 100,
        **TRAINED[case],
    }
    return TrainConfig.model_validate(values, context={"artifacts": {"samples.jsonl"}, "inputs": []})


def encoded(clip: ClipFeatures, model: nn.Module) -> ClipFeatures:
    """The rows that the stage `encode_features` keeps of a recording."""
    tower = next(module for name, module in model.named_modules() if name.endswith("audio_tower"))
    with torch.inference_mode():
        rows_RC = tower(required(PackedFeatures.of(clip.windows))).half().clone()
    return ClipFeatures((FeatureWindow(NO_MEL_MF, len(rows_RC), rows_RC),))


def stream_of(compile_messages: Any, clip: ClipFeatures) -> TokenStream:
    question = [AudioPart(path="a.wav"), TextPart(text="Please transcribe this audio.")]
    messages = [
        Message(role="user", content=question),
        Message(role="assistant", content=[TextPart(text=TEXT)]),
    ]
    stream: TokenStream = compile_messages(messages, [clip])
    return stream


def steps(model: nn.Module, batch: PackedBatch, config: TrainConfig, rounds: int) -> tuple[float, float]:
    """The least CPU-seconds of a whole step, and the loss of the first."""
    parameters = list(model.named_parameters())
    optimizer = build_optimizer(parameters, 0.05, (0.9, 0.98))
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    trained = [parameter for _, parameter in parameters if parameter.requires_grad]
    model.train()
    losses, seconds = [], []
    for _ in itertools.repeat(None, rounds):
        started = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        with autocast(config.precision, torch.device("cpu")):
            loss = model(batch)["text"] / batch.counts["text"]
        loss.backward(inputs=trained)
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.process_time() - started)
    return min(seconds), losses[0]


if __name__ == "__main__":
    main()
