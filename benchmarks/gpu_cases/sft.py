"""Supervised training: the 1 B DualFFN on packs, an adapter on the 3 B one, and what options make of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import llm_train as bench
import torch
from gpu_cases.measuring import (
    Scale,
    compile_backend,
    compiled_graphs,
    forget_peak,
    mfu,
    peak_gb,
    rate_of,
    tell,
    try_option,
)
from llm_generate import BILLION

from audiollm.data.chat.template import TokenStream
from audiollm.data.packing import PackedBatch
from audiollm.devices import default_device
from audiollm.families.dual_ffn.adapting import adapt
from audiollm.families.dual_ffn.flops import training_flops
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.models.attention import BackendName, attention_backend
from audiollm.models.decoder import DualFFNConfig
from audiollm.supervised.corpus.batches import StepBatch
from audiollm.train.loop.optim import autocast, build_optimizer, parameter_groups
from audiollm.train.settings import LoRASettings

STEP_TOKENS, MORE_TOKENS = 4096, 16_384
"""Positions of a step: beside the peer, which pads and computes all logits; and of the stage `train` at size 1b."""
TINY = DualFFNConfig(
    vocab_size=512,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=64,
)
THREE_BILLION = DualFFNConfig(
    vocab_size=128_256, hidden_size=3072, num_layers=28, num_heads=24, num_kv_heads=8, head_dim=128,
    intermediate_size=8192,
)  # fmt: skip
"""Llama 3.2 3B, with a feed-forward for audio beside each of its own."""
MAX_LOSS_DIFFERENCE = 0.01
"""Largest relative difference of the losses of both sides, in bf16."""
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.95)
BACKENDS: tuple[BackendName, ...] = ("flash_attn", "varlen", "sdpa")
TOKENS_PER_SECOND = "trained tokens per second"


@dataclass
class Training:
    """A model on the device, its optimizer, and samples in groups of a step's size."""

    losses: TokenLosses
    optimizer: torch.optim.Optimizer
    groups: Sequence[Sequence[TokenStream]]
    seconds: float
    """Seconds of a measurement."""
    trained_share: float = 1.0
    """Operations of a step, as a share of those where every weight is trained."""

    def __post_init__(self) -> None:
        self.host_packs: list[PackedBatch] = [bench.packed(group) for group in self.groups]
        self.packs = [pack.to(default_device()) for pack in self.host_packs]
        self.tokens = statistics.mean(sum(map(len, group)) for group in self.groups)
        """Positions of samples in a step, on average."""

    def rate(self, loss_of: Callable[[int], Callable[[], torch.Tensor]] | None = None) -> float:
        """Return trained tokens per second, over the groups in turn.

        Args:
            loss_of: the number of a step to its loss; None: ours on packs that are on the device.
        """

        def step(number: int) -> None:
            place = number % len(self.groups)
            ours = partial(bench.loss_of, self.losses, self.packs[place])
            loss = ours if loss_of is None else loss_of(place)
            bench.optimizer_step(loss, self.optimizer, "bf16", default_device())

        return self.tokens / rate_of(step, self.seconds, warm=len(self.groups), calls=len(self.groups))

    def mfu(self, rate: float) -> float:
        """Return the MFU at a number of tokens per second."""
        operations = statistics.mean(training_flops(self.losses.model.config, pack) for pack in self.packs)
        return mfu(self.trained_share * operations, self.tokens / rate)

    def tell(self, case: str, rate: float, **more: Any) -> None:
        tell(case, TOKENS_PER_SECOND, rate, mfu=self.mfu(rate), peak_gb=peak_gb(), **more)


