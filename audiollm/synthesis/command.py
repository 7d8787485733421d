"""The command `generate`: say a text or a dialogue with a trained model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.hub_models.options import Download, folder_option
from audiollm.models.frozen.formats import GenerationFormat

if TYPE_CHECKING:
    from audiollm.generation.engine.defaults import Defaults
    from audiollm.generation.speaking.speak import Speech
    from audiollm.generation.speaking.speech_stream import SpeechStream

STDIO = Path("-")
BAR_AFTER_S = 3.0


def generate(
    model: Annotated[Path, folder_option("A train stage's folder, or a saved model's.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="The sound file to write (.wav, .flac, .ogg, .mp3); with --stream, - writes to stdout.",
            show_default=False,
        ),
    ],
    text: Annotated[str | None, typer.Option(help="The text to say.")] = None,
    text_file: Annotated[
        Path | None, typer.Option(help="A file with the text to say; - reads stdin.")
    ] = None,
    dialogue: Annotated[
        Path | None,
        typer.Option(help="A script with lines like `[SPEAKER0] Hello.` or `Ann: Hello.`; - reads stdin."),
    ] = None,
    speaker: Annotated[str | None, typer.Option(help="A speaker name of the training data.")] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            help="A recording of the voice to speak with. A dialogue takes one per speaker: NAME=FILE (a name, "
            "a tag or a number), or in the order in which they first speak.",
            show_default=False,
        ),
    ] = None,
    reference_text: Annotated[
        list[str] | None,
        typer.Option(help="The words of each --reference, in the same order.", show_default=False),
    ] = None,
    scene: Annotated[str | None, typer.Option(help="Place and mood, as in 'a quiet room'.")] = None,
    codec: Annotated[
        Path | None, folder_option("The codec's folder; by default the run's own train_tokenizer.")
    ] = None,
    dtype: Annotated[
        GenerationFormat,
        typer.Option(help="How the model's layers are held in memory; int8 and int4 read less per step."),
    ] = "fp32",
    together: Annotated[
        bool, typer.Option("--together", help="Say a dialogue in one go instead of turn by turn.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Write a .wav file (or -, stdout) while the speech is made.")
    ] = False,
    takes: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of takes, each a file of its own with the next seed.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Another seed, another take.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 takes the most likely codes.", show_default="the model's *, else 0.7"),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Draw from the k most likely codes only; 0 draws from all.",
            show_default="the model's *, else 0",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=1.0,
            help="Draw from the smallest set of codes with this total probability.",
            show_default="the model's *, else 0.9",
        ),
    ] = None,
    ras_window: Annotated[
        int | None,
        typer.Option(
            "--ras",
            min=0,
            help="Frames that repetition-aware sampling looks back (Higgs: 7); 0 switches it off.",
            show_default="the model's *, else 0",
        ),
    ] = None,
    text_guidance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Guidance weight of the text; 1 is none. Needs a model that was trained with the text "
            "hidden at times.",
            show_default="3 for such a model **, else 1",
        ),
    ] = None,
    speaker_guidance: Annotated[
        float | None,
        typer.Option(min=0.0, help="The same for --speaker.", show_default="2 for such a model **, else 1"),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            help="Language of the text, as in de: its numbers are read by that language's rules.",
            show_default="by the script; Latin letters are English",
        ),
    ] = None,
    max_duration_s: Annotated[
        float | None,
        typer.Option(
            help="Longest duration of the speech, in seconds.",
            show_default="three times what the text should take",
        ),
    ] = None,
    download: Download = False,
) -> None:
    """Say a text or a dialogue with a trained model.

    The voice is a speaker of the training data (--speaker), that of a recording (--reference), or the
    model's own choice. Numbers, dates, units and abbreviations are said as words. A long text is said in
    parts that keep the voice.

    Examples:

    audiollm generate --model runs/quickstart/train --text seven --speaker anna -o seven.wav

    audiollm generate --model m/train --text-file story.txt --reference me.wav --reference-text "My words." -o a.flac

    audiollm generate --model m/train --dialogue talk.txt --reference Ann=ann.wav --reference Bob=b.wav -o talk.wav

    audiollm generate --model m/train --text "Good morning." --stream -o - | ffplay -nodisp -

    The sampling settings are printed with the result. Defaults come from the model's folder:
    * generation_config.json (temperature, top_k, top_p, do_sample, ras_win_len, ras_win_max_num_repeat),
    ** trained.json (text_dropout, speaker_dropout), which `train` writes.
    """
    from audiollm.generation.speaking.manner import check_one_voice

    words = _read_words(text, text_file, dialogue)
    _check_out(out, stream)
    _check_finite_options(
        max_duration_s,
        {
            "--temperature": temperature,
            "--top-p": top_p,
            "--text-guidance": text_guidance,
            "--speaker-guidance": speaker_guidance,
        },
    )
    check_one_voice(speaker, reference or None, "--speaker")
    if stream and (takes > 1 or together):
        raise ConfigError(
            "a stream is one take, said turn by turn", "--stream", "leave out --takes and --together"
        )
    if dialogue and speaker:
        raise ConfigError("the script names its speakers", "--speaker", "leave it out, or give --text")
    if together and not dialogue:
        raise ConfigError(
            "only a dialogue has several speakers", "--together", "leave it out, or give --dialogue"
        )

    named = _references(reference or [], reference_text or [], words if dialogue else None)

    from audiollm.families.registry import load_speech_generator
    from audiollm.generation.speaking.dialogue import (
        converse,
        converse_together,
        dialogue_stream,
        parse_script,
    )
    from audiollm.generation.speaking.speak import speak
    from audiollm.generation.speaking.speech_stream import text_stream

    generator = load_speech_generator(model, codec, dtype)
    defaults = generator.defaults.over(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        ras_window=ras_window,
        text_guidance=text_guidance,
        speaker_guidance=speaker_guidance,
    )
    voices = {name: generator.voice(path, transcript, language) for name, (path, transcript) in named.items()}
    manner = generator.manner(
        speaker=speaker,
        reference=voices.get(""),
        scene=scene,
        seed=seed,
        sampling=defaults.sampling,
        max_duration_s=max_duration_s,
        language=language,
    )
    if stream:
        made_stream = (
            dialogue_stream(generator, parse_script(words), voices, manner)
            if dialogue
            else text_stream(generator, words, manner)
        )
        _write_stream(made_stream, out, defaults, words)
        return
    for take in range(takes):
        manner = replace(manner, seed=seed + take)
        with _show_seconds(words) as on_seconds:
            if dialogue:
                say_all = converse_together if together else converse
                speech = say_all(generator, parse_script(words), voices, manner, on_seconds)
            else:
                speech = speak(generator, words, manner, on_seconds)
        file = out if takes == 1 else out.with_stem(f"{out.stem}_{take + 1}")
        _save_speech(speech, file)
        _tell(speech, file, Console(soft_wrap=True), defaults, words, first=take == 0)


# Private: checks of the input, before the model is loaded where that is possible


def _read_words(text: str | None, text_file: Path | None, dialogue: Path | None) -> str:
    options = {"--text": text, "--text-file": text_file, "--dialogue": dialogue}
    named = [option for option, value in options.items() if value is not None]
    if len(named) != 1:
        problem = "there is nothing to say" if not named else f"{' and '.join(named)}: give only one of them"
        raise ConfigError(problem, "generate", f"give one of {', '.join(options)}")
    option, path = named[0], text_file or dialogue
    words = text if path is None else _read_text_option(path, option)
    if words and any("\ud800" <= letter <= "\udfff" for letter in words):
        raise ConfigError("is not text in UTF-8", option, "write it in UTF-8, or give it as a --text-file")
    if not words or not words.strip():
        raise ConfigError("there is no text", option, "give the words to say, in quotes")
    return words


def _read_text_option(path: Path, option: str) -> str:
    try:
        return sys.stdin.read() if path == STDIO else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = (
            "is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        )
        raise ConfigError(f"{path}: {problem}", option, "give a text file") from None


def _check_out(out: Path, stream: bool) -> None:
    """Raises: ConfigError: no file of that name can be written as sound."""
    import torch

    from audiollm.audio import AudioError, encode_bytes
    from audiollm.files.atomic import check_writable

    if out == STDIO:
        if stream:
            return
        raise ConfigError("-: only a stream goes to the output", "--out", "add --stream, or name a file")
    if stream and out.suffix.lower() != ".wav":
        raise ConfigError(
            f"{out}: a stream is written as .wav", "--out", "give a name that ends in .wav, or -"
        )
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder", "--out", "give the name of a file, for example seven.wav")
    try:  # a moment of silence, in memory
        encode_bytes(torch.zeros(1, 1000), 24_000, out.suffix.lower().removeprefix("."))
    except AudioError as error:
        raise ConfigError(f"{out}: {error.reason}", "--out") from error
    check_writable(out, "--out")


def _check_finite_options(max_duration_s: float | None, numbers: dict[str, float | None]) -> None:
    from audiollm.generation.speaking.manner import check_duration

    for option, value in {**numbers, "--max-duration-s": max_duration_s}.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(
                f"{value}: not a number that can be used", option, "give another, or leave it out"
            )
    check_duration(max_duration_s, "--max-duration-s")


def _references(
    references: Sequence[str], texts: Sequence[str], script: str | None
) -> dict[str, tuple[str, str | None]]:
    """Map each speaker's name to (file, its words); the one reference of a text has the name ""."""
    from audiollm.data.text.words import settle_characters
    from audiollm.generation.speaking.dialogue import parse_script

    if len(texts) > len(references):
        raise ConfigError("more texts than references", "--reference-text", "give each after its --reference")
    if script is None and len(references) > 1:
        raise ConfigError("a text takes one reference", "--reference", "give one, or --dialogue")
    speakers = (
        list(dict.fromkeys(turn.speaker for turn in parse_script(script))) if script is not None else [""]
    )
    words: list[str | None] = [*texts, *([None] * (len(references) - len(texts)))]
    named: dict[str, tuple[str, str | None]] = {}
    for place, (reference, transcript) in enumerate(zip(references, words, strict=True)):
        name, mark, path = reference.partition("=")
        name = settle_characters(name)
        if script is None or not mark or Path(reference).exists():
            if place >= len(speakers):
                problem = f"{len(references)} references for {len(speakers)} speakers"
                raise ConfigError(problem, "--reference", "give one for each at most")
            name, path = speakers[place], reference
        if not Path(path).is_file():
            problem = "is a folder" if Path(path).is_dir() else "no such file"
            raise ConfigError(f"{path}: {problem}", "--reference", "give a recording of a voice")
        if name in named:
            raise ConfigError(f"{name} has two references", "--reference", "give one for each speaker")
        named[name] = (path, transcript)
    return named


