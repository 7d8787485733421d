"""Options that several `evaluate` commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from audiollm.hub_models.options import folder_option, source_option

Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder for results.json, rows.jsonl, report.html and the sound.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Score at most this many, spread over the list.")]
Examples = Annotated[
    int, typer.Option(min=0, help="Cases with sound in the report; the suites show the worst first.")
]
Language = Annotated[
    str, typer.Option(help="Language of the texts: en, zh, ...; zh is scored by characters.")
]
Form = Annotated[str, typer.Option(help="How texts are compared: seed-tts, whisper or spoken.")]
Spelling = Annotated[
    Path | None, typer.Option(help="British to American spellings: a Whisper checkpoint's normalizer.json.")
]

Model = Annotated[
    str | None,
    source_option("The model that speaks: a trained model's folder, or package.module:factory."),
]
Listener = Annotated[
    str | None,
    source_option(
        "The model that listens: a folder (ours, or an audio LLM of Hugging Face), or module:factory.",
        name="--model",
    ),
]
CodecFolder = Annotated[
    Path | None,
    folder_option("The codec's folder; by default the run's own train_tokenizer.", name="--codec"),
]
Seed = Annotated[int, typer.Option(help="Seed of what the model says.")]
MaxDuration = Annotated[
    float | None,
    typer.Option(min=0.04, help="Longest speech for one text, in seconds; by default it follows the text."),
]

Endpoint = Annotated[
    str | None,
    typer.Option(help="In place of a folder: an OpenAI-compatible address, http://localhost:8000/v1."),
]
EndpointModel = Annotated[str | None, typer.Option(help="The model's name at the endpoint.")]
KeyVariable = Annotated[str, typer.Option(help="The environment variable that holds the endpoint's key.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest reply, in tokens.")]

RecognizerOption = Annotated[
    str | None,
    source_option(
        "Judge of words, as annotate takes it: pocketsphinx, transformers=FOLDER, faster_whisper=FOLDER, the "
        "folder alone, or module:factory; model=FOLDER: a model that was trained to transcribe.",
        name="--recognizer",
    ),
]
SpeakerJudgeOption = Annotated[
    str | None,
    source_option(
        "Judge of voices: the folder of a Hugging Face x-vector model or of a trained classifier "
        "(RUN/evaluate/judges/speaker), or module:factory.",
        name="--speaker-judge",
    ),
]
