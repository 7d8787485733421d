"""An exported codec under onnxruntime; numpy and onnxruntime are all that it needs.

    from onnx_codec import OnnxCodec

    codec = OnnxCodec("exported")
    codes = codec.encode(samples)         # float32 [n] at codec.sample_rate -> int64 [codebooks, ceil(n / hop)]
    samples = codec.decode(codes)         # -> float32 [frames * hop]

In pieces, with the same result: `codec.encoder()` and `codec.decoder()` have `push` and `flush`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

ABOUT_FILE = "onnx_codec.json"
"""Rates, sizes and first states of an exported codec."""


class OnnxCodec:
    """Samples to codes and back.

    Args:
        folder: with the two graphs and `onnx_codec.json`.
        threads: of onnxruntime.
    """

    def __init__(self, folder: Path | str, threads: int = 1) -> None:
        self.about: dict[str, Any] = json.loads((Path(folder) / ABOUT_FILE).read_text(encoding="utf-8"))
        self.sample_rate: int = self.about["sample_rate"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._sessions = {
            half: onnxruntime.InferenceSession(
                str(Path(folder) / f"{half}.onnx"), options, providers=["CPUExecutionProvider"]
            )
            for half in ("encoder", "decoder")
        }

    def encoder(self) -> OnnxEncoder:
        """A stream from samples to codes."""
        return OnnxEncoder(self.about, self._sessions["encoder"])

    def decoder(self) -> OnnxDecoder:
        """A stream from codes to samples."""
        return OnnxDecoder(self.about, self._sessions["decoder"])

    def encode(self, samples_N: np.ndarray) -> np.ndarray:
        """Samples `[n]`, float32 in [-1, 1], to codes `[codebooks, frames]`, int64."""
        stream = self.encoder()
        return np.concatenate([stream.push(samples_N), stream.flush()], axis=1)

    def decode(self, codes_KT: np.ndarray) -> np.ndarray:
        """Codes to samples."""
        stream = self.decoder()
        return np.concatenate([stream.push(codes_KT), stream.flush()])


class _Graph:
    """A graph with its states."""

    def __init__(self, about: dict[str, Any], half: str, session: Any) -> None:
        self._session, self._first_states = session, about[half]["states"]
        self._outputs = [output.name for output in session.get_outputs()]
        self.begin()

    def begin(self) -> None:
        self._states = {
            state["name"]: np.zeros(state["shape"], state["dtype"]) for state in self._first_states
        }

    def step(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        values = dict(zip(self._outputs, self._session.run(None, {**inputs, **self._states}), strict=True))
        self._states = {name: values.pop(f"next_{name}") for name in self._states}
        return values


class OnnxEncoder:
    """Takes any number of samples, gives the codes `[codebooks, t]` that they complete."""

    _buffer_N: np.ndarray
    _samples: int
    _frames: int

    def __init__(self, about: dict[str, Any], session: Any) -> None:
        self._graph = _Graph(about, "encoder", session)
        self._hop, self._codebooks = about["hop_samples"], about["num_codebooks"]
        self._step = about["encoder"]["step_frames"] * self._hop
        self._context = about["encoder"]["context_samples"]
        self._begin()

    def push(self, samples_N: np.ndarray) -> np.ndarray:
        """Codes of whole windows; a window has the context of a few samples on both sides."""
        self._samples += len(samples_N)
        self._buffer_N = np.concatenate([self._buffer_N, samples_N.astype(np.float32)])
        codes = [np.zeros((self._codebooks, 0), np.int64)]
        while len(self._buffer_N) >= self._step + 2 * self._context:
            window_1N = self._buffer_N[None, : self._step + 2 * self._context]
            codes.append(self._graph.step(window=window_1N)["codes"][0])
            self._buffer_N = self._buffer_N[self._step :]
            self._frames += self._step // self._hop
        return np.concatenate(codes, axis=1)

    def flush(self) -> np.ndarray:
        """Codes of the rest, with silence beyond the end; the stream then begins anew."""
        missing = -(-self._samples // self._hop) - self._frames
        windows = -(-missing * self._hop // self._step)
        end = self._frames * self._hop + windows * self._step + self._context
        codes_KT = self.push(np.zeros(end - self._samples, np.float32))[:, :missing]
        self._begin()
        return codes_KT

    def _begin(self) -> None:
        self._graph.begin()
        self._buffer_N = np.zeros(self._context, np.float32)
        self._samples = self._frames = 0


class OnnxDecoder:
    """Takes codes `[codebooks, t]` of any number of frames, gives the samples that they complete."""

    _waiting_KT: np.ndarray
    _rest_N: np.ndarray
    _begun: bool

    def __init__(self, about: dict[str, Any], session: Any) -> None:
        self._graph, self._codebooks = _Graph(about, "decoder", session), about["num_codebooks"]
        self._ahead = about["decoder"]["ahead_frames"]
        self._delay, self._most = about["decoder"]["delay_samples"], about["decoder"]["most_frames"]
        self._begin()

    def push(self, codes_KT: np.ndarray) -> np.ndarray:
        """Samples `[n]`; the sound is a few frames behind its codes."""
        self._waiting_KT = np.concatenate([self._waiting_KT, codes_KT.astype(np.int64)], axis=1)
        samples = [np.zeros(0, np.float32)]
        least = 1 if self._begun else self._ahead + 1
        while self._waiting_KT.shape[1] >= least:
            values = self._graph.step(codes=self._waiting_KT[None, :, : self._most])
            self._waiting_KT = self._waiting_KT[:, self._most :]
            before = 0 if self._begun else self._delay
            samples.append(values["samples"][0, before:])
            self._rest_N, self._begun, least = values["rest"][0], True, 1
        return np.concatenate(samples)

    def flush(self) -> np.ndarray:
        """The rest of the sound; the stream then begins anew."""
        last = self.push(np.full((self._codebooks, self._ahead), -1))
        samples_N = np.concatenate([last, self._rest_N])
        self._begin()
        return samples_N

    def _begin(self) -> None:
        self._graph.begin()
        self._begun = False
        self._rest_N = np.zeros(0, np.float32)
        self._waiting_KT = np.zeros((self._codebooks, 0), np.int64)
