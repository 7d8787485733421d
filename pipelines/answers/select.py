"""The stage `select_answers`: from scored answers to pairs to prefer among, or to right answers to learn."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from audiollm.errors import StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan

if TYPE_CHECKING:
    from audiollm.data.records.sample import RatedAnswer, Sample


def text_of(answer: RatedAnswer) -> str:
    """The words of an answer."""
    return "".join(part.text for part in answer.content if part.type == "text").strip()


class SelectAnswersConfig(StageConfig):
    """Settings of `select_answers`."""

    samples: InputPath
    """A .jsonl of samples with scored answers, as `sample_answers` writes it."""
    select: Literal["best_worst", "all_pairs", "right", "rejection"] = "best_worst"
    """`best_worst`: the best and the worst answer of each prompt; `all_pairs`: every two whose scores differ enough,
    one record each; `right`: conversations with the right answers, to be trained on (RFT); `rejection`: answers drawn
    by statistical rejection sampling, paired in the order of the draw (RSO)."""
    min_margin: float = Field(0.0, ge=0)
    """Least difference of the two scores; equal scores make no pair."""
    max_length_ratio: float | None = Field(None, ge=1)
    """Characters of the longer of the two answers over those of the shorter one, at most: the pair with the largest
    margin among those is taken. None: any."""
    own_answers: bool = True
    """Answers that the model gave itself are taken alone (`right`, `rejection`), and not the right answer that
    `sample_answers` adds."""
    right_score: float = 1.0
    """Answers from this score on are right."""
    most: int = Field(4, ge=1)
    """Right answers of a prompt, at most (the shortest), or answers that rejection sampling draws."""
    beta: float = Field(0.5, gt=0)
    """Rejection sampling takes an answer with probability exp((score - best score) / beta)."""
    seed: int = 0

    @model_validator(mode="after")
    def _settings_are_read(self) -> SelectAnswersConfig:
        read = {
            "best_worst": {"min_margin", "max_length_ratio"},
            "all_pairs": {"min_margin", "max_length_ratio"},
            "right": {"right_score", "most", "own_answers"},
            "rejection": {"most", "beta", "seed", "min_margin", "own_answers"},
        }
        every = set().union(*read.values())
        unread = (self.model_fields_set & every) - read[self.select] - {"seed"}
        if unread:
            raise ValueError(f"{min(unread)} is set, but select {self.select} does not read it: leave it out")
        return self


def run_select_answers(config: SelectAnswersConfig, context: Context) -> dict[str, Any]:
    """Write `samples.jsonl`; held-out samples (metadata `split: test`) are selected as the others.

    Raises:
        StageError: nothing is left.
    """
    from audiollm.data.records.manifest import read_samples
    from audiollm.data.records.sample import write_samples
    from audiollm.files.set_aside import SetAside

    samples, bad = read_samples(config.samples)
    set_aside = SetAside(context.folder / "set_aside.jsonl", "select_answers")
    set_aside.add(bad)
    left_out: Counter[str] = Counter()
    selected = []
    for sample in samples:
        scored = [answer for answer in sample.answers if answer.score is not None]
        made = _SELECT[config.select](sample, scored, config) if scored else "no scored answer"
        if isinstance(made, str):
            left_out[made] += 1
        else:
            selected += made
    if not selected:
        raise StageError(
            f"nothing is left: {dict(left_out)}", "see the scores, min_margin and right_score", 1
        )
    write_samples(context.folder / "samples.jsonl", selected)
    counts = {
        f"without {why}" if not why.startswith("no ") else why: n for why, n in sorted(left_out.items())
    }
    return {"samples": len(samples), "selected": len(selected), **counts, "set_aside": len(set_aside.rows)}


def rejection_sample(
    scores: Sequence[float], count: int, beta: float, draw: Callable[[], float]
) -> list[int]:
    """Draw places of answers from the optimal policy of a reward, by rejection.

    Passes over the answers that are left; each is taken with probability exp((score - best score left) / beta), until
    `count` are taken or none is left.

    Args:
        draw: a uniform number in [0, 1).

    Returns:
        Places in the order in which they were taken.

    Source: Liu et al., "Statistical Rejection Sampling Improves Preference Optimization" (arXiv 2309.06657),
    algorithm 1.
    """
    left = list(range(len(scores)))
    taken: list[int] = []
    while left and len(taken) < count:
        best = max(scores[place] for place in left)
        kept = []
        for number, place in enumerate(left):
            if len(taken) < count and draw() < math.exp((scores[place] - best) / beta):
                taken.append(place)
            else:
                kept.append(left[number])
        left = kept
    return taken


def _pair(sample: Sample, chosen: RatedAnswer, rejected: RatedAnswer, suffix: str = "") -> Sample:
    return sample.model_copy(update={"id": sample.id + suffix, "answers": [chosen, rejected]})


def _pairs(
    answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[tuple[RatedAnswer, RatedAnswer]]:
    """The allowed pairs, (better, worse), those with the largest margin first."""
    found = []
    for better in answers:
        for worse in answers:
            margin = (better.score or 0.0) - (worse.score or 0.0)
            if margin <= 0 or margin < config.min_margin:
                continue
            lengths = sorted(max(1, len(text_of(each))) for each in (better, worse))
            if config.max_length_ratio is None or lengths[1] <= config.max_length_ratio * lengths[0]:
                found.append((margin, better, worse))
    found.sort(key=lambda row: -row[0])
    return [(better, worse) for _, better, worse in found]


def _best_worst(
    sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[Sample] | str:
    pairs = _pairs(answers, config)
    return [_pair(sample, *pairs[0])] if pairs else "a pair with such a margin and lengths"


def _all_pairs(
    sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[Sample] | str:
    pairs = _pairs(answers, config)
    made = [_pair(sample, *pair, f"#{number}") for number, pair in enumerate(pairs)]
    return made or "a pair with such a margin and lengths"


def _given(answers: Sequence[RatedAnswer], config: SelectAnswersConfig) -> list[RatedAnswer]:
    """The answers that the model gave; one that does not tell how often it was given counts as given."""
    return [answer for answer in answers if not config.own_answers or answer.metadata.get("times", 1)]


def _right(sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig) -> list[Sample] | str:
    from audiollm.data.records.sample import Message

    given = _given(answers, config)
    right = [answer for answer in given if (answer.score or 0.0) >= config.right_score]
    right.sort(key=lambda answer: len(text_of(answer)))
    made = []
    for number, answer in enumerate(right[: config.most]):
        messages = [*sample.messages, Message(role="assistant", content=answer.content)]
        update = {"id": f"{sample.id}#{number}", "messages": messages, "answers": []}
        made.append(sample.model_copy(update=update))
    return made or "a right answer"


def _rejection(
    sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[Sample] | str:
    digest = hashlib.sha256(f"{config.seed}/{sample.id}".encode()).digest()
    dice = random.Random(int.from_bytes(digest[:8], "little"))
    given = _given(answers, config)
    scores = [answer.score or 0.0 for answer in given]
    drawn = [given[place] for place in rejection_sample(scores, config.most, config.beta, dice.random)]
    made = []
    for number, (one, other) in enumerate(zip(drawn[::2], drawn[1::2], strict=False)):
        better, worse = sorted((one, other), key=lambda answer: -(answer.score or 0.0))
        margin = (better.score or 0.0) - (worse.score or 0.0)
        if margin > 0 and margin >= config.min_margin:
            made.append(_pair(sample, better, worse, f"#{number}"))
    return made or "two drawn answers that differ in score"


_SELECT: dict[str, Callable[[Any, Any, SelectAnswersConfig], list[Any] | str]] = {
    "best_worst": _best_worst,
    "all_pairs": _all_pairs,
    "right": _right,
    "rejection": _rejection,
}


def _plan(config: SelectAnswersConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    return StagePlan(memory_mb=300, disk_mb=5, note=config.select)


STAGE = Stage(
    kind="select_answers",
    config=SelectAnswersConfig,
    run=run_select_answers,
    artifacts={"samples": "samples.jsonl"},
    help="select pairs, or right answers, from scored ones",
    plan=_plan,
)
