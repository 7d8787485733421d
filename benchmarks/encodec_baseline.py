"""The peer of `learn_tokenizer.py`: EnCodec's architecture (PyPI `encodec`), trained by our loop.

Encoder and decoder are the package's SEANet as EnCodec 24 kHz sets it up (causal, weight norm, 32 filters, two
LSTM layers, dimension 128). The quantizer is ours, since the package's revival does nothing and would handicap it.
"""

from __future__ import annotations

from typing import Any

import torch
from encodec.modules import SEANetDecoder, SEANetEncoder
from torch import Tensor, nn
from torch.nn import functional

from tokenizer.checks import check_codes, check_mono_samples
from tokenizer.native.model import TokenizerOutput
from tokenizer.native.pitch import PitchTarget
from tokenizer.quantizers.residual import ResidualVectorQuantizer

STOCK_RATIOS = (8, 5, 4, 2)
"""Hop 320, 75 Hz."""
RESTRIDED_RATIOS = (8, 6, 5, 4)
"""Hop 960, 25 Hz, with as many stages as the stock one."""
DIMENSION = 128
OUTPUT_DEVIATION = 0.05
"""Standard deviation of the output at the start of training, about that of speech."""


class EncodecBaseline(nn.Module):
    """EnCodec 24 kHz, as a tokenizer that `TokenizerTask` trains."""

    def __init__(self, ratios: tuple[int, ...], num_codebooks: int, codebook_size: int = 1024) -> None:
        super().__init__()
        common: dict[str, Any] = {
            "channels": 1,
            "dimension": DIMENSION,
            "norm": "weight_norm",
            "causal": True,
        }
        self.encoder = SEANetEncoder(ratios=list(ratios), **common)
        self.decoder = SEANetDecoder(ratios=list(ratios), **common)
        self.quantizer = ResidualVectorQuantizer(num_codebooks, codebook_size, DIMENSION)
        self.sample_rate = 24_000
        self.num_codebooks, self.codebook_size = num_codebooks, codebook_size
        self.hop_samples = int(torch.tensor(ratios).prod())
        self.frame_rate = self.sample_rate / self.hop_samples

    @property
    def codebook_vectors_KVD(self) -> Tensor:
        return self.quantizer.vectors_KVD.detach()

    def forward(
        self,
        samples_BN: Tensor,
        num_codebooks: int | Tensor | None = None,
        quantize: bool = True,
        features_BTH: Tensor | None = None,
        pitch: PitchTarget | None = None,
    ) -> TokenizerOutput:
        latent_BTD = self.latent(samples_BN)
        used_BTD, codes_BKT, commitment = latent_BTD, None, latent_BTD.new_zeros(())
        if quantize:
            used_BTD, codes_BKT, commitment = self.quantizer(latent_BTD, num_codebooks)
        return TokenizerOutput(self.synthesize(used_BTD), latent_BTD, codes_BKT, commitment, None)

    @torch.no_grad()
    def initialize(self, samples_BN: Tensor) -> None:
        """Data-dependent start of weight norm (Salimans and Kingma, arXiv 1602.07868, section 3): unit activations.

        Each convolution gets the scale and bias with which its outputs on these crops have mean 0 and deviation 1,
        the last one `OUTPUT_DEVIATION`. With PyTorch's own start a signal fades through the layers, the latent
        hardly moves with the input, and within our budget the decoder learns nothing but the mean spectrum.
        """
        hooks = [
            module.register_forward_hook(_standardize)
            for module in self.modules()
            if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
        ]
        self.synthesize(self.latent(samples_BN))
        for hook in hooks:
            hook.remove()
        last = [module for module in self.decoder.modules() if isinstance(module, nn.Conv1d)][-1]
        last.get_parameter("weight_g").mul_(OUTPUT_DEVIATION)

    def latent(self, samples_BN: Tensor) -> Tensor:
        latent_BDT: Tensor = self.encoder(samples_BN[:, None])
        return latent_BDT.transpose(1, 2)

    def synthesize(self, latent_BTD: Tensor) -> Tensor:
        samples_BCN: Tensor = self.decoder(latent_BTD.transpose(1, 2))
        return samples_BCN[:, 0]

    @torch.no_grad()
    def encode(self, samples_CN: Tensor) -> Tensor:
        check_mono_samples(samples_CN)
        padded_CN = functional.pad(samples_CN, (0, -samples_CN.shape[1] % self.hop_samples))
        codes_KT: Tensor = self.eval().quantizer(self.latent(padded_CN)).codes_BKT[0]
        return codes_KT

    @torch.no_grad()
    def decode(self, codes_KT: Tensor) -> Tensor:
        check_codes(codes_KT, self.num_codebooks, self.codebook_size)
        return self.eval().synthesize(self.quantizer.decode(codes_KT[None])).clamp(-1, 1)


def _standardize(module: nn.Module, inputs: tuple[Tensor, ...], output_BCN: Tensor) -> Tensor:
    """A forward hook: scale and bias such that the output has mean 0 a channel and deviation 1 over all."""
    mean_C, deviation = output_BCN.mean(dim=(0, 2)), output_BCN.std()
    module.get_parameter("weight_g").div_(deviation)
    bias_C = module.get_parameter("bias")
    bias_C.copy_((bias_C - mean_C) / deviation)
    return (output_BCN - mean_C[:, None]) / deviation
