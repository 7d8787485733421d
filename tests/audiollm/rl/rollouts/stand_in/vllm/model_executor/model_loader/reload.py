from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file


def initialize_layerwise_reload(model: Any) -> None:
    model.received, model.loads = {}, 0


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    """Load what came as a folder of published files; every tensor of the folder that was opened must be there."""
    stored = Path(model.folder) / "model.safetensors"
    with safe_open(str(stored), "pt") as file:
        assert set(file.keys()) == set(model.received), set(file.keys()) ^ set(model.received)
    assert {tensor.dtype for tensor in model.received.values()} == {model.dtype}
    print(f"{len(model.received)} tensors in {model.loads} buckets", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(model.folder) / "config.json", folder)
        save_file(model.received, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model.read(folder)
