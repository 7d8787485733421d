from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def set_current_vllm_config(vllm_config: Any) -> Iterator[None]:
    assert vllm_config.model_config
    yield
