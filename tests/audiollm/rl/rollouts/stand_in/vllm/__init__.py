"""What of vLLM's Python surface our side calls, over transformers on the CPU: it stands in for vLLM in its process.

It is strict: an argument that our side does not give, or gives beyond these, is an error. Weights are taken as a folder
of published files that transformers loads. Variables of the environment make it fail.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from sampled_by_transformers import Draw, die_where_asked, drawn_tokens, inputs_of, open_served, read_ids


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int]
    logit_bias: dict[int, float] | None
    logprobs: int | None
    detokenize: bool


class Served:
    """The model of a worker."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.received: dict[str, torch.Tensor] = {}
        self.loads = 0
        self.model = open_served(folder, dtype)

    def load_weights(self, weights: Any) -> set[str]:
        self.loads += 1
        for name, tensor in weights:
            assert name not in self.received, f"{name} came twice"
            self.received[name] = tensor
        return set(self.received)


class Worker:
    def __init__(self, folder: str, dtype: str) -> None:
        self.device = torch.device("cpu")
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
        self._served = Served(folder, getattr(torch, dtype))

    def get_model(self) -> Served:
        return self._served


class LLM:
    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        tensor_parallel_size: int,
        gpu_memory_utilization: float,
        max_model_len: int | None,
        load_format: str,
        trust_remote_code: bool,
        generation_config: str,
        logprobs_mode: str,
        worker_extension_cls: str,
        enforce_eager: bool = False,
    ) -> None:
        assert (load_format, trust_remote_code, generation_config) == ("safetensors", False, "vllm")
        assert (
            logprobs_mode == "processed_logprobs" and 0 < gpu_memory_utilization <= 1 <= tensor_parallel_size
        )
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        if not Path(model).is_dir():
            raise ValueError("no such model")
        module, _, name = worker_extension_cls.rpartition(".")
        extension = getattr(import_module(module), name)
        assert not {name for name in vars(extension) if name in dir(Worker) and not name.startswith("__")}
        self._worker: Any = type("ExtendedWorker", (Worker, extension), {})(model, dtype)
        self._processor = transformers.AutoProcessor.from_pretrained(model)
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len or 4096),
            reset_encoder_cache=lambda: self._emptied.append("encoder"),
        )
        self._emptied: list[str] = []
        self._updated = False

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        self._updated |= method == "end_published_weights"
        return [getattr(self._worker, method)(*args)]

    def reset_prefix_cache(self) -> bool:
        self._emptied.append("prefix")
        return True

    def generate(
        self, prompts: list[Any], sampling_params: list[SamplingParams], *, use_tqdm: bool
    ) -> list[Any]:
        if self._updated:
            assert self._emptied == ["prefix", "encoder"]
            self._emptied, self._updated = [], False
        die_where_asked()
        return [self._answer(*pair) for pair in zip(prompts, sampling_params, strict=True)]

    def _answer(self, prompt: dict[str, Any], params: SamplingParams) -> Any:
        assert params.ignore_eos and (params.top_p, params.top_k) == (1.0, 0)
        sounds = prompt.get("multi_modal_data", {}).get("audio", [])
        for sound, rate in sounds:
            assert sound.dtype == np.float32 and rate == self._processor.feature_extractor.sampling_rate
        inputs = inputs_of(self._processor, prompt["prompt_token_ids"], [sound for sound, _ in sounds])
        draw = Draw(
            params.temperature, params.max_tokens, params.stop_token_ids, params.logit_bias or {}, params.seed
        )
        ids, logprobs = drawn_tokens(self._worker.get_model().model, inputs, draw)
        positions = [
            {token_id: SimpleNamespace(logprob=logprob)}
            for token_id, logprob in zip(ids, logprobs, strict=True)
        ]
        completion = SimpleNamespace(token_ids=ids, logprobs=None if params.logprobs is None else positions)
        return SimpleNamespace(prompt_token_ids=read_ids(inputs), outputs=[completion])
