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
        self.read(folder)

    def read(self, folder: str) -> None:
        self.model = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(
            folder, dtype=self.dtype
        ).eval()

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
        mark = os.environ.get("STAND_IN_DIES_BESIDE")
        if (
            mark is not None
            and len(list(Path(mark).glob("*.jsonl"))) == 3
            and not Path(mark, "died").exists()
        ):
            Path(mark, "died").touch()
            print("out of memory, says the stand-in", flush=True)
            os._exit(9)
        return [self._answer(*pair) for pair in zip(prompts, sampling_params, strict=True)]

    @torch.inference_mode()
    def _answer(self, prompt: dict[str, Any], params: SamplingParams) -> Any:
        assert params.ignore_eos and (params.top_p, params.top_k) == (1.0, 0)
        inputs = self._inputs(prompt)
        read = inputs["input_ids"][0].tolist()
        if "STAND_IN_MISREADS" in os.environ:
            read = read[:-1]
        generator = torch.Generator().manual_seed(params.seed)
        ids: list[int] = []
        logprobs = []
        while len(ids) < params.max_tokens and (not ids or ids[-1] not in params.stop_token_ids):
            logits = self._worker.get_model().model(**inputs).logits[0, -1].float()
            for token_id, bias in (params.logit_bias or {}).items():
                logits[token_id] += bias
            if params.temperature == 0:
                drawn = int(logits.argmax())
            else:
                logprob = (logits / params.temperature).log_softmax(0)
                drawn = int(torch.multinomial(logprob.exp(), 1, generator=generator))
                logprobs.append({drawn: SimpleNamespace(logprob=float(logprob[drawn]))})
            ids.append(drawn)
            inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([[drawn]])], dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        completion = SimpleNamespace(token_ids=ids, logprobs=None if params.logprobs is None else logprobs)
        return SimpleNamespace(prompt_token_ids=read, outputs=[completion])

    def _inputs(self, prompt: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The processor reads the text anew: placeholders are single ones in the prompt."""
        text = self._processor.tokenizer.decode(prompt["prompt_token_ids"], skip_special_tokens=False)
        sounds = prompt.get("multi_modal_data", {}).get("audio", [])
        for sound, rate in sounds:
            assert sound.dtype == np.float32 and rate == self._processor.feature_extractor.sampling_rate
        audio = {"audio": [sound for sound, _ in sounds], "sampling_rate": sounds[0][1]} if sounds else {}
        return dict(self._processor(text=text, return_tensors="pt", **audio))
