"""The step `separate`: the voices of a recording without music and noise, as a file that all later steps read."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from pipelines.annotate.step import Recording
from pipelines.steps.step import Resources, StepConfig, Value

if TYPE_CHECKING:
    import torch

    from pipelines.annotate.voice.separation import Separator


class MdxConfig(StepConfig):
    """Parameters of an MDX-Net model that its file lacks and its author publishes."""

    n_fft: int = Field(ge=256)
    """Samples of a frame: 6144 for UVR-MDX-NET-Inst_HQ_3."""
    stem: Literal["vocals", "rest"]
    """Output of the model: the voices, or the accompaniment (`Inst` models)."""
    compensate: float = Field(1.0, gt=0)
    """Gain at which the accompaniment is subtracted from the mixture."""


class SeparateConfig(StepConfig):
    """Settings of `separate`."""

    model: Path | None = None
    """A separator or enhancer as .onnx: UVR's MDX-Net class, GTCRN's streaming export, or waveform to waveform."""
    mdx: MdxConfig | None = None
    """Parameters of an MDX-Net file that was renamed; null: known by the file's name."""
    sample_rate: int | None = Field(None, ge=8000)
    """Sample rate of an enhancer or a waveform network; null: the file's, or 16 kHz. MDX-Net always has 44.1 kHz."""
    folder: Path | None = None
    """Folder of the separated files."""


class Separate:
    """Writes the voices of a recording, mono, into `folder`; its name follows from content, model and settings.

    It needs nothing of `probe` but that it comes first: what cannot be read is not separated.
    """

    name = "separate"
    level: ClassVar[Literal["recording"]] = "recording"
    needs: tuple[str, ...] = ("probe",)
    version: ClassVar[int] = 1
    resources = Resources()

    def __init__(self, config: SeparateConfig) -> None:
        self._config = config
        self._separator: Separator | None = None
        self._made_by = ""

    def missing(self) -> str | None:
        model = self._config.model
        if model is None:
            return "separate.model: no model: give an .onnx (UVR-MDX-NET-Inst_HQ_3, GTCRN), or leave the step out"
        if not model.is_file():
            return f"separate.model: no file {model}: give the model's .onnx"
        if self._config.folder is None:
            return "separate.folder: no folder for the separated voices: give one"
        if importlib.util.find_spec("onnxruntime") is None:
            return "separate: the package onnxruntime is missing: pip install onnxruntime"
        return None

    def setup(self) -> None:
        """Load the model."""
        from audiollm.files.atomic import file_digest
        from pipelines.annotate.voice.separation import MdxModel, load_separator

        if (missing := self.missing()) is not None or self._config.model is None:
            raise FileNotFoundError(missing)
        mdx = self._config.mdx
        mdx_model = MdxModel(mdx.n_fft, mdx.stem, mdx.compensate) if mdx else None
        self._separator = load_separator(self._config.model, mdx_model, self._config.sample_rate)
        settings = self._config.model_dump_json(exclude={"model", "folder"})
        self._made_by = f"{self.version} {file_digest(self._config.model)} {settings}"

    def process(self, item: Recording) -> Value:
        """`path` of the voices, 16-bit FLAC, and their `sample_rate`. What is there already is not made again."""
        from audiollm.audio.streams import save_stream
        from audiollm.files.atomic import file_digest

        if self._separator is None or self._config.folder is None:
            raise RuntimeError("separate: `setup` comes before `process`")
        text = f"{file_digest(Path(item.path))} {self._made_by}"
        path = self._config.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.flac"
        rate = self._separator.sample_rate
        if not path.is_file():
            save_stream(path, _separate_blocks(self._separator, item), rate)
        return {"path": str(path), "sample_rate": rate}


def _separate_blocks(separator: Separator, item: Recording) -> Iterator[torch.Tensor]:
    import torch

    for samples_N in separator.separate(item.blocks(separator.sample_rate)):
        if len(samples_N):
            yield torch.from_numpy(samples_N)[None]
