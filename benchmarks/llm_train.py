"""Trained tokens per CPU-second: our DualFFN on packs, against transformers' Higgs Audio V2 on padded batches.

    OMP_WAIT_POLICY=passive python benchmarks/llm_train.py --data DATA [--full] [--sizes 256x6] [--steps 1]

The same weights (one set of tensors, which both sides train in turn with one AdamW and one clipping), the same samples
and labels, at most 4,096 positions of samples to an optimizer step. Before anything is timed, the losses of both
sides on every step and the norms of their gradients on the first are compared: a relative difference above 1e-4 in
float32 ends the benchmark with exit code 1. A trained token is a position of a sample; padding counts for nothing.

    packed against padded    both take the samples in the same shuffled order, and the peer pads each step's
    packed against sorted    the peer's batches are of samples of similar length: little padding, as training on
                             shuffled data cannot have it, so that this is what the model and its loss make of it
    sorted against padded    the peer against itself: what is left for packing

Lengths are those of the read speech of DATA (LibriSpeech, LJ Speech and others, 1 to 30 s), each recording once, 25
frames a second, as the template lays them out, with 15 characters of text a second; codes are random, what they are
costs nothing. Without DATA, lengths are drawn: log-normal, median 5.3 s, deviation 0.5, 1 to 30 s, which is close to
them. The vocabulary is small (1,024), which spares the peer: it computes text logits at every position.

`ratio` is by the CPU time of the process, `clock ratio` by the clock; the ways take turns in one process, and the
median over the rounds counts. Threads that wait must sleep (`OMP_WAIT_POLICY`; make sets it): otherwise they count as
working and, with others on the machine, take most of the time, of both sides. bf16 is autocast's, for both. On a GPU,
`--device cuda --sizes 1b --precisions bf16`: rates are by the clock, with the share of the peak (the model FLOPs of
our step, without padding, for both).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from llm_generate import BILLION, SMALL, WIDE, transformers_model
from measure import bench_parser, parse_options
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from audiollm.audio import AudioError, probe
from audiollm.codec import FRAME_RATE
from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, Template, TokenStream
from audiollm.data.packing import PackedBatch, pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text import tokenizer as tokens
from audiollm.families.dual_ffn.flops import training_flops
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.supervised.corpus.batches import ROWS_MULTIPLE
from audiollm.train.loop.monitor import peak_flops
from audiollm.train.loop.optim import autocast, build_optimizer
from audiollm.train.settings import Precision

SHAPES: Mapping[str, DualFFNConfig] = {"256x6": SMALL, "1024x8": WIDE, "1b": BILLION}
STEP_TOKENS = 4096
COMPARISONS = (("packed", "padded"), ("packed", "sorted"), ("sorted", "padded"))
"""The way that is ours, and the peer's."""
TOLERANCE = 1e-4
FULL: Mapping[str, Any] = {"sizes": "256x6,1024x8", "precisions": "fp32,bf16", "steps": 4}
"""Options with `--full`."""
FOLDERS = ("librispeech_speakers", "ljspeech_32", "read_speech_en")
SUFFIXES = (".flac", ".wav", ".mp3", ".ogg")
CHARACTERS_PER_SECOND, VOCABULARY = 15, 1024
PROSE = Path(__file__).parents[1] / "LICENSE"
"""Source of the samples' text: a file that every checkout has."""


