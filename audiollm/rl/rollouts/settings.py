"""The setting `rollouts`: the engine that samples the answers of a training. Loads no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from audiollm.errors import ConfigError
from audiollm.recipe.plug_ins import is_import_path, plug_in_facts

VLLM = "vllm"
VLLM_REMEDY = (
    "make an environment for it (python -m venv ~/vllm; ~/vllm/bin/pip install 'vllm>=0.33,<0.34') and set "
    "rollouts: {name: vllm, python: ~/vllm/bin/python}"
)
SET_BY_US = frozenset(
    (
        "model", "dtype", "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "generation_config",
        "logprobs_mode", "worker_extension_cls", "load_format", "trust_remote_code",
    )
)  # fmt: skip
"""Arguments of `vllm.LLM` that settings of ours, or the protocol, decide."""


class EngineChoice(BaseModel):
    """The engine that samples: vLLM, or one of a user's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    name: str
    """`vllm`, or `package.module:Engine`, which has no settings."""
    python: str | None = None
    """Python of the environment with vLLM; None: that of the training."""
    gpus: int = Field(0, ge=0)
    """GPUs of each rank's vLLM, behind those of the training ranks; 0: it shares the rank's GPU."""
    memory: float = Field(0.4, gt=0, le=1)
    """Share of each GPU's memory that vLLM takes."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of vLLM's weights."""
    max_length: int | None = Field(None, ge=2)
    """Longest prompt with its answer, in tokens; None: the model's."""
    bucket_mb: float = Field(256.0, gt=0)
    """Weights that travel together, in MB; a larger tensor travels alone."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `vllm.LLM` (`{enforce_eager: true}`)."""

    @model_validator(mode="after")
    def _check(self) -> EngineChoice:
        if self.name != VLLM:
            if not is_import_path(self.name):
                raise ValueError(f"{self.name!r} is no import path: give vllm, or package.module:Engine")
            if unread := sorted(self.model_fields_set - {"name"}):
                raise ValueError(f"{unread[0]} is a setting of vllm, and name is {self.name}: leave it out")
        if clash := sorted(SET_BY_US & self.options.keys()):
            raise ValueError(f"options.{clash[0]} is set by the training: leave it out")
        return self

    @property
    def is_vllm(self) -> bool:
        return self.name == VLLM

    def facts(self) -> list[str]:
        """Lines of the fingerprint of a stage: vLLM's version, or the digest of the engine's source.

        Raises:
            ConfigError: vLLM, or the engine's module, is not there.
        """
        return [f"vllm={vllm_version(self.python)}"] if self.is_vllm else plug_in_facts([self.name])


def vllm_version(python: str | None) -> str:
    """Return the version of vLLM in the environment of a Python, without importing it.

    Raises:
        ConfigError: there is no such Python, or no vLLM.
    """
    executable = python_of(python)
    question = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        answer = subprocess.run(
            [executable, "-c", question],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise ConfigError(f"rollouts.python: cannot be started: {error}", executable, VLLM_REMEDY) from None
    if answer.returncode:
        raise ConfigError("rollouts: vllm is not installed in this environment", executable, VLLM_REMEDY)
    return answer.stdout.strip()


def python_of(python: str | None) -> str:
    """The path of the Python that runs vLLM."""
    return sys.executable if python is None else str(Path(python).expanduser())
