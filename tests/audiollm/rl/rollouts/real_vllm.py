"""Checks our calls against an installed vLLM, with its Python, on a machine without a GPU. Imports no audiollm.

    PYTHON real_vllm.py VLLM_SIDE FOLDER ...

Each folder has a model, and `served.json`: arguments of `vllm.LLM`, and prompts as they are sent with the tokens and
features of training.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, sys.argv[1])

import vllm_server
import vllm_weights
from vllm import LLM
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu_worker import Worker


def check_calls(arguments: dict[str, Any]) -> None:
    """Every argument that we give is one that vLLM takes."""
    settings = {"temperature": 0.7, "max_tokens": 5, "ends": [1, 2], "never_drawn": [3]}
    params = vllm_server._sampling_params(2**55, settings)
    assert (params.seed, params.logprobs, params.logit_bias) == (2**55, 0, {3: -float("inf")})
    assert set(arguments) <= set(inspect.signature(EngineArgs).parameters)
    inspect.signature(LLM.generate).bind(None, [], [params], use_tqdm=False)
    inspect.signature(LLM.collective_rpc).bind(None, "load_published_bucket", args=("path", []))
    inspect.signature(LLM.reset_prefix_cache).bind(None)
    inspect.signature(LLMEngine.reset_encoder_cache).bind(None)
    assert callable(Worker.get_model)
    ours = [name for name in dir(vllm_weights.WeightReceiver) if not name.startswith("__")]
    assert not [name for name in ours if hasattr(Worker, name)]  # vLLM refuses an extension otherwise


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)


def check_weights() -> None:
    """Buckets go through vLLM's reloading, in place."""
    model = TwoLayers()
    record_metadata_for_reloading(model)
    receiver = vllm_weights.WeightReceiver()
    receiver.vllm_config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    receiver.device, receiver.get_model = torch.device("cpu"), lambda: model
    expected = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    receiver.begin_published_weights()
    for name, tensor in expected.items():
        memory = os.memfd_create("bucket")
        os.write(memory, tensor.numpy().tobytes())
        entries = [(name, list(tensor.shape), "float32", 0)]
        receiver.load_published_bucket(f"/proc/{os.getpid()}/fd/{memory}", entries)
        os.write(memory, b"overwritten")
        os.close(memory)
    receiver.end_published_weights()
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name]) and p.data_ptr() == places[name], name


def check_prompts(folder: Path, prompts: list[dict[str, Any]]) -> None:
    """vLLM's processor reads our prompts as the tokens and features of training."""
    config = ModelConfig(model=str(folder), dtype="float32", generation_config="vllm", max_model_len=2048)
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    for prompt in prompts:
        recordings = [np.array(samples, np.float32) for samples in prompt["recordings"]]
        data = {"audio": [(samples, prompt["sample_rate"]) for samples in recordings]}
        items = processor.info.parse_mm_data(data)
        read = processor.apply(ProcessorInputs(prompt["token_ids"], items), TimingContext(enabled=False))
        assert list(read["prompt_token_ids"]) == prompt["read_ids"], (folder.name, prompt["id"])
        for ours, item in zip(prompt["features"], read["mm_kwargs"]["audio"], strict=True):
            data = item.get_data()
            key = next(key for key in ("input_features", "input_audio_features") if key in data)
            theirs = data[key].reshape(-1, data[key].shape[-1]).float()  # of mel bins and frames
            frames = min(theirs.shape[1], len(ours[0]))
            assert frames >= 100, "of recordings of a second and more"
            torch.testing.assert_close(theirs[:, :frames], torch.tensor(ours)[:, :frames], rtol=0, atol=1e-4)


if __name__ == "__main__":
    for path in map(Path, sys.argv[2:]):
        served = json.loads((path / "served.json").read_text())
        check_calls(served["arguments"])
        check_prompts(path, served["prompts"])
    check_weights()
    print("checked")
