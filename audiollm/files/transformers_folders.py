"""Models of transformers in local folders: the one place that opens them, and that decides the dtype of their weights.

transformers 5 keeps weights in the dtype in which they are stored, while features of sound and pictures are made in
float32: a model that is published in float16, such as whisper-large-v3, would refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiollm.errors import ConfigError
from audiollm.files.json_files import OFFLINE
from audiollm.files.tensors import check_tensors

if TYPE_CHECKING:
    import torch

REMEDY = "give a folder that transformers' from_pretrained reads, with safetensors weights"
STORED = "auto"
"""The dtype in which the weights are stored: language models keep it, as twice their size may not fit into memory."""
_PRETRAINING_ONLY = ("masked_spec_embed",)
"""Ends of the names of weights that only pre-training uses: some published folders lack them."""
_LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, AttributeError)


@contextmanager
def opening(folder: Path, kind: str, remedy: str = REMEDY, where: str = "") -> Iterator[None]:
    """Report whatever transformers raises on a folder as an error that names it.

    Args:
        kind: description of the model that is expected there, without an article.
        where: the setting or the option that names the folder; empty: the folder itself.

    Raises:
        ConfigError: the folder is missing, or the block failed to read it.
    """
    try:
        if not folder.is_dir():  # transformers would look the name up on the hub
            raise OSError("no such folder")
        yield
    except _LOADING_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"no {kind} loads from {folder}: {reason}", where or str(folder), remedy) from error


def open_model(
    model_class: Any,
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> Any:
    """Open a model in eval mode on a device, whether it is stored in float32, float16 or bfloat16; use `opening` around
    it, and `fit_inputs` for its inputs.

    Args:
        model_class: a class of transformers with `from_pretrained`.
        dtype: dtype of the weights, or `STORED`; None: `working_dtype`.
        options: other arguments of `from_pretrained`.

    Raises:
        ConfigError: the folder lacks some of the weights, which transformers would draw at random.
        DamagedFile: a file of weights is cut short.
    """
    from transformers.utils.logging import disable_progress_bar

    from audiollm.products import accelerate_products

    disable_progress_bar()  # a stage opens several models, and shows its own progress
    check_tensors(folder)
    model, info = model_class.from_pretrained(
        str(folder),
        **options,
        **OFFLINE,
        use_safetensors=True,
        dtype=working_dtype(device) if dtype is None else dtype,
        output_loading_info=True,
    )
    absent = [*info["missing_keys"], *info.get("mismatched_keys", ())]
    missing = sorted(str(name) for name in absent if not str(name).endswith(_PRETRAINING_ONLY))
    if missing:
        raise ConfigError(
            f"{len(missing)} weights are missing or of another shape, such as {missing[0]}",
            str(folder),
            "download or copy the whole model again; config.json and the weights must be of one model",
        )
    accelerate_products(model)
    return model.eval().to(device)


def model_from_weights(
    model_class: Any, config: Any, weights: dict[str, torch.Tensor], where: str, absent: Sequence[str] = ()
) -> Any:
    """Make a model of weights by the names that they have on disk, which are not always those of the class; float32.

    Args:
        absent: beginnings of the names of parts that the weights lack, and that are not used.

    Raises:
        ConfigError: other weights are missing, or some have no place in the model.
    """
    import torch
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list what is absent
    try:
        model, info = model_class.from_pretrained(
            None, **OFFLINE, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True
        )
    finally:
        logging.set_verbosity(level)
    lost = sorted(str(name) for name in info["missing_keys"] if not str(name).startswith(tuple(absent)))
    lost += sorted(map(str, info["unexpected_keys"]))
    if lost:
        raise ConfigError(
            f"{len(lost)} weights do not fit the config, such as {lost[0]}",
            where,
            "download the whole model again",
        )
    return model


def working_dtype(device: torch.device | str) -> torch.dtype | str:
    """The dtype in which a model computes: float32 on a CPU, where half precision is slow or not exact; on a GPU the
    dtype in which the weights are stored."""
    import torch

    return torch.float32 if torch.device(device).type == "cpu" else STORED


def fit_inputs(model: Any, inputs: Any) -> dict[str, Any]:
    """Inputs of a processor on the model's device, floating-point ones in the dtype of its weights."""
    import torch

    fitted = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            value = value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
        fitted[name] = value
    return fitted
