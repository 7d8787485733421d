"""PTX: supervised samples beside the answers of a step, so that the policy keeps what it was trained on (InstructGPT).

Source: arXiv 2203.02155, section 3.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from audiollm.data.records.mixture import Mixture
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import RatedAnswer, Sample, check_without_video
from audiollm.data.records.source import LoadedSample, Source
from audiollm.errors import BadSample, StageError
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.rl.policy.protocol import Policy
from audiollm.rl.policy.token_figures import TokenRequest
from audiollm.rl.policy_gradient.losses import ptx_loss
from audiollm.rl.preference.batches import WINDOW_RUNS
from audiollm.rl.preference.sources import PTXChoice, weights_of


@dataclass(frozen=True)
class SupervisedPacks:
    """The supervised answers of a step, as this rank trains them."""

    batches: list[Any]
    """Of the policy; as many as the rank with the most has, idle ones among them."""
    tokens: int
    """Answer tokens of the step, over all ranks."""
    weight: float
    """Of their mean cross entropy per token."""

    def losses(
        self,
        policy: Policy[Any, Any, Any],
        root: nn.Module,
        ranks: Ranks,
        found: dict[str, Any],
    ) -> Iterator[Tensor]:
        """The loss of each batch; when the last is drawn, `found` has their mean cross entropy, `ptx_loss`.

        Args:
            root: as the strategy wrapped it.
        """
        device = next(policy.root.parameters()).device
        total = torch.zeros((), dtype=torch.float64)
        for batch in self.batches:
            answers = policy.answer_logprobs(root, batch.to(device), TokenRequest(reference=False))
            total -= answers.policy_T.detach().double().sum().cpu()
            yield ptx_loss(answers.policy_T, max(1, self.tokens), self.weight)
        found["ptx_loss"] = float(ranks.sum(total)) / max(1, self.tokens)


class SupervisedMaker:
    """`maker(step)` gives this rank's supervised samples of a step, as arithmetic on the step's number.

    Args:
        batch_size: samples of a step, over all ranks.
        max_tokens: tokens of a batch.
        set_aside: where samples go whose last message is no answer, or that the policy cannot take.
        weight: of the mean cross entropy per token.

    Raises:
        BadSample: the first bad sample, where `set_aside` is strict.
        StageError: there is no sample to train on.
    """

    def __init__(
        self,
        policy: Policy[Any, Any, Any],
        sources: Sequence[Source],
        weights: Sequence[float] | None,
        batch_size: int,
        max_tokens: int,
        seed: int,
        set_aside: SetAside,
        ranks: Ranks,
        weight: float,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._weight = weight
        self._policy, self._sources, self._set_aside, self._ranks = policy, sources, set_aside, ranks
        self._batch_size, self._max_tokens = batch_size, max_tokens
        train: list[list[int]] = [[] for _ in sources]
        for number, source in enumerate(sources):
            set_aside.add(source.bad)
            for index in range(len(source)):
                advance()
                try:
                    sample = source[index].sample
                    _check_answered(sample, self._name(number, index))
                except BadSample as bad:
                    set_aside.add([bad.with_traceback(None)])
                    continue
                if not sample.is_held_out:
                    train[number].append(index)
        if not any(train):
            raise StageError("ptx: no sample of the train split has an answer", "see set_aside.jsonl", 2)
        self._train = [np.array(each, np.int64) for each in train]
        self._mixture = Mixture([len(each) for each in train], weights, seed, window_runs=WINDOW_RUNS)

    def __call__(self, step: int) -> SupervisedPacks:
        """Encode and batch the samples of a step. Called on every rank."""
        first = step * self._batch_size
        items = self._mixture.items(first, first + self._batch_size)
        encoded = []
        for item in list(items)[self._ranks.rank :: self._ranks.world]:
            try:
                encoded.append(self._encoded(item.source, int(self._train[item.source][item.index])))
            except BadSample as bad:
                self._set_aside.add([bad.with_traceback(None)])
        plans = self._policy.plan([[each] for each in encoded], self._max_tokens) if encoded else []
        batches = [self._policy.batch([encoded[place] for place in plan]) for plan in plans]
        tokens = sum(self._policy.num_answer_tokens(each) for each in encoded)
        told = self._ranks.gather((len(batches), tokens))
        batches += [self._policy.idle_batch()] * (max(count for count, _ in told) - len(batches))
        return SupervisedPacks(batches, sum(own for _, own in told), self._weight)

    def _encoded(self, source: int, index: int) -> Any:
        place = self._name(source, index)
        prompted = self._policy.take(with_last_message_as_answer(self._sources[source][index]), [0], place)
        return self._policy.encode(prompted)[0]

    def _name(self, source: int, index: int) -> str:
        return f"{self._sources[source].name} [{index}]"


def supervised_maker(
    choice: PTXChoice | None,
    policy: Policy[Any, Any, Any],
    batch_size: int,
    max_tokens: int,
    seed: int,
    set_aside: SetAside,
    context: Context,
) -> SupervisedMaker | None:
    """Open the samples of `ptx`, where it is set.

    Args:
        batch_size: the stage's own.

    Raises:
        BadSample: the first bad sample, where `set_aside` is strict.
        StageError: there is no sample to train on.
    """
    if choice is None:
        return None
    sources = [open_source(source.path) for source in choice.samples]
    with context.progress("reading ptx", sum(map(len, sources))) as bar:
        return SupervisedMaker(
            policy, sources, weights_of(choice.samples), choice.batch_size or batch_size, max_tokens, seed, set_aside,
            context.ranks, choice.weight, lambda: bar.advance(bar.task_ids[0]),
        )  # fmt: skip


def _check_answered(sample: Sample, place: str) -> None:
    """Raises: BadSample: its last message is not the assistant's, behind one of the user, or there is a video part."""
    check_without_video(sample, place)
    *asked, last = sample.messages
    if last.role != "assistant" or not any(message.role == "user" for message in asked):
        raise BadSample(place, sample.id, "has no answer behind a question", "no answer")


def with_last_message_as_answer(loaded: LoadedSample) -> LoadedSample:
    """Return the sample with the assistant's last message as its only answer to choose, with that one's sound."""
    *asked, last = loaded.sample.messages
    kept = loaded.num_asked
    answer = RatedAnswer(content=last.content)
    sample = loaded.sample.model_copy(update={"messages": asked, "answers": [answer]})
    encodings = [each[:kept] for each in loaded.encodings]
    return replace(loaded, sample=sample, encodings=encodings, audio=loaded.audio[:kept])
