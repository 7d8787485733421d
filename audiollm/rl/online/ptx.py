"""PTX: supervised samples beside the rollouts of a step, so that the policy keeps what it was trained on (InstructGPT).

Source: arXiv 2203.02155, section 3.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from audiollm.data.records.mixture import Mixture
from audiollm.data.records.sample import RatedAnswer
from audiollm.data.records.source import LoadedSample, Source
from audiollm.errors import BadSample, StageError
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import Ranks
from audiollm.rl.online.prompts import WINDOW_RUNS, check_question
from audiollm.rl.policy.protocol import Policy


@dataclass(frozen=True)
class SupervisedPacks:
    """The supervised answers of a step, as this rank trains them."""

    batches: list[Any]
    """Of the policy; as many as the rank with the most has, idle ones among them."""
    tokens: int
    """Answer tokens of the step, over all ranks."""


class SupervisedMaker:
    """`maker(step)` gives this rank's supervised samples of a step, as arithmetic on the step's number.

    Args:
        batch_size: samples of a step, over all ranks.
        max_tokens: tokens of a batch.
        set_aside: where samples go whose last message is no answer, or that the policy cannot take.

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
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy, self._sources, self._set_aside, self._ranks = policy, sources, set_aside, ranks
        self._batch_size, self._max_tokens = batch_size, max_tokens
        train: list[list[int]] = [[] for _ in sources]
        for number, source in enumerate(sources):
            set_aside.add(source.bad)
            for index in range(len(source)):
                advance()
                try:
                    sample = source[index].sample
                    check_question(sample, self._name(number, index))
                    if sample.messages[-1].role != "assistant":
                        raise BadSample(self._name(number, index), sample.id, "has no answer", "no answer")
                except BadSample as bad:
                    set_aside.add([bad.with_traceback(None)])
                    continue
                if sample.metadata.get("split") != "test":
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
        return SupervisedPacks(batches, sum(own for _, own in told))

    def _encoded(self, source: int, index: int) -> Any:
        place = self._name(source, index)
        prompted = self._policy.take(with_last_message_as_answer(self._sources[source][index]), [0], place)
        return self._policy.encode(prompted)[0]

    def _name(self, source: int, index: int) -> str:
        return f"{self._sources[source].name} [{index}]"


def with_last_message_as_answer(loaded: LoadedSample) -> LoadedSample:
    """Return the sample with the assistant's last message as its only answer to choose, with that one's sound."""
    *asked, last = loaded.sample.messages
    kept = loaded.num_asked
    answer = RatedAnswer(content=last.content)
    sample = loaded.sample.model_copy(update={"messages": asked, "answers": [answer]})
    return LoadedSample(sample, [each[:kept] for each in loaded.encodings], loaded.audio[:kept])
