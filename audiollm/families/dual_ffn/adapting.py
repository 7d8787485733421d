"""The trained part of a model: all of it, the audio path, an adapter (LoRA, through PEFT), or names by pattern."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from audiollm.families.adapting import modules_inside
from audiollm.train.settings import LoRASettings, Trained

if TYPE_CHECKING:
    from peft import PeftModel
from audiollm.models.frozen.stored import load_offline
from audiollm.train.loop.modules import announce_weights

AUDIO_PATTERNS = (
    "*audio_mlp.*",
    "*audio_input_layernorm.*",
    "*audio_post_attention_layernorm.*",
    "*embed_audio_tokens.*",
    "*audio_lm_head.*",
)
"""Patterns of the parameters that a DualFFN adds to the language model it is built on."""
ENCODER_PATTERNS = ("audio_tower.*", "audio_encoder_proj.*")
"""And where it has an encoder of what it hears."""


def adapt(
    model: nn.Module, trained: Trained, lora: LoRASettings | None = None, encoder_trained: bool = True
) -> nn.Module:
    """Leave trainable what is asked for and freeze the rest.

    Args:
        encoder_trained: False keeps the audio encoder, if there is one, as it is: it has no adapters either.

    Returns:
        The model, or with `adapter` the PEFT model around it (the model itself has the adapter inside as well).

    Raises:
        ValueError: a pattern that fits nothing.
    """
    encoder = None if encoder_trained else getattr(model, "audio_tower", None)
    adapted = model
    if trained == "adapter":
        kept = [] if encoder is None else [f"audio_tower.{name}" for name, _ in encoder.named_modules()]
        adapted = add_lora(model, lora or LoRASettings(), kept)
    elif trained != "all":
        train_only(model, _audio_patterns(model) if trained == "audio_ffn" else trained)
    if encoder is not None:
        encoder.freeze()
    return adapted


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters whose names fit none of the patterns (`*`, `?`, as of file names).

    Raises:
        ValueError: a pattern fits no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:3])
            raise ValueError(f"no parameter is named like {pattern!r}; the names are like {some}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))


def add_lora(model: nn.Module, settings: LoRASettings, kept: Sequence[str] = ()) -> PeftModel:
    """Put adapters into the model's linear layers, and train whole modules beside them; all else is frozen.

    Args:
        kept: full names of modules that get no adapter.

    Raises:
        ValueError: no layer or module has such a name.
    """
    load_offline()
    from peft import LoraConfig, get_peft_model

    beside = _outermost_modules(model, settings.trained_beside)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
        modules_to_save=beside or None,
        exclude_modules=[*kept, *modules_inside(model, settings.excluded)] or None,
    )
    return get_peft_model(model, config)


def merge_adapter(model: PeftModel) -> nn.Module:
    """The model with the adapter added into its weights and gone: it has its own names and structure again."""
    merged: nn.Module = model.merge_and_unload()
    announce_weights([merged])
    return merged


def _outermost_modules(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The full names of the modules that are called so; of modules inside one another, the outer one.

    PEFT takes every module whose full name ends with a given name, and so would wrap both `model.embed_audio_tokens`
    and the table of the same name inside it: the copy in the inner wrapper is never called.

    Raises:
        ValueError: no module has such a name.
    """
    module_names: list[str] = []
    for name in names:
        called = [full for full, _ in model.named_modules() if f".{full}".endswith(f".{name}")]
        if not called:
            some = ", ".join(child for child, _ in model.named_children())
            raise ValueError(f"lora.trained_beside: no module is named {name!r}; the outer ones are {some}")
        module_names += [full for full in called if not any(full.startswith(f"{outer}.") for outer in called)]
    return module_names


def _audio_patterns(model: nn.Module) -> tuple[str, ...]:
    has_encoder = any(fnmatchcase(name, ENCODER_PATTERNS[0]) for name, _ in model.named_parameters())
    return AUDIO_PATTERNS + (ENCODER_PATTERNS if has_encoder else ())
