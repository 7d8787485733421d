"""The step `agreement`: how far sound, pictures and text of a clip belong together, by models of local folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from audiollm.recipe.stages import ModelPath
from pipelines.audiocot.clip import ClipStep, SoundClip
from pipelines.steps.step import StepConfig, Value


class AgreementConfig(StepConfig):
    """Settings of `agreement`."""

    sound_text: ModelPath | None = None
    """Folder of a CLAP model, for the agreement of sound and text."""
    picture_text: ModelPath | None = None
    """Folder of a CLIP model, for the agreement of pictures and text."""
    frame_rate: float = Field(1.0, gt=0, le=30)


class Agreement(ClipStep[AgreementConfig]):
    """Cosines of a clip's text with its sound and with its pictures; absent where there is no text."""

    name = "agreement"
    settings = AgreementConfig
    needs: tuple[str, ...] = ("probe",)

    def __init__(self, config: AgreementConfig) -> None:
        super().__init__(config)
        self._sound: Any = None
        self._picture: Any = None

    def missing(self) -> str | None:
        for key in ("sound_text", "picture_text"):
            folder = getattr(self.config, key)
            if folder is not None and not (folder / "config.json").is_file():
                return f"agreement.{key}: no model in {folder} (config.json): give a model's folder"
        return None

    def setup(self) -> None:
        """Load the models.

        Raises:
            ConfigError: one of them cannot be loaded.
        """
        if self.config.sound_text is not None:
            from audiollm.evaluate.sound.sound_judges import ClapSpace

            self._sound = ClapSpace(self.config.sound_text)
        if self.config.picture_text is not None:
            self._picture = _ClipSpace(self.config.picture_text)

    def process(self, item: SoundClip) -> Value:
        """`{sound_text, picture_text}`, those that can be had."""
        text, agreements = item.facts.text, {}
        if text and self._sound is not None:
            sound_D, text_D = self._sound.embed(item.waveform()), self._sound.embed_text(text)
            agreements["sound_text"] = _round_cosine(sound_D, text_D)
        if text and self._picture is not None and item.video is not None:
            pictures = [picture for _, picture in item.pictures(self.config.frame_rate, None)]
            agreements["picture_text"] = self._picture.agreement(pictures, text)
        return agreements


class _ClipSpace:
    """A `CLIPModel` of transformers in a local folder.

    Raises:
        ConfigError: the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        from audiollm.files.json_files import OFFLINE
        from audiollm.files.transformers_folders import open_model, opening

        remedy = "give the folder of a CLIPModel with tokenizer and image processor, in safetensors"
        with opening(folder, "CLIP model", remedy):
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), **OFFLINE)
            self._processor = AutoImageProcessor.from_pretrained(str(folder), **OFFLINE)
            self._model = open_model(CLIPModel, folder)

    def agreement(self, pictures: list[Any], text: str) -> float:
        """The mean cosine of the pictures with the text."""
        import torch

        from audiollm.files.transformers_folders import fit_inputs

        inputs = self._tokenizer(text, truncation=True, return_tensors="pt")
        pixels = self._processor(images=pictures, return_tensors="pt")
        with torch.inference_mode():
            out = self._model(**fit_inputs(self._model, {**inputs, **pixels}))
        return float(round(float((out.image_embeds @ out.text_embeds.T).mean()), 4))


def _round_cosine(left_D: Any, right_D: Any) -> float:
    norm = float(np.linalg.norm(left_D) * np.linalg.norm(right_D))
    return round(float(np.dot(left_D, right_D)) / max(norm, 1e-12), 4)
