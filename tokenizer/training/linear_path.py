"""The closed-form start of a tokenizer: a linear map to latents and one back, before the first training step.

The encoder's map takes the principal components of the log-mel and salience frames that a latent frame covers; the
decoder's gives, by ridge regression, the log-magnitudes of the same frames. What the encoder's blocks add to the
components begins at zero, so that the first step starts from speech that is understood. Both maps then learn with the
rest, slower.

Shapes: B crops, N samples, S latent frames, R mel frames of a latent frame, M features of a mel frame, X = R * M
features and Y log-magnitudes of a latent frame, Z both, D components.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.train.settings import ParameterRule
from tokenizer.native.model import AudioTokenizer
from tokenizer.native.operations import magnitudes
from tokenizer.quantizers.codebooks import sum_over_ranks

FRAMES_FITTED = 12_000
"""Latent frames of random crops that the maps are fitted to."""
LEAST_MAGNITUDE = 1e-3
"""Smaller magnitudes count as this one, as in the reconstruction losses."""
RIDGE = 1e-3
"""Added to the variance of each component; their mean variance is 1."""
SALIENCE_SHARE = 0.3
"""The variance of pitch salience beside that of the log-mels: so the pitch is among the components."""
LINEAR_PATH_RULES = (ParameterRule("*coder.linear.*", rate_factor=0.1),)
"""Both maps learn at a tenth of the rate: at the full rate 20 steps undid what was fitted."""


@torch.no_grad()
def fit_linear_path(model: AudioTokenizer, crops_BN: Iterable[Tensor]) -> dict[str, float]:
    """Fit both maps to crops of every rank; what the encoder's blocks add to the components becomes zero.

    Args:
        model: with `linear_path`.
        crops_BN: this rank's batches of crops; N is a multiple of the hop.

    Returns:
        `features_kept`, the components' share of the weighted features' variance, and `magnitudes_explained`, the share
        of the log-magnitudes' variance that the decoder's map gives back.
    """
    encoder, decoder, components = model.encoder, model.decoder, model.config.latent_dim
    assert encoder.linear is not None and decoder.linear is not None
    num_features = encoder.linear.in_features
    mean_Z, covariance_ZZ = _joint_moments(model, crops_BN)
    mean_X, mean_Y = mean_Z[:num_features], mean_Z[num_features:]
    weight_X = _feature_weights(model, covariance_ZZ.diagonal()[:num_features])
    weighted_XX = torch.outer(weight_X, weight_X) * covariance_ZZ[:num_features, :num_features]
    variance_X, axes_XX = torch.linalg.eigh(weighted_XX)
    variance_X, axes_XD = variance_X.flip(0).clamp_min(0), axes_XX.flip(1)[:, :components]
    axes_XD = axes_XD * axes_XD.gather(0, axes_XD.abs().argmax(dim=0, keepdim=True)).sign()
    scale = (components / variance_X[:components].sum().clamp_min(1e-12)).sqrt()
    variance_D = scale.square() * variance_X[:components]
    analysis_XD = scale * weight_X[:, None] * axes_XD
    joint_DY = analysis_XD.T @ covariance_ZZ[:num_features, num_features:]
    synthesis_DY = joint_DY / (variance_D + RIDGE)[:, None]
    _fill(encoder.linear, analysis_XD.T, -mean_X @ analysis_XD)
    _fill(decoder.linear, synthesis_DY.T, mean_Y)
    for parameter in encoder.output[-1].parameters():
        parameter[-components:] = 0
    explained = (2 * synthesis_DY * joint_DY - synthesis_DY.square() * variance_D[:, None]).sum()
    return {
        "features_kept": float(variance_X[:components].sum() / variance_X.sum().clamp_min(1e-12)),
        "magnitudes_explained": float(
            explained / covariance_ZZ.diagonal()[num_features:].sum().clamp_min(1e-12)
        ),
    }


def _feature_weights(model: AudioTokenizer, variance_X: Tensor) -> Tensor:
    """1 for log-mels, and for salience what gives all of it `SALIENCE_SHARE` of their variance."""
    variance_RM = variance_X.unflatten(0, (-1, model.encoder.mel.num_features))
    weight_RM, num_mels = torch.ones_like(variance_RM), model.config.num_mels
    mel_variance, salience_variance = variance_RM[:, :num_mels].sum(), variance_RM[:, num_mels:].sum()
    weight_RM[:, num_mels:] = (SALIENCE_SHARE * mel_variance / salience_variance.clamp_min(1e-12)).sqrt()
    return weight_RM.flatten()


def _joint_moments(model: AudioTokenizer, crops_BN: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and covariance of features and log-magnitudes, side by side, over all ranks' latent frames; float64."""
    encoder, decoder = model.encoder, model.decoder
    assert encoder.linear is not None and decoder.linear is not None
    size = encoder.linear.in_features + decoder.linear.out_features + 1
    sums_ZZ = encoder.linear.weight.new_zeros(size, size, dtype=torch.float64)
    for samples_BN in crops_BN:
        rows_SZ = torch.cat(_frames_of(model, samples_BN), dim=1).double()
        rows_SZ = functional.pad(rows_SZ, (0, 1), value=1.0)
        sums_ZZ += rows_SZ.T @ rows_SZ
    sums_ZZ = sum_over_ranks(sums_ZZ)
    sums_ZZ = sums_ZZ / sums_ZZ[-1, -1]
    mean_Z = sums_ZZ[-1, :-1]
    return mean_Z, sums_ZZ[:-1, :-1] - torch.outer(mean_Z, mean_Z)


def _frames_of(model: AudioTokenizer, samples_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Features `[S, X]` and log-magnitudes `[S, Y]` of each latent frame."""
    encoder, shape = model.encoder, model.encoder.shape
    around_BCN = functional.pad(samples_BN[:, None], (shape.context_samples, shape.context_samples))
    features_BTX = encoder.frames_of_latents(encoder.mels(around_BCN))
    margin = (shape.n_fft - shape.mel_hop_samples) // 2
    padded_BN = functional.pad(samples_BN, (margin, shape.n_fft - shape.mel_hop_samples - margin))
    magnitude_BRF = magnitudes(padded_BN, encoder.mel.window_W, shape.mel_hop_samples)
    log_magnitude_BRF = magnitude_BRF.clamp_min(LEAST_MAGNITUDE).log()
    log_magnitude_BTY = log_magnitude_BRF.unflatten(1, (-1, shape.stride)).flatten(2)
    return features_BTX.flatten(0, 1), log_magnitude_BTY.flatten(0, 1)


def _fill(layer: nn.Linear, weight_OI: Tensor, bias_O: Tensor) -> None:
    """Set the last outputs and inputs of a layer, and the others to zero: the semantic half of `split_rvq`."""
    outputs, inputs = weight_OI.shape
    layer.weight.zero_()
    layer.bias.zero_()
    layer.weight[-outputs:, -inputs:] = weight_OI.to(layer.weight)
    layer.bias[-outputs:] = bias_O.to(layer.bias)
