"""The step `speakers`: the speaker turns of a recording with overlap marked, and an embedding of each voice.

Shapes: N samples at 16 kHz, K speakers, D embedding dimension.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from pipelines.annotate.pretrained_parts import FOLDER, is_installed, part_path
from pipelines.annotate.step import Recording, RecordingStep
from pipelines.steps.step import StepConfig, Value

if TYPE_CHECKING:
    from pipelines.annotate.voice.diarization import Diarization

SAMPLE_RATE = 16000
ONNX_SUFFIX = ".onnx"
_WITHOUT_DIARIZER = ("threshold", "min_turn_s", "overlap_cost")
"""Settings that a pretrained diarizer does not read."""


class SpeakersConfig(StepConfig):
    """Settings of `speakers`.

    Args:
        diarizer: `pyannote=FOLDER` (the folder of a pipeline of pyannote.audio), or `sortformer=FILE.nemo` (of NeMo):
            it says who speaks when; None: found out by the voices.
        embedder: `auto`, the network that the package resemblyzer bundles; `wespeaker=FILE.onnx`; or
            `transformers=FOLDER` of a speaker verification model (WavLM-SV and other x-vector heads).
        num_speakers: known beforehand; None: found out. A Sortformer does not read it.
        max_speakers: at most so many are found. A Sortformer does not read it.
        threshold: cosine likeness of two mean voices from which they are one speaker; higher finds more speakers. The
            default suits resemblyzer: another embedder wants its own.
        min_turn_s: what is shorter goes to the turn before or after it.
        overlap_cost: higher marks less as overlap, and is more often right (in nats a window of 0.2 s; 0 to 3).
        gpus: share of a GPU for each worker, for the diarizer; 0: the CPU.
    """

    diarizer: Annotated[Path, part_path(pyannote=FOLDER, sortformer=".nemo")] | None = None
    embedder: Annotated[Literal["auto"] | Path, part_path(wespeaker=ONNX_SUFFIX, transformers=FOLDER)] = (
        "auto"
    )
    num_speakers: int | None = Field(default=None, ge=1)
    max_speakers: int | None = Field(default=None, ge=1)
    threshold: float = Field(default=0.85, gt=0, lt=1)
    min_turn_s: float = Field(default=0.3, ge=0)
    overlap_cost: float = Field(default=0.0, ge=0)
    gpus: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _settings_are_read(self) -> SpeakersConfig:
        if self.diarizer is None:
            if self.gpus:
                raise ValueError("gpus: is for a diarizer; voices are embedded on the CPU")
            return self
        unread = set(_WITHOUT_DIARIZER)
        if self.diarizer.suffix == ".nemo":
            unread |= {"num_speakers", "max_speakers"}
        if names := sorted(unread & self.model_fields_set):
            raise ValueError(
                f"{', '.join(names)}: not read by the diarizer {self.diarizer.name}: leave it out"
            )
        return self


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
        if self.config.diarizer is not None:
            from pipelines.annotate.voice.diarizers import diarizer_problem

            if (problem := diarizer_problem(self.config.diarizer)) is not None:
                return f"speakers.diarizer: {problem}"
        return self._missing_embedder()

    def _missing_embedder(self) -> str | None:
        embedder = self.config.embedder
        if isinstance(embedder, Path) and embedder.suffix == ONNX_SUFFIX:
            if not embedder.is_file():
                return f"speakers.embedder: no file {embedder}: give an .onnx of WeSpeaker, or auto"
            if not is_installed("onnxruntime"):
                return "speakers.embedder: the package onnxruntime is not installed: pip install onnxruntime"
            return None
        if isinstance(embedder, Path):
            if not (embedder / "config.json").is_file():
                return (
                    f"speakers.embedder: no model at {embedder}: give a folder of a speaker verification model "
                    "(config.json and safetensors weights, as transformers' from_pretrained reads it), or auto"
                )
            return None
        if importlib.util.find_spec("resemblyzer") is None:
            return (
                "speakers: the package resemblyzer, whose voice embedder `auto` takes, is not installed: "
                "pip install --no-deps resemblyzer, or give speakers.embedder a folder or a file"
            )
        return None

    def setup(self) -> None:
        """Load the embedder, and the diarizer.

        Raises:
            ConfigError: a model that cannot be opened, or not safely.
        """
        from audiollm.onnx_models import package_file
        from pipelines.annotate.voice.diarizers import Diarizer, load_diarizer
        from pipelines.annotate.voice.embedders import Ge2eVoices, Voices, WespeakerVoices, XVectorVoices

        config = self.config
        self._voices: Voices
        if not isinstance(config.embedder, Path):
            self._voices = Ge2eVoices(package_file("resemblyzer", "pretrained.pt"))
        elif config.embedder.suffix == ONNX_SUFFIX:
            self._voices = WespeakerVoices(config.embedder)
        else:
            self._voices = XVectorVoices(config.embedder)
        self._diarizer: Diarizer | None = None
        if config.diarizer is not None:
            device = "cuda" if config.gpus else "cpu"
            self._diarizer = load_diarizer(config.diarizer, config.num_speakers, config.max_speakers, device)

    def process(self, recording: Recording) -> Value:
        """Turns and speakers of the recording; none of either where there is no speech."""
        diarization = self._diarize(recording)
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

    def _diarize(self, recording: Recording) -> Diarization:
        from pipelines.annotate.voice.diarization import COSTS, diarize
        from pipelines.annotate.voice.diarizers import diarize_pretrained

        spans = recording.values["voice_activity"]["spans"]
        blocks = recording.blocks(SAMPLE_RATE)
        if self._diarizer is not None and spans:
            return diarize_pretrained(self._diarizer, self._voices.embed, blocks)
        return diarize(
            self._voices.embed,
            blocks,
            spans,
            self.config.threshold,
            self.config.num_speakers,
            self.config.max_speakers,
            self.config.min_turn_s,
            COSTS._replace(overlap=self.config.overlap_cost),
        )
