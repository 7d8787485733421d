"""The commands `sound generate` and `sound edit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.hub_models.options import Download, read_folder, source_option

if TYPE_CHECKING:
    from audiollm.audio import Waveform
    from audiollm.data.records.sample import VideoPart
    from audiollm.flow.editing.tracks import Track
    from audiollm.flow.generator import SoundGenerator
    from audiollm.flow.model.sampling import SamplerSettings
    from audiollm.flow.service import Job

VIDEO_ENDINGS = {
    ".mp4": "its sound is encoded anew (AAC): write .mkv to keep all other samples",
    ".mov": "16 bits of all other samples are kept (PCM)",
    ".mkv": "24 bits of all other samples are kept (FLAC)",
}
"""Endings of files that hold pictures beside the sound, and what an edit says of the samples outside of its span."""
Model = Annotated[
    Path,
    typer.Argument(
        help="A train_flow stage's folder, or its run's folder.",
        parser=read_folder,
        metavar="MODEL",
        show_default=False,
    ),
]
AutoencoderOption = Annotated[
    str | None,
    source_option("The autoencoder's folder or import path; by default the run's own."),
]
Caption = Annotated[str, typer.Option(help="The sounds in words, as in 'a dog barks over rain'.")]
Cot = Annotated[str, typer.Option(help="The chain of thought: which sounds, when, in what order, how.")]
Video = Annotated[Path | None, typer.Option(help="A video whose pictures the sound belongs to.")]
RegionOption = Annotated[
    str | None,
    typer.Option(help="The object in the video that sounds, as X,Y,W,H in pixels.", metavar="X,Y,W,H"),
]
Steps = Annotated[int, typer.Option(min=1, max=1000, help="Steps of the sampler.")]
Solver = Annotated[str, typer.Option(help="euler, midpoint or heun.")]
Guidance = Annotated[
    float | None,
    typer.Option(min=0.0, help="Scale of the conditions; 1: none.", show_default="4.5, or 1 without dropout"),
]
Seed = Annotated[int, typer.Option(min=0, max=2**62, help="Another seed, another sound.")]


def make_sound(
    model: Model,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="The sound file to write, or a .mp4, .mov or .mkv: the video with the sound.",
            show_default=False,
        ),
    ],
    caption: Caption = "",
    cot: Cot = "",
    video: Video = None,
    region: RegionOption = None,
    duration_s: Annotated[
        float | None,
        typer.Option("--duration", min=0.05, max=3600.0, help="Seconds; by default the video's."),
    ] = None,
    autoencoder: AutoencoderOption = None,
    steps: Steps = 24,
    solver: Solver = "euler",
    guidance: Guidance = None,
    seed: Seed = 0,
    download: Download = False,
) -> None:
    """Make a sound from a video, a caption, a chain of thought, or any mix of them.

    Example: audiollm sound generate runs/thinksound-tiny --video clip.mp4 --caption "a bell rings" -o bell.wav
    """
    from audiollm.audio import SOUND_ENDINGS, Waveform
    from audiollm.files.atomic import check_writable
    from audiollm.flow.service import SoundOrder, load_generator, make_ordered

    console = Console()
    _check_conditions(caption, cot, video)
    _check_guidance(guidance)
    _check_output_name(out, video, SOUND_ENDINGS)
    pictured = _video_part(video, region)
    duration_s = duration_s or _video_length(video)
    check_writable(out, "--out")
    generator = load_generator(model, autoencoder)
    if video is not None and out.suffix.lower() in VIDEO_ENDINGS:
        codec = generator.autoencoder
        _name_lost(console, _lost_of_film(video, out, codec.sample_rate, codec.channels), out)
    _check_used_conditions(console, generator, caption, cot, video)
    if video is not None:
        _check_video_length(generator, video, duration_s)
    settings = _sampler_settings_of(generator, steps, solver, guidance)
    order = SoundOrder(caption, duration_s, cot, pictured, str(video or "command line"))
    clip = _with_progress(
        console, generator, lambda job: make_ordered(generator, order, job.watched(settings), f"{seed}/sound")
    )
    _write_sound(out, Waveform(clip.samples_CN, generator.sample_rate), video)
    _print_lines(console, [f"{out}: {duration_s:.2f} s"])
    _print_lines(console, clip.remarks(), style="yellow")


def edit_sound(
    model: Model,
    track: Annotated[Path, typer.Argument(help="The sound file to edit.", show_default=False)],
    operation: Annotated[str, typer.Argument(help="extend, inpaint, add or remove.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="The file to write, in the format of the input; or a .mp4, .mov or .mkv: the video "
            "with the edited sound; .mkv keeps 24 bits of every other sample. What else the file or the video holds "
            "(tags, chapters, subtitles, other sounds) is copied, or named before the work begins.",
            show_default=False,
        ),
    ],
    given_span: Annotated[
        str,
        typer.Option(
            "--span", help="Seconds from the beginning: FROM,TO; either may be left out.", metavar="FROM,TO"
        ),
    ] = ",",
    caption: Caption = "",
    cot: Cot = "",
    video: Video = None,
    region: RegionOption = None,
    layer: Annotated[
        Path | None,
        typer.Option(help="Also write the edited sound minus the input, from which the input is recovered."),
    ] = None,
    autoencoder: AutoencoderOption = None,
    steps: Steps = 24,
    solver: Solver = "euler",
    guidance: Guidance = None,
    seed: Seed = 0,
    download: Download = False,
) -> None:
    """Extend a track, fill a span of it, add a sound or remove one; all samples outside of the span stay as they are.

    Example: audiollm sound edit runs/thinksound-tiny street.wav add --span 2,3.5 --caption "a bell rings" -o out.wav
    """
    from audiollm.audio import AudioError, Waveform
    from audiollm.files.atomic import check_writable
    from audiollm.flow.editing.operations import find_operation, find_span, heard_from_s
    from audiollm.flow.editing.requests import EditRequest
    from audiollm.flow.editing.tracks import read_track
    from audiollm.flow.service import edit_ordered, load_generator

    console = Console()
    edit_name = find_operation(operation)
    if edit_name in ("add", "remove"):
        _check_conditions(caption, cot, video)
    _check_guidance(guidance)
    try:
        before = read_track(track)
    except AudioError as error:
        raise ConfigError(str(error), str(track)) from error
    span = find_span(before, edit_name, *_parse_comma_numbers(given_span, "--span", 2))
    rate, pictured = before.sample_rate, _video_part(video, region)
    film = video or (track if out.suffix.lower() in VIDEO_ENDINGS else None)
    if out.suffix.lower() in VIDEO_ENDINGS:
        _check_output_name(out, film, ())
        _video_length(film)
    else:
        before.check_name(out)
    if layer is not None and layer.suffix.lower() != ".wav":
        raise ConfigError(f"--layer: {layer.name} is written as WAV", "command line", "end the name in .wav")
    for option, path in (("--out", out), ("--layer", layer)):
        if path is not None and path.exists() and path.samefile(track):
            raise ConfigError(f"{option}: {path} is the input", "command line", "give another name")
    if layer is not None and layer.resolve() == out.resolve():
        raise ConfigError(f"--layer: {layer} is --out", "command line", "give another name")
    check_writable(out, "--out")
    if layer is not None:
        check_writable(layer, "--layer")
    _name_lost(console, _list_lost_content(out, before, film), out)
    generator = load_generator(model, autoencoder)
    cot = _usable_cot(console, cot, caption, video, heard_from_s(generator, before, span))
    _check_used_conditions(console, generator, caption, cot, video, edit_name in ("add", "remove"))
    settings = _sampler_settings_of(generator, steps, solver, guidance)
    request = EditRequest(edit_name, caption, span.start / rate, span.end / rate, cot, pictured)
    place = str(video or "command line")
    result = _with_progress(
        console,
        generator,
        lambda job: edit_ordered(
            generator, before, request, span, job.watched(settings), f"{seed}/edit", place
        ),
    )
    if out.suffix.lower() in VIDEO_ENDINGS:
        _write_sound(out, Waveform(result.track.waveform(), rate), film)
    else:
        result.track.save(out)
    if layer is not None:
        result.layer.save(layer)
    where = f"{span.start / rate:.3f} to {span.end / rate:.3f} s"
    _print_lines(console, [f"{out}: {edit_name} {where}; {_other_samples(out, track, before)}"])
    _print_lines(console, result.remarks(), style="yellow")


# Private


def _print_lines(console: Console, lines: Sequence[str], style: str | None = None) -> None:
    for line in lines:
        console.print(line, style=style, highlight=False, soft_wrap=True)


def _other_samples(out: Path, path: Path, track: Track) -> str:
    """A sentence for the log: in which form the samples outside of the edited span are kept."""
    ending = out.suffix.lower()
    if ending in (".mov", ".mkv") and float(np.abs(track.samples_NC).max()) > 1 and track.bits is None:
        return "32-bit floating-point numbers of all other samples are kept (PCM): some are above full scale"
    kept = f"all other samples are those of {path}"
    if track.decoded_from:
        kept += f", as 32-bit floating-point numbers (there they are {track.decoded_from})"
    return VIDEO_ENDINGS.get(ending, kept)


def _list_lost_content(out: Path, track: Track, film: Path | None) -> list[str]:
    """Tags, tracks and data of the track's file and of the film that the new file cannot hold.

    Raises:
        ConfigError: the film cannot be read, or its pictures do not go into such a file.
    """
    from audiollm.audio.tags import read_tags

    if out.suffix.lower() not in VIDEO_ENDINGS:
        return track.lost_tags()
    assert film is not None
    lost = _lost_of_film(film, out, track.sample_rate, track.samples_NC.shape[1])
    if Path(track.source) != film:
        tags = read_tags(Path(track.source))
        names = [*(f"the tag {name}" for name in tags.texts), *tags.non_text]
        lost += [f"{name} of {Path(track.source).name}" for name in names]
    return lost


def _lost_of_film(film: Path, out: Path, sample_rate: int, channels: int) -> list[str]:
    """What a film holds and the same with another sound will not.

    Raises:
        ConfigError: the film cannot be read, or its pictures do not go into such a file.
    """
    from audiollm.video.decoders import VideoError
    from audiollm.video.writing import lost_by_replacing

    try:
        return lost_by_replacing(film, out, sample_rate, channels)
    except VideoError as error:
        raise ConfigError(error.reason, str(error.path)) from error


def _name_lost(console: Console, lost: Sequence[str], out: Path) -> None:
    if lost:
        _print_lines(
            console, [f"not kept, as {out.suffix} does not take it: {', '.join(lost)}"], style="yellow"
        )


def _with_progress(console: Console, generator: SoundGenerator, work: Callable[[Job], Any]) -> Any:
    """Do a request in a service of its own, with the sampling steps on the console; Ctrl-C ends it after a step."""
    from audiollm.flow.service import SoundService

    service = SoundService(generator)
    try:
        with console.status("encoding") as status:
            job = service.submit(work)
            while not job.wait(0.1):
                if job.step:
                    status.update(f"step {job.step} of {job.steps}")
        return job.value()
    finally:
        service.close()


def _check_conditions(caption: str, cot: str, video: Path | None) -> None:
    if not (caption.strip() or cot.strip() or video):
        raise ConfigError("nothing to make a sound from", "command line", "give --caption, --cot or --video")


def _check_guidance(guidance: float | None) -> None:
    if guidance is not None and not math.isfinite(guidance):
        raise ConfigError("--guidance: must be finite", "command line", "give another, or leave it out")


def _check_used_conditions(
    console: Console,
    generator: SoundGenerator,
    caption: str,
    cot: str,
    video: Path | None,
    caption_is_cot: bool = False,
) -> None:
    """Name the conditions that the model does not take, and refuse where it takes none of those that are given.

    Args:
        caption_is_cot: a chain of thought follows from the caption.
    """
    takes = set(generator.model.config.conditions)
    uses = {
        "--caption": (caption, {"caption", "cot"} if caption_is_cot else {"caption"}),
        "--cot": (cot, {"cot"}),
        "--video": (video, {"frames", "sync"}),
    }
    given_options = {option: names for option, (value, names) in uses.items() if value}
    unused = [option for option, names in given_options.items() if not names & takes]
    if not unused:
        return
    message = f"{', '.join(unused)}: the model takes {', '.join(sorted(takes)) or 'no conditions'} alone"
    if len(unused) == len(given_options):
        raise ConfigError(
            message, "command line", "give what it takes, or train on samples that have this, too"
        )
    console.print(f"not used: {message}", style="yellow", highlight=False)


def _check_video_length(generator: SoundGenerator, video: Path, duration_s: float) -> None:
    """Refuse a video that ends before the last picture that the model takes, before the first window is made.

    Raises:
        ConfigError: it does, or cannot be read.
    """
    from audiollm.video.decoders import VideoError
    from audiollm.video.frames import read_frames

    model_conditions = generator.model.config.conditions
    rates = [model_conditions[name]["rate"] for name in ("frames", "sync") if name in model_conditions]
    if not rates:
        return
    try:
        for _ in read_frames(video, [max(0.0, duration_s - 0.5 / max(rates))]):
            pass
    except VideoError as error:
        raise ConfigError(f"--duration: {error.reason}", str(video), "give a shorter --duration") from error


def _usable_cot(console: Console, cot: str, caption: str, video: Path | None, from_s: float) -> str:
    """The chain of thought of an edit; empty where the model hears the track from a later second on.

    Raises:
        ConfigError: it is all that is given, and is not used.
    """
    if not (cot.strip() and from_s):
        return cot
    message = f"--cot: it tells times from the track's beginning, and the model hears the track from {from_s:.2f} s on"
    if not (caption.strip() or video):
        raise ConfigError(
            message, "command line", "give --caption: when the sound is heard follows from --span"
        )
    console.print(f"not used: {message}", style="yellow", highlight=False)
    return ""


def _sampler_settings_of(
    generator: SoundGenerator, steps: int, solver: str, guidance: float | None
) -> SamplerSettings:
    """The settings of the sampler.

    Raises:
        ConfigError: no such solver, or guidance that the model cannot have.
    """
    from audiollm.flow.model.sampling import SamplerSettings
    from audiollm.flow.service import default_guidance
    from audiollm.flow.sound_model import check_guidance

    if solver not in ("euler", "midpoint", "heun"):
        raise ConfigError(f"--solver: no solver {solver!r}", "command line", "known: euler, midpoint, heun")
    if guidance is None:
        guidance = default_guidance(generator)
    settings = SamplerSettings(steps=steps, solver=solver, guidance=guidance)  # type: ignore[arg-type]
    check_guidance(generator.model.config, settings, "--guidance")
    return settings


def _video_part(video: Path | None, region: str | None) -> VideoPart | None:
    """The video with the object in it."""
    from audiollm.data.records.sample import Region, VideoPart

    if video is None:
        if region is not None:
            raise ConfigError("--region: there is no video", "command line", "give --video")
        return None
    boxes = []
    if region is not None:
        x, y, width, height = _parse_comma_numbers(region, "--region", 4)
        if x is None or y is None or width is None or height is None:
            raise ConfigError(f"--region: {region!r} is not X,Y,W,H", "command line", "give four numbers")
        try:
            boxes = [Region(x=x, y=y, width=width, height=height)]
        except ValueError as error:
            raise ConfigError(
                f"--region: {region!r} is no box", "command line", "X,Y from 0, W,H above 0"
            ) from error
    return VideoPart(path=str(video), region=boxes)


def _check_output_name(out: Path, video: Path | None, sound_endings: Sequence[str]) -> None:
    """Refuse a file name that nothing can be written to, before the work begins."""
    ending = out.suffix.lower()
    if ending in VIDEO_ENDINGS:
        if video is None:
            raise ConfigError(
                f"--out: {out.name} is a video, and none is given",
                "command line",
                "give --video, or end the name in .wav",
            )
        if out.exists() and video.exists() and out.samefile(video):
            raise ConfigError(f"--out: {out} is the input", "command line", "give another name")
        return
    if ending not in sound_endings:
        known_endings = ", ".join([*sound_endings, *VIDEO_ENDINGS])
        raise ConfigError(
            f"--out: no format {ending or out.name!r}", "command line", f"end the name in {known_endings}"
        )


def _write_sound(out: Path, sound: Waveform, video: Path | None) -> None:
    """Write a sound file, or the video with the sound in place of its own."""
    from audiollm.audio import save
    from audiollm.video.decoders import VideoError
    from audiollm.video.writing import replace_sound

    if out.suffix.lower() not in VIDEO_ENDINGS:
        save(out, sound.samples_CN, sound.sample_rate)
        return
    assert video is not None
    try:
        replace_sound(video, sound, out)
    except VideoError as error:
        raise ConfigError(error.reason, str(error.path)) from error


def _video_length(video: Path | None) -> float:
    from audiollm.video.decoders import VideoError
    from audiollm.video.frames import pictures_end_s

    if video is None:
        raise ConfigError(
            "--duration: there is no video to tell the length", "command line", "give --duration in seconds"
        )
    try:
        return pictures_end_s(video)
    except VideoError as error:
        raise ConfigError(error.reason, str(video)) from error


def _parse_comma_numbers(text: str, option: str, count: int) -> list[float | None]:
    """Numbers separated by commas; an empty one is None.

    Raises:
        ConfigError: another count, or what is no finite number.
    """
    pieces = [piece.strip() for piece in text.split(",")]
    try:
        numbers = [float(piece) if piece else None for piece in pieces]
        if len(numbers) != count or not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError
        return numbers
    except ValueError:
        raise ConfigError(
            f"{option}: {text!r} is not {count} numbers separated by commas", "command line", "as in 1.5,3"
        ) from None
