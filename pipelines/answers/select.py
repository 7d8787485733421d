"""The stage `select_answers`: from scored answers to pairs to prefer among, or to right answers to learn."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from audiollm.errors import BadSample, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan, planned_fact

if TYPE_CHECKING:
    from audiollm.data.records.sample import RatedAnswer, Sample


CHARACTERS, SECONDS = "characters", "seconds"


def text_of(answer: RatedAnswer) -> str:
    """The words of an answer."""
    return "".join(text_part.text for text_part in answer.content if text_part.type == "text").strip()


class AnswerLength(NamedTuple):
    """The length of an answer; lengths of different units cannot be compared."""

    unit: str
    value: float


def length_of(answer: RatedAnswer, sample_id: str) -> AnswerLength:
    """Seconds of a spoken answer (metadata `seconds`, else the spans or files of its recordings), else characters.

    Raises:
        BadSample: the length of a recording is not known.
    """
    from audiollm.audio import AudioError, probe

    parts = answer.audio_parts()
    if not parts:
        return AnswerLength(CHARACTERS, max(1, len(text_of(answer))))
    seconds_in_metadata = answer.metadata.get("seconds")
    if isinstance(seconds_in_metadata, int | float):
        return AnswerLength(SECONDS, float(seconds_in_metadata))
    seconds = 0.0
    for audio_part in parts:
        try:
            end_s = audio_part.end_s if audio_part.end_s is not None else probe(audio_part.path).duration_s
        except AudioError as error:
            raise BadSample("", sample_id, f"how long is an answer? {error}", "unreadable file") from error
        if end_s is None:
            raise BadSample(
                "", sample_id, f"how long is {audio_part.path}? give it an end_s", "unknown length"
            )
        seconds += end_s - audio_part.start_s
    return AnswerLength(SECONDS, seconds)


class SelectAnswersConfig(StageConfig):
    """Settings of `select_answers`."""

    samples: InputPath
    """A .jsonl of samples with scored answers, as `sample_answers` writes it."""
    select: Literal["best_worst", "disjoint", "all_pairs", "right", "rejection"] = "best_worst"
    """`best_worst`: the best and the worst answer of each prompt; `disjoint`: several pairs, each answer in one at
    most: the best and the worst, the next best and the next worst; `all_pairs`: every two whose scores differ enough,
    one record each; `right`: conversations with the right answers, to be trained on (RFT); `rejection`: answers drawn
    by statistical rejection sampling, paired in the order of the draw (RSO)."""
    min_margin: float = Field(0.0, ge=0)
    """Least difference of the two scores; equal scores make no pair."""
    max_length_ratio: float | None = Field(None, ge=1)
    """Length of the longer of the two answers over that of the shorter one, at most: the pair with the largest margin
    among those is taken. Words are measured in characters, speech in seconds. None: any."""
    chosen_not_longer: bool = Field(False, exclude_if=lambda value: not value)
    """The better answer alone is bounded: it is at most as long as the worse one, or `max_length_ratio` times as long.
    A model that learns from such pairs does not learn to answer longer."""
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
    """Seed of the draws of rejection sampling."""
    strict: bool = Field(False, exclude_if=lambda value: not value)
    """Stop at the first bad sample; otherwise it is set aside, counted and left out."""

    @model_validator(mode="after")
    def _settings_are_read(self) -> SelectAnswersConfig:
        read = {
            "best_worst": {"min_margin", "max_length_ratio", "chosen_not_longer"},
            "disjoint": {"min_margin", "max_length_ratio", "chosen_not_longer"},
            "all_pairs": {"min_margin", "max_length_ratio", "chosen_not_longer"},
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
        StageError: nothing is left, or a bad sample where `strict` is set.
    """
    from audiollm.data.records.manifest import read_samples
    from audiollm.data.records.sample import write_samples
    from audiollm.files.set_aside import SetAside

    samples, bad = read_samples(config.samples)
    set_aside = SetAside(context.folder / "set_aside.jsonl", "select_answers", strict=config.strict)
    left_out: Counter[str] = Counter()
    selected: list[Sample] = []
    try:
        set_aside.add(bad)
        for sample in samples:
            try:
                selection = _select(sample, config)
            except BadSample as error:
                set_aside.add([error.with_traceback(None)])
                continue
            if isinstance(selection, str):
                left_out[selection] += 1
            else:
                selected += selection
    except BadSample as error:
        raise StageError(str(error), "mend or remove it, or leave `strict` out to set it aside", 2) from error
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
    remaining = list(range(len(scores)))
    accepted: list[int] = []
    while remaining and len(accepted) < count:
        best = max(scores[place] for place in remaining)
        rejected = []
        for number, place in enumerate(remaining):
            if len(accepted) < count and draw() < math.exp((scores[place] - best) / beta):
                accepted.append(place)
            else:
                rejected.append(remaining[number])
        remaining = rejected
    return accepted


def _select(sample: Sample, config: SelectAnswersConfig) -> list[Sample] | str:
    """The records that a sample gives, or what it lacks."""
    scored = [answer for answer in sample.answers if answer.score is not None]
    return _SELECT[config.select](sample, scored, config) if scored else "no scored answer"


