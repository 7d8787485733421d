"""The policy of a training, by what its model's folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from audiollm.data.records.video_clips import PictureSettings
from audiollm.errors import ConfigError
from audiollm.models.hub import is_dual_ffn, is_language_model
from audiollm.rl.policy.dual_ffn_policy import MAX_TOKENS, DualFFNPolicy
from audiollm.rl.policy.protocol import Policy
from audiollm.rl.policy.transformers_policy import TransformersPolicy
from audiollm.train.options import LoRASettings, Trained


def load_policy(
    folder: Path,
    trained: Trained = "all",
    lora: LoRASettings | None = None,
    reference: Path | None = None,
    needs_reference: bool = False,
    max_tokens: int = MAX_TOKENS,
    pictures: PictureSettings | None = None,
) -> Policy[Any, Any, Any]:
    """Load the policy to begin from, on the CPU: a DualFFN (or a plain Llama or Qwen as one), or an audio LLM of
    transformers.

    Args:
        trained, lora: what is trained of it; `lora` is read with `trained: adapter` alone.
        reference: another model than `folder` as the reference.
        max_tokens: most positions of the answers to one prompt together, for a DualFFN.
        pictures: how the pictures of videos are shown; None: samples with videos are refused.

    Raises:
        ConfigError: the folder holds no model, or the settings do not fit it.
    """
    lora = lora if trained == "adapter" else None
    reference = reference if needs_reference else None
    if is_dual_ffn(folder) or is_language_model(folder):
        if pictures is not None:
            raise ConfigError(
                "pictures: a DualFFN sees none", str(folder), "leave it out, or give a model that sees"
            )
        return DualFFNPolicy.load(
            folder,
            trained,
            lora,
            reference=reference,
            needs_reference=needs_reference,
            max_tokens=max_tokens,
        )
    if trained == "audio_ffn":
        raise ConfigError(
            "trained: audio_ffn is a part of a DualFFN",
            str(folder),
            "take all, adapter, or patterns of names",
        )
    return TransformersPolicy.load(
        folder, trained, lora, reference=reference, needs_reference=needs_reference, pictures=pictures
    )


def untrained_copy(
    policy: Policy[Any, Any, Any], folder: Path, max_tokens: int, device: torch.device | None = None
) -> Policy[Any, Any, Any]:
    """Load a policy's model again, without adapter and reference; random state stays as it is.

    Args:
        device: None: that of the policy.
    """
    with torch.random.fork_rng(devices=[]):
        copy = load_policy(folder, max_tokens=max_tokens)
    copy.root.requires_grad_(False).to(device or next(policy.root.parameters()).device)
    return copy


def plain_model(root: nn.Module) -> nn.Module:
    """Return the model inside a policy's root, whose adapters, if any, are layers of it."""
    model: Any = root.model
    inside: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inside
