"""Figures of one H100 or H200 in bf16: steps, tokens, frames and streams per second, MFU, memory, and the peers'.

    python benchmarks/gpu.py [--cases flow llm_train ...] [--seconds 40] [--tiny]

Each case runs in a process of its own: one that fails, or takes 150 s more than its `--seconds`, leaves the last lines
of its error on stderr. `--seconds` is a soft limit on the measurements of a case, beside its models' making and its
warm-up. `--tiny` runs the same code at tiny sizes, on a CPU too: it proves that the script runs, and its figures say
nothing.

    flow            a training step of `MMDiT` at the shape of `train_flow`'s size 1b, 1024 x (7 + 14) blocks, on 16 and
                    64 clips of 9 s with real lengths of text and hidden modalities; autocast, clipping, AdamW
    flow_compiled   the same with 16 clips, compiled as the training loop compiles
    flow_sample     seconds to sample the latents of 9 s: 24 steps of Euler with guidance, one sound; weights in bf16
    studio_click    seconds from an order, as the studio's Generate gives it, to the decoded sound of 9 s: the service,
                    words and pictures, 24 steps with guidance in float32, the VAE of `train_vae` on the CPU; beside it
                    those of the first order, whose film is read, too
    llm_train       trained tokens per second of the 1 B DualFFN on packs against transformers' Higgs Audio V2 on padded
                    batches, the same weights (`llm_train.py`); and ours alone at four times as many tokens a step
    llm_generate    audio frames per second of the 1 B DualFFN against transformers' `generate`, batch 1 and 8, the same
                    weights (`llm_generate.py`); milliseconds to the first frame and the first sound
    interpret_text, interpret_speech
                    the live loop at 2048 x 16 with a window of 30 s (`interpret.py`): real-time factor of a stream, and
                    of how many at once the slowest chunk is done within its 0.96 s, of 1, 8, 32, 64 and 128
    dpo             a step of DPO on 16 pairs with long-tailed lengths at 2048 x 16 against TRL's DPOTrainer (`dpo.py`):
                    tokens per second without padding, MFU, peak memory; both compute activations again, as TRL does
    grpo            a step of GRPO of ours, 4 prompts with 10 s of sound, 8 answers of 256 tokens to each (`grpo.py`):
                    tokens per second by phase, MFU of scoring and update together

MFU is model operations / time / `PEAK`. Counted are 2 operations for every weight that a row meets in a forward pass,
and 4 for every channel of a query's head and pair of attended positions (half of them where it is causal), three times
that for a training step. Norms, activations, embeddings, AdamW and what is computed twice do not count; nor does
padding. `flow*`: the products of a forward pass, as torch's `FlopCounterMode` finds them. `llm_train`, `dpo`, `grpo`:
`audiollm.families.dual_ffn.flops` in closed form; `dpo` and `grpo` with the forward pass of the reference. A peer's
MFU has the same operations as ours. `ratio` says how many times better ours is.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.devices import default_device
from audiollm.train.loop.monitor import PEAK_FLOPS
from audiollm.train.loop.optim import autocast, build_optimizer

PEAK = PEAK_FLOPS["H100"]
"""Dense bf16 operations per second of H100 SXM and of H200, 989e12 by NVIDIA's data sheets."""
STEP_TOKENS, MORE_TOKENS = 4096, 16_384
"""Positions of a training step of `llm_train`: with its peer, which pads and computes all logits; and alone."""
STREAMS = (1, 8, 32, 64, 128)
ERROR_LINES = 12
MAX_BESIDE_S, TIMED_OUT = 150.0, 124
"""Most seconds of a case beside its measurements, on a machine that is its own; the exit code of one that took more."""


