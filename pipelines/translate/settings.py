"""Settings of the stage `translate`. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from audiollm.hub_models.folders import hub_folder
from audiollm.recipe.stages import InputPath, StageConfig, check_input

COMMAND_PREFIX = "command:"
TABLES = (".csv", ".tsv", ".json", ".jsonl")


def _check_translator(text: str, info: ValidationInfo) -> str:
    return text if text.startswith(COMMAND_PREFIX) else str(check_input(Path(hub_folder(text)), info))


class TranslateConfig(StageConfig):
    """Settings of `translate`."""

    segments: list[InputPath] = Field(min_length=1)
    """`segments.jsonl` of a stage that makes segments, or of several; word times are those of the step `alignment` of
    `annotate`."""
    translator: Annotated[str, BeforeValidator(str), AfterValidator(_check_translator)]
    """A translation model of transformers (Marian, NLLB, M2M-100, T5, ...) by its folder or name on the hub; a table of
    your own (.csv, .tsv, .json, .jsonl) with `target`, and `text` (the source) or `id` (of the segment); or
    `command:PROGRAM`, which answers JSON lines `{"text": ...}` with a translation each: a string,
    `{"translation": ...}` or `{"error": ...}`."""
    source: str | None = None
    """Language of the source as a model's tokenizer names it (`eng_Latn`, `en`), for models of many languages."""
    into: str | None = None
    """Language of the translation, likewise (`por_Latn`, `pt`); Marian's models of one pair need neither."""
    prefix: str = ""
    """Text before each source, for models that are asked in words (`translate English to German: `, `<2pt> `)."""
    beams: int = Field(4, ge=1)
    """Beams of a model's search."""
    batch_size: int = Field(16, ge=1)
    """Texts per batch."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for the next answer of a program."""

    @property
    def command(self) -> str | None:
        """The program, where one translates."""
        is_command = self.translator.startswith(COMMAND_PREFIX)
        return self.translator.removeprefix(COMMAND_PREFIX) if is_command else None

    @property
    def table(self) -> Path | None:
        """The table, where there is one."""
        is_table = self.command is None and self.translator.lower().endswith(TABLES)
        return Path(self.translator) if is_table else None

    @property
    def model(self) -> Path | None:
        """The model's folder, where a model translates."""
        return Path(self.translator) if self.command is None and self.table is None else None

    @field_validator("segments", mode="before")
    @classmethod
    def _one_or_several(cls, segments: Any) -> Any:
        return segments if isinstance(segments, list) else [segments]

    @model_validator(mode="after")
    def _check_translator_settings(self) -> TranslateConfig:
        for name in ("source", "into", "prefix", "beams"):
            if self.model is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is of a translation model, and {self.translator} is none: leave it out"
                )
        if self.command is None and self.timeout_s != type(self).model_fields["timeout_s"].default:
            raise ValueError("timeout_s is of `command:PROGRAM`: leave it out")
        return self
