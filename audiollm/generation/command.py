"""The command `generate`: say a text with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from audiollm.config import ConfigError, nearest


def generate(
    model: Annotated[Path, typer.Option(help="A train stage's folder, or a saved model's.")],
    text: Annotated[str, typer.Option(help="What to say.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The sound file to write (.wav, .flac, .ogg).")],
    codec: Annotated[
        Path | None, typer.Option(help="The codec's folder; by default the run's own train_tokenizer.")
    ] = None,
    speaker: Annotated[str | None, typer.Option(help="A speaker name of the training data.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another take.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely codes.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Draw from the most likely codes only.")
    ] = 0.9,
    text_guidance: Annotated[
        float, typer.Option(min=0.0, help="How strongly to follow the text; 1 is none.")
    ] = 3.0,
    speaker_guidance: Annotated[float, typer.Option(min=0.0, help="The same for the speaker.")] = 2.0,
    max_duration_s: Annotated[float, typer.Option(min=0.04, help="The longest it may speak.")] = 10.0,
) -> None:
    """Say a text with a trained model.

    Example: audiollm generate --model runs/quickstart/train --text seven --speaker aria -o seven.wav
    """
    from audiollm.audio import save
    from audiollm.data.sample import Message, TextPart
    from audiollm.data.text import spoken_form
    from audiollm.generation.engine import Prompt
    from audiollm.generation.run import Generator
    from audiollm.generation.sampling import SamplingConfig
    from audiollm.models.pretrained import model_folder

    folder = model_folder(model)
    codec = codec or folder.parent.parent / "train_tokenizer"
    if not codec.is_dir():
        raise ConfigError(
            f"no codec at {codec}", "--codec", "give the folder of the codec it was trained with"
        )
    generator = Generator.from_pretrained(folder, codec)
    if speaker is not None and generator.speakers and speaker not in generator.speakers:
        raise ConfigError(
            f"{speaker}: not a speaker of this model", "--speaker", nearest(speaker, generator.speakers)
        )
    system = "Generate audio following instruction." + (f"\n\nSpeaker: {speaker}" if speaker else "")
    messages = [
        Message(role="system", content=[TextPart(text=system)]),
        Message(role="user", content=[TextPart(text=spoken_form(text))]),
    ]
    sampling = SamplingConfig(
        temperature=temperature,
        top_p=top_p,
        text_guidance=text_guidance,
        speaker_guidance=speaker_guidance if speaker else 1.0,
    )
    samples_1N, stopped = generator.speak([Prompt(messages, seed)], sampling, max_duration_s)[0]
    save(out, samples_1N, generator.codec.sample_rate)
    seconds = samples_1N.shape[1] / generator.codec.sample_rate
    note = "" if stopped else f" (cut at --max-duration-s {max_duration_s:g})"
    Console().print(f"{out}: {seconds:.2f} s{note}", highlight=False)
