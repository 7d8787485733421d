"""The tokenizer: seconds of sound per second that are encoded, decoded and trained on; Mimi beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tokenizer_speed as bench
import torch
from gpu_cases.measuring import (
    Scale,
    forget_peak,
    mfu,
    peak_gb,
    rate_of,
    rounded,
    synchronize,
    tell,
    timed,
    try_option,
)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from audiollm.audio import save
from audiollm.devices import default_device
from audiollm.train.loop.optim import autocast, build_optimizer
from tokenizer.clips import Clip, ClipStore
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.training.discriminators import TINY, DiscriminatorConfig
from tokenizer.training.settings import SIZES
from tokenizer.training.task import TokenizerTask, TokenizerTaskConfig

CLIPS, CLIP_S = 16, 10.0
"""Clips that are encoded together, and their length."""
CROP_FRAMES, TRAINED_CLIPS = 24, 32
"""Frames of 40 ms of a training crop, by default; recordings that crops are drawn from."""
STEPS = 1000
"""Steps of the training whose middle is measured: codebooks are there, and the adversary is."""
UNIT = "seconds of sound per second"


def codec(scale: Scale) -> None:
    """Encoding and decoding in float32, as the stages do it; Mimi; training steps of the stage."""
    device, model = default_device(), new_tokenizer(scale)
    clips, length = (2, 1.0) if scale.tiny else (CLIPS, CLIP_S)
    audio = bench.speech_like(clips, round(length * bench.SAMPLE_RATE)).to(device)
    mask_BT = torch.ones(clips, round(length * bench.SAMPLE_RATE) // model.hop_samples, device=device).bool()
    codes_BKT = model.encode_batch(audio[:, 0])[0]
    rates = {}
    name, title = f"codec {scale.name}", f"{clips} clips of {length:g} s"
    works: dict[str, Callable[[], Any]] = {
        "encode": lambda: model.encode_batch(audio[:, 0]),
        "decode": lambda: model.decode_batch(codes_BKT, mask_BT),
    }
    for work, call in works.items():
        forget_peak()
        operations = count_operations(call)
        seconds = timed(drop_number(call), scale.seconds(4), warm=1, min_calls=1 if scale.tiny else 3)
        rates[work] = clips * length / seconds
        more: dict[str, Any] = {"mfu": mfu(operations, seconds), "peak_gb": peak_gb()}
        tell(f"{name}, {work}, {title}", UNIT, rates[work], **more)
    try_option(scale, f"{name}, train", partial(train, scale, model))
    try_option(scale, f"{name}, Mimi", partial(compare, scale, f"{name}, {title}", audio, rates))


def drop_number(work: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda number: work()


def new_tokenizer(scale: Scale) -> AudioTokenizer:
    """The native tokenizer of size 1b, of random weights."""
    rule = SIZES["1b"]
    config = TokenizerConfig(
        mel_hidden_size=rule.mel_hidden_size, hidden_size=rule.hidden_size, encoder_layers=rule.blocks[:2],
        decoder_layers=rule.blocks[2:], harmonic_source=True, linear_path=True,
    )  # fmt: skip
    if scale.tiny:
        config = replace(
            config, mel_hidden_size=16, hidden_size=24, encoder_layers=(1, 1), decoder_layers=(1, 1)
        )
    torch.manual_seed(0)
    with default_device():
        return AudioTokenizer(config).eval().to(default_device())


@torch.no_grad()
def count_operations(work: Callable[[], Any]) -> float:
    """Operations of products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        work()
    synchronize()
    return float(counter.get_total_flops())


