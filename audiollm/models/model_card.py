"""The README.md that is written beside a model: what is known of it, and what is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from audiollm.files.atomic import write_text
from audiollm.models.decoder import DualFFNConfig

MARK = "<!-- Written by audiollm. Without this line it is kept when the model is saved again. -->"


@dataclass(frozen=True)
class ModelCard:
    """Facts of a model beyond its shape. An empty field is unknown, and the card says so."""

    codec: str = ""
    """Name of the codec that decodes the model's codes."""
    data: str = ""
    recipe: str = ""
    base: str = ""
    """The model that its training began from."""
    license: str = ""
    """An identifier, as `apache-2.0`, or a sentence: the weights', which data and base model may bind."""


def write_card(
    folder: Path, card: ModelCard, config: DualFFNConfig, parameters: int, model_type: str
) -> None:
    """Write README.md, unless a person has made it their own."""
    path = folder / "README.md"
    if path.exists() and MARK not in path.read_text(encoding="utf-8"):
        return
    write_text(path, render_card(card, config, parameters, model_type))


def render_card(card: ModelCard, config: DualFFNConfig, parameters: int, model_type: str) -> str:
    """The card in Markdown, with the front matter that model hubs read."""
    front: dict[str, object] = {"library_name": "audiollm", "tags": ["audio", "text-to-speech", "dual-ffn"]}
    if card.license:
        front["license"] = card.license if " " not in card.license else "other"
    card_facts: Mapping[str, str] = {
        "Codec": card.codec,
        "Training data": card.data,
        "Recipe": card.recipe,
        "Begun from": card.base,
        "Licence of the weights": card.license,
    }
    facts = "\n".join(f"| {name} | {text or 'not stated'} |" for name, text in card_facts.items())
    return f"""---
{yaml.safe_dump(front, sort_keys=True).strip()}
---
{MARK}

# A DualFFN audio-text language model

A language model that reads and writes text and audio codes: its attention is shared, its norms and feed-forward are
separate for audio positions (the structure of Higgs Audio V2).

| | |
|---|---|
{_shape_rows(config, parameters, model_type)}
{facts}

No evaluation is part of this card. `audiollm evaluate` makes one.

## Loading

```python
from audiollm.models.dual_ffn import DualFFN

model = DualFFN.from_pretrained("path/of/this/folder")
```

{_in_transformers(model_type)}
"""


def _shape_rows(config: DualFFNConfig, parameters: int, model_type: str) -> str:
    layers = "all" if config.audio_ffn_layers is None else len(config.audio_ffn_layers)
    rows = {
        "Parameters": f"{parameters:,}",
        "Layout": f"`{model_type}`",
        "Layers": f"{config.num_layers}, {layers} with a feed-forward for audio",
        "Width": f"{config.hidden_size}, feed-forward {config.intermediate_size}",
        "Heads": f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} for keys and values",
        "Text vocabulary": f"{config.vocab_size:,}",
        "Audio codes": f"{config.num_codebooks} codebooks of {config.codebook_size - 2}, with begin and end in each",
    }
    return "\n".join(f"| {name} | {text} |" for name, text in rows.items())


def _in_transformers(model_type: str) -> str:
    if model_type == "higgs_audio_v2":
        return (
            "transformers loads it as well, as `HiggsAudioV2ForConditionalGeneration` (with `use_text_head=True` for\n"
            "the text logits)."
        )
    return "After `import audiollm.models.huggingface`, transformers' `AutoModel` loads it as well."
