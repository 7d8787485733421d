"""Steps of DPO and of GRPO, against TRL's trainers where TRL is installed."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import transformers
from gpu_cases.measuring import (
    Scale,
    forget_peak,
    mfu,
    peak_gb,
    rounded,
    synchronize,
    tell,
    timed,
    try_option,
)

from audiollm.devices import default_device
from audiollm.families.dual_ffn.flops import training_flops
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.encoder_flops import encoder_flops

MAX_PEER_STEPS = 40
MAX_TOKENS = 16_384
"""Positions of a pack of the update of GRPO."""


def peer_step_s(peer: Any, seconds: float, steps: int) -> float:
    """Median seconds of a step of TRL's trainer, its first left out.

    Args:
        seconds: time for the steps that count.
        steps: least number of these.
    """
    ends: list[float] = []

    class Enough(Exception):
        """The time is over."""

    def between() -> None:
        synchronize()
        ends.append(time.perf_counter())
        if len(ends) > steps and ends[-1] - ends[0] > seconds:
            raise Enough

    peer.between = between
    with suppress(Enough):
        peer.train()
    return statistics.median(b - a for a, b in pairwise(ends))


# ------------------------------------------------------------------------------------------------ DPO


def dpo(scale: Scale) -> None:
    """Pairs with long-tailed lengths; both sides compute activations again, as TRL does by default."""
    import dpo as bench

    transformers.utils.logging.disable_progress_bar()
    setting = bench.Setting(device=default_device(), precision="bf16")
    shape = bench.Shape(2048, 8192, 16, 32)
    pairs = bench.PAIRS
    if scale.tiny:
        shape, pairs = bench.Shape(32, 64, 1, 2), 4
    with tempfile.TemporaryDirectory() as name:
        folder, case = Path(name), "long tail"
        bench.write_models(folder, shape, with_audio=False, device=default_device())
        (folder / case).mkdir()
        records = folder / case / "records.jsonl"
        bench.write_records(
            records, [40, 24] * pairs if scale.tiny else bench.long_tail(2 * pairs, bench.MAX_TOKENS)
        )
        policy = bench.policy_of(folder, "ours")
        rows = bench.rows_for_trl(folder, policy, records)
        forget_peak()
        side = bench.Ours(policy, records, setting)
        seconds = timed(drop_number(side.step), scale.seconds(8), warm=2, min_calls=1 if scale.tiny else 3)
        packs = [micro.batch.pack for micro in side.step.batch.micro]
        root: Any = policy.root
        operations = 4 / 3 * sum(training_flops(root.model.config, pack) for pack in packs)
        tokens, ours_gb = sum(len(pack.row_of_S) for pack in packs), peak_gb()
        del side, policy, packs, root
        forget_peak()
        title = f"dpo {scale.name}, {pairs} pairs, long tail"
        more: dict[str, Any] = {"s_per_step": rounded(seconds), "tokens_per_step": tokens}
        rate, unit = tokens / seconds, "tokens per second"
        tell(title, unit, rate, mfu=mfu(operations, seconds), peak_gb=ours_gb, **more)

        def compare() -> None:
            peer = bench.peer_of(folder, case, rows, 3 if scale.tiny else MAX_PEER_STEPS, setting)
            peer_s = peer_step_s(peer, scale.seconds(12), 2)
            more: dict[str, Any] = {"peer_mfu": mfu(operations, peer_s), "peer_peak_gb": peak_gb()}
            more["peer_s_per_step"] = rounded(peer_s)
            tell(f"{title}, against TRL", unit, rate, tokens / peer_s, **more)

        try_option(scale, f"{title}, peer", compare)


def drop_number(step: Callable[[], Any]) -> Callable[[int], Any]:
    """Return the step as `timed` calls it."""
    return lambda number: step()


# ------------------------------------------------------------------------------------------------ GRPO


def grpo(scale: Scale) -> None:
    """Prompts in text, and the same step of TRL's trainer."""
    import grpo as bench

    transformers.utils.logging.disable_progress_bar()
    prompts, new = prompts_and_tokens(scale)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "grpo"
        bench.write_models(folder, shape_of(scale), {"dual_ffn"}, device=default_device())
        case = f"grpo {scale.name}, {prompts} x {bench.GROUP} answers of {new} tokens"
        seconds, generated = measure_steps(scale, case, folder, "ours", "text")

        def compare() -> None:
            config = {
                "per_device_train_batch_size": prompts * bench.GROUP,
                "max_completion_length": new,
                "bf16": True,
                "use_cpu": default_device().type == "cpu",
            }
            peer = bench.peer_of(
                folder, 3 if scale.tiny else MAX_PEER_STEPS, policies=("dual_ffn",), **config
            )
            peer_s = peer_step_s(peer, scale.seconds(12), 1)
            more = {"peer_peak_gb": peak_gb(), "generated": generated, "peer_generated": peer.generated[-1]}
            tell(f"{case}, against TRL", "seconds per step", seconds, peer_s, less=True, **more)

        try_option(scale, f"{case}, peer", compare)


