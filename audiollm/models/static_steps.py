"""Steps of generation whose tensors keep their shapes and places, so that a CUDA graph can record and replay them.

A step of few rows is some hundred kernels, each of which takes less time than its launch; a graph launches all of them
at once. What changes from step to step (what is fed, and positions) is copied into buffers before. Rows are filled up
to a power of two and the attended positions to a multiple of `SPAN`, so that few shapes are recorded.

Shapes: R rows of the cache that go on, filled up; L attended positions, filled up; H heads, G key and value heads,
B both rows and these heads (R x G), D head dimension, C hidden size, K codebooks, X rows of the model's batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from audiollm.models.attention import cached_attention
from audiollm.models.cache import Cache
from audiollm.models.dual_ffn import DualFFN

StepKind = Literal["plain", "static", "cuda_graph"]
"""How an engine computes its steps: as they come; in static shapes; or in static shapes that a CUDA graph replays."""
SPAN = 256
"""Positions by which the attended part of the cache grows: a graph is recorded for each such length."""
WARM_UP_STEPS = 2
"""Steps before a graph is recorded, in which kernels are compiled and chosen."""


class StaticSteps:
    """The steps of a model over one cache, in static shapes.

    Args:
        recorded: each shape is recorded as a CUDA graph when it is first met, and replayed after that.

    Raises:
        ValueError: `recorded`, and the model is on no CUDA device.
    """

    def __init__(self, model: DualFFN, cache: Cache, recorded: bool) -> None:
        device = cache.keys_NRGDL.device
        if recorded and device.type != "cuda":
            raise ValueError(
                f"steps: 'cuda_graph' needs a CUDA device, and the model is on {device.type}; take 'plain'"
            )
        self._model, self._cache, self._recorded = model, cache, recorded
        self._steps: dict[tuple[int, int, bool], _Step] = {}
        self._addresses: list[int] = []

    def refresh(self) -> None:
        """Drop what was recorded with weights that lie elsewhere now. Weights written in place need no new graph."""
        addresses = [weight.data_ptr() for weight in self._model.parameters()]
        if addresses != self._addresses:
            self._steps.clear()
            self._addresses = addresses

    def extend(self, text_ids_X: Tensor, codes_YK: Tensor) -> Tensor:
        """Extend the first rows of the cache as `DualFFN.extend` does, by text ids or by codes, in the cache's order.

        Returns:
            Hidden states `[R, C]`, which the next step overwrites.

        Raises:
            ValueError: text and codes together, autocast while steps are recorded, or a row of the cache is full.
        """
        if len(text_ids_X) and len(codes_YK):
            raise ValueError("a static step takes text or codes; one with both is computed by DualFFN.extend")
        if self._recorded and torch.is_autocast_enabled("cuda"):
            raise ValueError(
                "steps: 'cuda_graph' under autocast would cast all weights at every step: convert the model instead"
            )
        fed = text_ids_X if len(text_ids_X) else codes_YK
        positions = self._cache.claim_positions(len(fed))
        step = self._step_of(len(fed), max(positions) + 1, fed.ndim == 1)
        return step.run(fed, positions)[: len(fed)]

    def _step_of(self, rows: int, span: int, is_text: bool) -> _Step:
        rows = min(1 << (rows - 1).bit_length(), self._cache.keys_NRGDL.shape[1])
        span = min(-(-span // SPAN) * SPAN, self._cache.length)
        step = self._steps.get((rows, span, is_text))
        if step is None:
            step = _Step(self._model, self._cache, rows, span, is_text, self._recorded)
            self._steps[rows, span, is_text] = step
        return step


@dataclass(frozen=True)
class AttendStatic:
    """Attention of a new position in each of R cache rows over the first L positions of each, later ones hidden."""

    position_X: Tensor
    row_R: Tensor
    keys_NRGDL: Sequence[Tensor]
    """Cached keys of each layer: R rows, L positions."""
    values_NRGLD: Sequence[Tensor]
    biases_NB1L: Sequence[Tensor]
    """Attention bias of each layer: -inf where a position is hidden from a row, else 0."""

    def __call__(self, layer: int, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        keys_RGDL, values_RGLD = self.keys_NRGDL[layer], self.values_NRGLD[layer]
        keys_RGDL[self.row_R, :, :, self.position_X] = k_SGD
        values_RGLD[self.row_R, :, self.position_X] = v_SGD
        q_BQD = q_SHD.reshape(keys_RGDL.shape[0] * keys_RGDL.shape[1], -1, q_SHD.shape[2])
        attended_BQD = cached_attention(
            q_BQD, keys_RGDL.flatten(0, 1), values_RGLD.flatten(0, 1), self.biases_NB1L[layer]
        )
        return attended_BQD.view(q_SHD.shape)


# Private


class _Step:
    """A step of one shape, with its buffers."""

    def __init__(
        self, model: DualFFN, cache: Cache, rows: int, span: int, is_text: bool, recorded: bool
    ) -> None:
        device = cache.keys_NRGDL.device
        self._model, self._cache, self._recorded = model, cache, recorded
        shape = (rows,) if is_text else (rows, model.config.num_codebooks)
        self._fed = torch.zeros(shape, dtype=torch.long, device=device)
        self._none = self._fed.new_zeros((0, model.config.num_codebooks) if is_text else (0,))
        # rows that only fill up write to position 0 of free cache rows
        self._position_R = torch.zeros(rows, dtype=torch.long, device=device)
        self._row_R = torch.arange(rows, device=device)
        self._place_L = torch.arange(span, device=device)
        self._keys = cache.keys_NRGDL[:, :rows, ..., :span].unbind()
        self._values = cache.values_NRGLD[:, :rows, :, :span].unbind()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden_RC: Tensor | None = None

    def run(self, fed: Tensor, positions: Sequence[int]) -> Tensor:
        """Compute a step of no more than R rows; returns hidden states of all R."""
        self._fed[: len(fed)].copy_(fed)
        idle = [0] * (len(self._position_R) - len(positions))
        self._position_R.copy_(torch.tensor([*positions, *idle]))
        if not self._recorded:
            return self._compute()
        if self._graph is None:
            self._record()
        assert self._graph is not None and self._hidden_RC is not None
        self._graph.replay()
        return self._hidden_RC

    def _record(self) -> None:
        """Record the step. Steps of the warm-up write what the step itself writes, to the same places."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_STEPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._hidden_RC = self._compute()

    def _compute(self) -> Tensor:
        bias_of = {window: self._bias(window) for window in set(self._cache.windows)}
        biases = [bias_of[window] for window in self._cache.windows]
        attend = AttendStatic(self._position_R, self._row_R, self._keys, self._values, biases)
        fed = (self._fed, self._none) if self._fed.ndim == 1 else (self._none, self._fed)
        return self._model.extend_by(*fed, self._cache, attend)

    def _bias(self, window: int | None) -> Tensor:
        behind_RL = self._position_R[:, None] - self._place_L
        hidden_RL = behind_RL < 0 if window is None else (behind_RL < 0) | (behind_RL >= window)
        keys = self._cache.keys_NRGDL
        bias_RL = torch.zeros(hidden_RL.shape, dtype=keys.dtype, device=keys.device)
        bias_RL.masked_fill_(hidden_RL, -torch.inf)
        return bias_RL[:, None].expand(-1, keys.shape[2], -1).reshape(-1, 1, bias_RL.shape[1])
