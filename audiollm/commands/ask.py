"""The command `ask`: a question about a recording, answered in words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from audiollm.errors import ConfigError
from audiollm.hub_models.options import Download, folder_option

_TOP_P = 0.9
"""Share of the likeliest words that sampled answers are drawn from."""


def ask(
    audio: Annotated[Path, typer.Argument(help="The recording.", show_default=False)],
    question: Annotated[str, typer.Argument(help="What to ask about it, in quotes.", show_default=False)],
    model: Annotated[
        Path,
        folder_option(
            "Folder of a train stage, of a saved model, or of a published one.", show_default=False
        ),
    ],
    codec: Annotated[
        Path | None, folder_option("The codec's folder; by default the run's own train_tokenizer.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in text tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely words.")] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**62, help="Seed of the draws; matters where --temperature is above 0.")
    ] = 0,
    download: Download = False,
) -> None:
    """Ask a model about a recording and print its answer; notes and warnings go to stderr.

    The model is one of `audiollm run`, or a published audio LLM of transformers: its folder, or its name on the hub.

    Examples:

    audiollm ask --model runs/understanding-tiny/train door.wav "How many knocks?"

    audiollm ask --model runs/mine/train call.mp3 "Transcribe the speech."
    """
    if not question.strip():
        raise ConfigError("there is no question", "QUESTION", "ask something about the recording, in quotes")
    if not math.isfinite(temperature):
        raise ConfigError(f"{temperature}: not a number that can be used", "--temperature", "leave it out")
    if not audio.is_file():
        problem = "is a folder" if audio.is_dir() else "no such file"
        raise ConfigError(f"{audio}: {problem}", "AUDIO", "give a sound file")

    from audiollm.families.answering import AnswerError, AnswerRequest
    from audiollm.families.registry import open_model_folder
    from audiollm.generation.speaking.speech_generator import read_recording
    from audiollm.models.audio_llms.inputs import Parts

    recording = read_recording(audio)
    answering = open_model_folder(model).answering_model(codec)
    errors = Console(stderr=True, soft_wrap=True)
    parts: Parts = [recording, question.strip()]
    request = AnswerRequest([("user", parts)], seed, temperature, top_p=_TOP_P, max_tokens=max_tokens)
    try:
        for note in answering.notes_on(request):
            errors.print(f"note: {note}", highlight=False, markup=False)
        answer = answering.answer([request])[0].text
    except AnswerError as error:
        raise ConfigError(
            f"the model cannot be asked: {error}",
            str(audio),
            "give a recording and a question that it takes, or another model",
        ) from error
    if answer:
        typer.echo(answer)
    else:
        errors.print("the model gave no answer", style="yellow")
