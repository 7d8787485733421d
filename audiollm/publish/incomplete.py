"""The folder of an export until it has been compared, and the codec that it is of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from audiollm.codec import default_codec_folder
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_text
from audiollm.files.json_files import config_folder, read_json_file

INCOMPLETE = "INCOMPLETE.txt"
"""Stands in a folder until the export has been compared."""


REMEDY = "name the codec that the model was trained with: --codec FOLDER"


@contextmanager
def incomplete_folder(out: Path) -> Iterator[None]:
    """Fill a folder, which is removed where the block fails.

    Raises:
        ConfigError: the folder holds something else than an export that was cut short.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / INCOMPLETE).exists())):
        raise ConfigError(f"{out} exists and is not empty", "-o", "give another folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        write_text(out / INCOMPLETE, "This export has not been compared with the model yet.\n")
        yield
        (out / INCOMPLETE).unlink()
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def codec_place(folder: Path, codec: Path | None) -> Path:
    """The folder of a model's codec: the one named, the one that its config names, or the one beside it or of its run.

    Raises:
        ConfigError: there is none.
    """
    place = codec
    if place is None:
        named = read_json_file(folder / "config.json", dict).get("audio_tokenizer_id")
        is_there = isinstance(named, str) and Path(named).is_dir()
        place = Path(named) if is_there and isinstance(named, str) else default_codec_folder(folder)
        if not place.exists():
            raise ConfigError(
                "there is no codec beside the model, nor a train_tokenizer in its run", str(folder), REMEDY
            )
    return config_folder(place, "codec", REMEDY)
