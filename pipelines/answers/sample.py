"""The stage `sample_answers`: a model answers each prompt several times, and every answer is scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from audiollm.errors import BadSample, StageError
from audiollm.hub_models.names import folder_label
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan, planned_fact
from pipelines.answers.settings import SampleAnswersConfig

if TYPE_CHECKING:
    from audiollm.data.records.sample import RatedAnswer, Sample
    from audiollm.evaluate.report.store import RowStore
    from audiollm.files.set_aside import SetAside
    from pipelines.answers.samplers import AnswerSource
    from pipelines.answers.scorers import AnswerRater, ChoiceJudge

NO_SCORE = "no score"
SECONDS_PER_ANSWER = 0.009
"""Core-seconds of a short answer of a model of size tiny, with its score."""


def run_sample_answers(config: SampleAnswersConfig, context: Context) -> dict[str, Any]:
    """Write `samples.jsonl`, whose samples hold their answers with scores.

    What was answered is never asked again, and what was scored is never judged again, in this stage or another of the
    run.

    Raises:
        StageError: no sample, a score whose data are missing, or a bad sample where `strict` is set.
    """
    from audiollm.data.records.manifest import read_samples
    from audiollm.data.records.sample import write_samples
    from audiollm.evaluate.report.store import RowStore
    from audiollm.files.set_aside import SetAside
    from pipelines.answers.score_store import FILE
    from pipelines.answers.scorers import AnswerRater, ChoiceJudge, check_labels, make_judges

    samples, bad = read_samples(config.samples)
    set_aside = SetAside(context.folder / "set_aside.jsonl", "sample_answers", strict=config.strict)
    selected = _select_samples(samples, config.max_samples)
    if not selected:
        raise StageError(f"{config.samples} has no samples", "give a .jsonl of samples", 2)
    check_labels(list(config.score), selected, str(config.samples))
    try:
        set_aside.add(bad)
        judges = make_judges(config, samples, context)
        choice = judges.get("choice")
        assert choice is None or isinstance(choice, ChoiceJudge)
        other_stores = (
            path for path in context.folder.parent.glob(f"*/{FILE}") if path.parent != context.folder
        )
        weights = {str(name): weight for name, weight in config.score.items()}
        scores = AnswerRater(judges, weights, RowStore(context.folder / FILE, sorted(other_stores)))
        store = RowStore(context.folder / "kept.jsonl")
        answered = list(_answered(selected, config, store, choice, set_aside, context))
        rated = list(_rated(answered, scores, set_aside, context))
    except BadSample as error:
        raise StageError(str(error), "mend or remove it, or leave `strict` out to set it aside", 2) from error
    if not rated:
        raise StageError("no sample was answered and scored", "see set_aside.jsonl", 1)
    write_samples(context.folder / "samples.jsonl", rated)
    return _count_answers(rated, set_aside)


def load_source(
    config: SampleAnswersConfig, samples: Sequence[Sample], store: RowStore, context: Context
) -> AnswerSource:
    """Load the model that answers.

    Raises:
        ConfigError: no model, or one that does not answer in this modality.
    """
    from pipelines.answers.samplers import AnswerSampling, WrittenAnswers, load_sampler

    origin = folder_label(config.model)
    if config.modality == "text":
        sampling = AnswerSampling(config.temperature, config.top_p, config.max_answer_tokens, config.seed)
        sampler = load_sampler(config.model, config.codec)
        return WrittenAnswers(sampler, sampling, config.group_size, origin, store)
    from audiollm.synthesis.run import longest_allowed_s
    from pipelines.answers.spoken import SpeechSampling, SpokenAnswers, load_speaker_model

    generator, fingerprint = load_speaker_model(config.model, config.codec)
    speech_settings = generator.defaults.over(
        temperature=config.temperature,
        top_p=config.top_p,
        text_guidance=config.text_guidance,
        speaker_guidance=config.speaker_guidance,
    )
    context.say(f"drawn with {speech_settings}")
    limit_s = min(config.max_duration_s, longest_allowed_s(samples))
    speech = SpeechSampling(speech_settings.sampling, limit_s, config.max_answer_tokens, config.seed)
    return SpokenAnswers(generator, fingerprint, speech, config.group_size, origin, store, context.folder)


def _select_samples(samples: Sequence[Sample], max_samples: int | None) -> list[Sample]:
    from audiollm.evaluate.report.suite import spread_items

    splits = sorted({str(sample.metadata.get("split")) for sample in samples})
    return [
        sample
        for split in splits
        for sample in spread_items(
            [split_sample for split_sample in samples if str(split_sample.metadata.get("split")) == split],
            max_samples,
        )
    ]


def _answered(
    selected: Sequence[Sample],
    config: SampleAnswersConfig,
    store: RowStore,
    judge: ChoiceJudge | None,
    set_aside: SetAside,
    context: Context,
) -> Iterator[Sample]:
    """The prompts with their answers; the model is let go of before the first answer is scored.

    Args:
        judge: what will compare the answers with the right ones, which it is to read as right.
    """
    source = load_source(config, selected, store, context)
    with context.progress("answering", len(selected)) as bar:
        for first in range(0, len(selected), source.block):
            block = selected[first : first + source.block]
            source.prepare(block)
            for sample in block:
                try:
                    _check_right(sample, config, judge)
                    yield _with_answers(sample, source, config.add_right)
                except BadSample as error:
                    set_aside.add([error.with_traceback(None)])
                bar.advance(bar.task_ids[0])


def _rated(
    answered: Sequence[Sample], scores: AnswerRater, set_aside: SetAside, context: Context
) -> Iterator[Sample]:
    with context.progress("scoring", len(answered)) as bar:
        for sample in answered:
            try:
                rated, reasons = scores.rate(sample)
                for number, reason in enumerate(reasons):
                    set_aside.add([BadSample(f"answer {number}", sample.id, reason, NO_SCORE)])
                yield rated
            except BadSample as error:
                set_aside.add([error.with_traceback(None)])
            bar.advance(bar.task_ids[0])


def _check_right(sample: Sample, config: SampleAnswersConfig, judge: ChoiceJudge | None) -> None:
    """Raises: BadSample: an answer is to be compared with the right one, and there is none, or it would be wrong."""
    if {"choice", "exact"}.intersection(config.score) and sample.messages[-1].role != "assistant":
        raise BadSample(
            "", sample.id, "has no right answer: its last message must be the assistant's", "no right answer"
        )
    if judge is not None:
        from pipelines.answers.samplers import prompt_and_answer

        judge.check_key(sample, prompt_and_answer(sample)[1] or "")


def _with_answers(sample: Sample, source: AnswerSource, add_right: bool) -> Sample:
    """The prompt with its different answers; an empty answer cannot be trained on and is left out."""
    answer_by_content: dict[Any, RatedAnswer] = {}
    times: dict[Any, int] = {}
    for answer in source.answers(sample):
        if answer is not None:
            answer_content = answer.says()
            answer_by_content.setdefault(answer_content, answer)
            times[answer_content] = times.get(answer_content, 0) + 1
    right = source.right(sample) if add_right else None
    if right is not None:
        answer_by_content.setdefault(right.says(), right)
    if not answer_by_content:
        raise BadSample("", sample.id, "every answer is empty", "empty answer")
    answers = [
        answer.model_copy(update={"metadata": {"times": times.get(answer_content, 0), **answer.metadata}})
        for answer_content, answer in answer_by_content.items()
    ]
    return source.prompt_sample(sample).model_copy(update={"answers": answers})


def _count_answers(rated: Sequence[Sample], set_aside: SetAside) -> dict[str, Any]:
    sampled_answers = [a for sample in rated for a in sample.answers if a.metadata["times"]]
    times = sum(a.metadata["times"] for a in sampled_answers)
    score = sum((a.score or 0.0) * a.metadata["times"] for a in sampled_answers) / max(1, times)
    unscored = set_aside.counts[NO_SCORE]
    cut = sum(not a.metadata.get("stopped", True) for a in sampled_answers)
    return {
        "samples": len(rated),
        "answers": times,
        "different_answers": len(sampled_answers),
        "mean_score": round(score, 4),
        "set_aside": len(set_aside.rows) - unscored,
        **({"answers_without_score": unscored} if unscored else {}),
        **({"answers_cut": cut} if cut else {}),
    }


def _plan_sampling(config: SampleAnswersConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    note = f"{config.group_size} answers to each prompt"
    if config.max_samples:
        note += f", at most {config.max_samples} prompts of each split"
    prompts = planned_fact(plans, config.samples, "samples")
    if config.max_samples:
        prompts = min(prompts, 2 * config.max_samples)
    seconds = 5 + SECONDS_PER_ANSWER * config.group_size * prompts if prompts else None
    facts = {"samples": prompts}
    return StagePlan(memory_mb=1500, disk_mb=5, core_seconds=seconds, note=note, facts=facts)


STAGE = Stage(
    kind="sample_answers",
    config=SampleAnswersConfig,
    run=run_sample_answers,
    artifacts={"samples": "samples.jsonl"},
    help="have a model answer each prompt several times, and score its answers",
    plan=_plan_sampling,
    keeps=("kept.jsonl", "scores.jsonl", "audio", "codes"),
)
