"""Pretrained encoders from a local folder or by import path: CLIP-class for captions and frames, T5-class for CoT.

Transformers' classes read local safetensors alone. Pads are given to no one: an encoder gets the attention mask, and
the rows of pads are left out, but for the released ThinkSound, which was trained with them.

Shapes: F pictures, R rows, C width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.autoencoder import module_digest
from audiollm.errors import ConfigError
from audiollm.files.json_files import OFFLINE, no_config, read_json_file
from audiollm.files.transformers_folders import open_model, opening
from audiollm.recipe.plug_ins import import_named, is_import_path

REMEDY = "give the local folder of a transformers model, or `package.module:name` of a function that returns an encoder"
Pictures = Sequence[NDArray[np.uint8]]


class TextFeatures(NamedTuple):
    """Features of a text."""

    values_RC: Tensor
    pooled_C: Tensor | None


@runtime_checkable
class TextEncoder(Protocol):
    """An encoder of captions or of CoT."""

    @property
    def digest(self) -> str:
        """Digest of weights and settings."""

    @property
    def width(self) -> int: ...
    @property
    def pooled_width(self) -> int:
        """Width of the summary; 0: there is none."""

    def encode_text(self, text: str) -> TextFeatures: ...


@runtime_checkable
class FrameEncoder(Protocol):
    """An encoder of pictures, of a clip as a whole."""

    @property
    def digest(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def picture_side(self) -> int:
        """Side of the square pictures that it takes, in pixels."""

    @property
    def frame_rate(self) -> float:
        """Pictures per second that it takes."""

    def encode_pictures(self, pictures: Pictures, times_s: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Features `[R, C]` and their times `[R]` in seconds, strictly rising.

        Where windows overlap (Synchformer), the released structure takes the rows in the order of the windows, as if
        evenly spaced over the clip; `MMDiT` is better served by rows in order of time.
        """


class ClipText:
    """The text half of a CLIP-class model.

    Args:
        pads: pads have rows, and there is no summary: the released ThinkSound takes the mean of all rows in its place.
    """

    def __init__(self, folder: Path, pads: bool = False) -> None:
        model_class, tokenizer_class = _transformers("CLIPTextModelWithProjection", "AutoTokenizer")
        self._model = _load_complete_model(model_class, folder, "text_config")
        self._tokenizer = tokenizer_class.from_pretrained(str(folder), **OFFLINE)
        self._pads = pads
        config = self._model.config
        self.width, self.pooled_width = config.hidden_size, 0 if pads else config.projection_dim
        self._longest = config.max_position_embeddings
        self.digest = module_digest(self._model, f"clip text, pads {pads}")

    @torch.no_grad()
    def encode_text(self, text: str) -> TextFeatures:
        """States of the tokens, and the projected summary where there are no pads."""
        padding = {"padding": "max_length"} if self._pads else {}
        tokens = self._tokenizer(
            text, return_tensors="pt", truncation=True, max_length=self._longest, **padding
        )
        out = self._model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        pooled_C = None if self._pads else out.text_embeds[0].float().clone()
        return TextFeatures(out.last_hidden_state[0].float().clone(), pooled_C)


class T5Text:
    """The encoder half of a T5-class model."""

    def __init__(self, folder: Path, pads: bool = False, longest: int = 512) -> None:
        model_class, tokenizer_class = _transformers("T5EncoderModel", "AutoTokenizer")
        self._model = _load_complete_model(model_class, folder)
        self._tokenizer = tokenizer_class.from_pretrained(str(folder), **OFFLINE)
        self._pads, self._longest = pads, 77 if pads else longest
        self.width, self.pooled_width = self._model.config.d_model, 0
        self.digest = module_digest(self._model, f"t5 text, pads {pads}, {self._longest}")

    @torch.no_grad()
    def encode_text(self, text: str) -> TextFeatures:
        """States of the tokens."""
        padding = {"padding": "max_length"} if self._pads else {}
        tokens = self._tokenizer(
            text, return_tensors="pt", truncation=True, max_length=self._longest, **padding
        )
        out = self._model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return TextFeatures(out.last_hidden_state[0].float().clone(), None)


