from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class GenerateReqInput:
    input_ids: list[list[int]]
    audio_data: list[list[bytes] | None] | None
    sampling_params: list[dict[str, Any]]
    return_logprob: bool
    return_prompt_token_ids: bool
