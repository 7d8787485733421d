"""The stage `sample_answers`: a model answers each prompt several times, and every answer is scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from audiollm.errors import BadSample, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan

if TYPE_CHECKING:
    from audiollm.data.records.sample import RatedAnswer, Sample
    from pipelines.answers.samplers import AnswerSampling

Scorer = Literal["choice", "exact", "reward_model"]


class SampleAnswersConfig(StageConfig):
    """Settings of `sample_answers`."""

    model: InputPath
    """The model that answers: a trained one's folder, or an audio LLM of transformers."""
    codec: InputPath | None = None
    """Folder of the codec, for a model that hears codes; a model with an audio encoder needs none."""
    samples: InputPath
    """A .jsonl of samples; the last message of each, where it is the assistant's, is the right answer."""
    answers: int = Field(4, ge=1)
    """Answers to each prompt; equal ones are kept once, and counted."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(64, ge=1)
    """Longest answer, in tokens."""
    seed: int = 0
    add_right: bool = True
    """The right answer is one of the answers, whether the model gave it or not."""
    score: dict[Scorer, float] = Field({"choice": 1.0}, min_length=1)
    """Weights of the scores whose sum is an answer's `score`. `choice`: 1 where the answer names the right one among
    the sample's `choices` (metadata; else the answers that the samples give to the same question); `exact`: 1 where it
    is the right answer, word by word; `reward_model`: that of `reward_model`."""
    reward_model: InputPath | None = None
    """Folder of the stage train_reward."""
    max_samples: int | None = Field(None, ge=1)
    """Samples of each split, evenly picked; None: all."""
    strict: bool = False
    """Stop at the first sample that cannot be asked; otherwise it is set aside, counted and left out."""

    @model_validator(mode="after")
    def _reward_model_is_read(self) -> SampleAnswersConfig:
        if ("reward_model" in self.score) != (self.reward_model is not None):
            raise ValueError("score.reward_model (its weight) and reward_model (its folder) go together")
        return self


def run_sample_answers(config: SampleAnswersConfig, context: Context) -> dict[str, Any]:
    """Write `samples.jsonl`, whose samples hold their answers with scores; what was answered is never asked again.

    Raises:
        StageError: no sample, a score whose data are missing, or a bad sample where `strict` is set.
    """
    from audiollm.data.records.manifest import read_samples
    from audiollm.data.records.sample import write_samples
    from audiollm.evaluate.report.store import RowStore
    from audiollm.evaluate.report.suite import spread_items
    from audiollm.files.set_aside import SetAside
    from pipelines.answers.samplers import AnswerSampling, load_sampler
    from pipelines.answers.scorers import check_labels, make_scorers

    samples, bad = read_samples(config.samples)
    set_aside = SetAside(context.folder / "set_aside.jsonl", "sample_answers", strict=config.strict)
    splits = sorted({str(sample.metadata.get("split")) for sample in samples})
    chosen = [
        sample
        for split in splits
        for sample in spread_items(
            [each for each in samples if str(each.metadata.get("split")) == split], config.max_samples
        )
    ]
    if not chosen:
        raise StageError(f"{config.samples} has no samples", "give a .jsonl of samples", 2)
    check_labels(list(config.score), chosen, str(config.samples))
    try:
        set_aside.add(bad)
        scorers = make_scorers(list(config.score), config.reward_model, samples)
        sampler, sampling = (
            load_sampler(config.model, config.codec),
            AnswerSampling(config.temperature, config.top_p, config.max_tokens, config.seed),
        )
        store = RowStore(context.folder / "kept.jsonl")
        answered: list[Sample] = []
        with context.progress("answering", len(chosen)) as bar:
            for sample in chosen:
                try:
                    _check_right(sample, config)
                    texts = _texts(sample, sampler, sampling, config.answers, store)
                    answered.append(_with_answers(sample, texts, config, scorers))
                except BadSample as error:
                    set_aside.add([error.with_traceback(None)])
                bar.advance(bar.task_ids[0])
    except BadSample as error:
        raise StageError(str(error), "mend or remove it, or leave `strict` out to set it aside", 2) from error
    if not answered:
        raise StageError("no sample could be asked", "see set_aside.jsonl", 1)
    write_samples(context.folder / "samples.jsonl", answered)
    return _figures(answered, len(set_aside.rows))


def _check_right(sample: Sample, config: SampleAnswersConfig) -> None:
    """Raises: BadSample: an answer is to be compared with the right one, and there is none."""
    if {"choice", "exact"}.intersection(config.score) and sample.messages[-1].role != "assistant":
        raise BadSample(
            "", sample.id, "has no right answer: its last message must be the assistant's", "no right answer"
        )


def _texts(sample: Sample, sampler: Any, sampling: AnswerSampling, count: int, store: Any) -> list[str]:
    """The model's answers; those of an earlier attempt are taken from the store."""
    from dataclasses import asdict

    from pipelines.answers.samplers import prompt_and_answer

    messages, _ = prompt_and_answer(sample)
    asked = sample.model_copy(update={"messages": messages})
    key = [sampler.fingerprint, sample.id, [m.model_dump(mode="json") for m in messages], asdict(sampling)]
    rows = [store.get(*key, number) for number in range(count)]
    missing = [number for number, row in enumerate(rows) if row is None]
    if missing:
        for number, text in zip(missing, sampler.sample(asked, missing, sampling), strict=True):
            store.add({"text": text}, *key, number)
            rows[number] = {"text": text}
    return [str(row["text"]) for row in rows]


