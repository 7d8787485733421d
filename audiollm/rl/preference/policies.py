"""The policy of a training, by what its model's folder holds."""

from __future__ import annotations

from typing import Any

from audiollm.errors import ConfigError
from audiollm.models.hub import is_dual_ffn, is_language_model
from audiollm.recipe.stages import required
from audiollm.rl.policy.dual_ffn_policy import DualFFNPolicy
from audiollm.rl.policy.protocol import Policy
from audiollm.rl.policy.transformers_policy import TransformersPolicy
from audiollm.rl.preference.settings import PreferenceConfig


def load_policy(config: PreferenceConfig, needs_reference: bool) -> Policy[Any, Any, Any]:
    """Load the policy to begin from, on the CPU: a DualFFN (or a plain Llama or Qwen as one), or an audio LLM of
    transformers.

    Raises:
        ConfigError: the folder holds no model, or the settings do not fit it.
    """
    lora = config.lora if config.trained == "adapter" else None
    reference = config.reference if needs_reference else None
    if is_dual_ffn(config.model) or is_language_model(config.model):
        return DualFFNPolicy.load(
            config.model,
            config.trained,
            lora,
            reference=reference,
            needs_reference=needs_reference,
            max_tokens=required(config.max_tokens),
        )
    if config.trained == "audio_ffn":
        raise ConfigError(
            "trained: audio_ffn is a part of a DualFFN",
            str(config.model),
            "take all, adapter, or patterns of names",
        )
    return TransformersPolicy.load(
        config.model, config.trained, lora, reference=reference, needs_reference=needs_reference
    )
