"""The command `push`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from audiollm.publish.model_release import Release, ReleaseOptions
    from audiollm.publish.upload import PushOutcome


def push(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A train stage, a saved model or codec, or a run of annotate.", show_default=False
        ),
    ],
    name: Annotated[
        str, typer.Argument(metavar="ORGANIZATION/NAME", help="Name on the hub.", show_default=False)
    ],
    license: Annotated[
        str | None,
        typer.Option(
            help="The hub's identifier of a licence (apache-2.0, cc-by-4.0), or a file with its text.",
            show_default="that in the folder's README.md or LICENSE",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let everybody see it.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and print the card; send nothing.")
    ] = False,
    with_audio: Annotated[
        bool, typer.Option("--with-audio", help="Of a corpus: recordings go up, too, cut into the segments.")
    ] = False,
    samples: Annotated[
        bool, typer.Option(help="Of a model: up to 6 clips go up that it generated in its run.")
    ] = True,
    codec: Annotated[bool, typer.Option(help="Of a model: its codec goes up with it.")] = True,
    language: Annotated[
        list[str] | None, typer.Option(help="A language of it (en); may be repeated.", show_default=False)
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="A data set of the hub that it comes from; may be repeated.", show_default=False),
    ] = None,
    base: Annotated[
        list[str] | None,
        typer.Option(help="A model of the hub that it began from.", show_default="as its run says"),
    ] = None,
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder of `audiollm evaluate`; may be repeated.", show_default="those of its run"
        ),
    ] = None,
) -> None:
    """Publish a model, a codec or an annotated corpus on the Hugging Face hub, with its card.

    The repository is private, unless --public is given. Weights in safetensors and texts go up, and nothing else. What
    is there already is not sent again.

    Examples:

    audiollm push runs/mine/train me/voice --license cc-by-4.0 --language en --dry-run

    audiollm push corpus me/corpus --license cc-by-4.0 --with-audio
    """
    from audiollm.publish.model_release import ReleaseOptions
    from audiollm.publish.upload import check_repository_name, push_release

    options = ReleaseOptions(
        check_repository_name(name),
        tuple(language or ()),
        tuple(dataset or ()),
        tuple(base or ()),
        tuple(scores or ()),
    )
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory() as clips:
        release = gather_release(
            folder, options, license, clips=Path(clips) if with_audio else None, samples=samples, codec=codec
        )
        _print_release(release, console)
        if dry_run:
            console.print(release.card, highlight=False, markup=False)
            visibility = "public" if public else "private"
            console.print(f"nothing is sent; without --dry-run {name} would be {visibility}", highlight=False)
            return
        _print_outcome(push_release(release, options.name, public), console)


def gather_release(
    folder: Path,
    options: ReleaseOptions,
    license: str | None,
    *,
    clips: Path | None = None,
    samples: bool = True,
    codec: bool = True,
) -> Release:
    """Gather what goes up of a folder.

    Args:
        license: of the option; None: as the folder says.
        clips: where the sound of a corpus is cut into; None: no recordings go up.

    Raises:
        ConfigError: no licence, no model or corpus, or options that do not fit it.
    """
    from audiollm.errors import ConfigError
    from audiollm.files.json_files import config_folder
    from audiollm.publish.corpus_release import corpus_release, is_corpus
    from audiollm.publish.licences import read_licence
    from audiollm.publish.model_release import model_release

    if is_corpus(folder):
        if options.scores or options.bases:
            raise ConfigError("--scores and --base are of models", str(folder), "leave them out")
        return corpus_release(folder, read_licence(license, folder), options, clips)
    if clips is not None:
        raise ConfigError("--with-audio is of annotated corpora", str(folder), "leave it out")
    remedy = "give a trained model's folder, or a run of annotate"
    model = config_folder(folder, "model or annotated corpus", remedy)
    return model_release(model, read_licence(license, model), options, samples=samples, codec=codec)


def _print_release(release: Release, console: Console) -> None:
    for file in release.files:
        console.print(f"  {_size_text(file.size):>9}  {file.name}", highlight=False, markup=False)
    total = _size_text(sum(file.size for file in release.files))
    console.print(f"{len(release.files)} files, {total}", highlight=False)
    for name, reason in release.omitted:
        console.print(f"  left out: {name} ({reason})", style="dim", highlight=False, markup=False)


def _print_outcome(outcome: PushOutcome, console: Console) -> None:
    if outcome.sent or outcome.removed:
        size = _size_text(sum(file.size for file in outcome.sent))
        removed = f", {len(outcome.removed)} old files removed" if outcome.removed else ""
        console.print(f"sent {len(outcome.sent)} files, {size}{removed}: {outcome.url}", highlight=False)
    else:
        console.print(f"unchanged, nothing was sent: {outcome.url}", highlight=False)


def _size_text(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