class ClipFrames:
    """The picture half of a CLIP-class model: one projected summary for each picture."""

    def __init__(self, folder: Path, frame_rate: float = 8.0) -> None:
        (model_class,) = _transformers("CLIPVisionModelWithProjection")
        self._model = _load_complete_model(model_class, folder, "vision_config")
        config = self._model.config
        self.width, self.picture_side, self.frame_rate = config.projection_dim, config.image_size, frame_rate
        mean, deviation = _normalization(folder)
        self._mean, self._deviation = (
            torch.tensor(channel_values)[:, None, None] for channel_values in (mean, deviation)
        )
        self.digest = module_digest(self._model, f"clip frames, {mean}, {deviation}")

    @torch.no_grad()
    def encode_pictures(self, pictures: Pictures, times_s: Sequence[float]) -> tuple[Tensor, Tensor]:
        """A row for each picture."""
        rows = []
        for picture_HWC in pictures:
            picture = torch.from_numpy(np.array(picture_HWC)).permute(2, 0, 1).float() / 255
            normalized = (picture - self._mean) / self._deviation
            rows.append(self._model(pixel_values=normalized[None]).image_embeds[0].float())
        return torch.stack(rows), torch.tensor(times_s)


def load_text_encoder(source: Path | str, pads: bool = False) -> TextEncoder:
    """A CLIP-class or T5-class text encoder from a folder, or one by import path.

    Raises:
        ConfigError: nothing there, another kind of model, pickled weights, or no encoder.
    """
    if is_import_path(str(source)):
        encoder = import_named(str(source), REMEDY)()
        if not isinstance(encoder, TextEncoder):
            raise ConfigError(
                "returns no encoder of texts (digest, width, pooled_width, encode_text)", str(source), REMEDY
            )
        return encoder
    kind = _model_type(Path(source))
    if kind in ("clip", "clip_text_model", "metaclip_2"):
        return ClipText(Path(source), pads)
    if kind in ("t5", "mt5", "umt5"):
        return T5Text(Path(source), pads)
    raise ConfigError(f"model_type {kind!r} is no CLIP-class or T5-class text encoder", str(source), REMEDY)


def load_frame_encoder(source: Path | str, frame_rate: float) -> FrameEncoder:
    """A CLIP-class encoder of pictures from a folder, or any encoder of pictures by import path.

    Raises:
        ConfigError: as `load_text_encoder`.
    """
    if is_import_path(str(source)):
        encoder = import_named(str(source), REMEDY)()
        if not isinstance(encoder, FrameEncoder):
            lacking = "digest, width, picture_side, frame_rate, encode_pictures"
            raise ConfigError(f"returns no encoder of pictures ({lacking})", str(source), REMEDY)
        return encoder
    kind = _model_type(Path(source))
    if kind not in ("clip", "clip_vision_model", "metaclip_2"):
        raise ConfigError(f"model_type {kind!r} is no CLIP-class encoder of pictures", str(source), REMEDY)
    return ClipFrames(Path(source), frame_rate)


# Private


def _transformers(*names: str) -> list[Any]:
    import transformers

    return [getattr(transformers, name) for name in names]


def _load_complete_model(model_class: Any, folder: Path, half: str = "") -> Any:
    """A model of transformers with all of its weights.

    Args:
        half: the name of its settings in those of a whole CLIP, whose width of projections the half shares.

    Raises:
        ConfigError: it cannot be loaded, or weights are missing: transformers would draw them at random.
    """
    (auto_config,) = _transformers("AutoConfig")
    with opening(folder, "encoder", REMEDY):
        config = auto_config.from_pretrained(str(folder), **OFFLINE)
        if half and hasattr(config, half):
            width, config = config.projection_dim, getattr(config, half)
            config.projection_dim = width
        return open_model(model_class, folder, config=config).requires_grad_(False)


def _model_type(folder: Path) -> str:
    if not (folder / "config.json").exists():
        raise no_config(folder, "encoder", REMEDY)
    data: Mapping[str, Any] = read_json_file(folder / "config.json", dict)
    return str(data.get("model_type"))


def _normalization(folder: Path) -> tuple[list[float], list[float]]:
    """Mean and deviation of the pictures; CLIP's own where the folder does not tell."""
    path = folder / "preprocessor_config.json"
    data = read_json_file(path, dict) if path.exists() else {}
    mean = data.get("image_mean", [0.48145466, 0.4578275, 0.40821073])
    deviation = data.get("image_std", [0.26862954, 0.26130258, 0.27577711])
    return [float(value) for value in mean], [float(value) for value in deviation]
