"""The `higgs` preset against transformers' class, same weights: codes, CPU-seconds and memory.

    python benchmarks/higgs_preset_speed.py [--rounds 5] [--seconds 4]

Random weights of the published shape (200 M), written once and loaded by both sides; in turns in one process, on one
thread, the median over the rounds. The peak of resident memory is that of a process of its own for each side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tokenizer.higgs import HiggsTokenizer, published_config

SAMPLE_RATE = 24_000
BATCHES = (1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a clip")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    length = int(arguments.seconds * SAMPLE_RATE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_weights(folder)
        for batch in BATCHES:
            peaks_mb = [peak_memory_mb(folder, side, batch, length) for side in ("ours", "peer")]
            for work, pair in zip(("loading", "encode and decode"), zip(*peaks_mb, strict=True), strict=True):
                _print(f"memory {work} batch {batch}", *pair, "MB at the peak")
        ours, peer = load_ours(folder), load_peer(folder)
        for batch in BATCHES:
            samples_BN = noise(batch, length)
            for work, values in measure(ours, peer, samples_BN, arguments.rounds).items():
                per_second = [statistics.median(value) / (batch * arguments.seconds) for value in values]
                _print(f"{work} batch {batch}", *per_second, "CPU-s per audio-s")
            _print(f"same codes batch {batch}", same_codes(ours, peer, samples_BN), 1.0, "share")


@torch.no_grad()
def write_random_weights(folder: Path) -> None:
    """The published shape, as transformers saves it, at weights where every codebook uses many of its codes."""
    torch.manual_seed(0)
    model = transformers.HiggsAudioV2TokenizerModel(published_config()).eval()
    for name, weight in model.named_parameters():
        if name.startswith("acoustic_") and weight.ndim == 3:
            if name.endswith("alpha"):
                weight.uniform_(0.3, 2.0)
            else:
                weight.normal_(0, 0.6 / (weight.shape[1] * weight.shape[2]) ** 0.5)
    latents: list[Tensor] = []
    hook = model.fc.register_forward_hook(lambda _module, _inputs, output: latents.append(output))
    model.encode(noise(1, SAMPLE_RATE)[:, None])
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


def load_ours(folder: Path) -> HiggsTokenizer:
    return HiggsTokenizer.from_pretrained(folder)


def load_peer(folder: Path) -> Any:
    return transformers.HiggsAudioV2TokenizerModel.from_pretrained(folder).eval()


@torch.inference_mode()
def measure(
    ours: HiggsTokenizer, peer: Any, samples_BN: Tensor, rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """CPU-seconds of encoding and decoding, (ours, the peer's), in turns after one call to warm up."""
    codes_BKF = peer.encode(samples_BN[:, None]).audio_codes
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "encode": (lambda: ours.encode_batch(samples_BN), lambda: peer.encode(samples_BN[:, None])),
        "decode": (lambda: ours.decode_batch(codes_BKF), lambda: peer.decode(codes_BKF)),
    }
    times: dict[str, tuple[list[float], list[float]]] = {}
    for work, sides in calls.items():
        times[work] = ([], [])
        for turn in range(rounds + 1):
            for call, spent in zip(sides, times[work], strict=True):
                started = time.process_time()
                call()
                if turn:
                    spent.append(time.process_time() - started)
    return times


@torch.inference_mode()
def same_codes(ours: HiggsTokenizer, peer: Any, samples_BN: Tensor) -> float:
    theirs = peer.encode(samples_BN[:, None]).audio_codes
    return float((ours.encode_batch(samples_BN) == theirs).float().mean())


def peak_memory_mb(folder: Path, side: str, batch: int, length: int) -> tuple[float, float]:
    """Peak resident memory of a process that loads one side, encodes and decodes: while it loads, and after."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (folder, side, batch, length))


@torch.inference_mode()
def _peak(folder: Path, side: str, batch: int, length: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    samples_BN = noise(batch, length)
    model = load_ours(folder) if side == "ours" else load_peer(folder)
    loading_mb = _high_water_mb()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    if side == "ours":
        model.decode_batch(model.encode_batch(samples_BN))
    else:
        model.decode(model.encode(samples_BN[:, None]).audio_codes)
    return loading_mb, _high_water_mb()


def _high_water_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def noise(batch: int, length: int) -> Tensor:
    """Noise that swells and fades, `[B, N]`; speed does not depend on what is said."""
    swell_N = torch.sin(torch.arange(length) / 1500).square()
    return torch.randn(batch, length, generator=torch.Generator().manual_seed(0)) * 0.1 * swell_N


def _print(case: str, ours: float, peer: float, unit: str) -> None:
    line = {
        "bench": "higgs_preset_speed",
        "case": f"higgs-preset {case}",
        "ours": round(ours, 4),
        "peer": round(peer, 4),
    }
    print(json.dumps({**line, "ratio": round(peer / ours, 2), "unit": unit}), flush=True)


if __name__ == "__main__":
    main()
