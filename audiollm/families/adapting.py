"""The choice of the parameters that are trained: all, those of some names, or an adapter (LoRA, through PEFT)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from audiollm.errors import ConfigError, suggestion
from audiollm.models.frozen.stored import load_offline
from audiollm.train.settings import LoRASettings

TrainedPart = Literal["all", "adapter"] | Sequence[str]
"""All parameters, an adapter alone, or the parameters whose names fit one of these patterns (`*`, `?`)."""


def adapt_model(
    model: nn.Module,
    trained: TrainedPart,
    lora: LoRASettings | None = None,
    unreached: Sequence[str] = (),
) -> nn.Module:
    """Leave trainable what is asked for and reached, and freeze the rest.

    Args:
        unreached: patterns of parameters that no answer depends on; they are frozen.

    Returns:
        The model; with `adapter`, the `PeftModel` around it.

    Raises:
        ConfigError: another word than `all` and `adapter`, a pattern that fits no parameter, or an adapter for layers
            that the model lacks.
    """
    if trained == "adapter":
        return _with_adapter(model, lora or LoRASettings(), unreached)
    if isinstance(trained, str) and trained != "all":
        raise ConfigError(
            f"trained: {trained!r}", "", f"{suggestion(trained, ['all', 'adapter'])} Or list patterns"
        )
    patterns = ("*",) if trained == "all" else tuple(trained)
    named = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(
                f"trained: no parameter is named like {pattern!r}", "", suggestion(pattern.strip("*"), named)
            )
    for name, parameter in named.items():
        is_constant = trained == "all" and not parameter.requires_grad  # of the model: positions of encoders
        parameter.requires_grad_(
            _matches_a_pattern(name, patterns) and not is_constant and not _matches_a_pattern(name, unreached)
        )
    return model


def _with_adapter(model: nn.Module, settings: LoRASettings, unreached: Sequence[str]) -> nn.Module:
    load_offline()
    from peft import LoraConfig, get_peft_model

    try:
        excluded = modules_inside(model, settings.excluded)
    except ValueError as error:
        raise ConfigError(str(error), "", "see the model's config.json") from None
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
        modules_to_save=list(settings.trained_beside) or None,
        exclude_modules=[*_modules_of(model, unreached), *excluded] or None,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"lora: {reason}", "", "name linear layers of the model in lora.target_modules"
        ) from error


def modules_inside(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the full names of the modules that are called so, by the end of their names, and of all inside them.

    Raises:
        ValueError: no module has such a name.
    """
    inside: list[str] = []
    for name in names:
        called = [full for full, _ in model.named_modules() if f".{full}".endswith(f".{name}")]
        if not called:
            some = ", ".join(child for child, _ in model.named_children())
            raise ValueError(f"lora.excluded: no module is named {name!r}; the outer ones are {some}")
        inside += [
            full
            for full, _ in model.named_modules()
            if any(f"{full}.".startswith(f"{outer}.") for outer in called)
        ]
    return inside


def _modules_of(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the modules whose parameters fit one of the patterns."""
    return [name for name, _ in model.named_modules() if _matches_a_pattern(f"{name}.weight", patterns)]


def _matches_a_pattern(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
