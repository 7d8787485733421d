"""The command `convert`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from audiollm.audio.discovery import links_note
from audiollm.errors import ConfigError, StageError, suggestion
from audiollm.files.atomic import atomic_path, write_jsonl
from audiollm.files.set_aside import row_of
from audiollm.progress import progress_bar

if TYPE_CHECKING:
    from audiollm.data.chat.tasks import TaskTemplate
    from audiollm.data.convert.request import ConversionRequest, Converter, SourceRows
    from audiollm.data.records.aligned_recording import AlignedRecording
    from audiollm.data.records.sample import Sample
    from audiollm.errors import BadSample

MAX_PRINTED_ROWS = 5
"""Rows set aside that are also printed."""


class SourceKind(StrEnum):
    """Kind of the data set SOURCE."""

    HUGGINGFACE = "huggingface"
    LHOTSE = "lhotse"
    LJSPEECH = "ljspeech"
    ALPACA = "alpaca"
    SHAREGPT = "sharegpt"
    FOLDER = "folder"
    JSONL = "jsonl"
    NEMO = "nemo"
    KALDI = "kaldi"
    GRPO = "grpo"
    PREFERENCES = "preferences"
    MMAU = "mmau"
    AVQA = "avqa"
    MUSICBENCH = "musicbench"
    TRANSLATIONS = "translations"
    REALSI = "realsi"
    DUPLEX = "duplex"


_QUESTIONS = (SourceKind.MMAU, SourceKind.AVQA, SourceKind.MUSICBENCH)
_CHATS = (SourceKind.ALPACA, SourceKind.SHAREGPT, SourceKind.PREFERENCES, SourceKind.GRPO)
_TRANSLATIONS = (SourceKind.TRANSLATIONS, SourceKind.REALSI, SourceKind.DUPLEX)
_WITH_COLUMNS = (
    SourceKind.HUGGINGFACE, SourceKind.LJSPEECH, SourceKind.PREFERENCES, SourceKind.TRANSLATIONS, SourceKind.JSONL,
    SourceKind.NEMO, SourceKind.GRPO,
)  # fmt: skip


def convert(
    kind: Annotated[SourceKind, typer.Argument(help="Kind of SOURCE.", show_default=False)],
    source: Annotated[
        Path,
        typer.Argument(
            help="huggingface: a folder of save_to_disk, or of parquet or arrow files. lhotse: cuts.jsonl(.gz). "
            "ljspeech: a folder with metadata.csv, or a table with a header (path, text, ...). "
            "jsonl: objects with audio and text. nemo: a manifest (audio_filepath, offset, duration, text). "
            "kaldi: a folder with wav.scp and text. "
            "alpaca, sharegpt: .json or .jsonl. folder: sound files with .txt, .lab or .json beside them. "
            "preferences, grpo: .json, .jsonl, .csv, .tsv, .parquet, .arrow, or a folder as of huggingface. "
            "mmau: .json, .jsonl, .csv, .tsv. avqa, musicbench: .json or .jsonl as these publish them. "
            "translations: .json, .jsonl, .csv, .tsv with audio and target. realsi: its folder. "
            "duplex: .jsonl of stereo files, as moshi-finetune has them.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The manifest to write.", show_default=False)],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task that the samples teach: tts, asr, caption, ... "
            "For chats, preferences and questions only its name is used.",
            show_default="tts; audio_qa or text of chats, preferences and questions",
        ),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="A YAML file of your own tasks.", show_default=False)
    ] = None,
    audio: Annotated[
        Path | None,
        typer.Option(
            help="Folder that audio must lie in; paths are relative to it, or to that of SOURCE.",
            show_default="that of SOURCE",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Fields and their columns: text=sentence,audio=clip,speaker=client_id. "
            "Columns that are not named are fields of their own name; those of a table without a header are "
            "numbers: id=1,text=2,speaker=3.",
            show_default="the usual names",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the choice among phrasings, of questions and of wrong options.")
    ] = 0,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="How mmau, avqa and musicbench ask: options, ke_omni_r (with a thought), ke_omni_r_direct, r1_aqa, "
            "or a text with {question} and {options} or {lettered}.",
            show_default="options",
        ),
    ] = None,
    max_words: Annotated[
        int | None,
        typer.Option(min=1, help="Longest thought that ke_omni_r asks for, in words.", show_default="50"),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Questions to draw, by the seed.", show_default="all")
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the questions, or prompts of grpo, that is held out (split: test), with all others about "
            "their recordings.",
            show_default="0",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop with exit code 2 at the first unusable row.")
    ] = False,
) -> None:
    """Make a manifest of samples from a dataset of another kind.

    Rows that cannot be used are named in OUT.set_aside.jsonl with the reason, and the rest
    goes on.

    Preferences: each row has a prompt (a text or a list of messages), with
    audios its recordings, and judged answers in one of these forms:

    chosen, rejected: a pair. Also score_chosen and score_rejected, or margin.
    Without a prompt, chosen and rejected begin with it.

    completion, label (or kto_tag): one answer, true or false. Also score.

    completions, scores (or ranks): a list; or objects with response and score.

    ranked: a list, the best first.

    completions, labels: the steps of one answer, and whether each is right.

    An answer is a text, a message or a recording; chosen_audio, rejected_audio,
    completion_audio and completions_audio are recordings beside the texts.

    grpo: prompts for training on fresh answers, with the right one: prompt and
    solution (TRL), or messages, audios and solution (ms-swift); choices are options.

    Splits: names with train in them are trained on, those with test, dev, valid,
    eval, holdout and the like are held out; other names are refused.

    Translations, realsi and duplex: the manifest is what the stage
    compose_streams reads, not samples. Rows of translations have audio and
    target, where known text, words, segments, target_audio and target_words.

    Examples:

    audiollm convert ljspeech LJSpeech-1.1 -o lj/samples.jsonl

    audiollm convert lhotse cuts.jsonl.gz -o asr.jsonl --task asr --audio /corpora/librispeech

    audiollm convert nemo train_manifest.json -o asr.jsonl --task asr

    audiollm convert kaldi data/train_clean -o asr.jsonl --task asr --audio /corpora

    audiollm convert sharegpt chats.json -o chats.jsonl

    audiollm convert preferences ultrafeedback -o pairs.jsonl

    audiollm convert preferences rated.jsonl -o lists.jsonl --columns completions=outputs

    audiollm convert mmau questions.json -o questions.jsonl --prompt ke_omni_r --held-out 0.2

    audiollm convert avqa train_qa.json -o avqa.jsonl --audio avqa/wavs --prompt ke_omni_r --count 5000

    audiollm convert realsi RealSI -o realsi.jsonl

    audiollm convert duplex calls/data.jsonl -o calls.jsonl
    """
    from audiollm.data.chat.question_prompts import MAX_WORDS, PLAIN, prompt_text
    from audiollm.data.convert.request import ConversionRequest, QuestionAsking

    if not source.exists():
        raise ConfigError("no such file or folder", str(source), "check the path")
    if columns is not None and kind not in _WITH_COLUMNS:
        raise ConfigError(f"{kind.value} has no columns to name", "--columns", "leave it out")
    if kind in _TRANSLATIONS and task is not None:
        raise ConfigError(
            f"{kind.value} teaches no task yet", "--task", "the stage compose_streams makes samples"
        )
    if tasks is not None and task is None:
        raise ConfigError("no task of it is named", "--tasks", "name one with --task")
    question_options = {
        "--prompt": prompt,
        "--max-words": max_words,
        "--count": count,
        "--held-out": held_out,
    }
    if kind is SourceKind.GRPO:
        del question_options["--held-out"]
    if kind not in _QUESTIONS and (
        named := [name for name, value in question_options.items() if value is not None]
    ):
        raise ConfigError(f"{kind.value} has no questions with options", named[0], "leave it out")
    if "{max_words}" not in prompt_text(prompt or PLAIN) and max_words is not None:
        raise ConfigError("this prompt asks for no thought of so many words", "--max-words", "leave it out")
    draws_split = kind is SourceKind.GRPO and held_out
    if kind in (*_CHATS, *_TRANSLATIONS) and seed and not draws_split:
        raise ConfigError(f"{kind.value} draws no phrasings", "--seed", "leave it out")
    request = ConversionRequest(
        source=source,
        out=out,
        audio=audio or (source if source.is_dir() else source.parent),
        columns=_columns(columns),
        task=_select_task(kind, task, tasks),
        seed=seed,
        asking=QuestionAsking(prompt or PLAIN, max_words or MAX_WORDS, count, held_out or 0.0),
    )
    rows = _converters()[kind](request)
    _write_conversion(request, rows, strict, Console())


# Private


def _converters() -> dict[SourceKind, Converter]:
    from audiollm.data.convert.chats import alpaca, sharegpt
    from audiollm.data.convert.huggingface import huggingface
    from audiollm.data.convert.kaldi import kaldi
    from audiollm.data.convert.lhotse import lhotse
    from audiollm.data.convert.preferences import preferences
    from audiollm.data.convert.prompts import prompts
    from audiollm.data.convert.questions import avqa, mmau, musicbench
    from audiollm.data.convert.tables import folder, json_lines, ljspeech
    from audiollm.data.convert.translations import duplex, realsi, translations

    return {
        SourceKind.HUGGINGFACE: huggingface,
        SourceKind.LHOTSE: lhotse,
        SourceKind.LJSPEECH: ljspeech,
        SourceKind.ALPACA: alpaca,
        SourceKind.SHAREGPT: sharegpt,
        SourceKind.FOLDER: folder,
        SourceKind.JSONL: json_lines,
        SourceKind.NEMO: json_lines,
        SourceKind.KALDI: kaldi,
        SourceKind.GRPO: prompts,
        SourceKind.PREFERENCES: preferences,
        SourceKind.MMAU: mmau,
        SourceKind.AVQA: avqa,
        SourceKind.MUSICBENCH: musicbench,
        SourceKind.TRANSLATIONS: translations,
        SourceKind.REALSI: realsi,
        SourceKind.DUPLEX: duplex,
    }


def _write_conversion(request: ConversionRequest, rows: SourceRows, strict: bool, console: Console) -> None:
    from audiollm.data.convert.recordings import LengthSurvey
    from audiollm.data.records.sample import Sample

    bad: list[BadSample] = []
    aside = request.out.with_name(f"{request.out.stem}.set_aside.jsonl")
    lengths = LengthSurvey(request.out.parent)
    num_written, held_out = 0, []
    for note in rows.notes:
        console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
    try:
        with atomic_path(request.out) as temporary, temporary.open("w", encoding="utf-8") as file:
            for sample in _good(rows, bad, strict, console):
                file.write(sample.model_dump_json() + "\n")
                num_written += 1
                if isinstance(sample, Sample):
                    lengths.add(sample)
                    if sample.is_held_out:
                        held_out.append(sample.id)
            if not num_written:
                reason = f": {bad[0]}" if bad else ""
                raise ConfigError(
                    f"the source has no usable sample{reason}{links_note(request.source)}",
                    str(request.source),
                    f"mend that; the reason of every row is in {aside.name}"
                    if bad
                    else "check KIND and SOURCE",
                )
    except OSError as error:
        raise StageError(f"{request.out}: cannot be written ({error.strerror})", "check the disk") from error
    finally:
        if bad:
            write_jsonl(aside, (row_of(row, "convert") for row in bad))
        else:
            aside.unlink(missing_ok=True)
    item_noun = "samples" if rows.makes_samples else "recordings, for compose_streams"
    summary = f"{request.out}: {num_written} {item_noun}{_held_out_note(held_out)}"
    console.print(summary, highlight=False, markup=False, soft_wrap=True)
    for text in [lengths.sentence(), *lengths.differences[:MAX_PRINTED_ROWS]]:
        if text is not None:
            console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
    for remark, count in (rows.remarks or {}).items():
        text = f"{remark} in {count} of the rows"
        console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
    for row in bad[:MAX_PRINTED_ROWS]:
        console.print(f"set aside  {row}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if bad:
        text = f"{len(bad)} set aside in all: {aside}"
        console.print(text, style="yellow", highlight=False, soft_wrap=True)


def _held_out_note(ids: Sequence[str]) -> str:
    """Say how many samples are held out, and name the first of them."""
    if not ids:
        return ""
    rest = ", …" if len(ids) > MAX_PRINTED_ROWS else ""
    return f", {len(ids)} of them held out (split: test): {', '.join(ids[:MAX_PRINTED_ROWS])}{rest}"


def _good(
    rows: SourceRows, bad: list[BadSample], strict: bool, console: Console
) -> Iterator[Sample | AlignedRecording]:
    """The records; the others, and those whose id was used before, go to `bad`."""
    from audiollm.errors import BadSample

    ids: set[str] = set()
    with progress_bar(console, "converting", rows.total) as progress:
        for result in rows.results:
            progress.advance(progress.task_ids[0])
            if not isinstance(result, BadSample) and result.id in ids:
                result = BadSample(f"sample {result.id}", result.id, "its id was used before", "doubled id")
            if isinstance(result, BadSample):
                bad.append(result)
                if strict:
                    remedy = "mend it or leave it out; without --strict it is set aside and the rest goes on"
                    raise StageError(str(result), remedy, exit_code=2)
            else:
                ids.add(result.id)
                yield result


def _columns(option: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in (option or "").split(",") if pair.strip()]
    for field, equals, column in pairs:
        if not (field.strip() and equals and column.strip()):
            raise ConfigError(
                f"{field}: expected field=column", "--columns", "example: text=sentence,audio=clip"
            )
    return {field.strip(): column.strip() for field, _, column in pairs}


def _select_task(kind: SourceKind, name: str | None, path: Path | None) -> TaskTemplate | None:
    from audiollm.data.chat.tasks import load_tasks

    tasks = load_tasks(path)
    if name is None and kind in (*_CHATS, *_QUESTIONS, *_TRANSLATIONS):
        return None
    if (name or "tts") not in tasks:
        raise ConfigError(f"{name}: no such task", "--task", suggestion(str(name), list(tasks)))
    return tasks[name or "tts"]