@dataclass(frozen=True)
class Scale:
    """The size of a case's models, and the time for its measurements."""

    tiny: bool
    seconds: float

    @property
    def name(self) -> str:
        return "tiny" if self.tiny else "1b"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--seconds", type=float, default=40.0, help="for the measurements of a case")
    parser.add_argument("--tiny", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    scale = Scale(arguments.tiny, arguments.seconds)
    if arguments.here:
        for case in arguments.cases:
            CASES[case](scale)
        return
    print(json.dumps({"bench": "gpu", "device": device_name(), "torch": torch.__version__}), flush=True)
    failed = [case for case in arguments.cases if not run_apart(case, scale)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run_apart(case: str, scale: Scale) -> bool:
    """Run a case in a process of its own; False where it failed."""
    command = [sys.executable, "-W", "ignore", __file__, "--here", "--cases", case]
    command += ["--seconds", str(scale.seconds), *(["--tiny"] if scale.tiny else [])]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        try:
            code = subprocess.run(command, stderr=errors, timeout=scale.seconds + MAX_BESIDE_S).returncode
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        errors.seek(0)
        last = errors.read().splitlines()[-ERROR_LINES:]
    if code:
        print(f"{case} failed with exit code {code}:", *last, sep="\n", file=sys.stderr, flush=True)
    print(f"{case}: {time.perf_counter() - began:.0f} s in all", file=sys.stderr, flush=True)
    return not code


def device_name() -> str:
    device = default_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def tell(
    case: str, unit: str, ours: float, peer: float | None = None, *, less: bool = False, **more: Any
) -> None:
    """Print a line.

    Args:
        less: a smaller figure is the better one.
        more: entries that are printed as they are; None: left out.
    """
    line: dict[str, Any] = {"bench": "gpu", "case": case, "ours": rounded(ours)}
    if peer is not None:
        line |= {"peer": rounded(peer), "ratio": rounded(peer / ours if less else ours / peer)}
    line |= {"unit": unit, **{key: value for key, value in more.items() if value is not None}}
    print(json.dumps(line), flush=True)


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[int], Any], seconds: float, warm: int = 2, min_calls: int = 3) -> float:
    """Median seconds of `work`, which is given the number of its call, called until the time is over."""
    for number in range(warm):
        work(number)
    times: list[float] = []
    synchronize()
    began = time.perf_counter()
    for number in count(warm):
        started = time.perf_counter()
        work(number)
        synchronize()
        times.append(time.perf_counter() - started)
        if len(times) >= min_calls and time.perf_counter() - began > seconds:
            return statistics.median(times)
    raise AssertionError


def peak_gb() -> float | None:
    """The most memory of tensors on the GPU since `forget_peak`, GB; None without a GPU."""
    return rounded(torch.cuda.max_memory_allocated() / 1e9) if torch.cuda.is_available() else None


def forget_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def mfu(operations: float, seconds: float) -> float:
    return rounded(operations / seconds / PEAK)


def complain(case: str, error: BaseException) -> None:
    print(f"{case}: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder for models that a case writes and reads: in memory, where there is such a place."""
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)


# ------------------------------------------------------------------------------------------------ flow


@dataclass(frozen=True)
class FlowStep:
    """A batch of clips as a training step of the flow takes it."""

    inputs: tuple[Any, ...]
    """Latents on the way, times, conditions and the layout of the latents."""
    target_LD: Tensor

    def loss(self, model: torch.nn.Module) -> Tensor:
        from audiollm.flow.model.objective import velocity_loss

        velocity_LD = model(*self.inputs)
        wanted_L = torch.ones(len(velocity_LD), dtype=torch.bool, device=velocity_LD.device)
        return velocity_loss(velocity_LD, self.target_LD, wanted_L, float(len(velocity_LD)))


def flow_model(scale: Scale) -> Any:
    from audiollm.flow.model.mmdit import MMDiT, MMDiTConfig

    config = MMDiTConfig()
    if scale.tiny:
        config = replace(config, hidden_size=64, num_heads=4, multi_stream_blocks=2, single_stream_blocks=2)
    torch.manual_seed(0)
    with default_device():
        return MMDiT(config)


