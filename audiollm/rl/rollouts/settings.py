"""The setting `rollouts`: the engine that samples the answers of a training. Loads no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from audiollm.errors import ConfigError
from audiollm.recipe.plug_ins import is_import_path, plug_in_facts

VLLM, SGLANG = "vllm", "sglang"
VERSIONS = {VLLM: ">=0.33,<0.34", SGLANG: ">=0.5.23,<0.6"}
"""Servers that sample, and the versions whose surface is called."""
SET_BY_US = {
    VLLM: frozenset(
        (
            "model", "dtype", "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "generation_config",
            "logprobs_mode", "worker_extension_cls", "load_format", "trust_remote_code",
        )
    ),
    SGLANG: frozenset(
        (
            "model_path", "dtype", "tp_size", "mem_fraction_static", "context_length", "sampling_defaults",
            "load_format", "trust_remote_code", "random_seed",
        )
    ),
}  # fmt: skip
"""Arguments of `vllm.LLM` and `sglang.Engine` that settings of ours, or the protocol, decide."""


class EngineChoice(BaseModel):
    """The engine that samples: vLLM, SGLang, or one of a user's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    name: str
    """`vllm`, `sglang`, or `package.module:Engine`, which has no settings."""
    python: str | None = None
    """Python of the environment with the server; None: that of the training."""
    gpus: int = Field(0, ge=0)
    """GPUs of each rank's server, behind those of the training ranks; 0: it shares the rank's GPU."""
    memory: float = Field(0.4, gt=0, le=1)
    """Share of each GPU's memory that the server takes."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the server's weights."""
    max_length: int | None = Field(None, ge=2)
    """Longest prompt with its answer, in tokens; None: the model's."""
    bucket_mb: float = Field(256.0, gt=0)
    """Weights that travel together, in MB; a larger tensor travels alone."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `vllm.LLM` (`{enforce_eager: true}`) or `sglang.Engine`."""

    @model_validator(mode="after")
    def _check(self) -> EngineChoice:
        if not self.is_server:
            if not is_import_path(self.name):
                raise ValueError(
                    f"{self.name!r} is no import path: give vllm, sglang, or package.module:Engine"
                )
            if unread := sorted(self.model_fields_set - {"name"}):
                raise ValueError(
                    f"{unread[0]} is a setting of vllm and sglang, and name is {self.name}: leave it out"
                )
        elif clash := sorted(SET_BY_US[self.name] & self.options.keys()):
            raise ValueError(f"options.{clash[0]} is set by the training: leave it out")
        return self

    @property
    def is_server(self) -> bool:
        """Whether it is vLLM or SGLang."""
        return self.name in VERSIONS

    def facts(self) -> list[str]:
        """Lines of the fingerprint of a stage: the server's version, or the digest of the engine's source.

        Raises:
            ConfigError: the server, or the engine's module, is not there.
        """
        if self.is_server:
            return [f"{self.name}={server_version(self.name, self.python)}"]
        return plug_in_facts([self.name])


def server_version(name: str, python: str | None) -> str:
    """Return the version of vLLM or SGLang in the environment of a Python, without importing it.

    Raises:
        ConfigError: there is no such Python, or no such package.
    """
    executable = python_of(python)
    question = f"import importlib.metadata as m; print(m.version({name!r}))"
    remedy = (
        f"make an environment for it (python -m venv ~/{name}; ~/{name}/bin/pip install '{name}{VERSIONS[name]}') and "
        f"set rollouts: {{name: {name}, python: ~/{name}/bin/python}}"
    )
    try:
        answer = subprocess.run(
            [executable, "-c", question],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise ConfigError(f"rollouts.python: cannot be started: {error}", executable, remedy) from None
    if answer.returncode:
        raise ConfigError(f"rollouts: {name} is not installed in this environment", executable, remedy)
    return answer.stdout.strip()


def python_of(python: str | None) -> str:
    """The path of the Python that runs the server."""
    return sys.executable if python is None else str(Path(python).expanduser())
