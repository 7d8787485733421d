"""The root module of a policy of transformers: padded answers in, figures per answer token out.

Shapes: A answers, L tokens, T answer tokens, D hidden sizes, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from audiollm.errors import ConfigError
from audiollm.families.adapters import adapter_off
from audiollm.families.listener.encoding import PaddedAnswers
from audiollm.families.listener.shared_recordings import encoded_once
from audiollm.families.logprobs.token_figures import TokenFigures, TokenRequest, token_figures


class AnswerScorer(nn.Module):
    """A model of transformers behind one `forward`, which strategies wrap: every pass goes through it.

    The model's own forward pass computes the logits, of answer tokens alone. Dropout, layer drop and running
    statistics are off always, in training mode too.

    Args:
        model: with an output head (`get_output_embeddings`); a `PeftModel` where an adapter is trained.

    Raises:
        ConfigError: the model has no output head.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        if self._head() is None:
            raise ConfigError(
                f"{type(model).__name__} has no output head", "", "give a model that generates text"
            )
        self._layers = _layers_without_dropout(model)
        for module in model.modules():  # transformers' own lists name parts inside one another
            if getattr(module, "_no_split_modules", None):
                module._no_split_modules = []  # type: ignore[assignment]
        self._no_split_modules = sorted({type(layer).__name__ for layer in self._layers})
        self.train(False)

    def train(self, mode: bool = True) -> AnswerScorer:
        """Switch this module's mode; the model inside stays in eval mode, so that no pass has dropout.

        Its layers alone follow, not their parts: by their mode transformers decides whether activations that are
        checkpointed are computed again.
        """
        super().train(mode)
        self.model.eval()
        for layer in self._layers:
            layer.training = mode
        return self

    def forward(
        self,
        batch: PaddedAnswers,
        request: TokenRequest | None,
        adapter: bool = True,
        reference_TV: Tensor | None = None,
        draw_T: Tensor | None = None,
    ) -> TokenFigures | Tensor:
        """Compute the figures of the batch's answer tokens, or their logits `[T, V]` where `request` is None.

        Args:
            adapter: False computes with the adapter off: the model that the training began from.
            reference_TV, draw_T: as `token_figures` has them.
        """
        with nullcontext() if adapter else adapter_off(self.model):
            logits_TV = self._logits(batch)
        if request is None:
            return logits_TV
        forbidden = batch.forbidden(logits_TV.shape[1])
        return token_figures(logits_TV, batch.target_T, request, reference_TV, draw_T, forbidden)

    @property
    def hidden_size(self) -> int:
        """See `HiddenScorer.hidden_size`."""
        return int(self.model.config.get_text_config().hidden_size)

    def hidden_before_end(self, batch: PaddedAnswers) -> Tensor:
        """Compute the hidden state `[A, D]` that the last token of each answer, which ends its turn, is chosen from."""
        row_A = torch.zeros(batch.num_answers, dtype=torch.long, device=batch.row_T.device)
        row_A = row_A.scatter_reduce(0, batch.answer_T, batch.row_T, "amax")
        return self._hidden(batch, row_A)

    def hidden_at(self, batch: PaddedAnswers, answer_S: Tensor, position_S: Tensor) -> Tensor:
        """Compute the hidden state `[S, D]` at positions of answers, counted from the beginning of their prompts."""
        return self._hidden(batch, answer_S * batch.inputs["input_ids"].shape[1] + position_S)

    def hidden_before(self, batch: PaddedAnswers) -> Tensor:
        """Compute the hidden state `[T, D]` that each answer token is chosen from."""
        return self._hidden(batch, batch.row_T)

    def freeze_head(self) -> None:
        """Take the output head out of what is trained, unless it is the input embedding, too."""
        embedding = self.model.get_input_embeddings().weight
        for parameter in self._head().parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter is embedding)

    def _hidden(self, batch: PaddedAnswers, row_S: Tensor) -> Tensor:
        """Compute the output head's inputs at rows of the flattened `[A * L]`."""
        head_inputs: list[Tensor] = []

        def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_ALD, *more_inputs = inputs
            head_inputs.append(hidden_ALD.flatten(0, 1)[row_S])
            return (hidden_ALD[:, :0], *more_inputs)  # the head has nothing to do

        handle = self._head().register_forward_pre_hook(keep)
        try:
            with encoded_once(self.model, batch.shared, batch.inputs["input_ids"]):
                self.model(**self._inputs(batch), use_cache=False)
        finally:
            handle.remove()
        return head_inputs[0]

    def _inputs(self, batch: PaddedAnswers) -> dict[str, Tensor]:
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        return {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in batch.inputs.items()
        }

    def _logits(self, batch: PaddedAnswers) -> Tensor:
        once = encoded_once(self.model, batch.shared, batch.inputs["input_ids"])
        with once, _head_rows(self._head(), batch.row_T):
            logits_1TV: Tensor = self.model(**self._inputs(batch), use_cache=False).logits
        if logits_1TV.shape[:2] != (1, len(batch.row_T)):
            raise RuntimeError(
                f"{type(self.model).__name__} made logits {list(logits_1TV.shape)} for {len(batch.row_T)} answer tokens"
            )
        return logits_1TV[0]

    def _head(self) -> Any:
        return self.model.get_output_embeddings()


def _layers_without_dropout(model: nn.Module) -> list[nn.Module]:
    """Return the layers of encoder and decoder, after setting the dropout of their own forward passes to 0."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
    return layers


@contextmanager
def _head_rows(head: nn.Module, row_T: Tensor) -> Iterator[None]:
    """Within, the output head sees `[1, T, D]`: the hidden states at `row_T` of the flattened `[A * L]`."""

    def select(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_ALD, *more_inputs = inputs
        return (hidden_ALD.flatten(0, 1)[row_T][None], *more_inputs)

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
