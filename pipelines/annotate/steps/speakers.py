"""The step `speakers`: the speaker turns of a recording with overlap marked, and an embedding of each voice.

Shapes: N samples at 16 kHz, K speakers, D embedding dimension.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from audiollm.recipe.stages import FROM_HUB
from pipelines.annotate.step import Recording, RecordingStep
from pipelines.steps.step import StepConfig, Value

SAMPLE_RATE = 16000


class SpeakersConfig(StepConfig):
    """Settings of `speakers`.

    Args:
        embedder: `auto`, the network that the package resemblyzer bundles; or the folder of a speaker verification
            model of transformers (WavLM-SV and other x-vector heads).
        num_speakers: known beforehand; None: found out.
        max_speakers: at most so many are found.
        threshold: cosine likeness of two mean voices from which they are one speaker; higher finds more speakers. The
            default suits resemblyzer: another embedder wants its own.
        min_turn_s: what is shorter goes to the turn before or after it.
        overlap_cost: higher marks less as overlap, and is more often right (in nats a window of 0.2 s; 0 to 3).
    """

    embedder: Annotated[Literal["auto"] | Path, FROM_HUB] = "auto"
    num_speakers: int | None = Field(default=None, ge=1)
    max_speakers: int | None = Field(default=None, ge=1)
    threshold: float = Field(default=0.85, gt=0, lt=1)
    min_turn_s: float = Field(default=0.3, ge=0)
    overlap_cost: float = Field(default=0.0, ge=0)


class Speakers(RecordingStep[SpeakersConfig]):
    """Speaker turns, voices and overlap of one recording.

    Its value: `{"turns": [{start_s, end_s, speaker, overlap}], "speakers": {name: {seconds, embedding}}}`. Speakers are
    named S0, S1, … as they first appear. Where two speak at once, each has a turn of the same times with `overlap` set;
    otherwise no two turns share a moment. `seconds` counts these as well; `embedding` has length 1.
    """

    name = "speakers"
    settings = SpeakersConfig
    needs = ("voice_activity",)

    def missing(self) -> str | None:
        """Name a missing package or file and its remedy; None: nothing is missing."""
        if isinstance(self.config.embedder, Path):
            folder = self.config.embedder
            if not (folder / "config.json").is_file():
                return (
                    f"speakers.embedder: no model at {folder}: give a folder of a speaker verification model "
                    "(config.json and safetensors weights, as transformers' from_pretrained reads it), or auto"
                )
            return None
        if importlib.util.find_spec("resemblyzer") is None:
            return (
                "speakers: the package resemblyzer, whose voice embedder `auto` takes, is not installed: "
                "pip install --no-deps resemblyzer, or give speakers.embedder a folder"
            )
        return None

    def setup(self) -> None:
        """Load the embedder."""
        from audiollm.onnx_models import package_file
        from pipelines.annotate.voice.embedders import Ge2eVoices, Voices, XVectorVoices

        self._voices: Voices
        if isinstance(self.config.embedder, Path):
            self._voices = XVectorVoices(self.config.embedder)
        else:
            self._voices = Ge2eVoices(package_file("resemblyzer", "pretrained.pt"))

    def process(self, recording: Recording) -> Value:
        """Turns and speakers of the recording; none of either where there is no speech."""
        from pipelines.annotate.voice.diarization import COSTS, diarize

        diarization = diarize(
            self._voices.embed,
            recording.blocks(SAMPLE_RATE),
            recording.values["voice_activity"]["spans"],
            self.config.threshold,
            self.config.num_speakers,
            self.config.max_speakers,
            self.config.min_turn_s,
            COSTS._replace(overlap=self.config.overlap_cost),
        )
        turns = [
            {
                "start_s": round(turn.start_s, 3),
                "end_s": round(turn.end_s, 3),
                "speaker": f"S{turn.speaker}",
                "overlap": turn.overlap,
            }
            for turn in diarization.turns
        ]
        speakers = {
            f"S{index}": {
                "seconds": round(
                    sum(turn.end_s - turn.start_s for turn in diarization.turns if turn.speaker == index), 3
                ),
                "embedding": [round(float(value), 4) for value in voice_D],
            }
            for index, voice_D in enumerate(diarization.voices_KD)
        }
        return {"turns": turns, "speakers": speakers}
