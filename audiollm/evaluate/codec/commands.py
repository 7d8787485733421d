"""The command `evaluate codec`; another one joins the group through the entry points, as `evaluate.NAME`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.console import Console

from audiollm.audio.discovery import links_note
from audiollm.errors import ConfigError, suggestion
from audiollm.evaluate.options import Examples, Limit, Out, RecognizerOption, SpeakerJudgeOption
from audiollm.evaluate.report.suite import bar, spread_items, step
from audiollm.files.atomic import folder_digest
from audiollm.hub_models.names import folder_label, snapshot_name
from audiollm.hub_models.options import Download, read_source
from audiollm.terminal import print_table

if TYPE_CHECKING:
    from audiollm.codec import Codec
    from audiollm.evaluate.codec.evaluation import EvaluationClip, Kind
    from audiollm.evaluate.judges.choosing import ChosenJudge


def codec(
    codecs: Annotated[
        list[str],
        typer.Argument(
            help="Folders of codecs, as FOLDER or NAME=FOLDER.",
            parser=read_source,
            metavar="CODEC",
            show_default=False,
        ),
    ],
    out: Out,
    audio: Annotated[
        list[Path] | None, typer.Option(help="A sound file, or a folder of them; give it again for more.")
    ] = None,
    listing: Annotated[
        Path | None,
        typer.Option("--list", help="CSV with the columns path and, if known, kind, text and language."),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="Kind of the clips that name none: speech, sound, music or unknown.")
    ] = "unknown",
    metrics: Annotated[str | None, typer.Option(help="Some of the metrics, separated by commas.")] = None,
    recognizer: RecognizerOption = None,
    language: Annotated[
        str | None,
        typer.Option(
            help="Language of the speech where the list names none (en, zh, ...); by default Whisper detects it."
        ),
    ] = None,
    speaker_judge: SpeakerJudgeOption = None,
    codebooks: Annotated[
        str | None, typer.Option(help="Also score the first codebooks alone: 1,2,4 for example.")
    ] = None,
    limit: Limit = None,
    max_seconds: Annotated[
        float,
        typer.Option(min=1.0, max=600.0, help="Longer clips are cut into equal pieces of at most this."),
    ] = 30.0,
    examples: Examples = 4,
    download: Download = False,
) -> None:
    """Score codecs side by side: distances, SI-SDR, PESQ, STOI, DNSMOS, words, voices, codebooks, speed.

    Finished rows are kept: the same command resumes, and another codec joins the table.

    Example: audiollm evaluate codec runs/quickstart/train_tokenizer --audio recordings --kind speech -o scores
    """
    console = Console()
    metric_names = _parse_metrics(metrics)
    prefixes = _parse_codebook_numbers(codebooks)
    clips = spread_items(read_clips(audio or [], listing, _parse_clip_kind(kind, "--kind")), limit)
    if not clips:
        raise ConfigError(
            f"no sound to score{links_note(*(audio or []))}",
            "--audio",
            "give files or folders with --audio, or a --list",
        )
    folders = name_codecs(codecs)

    from audiollm.codec import load_codec
    from audiollm.evaluate.codec.evaluation import Evaluation, evaluate_codec, split_clips
    from audiollm.evaluate.codec.measures import CodecJudges, form_of_judge
    from audiollm.evaluate.codec.report import write_codec_report
    from audiollm.evaluate.codec.scores import CodecRows
    from audiollm.evaluate.judges.choosing import choose_recognizer, choose_speaker_judge
    from audiollm.files.atomic import write_json

    loaded: dict[str, Codec] = {name: load_codec(folder) for name, folder in folders.items()}
    clips = [replace(clip, language=clip.language or language) for clip in clips]
    languages = {clip.language for clip in clips}
    shared = languages.pop() if len(languages) == 1 else None  # of several, Whisper detects each
    words, voices = choose_recognizer(recognizer, shared), choose_speaker_judge(speaker_judge)
    judges = CodecJudges(words.judge if words else None, voices.judge if voices else None)
    fingerprints = {name: folder_digest(folder) for name, folder in folders.items()}
    fingerprints[""] = f"{_fingerprint_judges(words, voices)} {shared} {form_of_judge(judges.recognizer)}"
    pieces, unreadable = split_clips(clips, max_seconds)
    evaluation = Evaluation(metric_names, judges, prefixes)
    store = CodecRows(out / "rows.jsonl", fingerprints)
    with bar(console, "scoring", len(pieces) * (len(loaded) + 1)) as progress:
        result = evaluate_codec(loaded, pieces, evaluation, store, lambda what: step(progress, what))
    result["set_aside"] = [*(vars(item) for item in unreadable), *result["set_aside"]]
    result["judges"] = {
        "recognizer": judges.recognizer.name if judges.recognizer else None,
        "speaker": judges.speaker.name if judges.speaker else None,
        "form": form_of_judge(judges.recognizer) if judges.recognizer else None,
    }
    write_json(out / "results.json", result)
    _print_codec_scores(result, console)
    with console.status("writing the report"):
        report = write_codec_report(out / "report.html", result, loaded, pieces, examples)
    console.print(f"[bold green]report:[/bold green] {report}", highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------------- inputs


def read_clips(audio: Sequence[Path], listing: Path | None, kind: Kind) -> list[EvaluationClip]:
    """The clips of files, of folders (all sound below them) and of a list, without a file twice.

    Raises:
        ConfigError: nothing there, or a list without a `path` column or with an unknown kind.
    """
    from audiollm.audio import AudioError, find_audio
    from audiollm.evaluate.codec.evaluation import EvaluationClip

    clips: dict[Path, EvaluationClip] = {}
    for clip in _read_clip_list(listing, kind) if listing else ():
        clips.setdefault(clip.path.resolve(), clip)
    for place in audio:
        if not place.exists():
            raise ConfigError(f"no such file or folder: {place}", "--audio", "check the path")
        try:
            paths = find_audio(place)[0] if place.is_dir() else [place]
        except AudioError as error:
            raise ConfigError(str(error), "--audio") from error
        for path in paths:
            clips.setdefault(path.resolve(), EvaluationClip(path, kind=kind))
    return list(clips.values())


def _read_clip_list(listing: Path, kind: Kind) -> Iterator[EvaluationClip]:
    from audiollm.data.tables.columns import USUAL_COLUMNS, ColumnFinder, is_missing
    from audiollm.data.tables.rows import checked_rows
    from audiollm.evaluate.codec.evaluation import EvaluationClip

    listed = checked_rows(listing, USUAL_COLUMNS["audio"])
    finder = ColumnFinder(listed.columns, {}, str(listing))
    for where, row in listed.rows:
        values = {field: row[column] for field, column in finder.of_row(row).items()}
        if is_missing(values.get("audio")):
            raise ConfigError("no path", where, "the list needs a column path, and one in each row")
        named, language = values.get("kind"), values.get("language")
        yield EvaluationClip(
            listing.parent / str(values["audio"]),
            kind=kind if is_missing(named, is_name=True) else _parse_clip_kind(str(named), where),
            text=None if is_missing(values.get("text")) else str(values["text"]),
            language=None if is_missing(language, is_name=True) else str(language),
        )


def name_codecs(specs: Sequence[str]) -> dict[str, Path]:
    """Names and folders of codecs; a name that is not given is the end of the path that tells it apart.

    Raises:
        ConfigError: no model there, or a name given twice.
    """
    from audiollm.models.pretrained import model_folder

    named: dict[str, Path] = {}
    for text in specs:
        name, equals, folder = text.partition("=")
        path = Path(folder if equals else text)
        other_paths = [Path(spec.rpartition("=")[2]) for spec in specs if spec != text]
        label = name if equals else _short_name(path, other_paths)
        if label in named:
            raise ConfigError(f"{label}: two codecs of that name", "CODEC", "tell them apart: NAME=FOLDER")
        named[label] = model_folder(path)
    return named


def _short_name(path: Path, other_paths: Sequence[Path]) -> str:
    parts = path.resolve().parts
    if snapshot_name(path) is not None:
        return folder_label(path)
    for length in range(1, len(parts)):
        if all(other_path.resolve().parts[-length:] != parts[-length:] for other_path in other_paths):
            return "/".join(parts[-length:])
    return str(path)


def _parse_metrics(option: str | None) -> list[str]:
    from audiollm.evaluate.codec.scores import METRICS

    names = list(METRICS) if option is None else [name.strip() for name in option.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"{name}: no such metric", "--metrics", suggestion(name, METRICS))
    return [name for name in METRICS if name in names]


def _parse_codebook_numbers(option: str | None) -> list[int]:
    try:
        numbers = [int(text) for text in option.split(",")] if option else []
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise ConfigError(f"{option}: not numbers of codebooks", "--codebooks", "give for example 1,2,4,8")
    return numbers


def _parse_clip_kind(name: str, where: str) -> Kind:
    from audiollm.evaluate.codec.evaluation import Kind

    if name not in get_args(Kind):
        raise ConfigError(f"{name}: no such kind of clip", where, suggestion(name, get_args(Kind)))
    return cast("Kind", name)


def _fingerprint_judges(*judges: ChosenJudge | None) -> str:
    """The part of a row's fingerprint besides codec and clip: the judges, and whether PESQ can be computed."""
    judge_fingerprints = " ".join(judge.fingerprint if judge else "None" for judge in judges)
    return f"{judge_fingerprints} pesq={importlib.util.find_spec('pesq') is not None}"