def flow_steps(clips: int, number: int) -> list[FlowStep]:
    """Batches with texts of real lengths and hidden modalities, as `flow.py` draws them."""
    from flow import LATENTS, real_conditions

    from audiollm.flow.model.objective import ConditionDropout, TimeDensity, hide, on_path, velocity_target
    from audiollm.flow.model.packed import pack_conditions
    from audiollm.flow.model.rows import rows_of

    device, dice, dropout = default_device(), torch.Generator().manual_seed(0), ConditionDropout()
    steps = []
    for place in range(number):
        real = [real_conditions(place * clips + clip) for clip in range(clips)]
        packed = pack_conditions(
            [hide(conditions, dropout.draw(conditions, dice)) for conditions in real], device
        )
        latents = rows_of([LATENTS] * clips, device)
        noise_LD, data_LD = (torch.randn(latents.total, 64, generator=dice).to(device) for _ in range(2))
        t_B = TimeDensity().draw([LATENTS] * clips, dice).to(device)
        x_LD = on_path(noise_LD, data_LD, t_B[latents.sample_R][:, None])
        steps.append(FlowStep((x_LD, t_B, packed, latents), velocity_target(noise_LD, data_LD)))
    return steps


@torch.no_grad()
def forward_operations(model: torch.nn.Module, inputs: tuple[Any, ...]) -> float:
    """Operations of the products of a forward pass; in float32, whose attention torch can count."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return float(counter.get_total_flops())


def flow(scale: Scale, compiled: bool = False) -> None:
    from llm_train import optimizer_step

    device, model = default_device(), flow_model(scale)
    sizes = [2] if scale.tiny else [16] if compiled else [16, 64]
    optimizer = build_optimizer(model.named_parameters(), 0.01, (0.9, 0.95))
    for place, clips in enumerate(sizes):
        steps = flow_steps(clips, 4)
        operations = 3 * statistics.mean(forward_operations(model, step.inputs) for step in steps)
        if compiled and not place:
            model.compile()  # as the training loop does
        forget_peak()

        def step(number: int, steps: Sequence[FlowStep] = steps) -> None:
            loss = partial(steps[number % len(steps)].loss, model)
            optimizer_step(loss, optimizer, "bf16", device)

        # four shapes: each is met once before it counts
        seconds = timed(step, scale.seconds / len(sizes), warm=len(steps) + 1, min_calls=len(steps))
        name = f"flow {scale.name}, {clips} clips of 9 s{', compiled' if compiled else ''}"
        more: dict[str, Any] = {"clips per second": rounded(clips / seconds), "mfu": mfu(operations, seconds)}
        more |= {"tflop per step": rounded(operations / 1e12), "peak gb": peak_gb()}
        parameters = sum(weight.numel() for weight in model.parameters())
        tell(name, "steps per second", 1 / seconds, **more, parameters=parameters)


def flow_sample(scale: Scale) -> None:
    from flow import LATENTS, STEPS, real_conditions

    from audiollm.flow.model.packed import pack_conditions
    from audiollm.flow.model.rows import rows_of
    from audiollm.flow.model.sampling import SamplerSettings, sample_latents

    device, model = default_device(), flow_model(scale).eval()
    settings = SamplerSettings(2 if scale.tiny else STEPS, guidance=4.5)
    packed, latents = pack_conditions([real_conditions(0)], device), rows_of([LATENTS], device)
    noise_LD = torch.randn(LATENTS, 64, generator=torch.Generator().manual_seed(0)).to(device)

    def sample(number: int) -> Tensor:
        return sample_latents(model, noise_LD, packed, latents, settings)

    seconds = {"fp32": timed(sample, scale.seconds / 2)}
    model.to(torch.bfloat16)
    with autocast("bf16", device):
        seconds["bf16"] = timed(sample, scale.seconds / 2)
    case = f"flow {scale.name}, 9 s of sound in {settings.steps} steps with guidance, batch 1"
    tell(case, "seconds", seconds["bf16"], fp32=rounded(seconds["fp32"]), steps=settings.steps)


CLICK_S = 9.0
CLICK_COT = (
    "First, at 1.0 seconds, a bell rings, until 2.0 seconds. Then, at 4.0 seconds, rain falls on a roof."
)


def studio_click(scale: Scale) -> None:
    import numpy as np

    from audiollm.data.records.sample import VideoPart
    from audiollm.flow.generator import SoundGenerator
    from audiollm.flow.model.sampling import SamplerSettings
    from audiollm.flow.service import SoundOrder, SoundService, default_guidance, make_ordered
    from audiollm.video.writing import write_video

    with folder_in_memory() as name:
        folder = Path(name)
        write_click_models(folder, scale)
        dice = np.random.default_rng(0)
        pictures = (dice.integers(0, 255, (240, 320, 3)).astype(np.uint8) for _ in range(round(CLICK_S * 25)))
        write_video(folder / "film.mp4", pictures, 25)
        generator = SoundGenerator.load(folder / "flow", folder / "vae")
        service = SoundService(generator)
        settings = SamplerSettings(steps=2 if scale.tiny else 24, guidance=default_guidance(generator))
        film = VideoPart(path=str(folder / "film.mp4"))
        order = SoundOrder("a bell over rain", CLICK_S, CLICK_COT, film, "film")

        def click(number: int) -> Any:
            key = f"{number}/sound"
            return service.submit(
                lambda job: make_ordered(generator, order, job.watched(settings), key)
            ).value()

        began = time.perf_counter()
        samples = click(0).samples_CN.shape[1]
        first_s = time.perf_counter() - began
        assert samples == round(CLICK_S * generator.sample_rate)
        seconds = timed(click, scale.seconds, warm=1)
        service.close()
    case = f"studio click {scale.name}, {CLICK_S:g} s of sound in {settings.steps} steps with guidance"
    tell(case, "seconds", seconds, first=rounded(first_s), steps=settings.steps)


def write_click_models(folder: Path, scale: Scale) -> None:
    """A flow model of random weights and its autoencoder, at the published shape or tiny."""
    from audiollm.autoencoder import load_autoencoder
    from audiollm.flow.model.mmdit import MMDiTConfig
    from audiollm.flow.sound_model import SoundModel, SoundModelConfig, condition_facts
    from tokenizer.continuous.model import AudioVAE, VAEConfig

    torch.manual_seed(0)
    shape, vae = MMDiTConfig(), VAEConfig()
    if scale.tiny:
        shape = replace(shape, hidden_size=64, num_heads=4, multi_stream_blocks=2, single_stream_blocks=2)
        vae = replace(vae, hidden_size=64, mel_hidden_size=64, encoder_layers=(1, 1), decoder_layers=(1, 1))
    AudioVAE(vae).save_pretrained(folder / "vae" / "model")
    words = {
        name: condition_facts(kind="words", width=width)
        for name, width in (("caption", shape.caption_dim), ("cot", shape.cot_dim))
    }
    pictures = {
        name: condition_facts(
            kind="pictures",
            made_by=f"pictures of 32 x 32 at {rate:g} per second",
            width=width,
            rate=rate,
            side=32,
        )
        for name, width, rate in (("frames", shape.frames_dim, 8.0), ("sync", shape.sync_dim, 24.0))
    }
    config = SoundModelConfig(
        "native", vars(shape), load_autoencoder(str(folder / "vae")).digest, vae.sample_rate, vae.channels,
        vae.hop_samples, words | pictures, ("�", *sorted(set(CLICK_COT.lower().split()))), 0.1, 0.1, True, CLICK_S,
    )  # fmt: skip
    SoundModel(config).save_pretrained(folder / "flow" / "model")


# ------------------------------------------------------------------------------------------------ llm


def llm_train(scale: Scale) -> None:
    import llm_train as bench

    from audiollm.families.dual_ffn.flops import training_flops
    from audiollm.families.dual_ffn.losses import TokenLosses

    device, template = default_device(), bench.speech_template()
    config = bench.shape_of("256x6" if scale.tiny else "1b", template)
    streams = bench.speech(bench.read_durations(None)[: 12 if scale.tiny else None], template)
    with device:
        model = bench.random_model(config, device)
    losses, optimizer = TokenLosses(model), build_optimizer(model.named_parameters(), 0.1, (0.9, 0.95))

    def rate(work: Callable[[int], None], groups: Sequence[Sequence[Any]]) -> tuple[float, float]:
        """Trained tokens per second, and seconds of a step, over the groups in turn."""
        seconds = timed(work, scale.seconds / 3, warm=len(groups), min_calls=len(groups))
        return statistics.mean(sum(map(len, group)) for group in groups) / seconds, seconds

    def ours_on(groups: Sequence[Sequence[Any]]) -> tuple[float, float]:
        """Tokens per second, and MFU."""
        packs = [bench.packed(group).to(device) for group in groups]

        def step(number: int) -> None:
            loss = partial(bench.loss_of, losses, packs[number % len(packs)])
            bench.optimizer_step(loss, optimizer, "bf16", device)

        tokens, seconds = rate(step, groups)
        return tokens, mfu(statistics.mean(training_flops(config, pack) for pack in packs), seconds)

    tokens_each = 1024 if scale.tiny else STEP_TOKENS
    groups = bench.in_order(streams, tokens_each)[: 2 if scale.tiny else 4]
    forget_peak()
    ours_rate, own_mfu = ours_on(groups)
    own_gb = peak_gb()
    try:
        theirs_rate, peer_gb, difference = peer_rate(bench, losses, template, groups, optimizer, rate)
    except Exception as error:  # ours stands without it
        complain("llm_train, peer", error)
        theirs_rate, peer_gb, difference = None, None, None
    more: dict[str, Any] = {
        "mfu": own_mfu,
        "peak gb": own_gb,
        "peer mfu": theirs_rate and rounded(own_mfu * theirs_rate / ours_rate),
    }
    more |= {"peer peak gb": peer_gb, "losses differ by": difference}
    case = f"llm train {scale.name}, packed against padded, {tokens_each} tokens per step"
    tell(case, "trained tokens per second", ours_rate, theirs_rate, **more)
    larger = 2048 if scale.tiny else MORE_TOKENS
    forget_peak()
    ours_rate, own_mfu = ours_on(bench.in_order(streams, larger))
    case = f"llm train {scale.name}, ours alone, {larger} tokens per step"
    more = {"mfu": own_mfu, "peak gb": peak_gb()}
    tell(case, "trained tokens per second", ours_rate, **more)


def peer_rate(
    bench: Any,
    losses: Any,
    template: Any,
    groups: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    rate: Callable[[Callable[[int], None], Any], tuple[float, float]],
) -> tuple[float, float | None, float]:
    """The peer's tokens per second on the same weights and samples, peak memory, and relative difference of losses."""
    device = default_device()
    with device:
        peer = bench.transformers_model(losses.model, template).train()
    peer.load_state_dict(losses.model.state_dict(keep_vars=True), assign=True)
    inputs = [bench.padded_inputs(group, template, device) for group in groups]
    with torch.no_grad(), autocast("bf16", device):
        ours_loss = float(bench.loss_of(losses, bench.packed(groups[0]).to(device)))
        peer_loss = float(bench.loss_of_peer(peer, inputs[0]))
    forget_peak()

    def step(number: int) -> None:
        loss = partial(bench.loss_of_peer, peer, inputs[number % len(inputs)])
        bench.optimizer_step(loss, optimizer, "bf16", device)

    tokens, _ = rate(step, groups)
    return tokens, peak_gb(), rounded(abs(ours_loss - peer_loss) / abs(peer_loss))