def sft(scale: Scale) -> None:
    """Packs against the peer's padded batches; more tokens a step; options; LoRA."""
    training, template, streams = begin(scale, TINY if scale.tiny else BILLION)
    size = f"sft {scale.name}"
    forget_peak()
    rate = training.rate()
    training.tell(f"{size}, {step_tokens(scale)} tokens per step", rate)
    try_option(scale, f"{size}, peer", partial(compare_padded, size, training, template, rate, train_peer_of))
    larger = begin_larger(scale, training, streams)
    compare_options(scale, size, larger)
    del training, larger
    forget_peak()
    try_option(scale, f"sft lora {lora_name(scale)}", partial(lora, scale))


def sft_compiled(scale: Scale) -> None:
    """A step through `torch.compile`, as the setting `compile` has it, beside the same step without.

    Of one pack: packs of other sizes take some more graphs, each as long to make as the first.
    """
    training, _, streams = begin(scale, TINY if scale.tiny else BILLION)
    larger = begin_larger(scale, training, streams, groups=1)
    forget_peak()
    plain = larger.rate()
    larger.tell(f"sft {scale.name}, not compiled", plain)
    larger.losses.compile(backend=compile_backend(scale))  # as the training loop does
    forget_peak()
    rate = larger.rate()
    larger.tell(f"sft {scale.name}, compiled", rate, plain=plain, graphs=compiled_graphs())


def begin(scale: Scale, config: DualFFNConfig) -> tuple[Training, Any, list[TokenStream]]:
    """A new model at a step of the smaller size, the template, and all samples."""
    device, template = default_device(), bench.speech_template()
    streams = bench.speech(bench.read_durations(None)[: 16 if scale.tiny else None], template)
    words = max(config.vocab_size, template.tokenizer.get_vocab_size())
    with device:
        model = bench.random_model(replace(config, vocab_size=words), device)
    losses = TokenLosses(model)
    optimizer = build_optimizer(model.named_parameters(), WEIGHT_DECAY, BETAS)
    groups = bench.in_order(streams, step_tokens(scale))[: 2 if scale.tiny else 4]
    return Training(losses, optimizer, groups, scale.seconds(5)), template, streams


def begin_larger(
    scale: Scale, training: Training, streams: Sequence[TokenStream], groups: int = 2
) -> Training:
    """The same model at a step of the larger size, on so many groups of samples."""
    steps = bench.in_order(streams, 2 * step_tokens(scale) if scale.tiny else MORE_TOKENS)
    return Training(training.losses, training.optimizer, steps[:groups], scale.seconds(4))


def step_tokens(scale: Scale) -> int:
    return 512 if scale.tiny else STEP_TOKENS


# ------------------------------------------------------------------------------------------------ the peer


def train_peer_of(training: Training, template: Any) -> torch.nn.Module:
    """transformers' Higgs Audio V2 with the weights of ours."""
    with default_device():
        peer = bench.transformers_model(training.losses.model, template).train()
    peer.load_state_dict(training.losses.model.state_dict(keep_vars=True), assign=True)
    with torch.no_grad(), autocast("bf16", default_device()):
        loss = float(bench.loss_of(training.losses, training.packs[0]))
        inputs = bench.padded_inputs(training.groups[0], template, default_device())
        peer_loss = float(bench.loss_of_peer(peer, inputs))
    if not abs(loss / peer_loss - 1) < MAX_LOSS_DIFFERENCE:
        raise ValueError(f"the peer's loss is {peer_loss:g}, and ours {loss:g}")
    trained: torch.nn.Module = peer
    return trained


def compare_padded(
    case: str,
    training: Training,
    template: Any,
    ours_rate: float,
    make_peer: Callable[[Training, Any], torch.nn.Module],
) -> None:
    """The same samples in padded batches through the peer."""
    device, peer = default_device(), make_peer(training, template)
    inputs = [bench.padded_inputs(group, template, device) for group in training.groups]
    forget_peak()
    rate = training.rate(lambda place: partial(bench.loss_of_peer, peer, inputs[place]))
    more: dict[str, Any] = {"mfu": training.mfu(ours_rate), "peer_mfu": training.mfu(rate)}
    tell(f"{case}, packed against padded", TOKENS_PER_SECOND, ours_rate, rate, **more, peer_peak_gb=peak_gb())


