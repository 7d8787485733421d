"""Who translates: a model of transformers in a folder, a program, or a table of the user's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from audiollm.data.tables.columns import ColumnFinder, is_missing
from audiollm.data.tables.rows import checked_rows
from audiollm.devices import default_device
from audiollm.errors import ConfigError, suggestion
from audiollm.files.atomic import file_digest, folder_digest
from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import fit_inputs, open_model, opening
from audiollm.hub_models.folders import snapshot_name
from audiollm.json_process import JsonProcess, ProcessFailed
from pipelines.compose.rows import SegmentRow
from pipelines.translate.settings import TranslateConfig

TABLE_COLUMNS = {
    "target": ("target", "translation", "tgt_text", "trg_text", "translated_text"),
    "text": ("text", "sentence", "transcript", "src_text", "source"),
    "id": ("id", "key", "uid"),
}
"""Fields of a translation, and the columns that are taken for them, the first that is there."""
MAX_TOKENS_PER_TOKEN, SPARE_TOKENS = 3, 20
"""Most tokens of a translation: so many per token of the source, and so many more."""


class TranslatedText(NamedTuple):
    """A translation, or the reason why there is none."""

    text: str
    problem: str = ""


class Translator(Protocol):
    """Translates segments."""

    facts: dict[str, Any]
    """What is told of it: its name, and the digest of its weights or file."""

    def translate(self, segments: Sequence[SegmentRow]) -> list[TranslatedText]:
        """Translate a batch."""

    def close(self) -> None:
        """End what it runs."""


def open_translator(config: TranslateConfig) -> Translator:
    """Open the translator of the settings.

    Raises:
        ConfigError: the folder holds no translation model, or the table no translations.
    """
    if config.model is not None:
        return FolderTranslator(config.model, config)
    if config.command is not None:
        return CommandTranslator(config.command, config.timeout_s)
    assert config.table is not None  # by the settings
    return TableTranslator(config.table)


class FolderTranslator:
    """A model of transformers with an encoder and a decoder.

    Raises:
        ConfigError: the folder holds none, or its tokenizer lacks a language.
    """

    def __init__(self, folder: Path, config: TranslateConfig) -> None:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        remedy = (
            "give a translation model with model.safetensors and its tokenizer; Marian's needs "
            "`pip install sentencepiece`"
        )
        with opening(folder, "translation model", remedy):
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), **OFFLINE)
            self._model: Any = open_model(AutoModelForSeq2SeqLM, folder, default_device())
        self._prefix, self._beams = config.prefix, config.beams
        if config.source is not None:
            self._language_id(config.source, "source")
            self._tokenizer.src_lang = config.source
        self._first_token = None if config.into is None else self._language_id(config.into, "into")
        name = snapshot_name(folder) or Path(*folder.resolve().parts[-2:]).as_posix()
        self.facts = {
            "model": name,
            "digest": folder_digest(folder)[:12],
            "beams": config.beams,
            "source": config.source,
            "into": config.into,
            "prefix": config.prefix,
        }

    @torch.inference_mode()
    def translate(self, segments: Sequence[SegmentRow]) -> list[TranslatedText]:
        """See `Translator.translate`; what does not end within its limit has a problem in place of a text."""
        texts = [self._prefix + segment.text for segment in segments]
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        inputs.pop("token_type_ids", None)
        limit = SPARE_TOKENS + MAX_TOKENS_PER_TOKEN * inputs["input_ids"].shape[1]
        first = {} if self._first_token is None else {"forced_bos_token_id": self._first_token}
        output = self._model.generate(
            **fit_inputs(self._model, inputs), max_new_tokens=limit, num_beams=self._beams, do_sample=False, **first
        )  # fmt: skip
        ends = self._model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        translations = []
        for tokens in output.tolist():
            text = " ".join(self._tokenizer.decode(tokens, skip_special_tokens=True).split())
            translations.append(
                TranslatedText(text)
                if ends & set(tokens[1:])
                else TranslatedText("", "the translation does not end")
            )
        return translations

    def close(self) -> None:
        """Do nothing: it runs in this process."""

    def _language_id(self, language: str, setting: str) -> int:
        """The token of a language.

        Raises:
            ConfigError: the tokenizer has none.
        """
        vocabulary = self._tokenizer.get_vocab()
        spellings = (language, f"__{language}__", f"<2{language}>")
        for spelling in spellings:
            if spelling in vocabulary:
                return int(vocabulary[spelling])
        languages = [token for token in self._tokenizer.all_special_tokens if len(token.strip("_<>")) > 1]
        raise ConfigError(
            f"the tokenizer knows no language {language!r}",
            f"translate.{setting}",
            suggestion(language, languages),
        )


class CommandTranslator:
    """A program that answers JSON lines. One that dies or hangs costs its batch, not the run."""

    def __init__(self, command: str, timeout_s: float) -> None:
        self._process = JsonProcess(command, timeout_s, "translate.translator")
        self.facts: dict[str, Any] = {"command": command}

    def translate(self, segments: Sequence[SegmentRow]) -> list[TranslatedText]:
        """See `Translator.translate`.

        Raises:
            ConfigError: the program cannot be started.
        """
        translations: list[TranslatedText] = []
        try:
            for line in self._process.ask([{"text": segment.text} for segment in segments]):
                translations.append(_parse_answer(line))
        except ProcessFailed as failure:
            translations = translations if failure.is_aligned else []
            problem = TranslatedText("", f"the translator {failure}")
            translations += [problem] * (len(segments) - len(translations))
        return translations

    def close(self) -> None:
        """End the program."""
        self._process.close()


class TableTranslator:
    """A table of translations, by the id of the segment or by its text.

    Raises:
        ConfigError: it cannot be read, or lacks a column.
    """

    def __init__(self, path: Path) -> None:
        listed = checked_rows(path, [name for names in TABLE_COLUMNS.values() for name in names])
        finder = ColumnFinder(listed.columns, {}, str(path), TABLE_COLUMNS)
        self._by_id: dict[str, str] = {}
        self._by_text: dict[str, str] = {}
        for place, row in listed.rows:
            values = {field: row.get(column) for field, column in finder.of_row(row).items()}
            fields = {field: str(value).strip() for field, value in values.items() if not is_missing(value)}
            target = fields.get("target")
            if not target or not (fields.get("id") or fields.get("text")):
                raise ConfigError(
                    "a row needs `target`, and `text` or `id`",
                    place,
                    "name the columns text,target or id,target",
                )
            if fields.get("id"):
                self._by_id[fields["id"]] = target
            if fields.get("text"):
                self._by_text[_folded(fields["text"])] = target
        self.facts: dict[str, Any] = {"table": path.name, "digest": file_digest(path)[:12]}

    def translate(self, segments: Sequence[SegmentRow]) -> list[TranslatedText]:
        """See `Translator.translate`."""
        texts = [
            self._by_id.get(segment.id) or self._by_text.get(_folded(segment.text)) for segment in segments
        ]
        return [
            TranslatedText(text)
            if text is not None
            else TranslatedText("", "the table has no translation of it")
            for text in texts
        ]

    def close(self) -> None:
        """Do nothing."""


# Private


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def _parse_answer(line: str) -> TranslatedText:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return TranslatedText("", f"the translator answered {line.strip()[:80]!r}, which is no JSON")
    if isinstance(value, dict) and value.get("error"):
        return TranslatedText("", f"the translator: {value['error']}")
    text = value.get("translation") if isinstance(value, dict) else value
    if not isinstance(text, str):
        return TranslatedText("", f"the translator answered {line.strip()[:80]!r}, which has no translation")
    return TranslatedText(" ".join(text.split()))
