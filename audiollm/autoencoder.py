"""The interface of a continuous autoencoder: sound to latents and back, whole or in pieces; loading by entry point.

Shapes: C audio channels, N samples, D latent dimension, T latent frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from audiollm.errors import ConfigError, suggestion
from audiollm.files.json_files import config_folder, read_json_file
from audiollm.recipe.plug_ins import import_named, is_import_path

REMEDY = "give the folder of a trained autoencoder, or `package.module:name` of a function that returns one"


class LatentDistribution(Protocol):
    """The distribution of a sound's latent: independent normal distributions, one per number."""

    @property
    def mean(self) -> Tensor: ...
    @property
    def log_variance(self) -> Tensor: ...


@runtime_checkable
class Autoencoder(Protocol):
    """Waveform to continuous latents and back. Waveforms are float32 `[channels, N]`, latents float32 `[D, T]`."""

    @property
    def sample_rate(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def hop_samples(self) -> int:
        """Samples per latent frame."""

    @property
    def latent_dim(self) -> int: ...
    @property
    def digest(self) -> str:
        """Digest of what decides the latents: the weights and the settings."""

    def encode_distribution(self, samples_CN: Tensor) -> LatentDistribution:
        """The distribution of the latents, `[D, ceil(N / hop_samples)]`."""

    def encode_stream(self, pieces_CN: Iterable[Tensor]) -> Iterator[LatentDistribution]:
        """Encode a waveform given in pieces, at constant memory; the pieces together equal `encode_distribution`."""

    def decode(self, latent_DT: Tensor, num_samples: int | None = None) -> Tensor:
        """Latents to samples `[channels, T * hop_samples]`, cut to `num_samples` where given.

        Peaks above 1 are not clipped: whoever writes them turns them down.
        """

    def decode_stream(self, pieces_DT: Iterable[Tensor]) -> Iterator[Tensor]:
        """Decode latents given in pieces, at constant memory; the pieces together equal `decode`."""

    def normalize(self, latent_DT: Tensor) -> Tensor:
        """Latents with mean 0 and variance 1 in every channel, as a flow-matching model is trained on them."""

    def denormalize(self, latent_DT: Tensor) -> Tensor:
        """The inverse of `normalize`."""


def latent_rate(autoencoder: Autoencoder) -> float:
    """Latent frames per second."""
    return autoencoder.sample_rate / autoencoder.hop_samples


def load_autoencoder(source: Path | str) -> Autoencoder:
    """An autoencoder of ours by its folder, or a published one by import path.

    Args:
        source: a folder whose config.json has a `model_type` of the entry-point group `audiollm.autoencoders` (or a
            stage's folder with such a `model`), or `package.module:name` of a function without arguments.

    Raises:
        ConfigError: no config there or a damaged one, no installed package knows its `model_type`, or the function
            cannot be imported or does not return an autoencoder.
    """
    if is_import_path(str(source)):
        instance = import_named(str(source), REMEDY)()
        if not isinstance(instance, Autoencoder):
            lacking = [name for name in _MEMBERS if not hasattr(instance, name)]
            raise ConfigError(f"returns no autoencoder: {', '.join(lacking)} missing", str(source), REMEDY)
        return instance
    path = config_folder(Path(source), "autoencoder", REMEDY) / "config.json"
    kind = str(read_json_file(path, dict).get("model_type"))
    entries = {entry.name: entry for entry in entry_points(group="audiollm.autoencoders")}
    if kind not in entries:
        raise ConfigError(f"model_type: no such autoencoder: {kind!r}", str(path), suggestion(kind, entries))
    autoencoder: Autoencoder = entries[kind].load().from_pretrained(path.parent)
    return autoencoder


def autoencoder_of_run(run: Path) -> Path:
    """The folder of the only stage of a run that made an autoencoder.

    Raises:
        ConfigError: none did, or several; or a config.json is damaged.
    """
    model_types = {entry.name for entry in entry_points(group="audiollm.autoencoders")}
    configs = sorted(run.glob("*/model/config.json"))
    folders = [
        path.parents[1] for path in configs if read_json_file(path, dict).get("model_type") in model_types
    ]
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders) or "none"
        raise ConfigError(
            f"one autoencoder is looked for in {run}, and there are: {names}",
            "command line",
            "give --autoencoder: that of `encode_latents`",
        )
    return folders[0]


def check_waveform(samples_CN: Tensor, channels: int, at_least: int = 0) -> None:
    """Refuse what an autoencoder cannot encode.

    Raises:
        ValueError: not `[channels, samples]`, fewer samples than `at_least`, or samples that are not finite.
    """
    if samples_CN.ndim != 2 or samples_CN.shape[0] != channels or samples_CN.shape[1] < at_least:
        samples = f"samples >= {at_least}" if at_least else "samples"
        raise ValueError(
            f"encode takes a waveform [{channels}, {samples}], not {list(samples_CN.shape)}: "
            f"audiollm.audio.set_channels(samples_CN, {channels}) makes one"
        )
    if not bool(torch.isfinite(samples_CN).all()):
        raise ValueError("encode got samples that are not finite")


def check_latent(latent_DT: Tensor, latent_dim: int) -> None:
    """Refuse what an autoencoder cannot decode.

    Raises:
        ValueError: not `[latent_dim, frames]`, or latents that are not finite.
    """
    if latent_DT.ndim != 2 or latent_DT.shape[0] != latent_dim:
        raise ValueError(f"decode takes latents [{latent_dim}, frames], not {list(latent_DT.shape)}")
    if not bool(torch.isfinite(latent_DT).all()):
        raise ValueError("decode got latents that are not finite")


def module_digest(module: nn.Module, settings: str = "") -> str:
    """SHA-256 of the names, shapes and values of a module's parameters and persistent buffers, and of its settings."""
    digest = hashlib.sha256(settings.encode())
    for name, tensor in module.state_dict().items():
        plain = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        if plain.numel():
            digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_MEMBERS = (
    "sample_rate", "channels", "hop_samples", "latent_dim", "digest", "encode_distribution", "encode_stream",
    "decode", "decode_stream", "normalize", "denormalize",
)  # fmt: skip
