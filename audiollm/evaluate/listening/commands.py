"""The commands `evaluate asr`, `evaluate audio-qa` and `evaluate judge`: suites on models that listen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.evaluate.options import (
    CodecFolder,
    Endpoint,
    EndpointModel,
    Examples,
    Form,
    KeyVariable,
    Language,
    Limit,
    Listener,
    MaxDuration,
    MaxTokens,
    Model,
    Out,
    RecognizerOption,
    Seed,
    Spelling,
)
from audiollm.evaluate.report.suite import bar, conclude, spread_items, step, with_warning
from audiollm.evaluate.speech.commands import clips_of, speaker_of
from audiollm.evaluate.subjects.loading import ListenerSource
from audiollm.hub_models.options import Download, folder_option, source_option

if TYPE_CHECKING:
    from audiollm.evaluate.judges.judging import SpeechClip
    from audiollm.evaluate.listening.audio_qa import Question
    from audiollm.evaluate.listening.majority import ReplySampling
    from audiollm.evaluate.listening.replies import Inquiry, Reply, Write
    from audiollm.evaluate.speech.clips import SpeechRequest


def asr(
    listing: Annotated[
        Path, typer.Option("--list", help="CSV or JSON lines with path and text, or samples.jsonl.")
    ],
    model: Listener = None,
    codec: CodecFolder = None,
    endpoint: Endpoint = None,
    endpoint_model: EndpointModel = None,
    key_variable: KeyVariable = "OPENAI_API_KEY",
    recognizer: RecognizerOption = None,
    hypotheses: Annotated[
        Path | None, typer.Option(help="In place of a model: CSV or JSON lines with id and text.")
    ] = None,
    out: Out = Path("scores/asr"),
    language: Language = "en",
    split: Annotated[str | None, typer.Option(help="Split of the samples; by default all.")] = None,
    by: Annotated[str, typer.Option(help="Conditions to group by: speaker,condition.")] = "",
    form: Form = "whisper",
    spelling: Spelling = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 256,
    examples: Examples = 8,
    download: Download = False,
) -> None:
    """Score speech recognition: word or character errors by kind, by speaker and by condition, with intervals.

    Replies are kept: the same command resumes.

    Example: audiollm evaluate asr --list test.csv --model runs/understanding/train --by speaker
    """
    console = Console()
    from audiollm.evaluate.judges.choosing import choose_recognizer
    from audiollm.evaluate.judges.independence import taught_references_note
    from audiollm.evaluate.judges.judging import judge_label
    from audiollm.evaluate.listening.asr import evaluate_asr, read_recordings
    from audiollm.evaluate.listening.replies import by_recognizer, read_replies

    recordings = spread_items(read_recordings(listing, language, split, _notice_printer(console)), limit)
    inquiries = [recording.inquiry() for recording in recordings]
    _require_one_option(model=model, endpoint=endpoint, recognizer=recognizer, hypotheses=hypotheses)
    recognizer_judge = choose_recognizer(recognizer, language)
    if hypotheses is not None:
        replies, about = (
            read_replies(hypotheses, _ids(inquiries), ("text", "hypothesis")),
            f"from {hypotheses}",
        )
    elif recognizer_judge is not None:
        label = judge_label(recognizer_judge.judge)
        replies = _ask_with_progress(
            by_recognizer(recognizer_judge.judge),
            recognizer_judge.fingerprint,
            inquiries,
            out,
            console,
            label,
        )
        about = f"recognizer: {label}"
    else:
        source = ListenerSource(model, codec, endpoint, endpoint_model, key_variable, max_tokens)
        replies, about = _fetch_replies(source, inquiries, out, console)
    names = [name.strip() for name in by.split(",") if name.strip()]
    outcome = evaluate_asr(recordings, replies, form, names, about, spelling)
    writers = [recording.text_recognizers for recording in recordings]
    conclude(with_warning(outcome, taught_references_note(model, writers)), out, examples, console)


def audio_qa(
    listing: Annotated[Path, typer.Option("--list", help="JSON, JSON lines or a table in MMAU's layout.")],
    model: Listener = None,
    codec: CodecFolder = None,
    endpoint: Endpoint = None,
    endpoint_model: EndpointModel = None,
    key_variable: KeyVariable = "OPENAI_API_KEY",
    replies_file: Annotated[
        Path | None, typer.Option("--replies", help="In place of a model: a list with id and model_output.")
    ] = None,
    audio: Annotated[
        Path | None,
        typer.Option(help="The folder that the audio's paths are relative to; by default the list's."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="How the model is asked: options, ke_omni_r (with a thought), ke_omni_r_direct, r1_aqa, or a text "
            "with {question} and {options} or {lettered}.",
            show_default="options",
        ),
    ] = None,
    max_words: Annotated[
        int, typer.Option(min=1, help="Longest thought that ke_omni_r asks for, in words.")
    ] = 50,
    out: Out = Path("scores/audio-qa"),
    limit: Limit = None,
    max_tokens: MaxTokens = 64,
    samples: Annotated[
        int, typer.Option(min=1, help="Replies to each question; what most of them name counts.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of the replies; 0: the likeliest words.")
    ] = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Questions that are answered at a time.")] = 1,
    seed: Seed = 0,
    examples: Examples = 8,
    download: Download = False,
) -> None:
    """Score multiple choice about recordings: accuracy by task, difficulty and category, chance beside it.

    Of replies with <think> and <answer>, their form and the words of their thoughts are in the table, too. Questions
    that the model was trained on, by the stages of its run, are scored apart.

    Examples:

    audiollm evaluate audio-qa --list mmau-test-mini.json --audio mmau --model ~/models/Qwen2-Audio-7B-Instruct

    audiollm evaluate audio-qa --list mmau-test-mini.json --audio mmau --model runs/ke-omni-r/train_policy
    --prompt ke_omni_r --max-tokens 256
    """
    console = Console()
    from audiollm.data.chat.question_prompts import PLAIN, prompt_text
    from audiollm.evaluate.listening.audio_qa import (
        REPLY_KEYS,
        evaluate_audio_qa,
        read_questions,
        trained_note,
        unread_key,
    )
    from audiollm.evaluate.listening.majority import ReplySampling
    from audiollm.evaluate.listening.replies import read_replies
    from audiollm.evaluate.listening.trained_questions import trained_questions

    questions = spread_items(read_questions(listing), limit)
    folder = audio or listing.parent
    prompt_text(prompt or PLAIN)  # a misspelt one is told of before any work
    unread = {question.id: reason for question in questions if (reason := unread_key(question))}
    for id, reason in unread.items():
        console.print(f"question {id!r} is left out: {reason}")
    readable_questions = [question for question in questions if question.id not in unread]
    inquiries = [question.inquiry(folder, prompt or PLAIN, max_words) for question in readable_questions]
    _require_one_option(model=model, endpoint=endpoint, replies=replies_file)
    sampling = ReplySampling(samples, temperature, batch, seed)
    is_plain = sampling == ReplySampling(seed=seed)
    if replies_file is not None and not (is_plain and prompt is None):
        raise ConfigError(
            "the replies are given", "--samples, --temperature, --batch, --prompt", "leave these options out"
        )
    if replies_file is not None:
        replies, about = read_replies(replies_file, _ids(inquiries), REPLY_KEYS), f"from {replies_file}"
    else:
        source = ListenerSource(model, codec, endpoint, endpoint_model, key_variable, max_tokens)
        if is_plain:
            replies, about = _fetch_replies(source, inquiries, out, console)
        else:
            replies, about = _sample_majority(source, readable_questions, inquiries, sampling, out, console)
    trained = trained_questions(model, questions, folder)
    if note := trained_note(trained, questions):
        console.print(f"note: {note}")
    conclude(evaluate_audio_qa(questions, replies, folder, about, trained), out, examples, console)


def judge(
    listing: Annotated[Path, typer.Option("--list", help="emergent_tts_eval_data.jsonl, or a list like it.")],
    against: Annotated[Path, typer.Option(help="The other system's clips: a folder with 0.wav, 1.wav, ...")],
    model: Model = None,
    codec: CodecFolder = None,
    audio: Annotated[
        Path | None, typer.Option(help="In place of a model: a folder with 0.wav, 1.wav, ...")
    ] = None,
    judge_model: Annotated[
        str | None,
        source_option("The judge: an audio LLM's folder, ours or Hugging Face's.", name="--judge"),
    ] = None,
    judge_codec: Annotated[Path | None, folder_option("The codec's folder of a judge of ours.")] = None,
    endpoint: Endpoint = None,
    endpoint_model: EndpointModel = None,
    key_variable: KeyVariable = "OPENAI_API_KEY",
    categories: Annotated[
        str, typer.Option(help="Categories to score: Emotions,Questions; by default all.")
    ] = "",
    out: Out = Path("scores/judge"),
    limit: Limit = None,
    seed: Seed = 0,
    max_duration_s: MaxDuration = None,
    max_tokens: MaxTokens = 2048,
    examples: Examples = 8,
    download: Download = False,
) -> None:
    """Have an audio LLM say which of two systems speaks better, in both orders: win rate, ties, its consistency.

    Example: audiollm evaluate judge --list emergent_tts_eval_data.jsonl --audio ours --against baseline_audios
    --endpoint http://localhost:8000/v1 --endpoint-model Qwen3-Omni
    """
    console = Console()
    from audiollm.evaluate.report.store import RowStore
    from audiollm.evaluate.speech.clips import clips_in_folder
    from audiollm.evaluate.speech.pairwise import PairBench, evaluate_pairs, read_pairs
    from audiollm.evaluate.speech.verdicts import ChatJudge

    _require_one_option(model=model, audio=audio)
    _require_one_option(judge=judge_model, endpoint=endpoint)
    names = [name.strip() for name in categories.split(",") if name.strip()]
    items = spread_items(read_pairs(listing, names), limit)
    source = ListenerSource(judge_model, judge_codec, endpoint, endpoint_model, key_variable, max_tokens)
    chat, fingerprint = source.chat()
    requests = [item.request() for item in items]
    ours = _speak_or_find(model, codec, audio, requests, out, seed, max_duration_s, console)
    theirs = clips_in_folder(against, requests)
    with bar(console, "judging", len(items)) as progress:
        bench = PairBench(
            ChatJudge(chat, seed=seed),
            f"{fingerprint} {seed}",
            RowStore(out / "kept.jsonl"),
            lambda what: step(progress, what),
        )
        outcome = evaluate_pairs(items, ours, theirs, bench, f"{model or audio} against {against}")
    conclude(outcome, out, examples, console)


# ------------------------------------------------------------------------------------------------ private


def _require_one_option(**values: object) -> None:
    """
    Raises:
        ConfigError: none of the options is given, or more than one.
    """
    options = ", ".join(f"--{name}" for name in values)
    if sum(value is not None for value in values.values()) != 1:
        raise ConfigError("exactly one of these options is required", options, f"give one of {options}")


def _notice_printer(console: Console) -> Callable[[str], None]:
    return lambda note: console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _ids(inquiries: list[Inquiry]) -> list[str]:
    return [inquiry.id for inquiry in inquiries]


def _fetch_replies(
    source: ListenerSource, inquiries: list[Inquiry], out: Path, console: Console
) -> tuple[dict[str, Reply], str]:
    """The replies of the model or the endpoint, and its description for the page."""
    from audiollm.evaluate.listening.replies import by_answerer

    subject = source.listener()
    return _ask_with_progress(
        by_answerer(subject), subject.fingerprint, inquiries, out, console
    ), f"model: {subject.name}"


def _sample_majority(
    source: ListenerSource,
    questions: list[Question],
    inquiries: list[Inquiry],
    sampling: ReplySampling,
    out: Path,
    console: Console,
) -> tuple[dict[str, Reply], str]:
    """The reply that stands for the majority of each question's samples, and a description for the page."""
    from audiollm.evaluate.listening.majority import majority_replies, sample_all
    from audiollm.evaluate.report.store import RowStore

    subject = source.listener()
    with bar(console, "listening", len(inquiries)) as progress:
        store = RowStore(out / "kept.jsonl")
        sampled = sample_all(subject, inquiries, sampling, store, lambda what: step(progress, what))
    about = f"model: {subject.name}; majority of {sampling.samples} at temperature {sampling.temperature:g}"
    return majority_replies(questions, sampled), about


def _ask_with_progress(
    write: Write,
    fingerprint: str,
    inquiries: list[Inquiry],
    out: Path,
    console: Console,
    subject: str = "the model",
) -> dict[str, Reply]:
    from audiollm.evaluate.listening.replies import ask_all
    from audiollm.evaluate.report.store import RowStore

    with bar(console, "listening", len(inquiries)) as progress:
        store = RowStore(out / "kept.jsonl")
        return ask_all(write, fingerprint, inquiries, store, lambda what: step(progress, what), subject)


def _speak_or_find(
    model: str | None,
    codec: Path | None,
    audio: Path | None,
    requests: list[SpeechRequest],
    out: Path,
    seed: int,
    max_duration_s: float | None,
    console: Console,
) -> dict[str, SpeechClip]:
    return clips_of(speaker_of(model, codec, audio, max_duration_s), audio, requests, out, seed, console)