def main() -> None:
    parser = bench_parser(__doc__)
    add_common_arguments(parser)
    arguments = parse_options(parser, rounds=3, **FULL)
    torch.set_num_threads(arguments.threads)
    template = speech_template()
    streams = speech(read_durations(arguments.data), template)
    groups = in_order(streams)[: arguments.steps]
    for size in arguments.sizes.split(","):
        compare(size, template, groups, arguments)
    steps = in_order(streams)
    share = sum(map(positions, steps)) / sum(len(stream) for group in steps for stream in group)
    print(json.dumps({"samples": len(streams), "steps": len(steps), "padded, all steps": round(share, 2)}))


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder of recordings; without it lengths are drawn")
    parser.add_argument("--sizes", default="256x6", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument(
        "--steps", type=int, default=1, help="optimizer steps of a round, each of other samples"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")


def compare(
    size: str, template: Template, groups: Sequence[list[TokenStream]], arguments: argparse.Namespace
) -> None:
    """Measure and print one size in all precisions."""
    device = torch.device(arguments.device)
    config = shape_of(size, template)
    model = random_model(config, device)
    losses = TokenLosses(model)
    peer = transformers_model(model, template).train()
    peer.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    similar = by_length([stream for group in groups for stream in group], len(groups))
    packs = [packed(group).to(device) for group in groups]
    padded, in_lengths = (
        [padded_inputs(group, template, device) for group in grouping] for grouping in (groups, similar)
    )
    optimizer = build_optimizer(model.named_parameters(), 0.1, (0.9, 0.95))
    check_equal(losses, peer, packs, padded, optimizer)
    ways = {
        "packed": Trained([partial(loss_of, losses, batch) for batch in packs], optimizer),
        "padded": Trained([partial(loss_of_peer, peer, inputs) for inputs in padded], optimizer),
        "sorted": Trained([partial(loss_of_peer, peer, inputs) for inputs in in_lengths], optimizer),
    }
    trained = sum(len(stream) for group in groups for stream in group)
    flops = sum(training_flops(config, batch) for batch in packs)
    peak = peak_flops(device) if device.type == "cuda" else None
    for precision in arguments.precisions.split(","):
        seconds = in_turns(ways, precision, device, arguments.rounds)
        for ours, peer_name in COMPARISONS:
            line: dict[str, Any] = {"bench": "llm_train"}
            line |= {"case": f"{size}, {precision}, {ours} against {peer_name}"}
            line |= ratio_of(seconds, ours, peer_name, trained, device)
            if peak:
                line |= {
                    f"mfu {side}": round(flops / seconds[side].clock / peak, 3) for side in (ours, peer_name)
                }
            print(json.dumps(line | {"threads": arguments.threads}), flush=True)
    computed = {
        "packed": sum(len(batch.positions_S) for batch in packs),
        "padded": sum(map(positions, groups)),
    }
    computed |= {"sorted": sum(map(positions, similar))}
    print(json.dumps({"size": size, "tokens": trained, "positions computed": computed}), flush=True)


def shape_of(size: str, template: Template) -> DualFFNConfig:
    """The vocabulary is the template's where the shape has none of its own."""
    shape = SHAPES[size]
    return replace(shape, vocab_size=max(shape.vocab_size, template.tokenizer.get_vocab_size()))


def random_model(config: DualFFNConfig, device: torch.device) -> DualFFN:
    torch.manual_seed(0)
    return DualFFN(config).train().to(device)


@dataclass(frozen=True)
class Trained:
    """The losses of a round's steps, and what steps."""

    losses: Sequence[Callable[[], Tensor]]
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Seconds:
    """Time of all steps of a round: medians over the rounds."""

    cpu: float
    clock: float


def in_turns(
    ways: Mapping[str, Trained], precision: Precision, device: torch.device, rounds: int
) -> dict[str, Seconds]:
    """Forward, backward, clipping and AdamW of every step; the first round is thrown away."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, side in ways.items():
            started = time.process_time(), time.perf_counter()
            for loss in side.losses:
                optimizer_step(loss, side.optimizer, precision, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                spent[name].append((time.process_time() - started[0], time.perf_counter() - started[1]))
    return {name: Seconds(*map(statistics.median, zip(*times, strict=True))) for name, times in spent.items()}


def optimizer_step(
    loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, precision: Precision, device: torch.device
) -> None:
    """Take an optimizer step as the training loop does."""
    optimizer.zero_grad(set_to_none=True)
    with autocast(precision, device):
        value = loss()
    value.backward()
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    optimizer.step()


def ratio_of(
    seconds: Mapping[str, Seconds], ours: str, peer: str, trained: int, device: torch.device
) -> dict[str, Any]:
    """Rates of both and their ratio: by CPU time, on a GPU by the clock."""
    clock = device.type == "cuda"
    rates = {name: trained / (seconds[name].clock if clock else seconds[name].cpu) for name in (ours, peer)}
    entries = {"ours": round(rates[ours], 1), "peer": round(rates[peer], 1)}
    entries |= {"ratio": round(rates[ours] / rates[peer], 3)}
    entries |= {"clock ratio": round(seconds[peer].clock / seconds[ours].clock, 3)}
    return entries | {"unit": f"trained tokens per {'second' if clock else 'CPU-second'}"}


def loss_of(losses: TokenLosses, batch: PackedBatch) -> Tensor:
    sums = losses(batch)
    loss: Tensor = sums["text"] / batch.counts["text"] + sums["audio"] / batch.counts["audio"]
    return loss


def loss_of_peer(peer: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    loss: Tensor = peer(**inputs, use_cache=False).loss  # as transformers' Trainer asks for it
    return loss


def packed(group: Sequence[TokenStream]) -> PackedBatch:
    """Pack as the stage `train` does, with the target weights of transformers' loss."""
    return pack(group, ROWS_MULTIPLE, "token", "sum")


def padded_inputs(
    group: Sequence[TokenStream], template: Template, device: torch.device
) -> dict[str, Tensor]:
    """Build the inputs of a padding collator from the same samples."""
    audio_masks = [stream.kinds_S != Kind.TEXT for stream in group]
    idle = template.tokenizer.token_to_id(tokens.PAD)
    assert idle is not None
    rows = {
        "input_ids": ([stream.text_ids_S for stream in group], idle),
        "attention_mask": ([torch.ones(len(stream), dtype=torch.long) for stream in group], 0),
        "labels": ([stream.text_targets_S for stream in group], IGNORE),
        "audio_input_ids": ([s.codes_SK[is_S] for s, is_S in zip(group, audio_masks, strict=True)], 0),
        "audio_input_ids_mask": (
            [torch.ones(int(is_S.sum()), dtype=torch.bool) for is_S in audio_masks],
            False,
        ),
        "audio_labels": (
            [s.audio_targets_SK[is_S] for s, is_S in zip(group, audio_masks, strict=True)],
            IGNORE,
        ),
    }
    return {key: pad_sequence(tensors, True, value).to(device) for key, (tensors, value) in rows.items()}


def check_equal(
    losses: TokenLosses,
    peer: nn.Module,
    packs: Sequence[PackedBatch],
    padded: Sequence[dict[str, Tensor]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """The loss of every step, and the gradient's norm of the first, in float32.

    Raises:
        SystemExit: they differ.
    """
    parameters = list(losses.parameters())
    for number, (batch, inputs) in enumerate(zip(packs, padded, strict=True)):
        figures: list[tuple[float, float]] = []
        for loss in (partial(loss_of, losses, batch), partial(loss_of_peer, peer, inputs)):
            with torch.set_grad_enabled(number == 0):
                value = loss()
            norm = 0.0
            if number == 0:
                optimizer.zero_grad(set_to_none=True)
                value.backward()
                norm = float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
            figures.append((float(value.detach()), norm))
        for ours, theirs, what in zip(*figures, ("losses", "norms of gradients"), strict=True):
            if abs(ours - theirs) > TOLERANCE * abs(theirs):
                raise SystemExit(f"step {number}: the {what} differ: ours {ours:.7g}, peer {theirs:.7g}")


def speech_template() -> Template:
    learned = tokens.train_text_tokenizer([PROSE.read_text()], VOCABULARY)
    return Template(learned, SMALL.num_codebooks, SMALL.codebook_size - 2)


def read_durations(data: Path | None) -> list[float]:
    """Seconds of each recording of read speech; see the module's description."""
    if data is None:
        generator = torch.Generator().manual_seed(0)
        durations: list[float] = (
            (5.3 * (0.5 * torch.randn(160, generator=generator)).exp()).clamp(1, 30).tolist()
        )
        return durations
    durations_by_name: dict[str, float] = {}
    for path in sorted(path for folder in FOLDERS for path in (data / folder).rglob("*")):
        if path.suffix in SUFFIXES and path.stem not in durations_by_name:
            try:
                duration_s = probe(path).duration_s
            except AudioError:
                continue
            if duration_s:
                durations_by_name[path.stem] = duration_s
    if not durations_by_name:
        raise SystemExit(f"{data}: no recordings in {', '.join(FOLDERS)}; leave --data out for drawn lengths")
    return list(durations_by_name.values())


def speech(durations: Sequence[float], template: Template) -> list[TokenStream]:
    """A sample a recording, shuffled: its text is asked for, its codes are the answer."""
    generator = torch.Generator().manual_seed(1)
    prose = " ".join(PROSE.read_text().split()) * 2
    streams, place = [], 0
    for index in torch.randperm(len(durations), generator=generator).tolist():
        characters, frames = (round(durations[index] * rate) for rate in (CHARACTERS_PER_SECOND, FRAME_RATE))
        text, place = prose[place : place + characters], (place + characters) % (len(prose) // 2)
        shape = (template.num_codebooks, max(1, frames))
        codes_KT = torch.randint(template.codebook_size, shape, generator=generator)
        messages = [
            Message(role="system", content=[TextPart(text="Generate audio following instruction.")]),
            Message(role="user", content=[TextPart(text=text)]),
            Message(role="assistant", content=[AudioPart(path="spoken")]),
        ]
        streams.append(template.compile(messages, [codes_KT]))
    return streams


def in_order(streams: Sequence[TokenStream], step_tokens: int = STEP_TOKENS) -> list[list[TokenStream]]:
    """Group samples in order into steps of at most `step_tokens` positions; the remainder is dropped."""
    steps: list[list[TokenStream]] = []
    group: list[TokenStream] = []
    for stream in streams:
        if sum(map(len, group)) + len(stream) > step_tokens:
            steps.append(group)
            group = []
        group.append(stream)
    return steps


def by_length(streams: Sequence[TokenStream], steps: int) -> list[list[TokenStream]]:
    """Group samples of similar length into `steps` steps of about equal size."""
    groups: list[list[TokenStream]] = [[] for _ in range(steps)]
    total, before = sum(map(len, streams)), 0
    for stream in sorted(streams, key=len):
        groups[before * steps // total].append(stream)
        before += len(stream)
    return groups


def positions(group: Sequence[TokenStream]) -> int:
    """Return the number of positions that a padded batch computes."""
    return len(group) * max(map(len, group))


if __name__ == "__main__":
    main()
