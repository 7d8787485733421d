"""Checks our calls against an installed vLLM, with its Python, on a machine without a GPU. Imports no audiollm.

    PYTHON real_vllm.py SERVER_SIDE FOLDER

The folder has `start` and `trained`, models in published files, and `served.json`: the arguments of `vllm.LLM`, and
prompts as they are sent, with the tokens and features of training. Models are loaded and not run: a build for GPUs
takes the CPU for it, and has no kernels there.
"""

# ruff: noqa: E402

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

_version = importlib.metadata.version
importlib.metadata.version = lambda name: _version(name) + "+cpu" * (name == "vllm")
_kernels = torch.library.Library("_C", "FRAGMENT")
_kernels.define("init_cpu_memory_env(int[] nodes) -> ()")
_kernels.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
sys.path.insert(0, sys.argv[1])

import vllm_server
import vllm_weights
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

TENSORS_PER_BUCKET = 7


def check_calls() -> None:
    """Every argument that we give is one that vLLM takes."""
    settings = {"temperature": 0.7, "max_tokens": 5, "ends": [1, 2], "never_drawn": [3]}
    params = vllm_server._sampling_params(2**55, settings)
    assert (params.seed, params.logprobs, params.logit_bias) == (2**55, 0, {3: -float("inf")})
    inspect.signature(LLM.generate).bind(None, [], [params], use_tqdm=False)
    inspect.signature(LLM.collective_rpc).bind(None, "load_published_bucket", args=("path", []))
    inspect.signature(LLM.reset_prefix_cache).bind(None)
    inspect.signature(LLMEngine.reset_encoder_cache).bind(None)
    ours = [name for name in dir(vllm_weights.WeightReceiver) if not name.startswith("__")]
    assert not [name for name in ours if hasattr(Worker, name)]  # vLLM refuses an extension otherwise


def check_prompts(config: Any, prompts: list[dict[str, Any]]) -> None:
    """vLLM's processor reads our prompts as the tokens and features of training."""
    processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    for prompt in prompts:
        recordings = [np.array(samples, np.float32) for samples in prompt["recordings"]]
        data = {"audio": [(samples, prompt["sample_rate"]) for samples in recordings]}
        items = processor.info.parse_mm_data(data)
        read = processor.apply(ProcessorInputs(prompt["token_ids"], items), TimingContext(enabled=False))
        assert list(read["prompt_token_ids"]) == prompt["read_ids"], prompt["id"]
        for ours, item in zip(prompt["features"], read["mm_kwargs"]["audio"], strict=True):
            data = item.get_data()
            key = next(key for key in ("input_features", "input_audio_features") if key in data)
            theirs = data[key].reshape(-1, data[key].shape[-1]).float()  # of mel bins and frames
            frames = min(theirs.shape[1], len(ours[0]))
            assert frames >= 100, "of recordings of a second and more"
            torch.testing.assert_close(theirs[:, :frames], torch.tensor(ours)[:, :frames], rtol=0, atol=1e-4)


def check_weights(config: Any, trained: Any, published: dict[str, torch.Tensor]) -> None:
    """Pushed weights make of the start what vLLM loads from the trained model's folder, where it was in memory."""
    wrapper = WorkerWrapperBase(0)
    place = {"local_rank": 0, "rank": 0, "is_driver_worker": True}
    address = f"tcp://127.0.0.1:{free_port()}"
    wrapper.init_worker([{"vllm_config": config, "distributed_init_method": address, **place}])
    wrapper.init_device()
    worker: Any = wrapper.worker
    worker.load_model()
    model = worker.get_model()
    start = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()}
    worker.begin_published_weights()
    names = list(published)
    for first in range(0, len(names), TENSORS_PER_BUCKET):
        push(worker, {name: published[name] for name in names[first : first + TENSORS_PER_BUCKET]})
    worker.end_published_weights()
    with set_current_vllm_config(trained):
        loader = get_model_loader(trained.load_config)
        expected = loader.load_model(vllm_config=trained, model_config=trained.model_config)
    pushed = model.state_dict()
    assert pushed.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(pushed[name], tensor), name
    for name, tensor in model.named_parameters():
        assert tensor.data_ptr() == start[name][0] and not torch.equal(tensor, start[name][1]), name
    print(f"{type(model).__name__}: {len(published)} tensors pushed, {len(start)} parameters")


def push(worker: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Send a bucket, and write into its memory when it is loaded."""
    entries, data = [], b""
    for name, tensor in tensors.items():
        entries.append((name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), len(data)))
        part = tensor.contiguous().numpy().tobytes()
        data += part + b"\0" * (-len(part) % 64)
    memory = os.memfd_create("bucket")
    os.write(memory, data)
    worker.load_published_bucket(f"/proc/{os.getpid()}/fd/{memory}", entries)
    os.pwrite(memory, b"\xff" * len(data), 0)
    os.close(memory)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(folder: Path) -> None:
    """Check a model; a process has one worker."""
    served = json.loads((folder / "served.json").read_text())
    small = {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}
    start, trained = (
        EngineArgs(**{**served["arguments"], **small, "model": str(folder / name)}).create_engine_config()
        for name in ("start", "trained")
    )
    check_calls()
    check_prompts(start, served["prompts"])
    check_weights(start, trained, load_file(folder / "trained" / "model.safetensors"))
    print("checked")


if __name__ == "__main__":
    main(Path(sys.argv[2]))
