"""The batches of a step: its records, their groups of answers, and micro-batches of whole groups for this rank.

A step is a pure function of its number: nothing here has a state. Record k of a step goes to rank k modulo the number
of ranks, whole: its answers, compared with one another, are always in one micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch
from torch import Tensor

from audiollm.data.records.mixture import StepDraws
from audiollm.data.records.source import LoadedSample, Source
from audiollm.data.records.step_records import RecordPlace, StepPlaces, UsableRecords, name_of
from audiollm.errors import BadSample
from audiollm.families.logprobs.answers import AnswerGroups, LabelledSteps, Lists, Pairs, Singles
from audiollm.families.policy import Batch, Encoded, Policy, Prompted
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.rl.groups import AnswerPair, AnswerSteps, JudgedAnswer, RankedAnswers, SampleGroup
from audiollm.rl.objectives.catalog import GroupKind
from audiollm.rl.objectives.pair_variants import answer_draws
from audiollm.rl.preference.records import Grouping


@dataclass(frozen=True)
class ItemOrigin:
    """The answers of a record that an item of the loss compares."""

    record: RecordPlace
    answers: tuple[int, ...]
    """Numbers in the record; of a pair the chosen one first, of a list the best first."""
    num_tokens: tuple[int, ...]
    """Tokens of each of these answers."""
    desirable: bool | None = None
    """The verdict on a single answer."""


@dataclass(frozen=True)
class EncodedRecord(Generic[Encoded]):
    """A record's answers as the policy takes them, and how they are compared."""

    id: str
    place: RecordPlace
    used: list[int]
    """Numbers of `answers` in the record."""
    answers: list[Encoded]
    groups: list[SampleGroup]
    """Their answers are places in `answers`."""
    altered: list[int] = field(default_factory=list)
    """Place of each pair's chosen answer with the recordings of another record, where they are needed."""


@dataclass(frozen=True)
class MicroBatch(Generic[Batch]):
    """Answers that go through the model together, and their groups; none in an idle one."""

    batch: Batch
    groups: AnswerGroups
    num_items: int
    """Pairs, lists or single answers: the items that the loss is a mean over."""
    length_A: Tensor
    """int64: tokens of each answer."""
    draw_T: Tensor | None = None
    """A random number per answer token, where an objective asks for it."""
    origins: Sequence[ItemOrigin] = ()
    """The origin of each item, in order."""
    prompt_length_A: Tensor | None = None
    """int64: tokens of each answer's prompt, where an objective asks for them."""

    def to(self, device: torch.device) -> MicroBatch[Batch]:
        """Return it on a device."""
        moved: Any = self.batch
        return MicroBatch(
            moved.to(device),
            groups_to(self.groups, device),
            self.num_items,
            self.length_A.to(device),
            None if self.draw_T is None else self.draw_T.to(device),
            self.origins,
            self.prompt_length_A,
        )


@dataclass(frozen=True)
class PreferenceStep(Generic[Batch]):
    """This rank's micro-batches of a step; none where the step has fewer records than there are ranks."""

    micro: list[MicroBatch[Batch]]
    mismatched: list[Batch] = field(default_factory=list)
    """Answers behind the prompts of other records, for KTO's KL."""
    bad: list[BadSample] = field(default_factory=list)
    """Records left out of it."""


@dataclass(frozen=True)
class BatchNeeds:
    """Tensors and answers that objectives need in a batch, beside the answers of each record."""

    draws: bool = False
    """A random number per answer token."""
    mismatched: bool = False
    """Answers behind the prompts of other records."""
    altered: bool = False
    """Chosen answers once more, with the recordings of another record."""
    prompts: bool = False
    """The lengths of prompts."""


NO_NEEDS = BatchNeeds()


