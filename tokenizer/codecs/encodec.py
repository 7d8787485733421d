"""EnCodec through the `encodec` package, behind the `Codec` protocol; folders in Hugging Face layout.

Shapes: C channels, N samples, K codebooks, T frames, V codebook size, D latent dimension.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from encodec.model import EncodecModel
from encodec.modules import SEANetDecoder, SEANetEncoder
from encodec.quantization import ResidualVectorQuantizer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import EncodecConfig

from audiollm.errors import ConfigError
from audiollm.files.atomic import atomic_path, write_json
from audiollm.files.json_files import OFFLINE
from audiollm.files.tensors import load_tensors
from tokenizer.checks import check_codes, check_mono_samples
from tokenizer.codecs.pretrained import (
    choose_num_codebooks,
    gaussian_codebooks,
    open_folder,
    record_num_codebooks,
)

WEIGHT_NORM_NAMES = {
    "weight_g": "parametrizations.weight.original0",
    "weight_v": "parametrizations.weight.original1",
}
"""The two halves of a normalised weight: in the `encodec` package, and in transformers."""


class EncodecCodec(nn.Module):
    """Waveform to codes and back with `encodec.model.EncodecModel`; a `Codec`.

    Mono models without volume normalisation only (the 24 kHz one and its re-strided kin): the 48 kHz stereo
    model needs a scale beside its codes. A clip runs in one piece: memory grows with its length.

    A codec made by the constructor waits for its weights or for training, whose first batch sets the code
    vectors by k-means; `from_config` draws them.
    """

    def __init__(self, config: EncodecConfig, num_codebooks: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.num_codebooks = choose_num_codebooks(num_codebooks, config, config.num_quantizers)
        self.model = build_model(config).eval()

    @property
    def frame_rate(self) -> float:
        return self.sample_rate / self.hop_samples

    @property
    def codebook_size(self) -> int:
        return int(self.config.codebook_size)

    @property
    def sample_rate(self) -> int:
        return int(self.config.sampling_rate)

    @property
    def hop_samples(self) -> int:
        return int(self.config.hop_length)

    @property
    def codebook_vectors_KVD(self) -> Tensor:
        return torch.stack([book.embed for book in self._codebooks()[: self.num_codebooks]]).detach()

    @torch.no_grad()
    def encode(self, samples_CN: Tensor) -> Tensor:
        """Mono waveform `[1, N]` at `sample_rate` to codes `[K, ceil(N / hop)]`, int64.

        Raises:
            ValueError: not mono, empty, or not finite.
        """
        check_mono_samples(samples_CN)
        latent_BDT = self.model.encoder(samples_CN[None])
        codes_KBT: Tensor = self.model.quantizer.vq.encode(latent_BDT, n_q=self.num_codebooks)
        return codes_KBT[:, 0]

    @torch.no_grad()
    def decode(self, codes_KT: Tensor) -> Tensor:
        """Codes `[K', T]` of the first K' codebooks to `[1, T * hop]`; cut it to the sample count you need.

        Raises:
            ValueError: no frame, more codebooks than there are, or codes out of range.
        """
        check_codes(codes_KT, self.num_codebooks, self.codebook_size)
        samples_CN: Tensor = self.model.decode([(codes_KT[None], None)])[0]
        return samples_CN.clamp(-1, 1)

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`, which `transformers.EncodecModel` loads too."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {transformers_key(key): value for key, value in self.model.state_dict().items()}
        with atomic_path(folder / "model.safetensors") as temporary:
            save_file(
                {key: value.contiguous() for key, value in weights.items()}, temporary, {"format": "pt"}
            )
        write_json(folder / "config.json", {**self.config.to_dict(), "architectures": ["EncodecModel"]})
        record_num_codebooks(folder, self.num_codebooks)

    @classmethod
    def from_pretrained(cls, path: Path | str, num_codebooks: int | None = None) -> EncodecCodec:
        """Load a local folder (`model_type` encodec), or the `encodec` package's own `encodec_24khz-*.th`.

        Args:
            path: what `save_pretrained` or transformers wrote, or the `.th` file: of that, only tensors are
                unpickled (`weights_only`).
            num_codebooks: use only the first so many.

        Raises:
            ConfigError: nothing there, another kind of model, or missing weights.
            ValueError: more codebooks than there are, or a model that is not mono.
        """
        if Path(path).is_file():
            config, weights, where = EncodecConfig(), _load_legacy(Path(path)), str(path)
        else:
            folder = open_folder(path, "encodec")
            config = EncodecConfig.from_pretrained(folder, **OFFLINE)
            weights, where = load_tensors(folder / "model.safetensors"), str(folder / "model.safetensors")
        codec = cls(config, num_codebooks)
        codec.model.load_state_dict(_package_weights(weights, codec.model.state_dict(), where))
        return codec

    @classmethod
    def from_config(cls, config: EncodecConfig, num_codebooks: int | None = None) -> EncodecCodec:
        """Random weights in the shape that `config` describes, code vectors included."""
        codec = cls(config, num_codebooks)
        codec._draw_codebooks()
        return codec

    @classmethod
    def random(
        cls,
        ratios: Sequence[int] = (8, 5, 4, 2),
        bandwidth_kbps: float = 24.0,
        sample_rate: int = 24_000,
        num_filters: int = 32,
    ) -> EncodecCodec:
        """Random weights in the published shape, re-strided: the hop is the product of `ratios` samples.

        Args:
            ratios: strides in the decoder's order.
            bandwidth_kbps: of all codebooks of 1024 together; at 25 frames/s, 2.0 makes 8 codebooks.
            sample_rate: in Hz.
            num_filters: channels of the first convolution; the others follow.
        """
        return cls.from_config(
            EncodecConfig(
                upsampling_ratios=tuple(ratios),
                target_bandwidths=(float(bandwidth_kbps),),
                sampling_rate=sample_rate,
                num_filters=num_filters,
            )
        )

    @torch.no_grad()
    def _draw_codebooks(self) -> None:
        latent_BDT = self.model.encoder(0.1 * torch.randn(1, 1, 64 * self.hop_samples))
        books = self._codebooks()
        drawn_KVD = gaussian_codebooks(latent_BDT[0].T, len(books), self.codebook_size)
        for book, vectors_VD in zip(books, drawn_KVD, strict=True):
            book.embed.copy_(vectors_VD)
            book.embed_avg.copy_(vectors_VD)
            book.cluster_size.fill_(1.0)
            book.inited.fill_(1.0)

    def _codebooks(self) -> list[Any]:
        return [layer._codebook for layer in self.model.quantizer.vq.layers]


def build_model(config: EncodecConfig) -> EncodecModel:
    """The `encodec` package's model in the shape of a Hugging Face config, with fresh weights.

    Raises:
        ValueError: a shape that the package lacks, or that the `Codec` protocol cannot carry.
    """
    if config.audio_channels != 1 or config.normalize or config.chunk_length_s is not None:
        raise ValueError("only mono EnCodec models without normalisation and chunks make plain codes")
    if config.norm_type != "weight_norm" or config.codebook_dim != config.hidden_size:
        raise ValueError("only EnCodec models with norm_type weight_norm and codebook_dim = hidden_size")
    shape = {
        "channels": 1,
        "dimension": config.hidden_size,
        "n_filters": config.num_filters,
        "n_residual_layers": config.num_residual_layers,
        "ratios": list(config.upsampling_ratios),
        "norm": "weight_norm",
        "kernel_size": config.kernel_size,
        "last_kernel_size": config.last_kernel_size,
        "residual_kernel_size": config.residual_kernel_size,
        "dilation_base": config.dilation_growth_rate,
        "causal": config.use_causal_conv,
        "pad_mode": config.pad_mode,
        "true_skip": not config.use_conv_shortcut,
        "compress": config.compress,
        "lstm": config.num_lstm_layers,
    }
    return EncodecModel(
        SEANetEncoder(**shape),
        SEANetDecoder(**shape, trim_right_ratio=config.trim_right_ratio),
        ResidualVectorQuantizer(config.hidden_size, config.num_quantizers, config.codebook_size),
        target_bandwidths=list(config.target_bandwidths),
        sample_rate=config.sampling_rate,
        channels=1,
    )


def transformers_key(key: str) -> str:
    """A weight's name in `encodec.model.EncodecModel` to its name in `transformers.EncodecModel`."""
    key = key.replace("coder.model.", "coder.layers.").replace("quantizer.vq.", "quantizer.")
    key = key.replace(".conv.conv.", ".conv.").replace(".convtr.convtr.", ".conv.")
    return _spell_weight_norm(key.replace("._codebook.", ".codebook."))


