"""CPU-seconds for a second of audio, encoding and decoding, against the peers in transformers at published shapes.

    python benchmarks/tokenizer_speed.py [--full] [--rounds 1] [--seconds 2] [--case mimi]

Random weights on both sides; both in one process, in turns, on one thread; the median over the rounds. Cases:
`mimi` and `higgs`, our `native` tokenizer at published size against Mimi (79 M) and the Higgs tokenizer (200 M);
`higgs-preset`, our `higgs` preset against transformers' class with the same weights, whose codes must be equal.
Prints the peak memory of each side as well (a process of its own each).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import bench_parser, in_own_process, parse_options, print_row, status_mb
from torch import Tensor
from transformers import HiggsAudioV2TokenizerModel, MimiConfig, MimiModel

from tokenizer.higgs import HiggsTokenizer, published_config
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.training.settings import SIZES

SAMPLE_RATE = 24_000
CASES = {"mimi": ("native", "mimi"), "higgs": ("native", "higgs"), "higgs-preset": ("higgs-preset", "higgs")}
"""Ours and the peer."""


@dataclass(frozen=True)
class Side:
    """Calls of a tokenizer."""

    encode: Callable[[Tensor], Tensor]
    """`[B, 1, N]` to codes `[B, K, T]`."""
    decode: Callable[[Tensor], Tensor]
    parameters: int


def build(name: str, higgs_folder: Path) -> Side:
    """A tokenizer at its published shape, with random weights."""
    torch.manual_seed(0)
    makers = {"native": _native, "mimi": _mimi, "higgs": _higgs, "higgs-preset": _higgs_preset}
    return makers[name](higgs_folder)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="clips at a time")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a clip")
    parser.add_argument("--case", choices=list(CASES), action="append", help="by default all")
    arguments = parse_options(parser, rounds=5, seconds=8.0, batches=[1, 4])
    torch.set_num_threads(1)
    cases = {name: CASES[name] for name in arguments.case or CASES}
    with tempfile.TemporaryDirectory() as name:
        if any("higgs" in pair for pair in cases.values()):
            write_higgs(Path(name))
        compare(cases, Path(name), arguments)


def compare(cases: dict[str, tuple[str, str]], higgs_folder: Path, options: argparse.Namespace) -> None:
    """Measure and print the cases."""
    names = sorted({name for pair in cases.values() for name in pair})
    sides = {name: build(name, higgs_folder) for name in names}
    seconds, length = options.seconds, int(options.seconds * SAMPLE_RATE)
    for batch in options.batches:
        audio = speech_like(batch, length)
        times = measure(sides, audio, options.rounds)
        for case, (ours, peer) in cases.items():
            for work in ("encode", "decode"):
                ours_s, peer_s = (
                    statistics.median(times[name, work]) / (batch * seconds) for name in (ours, peer)
                )
                print_row(
                    "tokenizer_speed", f"{case} {work} batch {batch}", ours_s, peer_s, "CPU-s per audio-s"
                )
        memory = {name: in_own_process(peak_memory_mb, name, higgs_folder, batch, length) for name in names}
        for case, (ours, peer) in cases.items():
            print_row(
                "tokenizer_speed",
                f"{case} memory batch {batch}",
                memory[ours],
                memory[peer],
                "MB at the peak",
            )
    if "higgs-preset" in cases:
        codes = [sides[name].encode(speech_like(2, length)) for name in cases["higgs-preset"]]
        same = float((codes[0] == codes[1]).float().mean())
        print(json.dumps({"bench": "tokenizer_speed", "case": "higgs-preset same codes", "ours": same, "peer": 1.0,
                          "ratio": same, "unit": "share"}))  # fmt: skip
    print(json.dumps({"parameters": {name: side.parameters for name, side in sides.items()}}))


def measure(sides: dict[str, Side], audio: Tensor, rounds: int) -> dict[tuple[str, str], list[float]]:
    """CPU-seconds of every side and work, the sides in turns; the first round is thrown away."""
    times: dict[tuple[str, str], list[float]] = {}
    codes = {name: side.encode(audio) for name, side in sides.items()}
    for name, side in sides.items():
        side.decode(codes[name])
    for _ in range(rounds):
        for name, side in sides.items():
            for work, call in (
                ("encode", lambda side=side: side.encode(audio)),
                ("decode", lambda side=side, name=name: side.decode(codes[name])),
            ):
                started = time.process_time()
                call()
                times.setdefault((name, work), []).append(time.process_time() - started)
    return times


def peak_memory_mb(name: str, higgs_folder: Path, batch: int, length: int) -> float:
    """Peak resident memory of this process, which encodes and decodes once."""
    torch.set_num_threads(1)
    side = build(name, higgs_folder)
    side.decode(side.encode(speech_like(batch, length)))
    return status_mb("VmHWM")


def speech_like(batch: int, length: int) -> Tensor:
    """Gliding harmonics with a syllable envelope and a little noise, `[B, 1, N]`."""
    dice = torch.Generator().manual_seed(0)
    seconds_N = torch.arange(length) / SAMPLE_RATE
    rows = []
    for _ in range(batch):
        start, beat = torch.rand(2, generator=dice).tolist()
        pitch_N = 90 + 120 * start + 30 * torch.sin(4 * seconds_N + 6 * start)
        phase_N = 2 * torch.pi * torch.cumsum(pitch_N, 0) / SAMPLE_RATE
        voice_N = torch.stack([torch.sin(k * phase_N) / k for k in range(1, 20)]).sum(0)
        envelope_N = (0.5 + 0.5 * torch.sin(2 * torch.pi * (3 + beat) * seconds_N)).square()
        rows.append(0.1 * envelope_N * voice_N + 0.01 * torch.randn(length, generator=dice))
    return torch.stack(rows)[:, None]


def _native(_: Path) -> Side:
    rule = SIZES["1b"]
    model = AudioTokenizer(
        TokenizerConfig(
            mel_hidden_size=rule.mel_hidden_size,
            hidden_size=rule.hidden_size,
            encoder_layers=rule.blocks[:2],
            decoder_layers=rule.blocks[2:],
            harmonic_source=True,
            linear_path=True,
        )
    ).eval()

    def decode(codes_BKT: Tensor) -> Tensor:
        mask_BT = torch.ones(len(codes_BKT), codes_BKT.shape[2], dtype=torch.bool)
        return model.decode_batch(codes_BKT, mask_BT)[0]

    return Side(lambda audio: model.encode_batch(audio[:, 0])[0], decode, _count(model))


def _mimi(_: Path) -> Side:
    model = MimiModel(MimiConfig()).eval()

    def encode(audio: Tensor) -> Tensor:
        with torch.inference_mode():
            return model.encode(audio, num_quantizers=8).audio_codes

    def decode(codes: Tensor) -> Tensor:
        with torch.inference_mode():
            return model.decode(codes).audio_values

    return Side(encode, decode, _count(model))


def _higgs(folder: Path) -> Side:
    model = HiggsAudioV2TokenizerModel.from_pretrained(folder).eval()

    def encode(audio: Tensor) -> Tensor:
        with torch.inference_mode():
            return model.encode(audio).audio_codes

    def decode(codes: Tensor) -> Tensor:
        with torch.inference_mode():
            return model.decode(codes).audio_values

    return Side(encode, decode, _count(model))


def _higgs_preset(folder: Path) -> Side:
    model = HiggsTokenizer.from_pretrained(folder)
    return Side(lambda audio: model.encode_batch(audio[:, 0]), model.decode_batch, _count(model))


@torch.no_grad()
def write_higgs(folder: Path) -> None:
    """The published shape, as transformers saves it, at weights where every codebook uses many of its codes."""
    torch.manual_seed(0)
    model = HiggsAudioV2TokenizerModel(published_config()).eval()
    for name, weight in model.named_parameters():
        if name.startswith("acoustic_") and weight.ndim == 3:
            if name.endswith("alpha"):
                weight.uniform_(0.3, 2.0)
            else:
                weight.normal_(0, 0.6 / (weight.shape[1] * weight.shape[2]) ** 0.5)
    latents: list[Tensor] = []
    hook = model.fc.register_forward_hook(lambda _module, _inputs, output: latents.append(output))
    model.encode(speech_like(1, SAMPLE_RATE))
    hook.remove()
    latent_SD = latents[0].flatten(0, 1)
    spread_D = latent_SD.std(dim=0) + 1e-9
    model.fc.weight /= spread_D[:, None]
    model.fc.bias.sub_(latent_SD.mean(dim=0)).div_(spread_D)
    for level in model.quantizer.quantizers:
        level.project_in.weight.normal_(0, level.project_in.in_features**-0.5)
        level.project_out.weight.normal_(0, 0.3 * level.project_out.in_features**-0.5)
        level.codebook.embed.normal_()
    model.save_pretrained(folder)


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
