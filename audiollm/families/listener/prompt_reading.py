"""A prompt that a model of transformers reads, in pieces where it is long.

Shapes: L positions of the prompt, D channels, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from audiollm.families.listener.generating import GenerationPlan

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache among the arguments of a forward pass: that of transformers 5.24, and that of earlier versions."""
_PER_POSITION = frozenset({*CACHE_NAMES, "input_ids", "inputs_embeds", "position_ids", "attention_mask"})


class PromptReading:
    """The pass of one prompt through the model.

    Encoders of recordings run in the first piece, over all of them. The decoder reads `piece_positions` at a time
    where it is a module of its own that is given embeddings and nothing else for each position; else all at once.

    Args:
        plan: its cache is replaced by one whose layers all keep the whole past, as `JoinedCache` needs.
    """

    def __init__(self, model: Any, plan: GenerationPlan, piece_positions: int) -> None:
        self._model, self._piece_positions = model, piece_positions
        self.cache_name = cache_name(plan)
        self.cache = DynamicCache()
        self._arguments = model.prepare_inputs_for_generation(
            plan.ids_1L, is_first_iteration=True, **{**plan.arguments, self.cache_name: self.cache}
        )
        self._length = plan.ids_1L.shape[1]
        self._embedded_1LD: Tensor | None = None
        self._position_ids: Tensor | None = None

    def advance(self) -> Tensor | None:
        """Read a piece; return the logits `[1, V]` of the next token once all is read."""
        if self._embedded_1LD is not None:
            return self._read_piece(self._embedded_1LD)
        if self._length > self._piece_positions and self._embed():
            return None
        return self._last_logits(**self._arguments)

    def _read_piece(self, embedded_1LD: Tensor) -> Tensor | None:
        begin = self.cache.get_seq_length()
        end = min(begin + self._piece_positions, self._length)
        positions = None if self._position_ids is None else self._position_ids[..., begin:end]
        logits_1V = self._last_logits(
            inputs_embeds=embedded_1LD[:, begin:end], position_ids=positions, use_cache=True,
            **{self.cache_name: self.cache},
        )  # fmt: skip
        return logits_1V if end == self._length else None

    def _embed(self) -> bool:
        """Run all that is before the decoder; return whether the decoder can read the embeddings piece by piece."""
        decoder = self._model.get_decoder()
        if decoder is self._model:
            return False
        handle = decoder.register_forward_pre_hook(_stop_before, with_kwargs=True)
        try:
            self._model(**self._arguments, return_dict=True)
        except _Stopped as stopped:
            arguments = stopped.arguments
        finally:
            handle.remove()
        if not self._is_divisible(arguments):
            return False
        self._embedded_1LD, self._position_ids = arguments["inputs_embeds"], arguments.get("position_ids")
        return True

    def _is_divisible(self, arguments: Mapping[str, Any]) -> bool:
        embedded, mask = arguments.get("inputs_embeds"), arguments.get("attention_mask")
        remaining_arguments = [value for key, value in arguments.items() if key not in _PER_POSITION]
        return (
            isinstance(embedded, Tensor)
            and embedded.shape[1] == self._length
            and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())))
            and not any(isinstance(value, Tensor | list | tuple) for value in remaining_arguments)
        )

    def _last_logits(self, **arguments: Any) -> Tensor:
        logits_1V: Tensor = self._model(**arguments, return_dict=True).logits[:, -1]
        return logits_1V


def cache_name(plan: GenerationPlan) -> str:
    """The name of the cache among the model's arguments."""
    return next((name for name in CACHE_NAMES if name in plan.arguments), CACHE_NAMES[-1])


class _Stopped(Exception):
    """Ends a forward pass before the decoder."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _stop_before(_decoder: Any, _args: Any, arguments: dict[str, Any]) -> None:
    raise _Stopped(arguments)