class StepMaker(Generic[Prompted, Encoded, Batch]):
    """`maker(step)` is the step's `PreferenceStep`.

    Args:
        draws: how the records of a step are drawn, and the tokens of a micro-batch.
        needs: what objectives need beside the answers.
    """

    def __init__(
        self,
        policy: Policy[Prompted, Encoded, Batch],
        sources: Sequence[Source],
        usable: UsableRecords,
        grouping: Grouping,
        draws: StepDraws,
        needs: BatchNeeds = NO_NEEDS,
        ranks: Ranks = ALONE,
    ) -> None:
        self._policy, self._sources, self._usable, self._grouping = policy, sources, usable, grouping
        self._batch_size, self._max_tokens, self._seed = draws.batch_size, draws.max_tokens, draws.seed
        self._needs, self._ranks = needs, ranks
        self.places = StepPlaces(usable, draws)

    def __call__(self, step: int) -> PreferenceStep[Batch]:
        items = self.places(step)
        bad: list[BadSample] = []
        local_places = range(self._ranks.rank, len(items), self._ranks.world)
        records = [self._encoded(items[place], _after(items, place), bad) for place in local_places]
        micro = self._micro_batches([record for record in records if record], str(step))
        beside: list[Batch] = []
        if self._needs.mismatched:
            pairs = [(items[place], items[(place + 1) % len(items)]) for place in local_places]
            beside = self._batches(
                [encoded for pair in pairs if (encoded := self._beside(*pair)) is not None]
            )
        return PreferenceStep(micro, beside, bad)

    def held_out(self) -> Iterator[PreferenceStep[Batch]]:
        """This rank's held-out records, a batch at a time; encoded when asked for."""
        items = self.held_out_places()
        for first in range(0, len(items), self._batch_size):
            places = range(first, min(first + self._batch_size, len(items)))
            bad: list[BadSample] = []
            encoded = [
                self._encoded(items[place], _after(items, place), bad)
                for place in places[self._ranks.rank :: self._ranks.world]
            ]
            records = [record for record in encoded if record]
            yield PreferenceStep(self._micro_batches(records, "held out"), [], bad)

    def held_out_places(self) -> list[RecordPlace]:
        """The places of the held-out records that evaluations look at."""
        return self._usable.held_out_places()

    def read(self, place: RecordPlace) -> tuple[LoadedSample, list[SampleGroup]]:
        """Read a record and the groups of its answers.

        Raises:
            BadSample: it cannot be used.
        """
        source, index = place
        loaded = self._sources[source][index]
        sample, groups = self._grouping.groups(loaded.sample, self.name_of(place))
        return replace(loaded, sample=sample), groups

    def name_of(self, place: RecordPlace) -> str:
        """Where a record was read, for errors."""
        return name_of(self._sources, place)

    def code_rate(self, place: RecordPlace) -> float | None:
        """Code frames per second of a record's codec; None where the source does not tell."""
        codec = getattr(self._sources[place[0]], "facts", {}).get("codec") or {}
        rate = codec.get("frame_rate")
        return float(rate) if rate else None

    def idle(self) -> MicroBatch[Batch]:
        """A micro-batch without groups: for a rank that has fewer than others, which wait for it."""
        draw_T = torch.zeros(0, dtype=torch.float64) if self._needs.draws else None
        groups = join_groups([], self._grouping.kind, [] if self._needs.altered else None)
        none = torch.zeros(0, dtype=torch.long)
        prompt_length_A = none if self._needs.prompts else None
        return MicroBatch(self._policy.idle_batch(), groups, 0, none, draw_T, prompt_length_A=prompt_length_A)

    def _encoded(
        self, item: RecordPlace, neighbours: Sequence[RecordPlace], bad: list[BadSample]
    ) -> EncodedRecord[Encoded] | None:
        """Encode a record, and where recordings are altered its chosen answers with those of one of the others."""
        place = self.name_of(item)
        try:
            loaded, groups = self.read(item)
            used = sorted({answer for group in groups for answer in answers_of(group)})
            answers = self._policy.encode(self._policy.take(loaded, used, place))
            numbered = [renumbered(group, used) for group in groups]
            if not self._needs.altered:
                return EncodedRecord(loaded.sample.id, item, used, answers, numbered)
            altered_input = with_recordings_of(loaded, self._find_other_recording(loaded, neighbours))
            chosen = [group.chosen for group in groups if isinstance(group, AnswerPair)]
            altered = self._policy.encode(self._policy.take(altered_input, chosen, place))
        except BadSample as error:
            bad.append(error.with_traceback(None))
            return None
        places = [len(answers) + n for n in range(len(altered))]
        return EncodedRecord(loaded.sample.id, item, used, [*answers, *altered], numbered, places)

    def _find_other_recording(self, loaded: LoadedSample, neighbours: Sequence[RecordPlace]) -> LoadedSample:
        """Return the first of the others that has other recordings: several questions may ask about one.

        Raises:
            BadSample: there is none.
        """
        for place in neighbours:
            try:
                neighbour, _ = self.read(place)
            except BadSample:
                continue  # named where it is met as a record of its own
            if neighbour.num_asked and not _same_recordings(loaded, neighbour):
                return neighbour
        raise BadSample(
            "", loaded.sample.id, "no record beside it has another recording", "no other recording"
        )

    def _beside(self, record: RecordPlace, question_record: RecordPlace) -> list[Encoded] | None:
        """The used answers of one record behind the messages of another; None where one of them is bad."""
        try:
            loaded, groups = self.read(record)
            question, _ = self.read(question_record)
            used = sorted({answer for group in groups for answer in answers_of(group)})
            return self._policy.encode(self._policy.take_beside(question, loaded, used, self.name_of(record)))
        except BadSample:
            return None  # named where it is met as a record of its own

    def _micro_batches(
        self, records: Sequence[EncodedRecord[Encoded]], purpose: str
    ) -> list[MicroBatch[Batch]]:
        micro_batches = []
        for places in self._policy.plan([record.answers for record in records], self._max_tokens):
            batch_records = [records[place] for place in places]
            answers = [answer for record in batch_records for answer in record.answers]
            groups = join_groups(
                [(record.groups, len(record.answers)) for record in batch_records],
                self._grouping.kind,
                [record.altered for record in batch_records] if self._needs.altered else None,
            )
            lengths = [self._policy.num_answer_tokens(answer) for answer in answers]
            draw_T = None
            if self._needs.draws:
                seeds = [
                    self._draw_seed(record.id, purpose, n)
                    for record in batch_records
                    for n in range(len(record.answers))
                ]
                draw_T = answer_draws(lengths, seeds)
            items = sum(len(record.groups) for record in batch_records)
            length_A = torch.tensor(lengths, dtype=torch.long)
            origins = [origin for record in batch_records for origin in self._origins(record)]
            batch = self._policy.batch(answers)
            prompt_length_A = self._policy.prompt_lengths(batch) if self._needs.prompts else None
            micro_batches.append(MicroBatch(batch, groups, items, length_A, draw_T, origins, prompt_length_A))
        return micro_batches

    def _origins(self, record: EncodedRecord[Encoded]) -> list[ItemOrigin]:
        return [
            ItemOrigin(
                record.place,
                tuple(record.used[answer] for answer in answers_of(group)),
                tuple(self._policy.num_answer_tokens(record.answers[answer]) for answer in answers_of(group)),
                group.desirable if isinstance(group, JudgedAnswer) else None,
            )
            for group in record.groups
        ]

    def _batches(self, groups: Sequence[list[Encoded]]) -> list[Batch]:
        plans = self._policy.plan(groups, self._max_tokens)
        return [self._policy.batch([a for place in places for a in groups[place]]) for places in plans]

    def _draw_seed(self, record: str, purpose: str, answer: int) -> int:
        digest = hashlib.sha256(f"{self._seed}/{purpose}/{record}/{answer}".encode()).digest()
        return int.from_bytes(digest[:7], "little")


