"""`generation_config.json` of a model's folder: how its authors draw codes from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from audiollm.errors import ConfigError
from audiollm.files.json_files import read_json_file
from audiollm.models.layouts import BOSON

FILE_NAME = "generation_config.json"
REPETITION = {"ras_win_len": 7, "ras_win_max_num_repeat": 2}
"""Repetition-aware sampling, as published for Higgs Audio V2. Boson's own files leave it to their code."""

_INTEGERS = {"top_k": 0, "ras_win_len": 0, "ras_win_max_num_repeat": 1}
"""The least that each may be."""
_SHARES = ("temperature", "top_p")


def read_generation(folder: Path) -> dict[str, Any]:
    """Read `temperature`, `top_k`, `top_p`, `ras_win_len` and `ras_win_max_num_repeat` from generation_config.json.

    Nothing else of it is read; what it leaves out or sets to null is left out here, too. `do_sample: false` is a
    temperature of 0.

    Raises:
        ConfigError: it is damaged, or one of them cannot be.
    """
    path, settings = folder / FILE_NAME, folder / "config.json"
    boson = settings.exists() and read_json_file(settings, dict).get("model_type") == BOSON
    sampling: dict[str, Any] = dict(REPETITION) if boson else {}
    if not path.exists():
        return sampling
    data = read_json_file(path, dict)
    for name in (*_SHARES, *_INTEGERS):
        value = data.get(name)
        if value is None:
            continue
        if not _is_valid_setting(name, value):
            raise ConfigError(
                f"{name}: {value!r} is not a valid sampling setting",
                str(path),
                "correct it, or remove it from the file",
            )
        sampling[name] = value
    if data.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return sampling


def _is_valid_setting(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    if name in _INTEGERS:
        return isinstance(value, int) and value >= _INTEGERS[name]
    return value >= 0 if name == "temperature" else 0 < value <= 1