def llm_generate(scale: Scale) -> None:
    import llm_generate as bench

    from audiollm.data.chat.template import Template
    from audiollm.data.text import tokenizer as words
    from audiollm.generation.engine.engine import Engine

    device, frames = default_device(), 24 if scale.tiny else 100
    config = bench.SMALL if scale.tiny else bench.BILLION
    with device:
        model = bench.speaking_model(config).to(device, torch.bfloat16)
    learned = words.train_text_tokenizer(bench.TEXTS, 400)
    template = Template(learned, config.num_codebooks, config.codebook_size - 2)
    try:
        with device:
            peer = bench.transformers_model(model, template)
    except Exception as error:
        complain("llm_generate, peer", error)
        peer = None
    for batch in (1, 8):
        requests = [bench.request(text, frames) for text in bench.TEXTS[:batch]]
        engine = Engine.sized_for(model, template, requests)

        def ours(number: int, engine: Any = engine, requests: Any = requests) -> Any:
            return engine.run(requests)

        ours_rate = batch * frames / timed(ours, scale.seconds / 6, warm=1, min_calls=2)
        theirs_rate = None
        if peer is not None:
            theirs = partial(peer_generates, peer, template, requests, frames)
            theirs_rate = batch * frames / timed(theirs, scale.seconds / 6, warm=1, min_calls=2)
        case = f"llm generate {scale.name}, batch {batch}"
        tell(case, "audio frames per second", ours_rate, theirs_rate, frames=frames)
    first = bench.first_sound(model, template, 2 if scale.tiny else 5)
    case = f"llm generate {scale.name}, first audio"
    more: dict[str, Any] = {"first frame ms": first["first frame ms"]}
    tell(case, "ms", first["first sound ms"], **more)


