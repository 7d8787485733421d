"""Any Hugging Face audio encoder as the network of a semantic teacher: 24 kHz in, hidden states at 25 Hz out.

Shapes: B batch, N samples at 24 kHz, X samples at the model's rate, T frames at 25 Hz, C channels, S hidden states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoFeatureExtractor, AutoModel

from audiollm.audio import resample
from audiollm.errors import ConfigError
from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import open_model
from tokenizer.rates import FRAME_RATE, SAMPLE_RATE

USUAL_RATE = 16_000


class Timing(NamedTuple):
    """The position of a model's frames on its input, so that `merge` of them are centred on a 25 Hz frame."""

    left_samples: int
    right_samples: int
    """Zeros put before and after the input."""
    skip: int
    """Frames of the output to leave out at the start."""
    merge: int
    """The model's frames in one frame at 25 Hz."""
    most_frames: int | None = None
    """The longest input in 25 Hz frames, where the model has a limit."""


class HuggingFaceEncoder(nn.Module):
    """HuBERT, WavLM, wav2vec 2.0 and their like (waveform in), wav2vec2-bert, and Whisper's encoder.

    The input is resampled to the rate of the model's feature extractor (16 kHz where the folder has none) and
    padded so that the model's frames, averaged in groups, are centred on the 25 Hz frames, exactly N / 960 of them.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ConfigError: not an audio encoder, a frame rate that 25 Hz does not divide, or no safetensors.
        """
        super().__init__()
        self._extractor = _load_extractor(folder)
        self.rate = int(getattr(self._extractor, "sampling_rate", USUAL_RATE))
        self.timing = _timing(_load_config(folder), self._extractor, self.rate, folder)
        self.model = _load_encoder(folder)
        self.hidden_size = int(self.model.config.hidden_size)
        self.num_states = int(self.model.config.num_hidden_layers) + 1

    def hidden_states(self, samples_BN: Tensor) -> Tensor:
        """`[S, B, T, C]`, T = N / 960: the embedding, then each layer's output."""
        hop = SAMPLE_RATE // FRAME_RATE
        max_samples = (self.timing.most_frames or samples_BN.shape[1]) * hop
        return torch.cat([self._piece(block_BN) for block_BN in samples_BN.split(max_samples, dim=1)], dim=2)

    def _piece(self, samples_BN: Tensor) -> Tensor:
        frames, merge, skip = (
            samples_BN.shape[1] * FRAME_RATE // SAMPLE_RATE,
            self.timing.merge,
            self.timing.skip,
        )
        inputs = self._inputs(resample(samples_BN, SAMPLE_RATE, self.rate))
        states_SBXC = torch.stack(self.model(**inputs, output_hidden_states=True).hidden_states)
        centred = states_SBXC[:, :, skip : skip + frames * merge]
        if centred.shape[2] != frames * merge:
            raise ValueError(
                f"{type(self.model).__name__} gave {states_SBXC.shape[2]} frames for {frames / FRAME_RATE} s, "
                f"fewer than {frames * merge + skip}: its settings change the frame rate"
            )
        return centred.unflatten(2, (frames, merge)).mean(dim=3)

    def _inputs(self, samples_BX: Tensor) -> dict[str, Tensor]:
        margins = (self.timing.left_samples, self.timing.right_samples)
        if not _takes_features(self._extractor):
            if getattr(self._extractor, "do_normalize", False):
                mean = samples_BX.mean(dim=1, keepdim=True)
                variance = samples_BX.var(dim=1, keepdim=True, unbiased=False)
                samples_BX = (samples_BX - mean) / (variance + 1e-7).sqrt()
            return {"input_values": functional.pad(samples_BX, margins)}
        waveforms = list(functional.pad(samples_BX, margins).cpu().numpy())
        features = self._extractor(waveforms, sampling_rate=self.rate, return_tensors="pt")
        return {"input_features": features["input_features"].to(samples_BX)}


def _takes_features(extractor: Any) -> bool:
    return extractor is not None and extractor.model_input_names[0] == "input_features"


def _load_extractor(folder: Path) -> Any:
    """The folder's feature extractor; None where it has none, as some folders of waveform models."""
    if not any((folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    try:
        return AutoFeatureExtractor.from_pretrained(folder, **OFFLINE)
    except (OSError, ValueError) as error:  # damaged, or with code of its own
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"no feature extractor loads: {reason:.200}", str(folder), "give another folder"
        ) from None


def _load_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, **OFFLINE)
    except ValueError as error:
        raise _not_an_encoder(folder, str(error).splitlines()[0]) from None


def _load_encoder(folder: Path) -> Any:
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(
            "no weights here: a .safetensors file is missing",
            str(folder),
            "save the model with transformers' save_pretrained; pickled weights are not loaded",
        )
    model = open_model(AutoModel, folder)
    return model.get_encoder() if model.config.is_encoder_decoder else model


def _timing(config: Any, extractor: Any, rate: int, folder: Path) -> Timing:
    """See `Timing`; each family has its own padding and centring."""
    hop = rate // FRAME_RATE
    if config.model_type == "whisper" and _takes_features(extractor):
        # centred STFT, then two convolutions that keep the centre: frame j is centred on sample j * stride
        stride = extractor.hop_length * 2
        limit = int(config.max_source_positions)
        merge = _count_frames_per_group(hop, stride, folder)
        return Timing(stride - (stride // 2), 0, 1, merge, (limit - 1) // merge)
    if config.model_type == "wav2vec2-bert" and _takes_features(extractor):
        # windows of 25 ms every 10 ms, none beyond the ends, `stride` of them stacked to a frame
        window, step = rate * 25 // 1000, rate * 10 // 1000
        spare = window - step
        return Timing(
            spare // 2, spare - spare // 2, 0, _count_frames_per_group(hop, step * extractor.stride, folder)
        )
    if hasattr(config, "conv_kernel") and hasattr(config, "conv_stride") and not _takes_features(extractor):
        field, stride = 1, 1
        for kernel, step in zip(config.conv_kernel, config.conv_stride, strict=True):
            field += (kernel - 1) * stride
            stride *= step
        spare = field - stride
        return Timing(spare // 2, spare - spare // 2, 0, _count_frames_per_group(hop, stride, folder))
    raise _not_an_encoder(folder, f"model_type {config.model_type!r}")


def _count_frames_per_group(hop_samples: int, stride_samples: int, folder: Path) -> int:
    if hop_samples % stride_samples:
        raise ConfigError(
            f"a frame every {stride_samples} samples cannot be grouped to {FRAME_RATE} Hz ({hop_samples} samples)",
            str(folder),
            "give an encoder of 25, 50 or 100 frames a second",
        )
    return hop_samples // stride_samples


def _not_an_encoder(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"not an audio encoder that can teach: {reason}",
        str(folder),
        "give HuBERT, WavLM, wav2vec 2.0, wav2vec2-bert, Whisper, or `own`",
    )
