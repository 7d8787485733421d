"""The samples of a step whose last message is the answer to learn, as batches of a policy of any family.

A step is a pure function of its number: nothing here has a state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.sample import Sample, check_without_video
from audiollm.data.records.source import Source
from audiollm.data.records.step_records import RecordPlace, StepPlaces, UsableRecords, find_usable, name_of
from audiollm.errors import BadSample, StageError
from audiollm.families.policy import Policy, has_depth
from audiollm.families.prompts import with_last_message_as_answer
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import Ranks


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
    parts: tuple[int, int] = (0, 0)
    """Targets of the first codebook and of the others, over all ranks, where two decoders choose them."""


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
        self._seed = draws.seed

        def check(sample: Sample, place: str) -> None:
            check_answered(sample, place)
            if not sees:
                check_without_video(sample, place)

        self._usable = find_usable(sources, check, set_aside, advance)
        if not self._usable.num_trained:
            raise StageError(f"{key}: no sample of the train split has an answer", set_aside.remedy(), 2)
        self._places = StepPlaces(self._usable, draws)

    @property
    def counts(self) -> dict[str, int]:
        """Samples that are trained on, that are held out, and that cannot be used."""
        usable = self._usable
        return {"train": usable.num_trained, "test": usable.num_held_out, "bad": usable.num_bad}

    @property
    def usable(self) -> UsableRecords:
        """The samples of each source that are used."""
        return self._usable

    def __call__(self, step: int) -> AnswerBatches:
        """Encode and batch the samples of a step. Called on every rank."""
        return self._batches(self._places(step), step)

    def held_out(self) -> Iterator[AnswerBatches]:
        """Held-out samples, a step's number at a time; encoded when asked for. Called on every rank."""
        places = self._usable.held_out_places()
        for first in range(0, len(places), self._batch_size):
            yield self._batches(places[first : first + self._batch_size])

    def _batches(self, places: Sequence[RecordPlace], step: int | None = None) -> AnswerBatches:
        encoded = []
        for place in places[self._ranks.rank :: self._ranks.world]:
            try:
                encoded.append(self._encoded(place, step))
            except BadSample as bad:
                self._set_aside.add([bad.with_traceback(None)])
        plans = self._policy.plan([[answer] for answer in encoded], self._max_tokens) if encoded else []
        batches = [self._policy.batch([encoded[place] for place in plan]) for plan in plans]
        tokens = sum(self._policy.num_answer_tokens(answer) for answer in encoded)
        policy = self._policy
        parts = [policy.count_parts(answer) for answer in encoded] if has_depth(policy) else []
        firsts, others = (sum(part[column] for part in parts) for column in (0, 1))
        gathered = self._ranks.gather((len(batches), len(encoded), tokens, firsts, others))
        batches += [self._policy.idle_batch()] * (max(row[0] for row in gathered) - len(batches))
        answers, all_tokens, *both = (sum(row[column] for row in gathered) for column in range(1, 5))
        return AnswerBatches(batches, answers, all_tokens, tokens, (both[0], both[1]))

    def _encoded(self, place: RecordPlace, step: int | None) -> Any:
        """The answer in the encoding that is drawn for a step, or in the first one."""
        source, index = place
        loaded = self._sources[source][index]
        if step is not None and len(loaded.encodings) > 1:
            number = random.Random(f"{self._seed}/{step}/{source}/{index}").randrange(len(loaded.encodings))
            loaded = replace(loaded, encodings=[loaded.encodings[number]])
        answered = with_last_message_as_answer(loaded)
        return self._policy.encode(self._policy.take(answered, [0], name_of(self._sources, place)))[0]


def check_answered(sample: Sample, place: str) -> None:
    """Raises: BadSample: the last message is not the assistant's, behind one of the user."""
    *before, last = sample.messages
    if last.role != "assistant" or not any(message.role == "user" for message in before):
        raise BadSample(place, sample.id, "has no answer behind a question", "no answer")
