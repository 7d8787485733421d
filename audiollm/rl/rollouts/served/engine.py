"""Rollouts by vLLM or SGLang: its process, the weights that reach it in buckets, and what it samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.families.rollout import Rollout, RolloutEngine, RolloutSettings
from audiollm.families.serving import ServedModel, ServedPrompt
from audiollm.generation.engine.request import SampledTokens
from audiollm.rl.rollouts.process import SharedTensors
from audiollm.rl.rollouts.served.server import ServerProcess
from audiollm.rl.rollouts.settings import SGLANG, VLLM, EngineChoice, python_of

SERVER_SIDE = Path(__file__).parent / "server_side"
OPEN_REMEDY = (
    "it needs a GPU with memory for a second copy of the model, or a build of it for CPUs, and must know the model's "
    "architecture; or leave rollouts out"
)
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class ServedRollouts:
    """A `RolloutEngine` of vLLM or SGLang, which opens the model's folder in a process of its own.

    Args:
        model: whose present weights are sent at each call of `weights_changed`.
        folder: that the server opens.

    Raises:
        ConfigError: too few GPUs.
        StageError: the server does not open the model.
    """

    def __init__(self, model: ServedModel, folder: Path, choice: EngineChoice) -> None:
        self._model, self._name = model, choice.name
        self._dtype: torch.dtype = getattr(torch, choice.dtype)
        self._bucket_bytes = int(choice.bucket_mb * 1e6)
        python = python_of(choice.python)
        environment = {**gpu_environment(choice.gpus), "HF_HUB_OFFLINE": "1", **ENVIRONMENTS[choice.name]}
        script = SERVER_SIDE / f"{choice.name}_server.py"
        self._server = ServerProcess(f"rollouts: {choice.name}", python, script, environment)
        try:
            arguments = ARGUMENTS[choice.name](folder, choice)
            self._max_length: int = self._server.ask("open", arguments=arguments)
        except StageError as error:
            self.close()
            raise StageError(str(error), OPEN_REMEDY, error.exit_code) from None

    @property
    def pid(self) -> int:
        """Number of the server's process."""
        return self._server.pid

    def weights_changed(self) -> None:
        """Send the present weights; see `RolloutEngine.weights_changed`.

        Raises:
            StageError: the server does not take them, or its process ended.
        """
        self._server.ask("begin_weights")
        for bucket in weight_buckets(self._model.tensors(), self._dtype, self._bucket_bytes):
            shared = SharedTensors.like(bucket)
            try:
                for name, tensor in bucket.items():
                    shared.by_name[name].copy_(tensor)
                self._server.ask("load_bucket", path=shared.path, entries=shared.entries)
            finally:
                shared.close()
        self._server.ask("end_weights")

    def sample(
        self, prompts: Sequence[Any], numbers: Sequence[Sequence[int]], settings: RolloutSettings
    ) -> list[list[Rollout]]:
        """See `RolloutEngine.sample`.

        Raises:
            StageError: the server read other tokens than training does, or its process ended.
        """
        if settings.answer != "text":
            raise ConfigError(
                f"answer: {settings.answer!r}, and {self._name} samples text", "", "set answer to text"
            )
        served = [self._model.prompt(prompt) for prompt in prompts]
        for prompt in served:
            self._check_prompt(prompt)
        rows = [
            (place, settings.seed_of(prompts[place].id, number))
            for place, group in enumerate(numbers)
            for number in group
        ]
        result = self._server.ask(
            "sample",
            prompts=[
                {
                    "token_ids": list(prompt.token_ids),
                    "recordings": [recording.tobytes() for recording in prompt.recordings],
                    "sample_rate": prompt.sample_rate,
                }
                for prompt in served
            ],
            rows=rows,
            settings={
                "temperature": settings.temperature,
                "max_tokens": settings.max_text_tokens,
                "ends": sorted(self._model.ends),
                "never_drawn": list(self._model.never_drawn),
            },
        )
        for place, read_ids in result["read"].items():
            self._check_read(served[place], read_ids)
        answers = iter(zip(rows, result["answers"], strict=True))
        return [
            [self._rollout(prompts[place].id, number, *next(answers)) for number in group]
            for place, group in enumerate(numbers)
        ]

    def close(self) -> None:
        """End the server's process."""
        self._server.close()

    def _check_prompt(self, prompt: ServedPrompt) -> None:
        """
        Raises:
            BadSample: a prompt that the server cannot take.
        """
        if self._name == SGLANG and len(prompt.recordings) > 1:  # it ends SGLang 0.5.23
            reason = f"{len(prompt.recordings)} recordings, and sglang takes one of a prompt"
            raise BadSample(prompt.place, prompt.id, reason, "several recordings")
        if len(prompt.read_ids) >= self._max_length:
            reason = (
                f"{len(prompt.read_ids)} tokens, and {self._name} takes {self._max_length} with the answer"
            )
            raise BadSample(prompt.place, prompt.id, reason, "prompt too long")

    def _check_read(self, prompt: ServedPrompt, read_ids: Sequence[int]) -> None:
        """
        Raises:
            StageError: the server read other tokens than training does.
        """
        if list(read_ids) != list(prompt.read_ids):
            raise StageError(
                f"rollouts: {self._name} reads prompt {prompt.id!r} as {len(read_ids)} tokens, other than the "
                f"{len(prompt.read_ids)} of training",
                f"use a version of {self._name} whose processor agrees with transformers', or leave rollouts out",
            )

    def _rollout(
        self, prompt: str, number: int, row: tuple[int, int], answer: tuple[list[int], list[float] | None]
    ) -> Rollout:
        token_ids, logprobs = answer
        tokens = SampledTokens(
            "text",
            torch.tensor(token_ids, dtype=torch.long),
            torch.ones(len(token_ids), dtype=torch.bool),
            (),
            (),
            None if logprobs is None else torch.tensor(logprobs),
        )
        truncated = not token_ids or token_ids[-1] not in self._model.ends
        return Rollout(prompt, number, tokens, truncated, self._model.decode(token_ids), row[1])


