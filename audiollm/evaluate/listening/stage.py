"""The stage `evaluate_listening`: a model's answers to held-out samples, transcripts by words and others by choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from audiollm.data.tables.splits import is_of_split
from audiollm.errors import StageError
from audiollm.files.atomic import write_json
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputModel, InputPath, Stage, StageConfig, StagePlan, planned_fact

if TYPE_CHECKING:
    from audiollm.data.records.sample import Message, Sample
    from audiollm.evaluate.listening.asr import TranscribedRecording
    from audiollm.evaluate.listening.audio_qa import Question
    from audiollm.evaluate.listening.replies import Inquiry
    from audiollm.evaluate.report.suite import SuiteResult

TRANSCRIPTION = "asr"
"""The task whose answers are compared word by word."""
SECONDS_PER_QUESTION = 0.015
"""Core-seconds of a short answer of a model of size tiny."""
TINY_PARAMETERS = 9e6
"""Parameters of a model of size tiny; an answer of a model with n times as many takes n times as long."""
TEST_SHARE = 1 / 6
"""Share of the samples that is held out, assumed."""
MAX_CHOICES = 26
_ABOUT = ("difficulty", "category")
"""Metadata that questions are grouped by, beside their domain or task."""


class ListeningConfig(StageConfig):
    """Settings of `evaluate_listening`."""

    model: InputModel
    """The model that answers."""
    codec: InputModel | None = None
    """Folder of the codec, for a model that hears codes; a model with an audio encoder needs none."""
    samples: InputPath
    """Samples in a .jsonl file. Those of the task `asr` are scored by words. Of the others, an answer is right if it
    names the sample's and no other option: of `metadata.choices`, else of the answers to the same question."""
    split: Literal["test", "train"] = "test"
    """The split whose questions are asked."""
    max_samples: int = Field(600, ge=1)
    """Samples of each kind (transcripts, questions), evenly picked."""
    language: str = "en"
    """Language of the transcripts that name none."""
    max_answer_tokens: int = Field(64, ge=1)
    """Longest answer, in tokens."""
    batch_size: int = Field(1, ge=1, exclude_if=lambda value: value == 1)
    """Questions that are answered at a time: faster, and sums are rounded in another order."""
    without_audio: bool = Field(False, exclude_if=lambda value: not value)
    """Ask without the recordings, a control: the share of right answers that the questions alone give. Transcripts are
    left out."""
    examples: int = Field(8, ge=0)
    """Cases in each report that can be heard, the worst first."""


def run_listening(config: ListeningConfig, context: Context) -> dict[str, Any]:
    """Ask what is not answered yet; write `asr` and `audio-qa`, each with its results, rows and page.

    Pictures are not shown: `with_video` counts the samples that have some.

    Raises:
        StageError: nothing to ask (exit code 2), or not one answer.
    """
    from audiollm.data.records.manifest import read_samples
    from audiollm.data.records.text_origin import text_recognizers
    from audiollm.evaluate.judges.independence import taught_references_note
    from audiollm.evaluate.listening.replies import ask_in_batches
    from audiollm.evaluate.report.store import RowStore
    from audiollm.evaluate.report.suite import conclude, spread_items, with_warning
    from audiollm.evaluate.subjects.loading import load_answerer

    samples, _ = read_samples(config.samples)
    held = [s for s in samples if is_of_split(s.metadata.get("split"), config.split) and _is_answered(s)]
    transcribed = [s for s in held if s.task == TRANSCRIPTION and not config.without_audio]
    transcriptions = spread_items(transcribed, config.max_samples)
    choices = choices_of([s for s in samples if s.task != TRANSCRIPTION and _is_answered(s)])
    choice_samples = spread_items([s for s in held if _question_options(s, choices)], config.max_samples)
    if not transcriptions and not choice_samples:
        raise StageError(
            f"{config.samples} has no recording with a question and an answer of few in the split {config.split!r}",
            "give the questions options (metadata.choices; `audiollm convert grpo` reads a column choices), hold some "
            "out, or leave this stage out of the recipe",
            2,
        )
    subject = load_answerer(str(config.model), config.codec, config.max_answer_tokens)
    inquiries = [_inquiry(sample, config.without_audio) for sample in [*transcriptions, *choice_samples]]
    with context.progress("listening", len(inquiries)) as bar:
        store = RowStore(context.folder / "kept.jsonl")
        replies = ask_in_batches(
            subject, inquiries, store, lambda _: bar.advance(bar.task_ids[0]), config.batch_size
        )
    problems = {reply.problem for reply in replies.values()}
    if "" not in problems:
        raise StageError(f"not one answer: {sorted(problems)[0]}", "see the model and the samples", 1)
    outcomes: dict[str, SuiteResult] = {}
    if transcriptions:
        from audiollm.evaluate.listening.asr import evaluate_asr

        recordings = [_transcribed_recording(sample, config.language) for sample in transcriptions]
        has_speakers = any("speaker" in recording.about for recording in recordings)
        outcomes["asr"] = evaluate_asr(recordings, replies, "whisper", ["speaker"] if has_speakers else [])
    if choice_samples:
        from audiollm.evaluate.listening.audio_qa import evaluate_audio_qa

        questions = [_as_question(sample, _question_options(sample, choices)) for sample in choice_samples]
        outcomes["audio-qa"] = evaluate_audio_qa(questions, replies, Path())
    warning = taught_references_note(config.model, [text_recognizers(sample) for sample in transcriptions])
    if warning:
        context.say(f"note: {warning}")
        outcomes["asr"] = with_warning(outcomes["asr"], warning)
    for name, outcome in outcomes.items():
        conclude(outcome, context.folder / name, config.examples, context.console)
    figures = listening_figures({name: outcome.result for name, outcome in outcomes.items()})
    figures["with_video"] = sum(bool(sample.video_parts()) for sample in [*transcriptions, *choice_samples])
    if figures["with_video"]:
        context.say(f"{figures['with_video']} samples have a video, whose pictures the model is not shown")
    write_json(context.folder / "results.json", figures)
    return figures


