"""The commands `evaluate tts`, `evaluate multi-speaker` and `evaluate emotion`: suites on models that speak."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.evaluate.options import (
    CodecFolder,
    Examples,
    Form,
    Language,
    Limit,
    MaxDuration,
    Model,
    Out,
    RecognizerOption,
    Seed,
    SpeakerJudgeOption,
    Spelling,
)
from audiollm.evaluate.report.suite import SuiteResult, bar, conclude, spread_items, step, with_warning
from audiollm.hub_models.options import Download, source_option

if TYPE_CHECKING:
    from audiollm.evaluate.judges.choosing import ChosenJudge
    from audiollm.evaluate.judges.judging import SpeechClip, VoiceJudge
    from audiollm.evaluate.speech.clips import SpeechRequest
    from audiollm.evaluate.speech.scoring import Bench
    from audiollm.evaluate.subjects.protocols import Subject

Evaluate = Callable[["Bench"], SuiteResult]


def tts(
    listing: Annotated[
        Path, typer.Option("--list", help="One name|prompt text|prompt wav|text[|target wav] per line.")
    ],
    model: Model = None,
    codec: CodecFolder = None,
    audio: Annotated[
        Path | None,
        typer.Option(help="In place of a model: a folder with one NAME.wav per line of the list."),
    ] = None,
    out: Out = Path("scores/tts"),
    language: Language = "en",
    recognizer: RecognizerOption = None,
    speaker_judge: SpeakerJudgeOption = None,
    form: Form = "seed-tts",
    spelling: Spelling = None,
    limit: Limit = None,
    seed: Seed = 0,
    max_duration_s: MaxDuration = None,
    examples: Examples = 8,
    download: Download = False,
) -> None:
    """Score zero-shot speech over a list of Seed-TTS-eval: word errors, and likeness to the prompt's voice.

    Clips and rows are kept: the same command resumes.

    Example: audiollm evaluate tts --model runs/tts-tiny/train --list seedtts_en.lst --recognizer ~/models/whisper
    """
    console = Console()
    from audiollm.evaluate.judges.choosing import choose_speaker_judge
    from audiollm.evaluate.speech.tts import evaluate_list, read_list

    items = spread_items(read_list(listing), limit)
    subject = speaker_of(model, codec, audio, max_duration_s)
    voices = choose_speaker_judge(speaker_judge)
    bench = _bench(out, form, language, spelling, recognizer, voices)
    clips = clips_of(subject, audio, [item.request() for item in items], out, seed, console)
    total = len(items) + sum(item.target is not None for item in items)
    _run_with_progress(
        console,
        bench,
        total,
        lambda b: evaluate_list(items, clips, b, _describe_clip_source(subject, audio)),
        out,
        examples,
        model=model,
    )


def multi_speaker(
    listing: Annotated[
        Path, typer.Option("--list", help="JSON lines of dialogues; see the README of evaluate.")
    ],
    model: Model = None,
    codec: CodecFolder = None,
    out: Out = Path("scores/multi-speaker"),
    language: Language = "en",
    recognizer: RecognizerOption = None,
    speaker_judge: SpeakerJudgeOption = None,
    form: Form = "seed-tts",
    spelling: Spelling = None,
    limit: Limit = None,
    seed: Seed = 0,
    max_duration_s: MaxDuration = None,
    examples: Examples = 8,
    download: Download = False,
) -> None:
    """Score dialogues: word errors, likeness within a speaker, difference between speakers, their geometric mean.

    Without a model, the list names the sound: one file per turn, or one file with the times of the turns.

    Example: audiollm evaluate multi-speaker --list dialogues.jsonl --speaker-judge ~/models/wavlm-base-plus-sv
    """
    console = Console()
    from audiollm.evaluate.judges.choosing import choose_speaker_judge
    from audiollm.evaluate.speech.dialogues import read_dialogues, speak_dialogues
    from audiollm.evaluate.speech.multi_speaker import evaluate_dialogues

    dialogues = spread_items(read_dialogues(listing), limit)
    subject = speaker_of(model, codec, listing, max_duration_s) if model else None
    voices = choose_speaker_judge(speaker_judge)
    bench = _bench(out, form, language, spelling, recognizer, voices)
    problems: dict[str, str] = {}
    if subject is not None:
        with bar(console, "speaking", len(dialogues)) as progress:
            dialogues, problems = speak_dialogues(
                subject, dialogues, out / "audio", seed, lambda what: step(progress, what)
            )
    about = _describe_clip_source(subject, listing)
    _run_with_progress(
        console,
        bench,
        len(dialogues),
        lambda b: evaluate_dialogues(dialogues, b, about, problems),
        out,
        examples,
        model=model,
    )


def emotion(
    esd: Annotated[Path, typer.Argument(help="The folder of ESD, which holds 0001 to 0020.")],
    model: Model = None,
    codec: CodecFolder = None,
    audio: Annotated[
        Path | None, typer.Option(help="In place of a model: a folder with 0011_000351.wav and so on.")
    ] = None,
    recordings: Annotated[
        bool, typer.Option("--recordings", help="Score the real recordings themselves.")
    ] = False,
    out: Out = Path("scores/emotion"),
    language: Language = "en",
    split: Annotated[
        str | None, typer.Option(help="evaluation, test or train, if this copy of ESD has splits.")
    ] = None,
    recognizer: RecognizerOption = None,
    emotion_judge: Annotated[
        str | None,
        source_option("The folder of a Hugging Face audio classifier, or module:factory (emotion2vec)."),
    ] = None,
    form: Form = "seed-tts",
    spelling: Spelling = None,
    limit: Limit = None,
    seed: Seed = 0,
    max_duration_s: MaxDuration = None,
    examples: Examples = 8,
    download: Download = False,
) -> None:
    """Score emotional speech over ESD: word errors, emotion by a classifier, likeness of emotion embeddings.

    Example: audiollm evaluate emotion ESD --model runs/tts/train --emotion-judge ~/models/emotion --split test
    """
    console = Console()
    from audiollm.evaluate.judges.choosing import choose_emotion_judge
    from audiollm.evaluate.speech.emotion import evaluate_emotion
    from audiollm.evaluate.speech.esd import read_esd

    utterances = spread_items(read_esd(esd, language, split), limit)
    if recordings and (model or audio):
        raise ConfigError("--recordings excludes --model and --audio", "command line", "give one of them")
    subject = None if recordings else speaker_of(model, codec, audio, max_duration_s)
    judge = choose_emotion_judge(emotion_judge)
    bench = _bench(out, form, language, spelling, recognizer, judge)
    if recordings:
        clips: Mapping[str, SpeechClip] = {
            utterance.id: utterance.request().clip(utterance.path) for utterance in utterances
        }
    else:
        clips = clips_of(
            subject, audio, [utterance.request() for utterance in utterances], out, seed, console
        )
    about = "the real recordings" if recordings else _describe_clip_source(subject, audio)
    _run_with_progress(
        console,
        bench,
        len(utterances),
        lambda b: evaluate_emotion(utterances, clips, b, about),
        out,
        examples,
        model=model,
    )


def speaker_of(
    model: str | None, codec: Path | None, audio: Path | None, max_duration_s: float | None
) -> Subject | None:
    """The speaking model; None where there are clips already."""
    from audiollm.evaluate.subjects.loading import load_speaker

    if model is None:
        if audio is None:
            raise ConfigError(
                "nothing to score", "command line", "give --model, or --audio with what was said"
            )
        if not audio.exists():
            raise ConfigError(f"no such folder: {audio}", "--audio", "check the path")
        return None
    return load_speaker(model, codec, max_duration_s)


def clips_of(
    subject: Subject | None,
    audio: Path | None,
    requests: list[SpeechRequest],
    out: Path,
    seed: int,
    console: Console,
) -> dict[str, SpeechClip]:
    """The clips that the model speaks, or those of the folder."""
    from audiollm.evaluate.speech.clips import clips_in_folder, speak_all

    if subject is None:
        assert audio is not None
        return clips_in_folder(audio, requests)
    with bar(console, "speaking", len(requests)) as progress:
        return speak_all(subject, requests, out / "audio", seed, lambda what: step(progress, what))


# ------------------------------------------------------------------------------------------------ private


def _bench(
    out: Path,
    form: str,
    language: str,
    spelling: Path | None,
    recognizer: str | None,
    voices: ChosenJudge[VoiceJudge] | None,
) -> Bench:
    from audiollm.evaluate.judges.choosing import choose_recognizer
    from audiollm.evaluate.judges.judging import SpeechJudges
    from audiollm.evaluate.report.store import RowStore
    from audiollm.evaluate.report.text_errors import choose_form
    from audiollm.evaluate.speech.scoring import Bench

    text_form = choose_form(form, language, spelling)
    words = choose_recognizer(recognizer, language)
    fingerprints = [judge.fingerprint if judge else "" for judge in (words, voices)]
    return Bench(
        text_form,
        SpeechJudges(words.judge if words else None, voices.judge if voices else None),
        " ".join([*fingerprints, str(spelling and spelling.read_text(encoding="utf-8"))]),
        RowStore(out / "kept.jsonl"),
    )


def _describe_clip_source(subject: Subject | None, audio: Path | None) -> str:
    return f"model: {subject.name}" if subject else f"clips: {audio}"


def _run_with_progress(
    console: Console,
    bench: Bench,
    total: int,
    evaluate: Evaluate,
    out: Path,
    examples: int,
    *,
    model: str | None,
) -> None:
    from dataclasses import replace

    from audiollm.evaluate.judges.independence import shared_weights_note

    with bar(console, "hearing", total) as progress:
        outcome = evaluate(replace(bench, advance=lambda what: step(progress, what)))
    conclude(
        with_warning(outcome, shared_weights_note(model, bench.judges.recognizer)), out, examples, console
    )
