"""Models that were trained side by side from the same one, merged into one: tensor by tensor, from file to file.

Shapes: M models.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from audiollm.errors import ConfigError
from audiollm.files.json_files import read_json_file
from audiollm.models.frozen.stored import load_offline
from audiollm.models.pretrained import StoredWeights, model_folder, save_shards
from audiollm.train.settings import MergeMethod

SHARD_SIZE = "4GB"
VOCABULARY = "tokenizer.json"
Advance = Callable[[], None]


def merge_models(
    base: Path,
    trained: Sequence[Path],
    weights: Sequence[float],
    out: Path,
    method: MergeMethod = "ties",
    density: float = 0.5,
    seed: int = 0,
    on_tensor: Advance = lambda: None,
) -> int:
    """Add to a model what others learned that were trained from it: `base + merged(trained - base)`.

    `linear` is the weighted sum of the differences (task arithmetic, arXiv 2212.04089); `ties` keeps the largest of
    them, elects a sign for each weight, and takes the mean of those that agree (arXiv 2306.01708); `dare_linear` drops
    some at random, and scales up the rest (arXiv 2311.03099). The formulas are PEFT's. Differences are computed in
    float32, results stored as in `base`; tensors of whole numbers are those of `base`.

    Args:
        base, trained: folders of models in Hugging Face layout, or of stages around them.
        weights: factor of each trained model's difference.
        out: receives the merged weights, and the other files of the first trained model.
        density: share of the differences that `ties` and `dare_linear` keep.
        on_tensor: called when a tensor is merged.

    Returns:
        The number of tensors that differ from those of `base`.

    Raises:
        ConfigError: a folder without a model, or models of other classes, shapes or vocabularies.
    """
    folders = [model_folder(base), *map(model_folder, trained)]
    stored = [StoredWeights(folder) for folder in folders]
    _check_mergeable(folders, stored)
    generator = torch.Generator().manual_seed(seed)
    weight_M = torch.tensor(list(weights), dtype=torch.float32)
    changed = 0
    merged: dict[str, Tensor] = {}
    for name in stored[0].names:
        start = stored[0].read(name)
        deltas = []
        if start.is_floating_point():
            deltas = [model_weights.read(name).float() - start.float() for model_weights in stored[1:]]
        if any(bool(delta.any()) for delta in deltas):
            torch.manual_seed(
                int(torch.randint(2**31, (1,), generator=generator))
            )  # `dare_linear` draws from it
            merged[name] = (start.float() + _merge_deltas(deltas, weight_M, method, density)).to(start.dtype)
            changed += 1
        else:
            merged[name] = start
        on_tensor()
    save_shards(out, merged, SHARD_SIZE)
    for path in _beside_weights(folders[1]):
        shutil.copy2(path, out / path.name)
    return changed


def _merge_deltas(deltas: Sequence[Tensor], weight_M: Tensor, method: MergeMethod, density: float) -> Tensor:
    load_offline()
    from peft.utils.merge_utils import dare_linear, task_arithmetic, ties

    every = list(deltas)
    if method == "linear":
        return task_arithmetic(every, weight_M)
    if method == "ties":
        return ties(every, weight_M, density)
    return dare_linear(every, weight_M, density)


def _check_mergeable(folders: Sequence[Path], stored: Sequence[StoredWeights]) -> None:
    """Raises: ConfigError: the models are not of one shape, or have other words."""
    names, words = stored[0].names, _read_vocabulary_words(folders[0])
    for folder, weights in zip(folders[1:], stored[1:], strict=True):
        if odd := sorted(set(names).symmetric_difference(weights.names)):
            raise ConfigError(
                f"{len(odd)} tensors are in one model alone: {', '.join(odd[:3])}",
                str(folder),
                f"merge models that were trained from {folders[0]}",
            )
        for name in names:
            if weights.shape(name) != stored[0].shape(name):
                raise ConfigError(
                    f"{name}: its shape is {weights.shape(name)}, in the base {stored[0].shape(name)}",
                    str(folder),
                    f"merge models that were trained from {folders[0]}",
                )
        theirs = _read_vocabulary_words(folder)
        if words is not None and theirs is not None and words != theirs:
            raise ConfigError(
                "its vocabulary is not the base's", str(folder / VOCABULARY), "take other models"
            )


def _read_vocabulary_words(folder: Path) -> object:
    """The words of a model, as far as its folder tells."""
    path = folder / VOCABULARY
    if not path.exists():
        return None
    data: Mapping[str, object] = read_json_file(path, dict)
    return data.get("model"), data.get("added_tokens")


def _beside_weights(folder: Path) -> Iterator[Path]:
    """All files of a model's folder but its weights."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            yield path
