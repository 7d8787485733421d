"""EnCodec's loss balancer: each loss's share of the gradient is its weight, whatever its own scale.

Shapes: L losses, in the order of the weights; B batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tokenizer.quantizers.codebooks import at_least_float32, is_distributed, sum_over_ranks

MEASURED_EVERY = 4
"""Steps from one measurement of the norms to the next: one takes a backward pass of its own for every loss."""
SETTLING_STEPS = 50
"""Steps at the beginning, of the run or of another loss, in all of which the norms are measured."""


def steps_measured(step: int, begin: int) -> int:
    """The number of steps for which the norms are measured at this one; 0: the averages stay.

    Args:
        begin: the step from which on the losses are those of today.
    """
    if step - begin < SETTLING_STEPS:
        return 1
    return MEASURED_EVERY if step % MEASURED_EVERY == 0 else 0


class GradientBalancer(nn.Module):
    """Mixes losses by the norms of their gradients at the model's output (EnCodec, arXiv 2210.13438, section 3.4).

    With g_i the gradient of loss i and n_i the moving average of its norm, the output gets
    total_norm * sum of (weight_i / sum of weights) * g_i / n_i.

    The averages are buffers: they are in checkpoints, and so a resumed run balances as it would have.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        total_norm: float = 1.0,
        decay: float = 0.999,
        epsilon: float = 1e-12,
    ) -> None:
        super().__init__()
        wrong = [name for name, weight in weights.items() if not 0 < weight < float("inf")]
        if wrong or not weights:
            raise ValueError(
                f"balancer weights must be above 0, leave a loss out instead: {wrong or 'none given'}"
            )
        self.weights = dict(weights)
        self.total_norm, self.decay, self.epsilon = total_norm, decay, epsilon
        self.register_buffer("norm_sum_L", torch.zeros(len(weights)))
        self.register_buffer("norm_count_L", torch.zeros(len(weights)))
        self.norm_sum_L: Tensor
        self.norm_count_L: Tensor

    def balance(self, losses: Mapping[str, Tensor], output: Tensor, measured: int = 1) -> Tensor:
        """A scalar whose gradient at `output` is the balanced mix: add other losses, call backward once.

        Arguments:
            losses: scalars computed from `output`. A loss that is left out (no adversary yet) keeps its
                average, and the others share its part. Ranks must give the same losses.
            output: `[B, ...]`, the tensor from which all the losses were computed: of several ranks, this one's
                rows, and each loss this rank's part of the mean over the global batch.
            measured: the number of steps for which the norms are measured (`steps_measured`). 0: the averages are taken
                as they are, and one backward pass is enough for all losses.

        Only the gradient of the result means anything, not its value. A gradient of exactly zero adds nothing
        and stays out of the average, which it would drag to zero (the next real gradient would then be
        blown up). Raises FloatingPointError, on every rank, where a gradient is not finite.
        """
        unknown = [name for name in losses if name not in self.weights]
        if unknown or not losses:
            raise ValueError(
                f"the balancer has weights for {list(self.weights)}; losses given: {list(losses)}"
            )
        if not measured:
            return self._weighted(losses)
        gradients = {name: _gradient(name, loss, output) for name, loss in losses.items()}
        norms_L = self._mean_norms(gradients)
        self._raise_if_not_finite(norms_L)
        self._update(norms_L, measured)
        average_L = self.norm_sum_L / self.norm_count_L.clamp_min(self.epsilon)
        total_weight = sum(self.weights[name] for name in gradients)
        mixed = torch.zeros_like(at_least_float32(output))
        for index, (name, weight) in enumerate(self.weights.items()):
            if name in gradients:
                share = self.total_norm * weight / total_weight
                mixed += gradients[name] * (share / (average_L[index] + self.epsilon))
        # elementwise and in fp32 or more, which autocast leaves alone; the gradient returns in the output's own type
        return (at_least_float32(output) * mixed).sum()

    def average_norms(self) -> dict[str, Tensor]:
        """The moving average of every loss's gradient norm, for the log; 0 for one that was never seen."""
        average_L = self.norm_sum_L / self.norm_count_L.clamp_min(self.epsilon)
        return dict(zip(self.weights, average_L.unbind(), strict=True))

    def _mean_norms(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm of a batch item's gradient, mean over all ranks' items; 0 for a loss that is left out."""
        norms_L = torch.zeros_like(self.norm_sum_L)
        for index, name in enumerate(self.weights):
            if name in gradients:
                norms_L[index] = gradients[name].reshape(len(gradients[name]), -1).norm(dim=1).mean()
        if is_distributed():
            # before the average, not after it as EnCodec does: the buffers are then the same on every rank
            items = next(iter(gradients.values())).shape[0]
            sums = sum_over_ranks(torch.cat([norms_L * items, norms_L.new_tensor([items])]))
            norms_L = sums[:-1] / sums[-1]
        return norms_L

    def _raise_if_not_finite(self, norms_L: Tensor) -> None:
        finite = torch.isfinite(norms_L).tolist()
        broken = [name for name, fine in zip(self.weights, finite, strict=True) if not fine]
        if broken:
            raise FloatingPointError(
                f"the gradient of {', '.join(map(repr, broken))} at the model's output is not finite: "
                "look at this step's batch, or lower the learning rate"
            )

    def _weighted(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The losses over their averages, so that their sum has the balanced gradient; 0 for one never seen."""
        total_weight = sum(self.weights[name] for name in losses)
        averages = self.average_norms()
        shares = {name: self.total_norm * self.weights[name] / total_weight for name in losses}
        factors = {
            name: torch.where(averages[name] > 0, share / (averages[name] + self.epsilon), 0.0)
            for name, share in shares.items()
        }
        return torch.stack([at_least_float32(loss) * factors[name] for name, loss in losses.items()]).sum()

    def _update(self, norms_L: Tensor, steps: int) -> None:
        seen_L = norms_L > 0
        decay_L = torch.where(seen_L, self.decay**steps, 1.0)
        self.norm_sum_L.mul_(decay_L).add_(norms_L, alpha=steps)
        self.norm_count_L.mul_(decay_L).add_(seen_L, alpha=steps)


def _gradient(name: str, loss: Tensor, output: Tensor) -> Tensor:
    """d loss / d output in fp32 (float64 for float64); the graph is kept, since losses may share parts of it."""
    gradient = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, output, retain_graph=True, allow_unused=True)
    if gradient is None:
        raise ValueError(
            f"loss {name!r} does not depend on the output that is balanced: compute it from that tensor, "
            "or add it to the balancer's result with a weight of its own"
        )
    return at_least_float32(gradient.detach())
