"""What of SGLang's Python surface our side calls, over transformers on the CPU: it stands in for SGLang in its process.

It is strict, as that for vLLM is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import soundfile
import torch
import transformers
from sampled_by_transformers import (
    Draw,
    die_where_asked,
    drawn_tokens,
    inputs_of,
    open_received,
    open_served,
    read_ids,
)

from sglang.srt.managers.io_struct import GenerateReqInput


class Engine:
    def __init__(
        self,
        *,
        model_path: str,
        dtype: str,
        tp_size: int,
        mem_fraction_static: float,
        context_length: int | None,
        load_format: str,
        trust_remote_code: bool,
        sampling_defaults: str,
        random_seed: int,
        enable_deterministic_inference: bool,
    ) -> None:
        assert (load_format, trust_remote_code, sampling_defaults) == ("safetensors", False, "openai")
        assert 0 < mem_fraction_static <= 1 <= tp_size and random_seed == 0
        assert os.environ["HF_HUB_OFFLINE"] == "1" and os.environ["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
        if not Path(model_path).is_dir():
            raise ValueError("no such model")
        self._seeded = enable_deterministic_inference
        self._folder, self._dtype = model_path, getattr(torch, dtype)
        self._model = open_served(model_path, self._dtype)
        self._processor = transformers.AutoProcessor.from_pretrained(model_path)
        self._received: dict[str, torch.Tensor] | None = None
        self._has_old_caches = False
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = SimpleNamespace(
            context_len=context_length or 4096, generate_request=self._generate_request
        )

    def begin_weight_update(self) -> tuple[bool, str]:
        if self._received is not None:
            return False, "a weight-update session is already open"
        self._received = {}
        return True, "Success"

    def update_weights_from_tensor(
        self, named_tensors: Sequence[tuple[str, torch.Tensor]], flush_cache: bool
    ) -> tuple[bool, str]:
        assert self._received is not None and not flush_cache
        for name, tensor in named_tensors:
            if name in self._received:
                return False, f"{name} came twice"
            self._received[name] = tensor
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        assert self._received is not None
        self._model = open_received(self._folder, self._received, self._dtype)
        self._received, self._has_old_caches = None, True
        return True, "Success"

    def flush_cache(self) -> Any:
        self._has_old_caches = False
        return SimpleNamespace(success=True)

    async def _generate_request(self, request: GenerateReqInput, http_request: None) -> AsyncIterator[Any]:
        assert not self._has_old_caches and request.return_logprob and request.return_prompt_token_ids
        die_where_asked()
        sounds = request.audio_data or [None] * len(request.input_ids)
        yield [
            self._answer(*row) for row in zip(request.input_ids, sounds, request.sampling_params, strict=True)
        ]

    def _answer(self, ids: list[int], files: list[bytes] | None, settings: dict[str, Any]) -> dict[str, Any]:
        assert (settings["top_p"], settings["top_k"]) == (1.0, -1)
        sounds = []
        for file in files or []:
            samples_N, rate = soundfile.read(BytesIO(file), dtype="float32")
            assert rate == self._processor.feature_extractor.sampling_rate
            sounds.append(samples_N)
        inputs = inputs_of(self._processor, ids, sounds)
        ends = {*settings["stop_token_ids"], int(os.environ.get("STAND_IN_ENDS_AT", -1))}
        bias = {int(token_id): value for token_id, value in (settings["logit_bias"] or {}).items()}
        seed = settings["sampling_seed"] if self._seeded else 42
        draw = Draw(settings["temperature"], settings["max_new_tokens"], ends, bias, seed)
        token_ids, logprobs = drawn_tokens(self._model, inputs, draw)
        ended = {"type": "stop", "matched": token_ids[-1]} if token_ids[-1] in ends else {"type": "length"}
        pairs = [(logprob, token_id, None) for logprob, token_id in zip(logprobs, token_ids, strict=True)]
        meta_info = {"finish_reason": ended, "output_token_logprobs": pairs}
        return {"prompt_token_ids": read_ids(inputs), "meta_info": meta_info}
