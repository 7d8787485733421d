"""The folder of a DualFFN that was trained on from another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from audiollm.data.text.tokenizer import SPEAKERS_FILE, TRAINED_FILE
from audiollm.families.dual_ffn.start import start_generation
from audiollm.files.atomic import read_json, write_json
from audiollm.hub_models.needed_files import CODEC_FOLDER
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import read_config, save_pretrained
from audiollm.models.model_card import ModelCard
from audiollm.models.pretrained import model_folder


def save_continued(model: DualFFN, tokenizer: Tokenizer, start: Path, folder: Path, card: ModelCard) -> None:
    """Write a model that was trained on from the one in `start` to `folder/model`, in Hugging Face layout.

    What the folder of `start` says about sampling, speakers, codec and training is said of it as well.

    Args:
        start: a model's folder, or the stage's folder around its `model`.

    Raises:
        ConfigError: settings in `start` that cannot be read.
    """
    start, target = model_folder(start), folder / "model"
    save_pretrained(
        model,
        target,
        tokenizer,
        card,
        generation=start_generation(start),
        codec=first_folder(codec_of(start)),
    )
    for name in (SPEAKERS_FILE, TRAINED_FILE):
        if (start / name).exists():
            write_json(target / name, read_json(start / name))


def codec_of(start: Path) -> list[str | None]:
    """The paths of a model's codec: that in its config.json, if any, and that beside a published model."""
    folder = model_folder(start)
    return [read_config(folder).get("audio_tokenizer_id"), str(folder / CODEC_FOLDER)]


def first_folder(candidates: Sequence[str | None]) -> Path | None:
    return next((Path(folder) for folder in candidates if folder and Path(folder).is_dir()), None)