def answers_of(group: SampleGroup) -> tuple[int, ...]:
    """The answers that a group compares."""
    if isinstance(group, AnswerPair):
        return group.chosen, group.rejected
    return group.answers if isinstance(group, RankedAnswers) else (group.answer,)


def renumbered(group: SampleGroup, used: Sequence[int]) -> SampleGroup:
    """The group with its answers numbered by their places in `used`."""
    place = {answer: number for number, answer in enumerate(used)}
    if isinstance(group, AnswerPair):
        return AnswerPair(place[group.chosen], place[group.rejected], group.margin)
    if isinstance(group, RankedAnswers):
        return RankedAnswers(tuple(place[answer] for answer in group.answers), group.scores)
    if isinstance(group, JudgedAnswer):
        return JudgedAnswer(place[group.answer], group.desirable, group.score)
    return AnswerSteps(place[group.answer], group.labels, group.last_parts)


def with_recordings_of(loaded: LoadedSample, donor: LoadedSample) -> LoadedSample:
    """The sample with the recordings of another one's messages in place of its own, in their order, again and again.

    Raises:
        BadSample: one of them has no recording.
    """
    num_prompt_recordings, num_donated = loaded.num_asked, donor.num_asked
    for record, count in ((loaded, num_prompt_recordings), (donor, num_donated)):
        if not count:
            raise BadSample("", record.sample.id, "has no recording to be exchanged", "no recording")
    donated = [place % num_donated for place in range(num_prompt_recordings)]
    audio = [*(donor.audio[place] for place in donated), *loaded.audio[num_prompt_recordings:]]
    encodings = [
        [*(donor_encoding[place] for place in donated), *encoding[num_prompt_recordings:]]
        for encoding, donor_encoding in zip(loaded.encodings, donor.encodings, strict=True)
    ]
    return replace(loaded, encodings=encodings, audio=tuple(audio))