def compare(scale: Scale, case: str, audio: Tensor, rates: dict[str, float]) -> None:
    """Mimi, whose clips go through as a batch; both sides 8 codebooks."""
    from transformers import MimiConfig, MimiModel

    with default_device():
        peer = MimiModel(MimiConfig()).eval()
    with torch.inference_mode():
        codes = peer.encode(audio, num_quantizers=8).audio_codes
        works: dict[str, Callable[[], Any]] = {
            "encode": lambda: peer.encode(audio, num_quantizers=8),
            "decode": lambda: peer.decode(codes),
        }
        for work, call in works.items():
            forget_peak()
            seconds = timed(drop_number(call), scale.seconds(4), warm=1, min_calls=1 if scale.tiny else 3)
            rate = audio.shape[0] * audio.shape[2] / bench.SAMPLE_RATE / seconds
            tell(f"{case}, {work}, against Mimi", UNIT, rates[work], rate, peer_peak_gb=peak_gb())


# ------------------------------------------------------------------------------------------------ training


def train(scale: Scale, model: AudioTokenizer) -> None:
    """Steps of `train_tokenizer` in bf16, its adversary with them, without a teacher."""
    batch_size = 2 if scale.tiny else SIZES["1b"].batch_size
    frames = 4 if scale.tiny else CROP_FRAMES
    adversary = replace(TINY, channels=4, max_channels=8) if scale.tiny else DiscriminatorConfig()
    config = TokenizerTaskConfig(
        seed=0, batch_size=batch_size, crop_frames=frames, trained_codebooks=True, adversary_share=0.0,
        pitch_weight=1.0, discriminators=adversary,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        store = write_clips(Path(folder), 2 if scale.tiny else TRAINED_CLIPS)
        task = TokenizerTask(model.train(), store, store, config)
        steps = CodecSteps(task)
        forget_peak()
        begin = STEPS // 2 + 1  # no step of those that revive codes
        seconds = rate_of(
            lambda number: steps(begin + number % 9),
            scale.seconds(8),
            warm=1 if scale.tiny else 4,
            calls=1 if scale.tiny else 9,
        )
        batches = timed(
            lambda number: task.batch(begin + number, torch.Generator()), 0.0, warm=0, min_calls=1
        )
    sound_s = batch_size * frames * model.hop_samples / model.sample_rate
    parameters = sum(weight.numel() for weight in model.parameters())
    more: dict[str, Any] = {"s_per_step": rounded(seconds), "s_of_batch": rounded(batches)}
    more |= {"peak_gb": peak_gb(), "parameters": parameters}
    title = f"codec {scale.name}, train, {batch_size} crops of {frames / 25:g} s, with the adversary"
    tell(title, UNIT, sound_s / seconds, **more)


def write_clips(folder: Path, count: int) -> ClipStore:
    seconds = 4.0
    audio = bench.speech_like(count, round(seconds * bench.SAMPLE_RATE))
    for number, samples_1N in enumerate(audio):
        save(folder / f"{number:03}.wav", samples_1N, bench.SAMPLE_RATE)
    return ClipStore([Clip(path, 0.0, seconds) for path in sorted(folder.glob("*.wav"))], bench.SAMPLE_RATE)


class CodecSteps:
    """Steps of the tokenizer and of its discriminators, as the training loop takes them."""

    def __init__(self, task: TokenizerTask) -> None:
        self._task, modules = task, task.modules()
        task.adopt(modules)
        self._optimizers = {
            name: build_optimizer(named_parameters(modules, members), 0.0, (0.8, 0.98))
            for name, members in task.optimizers().items()
        }

    def __call__(self, step: int) -> None:
        device = default_device()
        batch = self._task.batch(step, torch.Generator())
        updates = self._task.updates(batch, step, STEPS)
        while True:
            with autocast("bf16", device):
                update = next(updates, None)
            if update is None:
                return
            optimizer = self._optimizers[update.optimizer]
            optimizer.zero_grad(set_to_none=True)
            assert isinstance(update.loss, Tensor)
            update.loss.backward()
            for group in optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 1.0)
                group["lr"] = 1e-4
            optimizer.step()


def named_parameters(modules: dict[str, nn.Module], names: list[str]) -> list[tuple[str, nn.Parameter]]:
    return [(f"{name}.{key}", p) for name in names for key, p in modules[name].named_parameters()]