def peer_generates(peer: Any, template: Any, requests: Any, frames: int, number: int) -> Any:
    import llm_generate as bench

    return bench.generate(peer, template, requests, frames)


# ------------------------------------------------------------------------------------------------ interpret


def interpret(scale: Scale, speaks: bool) -> None:
    import interpret as bench

    device = default_device()
    shape = bench.SMALL if scale.tiny else bench.Shape(2048, 16)
    with device:
        model, template = bench.interpreter(shape, speaks)
    model.to(torch.bfloat16)
    chunk_s = bench.CHUNK_FRAMES / bench.FRAME_RATE
    name = f"interpret {'speech' if speaks else 'text'} {scale.name}"
    max_streams, ended = 0, "all were tried"
    began = time.perf_counter()
    for streams in (1, 2) if scale.tiny else STREAMS:
        try:
            slowest, median = bench.device_chunks(model, template, streams, device, speaks)
        except torch.OutOfMemoryError as error:
            complain(f"{name}, {streams} streams", error)
            ended = "out of memory"
            break
        more: dict[str, Any] = {
            "slowest": rounded(slowest),
            "real-time factor": rounded(median / chunk_s),
            "peak gb": peak_gb(),
        }
        tell(f"{name}, {streams} streams", f"s per chunk of {chunk_s} s", median, **more)
        forget_peak()
        if slowest > chunk_s:
            ended = f"{streams} are too slow"
            break
        max_streams = streams
        if time.perf_counter() - began > scale.seconds:
            ended = "no time for more"
            break
    tell(f"{name}, real-time streams", "streams", max_streams, ended=ended)