def _after(items: Sequence[RecordPlace], place: int) -> list[RecordPlace]:
    """Return the other items, from the next one on, around the end."""
    return [*items[place + 1 :], *items[:place]]


def _same_recordings(first: LoadedSample, second: LoadedSample) -> bool:
    if first.num_asked != second.num_asked:
        return False
    codes = zip(first.encodings[:1], second.encodings[:1], strict=False)
    return all(
        (a.content, a.start_s, a.end_s) == (b.content, b.start_s, b.end_s)
        for a, b in list(zip(first.audio, second.audio, strict=False))[: first.num_asked]
    ) and all(
        torch.equal(a_KT, b_KT)
        for first_codes, second_codes in codes
        for a_KT, b_KT in list(zip(first_codes, second_codes, strict=False))[: first.num_asked]
    )


def join_groups(
    records: Sequence[tuple[Sequence[SampleGroup], int]],
    kind: GroupKind,
    altered: Sequence[Sequence[int]] | None = None,
) -> AnswerGroups:
    """Join the groups of several records, whose answers follow one another.

    Args:
        records: groups of each record, and the number of its answers.
        altered: of each record, the places of its pairs' chosen answers with altered recordings.
    """
    numbered_groups: list[tuple[int, Any]] = []
    first = 0
    for groups, answers in records:
        numbered_groups += [(first, group) for group in groups]
        first += answers
    joined: AnswerGroups = _JOIN[kind](numbered_groups)
    if altered is None or not isinstance(joined, Pairs):
        return joined
    firsts = torch.tensor([0, *(answers for _, answers in records)]).cumsum(0).tolist()
    places = [
        first + place
        for first, altered_places in zip(firsts, altered, strict=False)
        for place in altered_places
    ]
    return replace(joined, altered_P=torch.tensor(places, dtype=torch.long))


def groups_to(groups: AnswerGroups, device: torch.device) -> AnswerGroups:
    """The groups with their tensors on a device."""
    moved: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in vars(groups).items()
        if name in type(groups).__dataclass_fields__
    }
    return type(groups)(**moved)


def _join_pairs(numbered_pairs: Sequence[tuple[int, AnswerPair]]) -> Pairs:
    margins = [pair.margin for _, pair in numbered_pairs]
    return Pairs(
        torch.tensor([first + pair.chosen for first, pair in numbered_pairs], dtype=torch.long),
        torch.tensor([first + pair.rejected for first, pair in numbered_pairs], dtype=torch.long),
        torch.tensor([margin or 0.0 for margin in margins]) if any(m is not None for m in margins) else None,
    )


def _join_lists(numbered_lists: Sequence[tuple[int, RankedAnswers]]) -> Lists:
    return Lists(
        torch.tensor(
            [first + answer for first, ranked in numbered_lists for answer in ranked.answers],
            dtype=torch.long,
        ),
        torch.tensor(
            [n for n, (_, ranked) in enumerate(numbered_lists) for _ in ranked.answers], dtype=torch.long
        ),
        len(numbered_lists),
        torch.tensor([score for _, ranked in numbered_lists for score in ranked.scores]),
    )


def _join_singles(numbered_singles: Sequence[tuple[int, JudgedAnswer]]) -> Singles:
    verdicts = [single.desirable for _, single in numbered_singles]
    scores = [single.score for _, single in numbered_singles]
    return Singles(
        torch.tensor([first + single.answer for first, single in numbered_singles], dtype=torch.long),
        torch.tensor([bool(v) for v in verdicts], dtype=torch.bool) if None not in verdicts else None,
        torch.tensor([float(s or 0.0) for s in scores], dtype=torch.float32) if None not in scores else None,
    )


def _join_steps(numbered_steps: Sequence[tuple[int, AnswerSteps]]) -> LabelledSteps:
    """Every answer of the records is in one group, in order, so that labels stand as the batch's steps do."""
    return LabelledSteps(torch.tensor([label for _, steps in numbered_steps for label in steps.labels]))


_JOIN: dict[GroupKind, Any] = {
    "pairs": _join_pairs,
    "lists": _join_lists,
    "singles": _join_singles,
    "steps": _join_steps,
}