def _make_answer_pair(sample: Sample, better: RatedAnswer, worse: RatedAnswer, suffix: str = "") -> Sample:
    return sample.model_copy(update={"id": sample.id + suffix, "answers": [better, worse]})


def _rank_pairs(
    sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[tuple[RatedAnswer, RatedAnswer]]:
    """The allowed pairs, (better, worse), those with the largest margin first."""
    pairs = []
    for better in answers:
        for worse in answers:
            if _is_pair(better, worse, config, sample.id):
                pairs.append(((better.score or 0.0) - (worse.score or 0.0), better, worse))
    pairs.sort(key=lambda row: -row[0])
    return [(better, worse) for _, better, worse in pairs]


def _is_pair(better: RatedAnswer, worse: RatedAnswer, config: SelectAnswersConfig, sample_id: str) -> bool:
    """Whether two answers make a pair, by margin and lengths."""
    margin = (better.score or 0.0) - (worse.score or 0.0)
    if margin <= 0 or margin < config.min_margin:
        return False
    if config.max_length_ratio is None and not config.chosen_not_longer:
        return True
    first, second = length_of(better, sample_id), length_of(worse, sample_id)
    if first.unit != second.unit:
        return False
    limit = config.max_length_ratio or 1.0
    shorter = second.value if config.chosen_not_longer else min(first.value, second.value)
    longer = first.value if config.chosen_not_longer else max(first.value, second.value)
    return longer <= limit * shorter


def _best_worst(
    sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[Sample] | str:
    pairs = _rank_pairs(sample, answers, config)
    return [_make_answer_pair(sample, *pairs[0])] if pairs else "a pair with such a margin and lengths"


def _disjoint(
    sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[Sample] | str:
    """Pair the best answer with the worst that fits, then the next best with the worst of those that are left."""
    remaining = sorted(answers, key=lambda answer: -(answer.score or 0.0))
    pairs: list[Sample] = []
    while len(remaining) > 1:
        better = remaining.pop(0)
        worst = next(
            (
                place
                for place in reversed(range(len(remaining)))
                if _is_pair(better, remaining[place], config, sample.id)
            ),
            None,
        )
        if worst is not None:
            pairs.append(_make_answer_pair(sample, better, remaining.pop(worst), f"#{len(pairs)}"))
    return pairs or "a pair with such a margin and lengths"


def _all_pairs(
    sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[Sample] | str:
    pairs = _rank_pairs(sample, answers, config)
    samples = [_make_answer_pair(sample, *pair, f"#{number}") for number, pair in enumerate(pairs)]
    return samples or "a pair with such a margin and lengths"


def _model_answers(answers: Sequence[RatedAnswer], config: SelectAnswersConfig) -> list[RatedAnswer]:
    """The answers that the model gave; one that does not tell how often it was given counts as given."""
    return [answer for answer in answers if not config.own_answers or answer.metadata.get("times", 1)]


def _select_right(
    sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[Sample] | str:
    from audiollm.data.records.sample import Message

    model_answers = _model_answers(answers, config)
    right = [answer for answer in model_answers if (answer.score or 0.0) >= config.right_score]
    right.sort(key=lambda answer: length_of(answer, sample.id).value)
    samples = []
    for number, answer in enumerate(right[: config.most]):
        messages = [*sample.messages, Message(role="assistant", content=answer.content)]
        update = {"id": f"{sample.id}#{number}", "messages": messages, "answers": []}
        samples.append(sample.model_copy(update=update))
    return samples or "a right answer"


def _rejection(
    sample: Sample, answers: Sequence[RatedAnswer], config: SelectAnswersConfig
) -> list[Sample] | str:
    digest = hashlib.sha256(f"{config.seed}/{sample.id}".encode()).digest()
    dice = random.Random(int.from_bytes(digest[:8], "little"))
    model_answers = _model_answers(answers, config)
    scores = [answer.score or 0.0 for answer in model_answers]
    drawn_answers = [
        model_answers[place] for place in rejection_sample(scores, config.most, config.beta, dice.random)
    ]
    samples = []
    for number, (first, second) in enumerate(zip(drawn_answers[::2], drawn_answers[1::2], strict=False)):
        better, worse = sorted((first, second), key=lambda answer: -(answer.score or 0.0))
        margin = (better.score or 0.0) - (worse.score or 0.0)
        if margin > 0 and margin >= config.min_margin:
            samples.append(_make_answer_pair(sample, better, worse, f"#{number}"))
    return samples or "two drawn answers that differ in score"


_SELECT: dict[str, Callable[[Any, Any, SelectAnswersConfig], list[Any] | str]] = {
    "best_worst": _best_worst,
    "disjoint": _disjoint,
    "all_pairs": _all_pairs,
    "right": _select_right,
    "rejection": _rejection,
}


def _plan_selection(config: SelectAnswersConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    facts = {"samples": planned_fact(plans, config.samples, "samples")}
    return StagePlan(memory_mb=300, disk_mb=5, core_seconds=2.0, note=config.select, facts=facts)


STAGE = Stage(
    kind="select_answers",
    config=SelectAnswersConfig,
    run=run_select_answers,
    artifacts={"samples": "samples.jsonl"},
    help="select pairs, or right answers, from scored ones",
    plan=_plan_selection,
)
