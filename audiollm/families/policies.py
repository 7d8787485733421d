"""The policy of a training, by what its model's folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from audiollm.data.records.video_clips import PictureSettings
from audiollm.families.family import MAX_TOKENS, PolicySettings
from audiollm.families.policy import Policy
from audiollm.families.registry import open_model_folder
from audiollm.train.settings import LoRASettings, PromptMix, Trained


def load_policy(
    folder: Path,
    trained: Trained = "all",
    lora: LoRASettings | None = None,
    reference: Path | None = None,
    needs_reference: bool = False,
    max_tokens: int = MAX_TOKENS,
    pictures: PictureSettings | None = None,
    prompt_mix: PromptMix | None = None,
) -> Policy[Any, Any, Any]:
    """Load the policy to begin from, on the CPU, by the family of its model.

    Args:
        trained, lora: what is trained of it; `lora` is read with `trained: adapter` alone.
        reference: another model than `folder` as the reference.
        max_tokens: most positions of the answers to one prompt together, for families that pack.
        pictures: how the pictures of videos are shown; None: samples with videos are refused.
        prompt_mix: how often a talker's prompts are shown in another form.

    Raises:
        ConfigError: the folder holds no model, or the settings do not fit it.
    """
    settings = PolicySettings(
        trained=trained,
        lora=lora if trained == "adapter" else None,
        reference=reference if needs_reference else None,
        needs_reference=needs_reference,
        max_tokens=max_tokens,
        pictures=pictures,
        prompt_mix=prompt_mix,
    )
    return open_model_folder(folder).policy(settings)


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
