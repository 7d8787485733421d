"""Samples with SGLang, as a training asks over a connection. Runs with SGLang's Python: imports no audiollm.

PYTHON sglang_server.py FILE_DESCRIPTOR
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from answering import answer_calls  # type: ignore[import-not-found]
from vllm_weights import BucketEntry, read_bucket  # type: ignore[import-not-found]

RECORDING_RATE = 16_000
"""Samples per second at which SGLang's processors read recordings (sglang 0.5.23, utils/common.py, `load_audio`)."""


class SGLangServer:
    """An engine of SGLang. Arguments and results are numbers, texts, bytes, lists and mappings of them."""

    def __init__(self) -> None:
        self._engine: Any = None

    def open(self, arguments: Mapping[str, Any]) -> int:
        """Open a model; return the longest prompt with its answer, in tokens."""
        from sglang import Engine

        self._engine = Engine(**arguments)
        return int(self._engine.tokenizer_manager.context_len)

    def begin_weights(self) -> None:
        """Begin to replace the weights."""
        _check_success(self._engine.begin_weight_update())

    def load_bucket(self, path: str, entries: Sequence[BucketEntry]) -> None:
        """Load the tensors of a bucket, in every worker."""
        named_tensors = list(read_bucket(path, entries, torch.device("cpu")))
        _check_success(self._engine.update_weights_from_tensor(named_tensors, flush_cache=False))

    def end_weights(self) -> None:
        """Take the new weights, and drop all that the old ones computed."""
        _check_success(self._engine.end_weight_update())
        flushed = self._engine.flush_cache()
        _check_success((flushed.success, "its caches were not emptied"))

    def sample(
        self,
        prompts: Sequence[Mapping[str, Any]],
        rows: Sequence[tuple[int, int]],
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Sample an answer for each row; arguments and result are those of `VLLMServer.sample`."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        recordings = [_wav_files(prompt) for prompt in prompts]
        has_recordings = any(recordings)
        request = GenerateReqInput(
            input_ids=[list(prompts[place]["token_ids"]) for place, _ in rows],
            audio_data=[recordings[place] for place, _ in rows] if has_recordings else None,
            sampling_params=[_sampling_settings(seed, settings) for _, seed in rows],
            return_logprob=True,
            return_prompt_token_ids=True,  # which Engine.generate does not pass on
        )
        engine = self._engine
        answers = engine.loop.run_until_complete(
            engine.tokenizer_manager.generate_request(request, None).__anext__()
        )
        read = {
            place: list(answer["prompt_token_ids"]) for (place, _), answer in zip(rows, answers, strict=True)
        }
        return {
            "read": read,
            "answers": [_answer_tokens(answer["meta_info"], settings) for answer in answers],
        }


def _check_success(result: tuple[bool, str]) -> None:
    """
    Raises:
        RuntimeError: SGLang did not do what it was asked to.
    """
    is_done, message = result
    if not is_done:
        raise RuntimeError(message)


def _wav_files(prompt: Mapping[str, Any]) -> list[bytes] | None:
    """The recordings of a prompt as WAV files of float32; None: it has none."""
    import soundfile

    if not prompt["recordings"]:
        return None
    if prompt["sample_rate"] != RECORDING_RATE:
        raise ValueError(
            f"the model hears {prompt['sample_rate']} samples per second, and SGLang reads {RECORDING_RATE}"
        )
    files = []
    for recording in prompt["recordings"]:
        file = BytesIO()
        samples_N = np.frombuffer(recording, np.float32)
        soundfile.write(file, samples_N, RECORDING_RATE, format="WAV", subtype="FLOAT")
        files.append(file.getvalue())
    return files


def _sampling_settings(seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "temperature": settings["temperature"],
        "top_p": 1.0,
        "top_k": -1,
        "sampling_seed": seed,
        "max_new_tokens": settings["max_tokens"],
        "stop_token_ids": list(settings["ends"]),
        "logit_bias": {str(token_id): float("-inf") for token_id in settings["never_drawn"]} or None,
    }


def _answer_tokens(
    meta_info: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[list[int], list[float] | None]:
    """Token ids with their log-probabilities, after temperature (None at a temperature of 0).

    Raises:
        ValueError: SGLang, which adds the ends of the model's folder, ended the answer at another one.
    """
    reason = meta_info["finish_reason"]
    if reason["type"] != "length" and reason.get("matched") not in settings["ends"]:
        raise ValueError(f"an answer ended otherwise than in training: {reason}")
    pairs = meta_info["output_token_logprobs"]
    token_ids = [int(token_id) for _, token_id, _ in pairs]
    logprobs = None if settings["temperature"] == 0 else [float(logprob) for logprob, _, _ in pairs]
    return token_ids, logprobs


if __name__ == "__main__":
    answer_calls(SGLangServer(), int(sys.argv[1]))
