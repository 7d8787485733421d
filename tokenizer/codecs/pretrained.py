"""Folders in Hugging Face layout: what a codec needs to load one safely, and how many codebooks it uses.

Shapes: K codebooks, V codebook size, D latent dimension, T frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json
from audiollm.files.json_files import read_json_file
from audiollm.files.transformers_folders import open_model
from audiollm.models.pretrained import model_folder

CodecT = TypeVar("CodecT", bound="TransformersCodec")

NUM_CODEBOOKS_KEY = "audiollm_num_codebooks"
"""Our own key in config.json: a folder made for 8 of 32 codebooks loads with 8 everywhere."""


class TransformersCodec(nn.Module):
    """A codec of transformers with its first `num_codebooks` codebooks; subclasses encode and decode.

    Args:
        model: the codec, of the class `model_class`.
        num_codebooks: the number to use; None: what the folder was saved with, else all.
        available: the number that the model has.
    """

    model_class: ClassVar[Any]
    model_type: ClassVar[str]
    """`model_type` in the folder's `config.json`."""

    def __init__(self, model: Any, num_codebooks: int | None, available: int) -> None:
        super().__init__()
        self.model: Any = model.eval()
        self.num_codebooks = choose_num_codebooks(num_codebooks, model.config, available)

    @property
    def codebook_size(self) -> int:
        return int(self.model.config.codebook_size)

    @property
    def sample_rate(self) -> int:
        return int(self.model.config.sampling_rate)

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`, which transformers loads too."""
        self.model.save_pretrained(folder)
        record_num_codebooks(folder, self.num_codebooks)

    @classmethod
    def from_pretrained(cls: type[CodecT], folder: Path | str, num_codebooks: int | None = None) -> CodecT:
        """Load a local Hugging Face folder of this `model_type`; use its first `num_codebooks` codebooks.

        Raises:
            ConfigError: nothing there, another kind of model, or missing weights.
            ValueError: more codebooks than there are.
        """
        model = load_transformers(cls.model_class, open_folder(folder, cls.model_type))
        return cls(model, num_codebooks)  # type: ignore[call-arg]


def open_folder(folder: Path | str, model_type: str) -> Path:
    """The local folder that holds a model of this type in safetensors.

    Raises:
        ConfigError: nothing there, another kind of model, or weights that are not safetensors.
    """
    folder = model_folder(Path(folder))
    found_type = read_json_file(folder / "config.json", dict).get("model_type")
    if found_type != model_type:
        where = str(folder / "config.json")
        raise ConfigError(
            f"model_type: {found_type!r}, not {model_type!r}", where, "give the folder of another model"
        )
    if not (folder / "model.safetensors").exists():
        raise ConfigError(
            "no weights here: model.safetensors is missing",
            str(folder),
            "save the model with transformers' save_pretrained; pickled weights are not loaded",
        )
    return folder


def load_transformers(model_class: Any, folder: Path) -> Any:
    """`model_class.from_pretrained(folder)` in float32, from the disk only.

    Raises:
        ConfigError: some weights are missing (transformers would leave them random).
    """
    return open_model(model_class, folder)


def choose_num_codebooks(requested: int | None, config: PreTrainedConfig, available: int) -> int:
    """The number of codebooks to use: what is asked, else what the folder was saved with, else all.

    Raises:
        ValueError: fewer than one, or more than there are.
    """
    num_codebooks = requested if requested is not None else int(getattr(config, NUM_CODEBOOKS_KEY, available))
    if not 1 <= num_codebooks <= available:
        raise ValueError(f"num_codebooks must be 1..{available} for this codec, not {num_codebooks}")
    return num_codebooks


def record_num_codebooks(folder: Path, num_codebooks: int) -> None:
    """Add the choice to a saved model's config.json, for `choose_num_codebooks` to find."""
    path = folder / "config.json"
    write_json(path, {**read_json_file(path, dict), NUM_CODEBOOKS_KEY: num_codebooks})


def gaussian_codebooks(latent_TD: Tensor, num_codebooks: int, codebook_size: int) -> Tensor:
    """Random code vectors `[K, V, D]` with the latents' mean and spread, smaller from level to level.

    A codec with random weights needs them: code vectors of another scale give one code for every frame.
    """
    mean_D, spread_D = latent_TD.mean(0), latent_TD.std(0)
    vectors_KVD = torch.randn(num_codebooks, codebook_size, latent_TD.shape[1], device=latent_TD.device)
    shrink_K = 0.8 ** torch.arange(num_codebooks, device=latent_TD.device)
    vectors_KVD = vectors_KVD * spread_D * shrink_K[:, None, None]
    vectors_KVD[0] += mean_D
    return vectors_KVD
