from __future__ import annotations

from typing import Any

from sampled_by_transformers import open_received


def initialize_layerwise_reload(model: Any) -> None:
    model.received, model.loads = {}, 0


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    print(f"{len(model.received)} tensors in {model.loads} buckets", flush=True)
    model.model = open_received(model.folder, model.received, model.dtype)
