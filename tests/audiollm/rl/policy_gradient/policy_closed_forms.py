"""Policy objectives and advantages once more, in plain Python, answer by answer, as their papers write them.

An answer is a list of tokens; the forms take lists of lists of floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

Rows = Sequence[Sequence[float]]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


@dataclass
class PlainAnswer:
    policy: list[float]
    old: list[float]
    reference: list[float]
    entropy: list[float]
    advantage: list[float]
    weight: list[float]
    """Importance weight of each token."""
    kept: list[bool]
    weighted_by_sequence: bool = False

    @property
    def answer_weight(self) -> float:
        """Importance weight of the whole answer."""
        weights = [self.weight[t] for t in self.places]
        return weights[0] if self.weighted_by_sequence and weights else math.prod(weights)

    @property
    def places(self) -> list[int]:
        """Tokens that count."""
        return [t for t, kept in enumerate(self.kept) if kept]

    @property
    def log_ratios(self) -> list[float]:
        return [p - o for p, o in zip(self.policy, self.old, strict=True)]


def ratio(answer: PlainAnswer, t: int, level: str) -> float:
    counted = [answer.log_ratios[place] for place in answer.places]
    if level == "token":
        return math.exp(answer.log_ratios[t])
    return math.exp(sum(counted) if level == "product" else sum(counted) / len(counted))


def clipped(answer: PlainAnswer, t: int, s: Any) -> float:
    r, a = ratio(answer, t, s.level), answer.advantage[t]
    free = r if s.max_ratio is None else min(r, s.max_ratio)
    gain = min(free * a, clip(r, 1 - s.epsilon_low, 1 + s.epsilon_high) * a)
    if s.dual_clip is not None and a < 0:
        gain = max(gain, s.dual_clip * a)
    return -gain


def cispo(answer: PlainAnswer, t: int, s: Any) -> float:
    return -min(ratio(answer, t, "token"), s.max_ratio) * answer.advantage[t] * answer.policy[t]


def sapo(answer: PlainAnswer, t: int, s: Any) -> float:
    a = answer.advantage[t]
    temperature = s.temperature_positive if a > 0 else s.temperature_negative
    return -4 / temperature * sigmoid(temperature * (ratio(answer, t, "token") - 1)) * a


def vespo(answer: PlainAnswer, t: int, s: Any) -> float:
    w = ratio(answer, t, "product") * answer.answer_weight
    a = answer.advantage[t]
    k, decay = (s.k_positive, s.lambda_positive) if a >= 0 else (s.k_negative, s.lambda_negative)
    phi = math.exp(decay) * w**k * math.exp(-decay * w)
    return -phi * a * answer.policy[t]


def token_loss(name: str, answer: PlainAnswer, t: int, settings: Any) -> float:
    if name == "vespo":
        return vespo(answer, t, settings)
    form = {"cispo": cispo, "sapo": sapo}.get(name, clipped)
    return form(answer, t, settings) * answer.weight[t]


def kl(estimator: str, policy: float, reference: float) -> float:
    x = reference / policy  # of probabilities
    return {"k1": -math.log(x), "k2": math.log(x) ** 2 / 2, "k3": x - 1 - math.log(x)}[estimator]


def step_loss(
    name: str,
    answers: Sequence[PlainAnswer],
    settings: Any,
    max_tokens: int,
    kl_weight: float = 0.0,
    kl_settings: Any = None,
    entropy_weight: float = 0.0,
    threshold: float | None = None,
) -> float:
    """The loss of a whole step."""
    level = getattr(settings, "level", "token")
    sums, lengths, bonus = [], [], []
    for answer in answers:
        total = 0.0
        for t in answer.places:
            acts = threshold is None or answer.entropy[t] >= threshold
            if acts:
                total += token_loss(name, answer, t, settings)
                bonus.append(answer.entropy[t])
            if kl_settings is not None:
                term = kl(kl_settings.estimator, math.exp(answer.policy[t]), math.exp(answer.reference[t]))
                if kl_settings.gradient == "ratio_corrected":
                    term *= ratio(answer, t, level)
                total += kl_weight * term
        if answer.places:
            sums.append(total)
            lengths.append(len(answer.places))
    average = settings.average
    loss = {
        "token": sum(sums) / sum(lengths),
        "answer": mean(total / length for total, length in zip(sums, lengths, strict=True)),
        "answer_sum": mean(sums),
        "fixed": sum(sums) / (len(sums) * max_tokens),
    }[average]
    return loss - (entropy_weight * mean(bonus) if bonus else 0.0)


# ------------------------------------------------------------------------------------------- advantages


def deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def normalized(value: float, values: Sequence[float], epsilon: float) -> float:
    spread = deviation(values)
    return (value - mean(values)) / (spread + epsilon) if max(values) > min(values) else 0.0


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """By the double sum of the definition."""
    following = [*values[1:], 0.0]
    errors = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    count = len(errors)
    return [sum((gamma * lam) ** (i - t) * errors[i] for i in range(t, count)) for t in range(count)]


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    count = len(rewards)
    return [sum(gamma ** (i - t) * rewards[i] for i in range(t, count)) for t in range(count)]


def process(
    steps: Sequence[Sequence[tuple[int, float]]], lengths: Sequence[int], epsilon: float
) -> list[list[float]]:
    """Advantages of one group's answers from (last token, reward) of their steps."""
    rewards = [reward for answer in steps for _, reward in answer]
    return [
        [sum(normalized(r, rewards, epsilon) for end, r in answer if end >= t) for t in range(length)]
        for answer, length in zip(steps, lengths, strict=True)
    ]
