"""From logits to codes: classifier-free guidance, temperature, top-k, top-p, repetition-aware sampling.

What is drawn depends on a prompt's own logits and its own uniform numbers alone, never on its batch: one number a
codebook picks from the cumulated shares, in the order of the codes.

Shapes: B prompts, K codebooks, V codes, W rows of the recent past.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SORTED_CODES = 128
"""Codes that are sorted first on a CPU: they nearly always hold the share that top-p asks for."""


@dataclass(frozen=True)
class SamplingConfig:
    """How codes are drawn. Guidance of 1 is none: more needs a model that was trained with that condition hidden."""

    temperature: float = 0.7
    """0 takes the most likely code."""
    top_k: int = 0
    """Keep the k most likely codes; 0 keeps all."""
    top_p: float = 0.9
    """Keep the smallest set of codes whose probability reaches this."""
    text_guidance: float = 1.0
    speaker_guidance: float = 1.0
    ras_window: int = 0
    """Rows that repetition-aware sampling of codes looks back; 0 switches it off, Higgs Audio V2 has 7."""
    ras_repeats: int = 2
    """Occurrences in the window from which a code is drawn again, from all codes and at temperature 1."""

    @property
    def branches(self) -> list[tuple[bool, bool]]:
        """Conditions hidden, as `(text, speaker)`, from each copy of a prompt that the guidance compares."""
        without_text = [(True, False)] if self.text_guidance != 1 else []
        return [(False, False), *without_text, *([(False, True)] if self.speaker_guidance != 1 else [])]


def guide(full: Tensor, no_text: Tensor | None, no_speaker: Tensor | None, config: SamplingConfig) -> Tensor:
    """Classifier-free guidance in log-probabilities, one term per condition (arXiv 2207.12598; 2211.09800 eq. 3).

    `full + (w_text - 1) (full - no_text) + (w_speaker - 1) (full - no_speaker)`.
    """
    full = full.log_softmax(dim=-1)
    guided = full
    if no_text is not None:
        guided = guided + (config.text_guidance - 1) * (full - no_text.log_softmax(dim=-1))
    if no_speaker is not None:
        guided = guided + (config.speaker_guidance - 1) * (full - no_speaker.log_softmax(dim=-1))
    return guided


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set what top-k and top-p leave out to -inf; the most likely code always stays, and so do ties with the last."""
    size = logits.shape[-1]
    if 0 < top_k < size:
        best = logits.topk(top_k, dim=-1).values
        logits = logits.masked_fill(logits < best[..., -1:], -torch.inf)
    if top_p >= 1.0:
        return logits
    total = logits.logsumexp(dim=-1, keepdim=True)
    max_codes = top_k if 0 < top_k < size else size
    # a GPU sorts all of them sooner than the host could ask whether that is needed
    for count in (max_codes,) if logits.is_cuda or max_codes <= SORTED_CODES else (SORTED_CODES, max_codes):
        best = logits.topk(count, dim=-1).values
        shares = (best - total).exp()
        before = shares.cumsum(dim=-1) - shares
        if count == max_codes or bool((before[..., -1] >= top_p).all()):
            break
    before[..., 0] = 0.0
    threshold = best.masked_fill(before >= top_p, torch.inf).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < threshold, -torch.inf)


def sample_codes(
    logits_BKV: Tensor, config: SamplingConfig, uniform_B2K: Tensor, recent_BWK: Tensor | None = None
) -> Tensor:
    """Draw one code per codebook, `[B, K]`.

    Repetition-aware sampling is that of VALL-E 2 (arXiv 2406.05370, section 3.2) as Higgs Audio V2 has it
    (`_sample_audio_tokens` in boson-ai/higgs-audio): a code that occurs `ras_repeats` times in the window is
    replaced by one from the whole distribution at temperature 1. A temperature of 0 stays greedy.

    Args:
        uniform_B2K: numbers in [0, 1); the first row of each draws, the second draws again. Greedy needs none.
        recent_BWK: each codebook's last codes, for repetition-aware sampling; -1 where there was none.
    """
    if config.temperature == 0:
        if logits_BKV.device.type == "cpu":  # NumPy's cumulative sum is ten times as fast as torch's
            return torch.from_numpy(logits_BKV.numpy().argmax(axis=-1))
        return logits_BKV.argmax(dim=-1)
    kept_BKV = truncate(logits_BKV / config.temperature, config.top_k, config.top_p)
    codes_BK = pick(kept_BKV.softmax(dim=-1), uniform_B2K[:, 0])
    if recent_BWK is None:
        return codes_BK
    repeated_BK = (recent_BWK == codes_BK[:, None]).sum(dim=1) >= config.ras_repeats
    return torch.where(repeated_BK, pick(logits_BKV.softmax(dim=-1), uniform_B2K[:, 1]), codes_BK)


def check_plain(config: SamplingConfig) -> None:
    """Check that codes are drawn from the model's own distribution at a temperature, with nothing left out.

    Raises:
        ValueError: a setting samples from another distribution; it is named with the value that does not.
    """
    plain = {"top_k": 0, "top_p": 1.0, "text_guidance": 1.0, "speaker_guidance": 1.0, "ras_window": 0}
    for name, value in plain.items():
        setting = getattr(config, name)
        if setting != value:
            raise ValueError(
                f"{name}: {setting} samples from another distribution than the model's at its temperature, and the "
                f"log-probabilities of such tokens are not recorded; set {name} to {value:g}"
            )


def sample_plain(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a code from the softmax of the logits `[..., V]` over the temperature, and nothing else.

    Args:
        uniform: numbers `[...]` in [0, 1).

    Returns:
        The codes `[...]`, and their log-probabilities.
    """
    shares = (logits if temperature == 1 else logits / temperature).softmax(dim=-1)
    codes = pick(shares, uniform)
    return codes, shares.gather(-1, codes[..., None])[..., 0].log()


def pick(shares: Tensor, uniform: Tensor) -> Tensor:
    """Pick the first code at which the cumulated shares exceed a uniform number: each code by its probability."""
    cumulated = shares.cumsum(dim=-1)
    thresholds = uniform[..., None].clamp(max=1 - 1e-6) * cumulated[..., -1:]
    return torch.searchsorted(cumulated, thresholds, right=True)[..., 0]
