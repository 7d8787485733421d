"""The stage `multiple_choice`: samples whose answers are of few become questions with options, in a prompt of choice.

The options of a question are `metadata.choices` of its sample, or drawn among the answers that all samples give to it.
What is drawn depends on the seed and the sample's id alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from pydantic import Field, field_validator

from audiollm.data.chat.question_prompts import MAX_WORDS, PLAIN, asks_for_tags, prompt_text, question_prompt
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.files.set_aside import SetAside
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputPath, Stage, StageConfig, StagePlan, planned_fact

NAME = "multiple_choice"


class MultipleChoiceConfig(StageConfig):
    """Settings of the stage `multiple_choice`."""

    samples: InputPath
    """A .jsonl of conversations that end with the right answer, as `compose` writes it."""
    prompt: str = PLAIN
    """How the question is asked: `options`, `ke_omni_r`, `ke_omni_r_direct`, `r1_aqa`, or a text with `{question}` and
    `{options}` or `{lettered}`."""
    max_words: int = Field(MAX_WORDS, ge=1)
    """Longest thought that the prompt asks for, in words."""
    options: int = Field(4, ge=2, le=26)
    """Most options of a question, where they are drawn."""
    thought: str | None = None
    """Thought before the right answer, to be learnt by supervised training: a text with fields of the metadata
    (`I hear {text}.`) and `{answer}`; None: the right answer alone."""
    seed: int = 0
    """Seed of the wrong options and of the order."""

    @field_validator("prompt")
    @classmethod
    def _prompt_reads(cls, prompt: str) -> str:
        try:
            prompt_text(prompt)
        except ConfigError as error:
            raise ValueError(f"{error.message}; {error.remedy}") from None
        return prompt


def run_multiple_choice(config: MultipleChoiceConfig, context: Context) -> dict[str, Any]:
    """Write `samples.jsonl`; returns counts.

    Raises:
        StageError: no sample has a question with an answer of few (exit code 2).
    """
    from audiollm.data.records.manifest import read_samples
    from audiollm.evaluate.listening.stage import choices_of, question_of

    samples, bad = read_samples(config.samples)
    aside = SetAside(context.folder / "set_aside.jsonl", NAME)
    aside.add(bad)
    answered = [s for s in samples if s.messages[-1].role == "assistant" and s.texts("assistant")]
    answers = choices_of(answered)
    questions = []
    for sample in samples:
        try:
            questions.append(as_question(sample, answers.get(question_of(sample), ()), config))
        except BadSample as error:
            aside.add([error.with_traceback(None)])
    if not questions:
        raise StageError(
            f"no sample of {config.samples} has a question with an answer of few", "see set_aside.jsonl", 2
        )
    write_samples(context.folder / "samples.jsonl", questions)
    tested = sum(sample.is_held_out for sample in questions)
    context.say(f"{len(questions) - tested} questions to train on, {tested} to test")
    return {"questions": len(questions), "test_questions": tested, "set_aside": len(aside.rows)}


def as_question(sample: Sample, answers: Sequence[str], config: MultipleChoiceConfig) -> Sample:
    """The sample as a question with options.

    Args:
        answers: all answers to its question.

    Raises:
        BadSample: too few answers to choose from, or a thought whose fields the sample does not have.
    """
    from audiollm.evaluate.listening.stage import question_of

    right = sample.texts("assistant")[-1].strip() if sample.texts("assistant") else ""
    answers = _listed_choices(sample) or answers
    if right not in answers or len(answers) < 2:
        raise BadSample(
            config.samples.name, sample.id, "its question has no other answers to choose from", "no options"
        )
    choices = _listed_choices(sample) or _draw_choices(sample, right, answers, config)
    question = question_prompt(question_of(sample), choices, config.prompt, config.max_words)
    reply = f"<answer>{right}</answer>" if asks_for_tags(config.prompt) else right
    if config.thought is not None:
        reply = f"<think>{_filled(config, sample, right)}</think><answer>{right}</answer>"
    audio_parts = [audio_part for audio_part in sample.audio("user") if isinstance(audio_part, AudioPart)]
    system = [message for message in sample.messages if message.role == "system"]
    messages = [
        *system,
        Message(role="user", content=[*audio_parts, TextPart(text=question)]),
        Message(role="assistant", content=[TextPart(text=reply)]),
    ]
    return sample.model_copy(
        update={"messages": messages, "metadata": {**sample.metadata, "choices": choices}}
    )


def _listed_choices(sample: Sample) -> list[str]:
    """The options that the sample's metadata lists; none where it lists none."""
    choices = sample.metadata.get("choices")
    return [str(choice) for choice in choices] if isinstance(choices, list) else []


def _draw_choices(
    sample: Sample, right: str, answers: Sequence[str], config: MultipleChoiceConfig
) -> list[str]:
    generator = random.Random(f"{config.seed}/{sample.id}")
    wrong_answers = [answer for answer in answers if answer != right]
    wrong = generator.sample(wrong_answers, min(len(wrong_answers), config.options - 1))
    return generator.sample([right, *wrong], 1 + len(wrong))


def _filled(config: MultipleChoiceConfig, sample: Sample, answer: str) -> str:
    values: Mapping[str, Any] = {**sample.metadata, "answer": answer}
    thought = config.thought or ""
    for _, name, _, _ in Formatter().parse(thought):
        if name is not None and not isinstance(values.get(name), str | int | float):
            raise BadSample(config.samples.name, sample.id, f"its metadata has no {name!r}", "no thought")
    return thought.format_map(values)


def plan_multiple_choice(config: MultipleChoiceConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    facts = {name: planned_fact(plans, config.samples, name) for name in ("samples", "clips", "audio_s")}
    note = f"questions with at most {config.options} options"
    return StagePlan(memory_mb=300, disk_mb=5, core_seconds=1.0, note=note, facts=facts)


STAGE = Stage(
    kind=NAME,
    config=MultipleChoiceConfig,
    run=run_multiple_choice,
    artifacts={"samples": "samples.jsonl"},
    help="make questions with options of samples with answers of few",
    plan=plan_multiple_choice,
)