def choices_of(samples: Sequence[Sample]) -> dict[str, tuple[str, ...]]:
    """The different answers in words to each question that has 2 to 26 of them."""
    answers_by_question: dict[str, set[str]] = {}
    for sample in samples:
        if not sample.texts("assistant"):  # its answer is spoken
            continue
        answers_by_question.setdefault(question_of(sample), set()).add(_reference_answer(sample))
    return {
        question: tuple(sorted(answers))
        for question, answers in answers_by_question.items()
        if 2 <= len(answers) <= MAX_CHOICES
    }


def listening_figures(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures for the run's summary: error rates by language, accuracy with its interval, and chance."""
    figures: dict[str, Any] = {}
    if "asr" in results:
        figures["recordings"] = results["asr"]["recordings"]
        figures["error_rate"] = {name: table["rate"] for name, table in results["asr"]["words"].items()}
    if "audio-qa" in results:
        table = results["audio-qa"]
        figures |= {key: table[key] for key in ("questions", "accuracy", "low", "high", "chance")}
    return figures


# ------------------------------------------------------------------------------------------------ private


def _is_answered(sample: Sample) -> bool:
    """Whether a sample is one recording, a question and, last, an answer in words."""
    words = bool(sample.texts("user") and sample.texts("assistant"))
    alone = len(sample.audio_parts()) == len(sample.audio("user")) == 1
    return words and alone and sample.messages[-1].role == "assistant"


def question_of(sample: Sample) -> str:
    """The words of the user in a sample, as one line."""
    return " ".join(" ".join(sample.texts("user")).split())


def _reference_answer(sample: Sample) -> str:
    """The right answer, without its tags and a thought before it."""
    from audiollm.evaluate.listening.answer_parts import read_answer

    return read_answer(sample.texts("assistant")[-1]).answer


def _question_options(sample: Sample, choices: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The options of a sample's question: its own, or the answers that samples give to it; none of a transcript."""
    if sample.task == TRANSCRIPTION:
        return ()
    listed_choices = tuple(str(choice) for choice in sample.metadata.get("choices") or ())
    return (
        listed_choices
        if _reference_answer(sample) in listed_choices
        else choices.get(question_of(sample), ())
    )


def _inquiry(sample: Sample, without_audio: bool) -> Inquiry:
    from audiollm.evaluate.listening.replies import Inquiry

    input_audio = sample.audio("user")[0]
    prompt = tuple(sample.messages[:-1])  # in the words and the order that a model is trained on
    if without_audio:
        prompt = tuple(_text_alone(message) for message in prompt)
    return Inquiry(
        sample.id, Path(input_audio.path), question_of(sample), input_audio.start_s, input_audio.end_s, prompt
    )


def _text_alone(message: Message) -> Message:
    texts = [content_part for content_part in message.content if content_part.type == "text"]
    return message.model_copy(update={"content": texts})


def _transcribed_recording(sample: Sample, language: str) -> TranscribedRecording:
    from audiollm.evaluate.listening.asr import TranscribedRecording

    input_audio, metadata = sample.audio("user")[0], sample.metadata
    about = {"speaker": str(metadata["speaker"])} if metadata.get("speaker") else {}
    spoken_language = str(metadata.get("language") or language)
    path = Path(input_audio.path)
    return TranscribedRecording(
        sample.id,
        path,
        _reference_answer(sample),
        spoken_language,
        input_audio.start_s,
        input_audio.end_s,
        about,
    )


def _as_question(sample: Sample, choices: tuple[str, ...]) -> Question:
    from audiollm.evaluate.listening.audio_qa import Question

    input_audio = sample.audio("user")[0]
    return Question(
        id=sample.id,
        audio_id=input_audio.path,
        start_s=input_audio.start_s,
        end_s=input_audio.end_s,
        question=question_of(sample),
        choices=choices,
        answer=_reference_answer(sample),
        task=str(sample.metadata.get("domain") or sample.task),
        **{key: sample.metadata[key] for key in _ABOUT if isinstance(sample.metadata.get(key), str)},
    )


def plan_listening(config: ListeningConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    from audiollm.families.model_sizes import planned_parameters  # here: it reads the model's folder

    num_samples = planned_fact(plans, config.samples, "samples") or 2 * config.max_samples
    questions = min(TEST_SHARE * num_samples, 2 * config.max_samples)
    times_longer = max(1.0, planned_parameters(config.model, plans) / TINY_PARAMETERS)
    return StagePlan(
        memory_mb=1500,
        disk_mb=5,
        core_seconds=4 + SECONDS_PER_QUESTION * times_longer * questions,
        note=f"at most {config.max_samples} transcripts and as many answers",
    )


STAGE = Stage(
    kind="evaluate_listening",
    config=ListeningConfig,
    run=run_listening,
    artifacts={"results": "results.json"},
    help="score a model's transcripts and answers on held-out samples",
    plan=plan_listening,
)
