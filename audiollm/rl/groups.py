"""From a record to what an objective compares: pairs, ranked lists, single answers, and answers with labelled steps.

Indices are those of `Sample.answers`; the training numbers the answers of a batch itself. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from audiollm.data.records.sample import RatedAnswer, Sample, Verdict, find_equal
from audiollm.errors import BadSample
from audiollm.rl.objectives.catalog import GroupKind

PairChoice = Literal["best_worst", "best_others", "adjacent", "all"]
"""The pairs that are made of a list: the best answer with the worst, the best with each other one, each with the next
in order, or every two. Answers that were judged equal make no pair."""
MARGIN = "margin"
"""Key of a sample's metadata: how much better the first answer of two is, where they have no scores."""
KTO_TAG = "kto_tag"
"""Key of an ordinary sample's metadata: whether its last message is desirable."""


@dataclass(frozen=True)
class AnswerPair:
    """A better and a worse answer to the same messages."""

    chosen: int
    rejected: int
    margin: float | None = None
    """Difference of their scores; None where there are none."""


@dataclass(frozen=True)
class RankedAnswers:
    """All answers of a sample, the best first."""

    answers: tuple[int, ...]
    scores: tuple[float, ...]
    """Scores, or negative ranks where there are none; higher is better."""


@dataclass(frozen=True)
class JudgedAnswer:
    """An answer with its own verdict or score."""

    answer: int
    desirable: bool | None = None
    score: float | None = None


@dataclass(frozen=True)
class AnswerSteps:
    """An answer whose steps are labelled."""

    answer: int
    labels: tuple[float, ...]
    """From 0 (wrong) to 1 (right), for each step."""
    last_parts: tuple[int, ...]
    """The part of the answer's content that each step ends with."""


SampleGroup = AnswerPair | RankedAnswers | JudgedAnswer | AnswerSteps


def groups_of(
    sample: Sample,
    kind: GroupKind,
    fields: Collection[str] = (),
    pairs: PairChoice = "best_worst",
    place: str = "",
) -> list[SampleGroup]:
    """Derive the groups that an objective takes from one record.

    Args:
        sample: with answers; an ordinary one is first turned by `with_answer`.
        kind: of `ObjectiveNeeds.groups`.
        fields: `ObjectiveNeeds.fields`; `desirable_N` and `score_N` are needed of single answers.
        pairs: which pairs are made of a list of answers; also which answers of a list are desirable.
        place: where the sample was read, for errors.

    Raises:
        BadSample: something that the kind needs is missing or contradicts itself.
    """
    if not sample.answers:
        reason = "has no answers to choose among: give `answers`, or train on it with an objective of its own (sft)"
        raise BadSample(place, sample.id, reason, "no answers")
    view = _Judgements(sample, place)
    derive: dict[GroupKind, Callable[[], Sequence[SampleGroup]]] = {
        "pairs": lambda: view.pairs(pairs),
        "lists": lambda: [view.ranking()],
        "singles": lambda: view.singles(frozenset(fields), pairs),
        "steps": view.steps,
    }
    return list(derive[kind]())


def with_answer(sample: Sample, place: str = "") -> Sample:
    """An ordinary sample as one with a single answer, its last message; `kto_tag` in its metadata is the verdict.

    Samples with answers are returned as they are.

    Raises:
        BadSample: the last message is not the assistant's, or there is none before it.
    """
    if sample.answers:
        return sample
    *messages, last = sample.messages
    if last.role != "assistant" or not messages:
        reason = "has no answer: its last message must be the assistant's, after another message"
        raise BadSample(place, sample.id, reason, "no answers")
    metadata = dict(sample.metadata)
    tag = metadata.pop(KTO_TAG, None)
    if tag is not None and not isinstance(tag, bool):
        reason = f"metadata.{KTO_TAG} must be true or false, not {tag!r:.60}"
        raise BadSample(place, sample.id, reason, "wrong verdict")
    verdict: Verdict | None = None if tag is None else "desirable" if tag else "undesirable"
    answer = RatedAnswer(content=last.content, verdict=verdict)
    return sample.model_copy(update={"messages": messages, "answers": [answer], "metadata": metadata})


def best_and_worst(sample: Sample, place: str = "") -> AnswerPair:
    """The pair of the best and the worst answer.

    Raises:
        BadSample: there are not two that differ.
    """
    (pair,) = _Judgements(sample, place).pairs("best_worst")
    return pair


# Private