# ------------------------------------------------------------------------------------------------ console


def _print_codec_scores(result: dict[str, Any], console: Console) -> None:
    """A table for each kind of clip, one of the codecs themselves, and what was set aside."""
    from audiollm.evaluate.codec.scores import METRICS

    for kind, size in result["clips"].items():
        title = f"{kind}: {size['clips']} clips, {size['seconds']:.0f} s, means"
        rows: list[list[str]] = []
        originals = result["original"].get(kind, {})
        has_originals = any(cell["n"] for cell in originals.values())
        headings = ["metric", *(["original"] if has_originals else []), *result["codecs"]]
        for name in result["metrics"]:
            metric = METRICS[name]
            cells = [scores["kinds"].get(kind, {}).get(name) for scores in result["codecs"].values()]
            cells = [originals.get(name), *cells] if has_originals else cells
            arrow = "↑" if metric.higher_is_better else "↓"
            rows.append(
                [f"{metric.title} {arrow}", *(_format_metric_cell(cell, metric.digits) for cell in cells)]
            )
        print_table(console, headings, rows, title)
    _print_codecs(result, console)
    _print_reasons(result, console)
    for item in result["set_aside"]:
        line = f"set aside  {item['path']}: {item['reason']}"
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _print_reasons(result: dict[str, Any], console: Console) -> None:
    """Why a metric has no value for some of the clips, such as loops of the recognizer, which are not scored."""
    from audiollm.evaluate.codec.scores import METRICS

    tables = {"original": result["original"]}
    tables |= {name: scores["kinds"] for name, scores in result["codecs"].items()}
    for name, kinds in tables.items():
        for kind, metrics in kinds.items():
            for metric, cell in metrics.items():
                for reason, count in cell["reasons"].items() if cell["n"] else ():
                    line = f"n/a  {METRICS[metric].title} of {count} {kind} clips, {name}: {reason}"
                    console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _print_codecs(result: dict[str, Any], console: Console) -> None:
    rows: dict[str, list[str]] = {}
    for scores in result["codecs"].values():
        usage, perplexity = scores["codebooks"]["usage"], scores["codebooks"]["perplexity"]
        cells = {
            "kbps": f"{scores['bitrate_bps'] / 1000:.2f}",
            "codebooks": f"{scores['num_codebooks']} × {scores['codebook_size']}, {scores['frame_rate']:g} Hz",
            "codes used": f"{min(usage):.0%} to {max(usage):.0%}",
            "perplexity": f"{min(perplexity):.0f} to {max(perplexity):.0f}",
            "frames": str(scores["codebooks"]["frames"]),
            "failed clips": str(scores["failed_clips"]),
        }
        for what in ("encode", "decode"):
            seconds = scores["speed"][f"{what}_cpu_s_per_audio_s"]
            cells[f"{what}, CPU-s a second"] = "n/a" if seconds is None else f"{seconds:.4f}"
        for heading, cell in cells.items():
            rows.setdefault(heading, []).append(cell)
    table = [[heading, *row] for heading, row in rows.items()]
    print_table(console, ["", *result["codecs"]], table, "codebooks and cost")


def _format_metric_cell(table: dict[str, Any] | None, digits: int) -> str:
    if table is None:
        return ""
    if table["mean"] is None:
        return "n/a: " + next(iter(table["reasons"]), "no clip")
    number = f"{table['mean']:.{digits}f}"
    return f"{number} (n={table['n']})" if table["not_available"] else number