def llm_arguments(folder: Path, choice: EngineChoice) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`: numbers and texts."""
    return {
        **choice.options,
        "model": str(folder.resolve()),
        "dtype": choice.dtype,
        "tensor_parallel_size": max(1, choice.gpus),
        "gpu_memory_utilization": choice.memory,
        "max_model_len": choice.max_length,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "generation_config": "vllm",  # that of the model has no effect
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "worker_extension_cls": "vllm_weights.WeightReceiver",
    }


def sglang_arguments(folder: Path, choice: EngineChoice) -> dict[str, Any]:
    """Return the arguments of `sglang.Engine`: numbers and texts."""
    return {
        "enable_deterministic_inference": True,  # else seeds of answers have no effect
        **choice.options,
        "model_path": str(folder.resolve()),
        "dtype": choice.dtype,
        "tp_size": max(1, choice.gpus),
        "mem_fraction_static": choice.memory,
        "context_length": choice.max_length,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "sampling_defaults": "openai",  # generation_config.json of the model has no effect
        "random_seed": 0,
    }


ARGUMENTS: dict[str, Callable[[Path, EngineChoice], dict[str, Any]]] = {
    VLLM: llm_arguments,
    SGLANG: sglang_arguments,
}
ENVIRONMENTS: dict[str, dict[str, str]] = {
    VLLM: {"VLLM_NO_USAGE_STATS": "1"},
    # SGLang keeps what its encoder makes of a recording, also when the encoder's weights change
    SGLANG: {"SGLANG_VLM_CACHE_SIZE_MB": "0"},
}
"""Variables of each server's process."""


def weight_buckets(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int
) -> Iterator[dict[str, Tensor]]:
    """Yield tensors by name, in buckets of at most `limit` bytes; a larger tensor is alone in its bucket.

    Args:
        dtype: that floating-point tensors are cast to.
    """
    bucket, filled = dict[str, Tensor](), 0
    for name, tensor in tensors:
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        size = tensor.numel() * tensor.element_size()
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = {}, 0
        bucket[name], filled = tensor, filled + size
    if bucket:
        yield bucket


def gpu_environment(gpus: int) -> dict[str, str]:
    """Return the variable that names the GPUs of this rank's server; none on a machine without GPUs.

    Args:
        gpus: of its own, behind those of the training ranks of this machine; 0: that of the rank.

    Raises:
        ConfigError: there are fewer.
    """
    count = torch.cuda.device_count()
    if not count:
        return {}
    named = os.environ.get(VISIBLE_GPUS)
    visible = named.split(",")[:count] if named else [str(number) for number in range(count)]
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    first = ranks + rank * gpus if gpus else rank
    selected = visible[first : first + max(1, gpus)]
    if len(selected) < max(1, gpus):
        raise ConfigError(
            f"rollouts.gpus: {gpus} for each of {ranks} ranks, and {max(0, count - ranks)} GPUs have no rank",
            "",
            "lower gpus or the number of ranks; 0 shares the GPU of the rank",
        )
    return {VISIBLE_GPUS: ",".join(selected)}


_: type[RolloutEngine[Any]] = ServedRollouts