# ------------------------------------------------------------------------------------------------ options


def compare_options(scale: Scale, size: str, training: Training) -> None:
    """Attention kernels, AdamW, and batches from pinned memory, each against the way that the product takes."""
    forget_peak()
    plain = training.rate()
    tokens = round(training.tokens)
    model = training.losses.model
    weight = torch.bfloat16 if default_device().type == "cuda" else torch.float32
    auto = attention_backend(default_device(), weight, model.config.head_dim).name
    training.tell(f"{size}, {tokens} tokens per step, attention {auto}", plain)
    for name in BACKENDS:
        if name != auto:
            try_option(
                scale, f"{size}, attention {name}", partial(with_attention, size, training, name, plain)
            )
    try_option(scale, f"{size}, adamw foreach", partial(with_plain_adamw, size, training, plain))
    try_option(scale, f"{size}, pinned", partial(from_host, size, training))


def with_attention(size: str, training: Training, name: BackendName, plain: float) -> None:
    model = training.losses.model
    model.attention = name
    try:
        training.tell(f"{size}, attention {name}", training.rate(), plain=plain)
    finally:
        model.attention = "auto"


def with_plain_adamw(size: str, training: Training, plain: float) -> None:
    """AdamW over lists of tensors, in place of the fused one that the product always takes."""
    fused = training.optimizer
    groups = parameter_groups(training.losses.model.named_parameters(), WEIGHT_DECAY)
    for group in groups:
        del group["muon"], group["rate_factor"]
    training.optimizer = torch.optim.AdamW(groups, betas=BETAS, foreach=True)
    try:
        training.tell(f"{size}, adamw foreach", training.rate(), plain=plain)
    finally:
        training.optimizer = fused


def from_host(size: str, training: Training) -> None:
    """Batches that are copied from the host at each step: as they come, and from pinned memory (`pin_memory`)."""
    device = default_device()

    def rate(packs: Sequence[PackedBatch]) -> float:
        def loss(place: int) -> torch.Tensor:
            return bench.loss_of(training.losses, packs[place].to(device))

        return training.rate(lambda place: partial(loss, place))

    plain = rate(training.host_packs)
    if device.type != "cuda":
        raise ValueError("pinned memory needs a CUDA device")
    pinned = rate(StepBatch(training.host_packs).pin_memory().packs)
    training.tell(f"{size}, batches from pinned memory", pinned, plain=plain)


# ------------------------------------------------------------------------------------------------ LoRA


def lora_name(scale: Scale) -> str:
    return "tiny" if scale.tiny else "3b"


def lora(scale: Scale) -> None:
    """An adapter on a model whose other weights stay: two thirds of the operations of a full step."""
    training, template, _ = begin(scale, TINY if scale.tiny else THREE_BILLION)
    training.trained_share = 2 / 3
    model, settings = training.losses.model, LoRASettings()
    peer: list[torch.nn.Module] = []
    case = f"sft lora {lora_name(scale)}"
    try_option(scale, f"{case}, peer", lambda: peer.append(train_peer_of(training, template)))
    adapt(model, "adapter", settings)
    training.optimizer = build_optimizer(model.named_parameters(), WEIGHT_DECAY, BETAS)
    forget_peak()
    rate = training.rate()
    training.tell(f"{case}, rank {settings.rank}", rate)

    def adapted_peer(training: Training, template: Any) -> torch.nn.Module:
        adapted = adapt(peer[0], "adapter", settings)
        training.optimizer = build_optimizer(peer[0].named_parameters(), WEIGHT_DECAY, BETAS)
        return adapted

    if peer:
        try_option(
            scale, f"{case}, peer", partial(compare_padded, case, training, template, rate, adapted_peer)
        )
