"""Samples with vLLM, as a training asks over a connection. Runs with vLLM's Python: imports no audiollm.

PYTHON vllm_server.py FILE_DESCRIPTOR
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from answering import answer_calls  # type: ignore[import-not-found]


class VLLMServer:
    """An engine of vLLM. Arguments and results are numbers, texts, bytes, lists and mappings of them."""

    def __init__(self) -> None:
        self._llm: Any = None

    def open(self, arguments: Mapping[str, Any]) -> int:
        """Open a model; return the longest prompt with its answer, in tokens."""
        from vllm import LLM

        self._llm = LLM(**arguments)
        return int(self._llm.llm_engine.model_config.max_model_len)

    def begin_weights(self) -> None:
        """Begin to replace the weights."""
        self._llm.collective_rpc("begin_published_weights")

    def load_bucket(self, path: str, entries: Sequence[Any]) -> None:
        """Load the tensors of a bucket, in every worker."""
        self._llm.collective_rpc("load_published_bucket", args=(path, entries))

    def end_weights(self) -> None:
        """Take the new weights, and drop all that the old ones computed."""
        self._llm.collective_rpc("end_published_weights")
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def sample(
        self,
        prompts: Sequence[Mapping[str, Any]],
        rows: Sequence[tuple[int, int]],
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Sample an answer for each row.

        Args:
            prompts: `token_ids`, `recordings` (bytes of float32) and `sample_rate` of each.
            rows: the number of the prompt of each answer, and its seed.
            settings: `temperature`, `max_tokens`, `ends` and `never_drawn`.

        Returns:
            `read`, the token ids of each prompt as the model read them, by its number; and `answers`, the token ids of
            each row with their log-probabilities (None at a temperature of 0).
        """
        requests = [_request(prompt) for prompt in prompts]
        outputs = self._llm.generate(
            [requests[place] for place, _ in rows],
            [_sampling_params(seed, settings) for _, seed in rows],
            use_tqdm=False,
        )
        read = {
            place: list(output.prompt_token_ids) for (place, _), output in zip(rows, outputs, strict=True)
        }
        return {"read": read, "answers": [_completion_tokens(output.outputs[0]) for output in outputs]}


def _request(prompt: Mapping[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {"prompt_token_ids": list(prompt["token_ids"])}
    if prompt["recordings"]:
        sounds = [np.frombuffer(recording, np.float32) for recording in prompt["recordings"]]
        request["multi_modal_data"] = {"audio": [(sound, prompt["sample_rate"]) for sound in sounds]}
    return request


def _sampling_params(seed: int, settings: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=settings["temperature"],
        top_p=1.0,
        top_k=0,
        seed=seed,
        max_tokens=settings["max_tokens"],
        ignore_eos=True,  # the ends are those of the training
        stop_token_ids=list(settings["ends"]),
        logit_bias={token_id: float("-inf") for token_id in settings["never_drawn"]} or None,
        logprobs=None if settings["temperature"] == 0 else 0,
        detokenize=False,
    )


def _completion_tokens(completion: Any) -> tuple[list[int], list[float] | None]:
    token_ids = [int(token_id) for token_id in completion.token_ids]
    if completion.logprobs is None:
        return token_ids, None
    pairs = zip(token_ids, completion.logprobs, strict=True)
    return token_ids, [float(position[token_id].logprob) for token_id, position in pairs]


if __name__ == "__main__":
    # in this process, where a single GPU is used: batches are then made in the same order every time
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    answer_calls(VLLMServer(), int(sys.argv[1]))
