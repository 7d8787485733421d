"""A training step of published speech models: ours on packs, against the published classes on padded batches.

    OMP_NUM_THREADS=1 python benchmarks/published_train.py [--full] [--samples 12] [--rounds 2] [--seeds 0,1,2]

The same weights (one set of tensors, which both sides train in turn with one AdamW and one clipping), the same samples
and the right labels for both. CSM: transformers' `labels`. Qwen3-TTS: the published talker, whose loss takes labels as
they are (`shift_labels`), and its code predictor behind the hidden state of the row before each frame; its loss is
taken of its logits, for the one that is built in shifts the labels a codebook too far. The loss is the first
codebook's mean plus the others' mean, weighted as each family's authors have it (1; 0.3).

The setting is fixed. Lengths have a long tail (`packing.long_tail`: a log-normal body with median 120 frames, every
tenth sample between 0.6 and 1 of 1,024 frames), drawn anew with each of three seeds. Either side takes batches of at
most 4,096 rows of the step, four times the longest sample as in packing.py, the peer's padded to their longest sample;
as in public trainers, no padding goes through the decoder over codebooks. Samples of a step: 12, and 48 with `--full`.
Before anything is timed, losses and the norms of gradients are compared: a relative difference above 1e-4 in float32
ends the benchmark with exit code 1. The sides take turns in one process on one thread, and the median of CPU-seconds
counts. Memory is the peak of a process for each side, which builds that side alone, above what it held after the
imports: weights, gradients, the optimizer's state and two steps.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import bench_parser, in_own_process, in_turns, parse_options, peak_mb_of, print_row
from packing import long_tail
from published_models import (
    FAMILIES,
    embed_csm,
    embed_qwen3_tts,
    import_class,
    in_its_environment,
    load_policy,
    padded_rows,
    published_class,
    random_samples,
    write_model,
)
from torch import Tensor, nn
from torch.nn import functional

from audiollm.data.packing import plan_step
from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.families.talkers.rows import NONE, SpeechBatch
from audiollm.train.loop.optim import build_optimizer

TOLERANCE = 1e-4
REQUEST = TokenRequest(reference=False)
WEIGHT = {"csm": 1.0, "qwen3_tts": 0.3}
"""Of the mean loss of the other codebooks."""
MAXIMUM_FRAMES = 1024
"""82 seconds of speech."""
CAPACITY = 4096
"""Rows of a batch of either side, padding included."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--family", help="measure this one in this process")
    parser.add_argument("--samples", type=int, default=12, help="of a step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seeds", default="0,1,2", help="of lengths and codes")
    arguments = parse_options(parser, samples=48, rounds=5)
    if arguments.family is None:
        options = [f"--{name}={getattr(arguments, name)}" for name in ("samples", "rounds", "seeds")]
        for family in arguments.families.split(","):
            in_its_environment(__file__, family, options)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(arguments.family, Path(folder) / "model")
        for seed in map(int, arguments.seeds.split(",")):
            measure(arguments.family, model, arguments.samples, arguments.rounds, seed)