def grpo_audio(scale: Scale) -> None:
    """Prompts with 10 s of sound, through an encoder of the shape of Whisper small."""
    import grpo as bench

    prompts, new = prompts_and_tokens(scale)
    bench.SECONDS_HEARD = 2 if scale.tiny else 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "grpo"
        bench.write_models(folder, shape_of(scale), {"hearing"}, device=default_device())
        case = f"grpo {scale.name}, {prompts} x {bench.GROUP} answers of {new} tokens, {bench.SECONDS_HEARD} s heard"
        measure_steps(scale, case, folder, "hearing", "audio")


def prompts_and_tokens(scale: Scale) -> tuple[int, int]:
    """Prompts of a step, and tokens of an answer."""
    return (2, 8) if scale.tiny else (4, 256)


def shape_of(scale: Scale) -> Any:
    import grpo as bench

    if scale.tiny:
        return bench.Shape(64, 2, 512)
    encoder = AudioEncoderConfig(768, 12, 12, 3072, max_source_positions=500)  # 10 s, 25 rows per second
    return bench.Shape(2048, 16, 32_768, 32, 0.002, encoder)


def measure_steps(scale: Scale, case: str, folder: Path, kind: str, prompts: str) -> tuple[float, int]:
    """Print tokens per second by phase; returns seconds of a step, and the tokens that it generates."""
    import grpo as bench

    batch_size, new = prompts_and_tokens(scale)
    settings = {"batch_size": batch_size, "max_answer_tokens": new, "max_tokens": MAX_TOKENS}
    step = bench.steps_of(folder, kind, prompts, settings, "bf16")
    forget_peak()
    phase_seconds: list[dict[str, float]] = []

    def take_step(number: int) -> None:
        step()
        phase_seconds.append(step.seconds)

    seconds = timed(take_step, scale.seconds(15), warm=1, min_calls=1)
    packs = [micro.batch.pack for micro in step.batch.packs]
    generated = sum(rollout.tokens.num_actions for rollout in step.batch.rollout_step.rollouts)
    phases = {key: statistics.median(row[key] for row in phase_seconds[1:]) for key in phase_seconds[0]}
    operations = step_operations(step.modules["policy"], packs)
    trained = sum(len(pack.positions_S) for pack in packs)
    both = phases["score"] + phases["update"]
    tell(f"{case}, rollout", "generated tokens per second", generated / phases["batch"])
    tell(f"{case}, scoring", "tokens per second", trained / phases["score"])
    tell(f"{case}, update", "tokens per second", trained / phases["update"])
    more: dict[str, Any] = {"mfu_of_scoring_and_update": mfu(operations, both), "peak_gb": peak_gb()}
    more |= {f"s_of_{key}": rounded(value) for key, value in phases.items()}
    tell(case, "seconds per step", seconds, **more, tokens=trained, generated=generated)
    return seconds, generated


def step_operations(root: Any, packs: Sequence[Any]) -> float:
    """Operations of the update, and of the reference's pass over the same packs."""
    config = root.model.config
    operations = sum(training_flops(config, pack) for pack in packs)
    if config.audio_encoder is not None:
        count = partial(encoder_flops, config.audio_encoder, config.hidden_size, trained=True)
        operations += sum(count(pack.features) for pack in packs if pack.features is not None)
    return 4 / 3 * operations
