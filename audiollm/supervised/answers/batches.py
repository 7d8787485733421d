"""The samples of a step whose last message is the answer to learn, as batches of a policy of any family.

A step is a pure function of its number: nothing here has a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiollm.data.records.mixture import Mixture, StepDraws, evenly
from audiollm.data.records.sample import Sample, check_without_video
from audiollm.data.records.source import Source
from audiollm.errors import BadSample, StageError
from audiollm.families.policy import Policy
from audiollm.families.prompts import with_last_message_as_answer
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import Ranks

WINDOW_RUNS = 64
"""Runs of 64 samples that are shuffled together; a smaller source is shuffled as a whole."""
HELD_OUT = 256
"""Held-out samples of each source that an evaluation looks at, at most, evenly picked."""


@dataclass(frozen=True)
class AnswerBatches:
    """The answers of a step, as this rank trains them."""

    batches: list[Any]
    """Of the policy; as many as the rank with the most has, idle ones among them."""
    answers: int
    """Answers of the step, over all ranks."""
    tokens: int
    """Their tokens, over all ranks."""
    rank_tokens: int
    """Their tokens on this rank."""


class AnswerBatchMaker:
    """`maker(step)` gives this rank's answers of a step, as arithmetic on the step's number.

    Args:
        draws: how the samples of a step are drawn, and the tokens of a batch.
        set_aside: where samples go whose last message is no answer, or that the policy cannot take.
        key: the setting that names the samples, for errors.
        sees: whether the policy is shown pictures; otherwise samples with videos are set aside.

    Raises:
        BadSample: the first bad sample, where `set_aside` is strict.
        StageError: there is no sample to train on.
    """

    def __init__(
        self,
        policy: Policy[Any, Any, Any],
        sources: Sequence[Source],
        draws: StepDraws,
        set_aside: SetAside,
        ranks: Ranks,
        key: str,
        sees: bool = False,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy, self._sources, self._set_aside, self._ranks = policy, sources, set_aside, ranks
        self._batch_size, self._max_tokens = draws.batch_size, draws.max_tokens
        train: list[list[int]] = [[] for _ in sources]
        held_out: list[list[int]] = [[] for _ in sources]
        self._bad = 0
        for number, source in enumerate(sources):
            set_aside.add(source.bad)
            self._bad += len(source.bad)
            for index in range(len(source)):
                advance()
                try:
                    sample = source[index].sample
                    check_answered(sample, self._name(number, index))
                    if not sees:
                        check_without_video(sample, self._name(number, index))
                except BadSample as bad:
                    set_aside.add([bad.with_traceback(None)])
                    self._bad += 1
                    continue
                (held_out if sample.is_held_out else train)[number].append(index)
        if not any(train):
            raise StageError(f"{key}: no sample of the train split has an answer", "see set_aside.jsonl", 2)
        self._train: list[NDArray[np.int64]] = [np.array(indices, np.int64) for indices in train]
        self._held_out = held_out
        self._mixture = Mixture(
            [len(indices) for indices in train], draws.weights, draws.seed, window_runs=WINDOW_RUNS
        )

    @property
    def counts(self) -> dict[str, int]:
        """Samples that are trained on, that are held out, and that cannot be used."""
        train, test = (sum(map(len, split)) for split in (self._train, self._held_out))
        return {"train": train, "test": test, "bad": self._bad}

    def __call__(self, step: int) -> AnswerBatches:
        """Encode and batch the samples of a step. Called on every rank."""
        first = step * self._batch_size
        items = self._mixture.items(first, first + self._batch_size)
        places = [(item.source, int(self._train[item.source][item.index])) for item in items]
        return self._batches(places)

    def held_out(self) -> Iterator[AnswerBatches]:
        """Held-out samples, a step's number at a time; encoded when asked for. Called on every rank."""
        places = [
            (number, indices[index])
            for number, indices in enumerate(self._held_out)
            for index in evenly(len(indices), HELD_OUT)
        ]
        for first in range(0, len(places), self._batch_size):
            yield self._batches(places[first : first + self._batch_size])

    def _batches(self, places: Sequence[tuple[int, int]]) -> AnswerBatches:
        encoded = []
        for place in places[self._ranks.rank :: self._ranks.world]:
            try:
                encoded.append(self._encoded(*place))
            except BadSample as bad:
                self._set_aside.add([bad.with_traceback(None)])
        plans = self._policy.plan([[answer] for answer in encoded], self._max_tokens) if encoded else []
        batches = [self._policy.batch([encoded[place] for place in plan]) for plan in plans]
        tokens = sum(self._policy.num_answer_tokens(answer) for answer in encoded)
        gathered = self._ranks.gather((len(batches), len(encoded), tokens))
        batches += [self._policy.idle_batch()] * (max(count for count, _, _ in gathered) - len(batches))
        answers, all_tokens = (sum(row[column] for row in gathered) for column in (1, 2))
        return AnswerBatches(batches, answers, all_tokens, tokens)

    def _encoded(self, source: int, index: int) -> Any:
        place = self._name(source, index)
        prompted = self._policy.take(with_last_message_as_answer(self._sources[source][index]), [0], place)
        return self._policy.encode(prompted)[0]

    def _name(self, source: int, index: int) -> str:
        return f"{self._sources[source].name} [{index}]"


def check_answered(sample: Sample, place: str) -> None:
    """Raises: BadSample: the last message is not the assistant's, behind one of the user."""
    *before, last = sample.messages
    if last.role != "assistant" or not any(message.role == "user" for message in before):
        raise BadSample(place, sample.id, "has no answer behind a question", "no answer")
