"""Settings of the stage `translate`. Loads no torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from audiollm.recipe.stages import InputModel, InputPath, StageConfig


class TranslateConfig(StageConfig):
    """Settings of `translate`. One of `model`, `command` and `translations` says who translates."""

    segments: list[InputPath] = Field(min_length=1)
    """`segments.jsonl` of a stage that makes segments, or of several; word times are those of the step `alignment` of
    `annotate`."""
    model: InputModel | None = None
    """A translation model of transformers (Marian, NLLB, M2M-100, T5, ...): encoder and decoder, safetensors."""
    command: str | None = None
    """A program that answers JSON lines `{"text": ...}` with a translation each: a string, or `{"translation": ...}` or
    `{"error": ...}`; an empty line ends a batch. In any environment."""
    translations: InputPath | None = None
    """A table of translations of your own: columns `target`, and `text` (the source) or `id` (of the segment)."""
    source: str | None = None
    """Language of the source as the model's tokenizer names it (`eng_Latn`, `en`), for models of many languages."""
    into: str | None = None
    """Language of the translation, likewise (`por_Latn`, `pt`); Marian's models of one pair need neither."""
    prefix: str = ""
    """Text before each source, for models that are asked in words (`translate English to German: `, `<2pt> `)."""
    beams: int = Field(4, ge=1)
    """Beams of the search."""
    batch_size: int = Field(16, ge=1)
    """Texts per batch."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for the next answer of `command`."""

    @field_validator("segments", mode="before")
    @classmethod
    def _one_or_several(cls, segments: Any) -> Any:
        return segments if isinstance(segments, list) else [segments]

    @model_validator(mode="after")
    def _check_translator(self) -> TranslateConfig:
        translators = [
            name for name in ("model", "command", "translations") if getattr(self, name) is not None
        ]
        if len(translators) != 1:
            given = " and ".join(translators) or "none is set"
            raise ValueError(f"translate takes one of model, command and translations: {given}")
        for name in ("source", "into", "prefix", "beams"):
            if self.model is None and name in self.model_fields_set:
                raise ValueError(f"{name} is of translate.model: leave it out")
        if self.command is None and "timeout_s" in self.model_fields_set:
            raise ValueError("timeout_s is of translate.command: leave it out")
        return self