def _spell_weight_norm(key: str) -> str:
    stem, _, last = key.rpartition(".")
    return f"{stem}.{WEIGHT_NORM_NAMES.get(last, last)}"


def _package_weights(
    stored_weights: dict[str, Tensor], package_weights: dict[str, Tensor], where: str
) -> dict[str, Tensor]:
    """`stored_weights`, in the package's, transformers' or transformers' older spelling, under the package's names.

    Raises:
        ConfigError: a weight is missing or has another shape.
    """
    stored_weights = {transformers_key(key): value for key, value in stored_weights.items()}
    weights = {}
    for key, fresh in package_weights.items():
        value = stored_weights.get(transformers_key(key))
        if value is None or value.shape != fresh.shape:
            problem = "is missing" if value is None else f"is {list(value.shape)}, not {list(fresh.shape)}"
            raise ConfigError(f"{transformers_key(key)} {problem}", where, "give the weights of this model")
        weights[key] = value
    return weights


def _load_legacy(path: Path) -> dict[str, Tensor]:
    """The state dict in a `.th` file, with torch's safe unpickler.

    Raises:
        ConfigError: anything but tensors by name.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(
            "not a state dict of plain tensors", str(path), "give encodec_24khz-*.th"
        ) from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ConfigError("not a state dict of plain tensors", str(path), "give encodec_24khz-*.th")
    return weights