# ------------------------------------------------------------------------------------------------ dpo


def dpo(scale: Scale) -> None:
    import datasets
    import dpo as bench
    import transformers

    from audiollm.families.dual_ffn.flops import training_flops

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    device = default_device()
    setting = bench.Setting(device=device, precision="bf16")
    shape = bench.Shape(2048, 8192, 16, 32)
    max_tokens = bench.MAX_TOKENS
    if scale.tiny:
        shape, max_tokens = bench.Shape(32, 64, 1, 2), 48
    with folder_in_memory() as name:
        folder, case = Path(name), "long tail"
        bench.write_models(folder, shape, with_audio=False, device=device)
        (folder / case).mkdir()
        records = folder / case / "records.jsonl"
        bench.write_records(records, bench.long_tail(2 * bench.PAIRS, max_tokens))
        policy = bench.policy_of(folder, "ours")
        rows = bench.rows_for_trl(folder, policy, records)
        forget_peak()
        side = bench.Ours(policy, records, setting)
        losses = [side.step().loss]
        seconds = timed(partial(one_step, side.step), scale.seconds / 2, warm=1)
        packs = [micro.batch.pack for micro in side.step.batch.micro]
        root: Any = policy.root
        operations = 4 / 3 * sum(training_flops(root.model.config, pack) for pack in packs)
        tokens, own_gb = sum(len(pack.row_of_S) for pack in packs), peak_gb()
        del side, policy, packs, root
        forget_peak()
        try:
            theirs, loss = peer_dpo(bench, folder, case, rows, setting, scale.seconds / 2)
            losses.append(loss)
            peer_gb = peak_gb()
        except Exception as error:
            complain("dpo, peer", error)
            theirs, peer_gb = None, None
    more: dict[str, Any] = {"mfu": mfu(operations, seconds), "seconds per step": rounded(seconds)}
    more |= {"peer seconds per step": theirs and rounded(theirs), "peak gb": own_gb, "peer peak gb": peer_gb}
    more |= {"first loss": [rounded(value) for value in losses], "tokens per step": tokens}
    title = f"dpo {scale.name}, {bench.PAIRS} pairs, long tail"
    tell(title, "tokens per second", tokens / seconds, theirs and tokens / theirs, **more)
    if own_gb and peer_gb:
        tell(f"{title}, memory", "GB at the peak", own_gb, peer_gb, less=True)