class _Judgements:
    """The answers of one sample, read as each kind of group asks for."""

    def __init__(self, sample: Sample, place: str) -> None:
        self._sample, self._answers, self._place = sample, sample.answers, place

    def pairs(self, choice: PairChoice) -> list[AnswerPair]:
        order, values = self._order()
        last = len(order) - 1
        places = {
            "best_worst": [(0, last)],
            "best_others": [(0, second) for second in range(1, last + 1)],
            "adjacent": [(first, first + 1) for first in range(last)],
            "all": [(first, second) for first in range(last) for second in range(first + 1, last + 1)],
        }[choice]
        pairs = [
            AnswerPair(order[first], order[second], self._margin(order[first], order[second]))
            for first, second in places
            if values[order[first]] > values[order[second]]
        ]
        if not pairs:
            raise self._bad("all answers were judged equal: none is better than another", "no preference")
        return pairs

    def ranking(self) -> RankedAnswers:
        order, _ = self._order()
        scores = self._complete("score") or [-value for value in self._complete("rank") or ()]
        scores = scores or [float(answer.verdict == "desirable") for answer in self._answers]
        return RankedAnswers(tuple(order), tuple(scores[index] for index in order))

    def singles(self, fields: frozenset[str], choice: PairChoice) -> list[JudgedAnswer]:
        if "score_N" in fields:
            self._need_all("score", "scores")
        is_judged = len(self._answers) > 1 or any(answer.verdict for answer in self._answers)
        if "desirable_N" not in fields and ("score_N" in fields or not is_judged):
            return [JudgedAnswer(index, None, answer.score) for index, answer in enumerate(self._answers)]
        return [
            JudgedAnswer(index, desirable, self._answers[index].score)
            for index, desirable in self._verdicts(choice).items()
        ]

    def steps(self) -> list[AnswerSteps]:
        self._need_all("steps", "scores of steps")
        answer_steps = []
        for index, answer in enumerate(self._answers):
            ends = [(step, label) for step, label in enumerate(answer.steps or ()) if label is not None]
            for step, label in ends:
                if not 0 <= label <= 1:
                    raise self._bad(
                        f"answers.{index}.steps.{step}: a label is from 0 (wrong) to 1 (right), not {label:g}",
                        "wrong scores of steps",
                    )
            answer_steps.append(
                AnswerSteps(index, tuple(label for _, label in ends), tuple(step for step, _ in ends))
            )
        return answer_steps

    def _order(self) -> tuple[list[int], list[tuple[float, ...]]]:
        """The answers from the best to the worst, and for each answer a value to compare; higher is better.

        Scores decide, then ranks among equal scores, and verdicts where there is neither.
        """
        if len(self._answers) < 2:
            raise self._bad(
                "holds one answer, and a comparison needs two: add one, or train on single answers (kto, bco)",
                "one answer",
            )
        equal = find_equal(self._answers)
        if equal is not None:
            raise self._bad(
                f"answers {equal[0]} and {equal[1]} are equal: leave one of them out", "equal answers"
            )
        scores, ranks = self._complete("score"), self._complete("rank")
        if scores and ranks:
            self._check_agreement(scores, ranks)
        judged = [scores or [], [-rank for rank in ranks or ()]]
        if not (scores or ranks):
            self._need_judgements()
            judged = [[float(answer.verdict == "desirable") for answer in self._answers]]
        values = list(zip(*filter(None, judged), strict=True))
        return sorted(range(len(values)), key=values.__getitem__, reverse=True), values

    def _need_judgements(self) -> None:
        without = [index for index, answer in enumerate(self._answers) if answer.verdict is None]
        for name in ("score", "rank"):
            if any(getattr(answer, name) is not None for answer in self._answers):
                self._need_all(name, f"{name}s")
        if without:
            where = ", ".join(map(str, without))
            reason = f"answers {where} have neither a score nor a rank nor a verdict: give each answer the same one"
            raise self._bad(reason, "no judgement")

    def _verdicts(self, choice: PairChoice) -> dict[int, bool]:
        """Whether each answer is desirable; answers that are chosen and rejected in different pairs are left out."""
        named = [answer.verdict for answer in self._answers]
        if all(named):
            return {index: verdict == "desirable" for index, verdict in enumerate(named)}
        if any(named):
            raise self._bad(
                f"answer {named.index(None)} has no verdict, and others have: give each one", "no verdict"
            )
        if len(self._answers) < 2:
            raise self._bad("the answer has no verdict: say whether it is desirable or not", "no verdict")
        pairs = self.pairs(choice)
        chosen, rejected = {pair.chosen for pair in pairs}, {pair.rejected for pair in pairs}
        return {index: index in chosen for index in sorted(chosen ^ rejected)}

    def _check_agreement(self, scores: Sequence[float], ranks: Sequence[float]) -> None:
        for first in range(len(scores)):
            for second in range(len(scores)):
                if ranks[first] < ranks[second] and scores[first] < scores[second]:
                    raise self._bad(
                        f"answer {first} is ranked before answer {second} and has a lower score "
                        f"({scores[first]:g}, {scores[second]:g}): mend one of them",
                        "rank against score",
                    )

    def _complete(self, name: str) -> list[float] | None:
        """The values of all answers; None where an answer has none."""
        values = [float(v) for answer in self._answers if (v := getattr(answer, name)) is not None]
        return values if len(values) == len(self._answers) else None

    def _need_all(self, name: str, what: str) -> None:
        missing = [index for index, answer in enumerate(self._answers) if getattr(answer, name) is None]
        if missing:
            where = ", ".join(map(str, missing))
            raise self._bad(
                f"{what} are needed, and there are none of answers {where}: add them", f"no {what}"
            )

    def _margin(self, chosen: int, rejected: int) -> float | None:
        chosen_score, rejected_score = self._answers[chosen].score, self._answers[rejected].score
        if chosen_score is not None and rejected_score is not None:
            return chosen_score - rejected_score
        margin = self._sample.metadata.get(MARGIN)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or len(self._answers) != 2:
            return None
        return float(margin)

    def _bad(self, reason: str, kind: str) -> BadSample:
        return BadSample(self._place, self._sample.id, reason, kind)