# Private: output


@contextmanager
def _show_seconds(words: str) -> Iterator[Callable[[float], None]]:
    """Yield a callback for the seconds of speech made so far; the progress bar appears after `BAR_AFTER_S`."""
    import time

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from audiollm.generation.speaking.long_text import spoken_seconds
    from audiollm.progress import ProgressLog

    columns = (TextColumn("speaking"), BarColumn(), TextColumn("{task.completed:.1f} s"), TimeElapsedColumn())
    begun, started = time.perf_counter(), False
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("speaking", total=spoken_seconds(words))

    def on_seconds(seconds: float) -> None:
        nonlocal started
        if not started and time.perf_counter() - begun > BAR_AFTER_S:
            bar.start()
            started = True
        bar.update(task, completed=seconds)

    try:
        with ProgressLog(console, "speaking"):
            yield on_seconds
    finally:
        if started:
            bar.stop()


def _save_speech(speech: Speech, out: Path) -> None:
    from audiollm.audio import AudioError, save

    try:
        save(out, speech.samples_1N, speech.sample_rate)
    except AudioError as error:
        raise ConfigError(str(error), "--out") from error


def _tell(
    speech: Speech | SpeechStream,
    out: Path,
    console: Console,
    defaults: Defaults,
    text: str,
    first: bool = True,
) -> None:
    """Print what was written; the first of several takes also prints the sampling, the text as the model reads it where
    that differs from `text`, and the notes to stderr."""
    for note in speech.notes if first else ():
        Console(stderr=True, soft_wrap=True).print(f"note: {note}", highlight=False, markup=False)
    cut = "" if speech.stopped else ", cut where it did not end by itself"
    factor = speech.seconds / speech.duration_s if speech.duration_s else math.nan
    first_audio = f"{speech.first_audio_s:.2f} s" if speech.first_audio_s is not None else "never"
    console.print(
        f"{out}: {speech.duration_s:.2f} s{cut} (made in {speech.seconds:.2f} s, real-time factor {factor:.2f}, "
        f"first audio after {first_audio})",
        highlight=False,
        markup=False,
    )
    if first:
        console.print(f"  drawn with {defaults}", highlight=False, markup=False)
    if first and _words_of_script(speech.text) != _words_of_script(text):
        console.print(f"  reads: {speech.text}", highlight=False, markup=False)


def _words_of_script(text: str) -> list[str]:
    """The words of a text or dialogue without the names of its speakers."""
    from audiollm.generation.speaking.dialogue import parse_script

    try:
        turns = parse_script(text)
    except ConfigError:
        return text.split()
    return " ".join(turn.text for turn in turns).split()


def _write_stream(stream: SpeechStream, out: Path, defaults: Defaults, text: str) -> None:
    from audiollm.generation.speaking.wav_stream import WavWriter

    try:
        with WavWriter(None if out == STDIO else out, stream.sample_rate) as writer:
            for piece in stream:
                writer.write(piece.samples_CN)
    except BrokenPipeError:
        raise ConfigError("the player has closed the stream", "--out", "") from None
    except OSError as error:
        raise ConfigError(
            f"{out}: {error.strerror}", "--out", "give a name in a folder that can be written"
        ) from error
    _tell(stream, out, Console(stderr=True, soft_wrap=True), defaults, text)