def measure(family: str, folder: Path, samples: int, rounds: int, seed: int) -> None:
    """Measure and print one family on the samples of one seed."""
    step = Step(family, folder, samples, seed)
    step.check_equal()
    seconds = in_turns({side: partial(step.take, side) for side in ("ours", "peer")}, rounds)
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    frames = step.frames
    rates = {side: frames / value for side, value in medians.items()}
    computed: dict[str, Any] = {
        "rows packed": sum(sample.num_rows for sample in step.samples),
        "rows padded": sum(rows["text"].numel() for rows in step.padded),
        **{f"{side} CPU-seconds": [round(value, 2) for value in seconds[side]] for side in seconds},
    }
    print_row(
        "published_train", f"{family}, seed {seed}, time", rates["ours"], rates["peer"],
        "trained frames per CPU-second", more_is_better=True, digits=1, frames=frames, samples=samples, **computed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        batches = Path(place) / "batches.pt"
        torch.save(step.padded, batches)
        del step
        ours = in_own_process(peak_of_ours, str(folder), samples, seed, family)
        peer = in_own_process(peak_of_peer, str(folder), str(batches), family)
    case = f"{family}, seed {seed}, memory"
    print_row("published_train", case, ours, peer, "MB above the imports", digits=0)


def peak_of_ours(folder: str, samples: int, seed: int, family: str) -> float:
    """Peak memory in MB of a process that takes two steps on packs, above what it held after the imports."""
    torch.set_num_threads(1)
    import_class(family)  # as much as the other side imports

    def work() -> None:
        step = Step(family, Path(folder), samples, seed, sides=("ours",))
        for _ in range(2):
            step.take("ours")

    return peak_mb_of(work)


def peak_of_peer(folder: str, batches: str, family: str) -> float:
    """Peak memory in MB of a process that takes two steps on padded batches, above what it held after the imports."""
    torch.set_num_threads(1)
    import_class(family)

    def work() -> None:
        step = Step(family, Path(folder), padded=torch.load(batches, weights_only=True), sides=("peer",))
        for _ in range(2):
            step.take("peer")

    return peak_mb_of(work)


class Step:
    """An optimizer step over the same samples, as either side takes it.

    Args:
        padded: batches of the peer alone, in place of samples.
    """

    def __init__(
        self,
        family: str,
        folder: Path,
        samples: int = 0,
        seed: int = 0,
        padded: Sequence[dict[str, Tensor]] = (),
        sides: Sequence[str] = ("ours", "peer"),
    ) -> None:
        self._family, self.padded = family, list(padded)
        if "ours" in sides:
            self.policy = load_policy(folder)
            model: nn.Module = self.policy.root.model.train()
            self.samples = random_samples(self.policy, long_tail(samples, MAXIMUM_FRAMES, seed), seed)
            plan = self.policy.plan([[sample] for sample in self.samples], CAPACITY)
            self.packs = [self.policy.batch([self.samples[place] for place in group]) for group in plan]
        if "peer" in sides:
            self.peer = published_class(family, folder, model if "ours" in sides else None).train()  # type: ignore[arg-type]
            model = self.peer if "ours" not in sides else model
        if sides == ("ours", "peer"):
            rows = [sample.num_rows for sample in self.samples]
            groups = plan_step(rows, CAPACITY, strategy="in_order")[0]
            self.padded = [padded_rows([self.samples[place] for place in group]) for group in groups]
        self._count_targets()
        named = [
            (name, weight) for name, weight in model.named_parameters() if not name.startswith("codec_model.")
        ]
        self._parameters = [weight for _, weight in named]
        self._optimizer = build_optimizer(named, 0.1, (0.9, 0.95))

    def losses(self, side: str) -> Sequence[Callable[[], Tensor]]:
        """The parts of the step's loss, batch by batch."""
        if side == "ours":
            return [partial(self._loss_of_pack, pack) for pack in self.packs]
        loss = self._loss_of_csm if self._family == "csm" else self._loss_of_qwen3_tts
        return [partial(loss, rows) for rows in self.padded]

    def backward(self, side: str) -> float:
        """Compute the step's loss and gradients."""
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for loss in self.losses(side):
            value = loss()
            value.backward()
            total += float(value.detach())
        return total

    def take(self, side: str) -> None:
        """Take the step."""
        self.backward(side)
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = 1e-4
        self._optimizer.step()

    def check_equal(self) -> None:
        """Compare losses and the norms of gradients.

        Raises:
            SystemExit: they differ.
        """
        figures: dict[str, tuple[float, float]] = {}
        for side in ("ours", "peer"):
            loss = self.backward(side)
            gradients = [weight.grad for weight in self._parameters if weight.grad is not None]
            figures[side] = loss, float(nn.utils.get_total_norm(gradients))
        for ours, peer, name in zip(
            figures["ours"], figures["peer"], ("losses", "norms of gradients"), strict=True
        ):
            if not abs(ours - peer) <= TOLERANCE * abs(peer):
                raise SystemExit(f"{self._family}: the {name} differ: ours {ours:.7g}, peer {peer:.7g}")
        print(json.dumps({"family": self._family, "loss and norm": figures}), flush=True)

    def _count_targets(self) -> None:
        """Count the targets of the step: of first codes and ends, and frames with other codes."""
        if self.padded:
            learned = [rows["labels"] != -100 for rows in self.padded]
            self._ends = sum(int(is_learned[..., 0].sum()) for is_learned in learned)
            self.frames = sum(int(is_learned[..., 1].sum()) for is_learned in learned)
        else:
            self._ends = sum(len(sample.target_F) for sample in self.samples)
            self.frames = sum(int((sample.target_FJ != NONE).any(dim=1).sum()) for sample in self.samples)

    def _weighted(self, first: Tensor, first_targets: int, rest: Tensor, frames: int) -> Tensor:
        """A batch's share of the step's loss, of its mean losses."""
        return first * (first_targets / self._ends) + WEIGHT[self._family] * rest * (frames / self.frames)

    def _loss_of_pack(self, pack: SpeechBatch) -> Tensor:
        logprobs = self.policy.answer_logprobs(self.policy.root, pack, REQUEST)
        is_first_T = logprobs.codebook_T == 0
        parts = (-logprobs.policy_T[is_first_T].mean(), -logprobs.policy_T[~is_first_T].mean())
        return self._weighted(parts[0], len(pack.target_F), parts[1], len(pack.depth_D))

    def _loss_of_csm(self, rows: dict[str, Tensor]) -> Tensor:
        output = self.peer(
            inputs_embeds=embed_csm(self.peer, rows),
            attention_mask=rows["mask"],
            labels=rows["labels"],
            use_cache=False,
        )
        learned = rows["labels"] != -100
        frames = int(learned[..., 1].sum())
        return self._weighted(
            output.backbone_loss, int(learned[..., 0].sum()), output.depth_decoder_loss, frames
        )

    def _loss_of_qwen3_tts(self, rows: dict[str, Tensor]) -> Tensor:
        talker, labels_BSK = self.peer.talker, rows["labels"]
        shifted_BS = functional.pad(labels_BSK[:, 1:, 0], (0, 1), value=-100)
        output = talker(
            inputs_embeds=embed_qwen3_tts(self.peer, rows), attention_mask=rows["mask"], labels=shifted_BS,
            shift_labels=shifted_BS, use_cache=False, output_hidden_states=True,
        )  # fmt: skip
        is_frame_BS = labels_BSK[..., 1] != -100
        codes_FK = labels_BSK[is_frame_BS]
        hidden_FC = output.hidden_states[0][-1][:, :-1][is_frame_BS[:, 1:]]
        tables = [talker.get_input_embeddings(), *talker.code_predictor.get_input_embeddings()]
        embedded = [table(codes_FK[:, place]) for place, table in enumerate(tables[: codes_FK.shape[1] - 1])]
        predicted = talker.code_predictor.forward_finetune(
            inputs_embeds=torch.stack([hidden_FC, *embedded], dim=1)
        )
        rest = functional.cross_entropy(predicted.logits.flatten(0, 1), codes_FK[:, 1:].flatten())
        return self._weighted(output.loss, int((shifted_BS != -100).sum()), rest, len(codes_FK))


if __name__ == "__main__":
    main()