def one_step(step: Callable[[], Any], number: int) -> None:
    step()


def peer_dpo(
    bench: Any, folder: Path, case: str, rows: Sequence[dict[str, str]], setting: Any, seconds: float
) -> tuple[float, float]:
    """Median seconds of a step of TRL's trainer, and the loss of its first."""
    peer = bench.peer_of(folder, case, rows, 40, setting)
    ends: list[float] = []

    class Enough(Exception):
        """The time is over."""

    def between() -> None:
        synchronize()
        ends.append(time.perf_counter())
        if len(ends) >= 5 and ends[-1] - ends[1] > seconds:
            raise Enough

    peer.between = between
    with suppress(Enough):
        peer.train()
    return statistics.median(b - a for a, b in pairwise(ends[1:])), peer.steps_taken[0].loss


# ------------------------------------------------------------------------------------------------ grpo


def grpo(scale: Scale) -> None:
    import grpo as bench

    from audiollm.families.dual_ffn.flops import encoder_flops, training_flops
    from audiollm.models.audio_encoder import AudioEncoderConfig

    seconds_heard, prompts, new = (2, 2, 8) if scale.tiny else (10, 4, 256)
    shape = bench.Shape(64, 2, 512)
    if not scale.tiny:
        encoder = AudioEncoderConfig(
            768, 12, 12, 3072, max_source_positions=50 * seconds_heard
        )  # the shape of Whisper small, 25 rows/s
        shape = bench.Shape(2048, 16, 32_768, 32, 0.002, encoder)
    bench.SECONDS_HEARD = seconds_heard
    with folder_in_memory() as name:
        folder = Path(name) / "grpo"
        bench.write_models(folder, shape, hearing_alone=True, device=default_device())
        settings = {"batch_size": prompts, "max_answer_tokens": new, "max_tokens": MORE_TOKENS}
        step = bench.steps_of(folder, "hearing", "audio", settings, "bf16")
        forget_peak()
        phase_seconds: list[dict[str, float]] = []

        def take_step(number: int) -> None:
            step()
            phase_seconds.append(step.seconds)

        seconds = timed(take_step, scale.seconds, warm=1)
        packs = [micro.batch.pack for micro in step.batch.packs]
        generated = sum(rollout.tokens.num_actions for rollout in step.batch.rollout_step.rollouts)
    phases = {key: statistics.median(row[key] for row in phase_seconds[1:]) for key in phase_seconds[0]}
    root: Any = step.modules["policy"]
    config = root.model.config
    assert config.audio_encoder is not None
    operations = sum(training_flops(config, pack) for pack in packs)
    operations += sum(
        encoder_flops(config.audio_encoder, config.hidden_size, pack.features, trained=True)
        for pack in packs
        if pack.features is not None
    )
    trained = sum(len(pack.positions_S) for pack in packs)
    case = f"grpo {scale.name}, {prompts} x {bench.GROUP} answers of {new} tokens, {seconds_heard} s heard"
    tell(f"{case}, rollout", "generated tokens per second", generated / phases["batch"])
    tell(f"{case}, scoring", "tokens per second", trained / phases["score"])
    tell(f"{case}, update", "tokens per second", trained / phases["update"])
    both = phases["score"] + phases["update"]
    more: dict[str, Any] = {"mfu of scoring and update": mfu(4 / 3 * operations, both), "peak gb": peak_gb()}
    more |= {f"seconds {key}": rounded(value) for key, value in phases.items()}
    tell(case, "seconds per step", seconds, **more, tokens=trained, generated=generated)


CASES: dict[str, Callable[[Scale], None]] = {
    "flow": flow,
    "flow_sample": flow_sample,
    "studio_click": studio_click,
    "llm_train": llm_train,
    "llm_generate": llm_generate,
    "interpret_text": partial(interpret, speaks=False),
    "interpret_speech": partial(interpret, speaks=True),
    "dpo": dpo,
    "grpo": grpo,
    "flow_compiled": partial(flow, compiled=True),
}


if __name__ == "__main__":
    main()
