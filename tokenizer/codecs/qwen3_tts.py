"""The codec of Qwen3-TTS at 12.5 frames a second: Mimi's encoder with 16 codebooks, and a decoder of its own.

Shapes: C channels, N samples, K codebooks, T frames, V codes, D size of their vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MimiConfig, MimiModel

from audiollm.errors import ConfigError
from audiollm.files.json_files import read_json_file
from audiollm.files.transformers_folders import model_from_weights
from audiollm.models.pretrained import StoredWeights, model_folder
from tokenizer.checks import check_codes, check_mono_samples
from tokenizer.codecs.mimi import MAX_SAMPLES
from tokenizer.codecs.qwen3_tts_decoder import Memory, Qwen3TTSDecoder

ENCODER, DECODER = "encoder.", "decoder."
UNUSED = ("upsample.", "decoder_transformer.", "decoder.", "decoder_seanet.")
"""Parts of Mimi that the folder does not have."""


class Qwen3TTSCodec(nn.Module):
    """A `Codec` and a `StreamedCodec`; the folder `speech_tokenizer` of a model.

    The published package decodes more than 300 frames in pieces that forget what came before the last 25 frames; here a
    recording is decoded whole, or streamed to the same samples.
    """

    def __init__(self, encoder: MimiModel, decoder: Qwen3TTSDecoder, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder.eval(), decoder.eval()
        self.num_codebooks = int(config["encoder_valid_num_quantizers"])
        self.codebook_size = int(self.decoder.quantizer.rvq_first.codebooks[0].embedding_sum.shape[0])
        self.sample_rate, self.hop_samples = (
            int(config["output_sample_rate"]),
            int(config["decode_upsample_rate"]),
        )
        self.frame_rate = self.sample_rate / self.hop_samples

    @property
    def codebook_vectors_KVD(self) -> Tensor:
        """The code vectors after their half's output projection: their sum over K is the decoder's input."""
        return torch.stack(
            [vectors_VD @ project_ED.T for vectors_VD, project_ED in self._projected_books()]
        ).detach()

    @property
    def codebook_tensors(self) -> list[list[Tensor]]:
        """See `ProjectedCodec.codebook_tensors`."""
        return [list(book) for book in self._projected_books()]

    @torch.no_grad()
    def encode(self, samples_CN: Tensor) -> Tensor:
        """Mono waveform `[1, N]` at `sample_rate` to codes `[K, ceil(N / hop)]`, int64.

        Raises:
            ValueError: not mono, empty, longer than `MAX_SAMPLES`, or not finite.
        """
        check_mono_samples(samples_CN)
        if samples_CN.shape[1] > MAX_SAMPLES:
            raise ValueError(
                f"the codec encodes at most {MAX_SAMPLES} samples, not {samples_CN.shape[1]}: cut it"
            )
        codes_KT: Tensor = self.encoder.encode(samples_CN[None]).audio_codes[0, : self.num_codebooks]
        return codes_KT[:, : -(-samples_CN.shape[1] // self.hop_samples)]

    @torch.no_grad()
    def decode(self, codes_KT: Tensor) -> Tensor:
        """Codes `[K, T]` to `[1, T * hop]`; cut it to the sample count you need.

        Raises:
            ValueError: no frame, another number of codebooks, or codes out of range.
        """
        self._check_codebooks(codes_KT)
        samples_1N: Tensor = self.decoder(codes_KT[None])[0]
        return samples_1N

    def code_stream(self) -> Qwen3TTSCodeStream:
        """See `StreamedCodec.code_stream`."""
        return Qwen3TTSCodeStream(self)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> Qwen3TTSCodec:
        """Load a folder with `config.json` and safetensors.

        Raises:
            ConfigError: nothing there, another codec, or weights that do not fit config.json.
        """
        folder = model_folder(Path(folder))
        config, weights = read_json_file(folder / "config.json", dict), StoredWeights(folder)
        halves: dict[str, dict[str, Tensor]] = {ENCODER: {}, DECODER: {}}
        for name in weights.names:
            half = ENCODER if name.startswith(ENCODER) else DECODER
            halves[half][name.removeprefix(half)] = weights.read(name).float()
        encoder = _load_mimi_encoder(config, halves[ENCODER], str(folder))
        decoder = Qwen3TTSDecoder(config.get("decoder_config") or {})
        try:
            decoder.load_state_dict(halves[DECODER])
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"the decoder's weights do not fit its config: {reason:.200}",
                str(folder),
                "download it again",
            ) from error
        sizes = {
            "encoder_valid_num_quantizers": 16, "output_sample_rate": 24_000, "decode_upsample_rate": 1920, **config,
        }  # fmt: skip
        return cls(encoder, decoder, sizes)

    def _projected_books(self) -> list[tuple[Tensor, Tensor]]:
        quantizer = self.decoder.quantizer
        return [
            (codebook.vectors_VD, half.output_proj.weight[:, :, 0])
            for half in (quantizer.rvq_first, quantizer.rvq_rest)
            for codebook in half.codebooks
        ]

    def _check_codebooks(self, codes_KT: Tensor) -> None:
        check_codes(codes_KT, self.num_codebooks, self.codebook_size)
        if len(codes_KT) != self.num_codebooks:
            raise ValueError(f"decode takes codes of {self.num_codebooks} codebooks, not {len(codes_KT)}")


class Qwen3TTSCodeStream:
    """A `CodeStream`: the joined pieces equal the samples of `decode`."""

    latency_s = 0.0

    def __init__(self, codec: Qwen3TTSCodec) -> None:
        self._codec, self._memory = codec, Memory()

    @torch.no_grad()
    def push(self, codes_KT: Tensor) -> Tensor:
        """See `CodeStream.push`."""
        if not codes_KT.shape[1]:
            return torch.zeros(1, 0)
        self._codec._check_codebooks(codes_KT)
        samples_1N: Tensor = self._codec.decoder(codes_KT[None], self._memory)[0]
        return samples_1N

    def flush(self) -> Tensor:
        """See `CodeStream.flush`: nothing is held back."""
        self._memory.clear()
        return torch.zeros(1, 0)


def _load_mimi_encoder(config: Mapping[str, Any], state: dict[str, Tensor], where: str) -> MimiModel:
    """Mimi's encoder and quantizer, with attention over all that came before, as they were trained."""
    mimi = MimiConfig(**(config.get("encoder_config") or {}))
    mimi.sliding_window = mimi.max_position_embeddings
    model: MimiModel = model_from_weights(MimiModel, mimi, state, where, UNUSED)
    return model
