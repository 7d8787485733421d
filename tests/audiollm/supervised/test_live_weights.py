"""An engine that lives through a training speaks with the weights as they are: full, with averages, LoRA merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from audiollm.data.packing import PackedBatch, pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.families.dual_ffn.adapting import add_lora, merge_adapter
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.generation.engine.engine import Engine
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import GenerationDecoder
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.train.loop.loop import Update, train
from audiollm.train.settings import LoRASettings
from tests.audiollm.models.test_packed_decoder import BOOKS, SIZE, greedy_request, model_of, template
from tests.audiollm.train.test_loop import config, context_of


class Speaking:
    """Trains on one clip; at every evaluation an engine of before the training and a fresh one speak."""

    def __init__(self, model: DualFFN) -> None:
        self.model = model
        self.losses: nn.Module = TokenLosses(model)
        self.template = template()
        self.decoder = GenerationDecoder(model)
        self.engine = Engine(model, self.template, 1, 80, self.decoder)
        self.pairs: list[tuple[Tensor, Tensor]] = []
        messages = [
            Message(role="user", content=[TextPart(text="one two")]),
            Message(role="assistant", content=[AudioPart(path="a.wav")]),
        ]
        codes_KT = torch.randint(SIZE, (BOOKS, 8), generator=torch.Generator().manual_seed(3))
        self.packed = pack([self.template.compile(messages, [codes_KT])])

    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.losses}

    def adopt(self, modules: Mapping[str, nn.Module]) -> None:
        pass

    def optimizers(self) -> dict[str, list[str]]:
        return {"main": ["model"]}

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> PackedBatch:
        return self.packed

    def updates(self, batch: PackedBatch, step: int, steps: int) -> Iterator[Update]:
        losses = self.losses(batch)
        yield Update(losses["text"] + losses["audio"], {})
        self.speak()

    def evaluate(self, step: int) -> dict[str, float]:
        self.speak()
        return {}

    def speak(self) -> None:
        training = self.model.training
        self.model.eval()
        fresh = Engine(self.model, self.template, 1, 80)
        self.pairs.append(tuple(e.run([greedy_request()])[0].codes_KT for e in (self.engine, fresh)))  # type: ignore[arg-type]
        self.model.train(training)

    def alarms(self, figures: Mapping[str, float], step: int) -> dict[str, str]:
        return {}


def equal(pairs: list[tuple[Tensor, Tensor]]) -> list[bool]:
    return [torch.equal(live, fresh) for live, fresh in pairs]


@pytest.mark.parametrize("changes", [{"ema_decay": 0.0}, {"ema_decay": 0.9}], ids=["plain", "averaged"])
def test_in_full_training(tmp_path: Path, changes: dict[str, Any]) -> None:
    task = Speaking(model_of())
    first = task.engine.run([greedy_request()])[0].codes_KT
    train(
        task,
        config(steps=12, evaluate_every=4, **changes),
        tmp_path,
        context_of(tmp_path),
        torch.device("cpu"),
    )
    task.speak()
    assert len(task.pairs) >= 15 and all(equal(task.pairs))
    assert not torch.equal(first, task.pairs[-1][0])


def test_in_training_of_an_adapter_and_after_it_is_merged(tmp_path: Path) -> None:
    model = model_of()
    task = Speaking(model)
    first = task.engine.run([greedy_request()])[0].codes_KT  # packed before there is an adapter
    adapted = add_lora(model, LoRASettings(rank=4, alpha=64))
    options = config(steps=6, evaluate_every=3, learning_rate=0.05)
    train(task, options, tmp_path, context_of(tmp_path), torch.device("cpu"))
    merge_adapter(adapted)
    task.speak()
    assert all(equal(task.pairs)) and not torch.equal(first, task.pairs[-1][0])
