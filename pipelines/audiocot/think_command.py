"""The command `think`: the chain of thought of a clip, of a region, or of an instruction, by a model that writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from audiollm.errors import ConfigError
from audiollm.hub_models.options import Download, source_option

if TYPE_CHECKING:
    from audiollm.data.records.sample import Region
    from audiollm.data.records.thoughts import ThoughtRecord
    from pipelines.audiocot.thinking import Thinker, ThoughtRequest

ASKS = 3
"""Requests to a model, each after the first with what was wrong before."""


def think_about(
    source: Annotated[
        Path, typer.Argument(help="A video with sound, or a recording.", metavar="VIDEO|AUDIO")
    ],
    model: Annotated[
        str | None,
        source_option("Who writes: the folder of a model, or endpoint=MODEL@URL.", show_default="measured"),
    ] = None,
    start: Annotated[float, typer.Option(min=0.0, help="Beginning of the clip, in seconds.")] = 0.0,
    end: Annotated[
        float | None, typer.Option(min=0.0, help="End of the clip, in seconds.", show_default="the file's")
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(help="Write of the object in a box, x,y,width,height in pixels of the picture."),
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="Read an instruction as edits: operation, sound and span of each.")
    ] = None,
    tagger: Annotated[
        str | None, source_option("A tagger of sounds for measurements: auto (YAMNet), or a path.")
    ] = None,
    frame_rate: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=30,
            help="Pictures per second that the model sees.",
            show_default="as trained, else 2",
        ),
    ] = None,
    frame_side: Annotated[
        int | None,
        typer.Option(
            min=16,
            max=2048,
            help="Pad pictures to a square and scale to this side.",
            show_default="as trained",
        ),
    ] = None,
    asks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests: each after the first quotes what was wrong before.", show_default="3"
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: the record, its prose, and the edits or the question about them.",
        ),
    ] = False,
    download: Download = False,
) -> None:
    """Print the chain of thought (CoT) of a clip's sound: its record as JSON, and the prose made from it.

    Without a model the record is written from measurements: names need a tagger. An instruction is read as the studio
    reads it, by that record; what may mean several things is answered with a question.

    Examples:

    audiollm think street.mp4 --tagger auto

    audiollm think street.mp4 --model runs/writer/train/model --region 120,40,80,90

    audiollm think rain.wav --instruction "mute the first 500 ms and let it rain on for three seconds"
    """
    from audiollm.data.records.thoughts import prose_of, record_json
    from audiollm.data.records.video_clips import PictureSettings
    from pipelines.audiocot.thinking import MeasuredThinker, ThoughtRequest, model_thinker, pictures_of_model

    _check_options(
        model,
        {"--tagger": tagger},
        {"--frame-rate": frame_rate, "--frame-side": frame_side, "--asks": asks},
    )
    pictures = None
    if frame_rate is not None or frame_side is not None:
        model_pictures = pictures_of_model(str(model))
        pictures = PictureSettings(
            per_second=frame_rate or model_pictures.per_second,
            side=model_pictures.side if frame_side is None else frame_side,
        )
    if region is not None and instruction is not None:
        raise ConfigError(
            "an instruction is about the whole clip",
            "--region",
            "ask about the object or give the instruction",
        )
    request = ThoughtRequest(source, start, end, read_region(region), pictures=pictures)
    thinker: Any
    if model is None:
        if region is not None:
            raise ConfigError("a region needs a model that writes", "--model", "give the folder of one")
        thinker = MeasuredThinker(tagger)
    else:
        thinker = model_thinker(model, asks or ASKS)
    answer = thinker.think(request)
    record = answer.record
    if answer.little_evidence:
        typer.echo("little evidence: the tagger has no name for the loudest sound", err=True)
    reading: dict[str, Any] = {}
    if instruction is not None:
        writer = None if model is None else thinker
        reading = reading_json(replace(request, instruction=instruction), record, writer)
    if as_json:
        content = {**reading, "record": record_json(record), "prose": prose_of(record)}
        typer.echo(json.dumps(content, ensure_ascii=False))
        return
    typer.echo(json.dumps(record_json(record), ensure_ascii=False, indent=2))
    typer.echo(prose_of(record))
    for edit in reading.get("edits", ()):
        start_s, end_s = edit["span"]
        words = " ".join(filter(None, (edit["operation"], edit["sound"])))
        typer.echo(f"{words} from {start_s:g} to {end_s:g} s")
    if "question" in reading:
        typer.echo("\n".join([reading["question"], *(f"  {choice}" for choice in reading["choices"])]))


def reading_json(request: ThoughtRequest, record: ThoughtRecord, writer: Thinker | None) -> dict[str, Any]:
    """The edits of an instruction, or the question about it, as JSON values.

    Raises:
        ConfigError: a file that cannot be used.
    """
    from pipelines.audiocot.thinking import open_clip, understand
    from pipelines.instructions import InstructionQuestion

    try:
        plans = understand(request, record, open_clip(request).duration_s, writer)
    except InstructionQuestion as question:
        return {"edits": [], "question": question.sentence, "choices": list(question.choices)}
    edits = [
        {"operation": plan.kind, "sound": plan.caption, "span": [plan.start_s, plan.end_s]} for plan in plans
    ]
    return {"edits": edits}


def _check_options(model: str | None, measures: Mapping[str, Any], asks: Mapping[str, Any]) -> None:
    """Check that no option is given that would not be read.

    Args:
        measures: options of measurements, by name.
        asks: options of a model.

    Raises:
        ConfigError: one is.
    """
    for name in [name for name, value in (asks if model is None else measures).items() if value is not None]:
        if model is None:
            raise ConfigError(
                "measurements ask no model and see no pictures of it", name, "give --model, too"
            )
        raise ConfigError("a model measures nothing", name, "leave it out, or leave --model out")


def read_region(text: str | None) -> Sequence[Region]:
    """Parse `x,y,width,height`.

    Raises:
        ConfigError: it is no box.
    """
    from audiollm.data.records.sample import Region

    if text is None:
        return ()
    try:
        x, y, width, height = (float(value) for value in text.split(","))
        return (Region(x=x, y=y, width=width, height=height),)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no box", "--region", "give x,y,width,height in pixels, for example 120,40,80,90"
        ) from None
