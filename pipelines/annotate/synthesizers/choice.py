"""The choice of a synthesizer, as a setting writes it."""

from __future__ import annotations

from pathlib import Path

from pipelines.annotate.synthesizers.synthesizer import Synthesizer

FORMS = "espeak, hibari, kokoro=FOLDER, or command:PROGRAM with {text} and {out}"


def make_synthesizer(choice: str) -> Synthesizer:
    """The synthesizer of a setting; nothing is loaded.

    Raises:
        ValueError: it is none.
    """
    if choice.startswith("command:"):
        from pipelines.annotate.synthesizers.command import CommandSynthesizer

        return CommandSynthesizer(choice.removeprefix("command:"))
    kind, _, where = choice.partition("=")
    if kind == "kokoro" and where:
        from pipelines.annotate.synthesizers.kokoro import KokoroSynthesizer

        return KokoroSynthesizer(Path(where).expanduser())
    if choice == "hibari":
        from pipelines.annotate.synthesizers.hibari import HibariSynthesizer

        return HibariSynthesizer()
    if choice == "espeak":
        from pipelines.annotate.synthesizers.espeak import EspeakSynthesizer

        return EspeakSynthesizer()
    raise ValueError(f"{choice!r} is no synthesizer: give {FORMS}")
