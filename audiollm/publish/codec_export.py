"""A codec for onnxruntime: the graphs of its two halves, compared with ours before it is done."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from audiollm.codec import Codec, codec_catalog, load_codec
from audiollm.errors import ConfigError
from audiollm.files.json_files import config_folder, read_json_file
from audiollm.models.pretrained import model_folder
from audiollm.publish.incomplete import codec_place, incomplete_folder

GROUP = "audiollm.onnx_exports"
"""Entry points that write a codec of a `model_type` into a folder, compare it, and return the comparison."""


def export_to_onnx(folder: Path, out: Path, codec: Path | None = None) -> str:
    """Write a codec for onnxruntime and compare it.

    Args:
        folder: of a codec, or of a model that speaks with one.
        out: a folder that is absent or empty, or an earlier export that was cut short.
        codec: its folder where `folder` is a model's; None: the one beside the model or of its run.

    Returns:
        what the comparison gave.

    Raises:
        ConfigError: a codec without such an export, a folder that is not empty, or codes or sound that differ.
    """
    place = config_folder(folder, "codec or model", "give the folder of a saved codec or model")
    kind = read_json_file(place / "config.json", dict).get("model_type")
    if kind not in codec_catalog().entries:
        place = codec_place(model_folder(folder), codec)
        kind = read_json_file(place / "config.json", dict).get("model_type")
    exports = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in exports:
        raise ConfigError(
            f"a codec of the kind {kind!r} has no export to ONNX",
            str(place),
            f"these have: {', '.join(sorted(exports))} (`train_tokenizer` with `preset: native`)"
            if exports
            else "install the package again: pip install -e . (its entry points are of an earlier version)",
        )
    write: Callable[[Codec, Path], object] = exports[kind].load()
    with incomplete_folder(out):
        return str(write(load_codec(place), out))
