"""Small ONNX models: files of installed packages, and sessions with one thread."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def package_file(package: str, name: str) -> Path:
    """A data file of an installed package, found without importing the package.

    Raises:
        FileNotFoundError: the package, or the file in it, is not there.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / name).is_file():
            return path
    raise FileNotFoundError(f"{name} of the package {package!r}: install {package.replace('_', '-')} again")


def single_thread_session(path: Path) -> Any:
    """An onnxruntime session on the CPU with one thread: more of them slow these small models down."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
