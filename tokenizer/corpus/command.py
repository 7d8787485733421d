"""The commands `tokenize` and `detokenize`: sound files to shards of codes, and back."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from audiollm.audio.discovery import links_note
from audiollm.errors import ConfigError
from audiollm.hub_models.options import Download, folder_option
from audiollm.progress import progress_bar

if TYPE_CHECKING:
    from audiollm.codec import Codec
    from audiollm.data.records.sample import Sample
    from audiollm.errors import BadSample
    from audiollm.files.set_aside import Row
    from tokenizer.corpus.encoding import Advance, Coding, Corpus

TOKENIZE_RECORD, DETOKENIZE_RECORD = "tokenize.json", "detokenize.json"
MAX_PRINTED_ROWS = 5
"""Rows of `set_aside.jsonl` that are also printed."""


class WorkerEngine(StrEnum):
    """Place of the work of `tokenize`."""

    LOCAL = "local"
    RAY = "ray"


class SoundFormat(StrEnum):
    """File formats of `detokenize`, 16 bits per sample."""

    FLAC = "flac"
    WAV = "wav"


def tokenize(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Folders, files, globs in quotes, or lists: a .jsonl of samples, a .csv with a column path "
            "(relative to the list; other columns are kept as metadata).",
            metavar="INPUT...",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the shards.", show_default=False)],
    codec: Annotated[
        Path | None,
        folder_option("The codec's folder; to go on, by default the one begun with.", show_default=False),
    ] = None,
    codebooks: Annotated[
        int | None, typer.Option(min=1, help="Keep the first codebooks only.", show_default="all")
    ] = None,
    samples_per_shard: Annotated[
        int | None, typer.Option(min=1, help="Samples a shard.", show_default="512, an hour of audio at most")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that encode, each with the codec.")] = 1,
    level: Annotated[
        str, typer.Option(help="RMS level in dBFS to bring each clip to, or none. Recipes train on -23.")
    ] = "none",
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first file that cannot be used, with exit code 2.")
    ] = False,
    engine: Annotated[
        WorkerEngine, typer.Option(help="Processes of this machine, or a Ray cluster.")
    ] = WorkerEngine.LOCAL,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster.", show_default="one on this machine")
    ] = None,
    download: Download = False,
) -> None:
    """Encode sound files into shards of codes.

    Files of any length, format and rate. Killed and run again, it goes on after the last
    whole shard. What cannot be used is named in OUT/set_aside.jsonl with the reason, and
    the rest goes on.

    Examples:

    audiollm tokenize recordings -o shards --codec runs/quickstart/train_tokenizer

    audiollm tokenize 'books/**/*.mp3' more.csv -o shards --codec models/mimi --codebooks 8 --workers 4

    audiollm tokenize runs/mine/compose/samples.jsonl -o shards --codec runs/mine/train_tokenizer --level -23

    audiollm tokenize recordings -o shards --codec models/mimi --engine ray --ray-address auto --workers 16
    """
    from audiollm.codec import load_codec
    from audiollm.models.pretrained import model_folder
    from tokenizer.corpus.cluster_work import ClusterWorkers
    from tokenizer.corpus.encoding import Coding, tokenize_corpus

    if ray_address is not None and engine is not WorkerEngine.RAY:
        raise ConfigError("no cluster is used", "--ray-address", "give --engine ray as well")
    team = ClusterWorkers(workers, ray_address) if engine is WorkerEngine.RAY else workers
    console = Console()
    level_dbfs = _level(level)
    begun = _begun(out)
    codec = codec or (_codec_of(begun, out) if begun else None)
    if codec is None:
        remedy = "give a codec's folder, for example --codec runs/quickstart/train_tokenizer"
        raise ConfigError("no codec given", "--codec", remedy)
    coding = Coding(model_folder(codec), codebooks, level_dbfs)
    loaded = load_codec(coding.codec)
    corpus = _corpus(inputs, console)
    per_shard = samples_per_shard or (begun or {}).get("--samples-per-shard") or corpus.samples_per_shard
    _record_inputs(out, loaded, coding, corpus, per_shard, begun)
    _warn_of_long(loaded, corpus, console)
    with _show_duration_bar(console, "encoding", sum(corpus.durations_s)) as advance:
        counts, set_aside = tokenize_corpus(loaded, corpus, out, coding, per_shard, team, strict, advance)
    console.print(
        f"{out}: {counts['samples']} samples, {counts['frames']} frames in {counts['shards']} shards",
        highlight=False,
        soft_wrap=True,
    )
    _print_set_aside(set_aside, out, console)


def detokenize(
    shards: Annotated[Path, typer.Argument(help="A folder of shards, `tokenize`'s.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the sound.", show_default=False)],
    codec: Annotated[
        Path | None,
        folder_option("The codec's folder.", show_default="the one that encoded"),
    ] = None,
    codebooks: Annotated[
        int | None, typer.Option(min=1, help="Decode the first codebooks only.", show_default="all")
    ] = None,
    format: Annotated[SoundFormat, typer.Option(help="Of the files, 16 bits a sample.")] = SoundFormat.FLAC,
    max_codes_mb: Annotated[
        float, typer.Option(min=0, help="Set samples aside whose codes unpack to more.")
    ] = 64.0,
    download: Download = False,
) -> None:
    """Decode shards of codes into sound files, one a clip: OUT/<id of the sample>.flac.

    Each is as long and as loud as what was encoded. Killed and run again, it goes on:
    files that are there are whole, and are kept.

    Examples:

    audiollm detokenize shards -o decoded

    audiollm detokenize shards -o first_codebook --codebooks 1 --format wav
    """
    from audiollm.files.atomic import file_digest, folder_digest
    from tokenizer.corpus.decoding import detokenize_shards, open_shards
    from tokenizer.corpus.encoding import check_record

    console = Console()
    loaded, folder, index = open_shards(shards, codec)
    there = int(index.get("codec", {}).get("num_codebooks", loaded.num_codebooks))
    if codebooks is not None and codebooks > there:
        raise ConfigError(f"{codebooks}: the codes have {there} codebooks", "--codebooks", "give fewer")
    record = {
        "folder of shards": file_digest(shards / "index.json"),
        "codec": folder_digest(folder),
        "--codebooks": codebooks or there,
        "--format": format.value,
    }
    check_record(out / DETOKENIZE_RECORD, record)
    with _show_duration_bar(console, "decoding", index["counts"]["frames"] / loaded.frame_rate) as advance:
        counts, set_aside = detokenize_shards(
            shards, loaded, out, format.value, codebooks, advance, max_codes_mb
        )
    kept_note = f", {counts['kept']} were there" if counts["kept"] else ""
    console.print(f"{out}: {counts['written']} files written{kept_note}", highlight=False, soft_wrap=True)
    _print_set_aside(set_aside, out, console)


# ------------------------------------------------------------------------------------------------- inputs


@dataclass
class CorpusInputs:
    """Samples from folders, files and lists: each file once, each id once."""

    samples: list[Sample] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    num_other_files: int = 0
    """Files in the folders that are not sound."""
    notes: list[str] = field(default_factory=list)
    """Facts about the tables: the columns read, a guessed encoding."""
    _files: set[Path] = field(default_factory=set)
    _ids: set[str] = field(default_factory=set)

    def add_file(self, path: Path, name: str, metadata: dict[str, str] | None = None) -> None:
        """A sample of one audio part; `name` is its id, with a number where that is taken."""
        from audiollm.data.records.sample import AudioPart, Message, Sample
        from audiollm.errors import BadSample
        from audiollm.files.atomic import is_unicode
        from audiollm.files.set_aside import NAME_IS_NOT_UTF8, UNREADABLE

        if path.resolve() in self._files:
            return
        self._files.add(path.resolve())
        if not is_unicode(str(path)):
            self.bad.append(BadSample(str(path), "", NAME_IS_NOT_UTF8, UNREADABLE))
            return
        free, number = name, 1
        while free in self._ids:
            number += 1
            free = f"{name}-{number}"
        self._ids.add(free)
        messages = [Message(role="assistant", content=[AudioPart(path=str(path))])]
        self.samples.append(Sample(id=free, messages=messages, task="audio", metadata=metadata or {}))

    def add_folder(self, folder: Path) -> None:
        from audiollm.audio import AudioError, find_audio

        try:
            paths, other_files = find_audio(folder)
        except AudioError as error:
            raise ConfigError(str(error), "INPUT") from error
        self.num_other_files += len(other_files)
        for path in paths:
            self.add_file(path, path.relative_to(folder).with_suffix("").as_posix())

    def add_samples(self, listing: Path) -> None:
        """The samples of a .jsonl."""
        from audiollm.data.records.manifest import read_samples
        from audiollm.errors import BadSample

        samples, bad = read_samples(listing)
        self.bad += bad
        for sample in samples:
            if sample.id in self._ids:
                reason = f"id {sample.id!r} was used by another input"
                self.bad.append(BadSample(str(listing), sample.id, reason, "doubled id"))
            else:
                self._ids.add(sample.id)
                self.samples.append(sample)

    def add_table(self, listing: Path) -> None:
        """The files of a table, relative to it."""
        from audiollm.data.tables.columns import NAME_FIELDS, USUAL_COLUMNS, ColumnFinder, is_missing
        from audiollm.data.tables.rows import checked_rows

        listed = checked_rows(listing, USUAL_COLUMNS["audio"])
        finder = ColumnFinder(listed.columns, {}, str(listing))
        self.notes += [*listed.notes, f"{listing}: {finder.note()}"]
        for where, row in listed.rows:
            fields = {
                name: "" if is_missing(row[column], name in NAME_FIELDS) else str(row[column])
                for name, column in finder.of_row(row).items()
            }
            if not fields.get("audio"):
                raise ConfigError("no path", where, "the list needs a column path, and one in each row")
            path = Path(fields.pop("audio"))
            name = path.stem if path.is_absolute() or ".." in path.parts else path.with_suffix("").as_posix()
            self.add_file(listing.parent / path, fields.pop("id", "") or name, fields)


def read_inputs(arguments: Sequence[str]) -> CorpusInputs:
    """The inputs that the arguments of `tokenize` name, in their order.

    Raises:
        ConfigError: nothing is there, or a list that cannot be read.
    """
    inputs = CorpusInputs()
    for text in arguments:
        for path in _expanded(text):
            suffix = path.suffix.lower()
            if path.is_dir():
                inputs.add_folder(path)
            elif suffix == ".jsonl":
                inputs.add_samples(path)
            elif suffix in (".csv", ".tsv"):
                inputs.add_table(path)
            else:
                inputs.add_file(path, path.stem)
    if not inputs.samples:
        reason = f": {inputs.bad[0]}" if inputs.bad else ""
        raise ConfigError(
            f"no sound to encode{reason}{links_note(*arguments)}",
            "INPUT",
            "give folders, files or lists of sound",
        )
    return inputs


def _expanded(text: str) -> list[Path]:
    if Path(text).exists():
        return [Path(text)]
    paths = sorted(Path(name) for name in glob.glob(text, recursive=True)) if glob.has_magic(text) else []
    if not paths:
        raise ConfigError(f"no such file or folder: {text}", "INPUT", "check the path")
    return paths


def _corpus(arguments: Sequence[str], console: Console) -> Corpus:
    from tokenizer.corpus.encoding import Corpus, planned_seconds

    inputs = read_inputs(arguments)
    for note in inputs.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    with console.status("reading the headers"):
        durations_s = [planned_seconds(sample) for sample in inputs.samples]
    count = inputs.num_other_files
    other_note = f"; other files in the folders, left alone: {count}" if count else ""
    console.print(f"{len(inputs.samples)} samples, {sum(durations_s):.0f} s{other_note}", highlight=False)
    return Corpus(inputs.samples, durations_s, inputs.bad)


# ---------------------------------------------------------------------------------- what a folder was begun with


def _begun(out: Path) -> dict[str, Any] | None:
    """The record that an earlier attempt left in `out`.

    Raises:
        ConfigError: shards that are not this command's.
    """
    from audiollm.files.atomic import read_record

    if (out / TOKENIZE_RECORD).exists():
        return read_record(out / TOKENIZE_RECORD)
    if any(out.glob("shard-*.tar")) or (out / "index.json").exists():
        raise ConfigError("holds shards that are not of this command", str(out), "choose another -o")
    return None


def _codec_of(begun: dict[str, Any], out: Path) -> Path:
    """The folder of the codec that `out` was begun with."""
    from audiollm.files.atomic import DamagedFile

    folder = begun.get("codec folder")
    if not isinstance(folder, str):
        raise DamagedFile(out / TOKENIZE_RECORD, "it names no codec", "give --codec, or choose another -o")
    return Path(folder)


def _record_inputs(
    out: Path, codec: Codec, coding: Coding, corpus: Corpus, per_shard: int, begun: dict[str, Any] | None
) -> None:
    """Note in `out` all that its content depends on, or compare."""
    from audiollm.files.atomic import folder_digest
    from tokenizer.corpus.encoding import check_record

    books = codec.num_codebooks
    if coding.num_codebooks is not None and coding.num_codebooks > books:
        raise ConfigError(f"{coding.num_codebooks}: the codec has {books}", "--codebooks", "give fewer")
    record = {
        "codec": folder_digest(coding.codec),
        "list of inputs": corpus.digest,
        "--codebooks": coding.num_codebooks or books,
        "--level": coding.level_dbfs,
        "--samples-per-shard": per_shard,
    }
    check_record(
        out / TOKENIZE_RECORD, record if begun else {**record, "codec folder": str(coding.codec.resolve())}
    )


def _level(text: str) -> float | None:
    if text == "none":
        return None
    try:
        level_dbfs = float(text)
    except ValueError:
        level_dbfs = 1.0
    if not -60 <= level_dbfs <= 0:
        raise ConfigError(f"{text}: not a level", "--level", "give none, or dBFS from -60 to 0: -23")
    return level_dbfs


# ------------------------------------------------------------------------------------------------ console


class _RateColumn(ProgressColumn):
    """Seconds of audio a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}x realtime" if task.speed else "")


@contextmanager
def _show_duration_bar(console: Console, description: str, total_s: float) -> Iterator[Advance]:
    columns = (TextColumn("  {task.description}"), BarColumn(), _RateColumn(), TimeRemainingColumn())
    with progress_bar(console, description, total_s, columns, unit="second") as progress:
        yield lambda seconds: progress.advance(progress.task_ids[0], seconds)


def _warn_of_long(codec: Codec, corpus: Corpus, console: Console) -> None:
    from tokenizer.corpus.encoding import LONG_S, StreamingCodec

    count = sum(duration_s > LONG_S for duration_s in corpus.durations_s)
    if count and not isinstance(codec, StreamingCodec):
        text = f"this codec takes a clip only as a whole: {count} of more than {LONG_S / 60:.0f} minutes need memory"
        console.print(text, style="yellow", highlight=False, soft_wrap=True)


def _print_set_aside(rows: Sequence[Row], out: Path, console: Console) -> None:
    for row in rows[:MAX_PRINTED_ROWS]:
        text = f"set aside  {row['place']}: {row['reason']}"
        console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if rows:
        where = out / "set_aside.jsonl"
        console.print(
            f"{len(rows)} set aside in all: {where}", style="yellow", highlight=False, soft_wrap=True
        )
