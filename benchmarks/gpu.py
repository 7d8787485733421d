"""Figures of one H100 or H200 in bf16, in ten minutes: tokens or seconds of sound per second, MFU, memory, and peers.

    python benchmarks/gpu.py [--only sft generate ...] [--tiny]
    make -C benchmarks gpu [ONLY="sft generate"] [TINY=1]

Each case runs in a process of its own, which is ended after 80 s with the lines that it has printed so far, and all of
them together after 10 minutes less 10 s: those that are wanted most come first. A case that fails leaves the end of
its error on stderr. `--tiny` runs the same code at tiny sizes, on a CPU too: it proves that the script runs, and its
figures say nothing. Without `--only`, the cases run in this order, but for those of the last line:

    sft             the 1 B DualFFN on packs of 4,096 tokens against transformers' Higgs Audio V2 on padded batches, the
                    same weights; 16,384 tokens with the options: kernels of attention, AdamW without fusion, batches
                    from pinned memory (`pin_memory`); LoRA on the 3 B shape against PEFT on transformers' class
    generate        audio frames per second of the 1 B DualFFN against transformers' `generate`, batch 1, 8 and 64, the
                    same weights; decode steps as CUDA graphs against plain ones; ms to the first frame and sound
    grpo            a step of GRPO, 4 prompts with 8 answers of 256 tokens, with its rollouts, against TRL's trainer
    dpo             a step of DPO on 16 pairs with long-tailed lengths against TRL's; both compute activations again
    codec           the tokenizer of size 1b: seconds of sound per second encoded and decoded against Mimi, and trained
    flow            a training step of `MMDiT` at the shape of `train_flow`'s size 1b on 16 and 64 clips of 9 s, against
                    the class of the package thinksound where build/thinksound has it; 24 steps of sampling
    interpret       the live loop at 2048 x 16: real-time factor against transformers' Kyutai STT and Moshi, and streams
                    at once whose slowest chunk is done within its 0.96 s
    sft_compiled, flow_compiled    a training step through `torch.compile`, as the setting `compile` has it
    grpo_audio, studio_click       by name alone: GRPO on prompts of 10 s of sound; from an order of the studio to sound

A line is `{"bench", "case", "ours", "peer", "ratio", "unit", ...}`; `ratio` says how many times better ours is. The
line of an option has the figure without it as `plain`, and `ratio` is relative to that. What cannot run here (a kernel
that is not installed, a peer, an option on a CPU) has a line with `left_out`: the reason.

MFU is model operations / time / `PEAK`. Counted are 2 operations for every weight that a row meets in a forward pass,
and 4 for every channel of a query's head and pair of attended positions (half of them where it is causal), three times
that for a training step, twice for an adapter's. Norms, activations, embeddings, AdamW and what is computed twice do
not count; nor does padding. `flow` and `codec`: the products of a forward pass, as torch's `FlopCounterMode` finds
them; all others: `audiollm.families.dual_ffn.flops` in closed form; `dpo` and `grpo` with the forward pass of the
reference. A peer's MFU has the same operations as ours.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

CASES: Mapping[str, str] = {
    "sft": "sft:sft",
    "generate": "generation:generate",
    "grpo": "alignment:grpo",
    "dpo": "alignment:dpo",
    "codec": "codec:codec",
    "flow": "sound:flow",
    "interpret": "interpreting:interpret",
    "sft_compiled": "sft:sft_compiled",
    "flow_compiled": "sound:flow_compiled",
    "grpo_audio": "alignment:grpo_audio",
    "studio_click": "studio_click:studio_click",
}
"""By name, the module of `gpu_cases` and the function in it."""
BY_NAME_ALONE = ("grpo_audio", "studio_click")
MAX_CASE_S, MAX_S = 80.0, 590.0
"""Most seconds of a case, its imports and its models' making included, and of all cases."""
MIN_CASE_S = 20.0
"""Least seconds in which a case is begun."""
ERROR_LINES = 12
MEMORY = Path("/dev/shm")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [case for case in CASES if case not in BY_NAME_ALONE]
    parser.add_argument("--only", nargs="+", default=default, choices=list(CASES), metavar="CASE")
    parser.add_argument("--tiny", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--here", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here is not None:
        run_here(options.only, options.tiny, options.here)
        return
    ends = time.monotonic() + MAX_S
    print_header()
    failed = [case for case in options.only if not run_apart(case, options.tiny, ends)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run_here(cases: Sequence[str], tiny: bool, seconds: float) -> None:
    """Run cases in this process, which is ended after so many seconds by whoever started it."""
    ends = time.monotonic() + seconds
    from gpu_cases.measuring import Scale

    for case in cases:
        module, name = CASES[case].split(":")
        run: Callable[[Scale], None] = getattr(importlib.import_module(f"gpu_cases.{module}"), name)
        run(Scale(tiny, ends))


def print_header() -> None:
    """Print the device, and the versions of what figures depend on."""
    import torch
    from gpu_cases.measuring import device_name

    packages = ("flash_attn", "liger_kernel", "transformers", "trl", "peft")
    versions = {name: installed_version(name) for name in packages}
    print(
        json.dumps({"bench": "gpu", "device": device_name(), "torch": torch.__version__, **versions}),
        flush=True,
    )


def installed_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return None


def run_apart(case: str, tiny: bool, ends: float) -> bool:
    """Run a case in a process of its own, no longer than `ends` by `time.monotonic`; False where it failed.

    Its lines go to stdout as it prints them: one that is ended keeps them, and has not failed where there are any.
    """
    seconds = min(MAX_CASE_S, ends - time.monotonic())
    if seconds < MIN_CASE_S:
        say(f"{case}: {max(0.0, seconds):.0f} s are left, which are too few")
        return False
    command = [sys.executable, "-W", "ignore", __file__, "--here", str(seconds), "--only", case]
    command += ["--tiny"] if tiny else []
    began, figures, ended = time.monotonic(), 0, threading.Event()
    # the case's models lie in memory, where there is such a place, and go with the folder where the case is killed
    memory = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
        )  # fmt: skip

        def end() -> None:
            ended.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, end)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True, file=sys.stdout if line.startswith("{") else sys.stderr)
            figures += '"ours"' in line
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        last = errors.read().splitlines()[-ERROR_LINES:]
    has_failed = bool(code) and not (ended.is_set() and figures)
    outcome = f"ended after {figures} figures" if ended.is_set() else f"exit code {code}"
    if has_failed:
        print(f"{case} failed, {outcome}:", *last, sep="\n", file=sys.stderr, flush=True)
    say(f"{case}: {time.monotonic() - began:.0f} s in all, {outcome}")
    return not has_failed


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
