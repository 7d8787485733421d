"""Supervised training of a DualFFN decoder on coded shards.

Shapes: S packed positions, K codebooks, V codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.data.packing import PackedBatch, pack
from audiollm.data.sample import Message, Sample, TextPart
from audiollm.data.shards import CodedSample
from audiollm.data.template import Kind, Template, TokenStream
from audiollm.models.dual_ffn import DualFFN
from audiollm.train.loop import Update
from audiollm.train.losses import token_losses

ROWS_MULTIPLE = 128


@dataclass(frozen=True)
class SFTConfig:
    """What a batch holds and how its losses weigh."""

    batch_size: int
    text_dropout: float
    speaker_dropout: float
    corrupt_codes: float
    text_weight: float
    audio_weight: float


class SFTTask:
    """A `Task` of the training loop over samples with codes."""

    def __init__(
        self,
        model: DualFFN,
        template: Template,
        train: Sequence[CodedSample],
        test: Sequence[CodedSample],
        config: SFTConfig,
    ) -> None:
        self.model, self.template, self.config = model, template, config
        self._train, self._test = train, test
        self._device = next(model.parameters()).device

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    def batch(self, step: int, generator: torch.Generator) -> PackedBatch:
        """Every pass over the data takes a new order; what a sample is shown as is drawn afresh."""
        size = self.config.batch_size
        streams = []
        for place in range(step * size, (step + 1) * size):
            index = self._order(place // len(self._train))[place % len(self._train)]
            streams.append(self._draw(int(index), generator))
        return pack(streams, multiple=ROWS_MULTIPLE).to(self._device)

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"]}

    def updates(self, batch: PackedBatch, step: int, steps: int) -> Iterator[Update]:
        losses = token_losses(self.model, self.model(batch), batch)
        weights = {"text": self.config.text_weight, "audio": self.config.audio_weight}
        total = torch.stack([weights[key] * value for key, value in losses.items()]).sum()
        yield Update(total, {f"{key}_loss": value.detach() for key, value in losses.items()})

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Losses on held-out samples, conditions all shown and no code corrupted."""
        sums: dict[str, float] = {}
        groups = [self._test[i : i + 64] for i in range(0, min(len(self._test), 256), 64)]
        for group in groups:
            streams = [self.template.compile(coded.sample.messages, coded.encodings[0]) for coded in group]
            batch = pack(streams, multiple=ROWS_MULTIPLE).to(self._device)
            for key, value in token_losses(self.model, self.model(batch), batch).items():
                sums[f"{key}_loss"] = sums.get(f"{key}_loss", 0.0) + value.item() / len(groups)
        return sums

    def alarms(self, figures: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {}

    def _order(self, epoch: int) -> Tensor:
        if getattr(self, "_order_kept", (-1, None))[0] != epoch:
            permutation = torch.randperm(len(self._train), generator=torch.Generator().manual_seed(epoch))
            self._order_kept = (epoch, permutation)
        return self._order_kept[1]

    def _draw(self, index: int, generator: torch.Generator) -> TokenStream:
        dice = torch.rand(4, generator=generator).tolist()
        coded = self._train[index]
        variant = int(dice[0] * len(coded.encodings))
        no_text, no_speaker = dice[1] < self.config.text_dropout, dice[2] < self.config.speaker_dropout
        messages = drop_conditions(coded.sample, no_text, no_speaker)
        stream = self.template.compile(messages, coded.encodings[variant])
        share = dice[3] * self.config.corrupt_codes
        return corrupt(stream, share, self.template.codebook_size, generator) if share else stream


def drop_conditions(sample: Sample, no_text: bool, no_speaker: bool) -> list[Message]:
    """The messages without the user's text and/or without the speaker line of the system prompt.

    What is dropped leaves its turn in place, empty: this is what generation shows the model for the
    unconditional side of its guidance.
    """
    return [without_condition(message, no_text, no_speaker) for message in sample.messages]


def without_condition(message: Message, no_text: bool, no_speaker: bool) -> Message:
    """One message of `drop_conditions`."""
    if message.role == "user" and no_text:
        return message.model_copy(update={"content": [TextPart(text="")]})
    if message.role == "system" and no_speaker:
        return message.model_copy(update={"content": [_without_speaker(part) for part in message.content]})
    return message


def corrupt(stream: TokenStream, share: float, codebook_size: int, generator: torch.Generator) -> TokenStream:
    """Replace a share of the spoken input codes (never BOS or EOS, never a target) by random ones."""
    codes_SK = stream.codes_SK
    dice_SK = torch.rand(codes_SK.shape, generator=generator)
    random_SK = torch.randint(codebook_size, codes_SK.shape, generator=generator)
    chosen = (dice_SK < share) & (codes_SK < codebook_size) & (stream.kinds_S == Kind.AUDIO_OUT)[:, None]
    fields: dict[str, Any] = {**stream.__dict__, "codes_SK": torch.where(chosen, random_SK, codes_SK)}
    return TokenStream(**fields)


def _without_speaker(part: Any) -> Any:
    if not isinstance(part, TextPart):
        return part
    lines = [line for line in part.text.split("\n") if not line.startswith("Speaker:")]
    return TextPart(text="\n".join(lines).rstrip("\n"))
