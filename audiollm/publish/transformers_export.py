"""A DualFFN with its codec as a folder that transformers' own classes load, compared with ours before it is done."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiollm.data.text.tokenizer import SPEAKERS_FILE, TRAINED_FILE
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json
from audiollm.files.json_files import read_json_file
from audiollm.generation.engine.defaults import read_trained
from audiollm.hub_models.needed_files import CODEC_FOLDER
from audiollm.models.generation_config import read_generation
from audiollm.models.layouts import HIGGS, config_of, fits_higgs, transformers_config
from audiollm.models.model_card import ModelCard
from audiollm.models.pretrained import model_folder
from audiollm.models.processor_files import CODEC_KIND
from audiollm.publish.incomplete import codec_place, incomplete_folder
from audiollm.publish.release_files import select_model_files

if TYPE_CHECKING:
    from audiollm.generation.speaking.generator import Generator
    from audiollm.models.decoder import DualFFNConfig
    from audiollm.publish.transformers_check import CheckedExport

OWN_WAY = "serve it with `audiollm serve FOLDER`, which clients of OpenAI's kind speak to"
_VARIANTS = {
    "audio_ffn_layers": "audio feed-forwards in some layers alone",
    "audio_encoder": "an audio encoder",
    "qkv_bias": "biases of queries, keys and values",
    "qk_norm": "normalised heads",
    "sliding_window": "a sliding window",
}
"""Variants of the DualFFN that transformers' class lacks, by the field of the config."""


def export_to_transformers(folder: Path, out: Path, codec: Path | None = None) -> CheckedExport:
    """Write a model, its processor and its codec for transformers' classes, and compare their answers with ours.

    The codec is in `audio_tokenizer/`. A folder that does not pass the comparison is removed.

    Args:
        folder: of a train stage or of a saved model.
        out: a folder that is absent or empty, or an earlier export that was cut short.
        codec: its folder; None: the one beside the model or of its run.

    Raises:
        ConfigError: a variant or a codec that transformers lacks, a folder that is not empty, or answers that differ.
    """
    from audiollm.publish.transformers_check import check_export

    source = open_export_source(folder, codec)
    with incomplete_folder(out):
        write_transformers_folder(source, out)
        return check_export(source.generator, out)


@dataclass(frozen=True)
class ExportSource:
    """A model and a codec that transformers' classes can hold."""

    folder: Path
    codec_path: Path
    generator: Generator


def open_export_source(folder: Path, codec: Path | None) -> ExportSource:
    """Open a model that is to be exported, and its codec.

    Args:
        folder: of a train stage or of a saved model.
        codec: its folder; None: the one beside the model or of its run.

    Raises:
        ConfigError: a variant or a codec that transformers' classes of Higgs Audio V2 lack.
    """
    from audiollm.generation.speaking.generator import Generator

    folder = model_folder(folder)
    check_variant(folder)
    codec_path = _exported_codec(folder, codec)
    generator = Generator.from_pretrained(folder, codec_path)
    ids = transformers_config(generator.model.config, generator.template.tokenizer)
    if ids["audio_delay_token_id"] == -1 or ids["audio_token_id"] == -1:
        raise ConfigError(
            "its vocabulary has no tokens of audio, which transformers' processor writes",
            str(folder),
            OWN_WAY,
        )
    return ExportSource(folder, codec_path, generator)


def check_variant(folder: Path) -> None:
    """See that transformers' class can hold a model, and that its `generate` makes what the model was trained for.

    Raises:
        ConfigError: it cannot; with the reason and the way that works.
    """
    where = str(folder / "config.json")
    settings = read_json_file(folder / "config.json", dict)
    config = config_of(settings, where)
    if not fits_higgs(config):
        reasons = ", ".join(_unsupported(config)) or f"heads that do not share {config.hidden_size} evenly"
        raise ConfigError(
            f"transformers' HiggsAudioV2ForConditionalGeneration has no {reasons}", where, OWN_WAY
        )
    trained = read_trained(folder)
    if trained.phrase_words is not None:
        text = "it says its texts in phrases, each behind its words: transformers' generate has no such order"
        raise ConfigError(text, str(folder / TRAINED_FILE), OWN_WAY)
    if trained.chunk_frames is not None:
        text = (
            "it acts while it listens (simultaneous interpretation): transformers' generate has no such loop"
        )
        raise ConfigError(text, str(folder / TRAINED_FILE), "run it with `audiollm interpret`, or " + OWN_WAY)


def _unsupported(config: DualFFNConfig) -> Iterator[str]:
    for name, text in _VARIANTS.items():
        lacks = not fits_higgs(replace(config, **{name: getattr(config, name)}))
        value = getattr(config, name)
        has_variant = value is not None and value is not False
        if name == "audio_ffn_layers":
            has_variant = value is not None and len(set(value)) != config.num_layers
        if lacks and has_variant:
            yield text


def _exported_codec(folder: Path, codec: Path | None) -> Path:
    """Find the codec, which has to be of transformers' class.

    Raises:
        ConfigError: there is none, or it is of another kind.
    """
    path = codec_place(folder, codec)
    kind = read_json_file(path / "config.json", dict).get("model_type")
    if kind != CODEC_KIND:
        raise ConfigError(
            f"the codec is {kind!r}, and transformers' processor takes {CODEC_KIND!r} alone",
            str(path),
            f"{OWN_WAY}; or train a tokenizer with `preset: higgs`",
        )
    return path


def write_transformers_folder(source: ExportSource, out: Path) -> None:
    """Write the files; config.json names the codec by its place within the folder."""
    from audiollm.data.text.tokenizer import load_text_tokenizer
    from audiollm.models.dual_ffn import DualFFN
    from audiollm.models.hub import save_pretrained

    folder, codec_out = source.folder, out / CODEC_FOLDER
    codec_out.mkdir()
    for file in select_model_files(source.codec_path).files:
        target = codec_out / file.name
        if isinstance(file.source, bytes):
            target.write_bytes(file.source)
        else:
            shutil.copyfile(file.source, target)
    model = DualFFN.from_pretrained(folder, dtype=None)
    card = ModelCard(base=folder.parent.name if folder.name == "model" else folder.name)
    tokenizer = load_text_tokenizer(folder)
    save_pretrained(model, out, tokenizer, card, generation=read_generation(folder), codec=codec_out)
    for name in (SPEAKERS_FILE, TRAINED_FILE):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    settings: dict[str, Any] = read_json_file(out / "config.json", dict)
    settings.pop("audio_tokenizer_id")
    if settings["model_type"] != HIGGS:
        raise AssertionError("check_variant lets through what the layout does not hold")
    write_json(out / "config.json", {**settings, "audio_tokenizer_subdir": CODEC_FOLDER})
