"""Options that several `evaluate` commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    typer.Option(help="The model that speaks: a trained model's folder, or package.module:factory."),
]
Listener = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model that listens: a folder (ours, or an audio LLM of Hugging Face), or module:factory.",
    ),
]
CodecFolder = Annotated[
    Path | None, typer.Option("--codec", help="The codec's folder; by default the run's own train_tokenizer.")
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
    typer.Option(
        "--recognizer",
        help="Judge of words, as annotate takes it: pocketsphinx, transformers=FOLDER, faster_whisper=FOLDER, the "
        "folder alone, or module:factory.",
    ),
]
SpeakerJudgeOption = Annotated[
    str | None,
    typer.Option(
        "--speaker-judge",
        help="Judge of voices: the folder of a Hugging Face x-vector model or of a trained classifier "
        "(RUN/evaluate/judges/speaker), or module:factory.",
    ),
]