def _with_answers(
    sample: Sample, texts: Sequence[str], config: SampleAnswersConfig, scorers: Mapping[str, Any]
) -> Sample:
    """The prompt with its different answers, each scored; an empty answer cannot be trained on and is left out."""
    from audiollm.data.records.sample import RatedAnswer, TextPart
    from pipelines.answers.samplers import prompt_and_answer

    messages, right = prompt_and_answer(sample)
    counts = Counter(text for text in texts if text.strip())
    origins = dict.fromkeys(counts, config.model.name)
    if config.add_right and right:
        counts.setdefault(right, 0)
        origins.setdefault(right, "right answer")
    if not counts:
        raise BadSample("", sample.id, "every answer is empty", "empty answer")
    made: list[RatedAnswer] = [
        RatedAnswer(content=[TextPart(text=text)], origin=origins[text], metadata={"times": counts[text]})
        for text in counts
    ]
    metadata = {**sample.metadata, **({"right": right} if right else {})}
    asked = sample.model_copy(update={"messages": messages, "answers": made, "metadata": metadata})
    scores = {name: scorer(asked) for name, scorer in scorers.items()}
    rated = []
    for place, answer in enumerate(made):
        own = {name: values[place] for name, values in scores.items()}
        total = sum(config.score[name] * value for name, value in own.items())  # type: ignore[index]
        rated.append(
            answer.model_copy(update={"score": total, "metadata": {**answer.metadata, "scores": own}})
        )
    return asked.model_copy(update={"answers": rated})


def _figures(answered: Sequence[Sample], set_aside: int) -> dict[str, Any]:
    drawn = [a for sample in answered for a in sample.answers if a.metadata["times"]]
    times = sum(a.metadata["times"] for a in drawn)
    score = sum((a.score or 0.0) * a.metadata["times"] for a in drawn) / max(1, times)
    return {
        "samples": len(answered),
        "answers": times,
        "different_answers": len(drawn),
        "mean_score": round(score, 4),
        "set_aside": set_aside,
    }


def _plan(config: SampleAnswersConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    note = f"{config.answers} answers to each prompt"
    if config.max_samples:
        note += f", at most {config.max_samples} prompts of each split"
    return StagePlan(memory_mb=1500, disk_mb=5, note=note)


STAGE = Stage(
    kind="sample_answers",
    config=SampleAnswersConfig,
    run=run_sample_answers,
    artifacts={"samples": "samples.jsonl"},
    help="have a model answer each prompt several times, and score its answers",
    plan=_plan,
)
